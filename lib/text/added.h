/* SPDX-License-Identifier: Apache-2.0 */
/* lib/text/added.h - finds the strings of added tokens in text: leftmost, then longest.
 *
 * A trie, filled at load by one thread, immutable and shared after.  Holds at most
 * ADDED_NODES_MAX nodes.  Cost of a search: one table look-up per byte, plus a walk of at most
 * the longest token where one may begin. */
#ifndef LIB_TEXT_ADDED_H
#define LIB_TEXT_ADDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define ADDED_NODES_MAX (1u << 20)

struct added_node {
    uint32_t child; /* 0 = none; node 0 is the root and nobody's child */
    uint32_t next;  /* sibling */
    uint32_t id;    /* token that ends here + 1, or 0 */
    uint8_t byte;
};

struct added {
    uint32_t magic;
    uint32_t node_count, node_capacity;
    struct added_node *nodes;
    bool first[256]; /* bytes a token begins with */
};

void added_init(struct added *a);
void added_fini(struct added *a);

/* count >= 1.  ERR_INVALID: the same string stands there already. */
MUST_USE enum err added_put(struct added *a, const char *text, size_t count, uint32_t id);

/* First match at or after `from`.  False: none. */
bool added_next(const struct added *a, const char *text, size_t count, size_t from,
                size_t *ret_begin, size_t *ret_end, uint32_t *ret_id);

#endif
