/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_map.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvmgr/km_event.h"
#include "kvmgr/km_map_image.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/net/redis.h"

#define KM_MAP_MAGIC    0x4b4d4d50u
#define NONE            UINT32_MAX
#define ENTRIES_DEFAULT (1u << 20)
#define WRITES_DEFAULT  16u
#define RETRIES_MAX     3u
#define KEYS            2
#define PIN_TTL_MS      600000u /* a pinned map outlives its pin by this */

/* Answers {1, gen} written, {0, epoch in Redis} refused, {2, gen in Redis} refused. */
static const char write_script[] =
    "local ours = tonumber(ARGV[1])\n"
    "local seen = tonumber(redis.call('GET', KEYS[1]) or '0') or 0\n"
    "if seen ~= ours then return {0, seen} end\n"
    "local old = redis.call('HMGET', KEYS[2], 'epoch', 'gen', 'n_blocks')\n"
    "local gen = 0\n"
    "if tonumber(old[1] or '0') == ours then gen = tonumber(old[2] or '0') or 0 end\n"
    "if gen ~= tonumber(ARGV[2]) then return {2, gen} end\n"
    "local ttl = ARGV[3]\n"
    "local fields = tonumber(ARGV[4])\n"
    /* A full Redis refuses this; after a DEL it would take all the rest. */
    "redis.call('HSET', KEYS[2], 'epoch', '0')\n"
    "redis.call('DEL', KEYS[2])\n"
    "redis.call('HSET', KEYS[2], unpack(ARGV, 5, 4 + fields))\n"
    "redis.call('PEXPIRE', KEYS[2], ttl)\n"
    "local chunks = #ARGV - 4 - fields\n"
    "for c = 0, chunks - 1 do\n"
    "  redis.call('SET', KEYS[2] .. ':b:' .. c, ARGV[5 + fields + c], 'PX', ttl)\n"
    "end\n"
    "local before = math.ceil((tonumber(old[3] or '0') or 0) / 256)\n"
    "if before > 256 then before = 256 end\n"
    "for c = chunks, before - 1 do redis.call('DEL', KEYS[2] .. ':b:' .. c) end\n"
    "return {1, gen + 1}\n";

/* Answers the epoch in Redis, which is then at least ours. */
static const char epoch_script[] = "local seen = tonumber(redis.call('GET', KEYS[1]) or '0') or 0\n"
                                   "if seen < tonumber(ARGV[1]) then\n"
                                   "  redis.call('SET', KEYS[1], ARGV[1])\n"
                                   "  return tonumber(ARGV[1])\n"
                                   "end\n"
                                   "return seen\n";

enum list_kind { LIST_LRU, LIST_QUEUE, LIST_KINDS };

struct list {
    uint32_t head, tail, count;
};

struct session {
    bool used, dirty, inflight, queued;
    bool on_tier; /* some entries say so */
    struct km_map *map;
    char sid[33];
    uint32_t bucket_next;
    struct {
        uint32_t prev, next;
    } link[LIST_KINDS];
    struct hash128 salt;
    struct msg_id request;
    uint64_t lease;
    uint64_t gen; /* in Redis under our epoch, as far as we know */
    uint32_t retries;
    uint32_t token_count, snapshot_tokens;
    uint64_t pin_until_ms; /* 0 = not pinned */
    uint32_t entry_count, entry_capacity;
    uint8_t *entries; /* KM_MAP_ENTRY_BYTES each */
};

struct km_map {
    uint32_t magic;
    struct km_map_options options;
    char prefix[96]; /* tandem:{<cluster>}: */
    char epoch_key[128];
    struct hash128 layout_fp, model_fp;
    struct session *sessions;
    uint32_t *buckets;
    uint32_t bucket_count; /* a power of two */
    struct list lists[LIST_KINDS];
    uint32_t free_head;    /* unused sessions by bucket_next */
    uint32_t entries_used; /* sum of capacities */
    uint32_t inflight;
    bool epoch_asked, epoch_ready; /* our epoch is in Redis: writes may go */
    struct km_map_args args;       /* of one write */
    struct km_map_stats stats;
};

/* --- sessions */

static void list_add(struct km_map *m, enum list_kind kind, uint32_t index)
{
    struct list *list = &m->lists[kind];
    struct session *s = &m->sessions[index];
    s->link[kind].prev = list->tail;
    s->link[kind].next = NONE;
    if (list->tail == NONE)
        list->head = index;
    else
        m->sessions[list->tail].link[kind].next = index;
    list->tail = index;
    list->count++;
}

static void list_drop(struct km_map *m, enum list_kind kind, uint32_t index)
{
    struct list *list = &m->lists[kind];
    struct session *s = &m->sessions[index];
    CHECK(list->count > 0);
    if (s->link[kind].prev == NONE)
        list->head = s->link[kind].next;
    else
        m->sessions[s->link[kind].prev].link[kind].next = s->link[kind].next;
    if (s->link[kind].next == NONE)
        list->tail = s->link[kind].prev;
    else
        m->sessions[s->link[kind].next].link[kind].prev = s->link[kind].prev;
    list->count--;
}

static uint32_t index_of(const struct km_map *m, const struct session *s)
{
    CHECK(s >= m->sessions && s < m->sessions + m->options.sessions_max);
    return (uint32_t)(s - m->sessions);
}

static uint32_t *bucket_of(struct km_map *m, const char *sid)
{
    uint32_t hash = 2166136261u;
    for (const char *c = sid; *c; c++)
        hash = (hash ^ (uint8_t)*c) * 16777619u;
    return &m->buckets[hash & (m->bucket_count - 1)];
}

static struct session *session_find(struct km_map *m, const char *sid)
{
    for (uint32_t i = *bucket_of(m, sid); i != NONE; i = m->sessions[i].bucket_next) {
        CHECK(m->sessions[i].used);
        if (strcmp(m->sessions[i].sid, sid) == 0)
            return &m->sessions[i];
    }
    return NULL;
}

static void queue_add(struct km_map *m, struct session *s)
{
    if (s->queued || s->inflight)
        return;
    s->queued = true;
    list_add(m, LIST_QUEUE, index_of(m, s));
}

static void queue_drop(struct km_map *m, struct session *s)
{
    if (!s->queued)
        return;
    s->queued = false;
    list_drop(m, LIST_QUEUE, index_of(m, s));
}

static void session_forget(struct km_map *m, struct session *s)
{
    CHECK(s->used && !s->inflight);
    uint32_t index = index_of(m, s);
    uint32_t *at = bucket_of(m, s->sid);
    while (*at != index)
        at = &m->sessions[*at].bucket_next;
    *at = s->bucket_next;
    if (s->dirty)
        m->stats.dropped++;
    queue_drop(m, s);
    list_drop(m, LIST_LRU, index);
    CHECK(m->entries_used >= s->entry_capacity);
    m->entries_used -= s->entry_capacity;
    free(s->entries);
    *s = (struct session){.bucket_next = m->free_head};
    m->free_head = index;
    m->stats.sessions--;
}

/* Forgets the session committed to longest ago that is neither in flight nor `keep`. */
static bool session_evict(struct km_map *m, const struct session *keep)
{
    for (uint32_t i = m->lists[LIST_LRU].head; i != NONE; i = m->sessions[i].link[LIST_LRU].next) {
        struct session *s = &m->sessions[i];
        if (s == keep || s->inflight)
            continue;
        session_forget(m, s);
        return true;
    }
    return false;
}

static struct session *session_add(struct km_map *m, const char *sid)
{
    if (m->free_head == NONE && !session_evict(m, NULL))
        return NULL;
    uint32_t index = m->free_head;
    struct session *s = &m->sessions[index];
    CHECK(!s->used);
    m->free_head = s->bucket_next;
    uint32_t *bucket = bucket_of(m, sid);
    *s = (struct session){.used = true, .map = m, .bucket_next = *bucket};
    *bucket = index;
    snprintf(s->sid, sizeof(s->sid), "%s", sid);
    list_add(m, LIST_LRU, index);
    m->stats.sessions++;
    return s;
}

static bool session_room(struct km_map *m, struct session *s, uint32_t count)
{
    if (count <= s->entry_capacity)
        return true;
    if (count > KM_MAP_BLOCKS_MAX)
        return false;
    uint32_t capacity = s->entry_capacity > 0 ? s->entry_capacity : 16;
    while (capacity < count)
        capacity *= 2;
    uint32_t more = capacity - s->entry_capacity;
    while (m->entries_used + more > m->options.entries_max) {
        if (!session_evict(m, s))
            return false;
    }
    uint8_t *entries = realloc(s->entries, (size_t)capacity * KM_MAP_ENTRY_BYTES);
    if (!entries)
        return false;
    s->entries = entries;
    s->entry_capacity = capacity;
    m->entries_used += more;
    return true;
}

/* --- writes */

static void write_done(void *arg, enum err e, const struct redis_value *value);

static enum err session_write(struct km_map *m, struct session *s)
{
    char sess_key[160];
    struct km_map_args *args = &m->args;
    struct km_map_image image = {
        .epoch = m->options.epoch,
        .incarnation = m->options.incarnation,
        .gen = s->gen + 1,
        .layout_fp = m->layout_fp,
        .model_fp = m->model_fp,
        .salt = s->salt,
        .request = s->request,
        .token_count = s->token_count,
        .entry_count = s->entry_count,
        .entries = s->entries,
        .updated_ms = m->options.unix_ms(),
        .snapshot_tokens = s->snapshot_tokens,
        .pin_until_ms = s->pin_until_ms,
        .on_tier = s->on_tier,
    };
    uint64_t ttl_ms = m->options.ttl_ms;
    if (s->pin_until_ms + PIN_TTL_MS > image.updated_ms + ttl_ms)
        ttl_ms = s->pin_until_ms + PIN_TTL_MS - image.updated_ms;
    snprintf(sess_key, sizeof(sess_key), "%ssess:%s", m->prefix, s->sid);
    km_map_args_reset(args);
    km_map_args_text(args, m->epoch_key);
    km_map_args_text(args, sess_key);
    km_map_args_u64(args, m->options.epoch);
    km_map_args_u64(args, s->gen);
    km_map_args_u64(args, ttl_ms);
    km_map_args_u64(args, 2 * KM_MAP_FIELDS);
    km_map_image_fields(args, &image);
    TRY(km_map_image_chunks(args, &image));
    return redis_script(m->options.redis, write_script, write_done, s, KEYS, args->count,
                        args->argv, args->bytes);
}

/* Sends queued sessions as far as writes_max allows.  ERR_BUSY leaves the rest queued for the next
 * commit or answer. */
static void map_pump(struct km_map *m)
{
    while (m->epoch_ready && m->inflight < m->options.writes_max &&
           m->lists[LIST_QUEUE].head != NONE && redis_up(m->options.redis)) {
        struct session *s = &m->sessions[m->lists[LIST_QUEUE].head];
        CHECK(s->used && s->queued && !s->inflight);
        if (s->entry_count == 0) { /* emptied while it waited */
            s->dirty = false;
            queue_drop(m, s);
            continue;
        }
        enum err e = session_write(m, s);
        if (e == ERR_BUSY)
            return;
        queue_drop(m, s);
        if (e != ERR_OK) {
            m->stats.failed++;
            continue;
        }
        s->dirty = false;
        s->inflight = true;
        m->inflight++;
    }
}

static void epoch_done(void *arg, enum err e, const struct redis_value *value)
{
    struct km_map *m = arg;
    CHECK_OBJ(m, KM_MAP_MAGIC);
    m->epoch_asked = false;
    if (e != ERR_OK || value->type != REDIS_INTEGER || value->integer < 0) {
        m->stats.failed++;
        m->stats.refusing |= e == ERR_OK;
        return;
    }
    m->stats.refusing = false;
    m->stats.redis_epoch = value->integer > UINT32_MAX ? UINT32_MAX : (uint32_t)value->integer;
    m->epoch_ready = m->stats.redis_epoch == m->options.epoch;
    if (!m->epoch_ready) {
        log_warn(KVMGR, "session maps are off until the next start",
                 "reason=\"redis knows a later epoch\" epoch=%u redis_epoch=%u", m->options.epoch,
                 m->stats.redis_epoch);
        return;
    }
    for (uint32_t i = m->lists[LIST_LRU].head; i != NONE; i = m->sessions[i].link[LIST_LRU].next) {
        struct session *s = &m->sessions[i];
        s->dirty = true;
        s->retries = 0;
        queue_add(m, s);
    }
    map_pump(m);
}

/* Queues up to `most` of the sessions that Redis does not have as they are now. */
static void dirty_queue(struct km_map *m, uint32_t most)
{
    for (uint32_t i = m->lists[LIST_LRU].head; i != NONE && most > 0;
         i = m->sessions[i].link[LIST_LRU].next) {
        struct session *s = &m->sessions[i];
        if (!s->dirty || s->queued || s->inflight)
            continue;
        queue_add(m, s);
        most--;
    }
}

static void epoch_raise(struct km_map *m)
{
    if (m->epoch_asked || !redis_up(m->options.redis))
        return;
    char epoch[16];
    snprintf(epoch, sizeof(epoch), "%u", m->options.epoch);
    const char *argv[] = {m->epoch_key, epoch};
    size_t bytes[] = {strlen(m->epoch_key), strlen(epoch)};
    m->epoch_asked =
        redis_script(m->options.redis, epoch_script, epoch_done, m, 1, 2, argv, bytes) == ERR_OK;
}

/* What the script said about a session.  A refusal by gen is told apart from one by epoch: we are
 * the only writer under our epoch, so the stored gen is one of our own whose answer was lost. */
static void write_answer(struct km_map *m, struct session *s, int64_t status, int64_t number)
{
    if (status == 1) {
        m->stats.writes++;
        s->gen = (uint64_t)number;
        s->retries = 0;
    } else if (status == 2) {
        m->stats.refused_gen++;
        s->gen = (uint64_t)number;
        if (s->retries++ < RETRIES_MAX)
            s->dirty = true;
    } else {
        m->stats.refused_epoch++;
        s->dirty = true;
        m->epoch_ready = false; /* Redis was emptied, or another kvmgr took over */
        epoch_raise(m);
    }
}

static void write_done(void *arg, enum err e, const struct redis_value *value)
{
    struct session *s = arg;
    struct km_map *m = s->map;
    CHECK_OBJ(m, KM_MAP_MAGIC);
    CHECK(s->used && s->inflight && m->inflight > 0);
    s->inflight = false;
    m->inflight--;
    if (e != ERR_OK) {
        m->stats.failed++;
        s->dirty = true; /* written again when Redis returns */
        return;
    }
    if (value->type == REDIS_ARRAY && value->count == 2 && value->items[0].type == REDIS_INTEGER &&
        value->items[1].type == REDIS_INTEGER && value->items[1].integer >= 0) {
        write_answer(m, s, value->items[0].integer, value->items[1].integer);
        if (m->stats.refusing && m->epoch_ready)
            dirty_queue(m, UINT32_MAX);
        m->stats.refusing = false;
    } else {
        m->stats.failed++;
        m->stats.refusing = true;
        s->dirty = true; /* until km_map_tick finds that Redis takes writes again */
        log_warn(KVMGR, "session map not written", "reason=\"%.*s\"",
                 value->text ? (int)value->bytes : 0, value->text ? value->text : "");
        return;
    }
    if (s->dirty)
        queue_add(m, s);
    map_pump(m);
}

/* --- public */

struct km_map *km_map_create(const struct km_map_options *options)
{
    CHECK(options->epoch > 0 && options->sessions_max > 0 && options->ttl_ms > 0);
    struct km_map *m = mem_take(sizeof(*m));
    m->magic = KM_MAP_MAGIC;
    m->options = *options;
    if (m->options.entries_max == 0)
        m->options.entries_max = ENTRIES_DEFAULT;
    if (m->options.writes_max == 0)
        m->options.writes_max = WRITES_DEFAULT;
    snprintf(m->prefix, sizeof(m->prefix), "tandem:{%.64s}:", options->cluster);
    snprintf(m->epoch_key, sizeof(m->epoch_key), "%sepoch:%u", m->prefix, options->pool_id);
    m->options.cluster = NULL;
    m->sessions = mem_take_array(options->sessions_max, sizeof(*m->sessions));
    for (uint32_t i = 0; i < options->sessions_max; i++)
        m->sessions[i].bucket_next = i + 1 < options->sessions_max ? i + 1 : NONE;
    m->bucket_count = 16;
    while (m->bucket_count < options->sessions_max && m->bucket_count < 1u << 20)
        m->bucket_count *= 2;
    m->buckets = mem_take_array(m->bucket_count, sizeof(*m->buckets));
    memset(m->buckets, 0xff, m->bucket_count * sizeof(*m->buckets));
    for (uint32_t kind = 0; kind < LIST_KINDS; kind++)
        m->lists[kind] = (struct list){NONE, NONE, 0};
    return m;
}

void km_map_destroy(struct km_map **map_p)
{
    struct km_map *m = *map_p;
    if (!m)
        return;
    CHECK_OBJ(m, KM_MAP_MAGIC);
    CHECK(m->inflight == 0); /* Redis went first and has answered for all */
    for (uint32_t i = 0; i < m->options.sessions_max; i++)
        free(m->sessions[i].entries);
    mem_give(m->sessions);
    mem_give(m->buckets);
    km_map_args_fini(&m->args);
    m->magic = 0;
    mem_give(m);
    *map_p = NULL;
}

void km_map_arena(struct km_map *m, const struct hash128 *layout_fp, const struct hash128 *model_fp)
{
    CHECK_OBJ(m, KM_MAP_MAGIC);
    if (memcmp(&m->layout_fp, layout_fp, sizeof(*layout_fp)) == 0 &&
        memcmp(&m->model_fp, model_fp, sizeof(*model_fp)) == 0)
        return;
    m->layout_fp = *layout_fp;
    m->model_fp = *model_fp;
    while (session_evict(m, NULL))
        continue;
    /* One in flight is emptied: its next commit starts it anew. */
    for (uint32_t i = 0; i < m->options.sessions_max; i++)
        m->sessions[i].lease = m->sessions[i].entry_count = 0;
}

static void session_append(struct session *s, const struct km_session_change *c)
{
    CHECK(s->entry_count + c->count <= s->entry_capacity);
    s->on_tier &= s->entry_count > 0;
    for (uint32_t i = 0; i < c->count; i++) {
        uint8_t *entry = s->entries + (size_t)(s->entry_count + i) * KM_MAP_ENTRY_BYTES;
        km_map_entry_put(entry, &c->hashes[i], c->blocks[i], 0, 0); /* tier 0: the arena */
    }
    s->entry_count += c->count;
}

static bool continues(const struct session *s, const struct km_session_change *c)
{
    if (c->first_block == 0)
        return true;
    if (c->first_block > s->entry_count)
        return false;
    const uint8_t *last = s->entries + (size_t)(c->first_block - 1) * KM_MAP_ENTRY_BYTES;
    return memcmp(last, &c->parent, sizeof(c->parent)) == 0;
}

static void session_send(struct km_map *m, struct session *s)
{
    s->retries = 0;
    s->dirty = true;
    list_drop(m, LIST_LRU, index_of(m, s));
    list_add(m, LIST_LRU, index_of(m, s));
    if (!m->epoch_ready) {
        if (m->stats.redis_epoch <= m->options.epoch)
            epoch_raise(m);
        if (!m->epoch_asked) /* else its answer sends the session off */
            m->stats.dropped++;
        return;
    }
    queue_add(m, s);
    map_pump(m);
}

/* A state was kept, or the turn ended, of the lease whose chain the map holds. */
static void session_note(struct km_map *m, struct session *s, const struct km_session_change *c)
{
    if (!s || s->lease != c->lease || s->entry_count == 0)
        return;
    uint64_t until_ms = c->pin_us > 0 ? m->options.unix_ms() + c->pin_us / 1000 : s->pin_until_ms;
    if (c->snapshot_tokens == s->snapshot_tokens && until_ms == s->pin_until_ms)
        return;
    s->snapshot_tokens = c->snapshot_tokens;
    s->pin_until_ms = until_ms;
    session_send(m, s);
}

void km_map_commit(struct km_map *m, const struct km_session_change *c)
{
    CHECK_OBJ(m, KM_MAP_MAGIC);
    CHECK(strlen(c->sid) == 32);
    struct session *s = session_find(m, c->sid);
    if (c->count == 0) {
        session_note(m, s, c);
        return;
    }
    if (!s && c->first_block == 0)
        s = session_add(m, c->sid);
    if (!s) { /* forgotten in the middle, or no room */
        m->stats.dropped++;
        return;
    }
    /* Two requests of one session at once: the one that began last is the session's.  A new
     * turn may go on where an earlier one was. */
    if (s->lease != c->lease && continues(s, c)) {
        s->lease = c->lease;
        s->entry_count = c->first_block;
    }
    if (s->lease != c->lease || s->entry_count != c->first_block) {
        m->stats.superseded++;
        return;
    }
    if (!session_room(m, s, s->entry_count + c->count)) {
        m->stats.dropped++;
        if (s->entry_count == 0 && !s->inflight)
            session_forget(m, s);
        return;
    }
    session_append(s, c);
    s->salt = c->salt;
    s->request = c->request;
    s->token_count = c->token_count;
    s->snapshot_tokens = c->snapshot_tokens;
    session_send(m, s);
}

void km_map_moved(struct km_map *m, const struct km_moved *items, uint32_t count)
{
    CHECK_OBJ(m, KM_MAP_MAGIC);
    for (uint32_t i = 0; i < count; i++) {
        char sid[33];
        hex_encode(&items[i].sid, sizeof(items[i].sid), sid);
        struct session *s = session_find(m, sid);
        if (!s || items[i].position >= s->entry_count)
            continue;
        uint8_t *entry = s->entries + (size_t)items[i].position * KM_MAP_ENTRY_BYTES;
        if (memcmp(entry, &items[i].hash, sizeof(items[i].hash)) != 0)
            continue;
        km_map_entry_put(entry, &items[i].hash, NONE, 1, 0);
        s->on_tier = s->dirty = true;
        if (m->epoch_ready)
            queue_add(m, s);
    }
    map_pump(m);
}

void km_map_pin(struct km_map *m, const char *sid, uint64_t until_ms)
{
    CHECK_OBJ(m, KM_MAP_MAGIC);
    struct session *s = session_find(m, sid);
    if (!s || s->entry_count == 0 || s->pin_until_ms == until_ms)
        return;
    s->pin_until_ms = until_ms;
    session_send(m, s);
}

void km_map_tick(struct km_map *m)
{
    CHECK_OBJ(m, KM_MAP_MAGIC);
    if (!m->stats.refusing || !redis_up(m->options.redis))
        return;
    if (!m->epoch_ready) {
        if (m->stats.redis_epoch <= m->options.epoch)
            epoch_raise(m);
        return;
    }
    if (m->inflight == 0 && m->lists[LIST_QUEUE].head == NONE)
        dirty_queue(m, 1); /* one asks; its answer sends the others */
    map_pump(m);
}

void km_map_redis_up(struct km_map *m, bool up)
{
    CHECK_OBJ(m, KM_MAP_MAGIC);
    m->epoch_ready = false;
    if (up)
        epoch_raise(m);
}

const struct km_map_stats *km_map_stats(const struct km_map *m)
{
    CHECK_OBJ(m, KM_MAP_MAGIC);
    return &m->stats;
}

uint32_t km_map_waiting(const struct km_map *m)
{
    CHECK_OBJ(m, KM_MAP_MAGIC);
    uint32_t count = 0;
    for (uint32_t i = m->lists[LIST_LRU].head; i != NONE; i = m->sessions[i].link[LIST_LRU].next)
        count += m->sessions[i].dirty || m->sessions[i].queued || m->sessions[i].inflight;
    return count;
}
