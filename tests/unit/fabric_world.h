/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/fabric_world.h - groups of ranks as threads of one process, over a file of its own.
 *
 * For tests only.  Each rank's body runs on its own thread with a fabric that is not joined. */
#ifndef TESTS_UNIT_FABRIC_WORLD_H
#define TESTS_UNIT_FABRIC_WORLD_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker/wk_fabric.h"
#include "worker/wk_link_fault.h"
#include "worker/wk_link_local.h"

struct world {
    char dir[64], path[96];
    uint32_t ranks, message_bytes_max, deadline_ms, silence_ms;
    struct wk_local *local;
    const struct wk_fault_options *faults[WK_RANKS_MAX]; /* NULL = none */
    struct hash128 settings[WK_RANKS_MAX];
    struct wk_link (*link)(const struct world *w, uint32_t rank); /* NULL = the local one */
    void (*body)(struct world *w, struct wk_fabric *f, uint32_t rank);
    void *arg;
    atomic_uint done;
};

struct world_rank {
    struct world *world;
    uint32_t rank;
    pthread_t thread;
};

static inline void world_init(struct world *w, uint32_t ranks, uint32_t message_bytes_max)
{
    memset(w, 0, sizeof *w);
    snprintf(w->dir, sizeof w->dir, "/tmp/fabric-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    snprintf(w->path, sizeof w->path, "%s/local", w->dir);
    w->ranks = ranks;
    w->message_bytes_max = message_bytes_max;
    w->deadline_ms = 4000;
    w->silence_ms = 3000;
}

static inline struct wk_local *world_open(const struct world *w)
{
    struct wk_local *local = NULL;
    struct err_detail detail = {{0}};
    struct wk_local_options o = {w->path, w->ranks, w->message_bytes_max, 20};
    if (wk_local_open(&o, &local, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return local;
}

static inline struct wk_fabric *world_fabric(const struct world *w, struct wk_local *local,
                                             uint32_t rank)
{
    struct err_detail detail = {{0}};
    struct wk_link link;
    if (w->link != NULL) {
        link = w->link(w, rank);
    } else if (wk_link_local(local, rank, &link, &detail) != ERR_OK) {
        fprintf(stderr, "%s\n", detail.text);
        abort();
    }
    if (w->faults[rank] != NULL)
        link = wk_link_fault(&link, w->faults[rank]);
    struct wk_fabric_options o = {.deadline_ms = w->deadline_ms,
                                  .silence_ms = w->silence_ms,
                                  .settings = w->settings[rank],
                                  .link = link};
    return wk_fabric_create(&o);
}

static inline void *world_main(void *arg)
{
    struct world_rank *r = arg;
    struct wk_fabric *f = world_fabric(r->world, r->world->local, r->rank);
    r->world->body(r->world, f, r->rank);
    wk_fabric_destroy(&f);
    return NULL;
}

static inline void world_run(struct world *w,
                             void (*body)(struct world *, struct wk_fabric *, uint32_t), void *arg)
{
    struct world_rank ranks[WK_RANKS_MAX];
    w->local = world_open(w);
    w->body = body;
    w->arg = arg;
    atomic_store(&w->done, 0);
    for (uint32_t r = 0; r < w->ranks; r++) {
        ranks[r] = (struct world_rank){.world = w, .rank = r};
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, world_main, &ranks[r]), 0);
    }
    for (uint32_t r = 0; r < w->ranks; r++)
        pthread_join(ranks[r].thread, NULL);
    wk_local_close(&w->local);
}

static inline void world_fini(struct world *w)
{
    unlink(w->path);
    rmdir(w->dir);
}

/* Asserts on other threads than the test's own cannot long-jump: they end the program. */
#define MUST(expression)                                                                           \
    do {                                                                                           \
        if (!(expression)) {                                                                       \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #expression);                       \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* The last of a body, once: a rank that leaves ends the group for one that still looks around. */
static inline void world_all_done(struct world *w)
{
    atomic_fetch_add(&w->done, 1);
    while (atomic_load(&w->done) < w->ranks)
        usleep(500);
}

static inline void must_join(struct wk_fabric *f, uint32_t wait_ms)
{
    struct err_detail detail = {{0}};
    if (wk_fabric_join(f, wait_ms, &detail) != ERR_OK) {
        fprintf(stderr, "join: %s\n", detail.text);
        abort();
    }
}

#endif
