/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_arena.h - a kvmgr's arena mapped into this process, after everything said of it was
 * compared (file I/O, any one thread). */
#ifndef WORKER_WK_ARENA_H
#define WORKER_WK_ARENA_H

#include <stdint.h>

#include "lib/base/err.h"
#include "lib/model/model.h"
#include "proto/kv_layout.h"
#include "proto/msg.h"

struct wk_mapping {
    uint8_t *base; /* NULL = none */
    uint64_t bytes;
    struct kv_layout layout;
};

/* layout as this process computes it, model_fp of the rows it writes.  While it is mapped kvmgr
 * gives nobody else what the worker of that incarnation may write to, however silent it is.
 * ERR_CORRUPT, ERR_EPOCH: kvmgr, file and worker differ. */
MUST_USE enum err wk_arena_map(const struct msg_kv_attach_reply *offer,
                               const struct kv_layout *layout, const struct hash128 *model_fp,
                               uint64_t worker, struct wk_mapping *ret_mapping,
                               struct err_detail *detail);
void wk_arena_unmap(struct wk_mapping *m); /* of none: nothing */
struct model_kv wk_arena_model_kv(const struct wk_mapping *m);

#endif
