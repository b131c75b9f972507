/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_list.h - circular doubly linked list of embedded links (pure).
 *
 * A link is in one list or in none (it then points at itself).  Bounded by the objects that embed
 * the links. */
#ifndef ROUTER_RT_LIST_H
#define ROUTER_RT_LIST_H

#include <stdbool.h>
#include <stddef.h>

#include "lib/base/check.h"

struct rt_link {
    struct rt_link *prev, *next;
};

static inline void rt_link_init(struct rt_link *l)
{
    l->prev = l;
    l->next = l;
}

/* For a head: no items.  For an item: in no list. */
static inline bool rt_link_alone(const struct rt_link *l)
{
    return l->next == l;
}

static inline void rt_link_insert_before(struct rt_link *at, struct rt_link *l)
{
    CHECK(rt_link_alone(l));
    l->prev = at->prev;
    l->next = at;
    at->prev->next = l;
    at->prev = l;
}

static inline void rt_link_remove(struct rt_link *l)
{
    l->prev->next = l->next;
    l->next->prev = l->prev;
    rt_link_init(l);
}

#define rt_link_item(link, type, member) ((type *)(void *)((char *)(link)-offsetof(type, member)))

#endif
