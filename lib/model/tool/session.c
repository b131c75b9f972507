/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/session.h"

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define BLOCK_TOKENS 64 /* rounded up to whole pools */

struct session {
    struct model *model;
    struct session_options options;
    struct model_cursor *cursor;
    struct model_kv kv;
    uint32_t *blocks;
    uint32_t position;
    uint32_t replay;       /* journal rows that the next step applies */
    uint32_t journal_rows; /* of the verify step that waits for its accept count */
    bool fresh;
};

enum err session_create(struct model *m, const struct session_options *options,
                        struct session **ret_session, struct err_detail *detail)
{
    const struct model_info *info = model_info(m);
    struct session *s = mem_take(sizeof(*s));
    s->model = m;
    s->options = *options;
    struct model_cursor_options cursor = {options->slice_rows, 1, options->logits_rows_max,
                                          options->context_max};
    enum err e = model_cursor_create(m, &cursor, &s->cursor, detail);
    if (e != ERR_OK) {
        mem_give(s);
        return e;
    }
    uint32_t tokens =
        (BLOCK_TOKENS + info->index_kpool - 1) / info->index_kpool * info->index_kpool;
    uint64_t latents = (uint64_t)tokens * info->latent_dim * sizeof(float);
    uint64_t pools = (uint64_t)tokens / info->index_kpool * info->index_dim * sizeof(float);
    s->kv.block_tokens = tokens;
    s->kv.index_offset = latents;
    s->kv.layer_stride = latents + pools;
    s->kv.block_stride = s->kv.layer_stride * (info->dsa_layers > 0 ? info->dsa_layers : 1);
    s->kv.block_count = (options->context_max + tokens - 1) / tokens;
    s->kv.blocks = mem_take_array(s->kv.block_count, s->kv.block_stride);
    s->kv.slot_count = 1;
    s->kv.slot_stride = info->state_bytes;
    s->kv.slots = mem_take(info->state_bytes);
    s->blocks = mem_take_array(s->kv.block_count, sizeof(uint32_t));
    for (uint32_t i = 0; i < s->kv.block_count; i++)
        s->blocks[i] = s->kv.block_count - 1 - i; /* not in order, as in a real pool */
    session_reset(s);
    *ret_session = s;
    return ERR_OK;
}

void session_destroy(struct session **s_p)
{
    struct session *s = *s_p;
    if (s == NULL)
        return;
    model_cursor_destroy(&s->cursor);
    mem_give(s->kv.blocks);
    mem_give(s->kv.slots);
    mem_give(s->blocks);
    mem_give(s);
    *s_p = NULL;
}

void session_reset(struct session *s)
{
    s->position = 0;
    s->replay = 0;
    s->journal_rows = 0;
    s->fresh = true;
}

uint32_t session_position(const struct session *s)
{
    return s->position;
}

struct model_cursor *session_cursor(struct session *s)
{
    return s->cursor;
}

static const float *run(struct session *s, const uint32_t *ids, uint32_t count,
                        uint32_t logits_count, bool journal)
{
    CHECK(s->journal_rows == 0);
    CHECK(count > 0 && count <= s->options.slice_rows);
    CHECK(logits_count <= count);
    struct model_seq seq = {.position_start = s->position,
                            .row_count = count,
                            .replay_count = s->replay,
                            .fresh = s->fresh,
                            .journal = journal,
                            .logits_from = count - logits_count,
                            .blocks = s->blocks,
                            .block_count = s->kv.block_count};
    struct model_batch batch = {1, count, &seq, ids};
    model_begin(s->cursor, &s->kv, &batch);
    uint32_t layers = model_info(s->model)->layer_count;
    while (s->options.slice_layers > 0 &&
           model_cursor_layer(s->cursor) + s->options.slice_layers < layers)
        model_advance(s->cursor, model_cursor_layer(s->cursor) + s->options.slice_layers);
    const float *logits = model_finish(s->cursor);
    s->fresh = false;
    s->replay = 0;
    return logits;
}

const float *session_forward(struct session *s, const uint32_t *ids, uint32_t count,
                             uint32_t logits_count)
{
    const float *logits = run(s, ids, count, logits_count, false);
    s->position += count;
    return logits;
}

const float *session_prefill(struct session *s, const uint32_t *ids, uint32_t count,
                             session_progress_fn progress, void *arg)
{
    const float *logits = NULL;
    for (uint32_t at = 0; at < count;) {
        uint32_t left = count - at;
        uint32_t rows = left < s->options.slice_rows ? left : s->options.slice_rows;
        logits = session_forward(s, ids + at, rows, at + rows == count ? 1 : 0);
        at += rows;
        if (progress != NULL)
            progress(arg, at, count);
    }
    return logits;
}

const float *session_verify(struct session *s, const uint32_t *ids, uint32_t count)
{
    CHECK(count <= MODEL_DRAFT_ROWS_MAX);
    const float *logits = run(s, ids, count, count, true);
    s->journal_rows = count;
    return logits;
}

void session_accept(struct session *s, uint32_t count)
{
    CHECK(count > 0 && count <= s->journal_rows);
    s->position += count;
    s->replay = count;
    s->journal_rows = 0;
}
