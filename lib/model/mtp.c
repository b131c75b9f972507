// SPDX-License-Identifier: Apache-2.0
#include "lib/model/mtp.h"

#include <string.h>

#include "lib/base/mem.h"
#include "lib/model/model_parts.h"
#include "lib/model/weights.h"

#define MTP_MAGIC    0x6d747031u
#define STAGE_ROWS   64u
#define GROUP_FEEDS  16u /* sequences that draft together: bounds the logits */
#define BLOCK_POOLS  16u /* pooled rows of a block */
#define SCRATCH_ROWS 8u  /* drafts beyond the last final row */
#define TOKENS_MAX   (UINT64_C(1) << 32)

STATIC_CHECK(SCRATCH_ROWS >= MODEL_DRAFT_ROWS_MAX);

struct entry {
    bool live; /* rows have come, one after another */
    bool busy; /* being fed: makes no room for others */
    bool pending;
    uint64_t use;          /* order of feeds: the least recently fed one makes room */
    uint32_t base, length; /* row 0 is position base; rows that are final */
    uint32_t block_count;
    uint32_t *blocks; /* [table_max] */
    float *hidden;    /* [hidden] pending: of position base + length, whose next token is awaited */
};

/* Rows of one sequence in a launch. */
struct segment {
    struct entry *entry;
    uint32_t position, rows; /* in the entry's cache */
    uint32_t feed;
};

struct mtp {
    uint32_t magic;
    struct mtp_options options;
    struct model *model;
    struct model_cursor *cursor; /* work space of the layer's ops */
    uint32_t layer, hidden;
    struct model_kv kv;
    uint32_t table_max, free_count;
    uint32_t *free; /* block ids */
    struct entry *entries;
    uint32_t *tables;
    float *pending;
    float *z;                     /* [STAGE_ROWS, hidden] of the target, normed */
    float *p;                     /* ... staged for the layer */
    float *e;                     /* ... embeddings */
    float *both;                  /* [STAGE_ROWS, 2 * hidden] */
    float *x;                     /* residual, before the last norm */
    float *u;                     /* after it */
    float *last_x, *last_u;       /* [entries, hidden] of the last row of each feed */
    bool *taken;                  /* [entries] these are there */
    float *logits, *first_logits; /* [GROUP_FEEDS, vocab], [vocab] */
    uint32_t ids[STAGE_ROWS];
    struct segment segments[STAGE_ROWS];
    uint32_t staged, segment_count;
    uint64_t use;
};

/* ---- life ---- */

static void take_kv(struct mtp *t)
{
    const struct model_config *c = &t->model->config;
    struct model_kv *kv = &t->kv;
    kv->kv_type = kv->index_type = KV_ROW_F32;
    kv->block_tokens = BLOCK_POOLS * c->index_kpool;
    kv->index_offset = kv->block_tokens * kv_row_bytes(KV_ROW_F32, c->kv_rank);
    kv->layer_stride = kv->block_stride =
        kv->index_offset + BLOCK_POOLS * kv_row_bytes(KV_ROW_F32, c->index_dim);
    kv->block_count = (uint32_t)(t->options.tokens_max / kv->block_tokens) + 1;
    kv->blocks = mem_take_array(kv->block_count, kv->block_stride);
    kv->slot_count = t->options.entries;
    kv->slot_stride = (uint64_t)t->model->index_ring_rows * 2 * c->index_dim * sizeof(float);
    kv->slots = mem_take_array(kv->slot_count, kv->slot_stride);
    t->table_max = (t->options.context_max + SCRATCH_ROWS) / kv->block_tokens + 1;
    t->free = mem_take_array(kv->block_count, sizeof(*t->free));
    for (uint32_t b = kv->block_count; b > 0; b--)
        t->free[t->free_count++] = b - 1;
    t->entries = mem_take_array(t->options.entries, sizeof(*t->entries));
    t->tables = mem_take_array((uint64_t)t->options.entries * t->table_max, sizeof(uint32_t));
    t->pending = mem_take_array((uint64_t)t->options.entries * t->hidden, sizeof(float));
    for (uint32_t i = 0; i < t->options.entries; i++) {
        t->entries[i].blocks = t->tables + (uint64_t)i * t->table_max;
        t->entries[i].hidden = t->pending + (uint64_t)i * t->hidden;
    }
}

static void take_rows(struct mtp *t)
{
    uint64_t rows = (uint64_t)STAGE_ROWS * t->hidden, vocab = t->model->config.vocab_size;
    t->z = mem_take_array(rows, sizeof(float));
    t->p = mem_take_array(rows, sizeof(float));
    t->e = mem_take_array(rows, sizeof(float));
    t->both = mem_take_array(2 * rows, sizeof(float));
    t->x = mem_take_array(rows, sizeof(float));
    t->u = mem_take_array(rows, sizeof(float));
    t->last_x = mem_take_array((uint64_t)t->options.entries * t->hidden, sizeof(float));
    t->last_u = mem_take_array((uint64_t)t->options.entries * t->hidden, sizeof(float));
    t->taken = mem_take_array(t->options.entries, sizeof(bool));
    t->logits = mem_take_array(GROUP_FEEDS * vocab, sizeof(float));
    t->first_logits = mem_take_array(vocab, sizeof(float));
}

enum err mtp_create(struct model *m, const struct mtp_options *options, struct mtp **ret_mtp,
                    struct err_detail *detail)
{
    CHECK_OBJ(m, MODEL_MAGIC);
    if (m->mtp != NULL) /* one of several ranks: the layer is in a model of its own */
        m = m->mtp;
    CHECK(m->weights->has_mtp && m->group.ranks == 1);
    CHECK(options->entries > 0 && options->context_max > 0);
    if (options->tokens_max > TOKENS_MAX)
        return err_set(detail, ERR_INVALID, "mtp: rows for %llu tokens, at most %llu",
                       (unsigned long long)options->tokens_max, (unsigned long long)TOKENS_MAX);
    struct mtp *t = mem_take(sizeof(*t));
    struct model_cursor_options work = {.rows_max = STAGE_ROWS,
                                        .seqs_max = STAGE_ROWS,
                                        .context_max = options->context_max + SCRATCH_ROWS};
    t->magic = MTP_MAGIC;
    t->options = *options;
    t->model = m;
    t->layer = m->config.layers;
    t->hidden = m->config.hidden;
    enum err e = model_cursor_create(m, &work, &t->cursor, detail);
    if (e != ERR_OK) {
        mem_give(t);
        return e;
    }
    take_kv(t);
    take_rows(t);
    *ret_mtp = t;
    return ERR_OK;
}

void mtp_destroy(struct mtp **mtp_p)
{
    struct mtp *t = *mtp_p;
    if (t == NULL)
        return;
    CHECK_OBJ(t, MTP_MAGIC);
    void *all[] = {
        t->kv.blocks, t->kv.slots, t->free, t->entries, t->tables, t->pending, t->z,
        t->p,         t->e,        t->both, t->x,       t->u,      t->logits,  t->first_logits,
        t->last_x,    t->last_u,   t->taken};
    for (size_t i = 0; i < ARRAY_COUNT(all); i++)
        mem_give(all[i]);
    model_cursor_destroy(&t->cursor);
    t->magic = 0;
    mem_give(t);
    *mtp_p = NULL;
}

uint64_t mtp_bytes(const struct mtp *t)
{
    CHECK_OBJ(t, MTP_MAGIC);
    return t->kv.block_count * t->kv.block_stride + t->kv.slot_count * t->kv.slot_stride;
}

const float *mtp_logits(const struct mtp *t)
{
    CHECK_OBJ(t, MTP_MAGIC);
    return t->first_logits;
}

/* ---- the layer ---- */

static void norm(struct mtp *t, const float *x, const float *w, float *y, uint64_t y_stride,
                 uint32_t rows)
{
    RUN(t->cursor, rms_norm, .x = x, .w = w, .y = y, .rows = rows, .groups = 1, .n = t->hidden,
        .x_stride = t->hidden, .y_stride = y_stride, .eps = t->model->config.rms_eps);
}

static void add(struct mtp *t, uint32_t rows)
{
    const float *y = t->cursor->b.y;
    for (uint64_t i = 0; i < (uint64_t)rows * t->hidden; i++)
        t->x[i] += y[i];
}

/* The segments' rows of p and ids: leaves x and u. */
static void layer_run(struct mtp *t)
{
    struct model_cursor *c = t->cursor;
    const struct weights *w = t->model->weights;
    const struct weights_layer *l = &w->layers[t->layer];
    uint32_t hidden = t->hidden, rows = 0;
    c->kv = t->kv;
    c->seq_count = t->segment_count;
    for (uint32_t i = 0; i < t->segment_count; i++) {
        const struct segment *s = &t->segments[i];
        uint32_t index = (uint32_t)(s->entry - t->entries);
        c->seqs[i] = (struct op_seq){.row_begin = rows,
                                     .row_count = s->rows,
                                     .position_start = s->position,
                                     .fresh = s->position == 0,
                                     .slot = t->kv.slots + index * t->kv.slot_stride,
                                     .blocks = s->entry->blocks};
        for (uint32_t r = 0; r < s->rows; r++)
            c->seq_of[rows++] = i;
    }
    c->row_count = rows;
    RUN(c, embed, .ids = t->ids, .w = w->embed, .h = t->e, .rows = rows, .streams = 1,
        .hidden = hidden);
    norm(t, t->e, w->mtp.embed_norm, t->both, 2 * (uint64_t)hidden, rows);
    norm(t, t->p, w->mtp.hidden_norm, t->both + hidden, 2 * (uint64_t)hidden, rows);
    cursor_linear(c, &w->mtp.project, t->both, 2 * hidden, t->x, hidden);
    norm(t, t->x, l->site[0].norm, c->b.x, hidden, rows);
    layer_dsa(c, t->layer);
    add(t, rows);
    norm(t, t->x, l->site[1].norm, c->b.x, hidden, rows);
    layer_mlp(c, t->layer);
    add(t, rows);
    norm(t, t->x, w->mtp.norm, t->u, hidden, rows);
}

/* The last row of each segment is its feed's, until a later one comes. */
static void keep_last(struct mtp *t)
{
    uint64_t hidden = t->hidden, row = 0;
    for (uint32_t i = 0; i < t->segment_count; i++) {
        const struct segment *s = &t->segments[i];
        row += s->rows;
        memcpy(t->last_x + s->feed * hidden, t->x + (row - 1) * hidden, hidden * sizeof(float));
        memcpy(t->last_u + s->feed * hidden, t->u + (row - 1) * hidden, hidden * sizeof(float));
        t->taken[s->feed] = true;
    }
}

static uint32_t best_of(const struct mtp *t, const float *logits)
{
    const struct model *m = t->model;
    uint32_t best = 0;
    bool any = false;
    for (uint32_t id = 0; id < m->config.vocab_size; id++) {
        if (!m->info.has_token[id] || (any && !(logits[id] > logits[best])))
            continue;
        best = id;
        any = true;
    }
    return best;
}

/* ---- sequences ---- */

static struct entry *entry_at(struct mtp *t, uint32_t entry)
{
    CHECK_OBJ(t, MTP_MAGIC);
    CHECK(entry < t->options.entries);
    return &t->entries[entry];
}

static void restart(struct mtp *t, struct entry *e, uint32_t base)
{
    while (e->block_count > 0)
        t->free[t->free_count++] = e->blocks[--e->block_count];
    CHECK(t->free_count <= t->kv.block_count);
    e->live = e->pending = false;
    e->length = 0;
    e->base = base;
}

void mtp_begin(struct mtp *t, uint32_t entry)
{
    restart(t, entry_at(t, entry), 0);
}

/* An ended sequence is told by nobody: it is the one that was not fed for longest. */
static bool evict(struct mtp *t, const struct entry *spared)
{
    struct entry *oldest = NULL;
    for (uint32_t i = 0; i < t->options.entries; i++) {
        struct entry *e = &t->entries[i];
        if (e != spared && !e->busy && e->block_count > 0 &&
            (oldest == NULL || e->use < oldest->use))
            oldest = e;
    }
    if (oldest != NULL)
        restart(t, oldest, 0);
    return oldest != NULL;
}

static bool room(struct mtp *t, struct entry *e, uint32_t rows)
{
    while ((uint64_t)e->block_count * t->kv.block_tokens < rows) {
        if (e->block_count == t->table_max || (t->free_count == 0 && !evict(t, e)))
            return false;
        e->blocks[e->block_count++] = t->free[--t->free_count];
    }
    return true;
}

/* Runs what is staged, as the entries' next rows. */
static void flush(struct mtp *t)
{
    if (t->segment_count > 0) {
        layer_run(t);
        keep_last(t);
    }
    for (uint32_t i = 0; i < t->segment_count; i++)
        t->segments[i].entry->length += t->segments[i].rows;
    t->staged = t->segment_count = 0;
}

/* The segment of the feed, which is the last one; NULL: it has none yet. */
static struct segment *segment_of(struct mtp *t, uint32_t feed)
{
    struct segment *s = t->segment_count > 0 ? &t->segments[t->segment_count - 1] : NULL;
    return s != NULL && s->feed == feed ? s : NULL;
}

static void stage(struct mtp *t, struct entry *e, uint32_t feed, const float *hidden, uint32_t id)
{
    if (!e->live)
        return;
    if (t->staged == STAGE_ROWS)
        flush(t);
    struct segment *s = segment_of(t, feed);
    uint32_t rows = s != NULL ? s->rows : 0;
    if (!room(t, e, e->length + rows + 1)) {
        t->staged -= rows;
        t->segment_count -= s != NULL;
        restart(t, e, 0); /* longer than all there is: anew with its next rows */
        return;
    }
    if (s == NULL) {
        s = &t->segments[t->segment_count++];
        *s = (struct segment){.entry = e, .position = e->length, .feed = feed};
    }
    s->rows++;
    memcpy(t->p + (uint64_t)t->staged * t->hidden, hidden, t->hidden * sizeof(float));
    t->ids[t->staged++] = id;
}

/* The target's hidden states as its head reads them. */
static void target_rows(struct mtp *t, const struct model_cursor *from, uint32_t first,
                        uint32_t rows)
{
    CHECK(first + rows <= from->row_count);
    RUN(t->cursor, stream_mean, .h = from->b.h + (uint64_t)first * OP_STREAMS * t->hidden,
        .z = t->z, .rows = rows, .hidden = t->hidden);
    norm(t, t->z, t->model->weights->norm, t->z, t->hidden, rows);
}

static void take_in(struct mtp *t, struct entry *e, uint32_t feed, const struct mtp_rows *r)
{
    if (e->pending)
        stage(t, e, feed, e->hidden, r->ids[0]);
    e->pending = false;
    for (uint32_t at = 0; at < r->count;) {
        uint32_t rows = r->count - at < STAGE_ROWS ? r->count - at : STAGE_ROWS;
        target_rows(t, r->cursor, r->first + at, rows);
        for (uint32_t k = 0; k < rows; k++, at++) {
            uint32_t id = at + 1 < r->count ? r->ids[at + 1] : r->next;
            const float *hidden = t->z + (uint64_t)k * t->hidden;
            if (id != MTP_NO_ID) {
                stage(t, e, feed, hidden, id);
                continue;
            }
            memcpy(e->hidden, hidden, t->hidden * sizeof(float));
            e->pending = e->live;
        }
    }
}

/* ---- drafts ---- */

/* The next draft of each feed of a group, from its last row. */
static void heads_run(struct mtp *t, struct mtp_feed *feeds, const uint32_t *group, uint32_t count)
{
    const struct model *m = t->model;
    uint64_t hidden = t->hidden;
    uint32_t vocab = m->config.vocab_size;
    for (uint32_t i = 0; i < count; i++)
        memcpy(t->z + i * hidden, t->last_u + group[i] * hidden, hidden * sizeof(float));
    RUN(t->cursor, linear, .x = t->z, .w = m->weights->head, .y = t->logits, .rows = count,
        .in = t->hidden, .out = vocab, .x_stride = hidden, .y_stride = vocab);
    for (uint32_t i = 0; i < count; i++) {
        struct mtp_feed *f = &feeds[group[i]];
        const float *logits = t->logits + (uint64_t)i * vocab;
        if (f->count == 0)
            memcpy(t->first_logits, logits, vocab * sizeof(float));
        f->ids[f->count++] = best_of(t, logits);
    }
}

/* Drafts of at most GROUP_FEEDS feeds, whose last rows are there. */
static void group_draft(struct mtp *t, struct mtp_feed *feeds, uint32_t *group, uint32_t count)
{
    const float *recycled = t->options.recycle == MTP_POST_NORM ? t->last_u : t->last_x;
    const uint64_t hidden = t->hidden;
    if (count > 0)
        heads_run(t, feeds, group, count);
    for (;;) {
        uint32_t left = 0;
        CHECK(t->segment_count == 0);
        /* Rows beyond the final ones are overwritten when their tokens are known. */
        for (uint32_t i = 0; i < count; i++) {
            struct mtp_feed *f = &feeds[group[i]];
            struct entry *e = &t->entries[f->rows.entry];
            if (f->count == f->drafts_max || !room(t, e, e->length + f->count))
                continue;
            memcpy(t->p + left * hidden, recycled + group[i] * hidden, hidden * sizeof(float));
            t->ids[left] = f->ids[f->count - 1];
            t->segments[left] = (struct segment){
                .entry = e, .position = e->length + f->count - 1, .rows = 1, .feed = group[i]};
            group[left++] = group[i];
        }
        if (left == 0)
            return;
        t->segment_count = count = left;
        layer_run(t);
        keep_last(t);
        t->segment_count = 0;
        heads_run(t, feeds, group, count);
    }
}

void mtp_feed(struct mtp *t, struct mtp_feed *feeds, uint32_t count)
{
    uint32_t group[GROUP_FEEDS], in_group = 0;
    CHECK_OBJ(t, MTP_MAGIC);
    CHECK(count <= t->options.entries);
    for (uint32_t i = 0; i < count; i++) {
        struct entry *e = entry_at(t, feeds[i].rows.entry);
        CHECK(!e->busy && feeds[i].rows.count > 0 && feeds[i].drafts_max <= SCRATCH_ROWS);
        e->busy = true;
        t->taken[i] = false;
        feeds[i].count = 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct mtp_rows *r = &feeds[i].rows;
        struct entry *e = entry_at(t, r->entry);
        if (!e->live || r->position != e->base + e->length + e->pending)
            restart(t, e, r->position);
        e->live = true;
        e->use = ++t->use;
        take_in(t, e, i, r);
    }
    flush(t);
    for (uint32_t i = 0; i < count; i++) {
        bool asks = feeds[i].rows.next != MTP_NO_ID && feeds[i].drafts_max > 0;
        if (asks && t->taken[i] && entry_at(t, feeds[i].rows.entry)->live)
            group[in_group++] = i;
        if (in_group == GROUP_FEEDS || i + 1 == count) {
            group_draft(t, feeds, group, in_group);
            in_group = 0;
        }
    }
    for (uint32_t i = 0; i < count; i++)
        entry_at(t, feeds[i].rows.entry)->busy = false;
}
