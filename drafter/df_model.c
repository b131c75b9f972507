/* SPDX-License-Identifier: Apache-2.0 */
#include "drafter/df_model.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/model/dflash.h"
#include "proto/tap_ring.h"

#define DF_MODEL_MAGIC 0x44464d4fu
#define BATCH_MAX      16u /* blocks of one forward */
#define STAGE_ROWS     64u
#define PAGE_BYTES     4096u
#define AHEAD_ROWS     1024u /* beyond the tokens that are known: taps come before their ids */
#define NONE           UINT32_MAX

struct df_sequence_context {
    bool used;
    struct msg_id id;
    uint32_t ring;
    uint32_t length; /* tokens of the sequence */
    struct dflash_context context;
};

struct df_ring {
    void *memory; /* NULL = none */
    uint64_t bytes;
    struct tap_ring ring;
    bool reduced;  /* holds context vectors instead of taps */
    uint64_t next; /* record to read */
};

struct df_model {
    uint32_t magic;
    struct df_model_options options;
    struct dflash *drafter;
    uint32_t reach;
    uint8_t *memory;
    uint64_t memory_bytes, context_bytes;
    struct df_sequence_context *sequences;
    struct df_ring *rings;
    float *stage; /* [STAGE_ROWS, stage_floats], of sequence stage_of */
    uint32_t stage_of, stage_count, stage_floats; /* floats of a row of the ring being read */
    bool stage_reduced;
    struct dflash_block blocks[BATCH_MAX];
    struct df_model_counters counters;
};

/* ---- life ---- */

/* What all contexts together can come to: rings for each sequence, rows for each token. */
static enum err budget_check(const struct df_model *m, struct err_detail *detail)
{
    const struct dflash_config *c = dflash_config(m->drafter);
    const struct df_model_options *o = &m->options;
    uint64_t row = (uint64_t)2 * c->kv_heads * c->head_dim * sizeof(float), total = 0;
    for (uint32_t l = 0; l < c->layers; l++) {
        uint64_t rows = c->layer_sliding[l] && c->window < o->context_max
                            ? (uint64_t)o->sequences_max * c->window
                            : o->tokens_max + (uint64_t)o->sequences_max * AHEAD_ROWS;
        total += rows * row;
    }
    if (total <= o->bytes_max)
        return ERR_OK;
    return err_set(detail, ERR_INVALID,
                   "context_bytes_max: %llu bytes, but sequences_max %u and tokens_max %llu come "
                   "to %llu with this drafter",
                   (unsigned long long)o->bytes_max, o->sequences_max,
                   (unsigned long long)o->tokens_max, (unsigned long long)total);
}

static enum err create(struct df_model *m, struct err_detail *detail)
{
    const struct df_model_options *o = &m->options;
    struct dflash_options options = {.directory = o->directory,
                                     .target = o->target,
                                     .seqs_max = BATCH_MAX,
                                     .context_max = o->context_max,
                                     .threads = o->threads,
                                     .exact = o->exact,
                                     .head_8bit = o->head_8bit};
    TRY(dflash_load(&options, &m->drafter, detail));
    TRY(budget_check(m, detail));
    const struct dflash_config *c = dflash_config(m->drafter);
    m->reach = dflash_reach(m->drafter);
    m->context_bytes =
        (dflash_context_bytes(m->drafter) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    m->memory_bytes = o->sequences_max * m->context_bytes;
    m->memory = mmap(NULL, m->memory_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m->memory == MAP_FAILED) {
        m->memory = NULL;
        return err_set(detail, ERR_NOMEM, "contexts: %llu bytes of address space: %s",
                       (unsigned long long)m->memory_bytes, strerror(errno));
    }
    m->sequences = mem_take_array(o->sequences_max, sizeof *m->sequences);
    for (uint32_t i = 0; i < o->sequences_max; i++)
        m->sequences[i].context.rows = (float *)(void *)(m->memory + i * m->context_bytes);
    m->rings = mem_take_array(o->rings_max, sizeof *m->rings);
    m->stage = mem_take_array((uint64_t)STAGE_ROWS * c->tap_count * c->hidden, sizeof(float));
    m->stage_of = NONE;
    return ERR_OK;
}

enum err df_model_create(const struct df_model_options *options, struct df_model **ret_model,
                         struct err_detail *detail)
{
    CHECK(options->sequences_max > 0 && options->rings_max > 0);
    struct df_model *m = mem_take(sizeof *m);
    m->magic = DF_MODEL_MAGIC;
    m->options = *options;
    enum err e = create(m, detail);
    if (e != ERR_OK) {
        df_model_destroy(&m);
        return e;
    }
    *ret_model = m;
    return ERR_OK;
}

static void ring_close(struct df_ring *r)
{
    if (r->memory != NULL)
        munmap(r->memory, r->bytes);
    *r = (struct df_ring){0};
}

void df_model_destroy(struct df_model **model_p)
{
    struct df_model *m = *model_p;
    if (m == NULL)
        return;
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    for (uint32_t i = 0; m->rings != NULL && i < m->options.rings_max; i++)
        ring_close(&m->rings[i]);
    if (m->memory != NULL)
        munmap(m->memory, m->memory_bytes);
    mem_give(m->sequences);
    mem_give(m->rings);
    mem_give(m->stage);
    dflash_destroy(&m->drafter);
    m->magic = 0;
    mem_give(m);
    *model_p = NULL;
}

const struct dflash_config *df_model_config(const struct df_model *m)
{
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    return dflash_config(m->drafter);
}

struct hash128 df_model_tokenizer(const struct df_model *m)
{
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    return dflash_tokenizer(m->drafter);
}

struct hash128 df_model_context_fp(const struct df_model *m)
{
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    return dflash_context_fp(m->drafter);
}

const char *df_model_formats(const struct df_model *m)
{
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    return dflash_formats(m->drafter);
}

const struct df_model_counters *df_model_counters(const struct df_model *m)
{
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    return &m->counters;
}

/* ---- rings ---- */

static enum err ring_map(struct df_ring *r, const char *path, struct err_detail *detail)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    enum err e = ERR_OK;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < (off_t)TAP_RING_HEADER_BYTES)
        e = err_set(detail, ERR_CORRUPT, "%s: no tap ring", path);
    if (e == ERR_OK) {
        r->bytes = (uint64_t)st.st_size;
        r->memory = mmap(NULL, r->bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (r->memory == MAP_FAILED) {
            r->memory = NULL;
            e = err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
        }
    }
    close(fd);
    return e == ERR_OK ? tap_ring_open(&r->ring, r->memory, r->bytes, detail) : e;
}

/* Does the ring hold what the network reads? */
static enum err ring_check(const struct df_model *m, const struct df_ring *r, const char *path,
                           const struct hash128 *context_fp, struct err_detail *detail)
{
    const struct dflash_config *c = dflash_config(m->drafter);
    const struct tap_ring_geometry *g = &r->ring.geometry;
    struct hash128 own = dflash_context_fp(m->drafter);
    uint32_t rows = r->reduced ? 1 : c->tap_count;
    if (r->reduced && memcmp(context_fp, &own, sizeof own) != 0)
        return err_set(detail, ERR_INVALID, "%s: tap_context_fp: made by another drafter's fc",
                       path);
    if (g->tap_count != rows || g->hidden != c->hidden)
        return err_set(detail, ERR_INVALID, "%s: %u %s of %u, expected %u of %u", path,
                       g->tap_count, r->reduced ? "context vectors" : "taps", g->hidden, rows,
                       c->hidden);
    return ERR_OK;
}

enum err df_model_ring(struct df_model *m, uint32_t ring, const char *path, uint64_t incarnation,
                       const struct hash128 *context_fp, struct err_detail *detail)
{
    static const struct hash128 none;
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    CHECK(ring < m->options.rings_max);
    struct df_ring *r = &m->rings[ring];
    if (r->memory != NULL && r->ring.incarnation == incarnation)
        return ERR_OK;
    ring_close(r);
    enum err e = ring_map(r, path, detail);
    r->reduced = memcmp(context_fp, &none, sizeof none) != 0;
    if (e == ERR_OK && r->ring.incarnation != incarnation)
        e = err_set(detail, ERR_EPOCH, "%s: another ring than announced", path);
    if (e == ERR_OK)
        e = ring_check(m, r, path, context_fp, detail);
    if (e != ERR_OK)
        ring_close(r);
    else
        r->next = tap_ring_head(&r->ring);
    return e;
}

uint32_t df_model_rings(const struct df_model *m)
{
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    uint32_t count = 0;
    for (uint32_t i = 0; i < m->options.rings_max; i++)
        count += m->rings[i].memory != NULL;
    return count;
}

/* ---- sequences ---- */

static struct df_sequence_context *sequence_at(struct df_model *m, uint32_t sequence)
{
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    CHECK(sequence < m->options.sequences_max);
    return &m->sequences[sequence];
}

void df_model_begin(struct df_model *m, uint32_t sequence, const struct msg_id *id, uint32_t ring)
{
    struct df_sequence_context *s = sequence_at(m, sequence);
    CHECK(m->stage_count == 0);
    s->used = true;
    s->id = *id;
    s->ring = ring;
    s->length = 0;
    dflash_context_begin(&s->context, 0);
}

void df_model_cut(struct df_model *m, uint32_t sequence, uint32_t length)
{
    struct df_sequence_context *s = sequence_at(m, sequence);
    if (s->used && s->context.length > length)
        dflash_context_crop(m->drafter, &s->context, length);
}

void df_model_drop(struct df_model *m, uint32_t sequence)
{
    struct df_sequence_context *s = sequence_at(m, sequence);
    CHECK(m->stage_count == 0);
    s->used = false;
    /* A page that stays would only be wasted: nothing of it is read again. */
    (void)!madvise(s->context.rows, m->context_bytes, MADV_DONTNEED);
}

void df_model_length(struct df_model *m, uint32_t sequence, uint32_t ring, uint32_t length)
{
    struct df_sequence_context *s = sequence_at(m, sequence);
    if (s->ring != ring)
        dflash_context_begin(&s->context, 0);
    s->ring = ring;
    s->length = length;
}

/* ---- records ---- */

static void stage_flush(struct df_model *m)
{
    if (m->stage_count == 0)
        return;
    uint64_t begun = clock_mono_us();
    CHECK(m->stage_of < m->options.sequences_max);
    struct dflash_context *c = &m->sequences[m->stage_of].context;
    if (m->stage_reduced)
        dflash_context_append_reduced(m->drafter, c, m->stage, m->stage_count);
    else
        dflash_context_append(m->drafter, c, m->stage, m->stage_count);
    m->counters.records += m->stage_count;
    m->counters.append_us += clock_mono_us() - begun;
    m->stage_count = 0;
}

static uint32_t owner_of(const struct df_model *m, uint32_t ring, const struct msg_id *id,
                         uint32_t guess)
{
    uint32_t count = m->options.sequences_max;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = (guess + i) % count;
        const struct df_sequence_context *s = &m->sequences[at];
        if (s->used && s->ring == ring && memcmp(&s->id, id, sizeof *id) == 0)
            return at;
    }
    return NONE;
}

/* Position that the sequence's next row must have, staged rows counted. */
static uint32_t next_position(const struct df_model *m, uint32_t sequence)
{
    uint32_t staged = m->stage_of == sequence ? m->stage_count : 0;
    return m->sequences[sequence].context.length + staged;
}

/* Record r is this sequence's.  True if it became a row of the context. */
static bool record_take(struct df_model *m, const struct df_ring *ring, uint64_t r,
                        uint32_t sequence, uint32_t position)
{
    struct df_sequence_context *s = &m->sequences[sequence];
    struct tap_record record;
    uint32_t next = next_position(m, sequence);
    if (position >= m->options.context_max || position < next)
        return false; /* there already, or of no use */
    if (position >= (uint64_t)s->length + AHEAD_ROWS) {
        m->counters.lost++; /* the core counts tokens, and through them this memory */
        return false;
    }
    bool unseen = m->reach != UINT32_MAX && (uint64_t)position + m->reach + 1 < s->length;
    if (position > next || unseen) {
        if (m->stage_of == sequence)
            stage_flush(m);
        m->counters.holes += position > next && next > 0 && !unseen;
        dflash_context_begin(&s->context, unseen ? position + 1 : position);
        if (unseen)
            return false;
    }
    if (m->stage_of != sequence || m->stage_count == STAGE_ROWS)
        stage_flush(m);
    m->stage_of = sequence;
    if (!tap_ring_read(&ring->ring, r, &record,
                       m->stage + (uint64_t)m->stage_count * m->stage_floats) ||
        record.position != position) {
        m->counters.lost++;
        return false;
    }
    m->stage_count++;
    return true;
}

/* What is staged until the next flush is of this ring. */
static void stage_for(struct df_model *m, const struct df_ring *r)
{
    CHECK(m->stage_count == 0);
    m->stage_reduced = r->reduced;
    m->stage_floats = r->ring.geometry.tap_count * r->ring.geometry.hidden;
}

static uint64_t oldest(const struct df_ring *r, uint64_t head)
{
    uint64_t slots = r->ring.geometry.slots;
    return head > slots ? head - slots : 0;
}

void df_model_drain(struct df_model *m, uint32_t ring)
{
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    CHECK(ring < m->options.rings_max);
    struct df_ring *r = &m->rings[ring];
    if (r->memory == NULL)
        return;
    stage_for(m, r);
    uint64_t head = tap_ring_head(&r->ring);
    if (r->next > head) /* never true of an honest ring */
        r->next = head;
    if (r->next < oldest(r, head)) {
        m->counters.lost += oldest(r, head) - r->next;
        r->next = oldest(r, head);
    }
    uint32_t sequence = 0;
    for (; r->next < head; r->next++) {
        struct tap_record record;
        if (!tap_ring_peek(&r->ring, r->next, &record)) {
            m->counters.lost++;
            continue;
        }
        uint32_t owner = owner_of(m, ring, &record.id, sequence);
        if (owner == NONE)
            continue;
        sequence = owner;
        record_take(m, r, r->next, owner, record.position);
    }
    stage_flush(m);
}

static bool record_is(const struct df_ring *r, uint64_t at, const struct msg_id *id,
                      struct tap_record *ret_record)
{
    return tap_ring_peek(&r->ring, at, ret_record) && memcmp(&ret_record->id, id, sizeof *id) == 0;
}

void df_model_refill(struct df_model *m, uint32_t sequence)
{
    struct df_sequence_context *s = sequence_at(m, sequence);
    if (!s->used || s->ring >= m->options.rings_max || m->rings[s->ring].memory == NULL)
        return;
    const struct df_ring *r = &m->rings[s->ring];
    struct tap_record record;
    uint64_t from = r->next;
    stage_for(m, r);
    /* Back to its first row, or to one that no draft can see; mostly the newest records. */
    for (uint64_t at = r->next; at > oldest(r, r->next); at--) {
        if (!record_is(r, at - 1, &s->id, &record))
            continue;
        from = at - 1;
        if (record.position == 0 ||
            (m->reach != UINT32_MAX && (uint64_t)record.position + m->reach + 1 < s->length))
            break;
    }
    for (; from < r->next; from++)
        if (record_is(r, from, &s->id, &record))
            m->counters.refilled += record_take(m, r, from, sequence, record.position);
    stage_flush(m);
}

/* ---- drafts ---- */

static bool ready(struct df_model *m, const struct df_model_ask *ask)
{
    const struct df_sequence_context *s = sequence_at(m, ask->sequence);
    uint32_t least =
        ask->position < m->options.context_min ? ask->position : m->options.context_min;
    return s->used && s->context.length == ask->position &&
           s->context.length - s->context.first >= least &&
           ask->anchor < dflash_config(m->drafter)->vocab_size;
}

static void batch_run(struct df_model *m, struct df_model_ask **asks, uint32_t count)
{
    uint32_t drafts = dflash_config(m->drafter)->block_size - 1;
    if (count == 0)
        return;
    for (uint32_t i = 0; i < count; i++) {
        m->blocks[i].context = &m->sequences[asks[i]->sequence].context;
        m->blocks[i].anchor = asks[i]->anchor;
    }
    uint64_t begun = clock_mono_us();
    dflash_draft(m->drafter, m->blocks, count);
    m->counters.draft_us += clock_mono_us() - begun;
    m->counters.batches++;
    m->counters.blocks += count;
    for (uint32_t i = 0; i < count; i++) {
        asks[i]->count = drafts < MSG_DRAFT_IDS_MAX ? drafts : MSG_DRAFT_IDS_MAX;
        memcpy(asks[i]->ids, m->blocks[i].ids, asks[i]->count * sizeof *asks[i]->ids);
    }
}

void df_model_draft(struct df_model *m, struct df_model_ask *asks, uint32_t count)
{
    CHECK_OBJ(m, DF_MODEL_MAGIC);
    struct df_model_ask *batch[BATCH_MAX];
    uint32_t in_batch = 0;
    for (uint32_t i = 0; i < count; i++) {
        asks[i].count = 0;
        if (!ready(m, &asks[i])) {
            m->counters.no_context++;
            continue;
        }
        batch[in_batch++] = &asks[i];
        if (in_batch == BATCH_MAX) {
            batch_run(m, batch, in_batch);
            in_batch = 0;
        }
    }
    batch_run(m, batch, in_batch);
}
