/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/mem.h - start-up allocation: zeroed, checked, never fails softly.
 *
 * For objects that live as long as the process (or a model).  Running out at start-up is a die()
 * with the size in the message.  Not for anything sized by a peer. */
#ifndef LIB_BASE_MEM_H
#define LIB_BASE_MEM_H

#include <stddef.h>

void *mem_take(size_t bytes);                          /* zeroed; 64-byte aligned */
void *mem_take_array(size_t count, size_t item_bytes); /* overflow-checked */
void mem_give(void *pointer);                          /* NULL-safe */

#endif
