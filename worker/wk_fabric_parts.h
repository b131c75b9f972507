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
    struct wk_fabric_stats stats;
    pthread_t beater;
    atomic_bool stop;
    bool beating;
};

/* Leaves the group with this reason; returns the code. */
enum err wk_fabric_fail(struct wk_fabric *f, enum err e, const char *format, ...) PRINTF_LIKE(3, 4);
/* ERR_OK while every other rank lives and is in our epoch. */
enum err wk_fabric_look(struct wk_fabric *f, const char *what);
/* out[i] = sum over ranks, in rank order, in f32; parts need not be aligned. */
void wk_fabric_sum(const uint8_t *const *parts, uint32_t ranks, float *out, size_t count);
const char *wk_collective_name(uint32_t kind);

#endif
