/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/model_parts.h"

#include <string.h>

#include "lib/base/mem.h"
#include "lib/model/weights.h"

/* Work space of scores and of attention weights: bounded whatever the context. */
#define SCORE_WORK_BYTES  (16u << 20)
#define ATTEND_WORK_BYTES (16u << 20)

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static uint32_t work_rows(uint64_t row_bytes, uint64_t bytes, uint32_t rows_max)
{
    uint64_t rows = bytes / row_bytes;
    return rows == 0 ? 1 : rows > rows_max ? rows_max : (uint32_t)rows;
}

static float *take_rows(uint64_t rows, uint64_t width)
{
    return mem_take_array(rows * width, sizeof(float));
}

static void take_mixer(struct model_cursor *c, uint64_t rows)
{
    const struct model *m = c->model;
    const struct model_config *config = &m->config;
    struct cursor_buffers *b = &c->b;
    uint32_t inner = config->kda_heads * config->kda_dim, width = config->heads * config->kv_rank;
    b->qkv_raw = take_rows(rows, (uint64_t)3 * inner);
    b->qkv = take_rows(rows, (uint64_t)3 * inner);
    b->rank = take_rows(rows, config->kda_dim);
    b->decay = take_rows(rows, inner);
    b->beta = take_rows(rows, config->kda_heads);
    b->gate = take_rows(rows, inner);
    b->o = take_rows(rows, max_u32(inner, config->heads * config->v_dim));
    b->c_q = take_rows(rows, config->q_rank);
    b->q = take_rows(rows, config->heads * config->nope_dim);
    b->latent = take_rows(rows, config->kv_rank);
    b->q_abs = take_rows(rows, width);
    b->o_abs = take_rows(rows, width);
    b->index_q = take_rows(rows, config->index_heads * config->index_dim);
    b->index_key = take_rows(rows, config->index_dim);
    b->index_gate = take_rows(rows, config->index_dim);
    b->index_w = take_rows(rows, config->index_heads);
    b->selected = mem_take_array(rows * m->selected_max, sizeof(uint32_t));
    b->selected_count = mem_take_array(rows, sizeof(uint32_t));

    b->score_stride = c->options.context_max / config->index_kpool + 1;
    b->score_rows =
        work_rows(b->score_stride * sizeof(double), SCORE_WORK_BYTES, c->options.rows_max);
    b->score = mem_take_array(b->score_stride * b->score_rows, sizeof(double));
    uint64_t attend = (uint64_t)(dcp_on(m) ? m->whole.heads : config->heads) * m->selected_max;
    b->attend_rows = work_rows(attend * sizeof(double), ATTEND_WORK_BYTES, c->options.rows_max);
    b->attend = mem_take_array(attend * b->attend_rows, sizeof(double));
}

static void take_mlp(struct model_cursor *c, uint64_t rows)
{
    const struct model_config *config = &c->model->config;
    struct cursor_buffers *b = &c->b;
    uint64_t pairs = rows * config->experts_per_token;
    uint64_t wide = rows * config->dense_width;
    if (pairs * config->expert_width > wide)
        wide = pairs * config->expert_width;
    b->router = take_rows(rows, config->experts);
    b->chosen_weights = take_rows(pairs, 1);
    b->chosen = mem_take_array(pairs, sizeof(int32_t));
    b->offsets = mem_take_array(config->experts + 1, sizeof(uint32_t));
    b->pair_rows = mem_take_array(pairs, sizeof(uint32_t));
    b->pair_of = mem_take_array(pairs, sizeof(uint32_t));
    b->mlp_gate = take_rows(wide, 1);
    b->mlp_up = take_rows(wide, 1);
    b->expert_out = take_rows(pairs + 1, config->hidden); /* the last stays zero */
}

/* Columns of a rank's logits in a gather: the largest share, which rank 0 has. */
static uint32_t vocab_part(const struct model *m)
{
    return shard_split(m->config.vocab_size, 1, m->group.ranks, 0).count;
}

enum err model_cursor_create(struct model *m, const struct model_cursor_options *options,
                             struct model_cursor **ret_cursor, struct err_detail *detail)
{
    CHECK_OBJ(m, MODEL_MAGIC);
    if (options->rows_max == 0 || options->seqs_max == 0 || options->context_max == 0)
        return err_set(detail, ERR_INVALID, "model cursor: a bound is zero");
    if (options->rows_max > 1u << 20 || options->seqs_max > options->rows_max ||
        options->logits_rows_max > options->rows_max)
        return err_set(detail, ERR_INVALID, "model cursor: more sequences or logits than rows");
    struct model_cursor *c = mem_take(sizeof(*c));
    uint64_t rows = options->rows_max, hidden = m->config.hidden;
    c->magic = CURSOR_MAGIC;
    c->model = m;
    c->options = *options;
    c->seqs = mem_take_array(options->seqs_max, sizeof(*c->seqs));
    c->seq_of = mem_take_array(rows, sizeof(uint32_t));
    c->ids = mem_take_array(rows, sizeof(uint32_t));
    c->b.h = take_rows(rows, OP_STREAMS * hidden);
    c->b.x = take_rows(rows, hidden);
    c->b.y = take_rows(rows, hidden);
    c->b.pre = take_rows(rows, OP_STREAMS);
    c->b.post = take_rows(rows, OP_STREAMS);
    c->b.mix = take_rows(rows, OP_STREAMS * OP_STREAMS);
    take_mixer(c, rows);
    take_mlp(c, rows);
    dcp_take(c);
    c->b.head_x = take_rows(options->logits_rows_max + 1u, hidden);
    c->b.logits = take_rows(options->logits_rows_max + 1u, m->config.vocab_size);
    if (m->group.ranks > 1) {
        uint64_t part = vocab_part(m);
        c->b.head_part = take_rows(options->logits_rows_max + 1u, part);
        c->b.head_all = take_rows((options->logits_rows_max + 1ull) * m->group.ranks, part);
    }
    c->b.logits_rows = mem_take_array(options->logits_rows_max + 1u, sizeof(uint32_t));
    *ret_cursor = c;
    return ERR_OK;
}

void model_cursor_destroy(struct model_cursor **cursor_p)
{
    struct model_cursor *c = *cursor_p;
    if (c == NULL)
        return;
    CHECK_OBJ(c, CURSOR_MAGIC);
    struct cursor_buffers *b = &c->b;
    void *all[] = {c->seqs,
                   c->seq_of,
                   c->ids,
                   c->probe_mean,
                   c->probe_attend,
                   b->h,
                   b->x,
                   b->y,
                   b->pre,
                   b->post,
                   b->mix,
                   b->qkv_raw,
                   b->qkv,
                   b->rank,
                   b->decay,
                   b->beta,
                   b->gate,
                   b->o,
                   b->c_q,
                   b->q,
                   b->latent,
                   b->q_abs,
                   b->o_abs,
                   b->index_q,
                   b->index_key,
                   b->index_gate,
                   b->index_w,
                   b->selected,
                   b->selected_count,
                   b->score,
                   b->attend,
                   b->router,
                   b->chosen_weights,
                   b->chosen,
                   b->offsets,
                   b->pair_rows,
                   b->pair_of,
                   b->mlp_gate,
                   b->mlp_up,
                   b->expert_out,
                   b->head_x,
                   b->logits,
                   b->head_part,
                   b->head_all,
                   b->logits_rows};
    for (size_t i = 0; i < ARRAY_COUNT(all); i++)
        mem_give(all[i]);
    dcp_give(c);
    mem_give(c->watch_rows);
    c->magic = 0;
    mem_give(c);
    *cursor_p = NULL;
}

void cursor_reduce(struct model_cursor *c)
{
    const struct model_group *g = &c->model->group;
    if (g->ranks > 1 && c->fault == ERR_OK)
        c->fault = g->all_reduce(g->arg, c->b.y, (size_t)c->row_count * c->model->config.hidden);
}

void cursor_linear(struct model_cursor *c, const struct op_weight *w, const float *x, uint32_t in,
                   float *y, uint32_t out)
{
    RUN(c, linear, .x = x, .w = *w, .y = y, .rows = c->row_count, .in = in, .out = out,
        .x_stride = in, .y_stride = out);
}

void cursor_tap(struct model_cursor *c, uint32_t layer, enum model_input which, const float *x,
                uint32_t in)
{
    if (c->tap.input != NULL)
        c->tap.input(c->tap.arg, layer, which, 0, x, NULL, c->row_count, in);
}

static void check_seq(const struct model_cursor *c, const struct model_kv *kv,
                      const struct model_seq *s)
{
    CHECK(s->row_count > 0);
    CHECK(s->state_slot < kv->slot_count);
    CHECK(s->replay_count <= MODEL_DRAFT_ROWS_MAX);
    CHECK(s->replay_count <= s->position_start);
    CHECK(!s->fresh || (s->position_start == 0 && s->replay_count == 0));
    CHECK(!s->journal || s->row_count <= MODEL_DRAFT_ROWS_MAX);
    CHECK(s->logits_from <= s->row_count);
    CHECK((uint64_t)s->position_start + s->row_count <= c->options.context_max);
    CHECK((uint64_t)s->block_count * kv->block_tokens >=
          (uint64_t)s->position_start + s->row_count);
    for (uint32_t i = 0; i < s->block_count; i++)
        DCHECK(s->blocks[i] < kv->block_count);
}

/* Tables of the batch as the ops want them. */
static void fill_tables(struct model_cursor *c, const struct model_batch *batch)
{
    uint32_t row = 0;
    c->logits_count = 0;
    for (uint32_t i = 0; i < batch->seq_count; i++) {
        const struct model_seq *s = &batch->seqs[i];
        check_seq(c, &c->kv, s);
        CHECK(s->row_count <= batch->row_count - row);
        c->seqs[i] = (struct op_seq){.row_begin = row,
                                     .row_count = s->row_count,
                                     .position_start = s->position_start,
                                     .replay_count = s->replay_count,
                                     .fresh = s->fresh,
                                     .journal = s->journal,
                                     .slot = c->kv.slots + s->state_slot * c->kv.slot_stride,
                                     .blocks = s->blocks};
        CHECK(s->row_count - s->logits_from <= c->options.logits_rows_max - c->logits_count);
        for (uint32_t r = s->logits_from; r < s->row_count; r++)
            c->b.logits_rows[c->logits_count++] = row + r;
        for (uint32_t r = 0; r < s->row_count; r++)
            c->seq_of[row++] = i;
    }
    CHECK(row == batch->row_count);
}

void model_begin(struct model_cursor *c, const struct model_kv *kv, const struct model_batch *batch)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    const struct model_config *config = &c->model->config;
    CHECK(!c->running);
    CHECK(batch->seq_count > 0 && batch->seq_count <= c->options.seqs_max);
    CHECK(batch->row_count > 0 && batch->row_count <= c->options.rows_max);
    CHECK(kv->block_tokens > 0 && kv->block_tokens % config->index_kpool == 0);
    CHECK(!dcp_on(c->model) ||
          kv->block_tokens % (c->model->group.ranks * c->model->group.interleave) == 0);
    CHECK(kv->slot_stride >= c->model->info.state_bytes);
    CHECK(kv->slot_stride % sizeof(float) == 0);
    CHECK(kv->kv_type < KV_ROW_COUNT && kv->index_type < KV_ROW_COUNT);
    CHECK((kv->block_stride | kv->layer_stride | kv->index_offset) % sizeof(float) == 0);
    c->kv = *kv;
    c->seq_count = batch->seq_count;
    c->row_count = batch->row_count;
    c->layer = 0;
    c->running = true;
    c->fault = ERR_OK;
    fill_tables(c, batch);
    for (uint32_t r = 0; r < batch->row_count; r++) {
        CHECK(batch->ids[r] < config->vocab_size);
        c->ids[r] = batch->ids[r];
    }
    RUN(c, embed, .ids = c->ids, .w = c->model->weights->embed, .h = c->b.h, .rows = c->row_count,
        .streams = OP_STREAMS, .hidden = config->hidden);
}

/* Mixing before a sublayer and its norm: leaves the sublayer's input in b.x. */
static void site_before(struct model_cursor *c, const struct weights_site *site)
{
    const struct model_config *config = &c->model->config;
    struct cursor_buffers *b = &c->b;
    RUN(c, mhc_pre, .h = b->h, .fn = site->fn, .scale = site->scale, .base = site->base,
        .pre = b->pre, .post = b->post, .mix = b->mix, .x = b->x, .rows = c->row_count,
        .hidden = config->hidden, .sinkhorn_iters = config->sinkhorn_iters,
        .hc_eps = config->hc_eps, .norm_eps = config->rms_eps);
    RUN(c, rms_norm, .x = b->x, .w = site->norm, .y = b->x, .rows = c->row_count, .groups = 1,
        .n = config->hidden, .x_stride = config->hidden, .y_stride = config->hidden,
        .eps = config->rms_eps);
}

static void site_after(struct model_cursor *c)
{
    RUN(c, mhc_post, .h = c->b.h, .y = c->b.y, .post = c->b.post, .mix = c->b.mix,
        .rows = c->row_count, .hidden = c->model->config.hidden);
}

static void probe_layer(struct model_cursor *c, uint32_t layer)
{
    const struct model *m = c->model;
    const struct model_config *config = &m->config;
    RUN(c, stream_mean, .h = c->b.h, .z = c->probe_mean, .rows = c->row_count,
        .hidden = config->hidden);
    if (config->layer_dsa[layer]) {
        memset(c->probe_attend, 0, c->row_count * c->probe_stride);
        for (uint32_t r = 0; r < c->row_count; r++) {
            const uint32_t *selected = c->b.selected + (uint64_t)r * m->selected_max;
            for (uint32_t j = 0; j < c->b.selected_count[r]; j++)
                c->probe_attend[r * c->probe_stride + selected[j] / 8] |=
                    (uint8_t)(1u << (selected[j] % 8));
        }
    }
    c->probe.layer(c->probe.arg, layer, c->probe_mean,
                   config->layer_moe[layer] ? c->b.chosen : NULL,
                   config->layer_dsa[layer] ? c->probe_attend : NULL, c->probe_stride);
}

static float *watch_rows(const struct model_cursor *c, uint32_t index)
{
    return c->watch_rows + (uint64_t)index * c->options.rows_max * c->model->config.hidden;
}

static void watch_layer(struct model_cursor *c, uint32_t layer)
{
    for (uint32_t t = 0; t < c->watch_count; t++)
        if (c->watch_layers[t] == layer)
            RUN(c, stream_mean, .h = c->b.h, .z = watch_rows(c, t), .rows = c->row_count,
                .hidden = c->model->config.hidden);
}

void model_advance(struct model_cursor *c, uint32_t layer_end)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    const struct model_config *config = &c->model->config;
    CHECK(c->running);
    CHECK(layer_end <= config->layers);
    for (; c->layer < layer_end; c->layer++) {
        if (c->fault != ERR_OK)
            continue;
        const struct weights_layer *w = &c->model->weights->layers[c->layer];
        site_before(c, &w->site[0]);
        if (config->layer_dsa[c->layer])
            layer_dsa(c, c->layer);
        else
            layer_kda(c, c->layer);
        site_after(c);
        site_before(c, &w->site[1]);
        layer_mlp(c, c->layer);
        site_after(c);
        watch_layer(c, c->layer);
        if (c->probing)
            probe_layer(c, c->layer);
    }
}

uint32_t model_cursor_layer(const struct model_cursor *c)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    return c->layer;
}

/* Logits of the normed rows; with several ranks each has its part of the vocabulary. */
static void head(struct model_cursor *c)
{
    const struct model *m = c->model;
    const struct model_group *g = &m->group;
    struct cursor_buffers *b = &c->b;
    uint32_t hidden = m->config.hidden, vocab = m->config.vocab_size, part = vocab_part(m);
    uint32_t rows = c->logits_count;
    float *y = g->ranks > 1 ? b->head_part : b->logits;
    RUN(c, linear, .x = b->head_x, .w = m->weights->head, .y = y, .rows = rows, .in = hidden,
        .out = m->shard.vocab.count, .x_stride = hidden, .y_stride = part);
    if (g->ranks == 1)
        return;
    c->fault = g->all_gather(g->arg, y, (size_t)rows * part * sizeof(*y), b->head_all);
    if (c->fault != ERR_OK)
        return;
    for (uint32_t r = 0; r < g->ranks; r++) {
        struct shard_range own = shard_split(vocab, 1, g->ranks, r);
        for (uint32_t row = 0; row < rows; row++)
            memcpy(b->logits + (uint64_t)row * vocab + own.first,
                   b->head_all + ((uint64_t)r * rows + row) * part, own.count * sizeof(*y));
    }
}

const float *model_finish(struct model_cursor *c)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    const struct model *m = c->model;
    struct cursor_buffers *b = &c->b;
    uint32_t hidden = m->config.hidden;
    model_advance(c, m->config.layers);
    c->running = false;
    if (c->logits_count == 0 || c->fault != ERR_OK)
        return b->logits;
    RUN(c, stream_mean, .h = b->h, .rows_of = b->logits_rows, .z = b->head_x,
        .rows = c->logits_count, .hidden = hidden);
    RUN(c, rms_norm, .x = b->head_x, .w = m->weights->norm, .y = b->head_x, .rows = c->logits_count,
        .groups = 1, .n = hidden, .x_stride = hidden, .y_stride = hidden, .eps = m->config.rms_eps);
    head(c);
    return b->logits;
}

enum err model_cursor_fault(const struct model_cursor *c)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    return c->fault;
}

void model_abandon(struct model_cursor *c)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    c->running = false;
}

void model_cursor_watch(struct model_cursor *c, const uint32_t *layers, uint32_t count)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    CHECK(!c->running && count <= MODEL_WATCH_MAX);
    if (count > c->watch_room) {
        mem_give(c->watch_rows);
        c->watch_rows = take_rows((uint64_t)count * c->options.rows_max, c->model->config.hidden);
        c->watch_room = count;
    }
    for (uint32_t t = 0; t < count; t++) {
        CHECK(layers[t] < c->model->config.layers);
        c->watch_layers[t] = layers[t];
    }
    c->watch_count = count;
}

const float *model_cursor_watched(const struct model_cursor *c, uint32_t index)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    CHECK(index < c->watch_count);
    return watch_rows(c, index);
}

void model_cursor_probe(struct model_cursor *c, const struct model_probe *probe)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    CHECK(!c->running);
    c->probing = probe != NULL;
    if (probe == NULL)
        return;
    c->probe = *probe;
    if (c->probe_mean == NULL) {
        c->probe_stride = (c->options.context_max + 7) / 8;
        c->probe_mean = take_rows(c->options.rows_max, c->model->config.hidden);
        c->probe_attend = mem_take_array(c->options.rows_max, c->probe_stride);
    }
}

void model_cursor_tap(struct model_cursor *c, const struct model_tap *tap)
{
    CHECK_OBJ(c, CURSOR_MAGIC);
    CHECK(!c->running);
    c->tap = tap != NULL ? *tap : (struct model_tap){NULL, NULL};
}
