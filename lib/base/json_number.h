/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/json_number.h - the spelling of JSON numbers; for json_write.c only.
 *
 * Pure.  Bounded stack; the output's bound is the buffer's. */
#ifndef LIB_BASE_JSON_NUMBER_H
#define LIB_BASE_JSON_NUMBER_H

#include <stddef.h>

struct str;

/* Appends the number as Python prints it after json.loads.  text is a valid JSON number. */
void json_write_number_python(struct str *out, const char *text, size_t bytes);

#endif
