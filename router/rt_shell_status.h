/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_shell_status.h - what the router shows of itself: health page, metrics, heartbeat.
 *
 * Owned by the loop thread.  Reads the core between steps, never during one. */
#ifndef ROUTER_RT_SHELL_STATUS_H
#define ROUTER_RT_SHELL_STATUS_H

#include <stdint.h>

#include "lib/base/err.h"
#include "router/rt_event.h"

struct loop;
struct redis;
struct status_command;
struct rt_core;
struct rt_shell_look;
struct rt_params;
struct rt_shell_status;

struct rt_shell_status_options { /* all borrowed */
    struct loop *loop;
    const struct rt_params *params;
    struct rt_core *core;
    struct redis *redis;        /* may be NULL */
    struct rt_shell_look *look; /* NULL without redis */
    uint64_t incarnation;
    /* What the operator asks for, as in lib/net/status.h. */
    enum err (*command)(void *arg, const struct status_command *c, struct err_detail *detail);
    void *arg;
};

MUST_USE enum err rt_shell_status_create(const struct rt_shell_status_options *options,
                                         struct rt_shell_status **ret_status,
                                         struct err_detail *detail);
void rt_shell_status_destroy(struct rt_shell_status **status_p);
void rt_shell_status_observe(struct rt_shell_status *s, enum rt_observe what, double value);
/* Keeps the published state true. */
void rt_shell_status_tick(struct rt_shell_status *s, uint64_t malformed);

#endif
