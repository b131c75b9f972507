/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/rows_world.h - the memory of a rank above 0 with its kvmgr in one thread.
 *
 * For tests only.  What the device thread asks is answered before its wake returns. */
#ifndef TESTS_UNIT_ROWS_WORLD_H
#define TESTS_UNIT_ROWS_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "kvmgr/km_rows.h"
#include "worker/wk_rows.h"

struct rows_world {
    char path[128], dir[96];
    struct km_rows *kvmgr;
    struct wk_rows *rows;
    bool mute; /* kvmgr is away */
};

static inline void rows_world_wake(void *arg)
{
    struct rows_world *w = arg;
    struct msg m;
    while (!w->mute && wk_rows_question(w->rows, &m)) {
        struct msg reply = {.type = MSG_KV_ATTACH_REPLY, .id = m.id};
        km_rows_attach(w->kvmgr, &m.u.kv_attach, &reply.u.kv_attach_reply);
        wk_rows_answer(w->rows, &reply);
    }
}

static inline void rows_world_ping(struct rows_world *w)
{
    struct msg m = {.type = MSG_KV_STATE};
    km_rows_ping(w->kvmgr, wk_rows_worker(w->rows), &m.u.kv_state);
    wk_rows_answer(w->rows, &m);
}

static inline void rows_world_kvmgr(struct rows_world *w, uint32_t boot)
{
    struct err_detail detail = {{0}};
    km_rows_destroy(&w->kvmgr);
    struct km_rows_options o = {.path = w->path, .state_dir = w->dir, .id = 1, .boot = boot};
    if (km_rows_create(&o, &w->kvmgr, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
}

static inline void rows_world_worker(struct rows_world *w, uint64_t incarnation)
{
    wk_rows_destroy(&w->rows);
    struct wk_rows_options o = {
        .worker_id = 1, .rank = 1, .incarnation = incarnation, .wake = rows_world_wake, .arg = w};
    w->rows = wk_rows_create(&o);
}

static inline void rows_world_init(struct rows_world *w, const char *dir, uint32_t boot)
{
    memset(w, 0, sizeof *w);
    snprintf(w->dir, sizeof w->dir, "%s", dir);
    snprintf(w->path, sizeof w->path, "%s/rows", dir);
    rows_world_kvmgr(w, boot);
    rows_world_worker(w, 1000);
}

static inline void rows_world_fini(struct rows_world *w)
{
    char epoch[128];
    wk_rows_destroy(&w->rows);
    km_rows_destroy(&w->kvmgr);
    unlink(w->path);
    snprintf(epoch, sizeof epoch, "%s/kv-epoch-1", w->dir);
    unlink(epoch);
}

#endif
