/* SPDX-License-Identifier: Apache-2.0 */
/* lib/net/status.h - every process's own window: health, metrics and heartbeat.
 *
 * Owned by the loop thread.  Serves HTTP on run_dir/NAME.http (unix socket, mode 0600; evhttp):
 *   GET /health   {"name","role","pid","state","incarnation","uptime_s","redis", ...extra}
 *   GET /metrics  Prometheus text
 *   POST /pin, /unpin  ?session=KEY&salt=SALT&seconds=N, and
 *   POST /drain, /undrain  ?worker=N&deadline_ms=N, where the role has them: {"ok":true} or why not
 * and publishes, every 2 s while Redis is up, `tandem:{cluster}:proc:<role>:<id>` (or the key
 * given)
 * with TTL 6 s, `tandem:{cluster}:metrics:<role>:<id>` (name with labels -> value) with TTL 15 s,
 * and beside it `tandem:{cluster}:metrics_help:<role>:<id>`, HELP and TYPE lines of its names. */
#ifndef LIB_NET_STATUS_H
#define LIB_NET_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct loop;
struct redis;
struct str;
struct metric;
struct metric_row;
struct status;

struct status_command {
    const char *name; /* "drain", "undrain", "pin", "unpin" */
    bool has_worker;
    uint64_t worker;
    uint64_t deadline_ms;       /* from now; 0 = none */
    const char *session, *salt; /* "" = not given; borrowed for the call */
    uint64_t seconds;
};

struct status_options {
    const char *role; /* "router" */
    uint32_t id;
    const char *cluster;
    const char *run_dir;
    uint64_t incarnation;
    struct redis *redis;           /* borrowed; may be NULL */
    const struct metric_row *rows; /* borrowed */
    const struct metric *values;
    size_t metric_count;
    const char *common_labels; /* metric labels; may be "" */
    /* Appends further JSON members to /health, each with a leading comma: `,"queue":3`.  May be
     * NULL. */
    void (*extra)(void *arg, struct str *out);
    /* Called before metrics are read, to refresh gauges.  May be NULL. */
    void (*refresh)(void *arg);
    /* Adds fields to the heartbeat hash by calling add(add_arg, name, value).  May be NULL. */
    void (*heartbeat)(void *arg, void (*add)(void *add_arg, const char *name, const char *value),
                      void *add_arg);
    /* Does what the operator asks.  ERR_NOT_FOUND: no such command or worker.  May be NULL. */
    enum err (*command)(void *arg, const struct status_command *c, struct err_detail *detail);
    bool pins; /* it knows pin and unpin, beside drain and undrain */
    /* NULL = "proc:<role>:<id>"; worker: "worker:0"; kvmgr: "pool:0" */
    const char *heartbeat_key;
    void *arg;
};

MUST_USE enum err status_create(struct loop *l, const struct status_options *options,
                                struct status **ret_status, struct err_detail *detail);
/* deletes the heartbeat key, removes the socket */
void status_destroy(struct status **status_p);
/* starting, ready, degraded, draining */
void status_set_state(struct status *s, const char *state);
const char *status_state(const struct status *s);

/* Shared start of a process's main: creates run_dir (0700) and state_dir if missing, refuses a
 * second instance by a lock on run_dir/NAME.lock, writes run_dir/NAME.pid, ignores SIGPIPE,
 * raises the
 * descriptor limit to its hard bound. */
MUST_USE enum err process_begin(const char *name, const char *run_dir, const char *state_dir,
                                struct err_detail *detail);
void process_end(const char *name, const char *run_dir); /* removes the PID file */

#endif
