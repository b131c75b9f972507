/* SPDX-License-Identifier: Apache-2.0 */
/* proto/wire_check.h - validation of a decoded message's fields and bounds (pure).
 *
 * Enums in range, counts within msg.h's bounds, floats finite and in their documented ranges
 * (temperature 0..100, top_p 0..1 exclusive of 0, min_p 0..1, penalties -2..2, repetition > 0..10,
 * bias -100..100), texts valid UTF-8 within MSG_TEXT_MAX (longer ones, like text, warnings,
 * arena_path, quantization: 4096), ids_count >= prompt_count > 0 for requests. */
#ifndef PROTO_WIRE_CHECK_H
#define PROTO_WIRE_CHECK_H

#include "lib/base/err.h"
#include "proto/msg.h"

MUST_USE enum err wire_check(const struct msg *m, struct err_detail *detail);

#endif
