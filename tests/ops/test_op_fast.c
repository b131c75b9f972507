/* SPDX-License-Identifier: Apache-2.0 */
/* Fast variants of the ops without state: within tolerance of the reference over nasty shapes,
 * and row-invariant bit for bit, whatever the split over threads. */
#include "tests/ops/check_fast.h"

#include "kernels/op_kv_row.h"

#define ROWS_MAX 40

/* Largest sum of |products| decides what an f32 sum may lose. */
static void linear_case(struct rng *rng, enum op_dtype dtype, uint32_t rows, uint32_t in,
                        uint32_t out)
{
    struct check k = {.ctx = {fast_split, rng}};
    float *x = check_random(&k, (size_t)rows * in, rng, 1);
    struct op_weight w = fast_weight(&k, (size_t)in * out, dtype, rng);
    float *y = check_words(&k, (size_t)rows * out), *z = check_words(&k, (size_t)rows * out);
    CHECK_RUN(&k, &fast_ref, linear, .x = x, .w = w, .y = y, .rows = rows, .in = in, .out = out,
              .x_stride = in, .y_stride = out);
    CHECK_RUN(&k, &fast_table, linear, .x = x, .w = w, .y = z, .rows = rows, .in = in, .out = out,
              .x_stride = in, .y_stride = out);
    fast_close("linear", z, y, (size_t)rows * out, 1e-5, sqrt(in));
    for (uint32_t r = 0; r < rows; r++) { /* alone, then with a neighbour */
        uint32_t some = rows - r < 2 ? 1 : 1 + rng_below(rng, 2);
        CHECK_RUN(&k, &fast_table, linear, .x = x + (size_t)r * in, .w = w, .y = y, .rows = some,
                  .in = in, .out = out, .x_stride = in, .y_stride = out);
        fast_same("linear alone", y, z + (size_t)r * out, some * out * sizeof(float));
    }
    check_end(&k);
}

static void run_linear(struct rng *rng)
{
    static const uint32_t ins[] = {1, 7, 8, 9, 64, 511, 512, 513, 1030, 1536, 2600, 4608};
    static const uint32_t outs[] = {1, 2, 3, 4, 5, 33};
    for (int dtype = OP_F32; dtype <= OP_F16; dtype++)
        for (size_t i = 0; i < sizeof(ins) / sizeof(ins[0]); i++)
            for (size_t o = 0; o < sizeof(outs) / sizeof(outs[0]); o++)
                linear_case(rng, (enum op_dtype)dtype, 1 + rng_below(rng, 9), ins[i], outs[o]);
    linear_case(rng, OP_BF16, 151, 520, 9); /* beyond one block of packed rows */
}

static void run_grouped(struct rng *rng)
{
    enum { EXPERTS = 5, IN = 70, OUT = 13, PAIRS = 33, ROWS = 17 };
    struct check k = {.ctx = {fast_split, rng}};
    struct op_weight w[EXPERTS];
    uint32_t *offsets = check_words(&k, EXPERTS + 1), *x_rows = check_words(&k, PAIRS);
    float *x = check_random(&k, ROWS * IN, rng, 1);
    float *y = check_words(&k, PAIRS * OUT), *z = check_words(&k, PAIRS * OUT);
    const uint32_t counts[EXPERTS] = {0, 1, 2, 29, 1};
    offsets[0] = 0;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        w[e] = fast_weight(&k, IN * OUT, (enum op_dtype)(e % 3), rng);
        offsets[e + 1] = offsets[e] + counts[e];
    }
    for (uint32_t p = 0; p < PAIRS; p++)
        x_rows[p] = rng_below(rng, ROWS);
    for (int table = 0; table < 2; table++) {
        const struct op_table *ops = table == 0 ? &fast_ref : &fast_table;
        CHECK_RUN(&k, ops, grouped_linear, .x = x, .w = w, .y = table == 0 ? y : z,
                  .offsets = offsets, .x_rows = x_rows, .experts = EXPERTS, .pairs_max = PAIRS,
                  .in = IN, .out = OUT, .x_stride = IN, .y_stride = OUT);
    }
    fast_close("grouped_linear", z, y, PAIRS * OUT, 1e-5, sqrt(IN));
    for (uint32_t e = 0; e < EXPERTS; e++)
        for (uint32_t p = offsets[e]; p < offsets[e + 1]; p++) {
            CHECK_RUN(&k, &fast_table, linear, .x = x + x_rows[p] * IN, .w = w[e], .y = y,
                      .rows = 1, .in = IN, .out = OUT, .x_stride = IN, .y_stride = OUT);
            fast_same("grouped_linear alone", y, z + p * OUT, OUT * sizeof(float));
        }
    check_end(&k);
}

static void norm_case(struct rng *rng, uint32_t n, double scale)
{
    enum { ROWS = 5, GROUPS = 2 };
    struct check k = {.ctx = {fast_split, rng}};
    size_t count = (size_t)ROWS * GROUPS * n;
    uint64_t stride = (uint64_t)GROUPS * n;
    float *x = check_random(&k, count, rng, scale), *w = check_random(&k, n, rng, 1);
    float *b = check_random(&k, n, rng, 1);
    float *y = check_words(&k, count), *z = check_words(&k, count);
    CHECK_RUN(&k, &fast_ref, rms_norm, .x = x, .w = w, .y = y, .rows = ROWS, .groups = GROUPS,
              .n = n, .x_stride = stride, .y_stride = stride, .eps = 1e-5);
    CHECK_RUN(&k, &fast_table, rms_norm, .x = x, .w = w, .y = z, .rows = ROWS, .groups = GROUPS,
              .n = n, .x_stride = stride, .y_stride = stride, .eps = 1e-5);
    fast_close("rms_norm", z, y, count, 2e-6, 1);
    CHECK_RUN(&k, &fast_ref, l2norm, .x = x, .y = y, .rows = ROWS, .groups = GROUPS, .n = n,
              .x_stride = stride, .y_stride = stride, .eps = 1e-6, .scale = 0.25);
    CHECK_RUN(&k, &fast_table, l2norm, .x = x, .y = z, .rows = ROWS, .groups = GROUPS, .n = n,
              .x_stride = stride, .y_stride = stride, .eps = 1e-6, .scale = 0.25);
    fast_close("l2norm", z, y, count, 2e-6, 0.1);
    CHECK_RUN(&k, &fast_ref, layer_norm, .x = x, .w = w, .b = b, .y = y, .rows = ROWS * GROUPS,
              .n = n, .x_stride = n, .y_stride = n, .eps = 1e-6);
    CHECK_RUN(&k, &fast_table, layer_norm, .x = x, .w = w, .b = b, .y = z, .rows = ROWS * GROUPS,
              .n = n, .x_stride = n, .y_stride = n, .eps = 1e-6);
    fast_close("layer_norm", z, y, count, n == 1 ? 1e-2 : 5e-6, 1);
    CHECK_RUN(&k, &fast_table, rms_norm, .x = x, .w = w, .y = x, .rows = ROWS, .groups = GROUPS,
              .n = n, .x_stride = stride, .y_stride = stride, .eps = 1e-5); /* in place */
    CHECK_RUN(&k, &fast_ref, rms_norm, .x = x, .w = w, .y = y, .rows = 0, .groups = GROUPS, .n = n,
              .x_stride = stride, .y_stride = stride, .eps = 1e-5);
    check_end(&k);
}

static void run_norms(struct rng *rng)
{
    static const uint32_t ns[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 128, 1000};
    for (size_t i = 0; i < sizeof(ns) / sizeof(ns[0]); i++) {
        norm_case(rng, ns[i], 3);
        norm_case(rng, ns[i], 1e-4);
    }
}

static void elementwise_case(struct rng *rng, uint32_t n, double scale)
{
    enum { ROWS = 6, TOP_K = 3 };
    struct check k = {.ctx = {fast_split, rng}};
    float *gate = check_random(&k, (size_t)ROWS * TOP_K * n, rng, scale);
    float *up = check_random(&k, (size_t)ROWS * n, rng, scale);
    float *weights = check_random(&k, ROWS * TOP_K, rng, 1);
    uint32_t *pair_of = check_words(&k, ROWS * TOP_K);
    float *y = check_words(&k, (size_t)ROWS * n), *z = check_words(&k, (size_t)ROWS * n);
    CHECK_RUN(&k, &fast_ref, swiglu, .gate = gate, .up = up, .y = y, .rows = ROWS, .n = n,
              .limit = 7);
    CHECK_RUN(&k, &fast_table, swiglu, .gate = gate, .up = up, .y = z, .rows = ROWS, .n = n,
              .limit = 7);
    fast_close("swiglu", z, y, (size_t)ROWS * n, 2e-6, 1e-3);
    CHECK_RUN(&k, &fast_table, swiglu, .gate = gate + 2 * n, .up = up + 2 * n, .y = y, .rows = 1,
              .n = n, .limit = 7);
    fast_same("swiglu alone", y, z + 2 * n, n * sizeof(float));
    for (uint32_t i = 0; i < ROWS * TOP_K; i++)
        pair_of[i] = (i * 7) % (ROWS * TOP_K);
    CHECK_RUN(&k, &fast_ref, moe_combine, .out = gate, .pair_of = pair_of, .weights = weights,
              .shared = up, .y = y, .rows = ROWS, .top_k = TOP_K, .hidden = n);
    CHECK_RUN(&k, &fast_table, moe_combine, .out = gate, .pair_of = pair_of, .weights = weights,
              .shared = up, .y = z, .rows = ROWS, .top_k = TOP_K, .hidden = n);
    fast_close("moe_combine", z, y, (size_t)ROWS * n, 2e-6, scale);
    check_end(&k);
}

static void run_elementwise(struct rng *rng)
{
    static const uint32_t ns[] = {1, 8, 13, 16, 64, 77};
    for (size_t i = 0; i < sizeof(ns) / sizeof(ns[0]); i++) {
        elementwise_case(rng, ns[i], 1);
        elementwise_case(rng, ns[i], 200); /* clamps and the ends of the exponential */
    }
    struct check k = {0};
    float gate[] = {INFINITY, NAN, 1e30f, -1e30f, 1e-40f, 3, -104.5f, -88.2f, 88.9f};
    float up[] = {INFINITY, 1, -1e30f, 1e30f, 1e-40f, NAN, 1, 1, 1}, y[9], z[9];
    CHECK_RUN(&k, &fast_ref, swiglu, .gate = gate, .up = up, .y = y, .rows = 1, .n = 9,
              .limit = 10);
    CHECK_RUN(&k, &fast_table, swiglu, .gate = gate, .up = up, .y = z, .rows = 1, .n = 9,
              .limit = 10);
    fast_close("swiglu extremes", z, y, 9, 2e-6, 1e-30);
    assert_true(z[3] == 0 && isnan(z[1]) && isnan(z[5]));
}

static void gates_case(struct rng *rng, uint32_t heads, uint32_t dim)
{
    enum { ROWS = 4 };
    struct check k = {.ctx = {fast_split, rng}};
    size_t count = (size_t)ROWS * heads * dim;
    float *u = check_random(&k, count, rng, 30), *o = check_random(&k, count, rng, 2);
    float *b = check_random(&k, ROWS * heads, rng, 20), *a_log = check_random(&k, heads, rng, 3);
    float *bias = check_random(&k, heads * dim, rng, 1), *w = check_random(&k, dim, rng, 1);
    float *g = check_words(&k, count), *h = check_words(&k, count);
    float *beta = check_words(&k, ROWS * heads), *beta2 = check_words(&k, ROWS * heads);
    CHECK_RUN(&k, &fast_ref, kda_gates, .u = u, .b = b, .a_log = a_log, .dt_bias = bias,
              .log_decay = g, .beta = beta, .rows = ROWS, .heads = heads, .dim = dim,
              .lower_bound = -5);
    CHECK_RUN(&k, &fast_table, kda_gates, .u = u, .b = b, .a_log = a_log, .dt_bias = bias,
              .log_decay = h, .beta = beta2, .rows = ROWS, .heads = heads, .dim = dim,
              .lower_bound = -5);
    fast_close("kda_gates", h, g, count, 1e-5, 1e-2);
    fast_close("kda_gates beta", beta2, beta, ROWS * heads, 2e-6, 1e-3);
    CHECK_RUN(&k, &fast_ref, kda_out, .o = o, .gate = u, .w = w, .y = g, .rows = ROWS,
              .heads = heads, .dim = dim, .eps = 1e-5);
    CHECK_RUN(&k, &fast_table, kda_out, .o = o, .gate = u, .w = w, .y = h, .rows = ROWS,
              .heads = heads, .dim = dim, .eps = 1e-5);
    fast_close("kda_out", h, g, count, 3e-6, 1e-2);
    check_end(&k);
}

static void run_gates(struct rng *rng)
{
    gates_case(rng, 1, 1);
    gates_case(rng, 3, 12);
    gates_case(rng, 2, 32);
    gates_case(rng, 2, 128);
}

static void mhc_case(struct rng *rng, enum op_dtype dtype, uint32_t rows, uint32_t hidden)
{
    struct check k = {.ctx = {fast_split, rng}};
    size_t streams = (size_t)rows * 4 * hidden;
    float *h = check_random(&k, streams, rng, 4),
          *y = check_random(&k, (size_t)rows * hidden, rng, 1);
    struct op_weight fn = fast_weight(&k, (size_t)OP_MHC_ROWS * 4 * hidden, dtype, rng);
    float *scale = check_random(&k, 3, rng, 1), *base = check_random(&k, OP_MHC_ROWS, rng, 2);
    float *out[2][4];
    const size_t widths[4] = {4, 4, 16, hidden};
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < 4; i++)
            out[t][i] = check_words(&k, rows * widths[i]);
    for (int t = 0; t < 2; t++)
        CHECK_RUN(&k, t == 0 ? &fast_ref : &fast_table, mhc_pre, .h = h, .fn = fn, .scale = scale,
                  .base = base, .pre = out[t][0], .post = out[t][1], .mix = out[t][2],
                  .x = out[t][3], .rows = rows, .hidden = hidden, .sinkhorn_iters = 20,
                  .hc_eps = 1e-6, .norm_eps = 1e-5);
    for (int i = 0; i < 4; i++)
        fast_close("mhc_pre", out[1][i], out[0][i], rows * widths[i], 2e-5, 1);
    for (uint32_t r = 0; r < rows; r++) {
        CHECK_RUN(&k, &fast_table, mhc_pre, .h = h + (size_t)r * 4 * hidden, .fn = fn,
                  .scale = scale, .base = base, .pre = out[0][0], .post = out[0][1],
                  .mix = out[0][2], .x = out[0][3], .rows = 1, .hidden = hidden,
                  .sinkhorn_iters = 20, .hc_eps = 1e-6, .norm_eps = 1e-5);
        for (int i = 0; i < 4; i++)
            fast_same("mhc_pre alone", out[0][i], out[1][i] + r * widths[i],
                      widths[i] * sizeof(float));
    }
    float *h2 = check_words(&k, streams), *z = check_words(&k, (size_t)rows * hidden);
    memcpy(h2, h, streams * sizeof(float));
    CHECK_RUN(&k, &fast_table, mhc_post, .h = h2, .y = y, .post = out[1][1], .mix = out[1][2],
              .rows = rows, .hidden = hidden);
    CHECK_RUN(&k, &fast_ref, mhc_post, .h = h, .y = y, .post = out[1][1], .mix = out[1][2],
              .rows = rows, .hidden = hidden);
    fast_close("mhc_post", h2, h, streams, 2e-6, 4);
    CHECK_RUN(&k, &fast_ref, stream_mean, .h = h, .z = out[0][3], .rows = rows, .hidden = hidden);
    CHECK_RUN(&k, &fast_table, stream_mean, .h = h, .z = z, .rows = rows, .hidden = hidden);
    fast_close("stream_mean", z, out[0][3], (size_t)rows * hidden, 2e-6, 4);
    check_end(&k);
}

static void run_mhc(struct rng *rng)
{
    mhc_case(rng, OP_F32, 1, 1);
    mhc_case(rng, OP_BF16, 2, 33);
    mhc_case(rng, OP_F32, 26, 128);
    mhc_case(rng, OP_F16, 5, 200);
}

struct mla_shape {
    uint32_t heads, nope, v_dim, latent, tokens, rows;
};

/* count rows of random values as the pages of that type hold them. */
static uint8_t *random_rows(struct check *k, enum kv_row type, bool index, uint32_t count,
                            uint32_t dim, struct rng *rng)
{
    float *x = check_random(k, (size_t)count * dim, rng, 1);
    if (index)
        memset(x, 0, 2 * dim * sizeof(float)); /* pools of zeros score exactly zero */
    if (type == KV_ROW_F32)
        return (uint8_t *)x;
    uint64_t bytes = kv_row_bytes(type, dim);
    uint8_t *rows = check_words(k, (count * bytes + 3) / 4);
    for (uint32_t r = 0; r < count; r++)
        (index ? op_index_row_store : op_latent_row_store)(type, x + (size_t)r * dim, dim,
                                                           rows + r * bytes);
    return rows;
}

static void mla_case(struct rng *rng, enum op_dtype dtype, enum kv_row type,
                     const struct mla_shape *s)
{
    enum { BLOCK = 4 };
    struct check k = {.ctx = {fast_split, rng}};
    uint32_t blocks[64], seq_of[ROWS_MAX] = {0}, items = s->rows * s->heads;
    size_t wide = (size_t)items * s->latent;
    struct op_weight kv_b =
        fast_weight(&k, (size_t)s->heads * (s->nope + s->v_dim) * s->latent, dtype, rng);
    float *q = check_random(&k, (size_t)items * s->nope, rng, 1);
    uint8_t *memory = random_rows(&k, type, false, 64 * BLOCK, s->latent, rng);
    uint32_t *selected = check_words(&k, (size_t)s->rows * s->tokens);
    uint32_t *counts = check_words(&k, s->rows);
    double *work = (double *)check_words(&k, (size_t)2 * items * s->tokens);
    struct op_pages pages = {.base = memory,
                             .block_stride = BLOCK * kv_row_bytes(type, s->latent),
                             .rows_per_block = BLOCK,
                             .type = type};
    struct op_seq seq = {.row_count = s->rows, .blocks = blocks};
    for (uint32_t b = 0; b < 64; b++)
        blocks[b] = (b * 29 + 5) % 64;
    for (uint32_t r = 0; r < s->rows; r++) {
        counts[r] = 0;
        for (uint32_t p = 0; p < s->tokens; p++)
            if (r == 0 || rng_below(rng, 3) != 0 || p + 1 == s->tokens)
                selected[r * s->tokens + counts[r]++] = p;
    }
    float *abs[2], *attended[2], *o[2];
    for (int t = 0; t < 2; t++) {
        const struct op_table *ops = t == 0 ? &fast_ref : &fast_table;
        abs[t] = check_words(&k, wide);
        attended[t] = check_words(&k, wide);
        o[t] = check_words(&k, (size_t)items * s->v_dim);
        CHECK_RUN(&k, ops, mla_absorb, .q = q, .kv_b = kv_b, .q_abs = abs[t], .rows = s->rows,
                  .heads = s->heads, .nope = s->nope, .v_dim = s->v_dim, .latent = s->latent);
        CHECK_RUN(&k, ops, mla_attend, .seqs = &seq, .seq_of = seq_of, .q_abs = abs[t],
                  .pages = pages, .selected = selected, .selected_count = counts,
                  .o_abs = attended[t], .work = work, .rows = s->rows, .heads = s->heads,
                  .latent = s->latent, .selected_stride = s->tokens, .scale = 0.1);
        CHECK_RUN(&k, ops, mla_value, .o_abs = attended[t], .kv_b = kv_b, .o = o[t],
                  .rows = s->rows, .heads = s->heads, .nope = s->nope, .v_dim = s->v_dim,
                  .latent = s->latent);
    }
    fast_close("mla_absorb", abs[1], abs[0], wide, 1e-5, sqrt(s->nope));
    fast_close("mla_attend", attended[1], attended[0], wide, 1e-4, 0.5);
    fast_close("mla_value", o[1], o[0], (size_t)items * s->v_dim, 1e-4, sqrt(s->latent));
    for (uint32_t r = 0; r < s->rows; r++) { /* each row alone */
        uint64_t at = (uint64_t)r * s->heads;
        CHECK_RUN(&k, &fast_table, mla_absorb, .q = q + at * s->nope, .kv_b = kv_b, .q_abs = abs[0],
                  .rows = 1, .heads = s->heads, .nope = s->nope, .v_dim = s->v_dim,
                  .latent = s->latent);
        fast_same("mla_absorb alone", abs[0], abs[1] + at * s->latent,
                  s->heads * s->latent * sizeof(float));
        CHECK_RUN(&k, &fast_table, mla_attend, .seqs = &seq, .seq_of = seq_of, .q_abs = abs[0],
                  .pages = pages, .selected = selected + r * s->tokens,
                  .selected_count = counts + r, .o_abs = attended[0], .work = work, .rows = 1,
                  .heads = s->heads, .latent = s->latent, .selected_stride = s->tokens,
                  .scale = 0.1);
        fast_same("mla_attend alone", attended[0], attended[1] + at * s->latent,
                  s->heads * s->latent * sizeof(float));
        CHECK_RUN(&k, &fast_table, mla_value, .o_abs = attended[0], .kv_b = kv_b, .o = o[0],
                  .rows = 1, .heads = s->heads, .nope = s->nope, .v_dim = s->v_dim,
                  .latent = s->latent);
        fast_same("mla_value alone", o[0], o[1] + at * s->v_dim,
                  s->heads * s->v_dim * sizeof(float));
    }
    check_end(&k);
}

static void run_mla(struct rng *rng)
{
    static const struct mla_shape shapes[] = {{1, 1, 1, 1, 1, 1},
                                              {3, 10, 6, 20, 13, 2},
                                              {9, 16, 12, 32, 50, 5},
                                              {4, 64, 64, 128, 200, 3},
                                              {12, 8, 8, 600, 30, 4}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        for (int dtype = OP_F32; dtype <= OP_F16; dtype++)
            mla_case(rng, (enum op_dtype)dtype, (enum kv_row)dtype, &shapes[i]);
}

static void index_case(struct rng *rng, enum kv_row type, uint32_t heads, uint32_t dim,
                       uint32_t pools)
{
    enum { KPOOL = 4, KEPT = 3, ROWS = 5, BLOCK = 8 };
    struct check k = {.ctx = {fast_split, rng}};
    uint32_t seq_of[ROWS] = {0}, blocks[256];
    float *q = check_random(&k, (size_t)ROWS * heads * dim, rng, 1);
    float *w = check_random(&k, ROWS * heads, rng, 1);
    uint8_t *keys = random_rows(&k, type, true, 256 * BLOCK, dim, rng);
    double *y = (double *)check_words(&k, (size_t)2 * ROWS * (pools + 2));
    double *z = (double *)check_words(&k, (size_t)2 * ROWS * (pools + 2));
    for (uint32_t b = 0; b < 256; b++)
        blocks[b] = b ^ 3;
    struct op_pages pages = {.base = keys,
                             .block_stride = BLOCK * kv_row_bytes(type, dim),
                             .rows_per_block = BLOCK,
                             .type = type};
    struct op_seq seq = {
        .row_count = ROWS, .position_start = pools * KPOOL - ROWS, .blocks = blocks};
    for (int t = 0; t < 2; t++)
        CHECK_RUN(&k, t == 0 ? &fast_ref : &fast_table, index_score, .seqs = &seq, .seq_of = seq_of,
                  .q = q, .w = w, .pages = pages, .score = t == 0 ? y : z,
                  .score_stride = pools + 2, .row_first = 1, .row_count = ROWS - 1, .heads = heads,
                  .dim = dim, .kpool = KPOOL, .pools_kept = KEPT);
    for (uint32_t i = 0; i < (ROWS - 1) * (pools + 2); i++) {
        if (isnan(y[i]) != isnan(z[i]))
            fail_msg("%s index_score[%u]: written in other places", fast_name, i);
        if (!isnan(y[i]) && !(fabs(y[i] - z[i]) <= 1e-5 * fmax(1, fabs(y[i]))))
            fail_msg("%s index_score[%u]: %g, expected %g", fast_name, i, z[i], y[i]);
        if (y[i] == 0)
            assert_true(z[i] == 0);
    }
    check_end(&k);
}

static void run_index(struct rng *rng)
{
    for (unsigned type = KV_ROW_F32; type < KV_ROW_COUNT; type++) {
        index_case(rng, (enum kv_row)type, 1, 1, 4);
        index_case(rng, (enum kv_row)type, 4, 16, 9);
        index_case(rng, (enum kv_row)type, 7, 40, 70);
        index_case(rng, (enum kv_row)type, 32, 128, 1100);
    }
}

#define TEST(name)                                                                                 \
    static void test_##name(void **state)                                                          \
    {                                                                                              \
        (void)state;                                                                               \
        fast_each(run_##name);                                                                     \
    }
TEST(linear)
TEST(grouped)
TEST(norms)
TEST(elementwise)
TEST(gates)
TEST(mhc)
TEST(mla)
TEST(index)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear), cmocka_unit_test(test_grouped),
        cmocka_unit_test(test_norms),  cmocka_unit_test(test_elementwise),
        cmocka_unit_test(test_gates),  cmocka_unit_test(test_mhc),
        cmocka_unit_test(test_mla),    cmocka_unit_test(test_index)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
