/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_session.h - which group was last given a conversation, and so holds its blocks.
 *
 * Owned by the router's loop thread.  Pure.  Holds at most entries_max entries, taken at
 * create; the one used longest ago makes room.  An entry is a hint: wrong or lost, it costs
 * computing again. */
#ifndef ROUTER_RT_SESSION_H
#define ROUTER_RT_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/hash.h"

struct rt_sessions;

struct rt_place {
    uint32_t group;
    uint32_t tokens; /* that it has computed of the conversation, as far as known */
};

struct rt_sessions *rt_sessions_create(uint32_t entries_max);
void rt_sessions_destroy(struct rt_sessions **sessions_p);

/* Names of a conversation: by its session key under its salt, or by a front of its tokens. */
struct hash128 rt_session_name(const char *session_key, const char *cache_salt);
struct hash128 rt_session_front(const struct hash128 *before, const char *cache_salt,
                                const uint32_t *ids, uint32_t count);

/* Counts as use.  False: unknown. */
bool rt_sessions_find(struct rt_sessions *s, const struct hash128 *name,
                      struct rt_place *ret_place);
void rt_sessions_put(struct rt_sessions *s, const struct hash128 *name,
                     const struct rt_place *place);
uint32_t rt_sessions_count(const struct rt_sessions *s);

#endif
