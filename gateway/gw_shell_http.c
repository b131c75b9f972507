/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_shell_state.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "lib/base/check.h"
#include "lib/base/json.h"

#define GET    1u
#define POST   2u
#define MODELS "/v1/models/"

struct route {
    const char *path;
    uint32_t methods;
    bool guarded; /* wants a key, where keys are configured */
    void (*get)(struct gw_shell *s, struct gw_http_request *r);
    enum gw_endpoint endpoint; /* POST */
};

static const struct route routes[] = {
    {"/v1/chat/completions", POST, true, NULL, GW_CHAT},
    {"/v1/completions", POST, true, NULL, GW_COMPLETION},
    {"/v1/models", GET, true, gw_models_list, 0},
    {"/tokenize", POST, true, NULL, GW_TOKENIZE},
    {"/detokenize", POST, true, NULL, GW_DETOKENIZE},
    {"/health", GET, false, gw_models_health, 0},
    {"/ping", GET, false, gw_models_health, 0},
    {"/ready", GET, false, gw_models_ready, 0},
    {"/version", GET, false, gw_models_version, 0},
    {"/load", GET, false, gw_models_load, 0},
    {"/metrics", GET, false, gw_models_metrics, 0},
};

static const struct route one_model = {MODELS, GET, true, NULL, 0};

static const struct route *find_route(const char *path)
{
    size_t bytes = strlen(path);
    if (bytes > 1 && path[bytes - 1] == '/')
        bytes--; /* one trailing slash is forgiven */
    for (size_t i = 0; i < ARRAY_COUNT(routes); i++)
        if (strlen(routes[i].path) == bytes && memcmp(routes[i].path, path, bytes) == 0)
            return &routes[i];
    if (strncmp(path, MODELS, sizeof(MODELS) - 1) == 0)
        return &one_model;
    return NULL;
}

void gw_shell_refuse(struct gw_shell *s, struct gw_http_request *r,
                     const struct gw_refusal *refusal, const char *headers)
{
    char all[512], own[64];
    gw_refusal_headers(refusal, own, sizeof(own));
    snprintf(all, sizeof(all), "%s%s", own, headers ? headers : "");
    struct str *text = &s->reply;
    str_clear(text);
    gw_refusal_write(text, refusal);
    gw_metric_add(s, GW_M_api_refused, 1);
    gw_http_reply(r, &(struct gw_http_reply){.status = refusal->status,
                                             .headers = all,
                                             .body = text->text,
                                             .body_bytes = text->bytes});
    str_clear(text);
}

/* Every key is compared in full, so that time tells nothing. */
static bool key_known(const struct gw_shell *s, const char *key)
{
    size_t bytes = strlen(key);
    bool known = false;
    for (uint32_t i = 0; i < s->key_count; i++) {
        size_t own = strlen(s->keys[i]);
        unsigned char difference = own != bytes;
        for (size_t b = 0; b < own; b++)
            difference |= (unsigned char)(s->keys[i][b] ^ key[bytes ? b % bytes : 0]);
        known |= difference == 0;
    }
    return known;
}

static bool authorized(const struct gw_shell *s, const struct gw_http_request *r)
{
    if (s->key_count == 0)
        return true;
    const char *value = gw_http_field(r, "authorization");
    if (value && strncasecmp(value, "Bearer ", 7) == 0)
        return key_known(s, value + 7 + strspn(value + 7, " "));
    value = gw_http_field(r, "x-api-key");
    return value && key_known(s, value);
}

static bool json_body(const struct gw_http_request *r)
{
    const char *type = gw_http_field(r, "content-type");
    const char *coding = gw_http_field(r, "content-encoding");
    if (coding && strcasecmp(coding, "identity") != 0)
        return false;
    if (!type || !*type)
        return true;
    size_t n = strcspn(type, "; \t");
    const char *charset = strcasestr(type + n, "charset=");
    if (charset) {
        charset += strlen("charset=");
        charset += *charset == '"';
        if (strncasecmp(charset, "utf-8", 5) != 0 && strncasecmp(charset, "utf8", 4) != 0)
            return false;
    }
    return (n == 16 && strncasecmp(type, "application/json", 16) == 0) ||
           (n > 17 && strncasecmp(type, "application/", 12) == 0 &&
            strncasecmp(type + n - 5, "+json", 5) == 0);
}

static void allow_text(const struct route *route, char *out, size_t bytes)
{
    snprintf(out, bytes, "Allow: %s, OPTIONS\r\n", route->methods & GET ? "GET, HEAD" : "POST");
}

static void answer_options(struct gw_shell *s, struct gw_http_request *r)
{
    const struct route *route = find_route(gw_http_path(r));
    char headers[512], allow[64] = "Allow: GET, HEAD, POST, OPTIONS\r\n";
    if (route)
        allow_text(route, allow, sizeof(allow));
    snprintf(headers, sizeof(headers), "%s%s", allow,
             s->params->cors_origin[0]
                 ? "Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS\r\n"
                   "Access-Control-Allow-Headers: authorization, content-type, x-api-key, "
                   "x-request-id, x-session-id\r\nAccess-Control-Max-Age: 86400\r\n"
                 : "");
    gw_http_reply(r, &(struct gw_http_reply){.status = 204, .headers = headers});
}

/* What can be told from the head alone, before a body is read. */
void gw_shell_http_head(void *arg, struct gw_http_request *r)
{
    struct gw_shell *s = arg;
    CHECK_OBJ(s, GW_SHELL_MAGIC);
    struct gw_refusal refusal;
    const char *method = gw_http_method(r), *path = gw_http_path(r);
    if (strcmp(method, "OPTIONS") == 0) {
        answer_options(s, r);
        return;
    }
    const struct route *route = find_route(path);
    if (!route) {
        gw_refuse(&refusal, 404, "invalid_request_error", NULL, NULL, "No such route: %s %.200s",
                  method, path);
        gw_shell_refuse(s, r, &refusal, NULL);
        return;
    }
    uint32_t bit = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0 ? GET
                   : strcmp(method, "POST") == 0                             ? POST
                                                                             : 0;
    if (!(route->methods & bit)) {
        char allow[64];
        allow_text(route, allow, sizeof(allow));
        gw_refuse(&refusal, 405, "invalid_request_error", NULL, NULL, "%s is not allowed on %.200s",
                  method, path);
        gw_shell_refuse(s, r, &refusal, allow);
        return;
    }
    if (route->guarded && !authorized(s, r)) {
        gw_refuse(&refusal, 401, "authentication_error", "invalid_api_key", NULL,
                  "A valid API key is required: Authorization: Bearer KEY.");
        gw_shell_refuse(s, r, &refusal, "WWW-Authenticate: Bearer\r\n");
        return;
    }
    if (bit == POST && !json_body(r)) {
        gw_refuse(&refusal, 415, "invalid_request_error", NULL, NULL,
                  "The body must be plain JSON in UTF-8: Content-Type: application/json.");
        gw_shell_refuse(s, r, &refusal, NULL);
        return;
    }
    const char *session = gw_http_field(r, "x-session-id");
    if (bit == POST && session && strlen(session) > GW_SESSION_BYTES_MAX) {
        gw_refuse_invalid(&refusal, "invalid_value", "X-Session-Id",
                          "X-Session-Id: must be at most %u bytes long", GW_SESSION_BYTES_MAX);
        gw_shell_refuse(s, r, &refusal, NULL);
        return;
    }
    if (bit == POST && s->draining) {
        gw_refuse_err(&refusal, ERR_DRAINING, 1000, "the gateway is draining");
        gw_shell_refuse(s, r, &refusal, NULL);
    }
}

void gw_shell_http_request(void *arg, struct gw_http_request *r)
{
    struct gw_shell *s = arg;
    CHECK_OBJ(s, GW_SHELL_MAGIC);
    const char *path = gw_http_path(r);
    const struct route *route = find_route(path);
    CHECK(route != NULL); /* the head was checked */
    if (route == &one_model)
        gw_models_one(s, r, path + sizeof(MODELS) - 1);
    else if (route->get)
        route->get(s, r);
    else
        gw_exchange_start(s, r, route->endpoint);
}

void gw_shell_http_gone(void *arg, struct gw_http_request *r, enum gw_http_gone why)
{
    struct gw_shell *s = arg;
    CHECK_OBJ(s, GW_SHELL_MAGIC);
    struct gw_exchange *x = gw_http_user(r);
    if (x)
        gw_exchange_gone(x, why);
}
