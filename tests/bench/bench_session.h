/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_session.h - what all modes share: loop, client, prompts, request bodies.
 *
 * Owned by the loop thread. */
#ifndef TESTS_BENCH_BENCH_SESSION_H
#define TESTS_BENCH_BENCH_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/bench/bench_fields.h"
#include "tests/bench/bench_http.h"
#include "tests/bench/bench_options.h"

struct bench_measure;
struct bench_prompts;
struct loop;
struct str;

struct bench_session {
    struct bench_options options;
    struct bench_target target;
    struct loop *loop;
    struct bench_client *client;
    struct bench_prompts *prompts;
    struct bench_fields base;   /* by options */
    struct bench_fields forced; /* streaming with usage and ids, whatever else is said */
    struct bench_fields arm[2]; /* of --ab */
    bool interrupted;
};

/* Prints and exits with 2 on a bad command line, file or limit. */
void bench_session_init(struct bench_session *s, int argc, char **argv);
void bench_session_fini(struct bench_session *s);

struct bench_body {
    uint64_t index;                 /* of the prompt; also decides the seed */
    uint32_t prompt_tokens;         /* of a drawn prompt */
    bool drawn;                     /* even where there is a file of prompts */
    uint32_t max_tokens;            /* 0 = by options */
    const struct bench_fields *arm; /* NULL = none */
    const char *cache_salt;         /* NULL = none */
};

void bench_session_write(struct bench_session *s, const struct bench_body *body, struct str *out);

/* Unmeasured requests, which also tell how many words make a token.  Errors count in m. */
void bench_session_warm_up(struct bench_session *s, struct bench_measure *m);

/* The plain run. */
void bench_session_load(struct bench_session *s, struct bench_measure *m);

#endif
