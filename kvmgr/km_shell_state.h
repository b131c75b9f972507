/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_shell_state.h - the shell's inside, for km_shell.c and km_shell_status.c only. */
#ifndef KVMGR_KM_SHELL_STATE_H
#define KVMGR_KM_SHELL_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "kvmgr/km_arena.h"
#include "kvmgr/km_core.h"
#include "kvmgr/km_shell.h"
#include "lib/base/arena.h"
#include "lib/base/metrics.h"
#include "proto/block_hash.h"

#define KM_SHELL_MAGIC 0x4b4d5348u

enum km_metric {
#define COUNTER(ident, name, labels, help) KM_METRIC_##ident,
#define GAUGE(ident, name, labels, help)   KM_METRIC_##ident,
#include "kvmgr/km_metrics.def"
#undef COUNTER
#undef GAUGE
    KM_METRIC_COUNT
};

struct bus;
struct bus_socket;
struct km_map;
struct loop_timer;
struct redis;
struct status;

struct km_shell {
    uint32_t magic;
    const struct km_params *params;
    struct loop *loop;
    struct bus *bus;
    struct bus_socket *socket;
    struct redis *redis;
    struct status *status;
    struct loop_timer *tick, *epoch_timer;
    uint64_t tick_us;  /* of the last tick, to notice our own pauses */
    struct arena wire; /* one message in, or one out */
    struct arena wire_out;
    bool begun, failed;
    uint32_t epoch, epoch_local;
    uint64_t incarnation;
    struct block_hash_key key;
    char arena_path[KM_ARENA_PATH_BYTES];
    char heartbeat_key[32];
    char endpoint[600];
    char boot_id[40], host[65];
    struct km_core *core;
    struct km_arena *arena;
    struct km_map *map;
    struct hash128 model_fp;
    struct km_actions actions;
    uint64_t malformed, unsent, repaired;
    struct metric metrics[KM_METRIC_COUNT];
};

MUST_USE enum err km_shell_status_open(struct km_shell *s, struct err_detail *detail);

#endif
