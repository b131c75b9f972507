/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_session.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "router/rt_list.h"

#define SESSIONS_MAGIC 0x52545345u

struct entry {
    struct rt_link use; /* oldest first; unused entries before all */
    struct hash128 name;
    struct rt_place place;
    struct entry *next; /* in its bucket */
    bool used;
};

struct rt_sessions {
    uint32_t magic;
    uint32_t count, entries_max;
    uint64_t bucket_mask;
    struct rt_link use;
    struct entry *entries;
    struct entry **buckets;
};

struct rt_sessions *rt_sessions_create(uint32_t entries_max)
{
    CHECK(entries_max > 0);
    struct rt_sessions *s = mem_take(sizeof(*s));
    uint64_t buckets = 1;
    while (buckets < entries_max)
        buckets *= 2;
    s->magic = SESSIONS_MAGIC;
    s->entries_max = entries_max;
    s->bucket_mask = buckets - 1;
    s->buckets = mem_take_array(buckets, sizeof(*s->buckets));
    s->entries = mem_take_array(entries_max, sizeof(*s->entries));
    rt_link_init(&s->use);
    for (uint32_t i = 0; i < entries_max; i++) {
        rt_link_init(&s->entries[i].use);
        rt_link_insert_before(&s->use, &s->entries[i].use);
    }
    return s;
}

void rt_sessions_destroy(struct rt_sessions **sessions_p)
{
    struct rt_sessions *s = *sessions_p;
    if (s == NULL)
        return;
    CHECK_OBJ(s, SESSIONS_MAGIC);
    mem_give(s->buckets);
    mem_give(s->entries);
    s->magic = 0;
    mem_give(s);
    *sessions_p = NULL;
}

static struct hash128 name_of(const struct hash128 *before, const char *cache_salt,
                              const void *bytes, size_t count)
{
    struct {
        struct hash128 before, salt, own;
    } parts = {*before, hash_xxh3_once(cache_salt, strlen(cache_salt)),
               hash_xxh3_once(bytes, count)};
    return hash_xxh3_once(&parts, sizeof(parts));
}

struct hash128 rt_session_name(const char *session_key, const char *cache_salt)
{
    static const struct hash128 none;
    CHECK(session_key[0] != '\0');
    return name_of(&none, cache_salt, session_key, strlen(session_key));
}

struct hash128 rt_session_front(const struct hash128 *before, const char *cache_salt,
                                const uint32_t *ids, uint32_t count)
{
    CHECK(count > 0 && ids != NULL);
    return name_of(before, cache_salt, ids, (size_t)count * sizeof(*ids));
}

static struct entry **bucket_of(const struct rt_sessions *s, const struct hash128 *name)
{
    uint64_t word;
    memcpy(&word, name->bytes, sizeof(word));
    return &s->buckets[word & s->bucket_mask];
}

static struct entry *find(const struct rt_sessions *s, const struct hash128 *name)
{
    struct entry *e = *bucket_of(s, name);
    while (e != NULL && memcmp(&e->name, name, sizeof(*name)) != 0)
        e = e->next;
    CHECK(e == NULL || e->used);
    return e;
}

static void touch(struct rt_sessions *s, struct entry *e)
{
    rt_link_remove(&e->use);
    rt_link_insert_before(&s->use, &e->use);
}

bool rt_sessions_find(struct rt_sessions *s, const struct hash128 *name, struct rt_place *ret_place)
{
    CHECK_OBJ(s, SESSIONS_MAGIC);
    struct entry *e = find(s, name);
    if (e == NULL)
        return false;
    touch(s, e);
    *ret_place = e->place;
    return true;
}

static void forget(struct rt_sessions *s, struct entry *e)
{
    struct entry **at = bucket_of(s, &e->name);
    while (*at != e) {
        CHECK(*at != NULL);
        at = &(*at)->next;
    }
    *at = e->next;
    e->used = false;
    CHECK(s->count > 0);
    s->count--;
}

void rt_sessions_put(struct rt_sessions *s, const struct hash128 *name,
                     const struct rt_place *place)
{
    CHECK_OBJ(s, SESSIONS_MAGIC);
    struct entry *e = find(s, name);
    if (e == NULL) {
        e = rt_link_item(s->use.next, struct entry, use);
        if (e->used)
            forget(s, e);
        struct entry **bucket = bucket_of(s, name);
        e->name = *name;
        e->next = *bucket;
        *bucket = e;
        e->used = true;
        s->count++;
        CHECK(s->count <= s->entries_max);
    }
    e->place = *place;
    touch(s, e);
}

uint32_t rt_sessions_count(const struct rt_sessions *s)
{
    CHECK_OBJ(s, SESSIONS_MAGIC);
    return s->count;
}
