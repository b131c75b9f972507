/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/announce.h - what the weights are, and who says otherwise.
 *
 * Start-up only.  Both texts come from the bound tensors; a config or a directory name can only
 * earn a warning. */
#ifndef LIB_MODEL_ANNOUNCE_H
#define LIB_MODEL_ANNOUNCE_H

#include <stddef.h>
#include <stdint.h>

struct format_hint;
struct weights;

/* "exl3-mcg 4.00 bpw (routed experts) + bf16 (rest), 4.6 M parameters": formats by the number of
 * weights, the most common first. */
void announce_formats(const struct weights *w, uint64_t parameters, char *ret_text, size_t bytes);

/* A line for each claim that the tensors do not bear out; "" if there is none. */
void announce_warnings(const struct weights *w, const char *directory,
                       const struct format_hint *hint, char *ret_text, size_t bytes);

#endif
