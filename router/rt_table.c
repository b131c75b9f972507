/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_table.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define TABLE_MAGIC   0x52545442u
#define WORKER_MAGIC  0x5254574bu
#define GATEWAY_MAGIC 0x52544757u
/* A worker with all sequences taken slows a newcomer down like so many prompt tokens before it. */
#define FULL_TOKENS 1024u

struct rt_table {
    uint32_t magic;
    uint32_t workers_max, gateways_max;
    struct rt_worker *workers;
    struct rt_gateway *gateways;
};

struct rt_table *rt_table_create(uint32_t workers_max, uint32_t gateways_max)
{
    CHECK(workers_max > 0 && gateways_max > 0);
    struct rt_table *t = mem_take(sizeof(*t));
    t->magic = TABLE_MAGIC;
    t->workers_max = workers_max;
    t->gateways_max = gateways_max;
    t->workers = mem_take_array(workers_max, sizeof(*t->workers));
    t->gateways = mem_take_array(gateways_max, sizeof(*t->gateways));
    return t;
}

void rt_table_destroy(struct rt_table **table_p)
{
    struct rt_table *t = *table_p;
    if (t == NULL)
        return;
    CHECK_OBJ(t, TABLE_MAGIC);
    mem_give(t->gateways);
    mem_give(t->workers);
    t->magic = 0;
    mem_give(t);
    *table_p = NULL;
}

bool rt_peer_equal(const struct rt_peer *a, const struct rt_peer *b)
{
    return a->count == b->count && memcmp(a->bytes, b->bytes, a->count) == 0;
}

struct rt_worker *rt_table_worker(struct rt_table *t, const struct rt_peer *peer)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    for (uint32_t i = 0; i < t->workers_max; i++) {
        if (t->workers[i].magic != 0 && rt_peer_equal(&t->workers[i].peer, peer))
            return &t->workers[i];
    }
    return NULL;
}

struct rt_worker *rt_table_worker_by_id(struct rt_table *t, uint64_t worker_id)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    for (uint32_t i = 0; i < t->workers_max; i++) {
        if (t->workers[i].magic != 0 && t->workers[i].info.worker_id == worker_id)
            return &t->workers[i];
    }
    return NULL;
}

struct rt_worker *rt_table_worker_add(struct rt_table *t, const struct rt_peer *peer,
                                      uint64_t now_us)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    CHECK(peer->count <= RT_PEER_BYTES_MAX);
    for (uint32_t i = 0; i < t->workers_max; i++) {
        struct rt_worker *w = &t->workers[i];
        if (w->magic != 0)
            continue;
        memset(w, 0, sizeof(*w));
        w->magic = WORKER_MAGIC;
        w->peer = *peer;
        w->heard_us = now_us;
        w->progress_us = now_us;
        rt_link_init(&w->requests);
        rt_canary_reset(&w->canary, now_us);
        return w;
    }
    return NULL;
}

void rt_table_worker_remove(struct rt_table *t, struct rt_worker *w)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    CHECK_OBJ(w, WORKER_MAGIC);
    CHECK(rt_link_alone(&w->requests) && w->request_count == 0);
    w->magic = 0;
}

struct rt_worker *rt_table_worker_at(struct rt_table *t, uint32_t index)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    CHECK(index < t->workers_max);
    return t->workers[index].magic != 0 ? &t->workers[index] : NULL;
}

uint32_t rt_table_workers_max(const struct rt_table *t)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    return t->workers_max;
}

struct rt_gateway *rt_table_gateway(struct rt_table *t, const struct rt_peer *peer)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    for (uint32_t i = 0; i < t->gateways_max; i++) {
        if (t->gateways[i].magic != 0 && rt_peer_equal(&t->gateways[i].peer, peer))
            return &t->gateways[i];
    }
    return NULL;
}

struct rt_gateway *rt_table_gateway_add(struct rt_table *t, const struct rt_peer *peer,
                                        uint64_t now_us)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    CHECK(peer->count <= RT_PEER_BYTES_MAX);
    for (uint32_t i = 0; i < t->gateways_max; i++) {
        struct rt_gateway *g = &t->gateways[i];
        if (g->magic != 0)
            continue;
        memset(g, 0, sizeof(*g));
        g->magic = GATEWAY_MAGIC;
        g->peer = *peer;
        g->heard_us = now_us;
        rt_link_init(&g->requests);
        return g;
    }
    return NULL;
}

void rt_table_gateway_remove(struct rt_table *t, struct rt_gateway *g)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    CHECK_OBJ(g, GATEWAY_MAGIC);
    CHECK(rt_link_alone(&g->requests) && g->request_count == 0);
    g->magic = 0;
}

struct rt_gateway *rt_table_gateway_at(struct rt_table *t, uint32_t index)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    CHECK(index < t->gateways_max);
    return t->gateways[index].magic != 0 ? &t->gateways[index] : NULL;
}

uint32_t rt_table_gateways_max(const struct rt_table *t)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    return t->gateways_max;
}

static const char *long_text(char *bytes, const char *text)
{
    size_t count = text == NULL ? 0 : strnlen(text, RT_LONG_TEXT_BYTES - 1);
    if (count > 0)
        memcpy(bytes, text, count);
    bytes[count] = '\0';
    return bytes;
}

void rt_worker_info_set(struct rt_worker *w, const struct msg_worker_info *info)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    CHECK(info->canary_count <= MSG_CANARY_IDS_MAX);
    w->info = *info;
    w->info.quantization = long_text(w->quantization, info->quantization);
    w->info.warnings = long_text(w->warnings, info->warnings);
    rt_text_set(&w->numerics, info->numerics);
    rt_text_set(&w->spec, info->spec);
    rt_text_set(&w->config_hash, info->config_hash);
    w->info.numerics = w->numerics.bytes;
    w->info.spec = w->spec.bytes;
    w->info.config_hash = w->config_hash.bytes;
    if (info->canary_count > 0)
        memcpy(w->canary_ids, info->canary_ids, info->canary_count * sizeof(w->canary_ids[0]));
    w->info.canary_ids = w->canary_ids;
}

static bool well(const struct rt_worker *w)
{
    return !w->lost && w->info.state == MSG_WORKER_READY && w->info.kv_state != RT_KV_SILENT &&
           !w->stalled && w->canary.verdict == RT_CANARY_RIGHT;
}

bool rt_worker_usable(const struct rt_worker *w)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    return !w->drain && well(w);
}

bool rt_worker_open(const struct rt_worker *w, uint64_t now_us)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    return well(w) && (!w->drain || (!w->drain_told && now_us < w->resident_until_us));
}

bool rt_worker_drained(const struct rt_worker *w)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    return !w->lost && (w->drain || w->info.state == MSG_WORKER_DRAINING);
}

void rt_worker_progress(struct rt_worker *w, uint64_t now_us)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    w->progress_us = now_us;
    w->stalled = false;
}

void rt_worker_prompt_counted(struct rt_worker *w, uint64_t n)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    CHECK(w->prompt_counted <= w->prompt_pending);
    uint64_t room = w->prompt_pending - w->prompt_counted;
    w->prompt_counted += n < room ? n : room;
}

static void prompt_drop(struct rt_worker *w, uint32_t tokens)
{
    CHECK(w->prompt_pending >= tokens);
    w->prompt_pending -= tokens;
    if (w->prompt_counted > w->prompt_pending)
        w->prompt_counted = w->prompt_pending;
}

uint64_t rt_worker_prompt_done(struct rt_worker *w, struct rt_request *r)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    CHECK(r->worker == w && !r->first_token);
    uint64_t counted = w->prompt_counted < r->prompt_count ? w->prompt_counted : r->prompt_count;
    r->first_token = true;
    w->prompt_counted -= counted;
    prompt_drop(w, r->prompt_count);
    return r->prompt_count - counted;
}

uint64_t rt_worker_prompt_left(const struct rt_worker *w)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    uint64_t left = w->prompt_pending - w->prompt_counted;
    return left > w->info.tokens_queued ? left : w->info.tokens_queued;
}

uint32_t rt_worker_taken(const struct rt_worker *w)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    return w->request_count + (w->canary.active ? 1 : 0);
}

void rt_worker_join(struct rt_worker *w, struct rt_request *r)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    CHECK(r->worker == NULL && rt_link_alone(&r->place));
    r->worker = w;
    rt_link_insert_before(&w->requests, &r->place);
    w->request_count++;
    w->prompt_pending += r->first_token ? 0 : r->prompt_count;
}

void rt_worker_leave(struct rt_request *r)
{
    struct rt_worker *w = r->worker;
    CHECK_OBJ(w, WORKER_MAGIC);
    CHECK(w->request_count > 0 && !rt_link_alone(&r->place));
    rt_link_remove(&r->place);
    w->request_count--;
    if (!r->first_token)
        prompt_drop(w, r->prompt_count);
    CHECK(w->request_count > 0 || w->prompt_pending == 0);
    r->worker = NULL;
}

void rt_gateway_join(struct rt_gateway *g, struct rt_request *r)
{
    CHECK_OBJ(g, GATEWAY_MAGIC);
    CHECK(r->gateway == NULL);
    r->gateway = g;
    rt_link_insert_before(&g->requests, &r->of_gateway);
    g->request_count++;
}

void rt_gateway_leave(struct rt_request *r)
{
    struct rt_gateway *g = r->gateway;
    if (g == NULL)
        return;
    CHECK_OBJ(g, GATEWAY_MAGIC);
    CHECK(g->request_count > 0);
    rt_link_remove(&r->of_gateway);
    g->request_count--;
    r->gateway = NULL;
}

/* Less loaded: the smaller share of its sequences taken, then fewer prompt tokens to compute. */
static bool lighter(const struct rt_worker *a, const struct rt_worker *b)
{
    uint64_t x = (uint64_t)rt_worker_taken(a) * b->info.seqs_max;
    uint64_t y = (uint64_t)rt_worker_taken(b) * a->info.seqs_max;
    if (x != y)
        return x < y;
    return a->info.tokens_queued < b->info.tokens_queued;
}

uint64_t rt_worker_load(const struct rt_worker *w)
{
    CHECK_OBJ(w, WORKER_MAGIC);
    uint64_t seqs = w->info.seqs_max > 0 ? w->info.seqs_max : 1;
    return rt_worker_prompt_left(w) + (uint64_t)rt_worker_taken(w) * FULL_TOKENS / seqs;
}

static bool holds(uint32_t context_max, uint32_t tokens)
{
    return (uint64_t)tokens + 1 <= context_max;
}

static bool same_model(const struct rt_worker *w, const struct rt_need *need)
{
    return !need->of_model ||
           memcmp(&w->info.kv_model_fp, &need->made_by, sizeof(need->made_by)) == 0;
}

static bool free_now(const struct rt_worker *w, uint64_t now_us)
{
    return rt_worker_open(w, now_us) && rt_worker_taken(w) < w->info.seqs_max &&
           now_us >= w->busy_until_us;
}

enum rt_fit rt_table_fit(const struct rt_table *t, const struct rt_need *need)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    enum rt_fit fit = RT_FIT_NEVER;
    bool known = false;
    for (uint32_t i = 0; i < t->workers_max; i++) {
        const struct rt_worker *w = &t->workers[i];
        if (w->magic == 0)
            continue;
        bool same = same_model(w, need);
        if (same && rt_worker_usable(w) && holds(w->info.context_max, need->tokens))
            return RT_FIT_USABLE;
        known = known || w->context_max > 0;
        if (same && rt_worker_drained(w) && holds(w->info.context_max, need->tokens))
            fit = RT_FIT_DRAINED;
        else if (holds(w->context_max, need->tokens) && fit == RT_FIT_NEVER)
            fit = RT_FIT_ABSENT;
    }
    return known || fit == RT_FIT_DRAINED ? fit : RT_FIT_ABSENT;
}

uint32_t rt_table_context_free(const struct rt_table *t, uint64_t now_us)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    uint32_t most = 0;
    for (uint32_t i = 0; i < t->workers_max; i++) {
        const struct rt_worker *w = &t->workers[i];
        if (w->magic != 0 && free_now(w, now_us) && w->info.context_max > most)
            most = w->info.context_max;
    }
    return most;
}

uint32_t rt_table_context_max(const struct rt_table *t)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    uint32_t most = 0;
    for (uint32_t i = 0; i < t->workers_max; i++) {
        const struct rt_worker *w = &t->workers[i];
        if (w->magic != 0 && w->context_max > most)
            most = w->context_max;
    }
    return most;
}

uint64_t rt_table_seqs(const struct rt_table *t, uint64_t *ret_free)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    uint64_t all = 0;
    *ret_free = 0;
    for (uint32_t i = 0; i < t->workers_max; i++) {
        const struct rt_worker *w = &t->workers[i];
        if (w->magic == 0)
            continue;
        all += w->context_max > 0 ? w->info.seqs_max : 0;
        if (rt_worker_usable(w) && w->info.seqs_max > rt_worker_taken(w))
            *ret_free += w->info.seqs_max - rt_worker_taken(w);
    }
    return all;
}

struct rt_worker *rt_table_pick(struct rt_table *t, const struct rt_need *need, uint64_t now_us)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    struct rt_worker *best = NULL;
    for (uint32_t i = 0; i < t->workers_max; i++) {
        struct rt_worker *w = &t->workers[i];
        if (w->magic == 0 || !rt_worker_usable(w) || !free_now(w, now_us) ||
            !holds(w->info.context_max, need->tokens) || !same_model(w, need))
            continue;
        if (best == NULL || lighter(w, best))
            best = w;
    }
    return best;
}

struct rt_worker *rt_table_pick_group(struct rt_table *t, const struct rt_need *need,
                                      uint32_t group, uint64_t now_us, enum rt_absence *ret_absence)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    struct rt_worker *best = NULL;
    enum rt_absence absence = RT_ABSENCE_GONE;
    for (uint32_t i = 0; i < t->workers_max; i++) {
        struct rt_worker *w = &t->workers[i];
        if (w->magic == 0 || w->info.group != group || !rt_worker_open(w, now_us) ||
            !same_model(w, need))
            continue;
        if (!holds(w->info.context_max, need->tokens)) {
            absence = absence == RT_ABSENCE_GONE ? RT_ABSENCE_SMALL : absence;
            continue;
        }
        absence = RT_ABSENCE_FULL;
        if (!free_now(w, now_us) || (best != NULL && w->drain && !best->drain))
            continue; /* one that shall be empty soon comes last */
        if (best == NULL || (best->drain && !w->drain) || lighter(w, best))
            best = w;
    }
    *ret_absence = absence;
    return best;
}

uint32_t rt_table_groups(const struct rt_table *t, uint32_t *ret_ready)
{
    CHECK_OBJ(t, TABLE_MAGIC);
    bool heard[MSG_GROUPS_MAX] = {false}, ready[MSG_GROUPS_MAX] = {false};
    uint32_t count = 0;
    *ret_ready = 0;
    for (uint32_t i = 0; i < t->workers_max; i++) {
        const struct rt_worker *w = &t->workers[i];
        if (w->magic == 0 || w->lost)
            continue;
        CHECK(w->info.group < MSG_GROUPS_MAX);
        heard[w->info.group] = true;
        ready[w->info.group] = ready[w->info.group] || rt_worker_usable(w);
    }
    for (uint32_t g = 0; g < MSG_GROUPS_MAX; g++) {
        count += heard[g];
        *ret_ready += ready[g];
    }
    return count;
}
