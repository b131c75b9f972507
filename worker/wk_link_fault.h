/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_link_fault.h - a link that does what networks do: delays, loses, repeats, damages,
 * stalls and closes, by a list of rules and by seeded chance.
 *
 * Lies between the fabric and a real link, so that every fault passes the same checks as in the
 * field.  Same owner and bounds as the link inside.  Used by tests. */
#ifndef WORKER_WK_LINK_FAULT_H
#define WORKER_WK_LINK_FAULT_H

#include "worker/wk_link.h"

enum wk_fault {
    WK_FAULT_DELAY = 1, /* value: microseconds before it is sent */
    WK_FAULT_DROP,
    WK_FAULT_DUPLICATE,
    WK_FAULT_CORRUPT, /* value: which bit, modulo those of head and payload */
    WK_FAULT_STALL,   /* from here on nothing leaves for value microseconds; beats go on */
    WK_FAULT_CLOSE,   /* from here on the link is closed and shows no life */
    WK_FAULT_COUNT
};

struct wk_fault_rule {
    uint64_t message; /* the how many-th message sent through this link, from 1 */
    enum wk_fault fault;
    uint64_t value;
};

#define WK_FAULT_RULES_MAX 16u

struct wk_fault_options {
    uint32_t rule_count;
    struct wk_fault_rule rules[WK_FAULT_RULES_MAX];
    uint64_t seed;
    uint32_t permille[WK_FAULT_COUNT]; /* chance of each fault per message */
    uint64_t chance_value_max;         /* of delays and stalls by chance, microseconds */
};

/* Takes `inner`. */
struct wk_link wk_link_fault(const struct wk_link *inner, const struct wk_fault_options *options);
/* Faults that were done, by kind; valid while the link lives. */
uint64_t wk_link_fault_done(const struct wk_link *link, enum wk_fault fault);

#endif
