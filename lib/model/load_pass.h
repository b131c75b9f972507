/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/load_pass.h - the one pass over all bytes of a checkpoint: hashes and checks of values.
 *
 * Start-up only.  The work is spread over the context's threads in pieces of a few MiB that follow
 * each other in the files; memory is bounded by the number of tensors.  The
 * bytes are read, not mapped: pages of the mapping come in when they are used. */
#ifndef LIB_MODEL_LOAD_PASS_H
#define LIB_MODEL_LOAD_PASS_H

#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

struct op_ctx;
struct safetensors;
struct weights;

/* Called on the caller's thread only; done rises to total. */
typedef void (*load_pass_fn)(void *arg, uint64_t done, uint64_t total);

/* Fills ret_hashes [safetensors_count] with the xxh3-128 of every tensor's bytes and refuses values
 * as weights_check_values does: the first bad linear, whatever the threads.  w NULL: hashes
 * alone. */
MUST_USE enum err load_pass(const struct safetensors *set, const struct weights *w,
                            const struct op_ctx *ctx, load_pass_fn progress, void *arg,
                            struct hash128 *ret_hashes, struct err_detail *detail);

#endif
