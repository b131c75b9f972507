/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_fabric_parts.h - inside of struct wk_fabric.
 *
 * Inner part of wk_fabric.c (collectives) and wk_fabric_group.c (membership). */
#ifndef WORKER_WK_FABRIC_PARTS_H
#define WORKER_WK_FABRIC_PARTS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "worker/wk_fabric.h"

#define WK_FABRIC_MAGIC 0x574b4642u
/* Between two looks at the other ranks' signs of life. */
#define WK_LOOK_US 5000u
/* A broken connection takes the messages on it along, and then ranks may wait for each other that
 * all live.  So whoever waits for WK_SHOW_US shows how many it has sent; a message that was sent
 * and is still not here WK_MISSING_US later is lost.  A status never overtakes a message on the
 * same connection; the pause is for one that came over the next connection. */
#define WK_SHOW_US    100000u
#define WK_MISSING_US 300000u

struct wk_fabric {
    uint32_t magic;
    uint32_t rank, ranks;
    struct wk_fabric_options options;
    struct wk_link link;
    struct wk_status own;
    enum err fault;
    struct err_detail why;
    uint64_t step;
    uint64_t sent[WK_RANKS_MAX], received[WK_RANKS_MAX]; /* messages in this epoch */
    uint64_t refused;                /* by the link, until this group was formed */
    uint64_t waiting_us, missing_us; /* for the next message, and for one known as sent; 0 = not */
    struct wk_fabric_stats stats;
    pthread_t beater;
    atomic_bool stop;
    bool beating;
};

/* Leaves the group with this reason; returns the code. */
enum err wk_fabric_fail(struct wk_fabric *f, enum err e, const char *format, ...) PRINTF_LIKE(3, 4);
/* ERR_OK while every other rank lives and is in our epoch. */
enum err wk_fabric_look(struct wk_fabric *f, const char *what);
/* A wait for the peer's next message without success: ERR_CORRUPT once that one must be lost. */
enum err wk_fabric_missing(struct wk_fabric *f, const char *what, uint32_t peer);
/* out[i] = sum over ranks, in rank order, in f32; parts need not be aligned. */
void wk_fabric_sum(const uint8_t *const *parts, uint32_t ranks, float *out, size_t count);
const char *wk_collective_name(uint32_t kind);

#endif
