/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_shell_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/log.h"
#include "lib/base/rng.h"

static struct gw_exchange *exchange_take(struct gw_shell *s)
{
    if (s->free_count == 0)
        return NULL;
    struct gw_exchange *x = s->free_list[--s->free_count];
    CHECK(x->state == EXCHANGE_FREE && !x->answer_open);
    x->shell = s;
    x->state = EXCHANGE_TEXT;
    x->streaming = x->in_core = x->gone_pending = false;
    x->received_us = gw_shell_now(s);
    x->submitted_us = x->first_us = x->last_us = 0;
    x->live_index = s->live_count;
    s->live[s->live_count++] = x;
    return x;
}

static void exchange_free(struct gw_exchange *x)
{
    struct gw_shell *s = x->shell;
    CHECK(x->state != EXCHANGE_FREE && x->job.body.bytes == NULL);
    if (x->answer_open)
        gw_answer_fini(&x->answer);
    x->answer_open = false;
    gw_request_reset(&x->job.request);
    x->http = NULL;
    x->state = EXCHANGE_FREE;
    struct gw_exchange *moved = s->live[--s->live_count];
    s->live[x->live_index] = moved;
    moved->live_index = x->live_index;
    s->free_list[s->free_count++] = x;
}

/* ---- from the request to the engine ---- */

static void fill_client(struct gw_http_request *http, struct gw_job *job)
{
    const char *session = gw_http_field(http, "x-session-id");
    job->session_id[0] = '\0';
    if (session) /* its length was checked with the head */
        snprintf(job->session_id, sizeof(job->session_id), "%s", session);
    snprintf(job->request_id, sizeof(job->request_id), "%s", gw_http_request_id(http));
    /* The key itself never leaves this process. */
    const char *key = gw_http_field(http, "authorization");
    job->client_id[0] = '\0';
    if (key) {
        struct hash128 h = hash_xxh3_once(key, strlen(key));
        hex_encode(h.bytes, 8, job->client_id);
    }
}

void gw_exchange_start(struct gw_shell *s, struct gw_http_request *http, enum gw_endpoint endpoint)
{
    struct gw_exchange *x = exchange_take(s);
    struct gw_refusal refusal;
    if (!x) {
        gw_refuse_err(&refusal, ERR_BUSY, 1000, "the gateway has too many requests");
        gw_shell_refuse(s, http, &refusal, NULL);
        return;
    }
    struct gw_job *job = &x->job;
    x->http = http;
    gw_http_set_user(http, x);
    job->endpoint = endpoint;
    job->owner = x;
    job->ok = false;
    job->window = gw_shell_window(s);
    rng_system(&job->seed, sizeof(job->seed));
    fill_client(http, job);
    str_clear(&job->answer);
    gw_http_take_body(http, &job->body);
    if (gw_tokenize_push(s->tokenize, job))
        return;
    gw_http_give_body(s->http, &job->body);
    gw_http_set_user(http, NULL);
    exchange_free(x);
    gw_refuse_err(&refusal, ERR_BUSY, 1000, "the gateway has too many requests to tokenise");
    gw_shell_refuse(s, http, &refusal, NULL);
}

/* The client gets an error instead of an answer; the exchange is over. */
static void exchange_refuse(struct gw_exchange *x, const struct gw_refusal *refusal)
{
    struct gw_http_request *http = x->http;
    if (http) {
        gw_http_set_user(http, NULL);
        if (x->job.request.id[0]) /* the body may have named it */
            gw_http_set_request_id(http, x->job.request.id);
        gw_shell_refuse(x->shell, http, refusal, NULL);
    }
    exchange_free(x);
}

static void on_event_json(void *arg, const char *json, size_t bytes)
{
    struct gw_exchange *x = arg;
    if (x->streaming && x->http)
        gw_sse_event(&x->sse, json, bytes);
}

static enum gw_reasoning_field reasoning_field(const struct gw_params *p)
{
    return strcmp(p->reasoning_field, "both") == 0        ? GW_REASONING_BOTH
           : strcmp(p->reasoning_field, "reasoning") == 0 ? GW_REASONING_PLAIN
                                                          : GW_REASONING_CONTENT;
}

static bool open_answer(struct gw_exchange *x)
{
    struct gw_shell *s = x->shell;
    struct gw_answer_options o = {
        .checkpoint = &s->checkpoint,
        .reasoning_field = reasoning_field(s->params),
        .created_unix_s = clock_unix_us() / 1000000,
        .text_bytes_max = s->params->answer_bytes_max,
        .event = on_event_json,
        .arg = x,
        .scratch = s->scratch,
    };
    rng_system(&o.nonce, sizeof(o.nonce));
    x->answer_open = true;
    return gw_answer_init(&x->answer, &x->job.request, &o);
}

static uint32_t output_max(const struct gw_exchange *x, uint32_t choice)
{
    const struct gw_request *r = &x->job.request;
    uint32_t room = x->job.window - r->prompts[choice / r->n].count;
    return r->max_tokens && r->max_tokens < room ? r->max_tokens : room;
}

static void submit(struct gw_exchange *x)
{
    struct gw_shell *s = x->shell;
    struct gw_request *r = &x->job.request;
    struct gw_leg_open *legs = arena_alloc_array(&r->arena, r->choice_count, sizeof(*legs));
    if (!legs || !open_answer(x)) {
        struct gw_refusal refusal;
        gw_refuse_err(&refusal, ERR_NOMEM, 1000, NULL);
        exchange_refuse(x, &refusal);
        return;
    }
    for (uint32_t i = 0; i < r->choice_count; i++) {
        rng_system(&legs[i].id, sizeof(legs[i].id));
        legs[i].output_max = output_max(x, i);
    }
    gw_http_set_request_id(x->http, r->id); /* the body may name another */
    x->state = EXCHANGE_ENGINE;
    x->submitted_us = gw_shell_now(s);
    if (s->params->request_ms > 0)
        r->base.limits.deadline_unix_us = clock_unix_us() + s->params->request_ms * 1000ull;
    gw_metric_add(s, GW_M_unknown_fields, r->unknown_fields);
    gw_metric_observe(s, GW_M_params_n, r->n);
    if (r->max_tokens)
        gw_metric_observe(s, GW_M_params_max, r->max_tokens);
    struct gw_event e = {.type = GW_EVENT_OPEN};
    e.u.open.owner = x;
    e.u.open.leg_count = r->choice_count;
    e.u.open.legs = legs;
    gw_shell_step(s, &e);
}

static void on_accepted(struct gw_exchange *x, uint32_t concurrency);

/* The prompt is the answer: nothing for the engine to do. */
static void answer_echo(struct gw_exchange *x)
{
    struct gw_shell *s = x->shell;
    if (!open_answer(x)) {
        struct gw_refusal refusal;
        gw_refuse_err(&refusal, ERR_NOMEM, 1000, NULL);
        exchange_refuse(x, &refusal);
        return;
    }
    gw_http_set_request_id(x->http, x->job.request.id);
    x->state = EXCHANGE_ENGINE;
    on_accepted(x, s->router.running + 1);
    for (uint32_t i = 0; i < x->job.request.choice_count; i++)
        gw_answer_finish(&x->answer, i, MSG_FINISH_LENGTH, NULL, gw_shell_now(s));
    gw_exchange_complete(x);
}

void gw_exchange_text_done(void *arg, struct gw_job *job)
{
    struct gw_shell *s = arg;
    struct gw_exchange *x = job->owner;
    CHECK(x->state == EXCHANGE_TEXT);
    gw_http_give_body(s->http, &job->body);
    gw_metric_observe(s, GW_M_text_time, (double)(gw_shell_now(s) - x->received_us) / 1e6);
    if (!x->http) {
        exchange_free(x);
    } else if (!job->ok) {
        exchange_refuse(x, &job->refusal);
    } else if (job->endpoint == GW_TOKENIZE || job->endpoint == GW_DETOKENIZE) {
        struct gw_http_request *http = x->http;
        gw_http_set_user(http, NULL);
        gw_http_reply(http, &(struct gw_http_reply){.status = 200,
                                                    .body = job->answer.text,
                                                    .body_bytes = job->answer.bytes});
        str_clear(&job->answer);
        if (job->answer.capacity > 65536)
            str_fini(&job->answer);
        exchange_free(x);
    } else if (s->draining) {
        struct gw_refusal refusal;
        gw_refuse_err(&refusal, ERR_DRAINING, 1000, "the gateway is draining");
        exchange_refuse(x, &refusal);
    } else if (job->request.echo_only) {
        answer_echo(x);
    } else {
        submit(x);
    }
}

/* ---- the answer ---- */

static void known_receipt(struct gw_exchange *x, uint32_t concurrency, struct gw_receipt *ret)
{
    const struct gw_shell *s = x->shell;
    const char *spec = x->job.request.base.spec;
    memset(ret, 0, sizeof(*ret));
    ret->concurrency = concurrency;
    snprintf(ret->spec, sizeof(ret->spec), "%.31s", spec[0] ? spec : s->router.spec);
    snprintf(ret->model_fp, sizeof(ret->model_fp), "%s", s->router.model_fp);
    snprintf(ret->config_hash, sizeof(ret->config_hash), "%.64s", s->router.config_hash);
}

static bool header_safe(const char *text)
{
    for (; *text; text++)
        if (*text < ' ' || *text > '~')
            return false;
    return true;
}

static size_t header_add(char *out, size_t at, size_t max, const char *name, const char *value)
{
    if (!value[0] || !header_safe(value))
        return at;
    int n = snprintf(out + at, max - at, "%s: %s\r\n", name, value);
    CHECK(n > 0 && at + (size_t)n < max);
    return at + (size_t)n;
}

static void answer_headers(const struct gw_exchange *x, char *out, size_t max)
{
    const struct gw_request *r = &x->job.request;
    const struct gw_receipt *known = &x->answer.receipt;
    char concurrency[16];
    size_t at = 0;
    out[0] = '\0';
    snprintf(concurrency, sizeof(concurrency), "%u", known->concurrency);
    at = header_add(out, at, max, "x-tandem-effort", r->base.effort);
    at = header_add(out, at, max, "x-tandem-concurrency", concurrency);
    at = header_add(out, at, max, "x-tandem-spec", known->spec);
    at = header_add(out, at, max, "x-tandem-model-fp", known->model_fp);
    at = header_add(out, at, max, "x-tandem-config", known->config_hash);
    header_add(out, at, max, "x-tandem-ignored", r->ignored);
}

static void on_accepted(struct gw_exchange *x, uint32_t concurrency)
{
    struct gw_shell *s = x->shell;
    struct gw_receipt known;
    uint64_t now_us = gw_shell_now(s);
    known_receipt(x, concurrency, &known);
    if (!x->job.request.echo_only)
        gw_metric_add(s, GW_M_prompt_tokens, gw_answer_prompt_tokens(&x->answer));
    if (x->job.request.stream) {
        char headers[1536];
        x->answer.receipt = known;
        answer_headers(x, headers, sizeof(headers));
        gw_sse_begin(&x->sse, x->http, &s->sse_buffer, headers, now_us);
        x->streaming = true;
    }
    gw_answer_begin(&x->answer, &known, now_us);
    if (x->streaming)
        (void)gw_sse_flush(&x->sse, now_us);
}

static void count_finish(struct gw_exchange *x)
{
    struct gw_shell *s = x->shell;
    const struct gw_answer *a = &x->answer;
    uint32_t longest = 0;
    for (uint32_t i = 0; i < x->job.request.choice_count; i++) {
        const struct gw_choice *c = &a->choices[i];
        gw_metric_add(s,
                      strcmp(c->finish_reason, "length") == 0       ? GW_M_success_length
                      : strcmp(c->finish_reason, "tool_calls") == 0 ? GW_M_success_tools
                                                                    : GW_M_success_stop,
                      1);
        if (c->output_tokens > longest)
            longest = c->output_tokens;
        if (c->output_tokens > 1) {
            double per = (double)(c->last_us - c->first_us) / 1e6 / (c->output_tokens - 1);
            gw_metric_observe(s, GW_M_tpot, per);
            gw_metric_observe(s, GW_M_tpot_old, per);
        }
    }
    const struct gw_receipt *r = &a->receipt;
    uint32_t prompt = gw_answer_prompt_tokens(a);
    gw_metric_observe(s, GW_M_e2e, (double)(gw_shell_now(s) - x->received_us) / 1e6);
    gw_metric_observe(s, GW_M_queue_time, (double)r->queue_us / 1e6);
    gw_metric_observe(s, GW_M_prefill_time, (double)r->prefill_us / 1e6);
    gw_metric_observe(s, GW_M_decode_time, (double)r->decode_us / 1e6);
    gw_metric_observe(s, GW_M_inference_time, (double)(r->prefill_us + r->decode_us) / 1e6);
    gw_metric_observe(s, GW_M_request_prompt, prompt);
    gw_metric_observe(s, GW_M_request_output, gw_answer_output_tokens(a));
    gw_metric_observe(s, GW_M_request_max, longest);
    gw_metric_add(s, GW_M_prefix_queries, prompt);
    gw_metric_add(s, GW_M_prefix_queries_gpu, prompt);
    gw_metric_add(s, GW_M_prefix_hits, r->cached_tokens);
    gw_metric_add(s, GW_M_prefix_hits_gpu, r->cached_tokens);
    gw_metric_add(s, GW_M_cached_tokens, r->cached_tokens);
    gw_metric_add(s, GW_M_preemptions, r->preempted);
    gw_metric_add(s, GW_M_source_cache, r->cached_tokens);
    gw_metric_add(s, GW_M_source_compute, prompt - r->cached_tokens);
    gw_metric_observe(s, GW_M_request_computed, prompt - r->cached_tokens);
}

/* The answer cannot go on: as an HTTP error, or as an event of the stream that has begun. */
static void exchange_fail(struct gw_exchange *x, const struct gw_refusal *refusal)
{
    struct gw_shell *s = x->shell;
    gw_metric_add(s, GW_M_errors, 1);
    log_debug(GATEWAY, "request failed", "req=%.16s status=%d reason=\"%s\"", x->job.request_id,
              refusal->status, refusal->message);
    if (!x->streaming) {
        exchange_refuse(x, refusal);
        return;
    }
    if (x->http) {
        struct str *text = &s->reply;
        str_clear(text);
        gw_refusal_write(text, refusal);
        str_clear(&s->sse_buffer);
        gw_sse_event(&x->sse, text->text, text->bytes);
        str_clear(text);
        gw_http_set_user(x->http, NULL);
        gw_sse_done(&x->sse);
    }
    exchange_free(x);
}

static void engine_failed(struct gw_exchange *x, enum err code, uint32_t retry_after_ms,
                          const char *text)
{
    struct gw_refusal refusal;
    const struct gw_request *r = &x->job.request;
    if (code == ERR_CONTEXT) {
        uint32_t longest = 0;
        for (uint32_t i = 0; i < r->prompt_count; i++)
            if (r->prompts[i].count > longest)
                longest = r->prompts[i].count;
        gw_refuse_context(&refusal, r->endpoint == GW_CHAT ? "messages" : "prompt",
                          x->shell->router.context_max ? x->shell->router.context_max
                                                       : x->job.window,
                          longest, false);
    } else if (code == ERR_TOO_LARGE) {
        /* Even an idle cluster cannot take it, so nobody is told to come back. */
        bool several = r->choice_count > r->prompt_count;
        gw_refuse_invalid(&refusal, several ? "invalid_value" : "context_length_exceeded",
                          several                  ? "n"
                          : r->endpoint == GW_CHAT ? "messages"
                                                   : "prompt",
                          "%s", text && text[0] ? text : err_text(code));
    } else {
        gw_refuse_err(&refusal, code, retry_after_ms, text);
    }
    x->in_core = false;
    exchange_fail(x, &refusal);
}

/* Memory or a bound: ours, not the engine's. */
static void answer_failed(struct gw_exchange *x)
{
    if (x->gone_pending)
        return;
    x->gone_pending = true;
    gw_shell_defer(x->shell,
                   &(struct gw_deferred){.type = DEFER_CLOSE, .flow = x->flow, .exchange = x});
}

static void note_times(struct gw_exchange *x, const struct gw_choice *c, uint64_t before_us,
                       uint32_t count)
{
    struct gw_shell *s = x->shell;
    uint64_t now_us = c->last_us;
    gw_metric_add(s, GW_M_output_tokens, count);
    if (x->first_us == 0) {
        x->first_us = now_us;
        gw_metric_observe(s, GW_M_ttft, (double)(now_us - x->received_us) / 1e6);
    }
    if (before_us)
        gw_metric_observe(s, GW_M_itl, (double)(now_us - before_us) / 1e6);
    x->last_us = now_us;
}

static uint32_t newer(uint32_t now, uint32_t *told)
{
    uint32_t more = now > *told ? now - *told : 0;
    *told += more;
    return more;
}

/* Verify steps since the last message.  Of a single step it is known which of its drafts were
 * right: the first ones. */
static void note_drafts(struct gw_shell *s, struct gw_choice *c, const struct msg_receipt *r)
{
    uint32_t steps = newer(r->steps, &c->told_steps);
    uint32_t drafted = newer(r->drafted, &c->told_drafted);
    uint32_t accepted = newer(r->accepted, &c->told_accepted);
    if (drafted == 0)
        return;
    gw_metric_add(s, GW_M_spec_drafts, steps);
    gw_metric_add(s, GW_M_spec_draft_tokens, drafted);
    gw_metric_add(s, GW_M_spec_accepted, accepted);
    STATIC_CHECK(GW_M_accepted_at_6 == GW_M_accepted_at_0 + 6);
    for (uint32_t i = 0; steps == 1 && i < accepted && i < 7; i++)
        gw_metric_add(s, GW_M_accepted_at_0 + i, 1);
}

static void on_tokens(struct gw_exchange *x, const struct gw_action *a, const struct gw_event *e)
{
    struct gw_shell *s = x->shell;
    const struct msg_tokens *t = e->u.tokens.tokens;
    struct gw_choice *c = &x->answer.choices[a->choice];
    uint64_t now_us = gw_shell_now(s), before_us = c->last_us;
    if (x->gone_pending)
        return;
    bool cut = gw_answer_tokens(&x->answer, a->choice, t, a->skip, now_us);
    note_times(x, c, before_us, t->count - a->skip);
    if (t->has_receipt)
        note_drafts(s, c, &t->receipt);
    if (x->answer.failed) {
        answer_failed(x);
        return;
    }
    if (x->streaming)
        (void)gw_sse_flush(&x->sse, now_us);
    if (!cut)
        return;
    gw_shell_defer(s, &(struct gw_deferred){
                          .type = DEFER_CUT, .flow = a->flow, .choice = a->choice, .exchange = x});
    if (gw_answer_over(&x->answer))
        gw_shell_defer(s, &(struct gw_deferred){.type = DEFER_COMPLETE, .exchange = x});
}

static void on_finish(struct gw_exchange *x, const struct gw_action *a)
{
    struct gw_shell *s = x->shell;
    if (x->gone_pending)
        return;
    bool was_over = gw_answer_over(&x->answer);
    if (a->receipt)
        note_drafts(s, &x->answer.choices[a->choice], a->receipt);
    gw_answer_finish(&x->answer, a->choice, a->finish, a->receipt, gw_shell_now(s));
    if (x->answer.failed)
        answer_failed(x);
    else if (!was_over && gw_answer_over(&x->answer))
        gw_shell_defer(s, &(struct gw_deferred){.type = DEFER_COMPLETE, .exchange = x});
    else if (x->streaming)
        (void)gw_sse_flush(&x->sse, gw_shell_now(s));
}

/* All choices are over: the rest of the answer goes out. */
void gw_exchange_complete(struct gw_exchange *x)
{
    struct gw_shell *s = x->shell;
    struct gw_http_request *http = x->http;
    CHECK(x->state == EXCHANGE_ENGINE && http != NULL && gw_answer_over(&x->answer));
    gw_answer_settle(&x->answer);
    if (x->streaming) {
        gw_answer_usage_event(&x->answer);
    } else {
        str_clear(&s->reply);
        gw_answer_write(&x->answer, &s->reply);
    }
    if (x->answer.failed || s->reply.overflow) {
        struct gw_refusal refusal;
        str_clear(&s->reply);
        gw_refuse_err(&refusal, ERR_NOMEM, 1000, "the answer does not fit into memory");
        exchange_fail(x, &refusal);
        return;
    }
    if (!x->job.request.echo_only)
        count_finish(x);
    gw_http_set_user(http, NULL);
    if (x->streaming) {
        gw_sse_done(&x->sse);
    } else {
        char headers[1536];
        answer_headers(x, headers, sizeof(headers));
        gw_http_reply(http, &(struct gw_http_reply){.status = 200,
                                                    .headers = headers,
                                                    .body = s->reply.text,
                                                    .body_bytes = s->reply.bytes});
        str_clear(&s->reply);
        if (s->reply.capacity > (1u << 20))
            str_fini(&s->reply);
    }
    exchange_free(x);
}

void gw_exchange_action(struct gw_shell *s, const struct gw_action *a, const struct gw_event *e)
{
    struct gw_exchange *x = a->owner;
    switch (a->type) {
    case GW_ACTION_OPENED:
        x->in_core = true;
        x->flow = a->flow;
        break;
    case GW_ACTION_ACCEPTED:
        on_accepted(x, a->concurrency);
        break;
    case GW_ACTION_REFUSED:
    case GW_ACTION_FAILED:
        engine_failed(x, a->code, a->retry_after_ms, a->text);
        break;
    case GW_ACTION_TOKENS:
        on_tokens(x, a, e);
        break;
    case GW_ACTION_FINISH:
        on_finish(x, a);
        break;
    default:
        CHECK(false);
    }
}

/* The client is gone, or does not read. */
void gw_exchange_gone(struct gw_exchange *x, enum gw_http_gone why)
{
    struct gw_shell *s = x->shell;
    gw_metric_add(s, why == GW_HTTP_GONE_SLOW ? GW_M_gone_slow : GW_M_gone_client, 1);
    gw_metric_add(s, GW_M_aborted, 1);
    x->http = NULL;
    if (x->state == EXCHANGE_TEXT)
        return; /* its thread still has the job */
    CHECK(x->in_core && !s->stepping);
    struct gw_event e = {.type = GW_EVENT_CLOSE, .u.close.flow = x->flow};
    gw_shell_step(s, &e);
    exchange_free(x);
}

void gw_exchange_fail_all(struct gw_shell *s, enum err code)
{
    struct gw_refusal refusal;
    gw_refuse_err(&refusal, code, 1000, NULL);
    for (uint32_t i = s->live_count; i-- > 0;) {
        struct gw_exchange *x = s->live[i];
        if (x->state != EXCHANGE_ENGINE)
            continue;
        struct gw_event e = {.type = GW_EVENT_CLOSE, .u.close.flow = x->flow};
        gw_shell_step(s, &e);
        exchange_fail(x, &refusal);
    }
}

void gw_exchange_tick(struct gw_shell *s, uint64_t now_us)
{
    uint64_t ping_us = s->params->ping_ms * 1000ull;
    for (uint32_t i = 0; i < s->live_count; i++)
        if (s->live[i]->streaming && s->live[i]->http)
            gw_sse_ping(&s->live[i]->sse, ping_us, now_us);
}
