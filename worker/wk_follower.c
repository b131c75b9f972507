/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_follower.h"

#include <inttypes.h>
#include <stdio.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/metrics.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "lib/net/status.h"
#include "worker/wk_exec.h"
#include "worker/wk_params.h"
#include "worker/wk_ranks.h"

#define FOLLOWER_MAGIC 0x574b464fu

struct wk_follower {
    uint32_t magic;
    struct loop *loop;
    const struct wk_params *params;
    struct redis *redis;
    struct status *status;
    struct loop_waker *waker;
    struct wk_ranks *ranks;
    struct wk_exec *exec;
    bool loaded, ready;
    int exit_code;
};

static void on_health(void *arg, struct str *out)
{
    struct wk_follower *w = arg;
    str_add_format(out, ",\"rank\":%u,\"ranks\":%u,\"steps\":%" PRIu64, w->params->rank,
                   w->params->ranks, w->exec != NULL ? wk_exec_steps(w->exec) : 0);
}

/* Ready is who would carry out rank 0's next plan. */
static void group_show(struct wk_follower *w)
{
    bool ready = w->loaded && wk_exec_grouped(w->exec);
    if (ready == w->ready)
        return;
    w->ready = ready;
    log_info(WORKER, ready ? "ready" : "not ready", "rank=%u group=%s", w->params->rank,
             ready ? "formed" : "lost");
    status_set_state(w->status, ready ? "ready" : "degraded");
}

static void on_news(void *arg)
{
    struct wk_follower *w = arg;
    struct wk_news news;
    while (wk_exec_news(w->exec, &news)) {
        if (news.type == WK_NEWS_LOADED) {
            log_info(WORKER, "model loaded", "rank=%u ranks=%u", w->params->rank, w->params->ranks);
            w->loaded = true;
            continue;
        }
        CHECK(news.type == WK_NEWS_FAILED); /* nothing else comes without an order of ours */
        log_error(WORKER, "cannot go on", "reason=\"%s\"", wk_exec_failure(w->exec)->text);
        w->exit_code = 2;
        loop_stop(w->loop);
    }
    group_show(w);
}

static enum err status_open(struct wk_follower *w, struct err_detail *detail)
{
    const struct wk_params *p = w->params;
    struct redis_options redis = {0};
    uint64_t incarnation = 0;
    rng_system(&incarnation, sizeof incarnation);
    redis_address(p->redis, p->run_dir, &redis);
    w->redis = redis_create(w->loop, &redis);
    struct status_options o = {
        .role = "worker",
        .id = p->id,
        .cluster = p->cluster,
        .run_dir = p->run_dir,
        .incarnation = incarnation,
        .redis = w->redis,
        .common_labels = "",
        .extra = on_health,
        .arg = w,
    };
    return status_create(w->loop, &o, &w->status, detail);
}

enum err wk_follower_create(struct loop *l, const struct wk_params *params,
                            struct wk_follower **ret_follower, struct err_detail *detail)
{
    struct wk_follower *w = mem_take(sizeof *w);
    w->magic = FOLLOWER_MAGIC;
    w->loop = l;
    w->params = params;
    w->waker = loop_waker_create(l, on_news, w);
    enum err e = wk_params_ranks(params, &w->ranks, detail);
    if (e == ERR_OK)
        e = status_open(w, detail);
    if (e != ERR_OK) {
        wk_follower_destroy(&w);
        return e;
    }
    struct wk_exec_options o = wk_params_exec(params);
    char dump[PARAM_STR_BYTES + 32];
    snprintf(dump, sizeof dump, "%s/worker-%u.plans", params->run_dir, params->id);
    o.ranks = w->ranks;
    o.dump_path = dump;
    o.waker = w->waker;
    w->exec = wk_exec_create(&o);
    *ret_follower = w;
    return ERR_OK;
}

int wk_follower_exit_code(const struct wk_follower *w)
{
    CHECK_OBJ(w, FOLLOWER_MAGIC);
    return w->exit_code;
}

void wk_follower_destroy(struct wk_follower **follower_p)
{
    struct wk_follower *w = *follower_p;
    if (w == NULL)
        return;
    CHECK_OBJ(w, FOLLOWER_MAGIC);
    wk_exec_destroy(&w->exec);
    wk_ranks_destroy(&w->ranks);
    status_destroy(&w->status);
    redis_destroy(&w->redis);
    loop_waker_destroy(&w->waker);
    w->magic = 0;
    mem_give(w);
    *follower_p = NULL;
}
