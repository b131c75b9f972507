/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_shell_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"

#define DEAD_US 5000000u /* an engine that is silent for longer */

static void reply_text(struct gw_shell *s, struct gw_http_request *r, int status, const char *type)
{
    gw_http_reply(r, &(struct gw_http_reply){.status = status,
                                             .content_type = type,
                                             .body = s->reply.text,
                                             .body_bytes = s->reply.bytes});
    str_clear(&s->reply);
}

static void write_text(struct str *out, const char *text)
{
    json_write_string(out, text, strlen(text));
}

uint32_t gw_shell_window(const struct gw_shell *s)
{
    uint32_t engine = s->router.context_max, model = s->checkpoint.context_max;
    return engine >= 2 && engine < model ? engine : model;
}

/* The workers' warnings, one a line, and our own. */
static void write_warnings(const struct gw_shell *s, struct str *out)
{
    uint32_t count = 0;
    str_add_char(out, '[');
    for (const char *p = s->router.warnings; *p;) {
        size_t n = strcspn(p, "\n");
        if (n) {
            str_add_text(out, count++ ? "," : "");
            json_write_string(out, p, n);
        }
        p += n + (p[n] == '\n');
    }
    if (s->checkpoint.warning[0]) {
        str_add_text(out, count++ ? "," : "");
        write_text(out, s->checkpoint.warning);
    }
    str_add_char(out, ']');
}

static void write_model(const struct gw_shell *s, struct str *out)
{
    const struct gw_checkpoint *c = &s->checkpoint;
    const struct gw_router *r = &s->router;
    str_add_text(out, "{\"id\":");
    write_text(out, c->name);
    str_add_format(out, ",\"object\":\"model\",\"created\":%" PRIu64 ",\"owned_by\":\"tandem\"",
                   c->created_unix_s);
    /* What is really loaded: the workers' words, never the path's. */
    str_add_text(out, ",\"root\":\"glm5_next");
    if (r->quantization[0]) {
        str_add_text(out, " (");
        json_write_escaped(out, r->quantization, strlen(r->quantization));
        str_add_format(out, ", fp %.8s)", r->model_fp);
    }
    str_add_format(out, "\",\"parent\":null,\"max_model_len\":%u,\"context_length\":%u",
                   gw_shell_window(s), gw_shell_window(s));
    str_add_text(out, ",\"permission\":[{\"id\":\"modelperm-");
    json_write_escaped(out, c->name, strlen(c->name));
    str_add_format(out,
                   "\",\"object\":\"model_permission\",\"created\":%" PRIu64
                   ",\"allow_create_engine\":false,\"allow_sampling\":true,\"allow_logprobs\":true,"
                   "\"allow_search_indices\":false,\"allow_view\":true,\"allow_fine_tuning\":false,"
                   "\"organization\":\"*\",\"group\":null,\"is_blocking\":false}]",
                   c->created_unix_s);
    str_add_text(out, ",\"tandem\":{\"model_fp\":");
    write_text(out, r->model_fp);
    str_add_text(out, ",\"quantization\":");
    write_text(out, r->quantization);
    str_add_text(out, ",\"spec\":");
    write_text(out, r->spec);
    str_add_text(out, ",\"config_hash\":");
    write_text(out, r->config_hash);
    str_add_text(out, "},\"warnings\":");
    write_warnings(s, out);
    str_add_char(out, '}');
}

void gw_models_list(struct gw_shell *s, struct gw_http_request *r)
{
    str_add_text(&s->reply, "{\"object\":\"list\",\"data\":[");
    write_model(s, &s->reply);
    str_add_text(&s->reply, "]}");
    reply_text(s, r, 200, NULL);
}

/* %XX in the path's last part; false if malformed. */
static bool percent_decode(const char *text, char *out, size_t bytes)
{
    size_t n = 0;
    while (*text) {
        if (n + 1 >= bytes)
            return false;
        if (*text != '%') {
            out[n++] = *text++;
            continue;
        }
        if (!text[1] || !text[2] || !hex_decode(text + 1, 2, out + n) || out[n] == '\0')
            return false;
        n++;
        text += 3;
    }
    out[n] = '\0';
    return utf8_valid_prefix(out, n) == n;
}

void gw_models_one(struct gw_shell *s, struct gw_http_request *r, const char *id)
{
    char name[256];
    struct gw_refusal refusal;
    if (percent_decode(id, name, sizeof(name)) && strcmp(name, s->checkpoint.name) == 0) {
        write_model(s, &s->reply);
        reply_text(s, r, 200, NULL);
        return;
    }
    gw_refuse(&refusal, 404, "invalid_request_error", "model_not_found", "model",
              "The model `%.100s` does not exist; this server has `%s`.", id, s->checkpoint.name);
    gw_shell_refuse(s, r, &refusal, NULL);
}

void gw_models_version(struct gw_shell *s, struct gw_http_request *r)
{
    str_add_text(&s->reply, "{\"version\":\"" TANDEM_VERSION "\"}");
    reply_text(s, r, 200, NULL);
}

void gw_models_load(struct gw_shell *s, struct gw_http_request *r)
{
    str_add_format(&s->reply, "{\"server_load\":%u}", s->live_count);
    reply_text(s, r, 200, NULL);
}

/* Alive, unless the engine is gone: its router is silent, or the router hears no worker.  One that
 * loads or is drained is there. */
void gw_models_health(struct gw_shell *s, struct gw_http_request *r)
{
    uint64_t now_us = gw_shell_now(s);
    bool silent = s->router.known && now_us - s->router.seen_us > DEAD_US;
    bool alone = s->router.known && now_us - s->router.live_us > DEAD_US;
    if (!silent && !alone) {
        gw_http_reply(r, &(struct gw_http_reply){.status = 200, .content_type = "text/plain"});
        return;
    }
    struct gw_refusal refusal;
    gw_refuse_err(&refusal, ERR_NO_WORKER, 1000,
                  silent ? "the router does not answer" : "no worker lives");
    gw_shell_refuse(s, r, &refusal, NULL);
}

bool gw_shell_ready(struct gw_shell *s, const char **ret_reason)
{
    const struct gw_router *r = &s->router;
    uint64_t silent_us = s->params->router_silence_ms * 1000ull;
    if (s->draining)
        *ret_reason = "the gateway is draining";
    else if (!r->known)
        *ret_reason = "the router has not been seen yet";
    else if (gw_shell_now(s) - r->seen_us > silent_us)
        *ret_reason = "the router does not answer";
    else if (!r->ready)
        *ret_reason = r->reason[0] ? r->reason : "no worker is ready";
    else
        *ret_reason = "";
    return (*ret_reason)[0] == '\0';
}

void gw_models_ready(struct gw_shell *s, struct gw_http_request *r)
{
    const char *reason = "";
    bool ready = gw_shell_ready(s, &reason);
    struct str *out = &s->reply;
    str_add_format(out, "{\"ready\":%s,\"reason\":", ready ? "true" : "false");
    write_text(out, reason);
    str_add_format(out, ",\"workers_ready\":%u,\"running\":%u,\"waiting\":%u,\"model\":",
                   s->router.workers_ready, s->router.running, s->router.waiting);
    write_text(out, s->checkpoint.name);
    str_add_text(out, ",\"model_fp\":");
    write_text(out, s->router.model_fp);
    str_add_text(out, ",\"warnings\":");
    write_warnings(s, out);
    str_add_char(out, '}');
    gw_http_reply(r, &(struct gw_http_reply){.status = ready ? 200 : 503,
                                             .headers = ready ? NULL : "Retry-After: 1\r\n",
                                             .body = out->text,
                                             .body_bytes = out->bytes});
    str_clear(out);
}

void gw_models_metrics(struct gw_shell *s, struct gw_http_request *r)
{
    gw_status_metrics(s->status, &s->reply);
    reply_text(s, r, 200, "text/plain; version=0.0.4; charset=utf-8");
}
