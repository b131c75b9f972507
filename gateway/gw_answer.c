/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/gw_checkpoint.h"
#include "gateway/gw_openai_response.h"
#include "gateway/gw_parse_stop.h"
#include "lib/base/check.h"
#include "lib/base/json.h"

#define ANSWER_MAGIC 0x6777416eu

enum { SCRATCH_TOKEN, SCRATCH_DELTA, SCRATCH_JSON }; /* options.scratch[] */

static void send_json(struct gw_answer *a)
{
    struct str *json = &a->options.scratch[SCRATCH_JSON];
    if (json->overflow)
        a->failed = true;
    else
        a->options.event(a->options.arg, json->text, json->bytes);
    str_clear(json);
}

/* Sends what has been collected for the current delta of a stream. */
static void flush_delta(struct gw_answer *a, struct gw_choice *c)
{
    struct str *text = &a->options.scratch[SCRATCH_DELTA];
    struct str *json = &a->options.scratch[SCRATCH_JSON];
    if (a->delta == GW_DELTA_NONE)
        return;
    CHECK(text->bytes > 0);
    if (text->overflow)
        a->failed = true;
    if (a->delta == GW_DELTA_ARGUMENTS)
        gw_openai_arguments_chunk(a, c, a->delta_call, text->text, text->bytes, json);
    else
        gw_openai_text_chunk(a, c, a->delta == GW_DELTA_REASONING, text->text, text->bytes, json);
    send_json(a);
    str_clear(text);
    a->delta = GW_DELTA_NONE;
}

static void collect(struct gw_answer *a, struct gw_choice *c, enum gw_delta delta, uint32_t call,
                    const char *text, size_t bytes)
{
    if (bytes == 0)
        return;
    if (a->delta != delta || a->delta_call != call)
        flush_delta(a, c);
    a->delta = delta;
    a->delta_call = call;
    str_add(&a->options.scratch[SCRATCH_DELTA], text, bytes);
}

static void add_text(struct gw_choice *c, bool reasoning, const char *text, size_t bytes)
{
    struct gw_answer *a = c->answer;
    if (c->muted || (reasoning && !a->request->include_reasoning))
        return;
    if (a->request->stream)
        collect(a, c, reasoning ? GW_DELTA_REASONING : GW_DELTA_CONTENT, 0, text, bytes);
    else
        str_add(reasoning ? &c->reasoning : &c->content, text, bytes);
}

static void call_begins(struct gw_choice *c, const struct gw_parse_event *e)
{
    struct gw_answer *a = c->answer;
    c->call_count++;
    if (a->request->stream) {
        flush_delta(a, c);
        gw_openai_call_chunk(a, c, e->call_index, e->text, e->bytes,
                             &a->options.scratch[SCRATCH_JSON]);
        send_json(a);
    } else {
        gw_openai_call_begin(a, c, e->call_index, e->text, e->bytes, &c->calls);
    }
}

/* The arguments are JSON text inside a JSON string. */
static void call_goes_on(struct gw_choice *c, const struct gw_parse_event *e)
{
    struct gw_answer *a = c->answer;
    if (a->request->stream)
        collect(a, c, GW_DELTA_ARGUMENTS, e->call_index, e->text, e->bytes);
    else
        json_write_escaped(&c->calls, e->text, e->bytes);
}

static void on_parsed(void *context, const struct gw_parse_event *e)
{
    struct gw_choice *c = context;
    struct gw_answer *a = c->answer;
    if (c->muted)
        return;
    switch (e->type) {
    case GW_PARSE_REASONING:
        add_text(c, true, e->text, e->bytes);
        break;
    case GW_PARSE_CONTENT:
        add_text(c, false, e->text, e->bytes);
        break;
    case GW_PARSE_CALL:
        call_begins(c, e);
        break;
    case GW_PARSE_ARGUMENTS:
        call_goes_on(c, e);
        break;
    case GW_PARSE_CALL_END:
        if (a->request->stream)
            flush_delta(a, c);
        else
            str_add_text(&c->calls, "\"}}");
        if (e->whole && !a->request->parallel_calls)
            c->muted = true;
        break;
    }
}

/* ---- life ---- */

static bool choice_init(struct gw_answer *a, struct gw_choice *c, uint32_t index)
{
    const struct gw_request *r = a->request;
    c->answer = a;
    c->index = index;
    c->prompt = &r->prompts[index / r->n];
    detokenizer_init(&c->detokenizer, a->options.checkpoint->tokenizer, r->skip_special);
    struct str *const strings[] = {&c->reasoning, &c->content,   &c->calls,  &c->ids,
                                   &c->logprobs,  &c->lp_tokens, &c->lp_top, &c->lp_offsets};
    for (size_t i = 0; i < ARRAY_COUNT(strings); i++)
        str_init(strings[i], a->options.text_bytes_max);
    if (r->endpoint == GW_CHAT) {
        const struct gw_parse_options options = {
            .tools = r->tools,
            .choice = r->tools_on ? GW_PARSE_CHOICE_AUTO : GW_PARSE_CHOICE_NONE,
            .prompt_tail = r->prompt_tail,
            .prompt_tail_bytes = r->prompt_tail_bytes,
            .stops = r->stops,
            .stop_count = r->stop_count,
            .on_event = on_parsed,
            .context = c,
        };
        return gw_parse_create(&options, &c->parse) == ERR_OK;
    }
    if (r->stop_count == 0)
        return true;
    c->stops = calloc(1, sizeof(*c->stops));
    return c->stops && gw_parse_stops_init(c->stops, r->stops, r->stop_count) == ERR_OK;
}

bool gw_answer_init(struct gw_answer *a, struct gw_request *request,
                    const struct gw_answer_options *options)
{
    CHECK_OBJ(request, GW_REQUEST_MAGIC);
    CHECK(options->scratch && (!request->stream || options->event));
    memset(a, 0, sizeof(*a));
    a->magic = ANSWER_MAGIC;
    a->request = request;
    a->options = *options;
    str_init(&a->head, 4096);
    a->choices = arena_alloc_array(&request->arena, request->choice_count, sizeof(*a->choices));
    if (!a->choices)
        return false;
    for (uint32_t i = 0; i < request->choice_count; i++)
        if (!choice_init(a, &a->choices[i], i))
            return false;
    return true;
}

void gw_answer_fini(struct gw_answer *a)
{
    CHECK_OBJ(a, ANSWER_MAGIC);
    for (uint32_t i = 0; a->choices && i < a->request->choice_count; i++) {
        struct gw_choice *c = &a->choices[i];
        if (!c->answer)
            break;
        gw_parse_destroy(&c->parse);
        if (c->stops) {
            gw_parse_stops_fini(c->stops);
            free(c->stops);
        }
        struct str *const strings[] = {&c->reasoning, &c->content,   &c->calls,  &c->ids,
                                       &c->logprobs,  &c->lp_tokens, &c->lp_top, &c->lp_offsets};
        for (size_t s = 0; s < ARRAY_COUNT(strings); s++)
            str_fini(strings[s]);
    }
    str_fini(&a->head);
    a->magic = 0;
}

/* echo: the prompt stands at the front of the text. */
static void echo_prompt(struct gw_answer *a, struct gw_choice *c)
{
    CHECK(!a->request->logprobs); /* refused together: offsets would be wrong */
    add_text(c, false, c->prompt->text, c->prompt->bytes);
    if (a->request->stream)
        flush_delta(a, c);
}

void gw_answer_begin(struct gw_answer *a, const struct gw_receipt *known, uint64_t now_us)
{
    CHECK_OBJ(a, ANSWER_MAGIC);
    CHECK(a->accepted_us == 0);
    a->accepted_us = now_us;
    a->receipt = *known;
    snprintf(a->fingerprint, sizeof(a->fingerprint), "fp_%.12s_%.12s",
             known->model_fp[0] ? known->model_fp : "0",
             known->config_hash[0] ? known->config_hash : "0");
    gw_openai_chunk_head(a, &a->head);
    a->failed |= a->head.overflow;
    for (uint32_t i = 0; i < a->request->choice_count; i++) {
        struct gw_choice *c = &a->choices[i];
        c->begun = true;
        if (a->request->stream && a->request->endpoint == GW_CHAT) {
            gw_openai_role_chunk(a, c, &a->options.scratch[SCRATCH_JSON]);
            send_json(a);
        }
        if (a->request->echo)
            echo_prompt(a, c);
    }
}

/* ---- tokens ---- */

static bool asked_stop_id(const struct gw_request *r, uint32_t id)
{
    for (uint32_t i = 0; i < r->base.limits.stop_id_count; i++)
        if (r->base.limits.stop_ids[i] == id)
            return true;
    return false;
}

/* An id that ends the output and is not printed. */
static bool hidden_stop(const struct gw_answer *a, uint32_t id)
{
    const struct gw_request *r = a->request;
    bool model_stop = gw_checkpoint_stops(a->options.checkpoint, id);
    if (asked_stop_id(r, id))
        return model_stop || !r->include_stop;
    return model_stop && !r->ignore_eos;
}

static void chat_text(struct gw_choice *c, const char *text, size_t bytes)
{
    struct gw_answer *a = c->answer;
    size_t which = 0;
    if (gw_parse_feed(c->parse, text, bytes) != ERR_OK) {
        a->failed = true;
        return;
    }
    if (!gw_parse_stopped(c->parse, &which))
        return;
    if (a->request->include_stop)
        add_text(c, false, a->request->stops[which].text, a->request->stops[which].bytes);
    c->muted = true;
}

static void plain_text(struct gw_choice *c, const char *text, size_t bytes)
{
    struct gw_answer *a = c->answer;
    if (!c->stops) {
        add_text(c, false, text, bytes);
        return;
    }
    struct str out;
    str_init(&out, 0);
    gw_parse_stops_add(c->stops, text, bytes, &out);
    add_text(c, false, out.text, out.bytes);
    a->failed |= out.overflow;
    str_fini(&out);
    if (!c->stops->found)
        return;
    const struct gw_parse_stop *stop = &a->request->stops[c->stops->found_index];
    if (a->request->include_stop)
        add_text(c, false, stop->text, stop->bytes);
    c->muted = true;
}

static void one_token(struct gw_answer *a, struct gw_choice *c, const struct msg_tokens *t,
                      uint32_t i)
{
    const struct gw_request *r = a->request;
    uint32_t id = t->ids[i];
    c->output_tokens++;
    if (r->return_token_ids)
        str_add_format(&c->ids, c->ids.bytes ? ",%u" : "%u", id);
    if (hidden_stop(a, id))
        return;
    if (r->logprobs)
        gw_openai_note_logprob(a, c, t, i, id);
    if (c->parse && gw_parse_in_reasoning(c->parse))
        c->reasoning_tokens++;
    struct str *text = &a->options.scratch[SCRATCH_TOKEN];
    str_clear(text);
    /* Ids without a token print nothing; the engine masks them. */
    if (detokenizer_add(&c->detokenizer, id, text) != ERR_OK || text->bytes == 0)
        return;
    if (c->parse)
        chat_text(c, text->text, text->bytes);
    else
        plain_text(c, text->text, text->bytes);
}

static bool overflowed(const struct gw_choice *c)
{
    return c->reasoning.overflow || c->content.overflow || c->calls.overflow || c->ids.overflow ||
           c->logprobs.overflow || c->lp_tokens.overflow || c->lp_top.overflow ||
           c->lp_offsets.overflow;
}

/* The choice is complete: last held text, finish reason, last chunk. */
static void end_choice(struct gw_answer *a, struct gw_choice *c, bool length)
{
    CHECK(!c->over && c->begun);
    struct str *text = &a->options.scratch[SCRATCH_TOKEN];
    str_clear(text);
    bool cut = c->muted;
    detokenizer_end(&c->detokenizer, text);
    c->finish_reason = length && !cut ? "length" : "stop";
    if (c->parse) {
        enum gw_parse_finish finish = GW_PARSE_FINISH_STOP;
        if ((!cut && text->bytes && gw_parse_feed(c->parse, text->text, text->bytes) != ERR_OK) ||
            gw_parse_finish(c->parse, length && !cut ? GW_PARSE_END_LENGTH : GW_PARSE_END_STOP,
                            &finish) != ERR_OK)
            a->failed = true;
        c->finish_reason = gw_parse_finish_name(finish);
        if (cut && c->call_count == 0)
            c->finish_reason = "stop";
    } else if (!cut) {
        plain_text(c, text->text ? text->text : "", text->bytes);
        if (c->stops && !c->muted) {
            str_clear(text);
            gw_parse_stops_release(c->stops, text);
            add_text(c, false, text->text, text->bytes);
        }
    }
    c->over = true;
    a->choices_over++;
    if (a->request->stream) {
        flush_delta(a, c);
        gw_openai_finish_chunk(a, c, &a->options.scratch[SCRATCH_JSON]);
        send_json(a);
    }
    a->failed |= overflowed(c);
}

/* What the engine makes of the asked policy. */
static void note_spec(struct gw_answer *a, const char *spec)
{
    if (spec && spec[0] && strcmp(spec, a->receipt.spec) != 0)
        snprintf(a->receipt.spec, sizeof(a->receipt.spec), "%s", spec);
}

bool gw_answer_tokens(struct gw_answer *a, uint32_t choice, const struct msg_tokens *t,
                      uint32_t skip, uint64_t now_us)
{
    CHECK_OBJ(a, ANSWER_MAGIC);
    CHECK(choice < a->request->choice_count && a->accepted_us && skip <= t->count);
    struct gw_choice *c = &a->choices[choice];
    if (c->over)
        return false;
    if (c->first_us == 0)
        c->first_us = now_us;
    c->last_us = now_us;
    if (t->has_receipt) {
        c->running = t->receipt;
        c->running.spec = c->running.config_hash = NULL; /* not ours to keep */
        c->has_running = true;
        note_spec(a, t->receipt.spec);
    }
    for (uint32_t i = skip; i < t->count && !c->muted && !a->failed; i++)
        one_token(a, c, t, i);
    if (a->request->stream)
        flush_delta(a, c);
    a->failed |= overflowed(c);
    if (!c->muted || a->failed)
        return false;
    end_choice(a, c, false);
    return true;
}

static void add_receipt(struct gw_answer *a, struct gw_choice *c, const struct msg_receipt *m)
{
    struct gw_receipt *r = &a->receipt;
    c->has_receipt = true;
    r->drafted += m->drafted;
    r->accepted += m->accepted;
    r->steps += m->steps;
    r->preempted += m->preempted;
    r->resumed += m->resumed;
    if (c->index % a->request->n == 0)
        r->cached_tokens +=
            m->cached_tokens < c->prompt->count ? m->cached_tokens : c->prompt->count;
    if (m->queue_us > r->queue_us)
        r->queue_us = m->queue_us;
    if (m->prefill_us > r->prefill_us)
        r->prefill_us = m->prefill_us;
    if (m->decode_us > r->decode_us)
        r->decode_us = m->decode_us;
    if (m->draft_us > r->draft_us)
        r->draft_us = m->draft_us;
    if (m->verify_us > r->verify_us)
        r->verify_us = m->verify_us;
    if (m->concurrency > r->concurrency)
        r->concurrency = m->concurrency;
    note_spec(a, m->spec);
    if (m->config_hash && m->config_hash[0])
        snprintf(r->config_hash, sizeof(r->config_hash), "%s", m->config_hash);
    static const struct hash128 none;
    if (memcmp(&m->model_fp, &none, sizeof(none)) != 0)
        hex_encode(m->model_fp.bytes, sizeof(m->model_fp.bytes), r->model_fp);
}

void gw_answer_finish(struct gw_answer *a, uint32_t choice, uint32_t finish,
                      const struct msg_receipt *receipt, uint64_t now_us)
{
    CHECK_OBJ(a, ANSWER_MAGIC);
    CHECK(choice < a->request->choice_count && a->accepted_us);
    struct gw_choice *c = &a->choices[choice];
    if (receipt && !c->has_receipt)
        add_receipt(a, c, receipt);
    if (!c->over)
        end_choice(a, c, finish == MSG_FINISH_LENGTH);
}

bool gw_answer_over(const struct gw_answer *a)
{
    CHECK_OBJ(a, ANSWER_MAGIC);
    return a->choices_over == a->request->choice_count;
}

uint32_t gw_answer_output_tokens(const struct gw_answer *a)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->request->choice_count; i++)
        count += a->choices[i].output_tokens;
    return count;
}

uint32_t gw_answer_prompt_tokens(const struct gw_answer *a)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->request->prompt_count; i++)
        count += a->request->prompts[i].count;
    return count;
}

/* No word of the engine at all: the times as seen from here. */
static void seen_times(struct gw_answer *a, const struct gw_choice *c)
{
    uint64_t prefill = c->first_us - a->accepted_us, decode = c->last_us - c->first_us;
    if (prefill > a->receipt.prefill_us)
        a->receipt.prefill_us = prefill;
    if (decode > a->receipt.decode_us)
        a->receipt.decode_us = decode;
}

void gw_answer_settle(struct gw_answer *a)
{
    CHECK_OBJ(a, ANSWER_MAGIC);
    CHECK(gw_answer_over(a));
    for (uint32_t i = 0; i < a->request->choice_count; i++) {
        struct gw_choice *c = &a->choices[i];
        if (c->has_receipt)
            continue;
        if (c->has_running)
            add_receipt(a, c, &c->running);
        else if (c->first_us != 0)
            seen_times(a, c);
        c->has_receipt = true;
    }
}

void gw_answer_usage_event(struct gw_answer *a)
{
    CHECK_OBJ(a, ANSWER_MAGIC);
    if (!a->request->include_usage)
        return;
    gw_openai_usage_chunk(a, &a->options.scratch[SCRATCH_JSON]);
    send_json(a);
}

void gw_answer_write(struct gw_answer *a, struct str *out)
{
    CHECK_OBJ(a, ANSWER_MAGIC);
    CHECK(gw_answer_over(a));
    gw_openai_object(a, out);
}
