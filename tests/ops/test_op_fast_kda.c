/* SPDX-License-Identifier: Apache-2.0 */
/* Fast variants of the ops with state: short convolution and the recurrence of KDA.
 *
 * Against the reference within tolerance; bit for bit between any cuts of a run at multiples of
 * 64, between a batch and each sequence alone, and between journal, replay and advancing. */
#include "tests/ops/check_fast.h"

#define SEQS 3

/* One layer's inputs for `tokens` rows of one sequence, and its state slot. */
struct run {
    uint32_t heads, dim, tokens;
    float *q, *k, *v, *decay, *beta;
};

#define JOURNAL_ROWS 8

static uint64_t slot_floats(const struct run *r)
{
    return (uint64_t)r->heads * r->dim * r->dim +
           JOURNAL_ROWS * op_kda_journal_floats(r->heads, r->dim);
}

static struct run make_run(struct check *c, uint32_t heads, uint32_t dim, uint32_t tokens,
                           double decay, struct rng *rng)
{
    size_t count = (size_t)tokens * heads * dim;
    struct run r = {heads, dim, tokens, NULL, NULL, NULL, NULL, NULL};
    r.q = check_random(c, count, rng, 1 / sqrt(dim));
    r.k = check_random(c, count, rng, 1.7 / sqrt(dim));
    r.v = check_random(c, count, rng, 1);
    r.decay = check_random(c, count, rng, 1);
    r.beta = check_random(c, (size_t)tokens * heads, rng, 1);
    for (size_t i = 0; i < count; i++) /* from nearly none to nearly `decay` */
        r.decay[i] = (float)(decay * (0.5 + 0.4999 * r.decay[i]));
    for (size_t i = 0; i < (size_t)tokens * heads; i++)
        r.beta[i] = 0.5f + 0.5f * r.beta[i];
    return r;
}

/* Rows [from, from + count) of a run as one sequence of a launch. */
static void kda_rows(struct check *c, const struct op_table *ops, const struct run *r,
                     const struct op_seq *seq, uint32_t from, float *o)
{
    uint64_t inner = (uint64_t)r->heads * r->dim, at = from * inner;
    CHECK_RUN(c, ops, kda, .seqs = seq, .q = r->q + at, .k = r->k + at, .v = r->v + at,
              .qkv_stride = inner, .log_decay = r->decay + at,
              .beta = r->beta + (uint64_t)from * r->heads, .o = o + at, .state_offset = 0,
              .journal_offset = inner * r->dim * sizeof(float), .seq_count = 1,
              .row_count = seq->row_count, .heads = r->heads, .dim = r->dim,
              .journal_rows = JOURNAL_ROWS);
}

static void run_cut(struct check *c, const struct op_table *ops, const struct run *r, uint32_t cut,
                    float *slot, float *o)
{
    for (uint32_t at = 0; at < r->tokens; at += cut) {
        struct op_seq seq = {.row_count = r->tokens - at < cut ? r->tokens - at : cut,
                             .position_start = at,
                             .fresh = at == 0,
                             .slot = (uint8_t *)slot};
        kda_rows(c, ops, r, &seq, at, o);
    }
}

static void kda_case(struct rng *rng, uint32_t heads, uint32_t dim, uint32_t tokens, double decay)
{
    struct check c = {.ctx = {fast_split, rng}};
    struct run r = make_run(&c, heads, dim, tokens, decay, rng);
    uint64_t inner = (uint64_t)heads * dim, floats = slot_floats(&r);
    size_t count = (size_t)tokens * inner;
    float *s0 = check_words(&c, floats), *s1 = check_words(&c, floats);
    float *s2 = check_words(&c, floats), *o0 = check_words(&c, count);
    float *o1 = check_words(&c, count), *o2 = check_words(&c, count);
    run_cut(&c, &fast_ref, &r, tokens, s0, o0);
    run_cut(&c, &fast_table, &r, tokens, s1, o1);
    fast_close("kda o", o1, o0, count, 2e-5, 0.3);
    fast_close("kda state", s1, s0, inner * dim, 2e-5, 0.3);
    static const uint32_t cuts[] = {64, 128, 192};
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        run_cut(&c, &fast_table, &r, cuts[i], s2, o2);
        fast_same("kda slices", o2, o1, count * sizeof(float));
        fast_same("kda slices' state", s2, s1, inner * dim * sizeof(float));
    }
    run_cut(&c, &fast_table, &r, 1, s2, o2); /* the recurrent form alone */
    fast_close("kda row by row", o2, o0, count, 2e-5, 0.3);
    check_end(&c);
}

static void run_kda(struct rng *rng)
{
    kda_case(rng, 1, 1, 20, -5);
    kda_case(rng, 2, 12, 37, -0.1);
    kda_case(rng, 2, 32, 200, -0.5);
    kda_case(rng, 1, 40, 150, -5);
    kda_case(rng, 1, 128, 257, -0.05);
    kda_case(rng, 1, 128, 130, -5);
    kda_case(rng, 1, 64, 64, -20); /* beyond the chunked form's range */
}

/* A verify step leaves S alone; replaying accepted rows gives what advancing would have given. */
static void run_journal(struct rng *rng)
{
    enum { HEADS = 2, DIM = 40, TOKENS = 24, VERIFY = 5 };
    struct check c = {.ctx = {fast_split, rng}};
    struct run r = make_run(&c, HEADS, DIM, TOKENS, -1, rng);
    uint64_t inner = HEADS * DIM, state = inner * DIM, floats = slot_floats(&r);
    float *slot = check_words(&c, floats), *want = check_words(&c, floats);
    float *o = check_words(&c, TOKENS * inner), *o2 = check_words(&c, TOKENS * inner);
    run_cut(&c, &fast_table, &r, 1, want, o);
    for (uint32_t accepted = 0; accepted <= VERIFY; accepted++) {
        struct op_seq seq = {.slot = (uint8_t *)slot};
        uint32_t at = 0, replay = 0;
        while (at + VERIFY <= TOKENS) {
            seq = (struct op_seq){.slot = (uint8_t *)slot,
                                  .row_count = VERIFY,
                                  .position_start = at,
                                  .fresh = at == 0 && replay == 0,
                                  .replay_count = replay,
                                  .journal = 1};
            kda_rows(&c, &fast_table, &r, &seq, at, o2);
            fast_same("kda verify", o2 + at * inner, o + at * inner,
                      VERIFY * inner * sizeof(float));
            replay = accepted;
            at += accepted;
            if (accepted == 0)
                break;
        }
        for (; at < TOKENS; at++, replay = 0) {
            seq = (struct op_seq){.slot = (uint8_t *)slot,
                                  .row_count = 1,
                                  .position_start = at,
                                  .fresh = at == 0,
                                  .replay_count = replay};
            kda_rows(&c, &fast_table, &r, &seq, at, o2);
        }
        fast_same("kda after replay", o2, o, TOKENS * inner * sizeof(float));
        fast_same("kda state after replay", slot, want, state * sizeof(float));
    }
    check_end(&c);
}

/* Sequences of very different lengths in one launch. */
static void run_batch(struct rng *rng)
{
    enum { HEADS = 2, DIM = 32 };
    static const uint32_t counts[SEQS] = {1, 100, 17}, starts[SEQS] = {5, 0, 48};
    struct check c = {.ctx = {fast_split, rng}};
    uint32_t rows = 0;
    for (int s = 0; s < SEQS; s++)
        rows += counts[s];
    struct run r = make_run(&c, HEADS, DIM, rows, -2, rng);
    uint64_t inner = HEADS * DIM, floats = slot_floats(&r);
    float *o = check_words(&c, rows * inner), *o2 = check_words(&c, rows * inner);
    struct op_seq seqs[SEQS];
    float *slots[SEQS], *alone[SEQS];
    uint32_t at = 0;
    for (int s = 0; s < SEQS; s++) {
        slots[s] = check_random(&c, floats, rng, 0.2);
        alone[s] = check_words(&c, floats);
        memcpy(alone[s], slots[s], floats * sizeof(float));
        seqs[s] = (struct op_seq){.row_begin = at,
                                  .row_count = counts[s],
                                  .position_start = starts[s],
                                  .fresh = starts[s] == 0,
                                  .slot = (uint8_t *)slots[s]};
        at += counts[s];
    }
    CHECK_RUN(&c, &fast_table, kda, .seqs = seqs, .q = r.q, .k = r.k, .v = r.v, .qkv_stride = inner,
              .log_decay = r.decay, .beta = r.beta, .o = o,
              .journal_offset = inner * DIM * sizeof(float), .seq_count = SEQS, .row_count = rows,
              .heads = HEADS, .dim = DIM, .journal_rows = JOURNAL_ROWS);
    for (int s = 0; s < SEQS; s++) {
        struct op_seq seq = seqs[s];
        seq.row_begin = 0;
        seq.slot = (uint8_t *)alone[s];
        kda_rows(&c, &fast_table, &r, &seq, seqs[s].row_begin, o2);
        fast_same("kda state alone", alone[s], slots[s], floats * sizeof(float));
    }
    fast_same("kda alone", o2, o, rows * inner * sizeof(float));
    check_end(&c);
}

static void conv_case(struct rng *rng, uint32_t channels, uint32_t taps, uint32_t tokens)
{
    enum { RING = 11 };
    struct check c = {.ctx = {fast_split, rng}};
    size_t count = (size_t)tokens * channels;
    float *x = check_random(&c, count, rng, 2), *w = check_random(&c, channels * taps, rng, 1);
    float *ring[3], *y[3];
    static const uint32_t cuts[3] = {1000, 1, 7};
    for (int t = 0; t < 3; t++) {
        ring[t] = check_words(&c, RING * channels);
        y[t] = check_words(&c, count);
        for (uint32_t at = 0; at < tokens; at += cuts[t]) {
            struct op_seq seq = {.row_count = tokens - at < cuts[t] ? tokens - at : cuts[t],
                                 .position_start = at,
                                 .fresh = at == 0,
                                 .slot = (uint8_t *)ring[t]};
            CHECK_RUN(&c, t == 0 ? &fast_ref : &fast_table, short_conv, .seqs = &seq,
                      .x = x + (size_t)at * channels, .w = w, .y = y[t] + (size_t)at * channels,
                      .seq_count = 1, .row_count = seq.row_count, .channels = channels,
                      .taps = taps, .ring_rows = RING);
        }
    }
    fast_close("short_conv", y[1], y[0], count, 2e-6, 0.1);
    fast_same("short_conv slices", y[2], y[1], count * sizeof(float));
    if (tokens >= RING) {
        fast_same("short_conv ring", ring[1], ring[0], RING * channels * sizeof(float));
        fast_same("short_conv ring", ring[2], ring[0], RING * channels * sizeof(float));
    }
    check_end(&c);
}

static void run_conv(struct rng *rng)
{
    conv_case(rng, 1, 1, 3);
    conv_case(rng, 70, 4, 40);
    conv_case(rng, 192, 3, 9);
    conv_case(rng, 33, 8, 20);
}

#define TEST(name)                                                                                 \
    static void test_##name(void **state)                                                          \
    {                                                                                              \
        (void)state;                                                                               \
        fast_each(run_##name);                                                                     \
    }
TEST(kda)
TEST(journal)
TEST(batch)
TEST(conv)

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kda), cmocka_unit_test(test_journal),
                                       cmocka_unit_test(test_batch), cmocka_unit_test(test_conv)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
