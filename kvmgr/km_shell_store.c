/* SPDX-License-Identifier: Apache-2.0 */
/* The shell's side of the NVMe tier: its news become events, and what is cached is written before
 * the process ends. */
#include "kvmgr/km_shell_state.h"

#include <inttypes.h>
#include <stdio.h>

#include "kvmgr/km_params.h"
#include "kvmgr/km_store.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/net/loop.h"

#define STOP_US      5000000u /* to write what is cached */
#define POLLS_A_WAKE 4096u

static void state_step(struct km_shell *s, bool on)
{
    struct km_event event = {.type = KM_EVENT_STORE_STATE};
    event.u.store_state.on = on;
    km_shell_step(s, event);
}

static void off_say(struct km_shell *s, const char *text)
{
    snprintf(s->store_text, sizeof(s->store_text), "%s", text);
    log_error(KVMGR, "tier is off until the next start", "reason=\"%s\"", s->store_text);
    km_shell_state_show(s);
}

static void results_step(struct km_shell *s, uint32_t *results, uint32_t *objects)
{
    struct km_event event = {.type = KM_EVENT_STORE_DONE};
    if (*results > 0) {
        event.u.store_done.count = *results;
        event.u.store_done.results = s->results;
        km_shell_step(s, event);
    }
    if (*objects > 0) {
        event = (struct km_event){.type = KM_EVENT_STORE_OBJECTS};
        event.u.store_objects.count = *objects;
        event.u.store_objects.objects = s->objects;
        km_shell_step(s, event);
    }
    *results = *objects = 0;
}

static void flush_step(struct km_shell *s)
{
    struct km_event flush = {.type = KM_EVENT_FLUSH, .u.flush_begins = s->flush_begins};
    s->flush_begins = false;
    km_shell_step(s, flush);
}

static void stop_go_on(struct km_shell *s)
{
    if (!s->stopping)
        return;
    if (s->store && km_core_cache(s->core).writes_waiting == 0)
        flush_step(s);
    if (s->store && km_core_cache(s->core).writes_waiting > 0)
        return;
    log_info(KVMGR, "written to the tier", "blocks_left=%u", km_core_unwritten(s->core));
    loop_stop(s->loop);
}

static void flush_go_on(struct km_shell *s)
{
    if (!s->flushing || s->stopping || km_core_cache(s->core).writes_waiting > 0)
        return;
    if (s->store && km_core_cache(s->core).tier_on && km_core_unwritten(s->core) > 0)
        flush_step(s);
    s->flushing = km_core_cache(s->core).writes_waiting > 0; /* else all that can be is written */
}

void km_shell_flush(struct km_shell *s)
{
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    s->flushing = s->core != NULL;
    s->flush_begins = true;
    flush_go_on(s);
}

static void on_store(void *arg)
{
    struct km_shell *s = arg;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    uint32_t results = 0, objects = 0, polls = 0;
    struct km_store_poll news;
    for (; s->store && polls < POLLS_A_WAKE; polls++) {
        km_store_poll(s->store, &news);
        if (news.news == KM_STORE_NOTHING)
            break;
        if (news.news == KM_STORE_RESULT) {
            if (news.result.code == ERR_CORRUPT && news.result.item.op == KM_STORE_READ)
                log_warn(KVMGR, "corrupt object dropped", "kind=%u", news.result.item.kind);
            s->results[results++] = news.result;
        } else if (news.news == KM_STORE_FOUND) {
            s->objects[objects++] = news.object;
        } else if (news.news == KM_STORE_OTHERS) {
            s->store_others = news.bytes;
            log_warn(KVMGR, "tier has folders of others", "reason=\"%s\"", news.text);
        } else {
            results_step(s, &results, &objects);
            state_step(s, false);
            off_say(s, news.text);
        }
        if (results == KM_SHELL_RESULTS || objects == KM_SHELL_RESULTS)
            results_step(s, &results, &objects);
    }
    results_step(s, &results, &objects);
    if (polls == POLLS_A_WAKE) /* others have their turn first */
        loop_wake(s->store_waker);
    flush_go_on(s);
    stop_go_on(s);
}

static void wake(void *arg)
{
    loop_wake(arg);
}

void km_shell_store_open(struct km_shell *s)
{
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    struct err_detail detail = {{0}};
    if (s->params->kv_store_dir[0] == '\0' || s->params->kv_store_bytes == 0)
        return;
    CHECK(s->arena != NULL && s->store == NULL);
    if (!s->store_waker)
        s->store_waker = loop_waker_create(s->loop, on_store, s);
    struct km_store_options options = {
        .dir = s->params->kv_store_dir,
        .arena_fd = km_arena_fd(s->arena),
        .layout = km_arena_layout(s->arena),
        .model_fp = s->model_fp,
        .zstd_level = (int)s->params->kv_store_zstd,
        .wake = wake,
        .wake_arg = s->store_waker,
    };
    if (km_store_open(&options, &s->store, &detail) != ERR_OK) {
        off_say(s, detail.text);
        return;
    }
    const struct kv_layout *l = options.layout;
    if (l->block_bytes + l->snapshot_bytes + 2 * KM_STORE_PAGE > s->params->kv_store_bytes)
        log_warn(KVMGR, "tier too small",
                 "reason=\"kv_store_bytes: a block and a snapshot take %" PRIu64 "\"",
                 l->block_bytes + l->snapshot_bytes + 2 * KM_STORE_PAGE);
    s->store_text[0] = '\0';
    s->store_others = 0;
    log_info(KVMGR, "tier on", "dir=%s", s->params->kv_store_dir);
    km_shell_state_show(s);
    state_step(s, true);
}

void km_shell_store_close(struct km_shell *s)
{
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    km_store_close(&s->store);
}

void km_shell_store_submit(struct km_shell *s, const struct km_action *action)
{
    CHECK(s->store != NULL);
    for (uint32_t i = 0; i < action->u.store.count; i++)
        km_store_submit(s->store, &action->u.store.items[i]);
}

static void on_stop_timer(void *arg)
{
    struct km_shell *s = arg;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    log_warn(KVMGR, "not all was written to the tier", "blocks=%u", km_core_unwritten(s->core));
    loop_stop(s->loop);
}

void km_shell_stop(struct km_shell *s)
{
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    if (!s->core || !s->store || s->stopping) {
        loop_stop(s->loop);
        return;
    }
    s->stopping = true;
    s->flush_begins = true;
    if (!s->stop_timer)
        s->stop_timer = loop_timer_create(s->loop, on_stop_timer, s);
    loop_timer_start(s->stop_timer, STOP_US, false);
    log_info(KVMGR, "writing what is cached", "blocks=%u", km_core_unwritten(s->core));
    stop_go_on(s);
}
