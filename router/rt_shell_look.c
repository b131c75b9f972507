/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_shell_look.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/net/redis.h"

#define LOOK_MAGIC 0x52544c4bu

/* The eight fields of rt_map.h, then the chunks.  What is larger than a map's is not fetched: Redis
 * may hold anything under these names. */
static const char look_script[] =
    "local key = KEYS[1]\n"
    "local out = {}\n"
    "for i, name in ipairs({'epoch', 'incarnation', 'layout_fp', 'model_fp', 'salt', 'n_tokens',\n"
    "                       'n_blocks', 'gen'}) do\n"
    "  if redis.call('HSTRLEN', key, name) > 64 then return {} end\n"
    "  out[i] = redis.call('HGET', key, name)\n"
    "end\n"
    "local blocks = tonumber(out[7] or '')\n"
    "if not blocks or not (blocks >= 1) then return out end\n"
    "for c = 0, math.ceil(math.min(blocks, 16384) / 256) - 1 do\n"
    "  local chunk = key .. ':b:' .. c\n"
    "  if redis.call('STRLEN', chunk) > 5652 then return {} end\n"
    "  out[9 + c] = redis.call('GET', chunk)\n"
    "end\n"
    "return out\n";

STATIC_CHECK(RT_MAP_FIELDS == 8 && RT_MAP_FIELD_BYTES == 64 && RT_MAP_BLOCKS == 6);
STATIC_CHECK(RT_MAP_BLOCKS_MAX == 16384 && RT_MAP_CHUNK_BLOCKS == 256 &&
             RT_MAP_CHUNK_BYTES == 5652);

struct question {
    struct rt_shell_look *look;
    struct msg_id id;
    struct hash128 salt;
    struct question *next; /* unused ones */
};

struct rt_shell_look {
    uint32_t magic;
    uint32_t open;
    struct rt_shell_look_options options;
    char prefix[96]; /* tandem:{<cluster>}:sess: */
    struct question *all, *unused;
    uint8_t *items;
    struct rt_shell_look_stats stats;
};

struct rt_shell_look *rt_shell_look_create(const struct rt_shell_look_options *options)
{
    CHECK(options->redis != NULL && options->fn != NULL);
    struct rt_shell_look *l = mem_take(sizeof(*l));
    l->magic = LOOK_MAGIC;
    l->options = *options;
    snprintf(l->prefix, sizeof(l->prefix), "tandem:{%.64s}:sess:", options->cluster);
    l->options.cluster = NULL;
    l->items = mem_take((size_t)RT_MAP_BLOCKS_MAX * RT_MAP_ITEM_BYTES);
    l->all = mem_take_array(RT_SHELL_LOOKS_MAX, sizeof(*l->all));
    for (uint32_t i = 0; i < RT_SHELL_LOOKS_MAX; i++) {
        l->all[i] = (struct question){.look = l, .next = l->unused};
        l->unused = &l->all[i];
    }
    return l;
}

void rt_shell_look_destroy(struct rt_shell_look **look_p)
{
    struct rt_shell_look *l = *look_p;
    if (l == NULL)
        return;
    CHECK_OBJ(l, LOOK_MAGIC);
    CHECK(l->open == 0); /* Redis went first and has answered for all */
    mem_give(l->all);
    mem_give(l->items);
    l->magic = 0;
    mem_give(l);
    *look_p = NULL;
}

static struct rt_map_bytes bytes_of(const struct redis_value *v)
{
    if (v->type != REDIS_STRING)
        return (struct rt_map_bytes){.bytes = NULL};
    return (struct rt_map_bytes){.bytes = v->text, .count = v->bytes};
}

static enum err answer_read(struct rt_shell_look *l, const struct redis_value *v,
                            struct rt_map *ret_map, struct err_detail *detail)
{
    struct rt_map_bytes fields[RT_MAP_FIELDS], chunks[RT_MAP_CHUNKS_MAX];
    if (v->type == REDIS_ERROR)
        return err_set(detail, ERR_CORRUPT, "%.*s", (int)(v->bytes < 100 ? v->bytes : 100),
                       v->text);
    if (v->type != REDIS_ARRAY || v->count < RT_MAP_FIELDS ||
        v->count > RT_MAP_FIELDS + RT_MAP_CHUNKS_MAX)
        return err_set(detail, ERR_CORRUPT, "session map: no such answer is expected");
    for (uint32_t i = 0; i < RT_MAP_FIELDS; i++)
        fields[i] = bytes_of(&v->items[i]);
    uint32_t chunk_count = (uint32_t)v->count - RT_MAP_FIELDS;
    for (uint32_t i = 0; i < chunk_count; i++)
        chunks[i] = bytes_of(&v->items[RT_MAP_FIELDS + i]);
    return rt_map_read(fields, chunks, chunk_count, l->items, ret_map, detail);
}

static void on_answer(void *arg, enum err e, const struct redis_value *value)
{
    struct question *q = arg;
    struct rt_shell_look *l = q->look;
    CHECK_OBJ(l, LOOK_MAGIC);
    CHECK(l->open > 0);
    struct rt_map map;
    struct err_detail detail = {.text = ""};
    const struct msg_id id = q->id;
    bool found = false;
    if (e != ERR_OK) {
        l->stats.failed++;
    } else if ((e = answer_read(l, value, &map, &detail)) == ERR_NOT_FOUND) {
        l->stats.absent++;
    } else if (e != ERR_OK) {
        l->stats.corrupt++;
        log_warn(ROUTER, "session map ignored", "reason=\"%s\"", detail.text);
    } else if (memcmp(&map.salt, &q->salt, sizeof(map.salt)) != 0) {
        l->stats.absent++; /* another tenant's conversation of the same name */
    } else {
        l->stats.found++;
        found = true;
    }
    q->next = l->unused;
    l->unused = q;
    l->open--;
    l->options.fn(l->options.arg, &id, found ? &map : NULL);
}

enum err rt_shell_look_ask(struct rt_shell_look *l, const struct msg_id *id,
                           const char *session_key, const char *cache_salt)
{
    CHECK_OBJ(l, LOOK_MAGIC);
    char key[sizeof(l->prefix) + 33], sid[33];
    struct question *q = l->unused;
    if (q == NULL || !redis_up(l->options.redis)) {
        l->stats.failed++;
        return q == NULL ? ERR_BUSY : ERR_CLOSED;
    }
    block_hash_session(&l->options.key, session_key, sid);
    snprintf(key, sizeof(key), "%s%s", l->prefix, sid);
    const char *argv[] = {key};
    size_t bytes[] = {strlen(key)};
    l->unused = q->next;
    q->id = *id;
    q->salt = block_hash_salt(&l->options.key, cache_salt);
    l->open++;
    enum err e = redis_script(l->options.redis, look_script, on_answer, q, 1, 1, argv, bytes);
    if (e != ERR_OK) {
        q->next = l->unused;
        l->unused = q;
        l->open--;
        l->stats.failed++;
    }
    return e;
}

const struct rt_shell_look_stats *rt_shell_look_stats(const struct rt_shell_look *l)
{
    CHECK_OBJ(l, LOOK_MAGIC);
    return &l->stats;
}
