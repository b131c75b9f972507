/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_http.h - the client: many streamed chat completions at once.
 *
 * Owned by the loop thread.  Takes its slots at create; one connection a request.  Of a response
 * it holds one event at most (1 MiB), of an error body 64 KiB. */
#ifndef TESTS_BENCH_BENCH_HTTP_H
#define TESTS_BENCH_BENCH_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "lib/base/err.h"
#include "tests/bench/bench_result.h"

struct loop;
struct bench_client;

struct bench_target {
    char host[256]; /* as written, for the Host header */
    char prefix[256];
    struct sockaddr_storage address;
    socklen_t address_bytes;
};

/* http://HOST[:PORT][/PREFIX]; resolves the name once.  A trailing /v1 is allowed. */
MUST_USE enum err bench_target_parse(const char *url, struct bench_target *ret_target,
                                     struct err_detail *detail);

struct bench_sink {
    /* An event with text or tokens arrived at now_us; before_us is the one before it, 0 for the
     * first.  tokens may be 0. */
    void (*on_tokens)(void *arg, uint32_t slot, uint64_t before_us, uint64_t now_us,
                      uint32_t tokens);
    /* The slot is free again, and may be started anew from here. */
    void (*on_end)(void *arg, uint32_t slot, const struct bench_result *result);
    void *arg;
};

/* Borrows loop and target for its life.  api_key may be NULL. */
struct bench_client *bench_client_create(struct loop *loop, const struct bench_target *target,
                                         const char *api_key, uint32_t slots_max,
                                         uint64_t silence_us_max);
void bench_client_destroy(struct bench_client **client_p); /* all slots must be free */

/* Starts the request in a free slot: copies body, borrows sink until on_end, which is never
 * called from here. */
void bench_client_start(struct bench_client *c, uint32_t slot, const char *body, size_t bytes,
                        uint64_t due_us, const struct bench_sink *sink);
bool bench_client_busy(const struct bench_client *c, uint32_t slot);
/* Ends a busy slot with this fault; on_end is called before the return, but for a cancel from
 * the slot's own on_tokens. */
void bench_client_cancel(struct bench_client *c, uint32_t slot, enum bench_fault fault);

#endif
