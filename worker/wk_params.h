/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_params.h - the worker's parameters as a struct (filled once at start), and what follows
 * from them for the device thread. */
#ifndef WORKER_WK_PARAMS_H
#define WORKER_WK_PARAMS_H

#include "lib/base/params.h"

struct wk_params {
#define PARAM(name, type, ...) PARAM_CTYPE_##type name;
#include "lib/base/params_common.def"
#include "worker/wk_params.def"
#undef PARAM
};

struct wk_exec_options;
struct wk_ranks;
struct wk_rows;

bool wk_params_mtp(const struct wk_params *p); /* whether the MTP layer is to be loaded */
/* Whether ranks meet at the addresses of fabric_nodes, else in a file of this host. */
bool wk_params_tcp(const struct wk_params *p);
/* Without waker and ranks. */
struct wk_exec_options wk_params_exec(const struct wk_params *p);
/* Positions in turn with context sharding, else 0. */
uint32_t wk_params_interleave(const struct wk_params *p);
/* The id of the kvmgr that this worker works with: rank 0 with the group's authority, another with
 * the one of role arena that is its own. */
uint32_t wk_params_kvmgr(const struct wk_params *p);
/* Only with ranks > 1.  rows: of a rank above 0, borrowed; else NULL. */
MUST_USE enum err wk_params_ranks(const struct wk_params *p, struct wk_rows *rows,
                                  struct wk_ranks **ret_ranks, struct err_detail *detail);

#endif
