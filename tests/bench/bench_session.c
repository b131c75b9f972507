/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_session.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "tests/bench/bench_load.h"
#include "tests/bench/bench_measure.h"
#include "tests/bench/bench_prompts.h"

#define FIRST_WARM_UP_INDEX (UINT64_C(1) << 40) /* no prompt of a measurement has it */
#define OTHER_DESCRIPTORS   64u

static void on_stop_signal(void *arg)
{
    struct bench_session *s = arg;
    s->interrupted = true;
}

static void raise_descriptor_limit(uint32_t slots)
{
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    rlim_t need = (rlim_t)slots + OTHER_DESCRIPTORS;
    if (limit.rlim_cur < need && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
            CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    }
    if (limit.rlim_cur < need)
        die("--streams: %u streams need %llu descriptors, the limit is %llu", slots,
            (unsigned long long)need, (unsigned long long)limit.rlim_max);
}

static void set_json(struct bench_fields *f, const char *key, const char *json)
{
    CHECK(bench_fields_set(f, key, strlen(key), json, strlen(json), NULL) == ERR_OK);
}

static void set_string(struct bench_fields *f, const char *key, const char *text)
{
    struct str value;
    str_init(&value, 0);
    json_write_string(&value, text, strlen(text));
    set_json(f, key, value.text);
    str_fini(&value);
}

static enum err set_fields(struct bench_session *s, struct err_detail *detail)
{
    const struct bench_options *o = &s->options;
    struct arena arena;
    arena_init(&arena, 4096, (size_t)64 << 20);
    if (o->model[0] != '\0')
        set_string(&s->base, "model", o->model);
    if (o->spec[0] != '\0')
        set_string(&s->base, "spec", o->spec);
    CHECK(bench_fields_set_u64(&s->base, "max_tokens", o->max_tokens) == ERR_OK);
    if (o->temperature >= 0) {
        struct str value;
        str_init(&value, 0);
        json_write_f64(&value, o->temperature);
        set_json(&s->base, "temperature", value.text);
        str_fini(&value);
    }
    if (o->ignore_eos || o->solo_ratio) /* a reply that ends early measures nothing */
        set_json(&s->base, "ignore_eos", "true");
    set_json(&s->forced, "stream", "true");
    set_json(&s->forced, "stream_options", "{\"include_usage\":true}");
    set_json(&s->forced, "return_token_ids", "true");
    enum err e = ERR_OK;
    for (uint32_t i = 0; i < o->set_count && e == ERR_OK; i++)
        e = bench_fields_set_text(&s->base, &arena, o->sets[i], detail);
    for (uint32_t i = 0; i < 2 && o->ab[0] != NULL && e == ERR_OK; i++)
        e = bench_fields_set_text(&s->arm[i], &arena, o->ab[i], detail);
    arena_fini(&arena);
    return e;
}

void bench_session_init(struct bench_session *s, int argc, char **argv)
{
    memset(s, 0, sizeof(*s));
    struct err_detail detail = {{0}};
    if (bench_options_parse(argc, argv, &s->options, &detail) != ERR_OK ||
        bench_target_parse(s->options.url, &s->target, &detail) != ERR_OK)
        die("%s", detail.text);
    s->prompts = bench_prompts_create(s->options.seed);
    if ((s->options.prompts[0] != '\0' &&
         bench_prompts_load(s->prompts, s->options.prompts, &detail) != ERR_OK) ||
        set_fields(s, &detail) != ERR_OK)
        die("%s", detail.text);
    const char *key = getenv("TANDEM_API_KEY");
    if (key != NULL && strpbrk(key, "\r\n") != NULL)
        die("TANDEM_API_KEY: has a line end in it");
    uint32_t slots = s->options.streams + 1; /* one for the cold prefill */
    raise_descriptor_limit(slots);
    s->loop = loop_create();
    loop_on_stop_signal(s->loop, on_stop_signal, s);
    s->client = bench_client_create(s->loop, &s->target, key != NULL && key[0] ? key : NULL, slots,
                                    (uint64_t)(s->options.timeout * 1e6));
}

void bench_session_fini(struct bench_session *s)
{
    bench_client_destroy(&s->client);
    loop_destroy(&s->loop);
    bench_prompts_destroy(&s->prompts);
    bench_fields_fini(&s->base);
    bench_fields_fini(&s->forced);
    bench_fields_fini(&s->arm[0]);
    bench_fields_fini(&s->arm[1]);
}

void bench_session_write(struct bench_session *s, const struct bench_body *body, struct str *out)
{
    static const struct bench_fields none;
    struct bench_fields request = {0}, limit = {0};
    /* Seeds stay below 2^53, where every JSON reader is exact. */
    CHECK(bench_fields_set_u64(&request, "seed",
                               (s->options.seed + body->index) & ((UINT64_C(1) << 53) - 1)) ==
          ERR_OK);
    if (body->cache_salt != NULL)
        set_string(&request, "cache_salt", body->cache_salt);
    if (body->max_tokens > 0)
        CHECK(bench_fields_set_u64(&limit, "max_tokens", body->max_tokens) == ERR_OK);
    const struct bench_fields *prompt =
        body->drawn ? bench_prompts_draw(s->prompts, body->index, body->prompt_tokens)
                    : bench_prompts_get(s->prompts, body->index, body->prompt_tokens);
    const struct bench_fields *const layers[] = {
        &request, &s->base, prompt, body->arm ? body->arm : &none, &limit, &s->forced};
    bench_fields_write(out, layers, ARRAY_COUNT(layers));
    bench_fields_fini(&request);
    bench_fields_fini(&limit);
}

static void write_warm_up(void *arg, uint64_t index, struct str *out)
{
    struct bench_session *s = arg;
    const struct bench_body body = {.index = FIRST_WARM_UP_INDEX + index,
                                    .prompt_tokens = s->options.prompt_tokens,
                                    .max_tokens =
                                        s->options.max_tokens < 16 ? s->options.max_tokens : 16};
    bench_session_write(s, &body, out);
}

static void write_plain(void *arg, uint64_t index, struct str *out)
{
    struct bench_session *s = arg;
    const struct bench_body body = {.index = index, .prompt_tokens = s->options.prompt_tokens};
    bench_session_write(s, &body, out);
}

static void learn_words(void *arg, uint64_t index, const struct bench_result *result)
{
    struct bench_session *s = arg;
    if (index == 0 && result->fault == BENCH_NONE && result->has_usage)
        bench_prompts_calibrate(s->prompts, s->options.prompt_tokens, result->prompt_tokens);
}

static struct bench_load common_load(struct bench_session *s, struct bench_measure *m)
{
    return (struct bench_load){.loop = s->loop,
                               .client = s->client,
                               .measure = m,
                               .stream_count = s->options.streams,
                               .run_us_max = (uint64_t)(s->options.time_limit * 1e6),
                               .run_us_max_is_fault = true,
                               .seed = s->options.seed,
                               .interrupted = &s->interrupted,
                               .arg = s};
}

void bench_session_warm_up(struct bench_session *s, struct bench_measure *m)
{
    if (s->options.warmup == 0)
        return;
    struct bench_load load = common_load(s, m);
    load.request_count = s->options.warmup;
    load.stream_count = 1;
    load.write_body = write_warm_up;
    load.on_result = learn_words;
    bench_load_run(&load);
}

void bench_session_load(struct bench_session *s, struct bench_measure *m)
{
    const struct bench_options *o = &s->options;
    struct bench_load load = common_load(s, m);
    load.request_count = o->requests;
    load.ramp_us = (uint64_t)(o->ramp * 1e6);
    load.rate = o->rate;
    load.progress = o->progress;
    load.write_body = write_plain;
    if (o->seconds > 0) {
        load.run_us_max_is_fault = o->seconds > o->time_limit;
        load.run_us_max =
            (uint64_t)((o->seconds < o->time_limit ? o->seconds : o->time_limit) * 1e6);
    }
    bench_load_run(&load);
}
