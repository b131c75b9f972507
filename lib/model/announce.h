/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/announce.h - who says something else than the bound tensors.
 *
 * Start-up only.  What a model is, lib/model/identity.h says; a config or a directory's name can
 * only earn a warning. */
#ifndef LIB_MODEL_ANNOUNCE_H
#define LIB_MODEL_ANNOUNCE_H

#include <stddef.h>

struct format_hint;
struct weights;

/* A line for each claim that the tensors do not bear out; "" if there is none. */
void announce_warnings(const struct weights *w, const char *directory,
                       const struct format_hint *hint, char *ret_text, size_t bytes);

#endif
