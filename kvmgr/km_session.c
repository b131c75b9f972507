/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_session.h"

#include <stdlib.h>
#include <string.h>

#include "kvmgr/km_index.h"
#include "lib/base/check.h"

#define KM_SESSIONS_MAGIC 0x4b4d5353u
/* How far from the old end an entry without blocks is looked for. */
#define LOOK_MAX 64u

struct km_sessions {
    uint32_t magic;
    uint32_t max, fresh, count;
    uint32_t held; /* blocks */
    uint32_t tenants_max, tenants;
    struct km_session *list;
    struct km_tenant *tenant_list;
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t oldest, newest;
};

enum err km_sessions_create(uint32_t sessions_max, uint32_t tenants_max, struct km_sessions **ret)
{
    CHECK(sessions_max > 0 && tenants_max > 0);
    struct km_sessions *t = calloc(1, sizeof(*t));
    if (!t)
        return ERR_NOMEM;
    t->magic = KM_SESSIONS_MAGIC;
    t->max = sessions_max;
    t->tenants_max = tenants_max;
    uint32_t buckets = 16;
    while (buckets < sessions_max && buckets < 1u << 30)
        buckets *= 2;
    t->bucket_mask = buckets - 1;
    t->list = calloc(sessions_max, sizeof(*t->list));
    t->tenant_list = calloc(tenants_max, sizeof(*t->tenant_list));
    t->buckets = malloc(buckets * sizeof(*t->buckets));
    if (!t->list || !t->tenant_list || !t->buckets) {
        km_sessions_destroy(&t);
        return ERR_NOMEM;
    }
    memset(t->buckets, 0xff, buckets * sizeof(*t->buckets));
    t->oldest = t->newest = KM_NONE;
    *ret = t;
    return ERR_OK;
}

void km_sessions_destroy(struct km_sessions **t_p)
{
    struct km_sessions *t = *t_p;
    if (!t)
        return;
    CHECK_OBJ(t, KM_SESSIONS_MAGIC);
    free(t->list);
    free(t->tenant_list);
    free(t->buckets);
    t->magic = 0;
    free(t);
    *t_p = NULL;
}

uint64_t km_sessions_bytes(const struct km_sessions *t)
{
    CHECK_OBJ(t, KM_SESSIONS_MAGIC);
    return (uint64_t)t->max * sizeof(*t->list) +
           ((uint64_t)t->bucket_mask + 1) * sizeof(*t->buckets) +
           (uint64_t)t->tenants_max * sizeof(*t->tenant_list);
}

/* KM_NONE: all entries are in use. */
static uint32_t tenant_use(struct km_sessions *t, const struct hash128 *salt)
{
    uint32_t idle = KM_NONE;
    for (uint32_t i = 0; i < t->tenants; i++) {
        if (memcmp(&t->tenant_list[i].salt, salt, sizeof(*salt)) == 0)
            return i;
        if (t->tenant_list[i].sessions == 0 && idle == KM_NONE)
            idle = i;
    }
    if (idle == KM_NONE && t->tenants < t->tenants_max)
        idle = t->tenants++;
    if (idle == KM_NONE)
        return KM_NONE;
    CHECK(t->tenant_list[idle].blocks == 0);
    t->tenant_list[idle] = (struct km_tenant){.salt = *salt};
    return idle;
}

static uint32_t *bucket_of(const struct km_sessions *t, const struct hash128 *sid,
                           const struct hash128 *salt)
{
    uint32_t a, b;
    memcpy(&a, sid->bytes, sizeof(a));
    memcpy(&b, salt->bytes, sizeof(b));
    return &t->buckets[(a ^ b * 0x9e3779b1u) & t->bucket_mask];
}

static void list_drop(struct km_sessions *t, uint32_t index)
{
    struct km_session *s = &t->list[index];
    *(s->prev == KM_NONE ? &t->oldest : &t->list[s->prev].next) = s->next;
    *(s->next == KM_NONE ? &t->newest : &t->list[s->next].prev) = s->prev;
}

static void list_add(struct km_sessions *t, uint32_t index)
{
    struct km_session *s = &t->list[index];
    s->prev = t->newest;
    s->next = KM_NONE;
    *(t->newest == KM_NONE ? &t->oldest : &t->list[t->newest].next) = index;
    t->newest = index;
}

static void entry_forget(struct km_sessions *t, uint32_t index)
{
    struct km_session *s = &t->list[index];
    CHECK(s->used && s->blocks == 0);
    struct km_tenant *tenant = &t->tenant_list[s->tenant];
    uint32_t *at = bucket_of(t, &s->sid, &tenant->salt);
    while (*at != index) {
        CHECK(*at != KM_NONE);
        at = &t->list[*at].bucket_next;
    }
    *at = s->bucket_next;
    list_drop(t, index);
    CHECK(tenant->sessions > 0 && t->count > 0);
    tenant->sessions--;
    t->count--;
    s->used = false;
}

static uint32_t entry_take(struct km_sessions *t)
{
    if (t->fresh < t->max)
        return t->fresh++;
    uint32_t index = t->oldest;
    for (uint32_t i = 0; i < LOOK_MAX && index != KM_NONE; i++, index = t->list[index].next) {
        if (t->list[index].blocks == 0) {
            entry_forget(t, index);
            return index;
        }
    }
    return KM_NONE;
}

static uint32_t entry_find(const struct km_sessions *t, const struct hash128 *sid,
                           const struct hash128 *salt)
{
    for (uint32_t i = *bucket_of(t, sid, salt); i != KM_NONE; i = t->list[i].bucket_next) {
        const struct km_session *s = &t->list[i];
        CHECK(s->used);
        if (memcmp(&s->sid, sid, sizeof(*sid)) == 0 &&
            memcmp(&t->tenant_list[s->tenant].salt, salt, sizeof(*salt)) == 0)
            return i;
    }
    return KM_NONE;
}

uint32_t km_sessions_use(struct km_sessions *t, const struct hash128 *sid,
                         const struct hash128 *salt)
{
    CHECK_OBJ(t, KM_SESSIONS_MAGIC);
    uint32_t index = entry_find(t, sid, salt);
    if (index != KM_NONE) {
        list_drop(t, index);
        list_add(t, index);
        return index;
    }
    uint32_t tenant = tenant_use(t, salt);
    if (tenant == KM_NONE)
        return KM_NONE;
    t->tenant_list[tenant].sessions++; /* so that taking an entry does not free the tenant's */
    index = entry_take(t);
    if (index == KM_NONE) {
        t->tenant_list[tenant].sessions--;
        return KM_NONE;
    }
    uint32_t *bucket = bucket_of(t, sid, &t->tenant_list[tenant].salt);
    t->list[index] = (struct km_session){
        .sid = *sid, .tenant = tenant, .tail = KM_NONE, .used = true, .bucket_next = *bucket};
    *bucket = index;
    list_add(t, index);
    t->count++;
    return index;
}

struct km_session *km_sessions_at(const struct km_sessions *t, uint32_t index)
{
    CHECK_OBJ(t, KM_SESSIONS_MAGIC);
    if (index == KM_NONE)
        return NULL;
    CHECK(index < t->fresh && t->list[index].used);
    return &t->list[index];
}

struct km_tenant *km_sessions_tenant(const struct km_sessions *t, const struct km_session *s)
{
    CHECK_OBJ(t, KM_SESSIONS_MAGIC);
    CHECK(s->tenant < t->tenants_max);
    return &t->tenant_list[s->tenant];
}

void km_sessions_charge(struct km_sessions *t, uint32_t index, int blocks)
{
    struct km_session *s = km_sessions_at(t, index);
    if (!s)
        return;
    struct km_tenant *tenant = &t->tenant_list[s->tenant];
    CHECK(blocks >= 0 || (s->blocks >= (uint32_t)-blocks && tenant->blocks >= (uint32_t)-blocks));
    s->blocks += (uint32_t)blocks;
    t->held += s->held ? (uint32_t)blocks : 0;
    tenant->blocks += (uint32_t)blocks;
}

uint32_t km_sessions_find(const struct km_sessions *t, const struct hash128 *sid,
                          const struct hash128 *salt)
{
    CHECK_OBJ(t, KM_SESSIONS_MAGIC);
    return entry_find(t, sid, salt);
}

void km_sessions_hold(struct km_sessions *t, uint32_t index, bool hold)
{
    struct km_session *s = km_sessions_at(t, index);
    CHECK(s != NULL);
    if (s->held == hold)
        return;
    s->held = hold;
    t->held += hold ? s->blocks : 0 - s->blocks;
}

uint32_t km_sessions_held(const struct km_sessions *t)
{
    CHECK_OBJ(t, KM_SESSIONS_MAGIC);
    return t->held;
}

uint32_t km_sessions_count(const struct km_sessions *t)
{
    CHECK_OBJ(t, KM_SESSIONS_MAGIC);
    return t->count;
}

struct km_session *km_sessions_next(struct km_sessions *t, uint32_t *cursor_p)
{
    CHECK_OBJ(t, KM_SESSIONS_MAGIC);
    while (*cursor_p < t->fresh) {
        struct km_session *s = &t->list[(*cursor_p)++];
        if (s->used)
            return s;
    }
    *cursor_p = 0;
    return NULL;
}
