/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_shell.h - the gateway's I/O: HTTP, tokenizer threads, router, Redis, timers.
 *
 * Owned by the loop thread.  Decides nothing about requests: that is gw_core. */
#ifndef GATEWAY_GW_SHELL_H
#define GATEWAY_GW_SHELL_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"

struct gw_params;
struct gw_shell;
struct loop;

/* Loads the checkpoint, listens, connects.  params outlives the shell. */
MUST_USE enum err gw_shell_create(struct loop *l, const struct gw_params *params,
                                  struct gw_shell **ret_shell, struct err_detail *detail);
void gw_shell_destroy(struct gw_shell **shell_p);

/* Running answers go on, new requests are refused with "draining", until they are let in again;
 * deadline_us later (0 = never) what still runs ends with an error. */
void gw_shell_hold(struct gw_shell *s, bool hold, uint64_t deadline_us);
/* Stops accepting; fn runs once nothing is left to be answered, or drain_ms later. */
void gw_shell_drain(struct gw_shell *s, void (*fn)(void *arg), void *arg);

#endif
