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

#define KM_SHELL_MAGIC   0x4b4d5348u
#define KM_SHELL_RESULTS 64u /* news of the tier that go into one event */

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
struct km_proofs;
struct km_store;
struct loop_waker;

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
    char boot_id[HOST_BOOT_BYTES], host[65];
    struct km_core *core;
    struct km_arena *arena;
    struct km_map *map;
    struct km_store *store; /* NULL: no tier, or off */
    struct loop_waker *store_waker;
    uint64_t store_others;             /* bytes of other models in its folder */
    char store_text[ERR_DETAIL_BYTES]; /* why it is off; "" = it is not */
    struct km_store_result results[KM_SHELL_RESULTS];
    struct km_store_object objects[KM_SHELL_RESULTS];
    struct km_proofs *proofs; /* with the arena */
    struct loop_waker *proof_waker;
    struct km_proof proved[KM_SHELL_RESULTS];
    struct loop_timer *stop_timer; /* runs while what is cached is written before the end */
    bool stopping;
    bool flushing;     /* the operator wants what is cached written; the process goes on */
    bool flush_begins; /* the next flush is the first of its kind: see km_event.h */
    struct hash128 model_fp;
    struct km_actions actions;
    uint64_t malformed, unsent, repaired;
    uint64_t guards_broken, guards_told; /* of arenas before; of this one */
    struct metric metrics[KM_METRIC_COUNT];
};

/* One event to the core; its actions are carried out. */
void km_shell_step(struct km_shell *s, struct km_event event);
void km_shell_state_show(struct km_shell *s);

/* km_shell_store.c */
void km_shell_store_open(struct km_shell *s); /* with the arena; off loudly if it cannot be */
void km_shell_store_close(struct km_shell *s);
void km_shell_store_submit(struct km_shell *s, const struct km_action *action);

/* km_shell_proof.c */
MUST_USE enum err km_shell_proof_open(struct km_shell *s, struct err_detail *detail);
void km_shell_proof_close(struct km_shell *s);
void km_shell_proof_submit(struct km_shell *s, const struct km_action *action);

void km_shell_flush(struct km_shell *s); /* what is cached goes to the tier, in the background */

MUST_USE enum err km_shell_status_open(struct km_shell *s, struct err_detail *detail);

#endif
