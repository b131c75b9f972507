/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_shell_state.h - the shell's own data, shared by wk_shell*.c only.  Loop thread. */
#ifndef WORKER_WK_SHELL_STATE_H
#define WORKER_WK_SHELL_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/arena.h"
#include "lib/base/metrics.h"
#include "proto/block_hash.h"
#include "proto/kv_layout.h"
#include "proto/msg.h"
#include "worker/wk_arena.h"
#include "worker/wk_core.h"
#include "worker/wk_exec.h"
#include "worker/wk_params.h"
#include "worker/wk_taps.h"

#define WK_SHELL_MAGIC 0x574b5348u
#define WK_BEAT_US     500000u
#define WK_PATH_BYTES  4097u

enum wk_metric {
#define COUNTER(ident, name, labels, help)            WK_METRIC_##ident,
#define GAUGE(ident, name, labels, help)              WK_METRIC_##ident,
#define HISTOGRAM(ident, name, labels, buckets, help) WK_METRIC_##ident,
#include "worker/wk_metrics.def"
#undef COUNTER
#undef GAUGE
#undef HISTOGRAM
    WK_METRIC_COUNT
};
extern const struct metric_row wk_metric_rows[WK_METRIC_COUNT];

enum wk_peer { WK_ROUTER, WK_KVMGR, WK_DRAFTER, WK_PEER_COUNT };

struct wk_arena_state {
    bool attached;
    bool offered;                     /* an attach reply waits for the core to be quiet */
    struct msg_kv_attach_reply offer; /* its path in offer_path */
    char offer_path[WK_PATH_BYTES];
    uint32_t offer_granted[MSG_GRANTS_MAX];
    uint64_t incarnation; /* of kvmgr */
    uint32_t epoch;
    uint64_t asked_us; /* last KvAttach */
    uint32_t forming;  /* memories named to the ranks that not all of them have yet */
    struct wk_mapping mapping;
};

/* What waits for all ranks: see wk_shell_hold.c. */
struct wk_held;
struct wk_hold_batch {
    struct arena arena;
    struct wk_held *first, *last;
    uint32_t seal_count;
};
struct wk_hold_state {
    struct wk_hold_batch batches[2];
    uint32_t gathering; /* which takes what comes; the other one is being sealed */
    bool sealing;
    bool dropped; /* nobody wants what is being sealed any more */
    bool spoilt;  /* something did not fit */
};

/* The ring that the device thread writes to, as the drafter wanted it. */
struct wk_tap_state {
    bool refused;                   /* of this incarnation of the drafter; said once */
    struct wk_taps_options options; /* layer_count 0 = none yet */
    char path[TAP_RING_PATH_BYTES];
};

/* What was last published, to publish again on a change. */
struct wk_published {
    uint32_t state, seqs_live, kv_state, drafter_state, drafter_poor;
};

struct wk_shell {
    uint32_t magic;
    struct loop *loop;
    const struct wk_params *params;
    const char *config_hash;
    uint64_t incarnation;
    struct block_hash_key key;
    struct bus *bus;
    struct bus_socket *sockets[WK_PEER_COUNT];
    struct redis *redis;
    struct status *status;
    struct loop_timer *beat, *wake, *progress, *stop_timer;
    struct loop_waker *waker;
    struct arena arena_in, arena_out, arena_core;

    struct wk_ranks *ranks; /* NULL = this worker holds the whole model */
    struct wk_exec *exec;
    bool loaded, load_failed, busy; /* busy: a plan is in flight ... */
    uint64_t run_us;                /* ... since then */
    char drafter_source[32];        /* as it says; "" before */
    uint64_t load_begun_us, load_bytes, load_seen_us;
    struct wk_core *core; /* NULL until loaded and attached once */
    struct wk_core_options core_options;
    struct wk_actions actions;
    uint64_t *leases;
    struct wk_arena_state kv;
    struct wk_hold_state hold;
    uint64_t drafter_incarnation;
    struct wk_tap_state taps;
    uint64_t beat_us;   /* of the last beat, to notice our own pauses */
    uint64_t router_us; /* heard from the router, or connected to it; 0 = never heard */
    bool stopping;
    int exit_code;
    struct wk_published published;
    uint64_t bad_messages, unsent, gaps_seen, steps_seen, tokens_seen, draft_waits_seen;
    struct metric metrics[WK_METRIC_COUNT];
};

/* wk_shell.c */
void wk_shell_send(struct wk_shell *s, enum wk_peer to, const struct msg *m);
/* The same for what is repeated every beat: it does not pile up for a peer that is away. */
void wk_shell_beat(struct wk_shell *s, enum wk_peer to, const struct msg *m);
void wk_shell_step(struct wk_shell *s, struct wk_event *event);
void wk_shell_fail(struct wk_shell *s, const char *why); /* ends the process with an error */

/* wk_shell_kv.c */
void wk_shell_kv_message(struct wk_shell *s, const struct msg *m);
void wk_shell_kv_beat(struct wk_shell *s);
/* A session map of the router's: kvmgr says what of it is there, and the router hears it. */
void wk_shell_kv_adopt(struct wk_shell *s, struct msg *m);
void wk_shell_kv_lost(struct wk_shell *s, const char *why);
void wk_shell_kv_settle(struct wk_shell *s); /* takes an offered arena once the core is quiet */
void wk_shell_kv_formed(struct wk_shell *s, const struct hash128 *memory); /* all ranks have it */
void wk_shell_kv_close(struct wk_shell *s);
/* Whose rows the arena holds: kept blocks are good for this model under these numerics alone. */
struct hash128 wk_shell_rows_fp(const struct wk_shell *s);

/* wk_shell_hold.c */
void wk_shell_hold_init(struct wk_shell *s);
void wk_shell_hold_fini(struct wk_shell *s);
void wk_shell_hold(struct wk_shell *s, const struct wk_action *a); /* what the core says to kvmgr */
void wk_shell_hold_pump(struct wk_shell *s);                       /* all of one step is there */
void wk_shell_hold_sealed(struct wk_shell *s, enum err status);
void wk_shell_hold_drop(struct wk_shell *s); /* the leases are void */
bool wk_shell_hold_empty(const struct wk_shell *s);

/* wk_shell_draft.c */
void wk_shell_draft_beat(struct wk_shell *s);
void wk_shell_draft_message(struct wk_shell *s, const struct msg *m);

/* wk_shell_status.c */
enum err wk_shell_status_open(struct wk_shell *s, struct err_detail *detail);
void wk_shell_publish(struct wk_shell *s, bool always); /* WorkerState, on a change or always */
void wk_shell_observe(struct wk_shell *s);              /* histograms after a step */
void wk_shell_progress(struct wk_shell *s);             /* a line while loading */

#endif
