/* SPDX-License-Identifier: Apache-2.0 */
/* Where conversations live: what names them, which group has one, and when another is better. */
#include "router/rt_core_state.h"

#include <string.h>

#include "lib/base/check.h"

void rt_affinity_name(struct rt_request *r, const uint32_t *ids)
{
    STATIC_CHECK(RT_PAGE_TOKENS << (RT_FRONTS_MAX - 1) == MSG_IDS_MAX);
    struct hash128 front = {{0}};
    uint32_t from = 0;
    CHECK(r->front_count == 0 && !r->named);
    r->named = r->session_key.bytes[0] != '\0';
    if (r->named)
        r->name = rt_session_name(r->session_key.bytes, r->cache_salt.bytes);
    for (uint32_t end = RT_PAGE_TOKENS; end <= r->prompt_count; end *= 2) {
        front = rt_session_front(&front, r->cache_salt.bytes, ids + from, end - from);
        CHECK(r->front_count < RT_FRONTS_MAX);
        r->fronts[r->front_count++] = front;
        from = end;
    }
}

struct rt_need rt_request_need(const struct rt_request *r)
{
    return (struct rt_need){.tokens = r->ids.count, .of_model = r->begun, .made_by = r->made_by};
}

/* The group of its session key, else the one with the longest front of its prompt. */
static bool named_place(struct rt_core *c, const struct rt_request *r, struct rt_place *ret_place)
{
    return r->named && rt_sessions_find(c->sessions, &r->name, ret_place);
}

static bool front_place(struct rt_core *c, const struct rt_request *r, struct rt_place *ret_place)
{
    for (uint32_t i = r->front_count; i > 0; i--) {
        if (rt_sessions_find(c->sessions, &r->fronts[i - 1], ret_place))
            return true;
    }
    return false;
}

/* A router that has just started does not know all groups yet. */
static bool several_groups(struct rt_core *c)
{
    uint32_t ready = 0;
    return rt_table_groups(c->table, &ready) > 1 || c->now_us - c->start_us <= RT_START_GRACE_US;
}

/* False: there is nothing to wait for. */
static bool map_ask(struct rt_core *c, struct rt_request *r)
{
    if (c->options.map_us_max == 0 || !r->named || r->look != RT_LOOK_NONE || !several_groups(c))
        return false;
    if (!rt_room(c)) {
        c->actions->more = true;
        return true;
    }
    struct rt_action *a = &c->actions->items[c->actions->count++];
    a->type = RT_LOOK_UP;
    a->u.look_up.id = r->id;
    a->u.look_up.session_key = r->session_key.bytes;
    a->u.look_up.cache_salt = r->cache_salt.bytes;
    r->look = RT_LOOK_REDIS;
    r->look_until_us = c->now_us + c->options.map_us_max;
    c->stats.maps_asked++;
    return true;
}

static enum rt_affinity absence_why(enum rt_absence absence)
{
    switch (absence) {
    case RT_ABSENCE_FULL:
        return RT_MISS_FULL;
    case RT_ABSENCE_SMALL:
        return RT_MISS_SMALL;
    case RT_ABSENCE_GONE:
        break;
    }
    return RT_MISS_GONE;
}

struct rt_worker *rt_affinity_choose(struct rt_core *c, struct rt_request *r,
                                     enum rt_affinity *ret_why)
{
    struct rt_need need = rt_request_need(r);
    struct rt_place place;
    enum rt_absence absence;
    CHECK(r->state == RT_WAITING);
    if (r->look_until_us > c->now_us)
        return NULL;
    if (r->look_until_us != 0) {
        c->stats.maps_late++;
        r->look = RT_LOOK_DONE;
        r->look_until_us = 0;
    }
    struct rt_worker *light = rt_table_pick(c->table, &need, c->now_us);
    enum rt_affinity hit = r->mapped ? RT_HIT_MAP : RT_HIT_SESSION;
    *ret_why = RT_MISS_NEW;
    if (!named_place(c, r, &place)) {
        /* With no worker for new ones a draining home may still be open to this one. */
        if (light != NULL && map_ask(c, r))
            return NULL;
        if (!front_place(c, r, &place))
            return light;
        hit = RT_HIT_PREFIX;
    }
    struct rt_worker *home = rt_table_pick_group(c->table, &need, place.group, c->now_us, &absence);
    if (home == NULL) {
        *ret_why = absence_why(absence);
        return light;
    }
    uint32_t saved = place.tokens < r->ids.count ? place.tokens : r->ids.count;
    if (light != NULL && light->info.group != place.group &&
        rt_worker_load(home) > rt_worker_load(light) + saved) {
        *ret_why = RT_MISS_LOAD;
        return light;
    }
    *ret_why = hit;
    return home;
}

void rt_affinity_placed(struct rt_core *c, struct rt_request *r, const struct rt_worker *w)
{
    struct rt_place place = {.group = w->info.group, .tokens = r->ids.count};
    CHECK(r->look_until_us == 0);
    if (r->named)
        rt_sessions_put(c->sessions, &r->name, &place);
    for (uint32_t i = 0; i < r->front_count; i++) {
        place.tokens = RT_PAGE_TOKENS << i;
        rt_sessions_put(c->sessions, &r->fronts[i], &place);
    }
}

void rt_affinity_finished(struct rt_core *c, const struct rt_request *r)
{
    if (!r->named || r->worker == NULL)
        return;
    struct rt_place place = {.group = r->worker->info.group,
                             .tokens = r->prompt_count + r->output_count};
    rt_sessions_put(c->sessions, &r->name, &place);
}

/* ---- session maps ---- */

static bool same(const struct hash128 *a, const struct hash128 *b)
{
    return memcmp(a, b, sizeof(*a)) == 0;
}

/* The worker of the very arena that the map was written for. */
static struct rt_worker *map_worker(struct rt_core *c, const struct rt_map *map)
{
    for (uint32_t i = 0; i < rt_table_workers_max(c->table); i++) {
        struct rt_worker *w = rt_table_worker_at(c->table, i);
        if (w == NULL || !rt_worker_open(w, c->now_us) || w->info.kv_incarnation == 0)
            continue;
        if (w->info.kv_incarnation == map->incarnation && w->info.kv_epoch == map->epoch &&
            same(&w->info.kv_layout_fp, &map->layout_fp) &&
            same(&w->info.kv_model_fp, &map->model_fp))
            return w;
    }
    return NULL;
}

static void look_end(struct rt_request *r)
{
    r->look = RT_LOOK_DONE;
    r->look_until_us = 0;
}

void rt_on_map(struct rt_core *c, const struct msg_id *id, const struct rt_map *map)
{
    struct rt_request *r = rt_store_find(c->store, id);
    if (r == NULL || r->state != RT_WAITING || r->look != RT_LOOK_REDIS)
        return; /* cancelled, or placed without */
    if (map == NULL) {
        look_end(r);
        return;
    }
    CHECK(map->item_count > 0 && map->items != NULL);
    struct rt_worker *w = map_worker(c, map);
    if (w == NULL || !rt_room(c)) {
        c->stats.maps_stale += w == NULL;
        look_end(r);
        return;
    }
    struct msg *m = rt_send(c, &w->peer, MSG_KV_ADOPT, &r->id);
    m->u.kv_adopt = (struct msg_kv_adopt){
        .session_key = r->session_key.bytes, .count = map->item_count, .items = map->items};
    r->look = RT_LOOK_POOL;
    r->look_group = w->info.group;
}

void rt_on_adopt_reply(struct rt_core *c, const struct rt_worker *w, const struct msg *m)
{
    const struct msg_kv_adopt_reply *a = &m->u.kv_adopt_reply;
    struct rt_request *r = rt_store_find(c->store, &m->id);
    if (r == NULL || r->state != RT_WAITING || r->look != RT_LOOK_POOL ||
        r->look_group != w->info.group) {
        c->stats.strays++;
        return;
    }
    look_end(r);
    uint64_t tokens = (uint64_t)a->valid_count * w->info.block_tokens;
    if (a->code != ERR_OK || tokens == 0) {
        c->stats.maps_stale++;
        return;
    }
    struct rt_place place = {.group = w->info.group,
                             .tokens = tokens < UINT32_MAX ? (uint32_t)tokens : UINT32_MAX};
    rt_sessions_put(c->sessions, &r->name, &place);
    r->mapped = true;
    c->stats.maps_used++;
}
