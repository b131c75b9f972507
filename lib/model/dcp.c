/* SPDX-License-Identifier: Apache-2.0 */
/* Cache rows by position: every rank scores and attends over its own rows, for all heads.
 *
 * Three exchanges a layer: candidates of the indexer, queries, and (result, log sum) of each part.
 * A rank without a single row takes part in all of them. */
#include "lib/model/model_parts.h"

#include <math.h>
#include <string.h>

#include "lib/base/mem.h"

bool dcp_on(const struct model *m)
{
    return m->group.ranks > 1 && m->group.interleave > 0;
}

struct op_shard cursor_shard(const struct model_cursor *c, uint32_t unit)
{
    const struct model_group *g = &c->model->group;
    if (!dcp_on(c->model))
        return (struct op_shard){0};
    return (struct op_shard){g->rank, g->ranks, g->interleave / unit};
}

uint32_t cursor_block_rows(const struct model_cursor *c)
{
    return dcp_on(c->model) ? c->kv.block_tokens / c->model->group.ranks : c->kv.block_tokens;
}

/* Heads of the largest share: every rank sends as much as that. */
static uint32_t heads_most(const struct model *m)
{
    return shard_split(m->whole.heads, 1, m->group.ranks, 0).count;
}

/* Floats of one rank's part of the merge for `rows` rows: results, then log sums. */
static uint64_t part_floats(const struct model *m, uint64_t rows)
{
    return rows * heads_most(m) * (m->config.kv_rank + 1ull);
}

static float *take(uint64_t floats)
{
    return mem_take_array(floats, sizeof(float));
}

void dcp_take(struct model_cursor *c)
{
    const struct model *m = c->model;
    struct cursor_buffers *b = &c->b;
    if (!dcp_on(m))
        return;
    uint64_t rows = c->options.rows_max, ranks = m->group.ranks, rank = m->config.kv_rank;
    uint64_t kept = (uint64_t)b->score_rows * m->pools_kept, all = rows * m->whole.heads;
    uint64_t part = rows * heads_most(m) * rank;
    b->best = mem_take_array(kept, sizeof(*b->best));
    b->best_all = mem_take_array(kept * ranks, sizeof(*b->best_all));
    b->q_part = take(part);
    b->q_gather = take(part * ranks);
    b->q_all = take(all * rank);
    b->o_all = take(all * rank);
    b->lse = take(all);
    b->merge_own = take(part_floats(m, rows) * ranks);
    b->merge_all = take(part_floats(m, rows) * ranks);
}

void dcp_give(struct model_cursor *c)
{
    struct cursor_buffers *b = &c->b;
    void *all[] = {b->best,  b->best_all, b->q_part,    b->q_gather, b->q_all,
                   b->o_all, b->lse,      b->merge_own, b->merge_all};
    for (size_t i = 0; i < ARRAY_COUNT(all); i++)
        mem_give(all[i]);
}

void dcp_select(struct model_cursor *c, uint32_t row_first, uint32_t row_count)
{
    const struct model *m = c->model;
    const struct model_group *g = &m->group;
    struct cursor_buffers *b = &c->b;
    uint32_t kpool = m->config.index_kpool;
    RUN(c, index_best, .seqs = c->seqs, .seq_of = c->seq_of, .score = b->score,
        .score_stride = b->score_stride, .best = b->best, .shard = cursor_shard(c, kpool),
        .row_first = row_first, .row_count = row_count, .kpool = kpool,
        .pools_kept = m->pools_kept);
    if (c->fault == ERR_OK)
        c->fault = g->all_gather(g->arg, b->best,
                                 (size_t)row_count * m->pools_kept * sizeof(*b->best), b->best_all);
    if (c->fault != ERR_OK) {
        memset(b->selected_count + row_first, 0, row_count * sizeof(*b->selected_count));
        return;
    }
    RUN(c, index_merge, .seqs = c->seqs, .seq_of = c->seq_of, .all = b->best_all,
        .selected = b->selected, .selected_count = b->selected_count, .shard = cursor_shard(c, 1),
        .row_first = row_first, .row_count = row_count, .kpool = kpool, .pools_kept = m->pools_kept,
        .selected_stride = m->selected_max);
}

/* Queries of all heads, [rows, heads of the whole, latent], from every rank's own. */
static enum err queries_gather(struct model_cursor *c)
{
    const struct model *m = c->model;
    const struct model_group *g = &m->group;
    struct cursor_buffers *b = &c->b;
    uint64_t latent = m->config.kv_rank, rows = c->row_count, most = heads_most(m);
    uint64_t width = m->config.heads * latent;
    for (uint64_t row = 0; row < rows; row++)
        memcpy(b->q_part + row * most * latent, b->q_abs + row * width, width * sizeof(float));
    TRY(g->all_gather(g->arg, b->q_part, rows * most * latent * sizeof(float), b->q_gather));
    for (uint32_t r = 0; r < g->ranks; r++) {
        struct shard_range own = shard_split(m->whole.heads, 1, g->ranks, r);
        for (uint64_t row = 0; row < rows; row++)
            memcpy(b->q_all + (row * m->whole.heads + own.first) * latent,
                   b->q_gather + (r * rows + row) * most * latent,
                   own.count * latent * sizeof(float));
    }
    return ERR_OK;
}

static void attend_own_rows(struct model_cursor *c, const struct op_pages *pages)
{
    const struct model *m = c->model;
    struct cursor_buffers *b = &c->b;
    uint32_t heads = m->whole.heads;
    uint64_t width = (uint64_t)heads * m->config.kv_rank;
    for (uint32_t row = 0; row < c->row_count; row += b->attend_rows) {
        uint32_t left = c->row_count - row, count = left < b->attend_rows ? left : b->attend_rows;
        RUN(c, mla_attend, .seqs = c->seqs, .seq_of = c->seq_of + row,
            .q_abs = b->q_all + row * width, .pages = *pages,
            .selected = b->selected + (uint64_t)row * m->selected_max,
            .selected_count = b->selected_count + row, .o_abs = b->o_all + row * width,
            .lse = b->lse + (uint64_t)row * heads, .work = b->attend, .rows = count, .heads = heads,
            .latent = m->config.kv_rank, .selected_stride = m->selected_max,
            .scale = 1 / sqrt((double)m->config.nope_dim));
    }
}

/* Results of the other ranks' heads go to them; theirs of ours come back. */
static enum err parts_exchange(struct model_cursor *c)
{
    const struct model *m = c->model;
    const struct model_group *g = &m->group;
    struct cursor_buffers *b = &c->b;
    uint64_t latent = m->config.kv_rank, rows = c->row_count, part = part_floats(m, rows);
    for (uint32_t r = 0; r < g->ranks; r++) {
        struct shard_range own = shard_split(m->whole.heads, 1, g->ranks, r);
        float *to = b->merge_own + r * part, *lse = to + rows * own.count * latent;
        for (uint64_t row = 0; row < rows; row++) {
            uint64_t from = row * m->whole.heads + own.first;
            memcpy(to + row * own.count * latent, b->o_all + from * latent,
                   own.count * latent * sizeof(float));
            memcpy(lse + row * own.count, b->lse + from, own.count * sizeof(float));
        }
    }
    return g->all_to_all(g->arg, b->merge_own, part * sizeof(float), b->merge_all);
}

void dcp_attend(struct model_cursor *c, const struct op_pages *pages)
{
    const struct model *m = c->model;
    struct cursor_buffers *b = &c->b;
    if (c->fault == ERR_OK)
        c->fault = queries_gather(c);
    if (c->fault != ERR_OK)
        return;
    attend_own_rows(c, pages);
    c->fault = parts_exchange(c);
    if (c->fault != ERR_OK)
        return;
    uint32_t items = c->row_count * m->config.heads;
    RUN(c, mla_merge, .parts = b->merge_all,
        .lse = b->merge_all + (uint64_t)items * m->config.kv_rank, .o_abs = b->o_abs,
        .part_stride = part_floats(m, c->row_count), .ranks = m->group.ranks, .items = items,
        .latent = m->config.kv_rank);
}
