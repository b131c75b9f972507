/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_shell_look.h - asks Redis for session maps.
 *
 * Owned by the loop thread.  At most RT_SHELL_LOOKS_MAX questions are open; each is one script,
 * bounded by the deadline of lib/net/redis.  What comes back is read as hostile bytes. */
#ifndef ROUTER_RT_SHELL_LOOK_H
#define ROUTER_RT_SHELL_LOOK_H

#include <stdint.h>

#include "proto/block_hash.h"
#include "proto/msg.h"
#include "router/rt_map.h"

#define RT_SHELL_LOOKS_MAX 256u

struct redis;
struct rt_shell_look;

/* map NULL: there is none, or it is not to be had.  Borrowed for the call. */
typedef void (*rt_shell_look_fn)(void *arg, const struct msg_id *id, const struct rt_map *map);

struct rt_shell_look_options {
    struct redis *redis; /* borrowed; destroyed before this */
    const char *cluster; /* borrowed for the call */
    struct block_hash_key key;
    rt_shell_look_fn fn;
    void *arg;
};

struct rt_shell_look_stats {
    uint64_t found, absent, corrupt, failed;
};

struct rt_shell_look *rt_shell_look_create(const struct rt_shell_look_options *options);
void rt_shell_look_destroy(struct rt_shell_look **look_p);
/* ERR_OK: fn is called once, later.  ERR_BUSY, ERR_CLOSED: not asked. */
MUST_USE enum err rt_shell_look_ask(struct rt_shell_look *l, const struct msg_id *id,
                                    const char *session_key, const char *cache_salt);
const struct rt_shell_look_stats *rt_shell_look_stats(const struct rt_shell_look *l);

#endif
