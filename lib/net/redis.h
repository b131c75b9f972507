/* SPDX-License-Identifier: Apache-2.0 */
/* lib/net/redis.h - asynchronous Redis with deadlines and a circuit breaker.
 *
 * Owned by the loop thread.  Redis is a hint and a window: every call may fail, none may delay
 * anything.  Connect deadline 50 ms, operation deadline 20 ms; after an error or a missed deadline
 * the breaker opens, commands fail at once with ERR_CLOSED, and a probe runs every 0.25 s doubling
 * to 2 s.  Commands in flight are bounded (inflight_max); beyond it ERR_BUSY. */
#ifndef LIB_NET_REDIS_H
#define LIB_NET_REDIS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

struct loop;
struct redis;

struct redis_options {
    char address[256];     /* "unix:PATH", "HOST:PORT", "off" */
    uint32_t connect_ms;   /* 0 = 50 */
    uint32_t operation_ms; /* 0 = 20 */
    uint32_t inflight_max; /* 0 = 1024 */
};

/* A reply as plain data; borrowed for the call. */
enum redis_type { REDIS_NIL, REDIS_STRING, REDIS_INTEGER, REDIS_STATUS, REDIS_ERROR, REDIS_ARRAY };
struct redis_value {
    enum redis_type type;
    int64_t integer;
    const char *text; /* string, status, error */
    size_t bytes;
    const struct redis_value *items;
    size_t count;
};

/* Called exactly once per accepted command: ERR_OK with a value (a Redis error reply is ERR_OK with
 * REDIS_ERROR), else ERR_TIMEOUT, ERR_CLOSED or ERR_INVALID with NULL.  May run inside
 * redis_destroy. */
typedef void (*redis_fn)(void *arg, enum err e, const struct redis_value *value);

/* Address from the common parameter `redis`: empty means redis.sock in run_dir. */
void redis_address(const char *param, const char *run_dir, struct redis_options *ret_options);

/* An unusable address is logged and behaves like "off".  Host names are looked up here, once. */
struct redis *redis_create(struct loop *l, const struct redis_options *options);
void redis_destroy(struct redis **redis_p);
bool redis_up(const struct redis *r);
bool redis_off(const struct redis *r); /* by its address: will never be up */
/* fn runs on every change of redis_up (for resync). */
void redis_on_change(struct redis *r, void (*fn)(void *arg, bool up), void *arg);

/* fn may be NULL.  argv_bytes NULL: every argument is NUL-terminated text. */
MUST_USE enum err redis_command(struct redis *r, redis_fn fn, void *arg, int argc,
                                const char *const *argv, const size_t *argv_bytes);
/* Runs a Lua script by its SHA1 (EVALSHA), loading it when the server does not know it.  The text
 * is kept by address: a literal. */
MUST_USE enum err redis_script(struct redis *r, const char *script, redis_fn fn, void *arg,
                               int key_count, int argc, const char *const *argv,
                               const size_t *argv_bytes);

struct redis_stats {
    uint64_t commands, errors, timeouts, refused, reconnects;
};
const struct redis_stats *redis_stats(const struct redis *r);

#endif
