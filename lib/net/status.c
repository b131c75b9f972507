/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/status.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/http.h>
#include <event2/keyvalq_struct.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/json.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/metrics.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"

#define STATUS_MAGIC 0x53544154u

#define PUBLISH_US         2000000u
#define LOOK_US            250000u /* how soon a Redis that came back gets the heartbeat */
#define HEARTBEAT_TTL_S    "6"
#define METRICS_TTL_S      "15"
#define PAGE_BYTES_MAX     (4u << 20)
#define FIELDS_PER_COMMAND 1024u /* a usual table in one command: nobody reads half of it */
#define REQUEST_BYTES_MAX  8192
#define CLIENT_TIMEOUT_S   5

struct status {
    uint32_t magic;
    struct loop *loop;
    struct status_options options;
    const char *state; /* literal of the caller */
    uint64_t start_us;
    char pid_start[24];    /* ticks from boot to our start: tells a reused pid */
    uint64_t published_us; /* 0 = not since Redis came up */
    struct evhttp *http;
    struct loop_timer *timer;
    char name[64];
    char path[108]; /* the socket, as sockaddr_un bounds it */
    char proc_key[192], metrics_key[192], help_key[192];
};

/* ---- HTTP ---- */

static void health_write(struct status *s, struct str *out)
{
    const struct status_options *o = &s->options;
    uint64_t uptime_s = (loop_now_us(s->loop) - s->start_us) / 1000000u;
    const char *redis = "off";
    if (o->redis != NULL && !redis_off(o->redis))
        redis = redis_up(o->redis) ? "up" : "down";
    str_add_text(out, "{\"name\":");
    json_write_string(out, s->name, strlen(s->name));
    str_add_text(out, ",\"role\":");
    json_write_string(out, o->role, strlen(o->role));
    str_add_format(out, ",\"id\":%u,\"pid\":%ld,\"state\":", o->id, (long)getpid());
    json_write_string(out, s->state, strlen(s->state));
    str_add_format(out, ",\"incarnation\":\"%016" PRIx64 "\",\"uptime_s\":%" PRIu64, o->incarnation,
                   uptime_s);
    str_add_format(out, ",\"version\":\"" TANDEM_VERSION "\",\"redis\":\"%s\"", redis);
    if (o->extra != NULL)
        o->extra(o->arg, out);
    str_add_text(out, "}\n");
}

static void metrics_write(struct status *s, struct str *out)
{
    const struct status_options *o = &s->options;
    if (o->refresh != NULL)
        o->refresh(o->arg);
    if (o->metric_count > 0)
        metrics_render(o->rows, o->values, o->metric_count, o->common_labels, out);
}

static void reply_send(struct evhttp_request *req, int code, const char *type,
                       const struct str *body)
{
    struct evbuffer *buffer = evbuffer_new();
    CHECK(buffer != NULL);
    if (body->bytes > 0)
        CHECK(evbuffer_add(buffer, body->text, body->bytes) == 0);
    struct evkeyvalq *headers = evhttp_request_get_output_headers(req);
    evhttp_add_header(headers, "Content-Type", type);
    /* One request per connection: nobody may hold a window open. */
    evhttp_add_header(headers, "Connection", "close");
    evhttp_send_reply(req, code, NULL, buffer);
    evbuffer_free(buffer);
}

static void request_answer(struct evhttp_request *req, struct status *s,
                           void (*write)(struct status *, struct str *), const char *type)
{
    struct str body;
    str_init(&body, PAGE_BYTES_MAX);
    write(s, &body);
    if (body.overflow) {
        str_clear(&body);
        reply_send(req, HTTP_INTERNAL, "text/plain", &body);
    } else {
        reply_send(req, HTTP_OK, type, &body);
    }
    str_fini(&body);
}

/* A number of the query; true if it is not there. */
static bool query_number(const struct evkeyvalq *query, const char *name, uint64_t *ret_value,
                         bool *ret_there)
{
    const char *text = evhttp_find_header(query, name);
    *ret_there = text != NULL;
    return text == NULL || text_to_u64(text, strlen(text), ret_value);
}

static enum err command_run(struct status *s, struct evhttp_request *req, const char *path,
                            struct err_detail *detail)
{
    const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(req);
    struct status_command c = {.name = path + 1};
    struct evkeyvalq query = {0};
    const char *text = evhttp_uri_get_query(uri);
    bool there = false;
    if (text != NULL && evhttp_parse_query_str(text, &query) != 0)
        return err_set(detail, ERR_INVALID, "query: not understood");
    enum err e = ERR_OK;
    if (!query_number(&query, "worker", &c.worker, &c.has_worker))
        e = err_set(detail, ERR_INVALID, "worker: not a number");
    else if (!query_number(&query, "deadline_ms", &c.deadline_ms, &there) ||
             c.deadline_ms > 86400000u)
        e = err_set(detail, ERR_INVALID, "deadline_ms: not a number up to 86400000");
    else if (!query_number(&query, "seconds", &c.seconds, &there))
        e = err_set(detail, ERR_INVALID, "seconds: not a number");
    const char *session = evhttp_find_header(&query, "session");
    const char *salt = evhttp_find_header(&query, "salt");
    c.session = session ? session : "";
    c.salt = salt ? salt : "";
    if (e == ERR_OK)
        e = s->options.command(s->options.arg, &c, detail);
    evhttp_clear_headers(&query);
    return e;
}

static void on_command(struct evhttp_request *req, struct status *s, const char *path)
{
    struct str body;
    struct err_detail detail = {{0}};
    enum err e = command_run(s, req, path, &detail);
    str_init(&body, 4096);
    if (e == ERR_OK) {
        str_add_text(&body, "{\"ok\":true}\n");
    } else {
        str_add_text(&body, "{\"ok\":false,\"error\":");
        json_write_string(&body, detail.text, utf8_valid_prefix(detail.text, strlen(detail.text)));
        str_add_text(&body, "}\n");
    }
    log_info(LOOP, "command", "name=%.32s code=%s", path + 1, err_name(e));
    reply_send(req,
               e == ERR_OK          ? HTTP_OK
               : e == ERR_NOT_FOUND ? HTTP_NOTFOUND
                                    : HTTP_BADREQUEST,
               "application/json", &body);
    str_fini(&body);
}

static void on_other(struct evhttp_request *req, void *arg)
{
    struct status *s = arg;
    struct str body;
    const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(req);
    const char *path = uri != NULL ? evhttp_uri_get_path(uri) : NULL;
    static const char *const commands[] = {"/drain", "/undrain", "/pin", "/unpin"};
    bool known = false;
    for (size_t i = 0; path != NULL && i < (s->options.pins ? 4u : 2u); i++)
        known |= strcmp(path, commands[i]) == 0;
    if (known && s->options.command != NULL && evhttp_request_get_command(req) == EVHTTP_REQ_POST) {
        on_command(req, s, path);
        return;
    }
    str_init(&body, 256);
    str_add_text(&body, "only /health and /metrics are here\n");
    reply_send(req, HTTP_NOTFOUND, "text/plain", &body);
    str_fini(&body);
}

static void on_health(struct evhttp_request *req, void *arg)
{
    struct status *s = arg;
    CHECK_OBJ(s, STATUS_MAGIC);
    if (evhttp_request_get_command(req) == EVHTTP_REQ_POST) {
        on_other(req, arg);
        return;
    }
    request_answer(req, s, health_write, "application/json");
}

static void on_metrics(struct evhttp_request *req, void *arg)
{
    struct status *s = arg;
    CHECK_OBJ(s, STATUS_MAGIC);
    if (evhttp_request_get_command(req) == EVHTTP_REQ_POST) {
        on_other(req, arg);
        return;
    }
    request_answer(req, s, metrics_write, "text/plain; version=0.0.4; charset=utf-8");
}

static enum err socket_open(const char *path, int *ret_fd, struct err_detail *detail)
{
    struct stat st;
    if (lstat(path, &st) == 0) {
        if (!S_ISSOCK(st.st_mode))
            return err_set(detail, ERR_INVALID, "%s: exists and is no socket", path);
        unlink(path);
    }
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    CHECK(strlen(path) < sizeof(address.sun_path));
    memcpy(address.sun_path, path, strlen(path));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: socket: %s", path, strerror(errno));
    mode_t mask = umask(0177);
    int rc = bind(fd, (const struct sockaddr *)&address, sizeof(address));
    int fault = errno;
    umask(mask);
    if (rc == 0 && listen(fd, 64) != 0) {
        rc = -1;
        fault = errno;
    }
    if (rc != 0) {
        close(fd);
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(fault));
    }
    *ret_fd = fd;
    return ERR_OK;
}

static enum err http_open(struct status *s, struct err_detail *detail)
{
    int fd = -1;
    TRY(socket_open(s->path, &fd, detail));
    s->http = evhttp_new(loop_base(s->loop));
    CHECK(s->http != NULL);
    evhttp_set_max_headers_size(s->http, REQUEST_BYTES_MAX);
    evhttp_set_max_body_size(s->http, REQUEST_BYTES_MAX);
    evhttp_set_timeout(s->http, CLIENT_TIMEOUT_S);
    evhttp_set_allowed_methods(s->http, EVHTTP_REQ_GET | EVHTTP_REQ_HEAD | EVHTTP_REQ_POST);
    evhttp_set_gencb(s->http, on_other, s);
    CHECK(evhttp_set_cb(s->http, "/health", on_health, s) == 0);
    CHECK(evhttp_set_cb(s->http, "/metrics", on_metrics, s) == 0);
    CHECK(evhttp_accept_socket_with_handle(s->http, fd) != NULL);
    return ERR_OK;
}

/* ---- Redis ---- */

/* Fields of one hash, sent as HSET commands of bounded length. */
struct hash_write {
    struct redis *redis;
    const char *key;
    struct str text; /* names and values, each with its NUL */
    uint32_t field_count;
    bool failed;
};

static void hash_flush(struct hash_write *h)
{
    const char *argv[2 + 2 * FIELDS_PER_COMMAND];
    size_t bytes[2 + 2 * FIELDS_PER_COMMAND];
    if (h->field_count == 0 || h->failed || h->text.overflow)
        return;
    argv[0] = "HSET", bytes[0] = 4;
    argv[1] = h->key, bytes[1] = strlen(h->key);
    uint32_t argc = 2 + 2 * h->field_count;
    const char *at = h->text.text;
    for (uint32_t i = 2; i < argc; i++) {
        argv[i] = at;
        bytes[i] = strlen(at);
        at += bytes[i] + 1;
    }
    if (redis_command(h->redis, NULL, NULL, (int)argc, argv, bytes) != ERR_OK)
        h->failed = true;
    str_clear(&h->text);
    h->field_count = 0;
}

static void hash_add(void *arg, const char *name, const char *value)
{
    struct hash_write *h = arg;
    CHECK(h->field_count < FIELDS_PER_COMMAND);
    str_add(&h->text, name, strlen(name) + 1);
    str_add(&h->text, value, strlen(value) + 1);
    h->field_count++;
    if (h->field_count == FIELDS_PER_COMMAND)
        hash_flush(h);
}

static void hash_begin(struct hash_write *h, struct redis *redis, const char *key)
{
    *h = (struct hash_write){.redis = redis, .key = key};
    str_init(&h->text, 1u << 20);
}

static bool hash_end(struct hash_write *h, const char *ttl_s)
{
    hash_flush(h);
    const char *argv[] = {"EXPIRE", h->key, ttl_s};
    size_t bytes[] = {6, strlen(h->key), strlen(ttl_s)};
    if (!h->failed && redis_command(h->redis, NULL, NULL, 3, argv, bytes) != ERR_OK)
        h->failed = true;
    str_fini(&h->text);
    return !h->failed;
}

static bool heartbeat_publish(struct status *s)
{
    const struct status_options *o = &s->options;
    struct hash_write h;
    char text[64];
    hash_begin(&h, o->redis, s->proc_key);
    hash_add(&h, "role", o->role);
    snprintf(text, sizeof(text), "%u", o->id);
    hash_add(&h, "id", text);
    snprintf(text, sizeof(text), "%016" PRIx64, o->incarnation);
    hash_add(&h, "incarnation", text);
    hash_add(&h, "build", TANDEM_VERSION);
    hash_add(&h, "state", s->state);
    snprintf(text, sizeof(text), "%ld", (long)getpid());
    hash_add(&h, "pid", text);
    hash_add(&h, "pid_start", s->pid_start);
    hash_add(&h, "addr", s->path);
    snprintf(text, sizeof(text), "%" PRIu64, clock_unix_us() / 1000u);
    hash_add(&h, "ts", text);
    if (o->heartbeat != NULL)
        o->heartbeat(o->arg, hash_add, &h);
    return hash_end(&h, HEARTBEAT_TTL_S);
}

static bool help_publish(struct status *s)
{
    struct str text;
    str_init(&text, 1u << 20);
    metrics_describe(s->options.rows, s->options.metric_count, &text);
    const char *argv[] = {"SET", s->help_key, text.text, "EX", METRICS_TTL_S};
    size_t bytes[] = {3, strlen(s->help_key), text.bytes, 2, strlen(METRICS_TTL_S)};
    bool ok =
        !text.overflow && redis_command(s->options.redis, NULL, NULL, 5, argv, bytes) == ERR_OK;
    str_fini(&text);
    return ok;
}

static bool metrics_publish(struct status *s)
{
    const struct status_options *o = &s->options;
    if (o->metric_count == 0)
        return true;
    if (o->refresh != NULL)
        o->refresh(o->arg);
    struct hash_write h;
    hash_begin(&h, o->redis, s->metrics_key);
    metrics_each(o->rows, o->values, o->metric_count, o->common_labels, hash_add, &h);
    return hash_end(&h, METRICS_TTL_S) && help_publish(s);
}

static void publish(struct status *s)
{
    if (s->options.redis == NULL || !redis_up(s->options.redis)) {
        s->published_us = 0;
        return;
    }
    if (heartbeat_publish(s) && metrics_publish(s))
        s->published_us = loop_now_us(s->loop);
}

static void timer_fired(void *arg)
{
    struct status *s = arg;
    CHECK_OBJ(s, STATUS_MAGIC);
    bool up = redis_up(s->options.redis);
    if (up && s->published_us != 0 && loop_now_us(s->loop) - s->published_us < PUBLISH_US)
        return;
    publish(s);
}

/* ---- public ---- */

/* Field 22 of /proc/self/stat; the name in field 2 may hold anything but ends at the last ')'. */
static void pid_start_read(char *ret_text, size_t bytes)
{
    char line[1024] = "";
    FILE *f = fopen("/proc/self/stat", "re");
    ret_text[0] = '\0';
    if (f == NULL)
        return;
    char *at = fgets(line, sizeof(line), f) != NULL ? strrchr(line, ')') : NULL;
    fclose(f);
    for (int field = 2; at != NULL && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (at != NULL)
        snprintf(ret_text, bytes, "%.*s", (int)strspn(at + 1, "0123456789"), at + 1);
}

static enum err names_make(struct status *s, struct err_detail *detail)
{
    const struct status_options *o = &s->options;
    int name = snprintf(s->name, sizeof(s->name), "%s-%u", o->role, o->id);
    int path = snprintf(s->path, sizeof(s->path), "%s/%s.http", o->run_dir, s->name);
    if (name < 0 || (size_t)name >= sizeof(s->name) || path < 0 || (size_t)path >= sizeof(s->path))
        return err_set(detail, ERR_INVALID, "run_dir %s: too long for a socket path (%zu bytes)",
                       o->run_dir, sizeof(s->path) - 1);
    char own[80];
    snprintf(own, sizeof(own), "proc:%s:%u", o->role, o->id);
    int proc = snprintf(s->proc_key, sizeof(s->proc_key), "tandem:{%s}:%s", o->cluster,
                        o->heartbeat_key != NULL ? o->heartbeat_key : own);
    int metrics = snprintf(s->metrics_key, sizeof(s->metrics_key), "tandem:{%s}:metrics:%s:%u",
                           o->cluster, o->role, o->id);
    int help = snprintf(s->help_key, sizeof(s->help_key), "tandem:{%s}:metrics_help:%s:%u",
                        o->cluster, o->role, o->id);
    if (proc < 0 || (size_t)proc >= sizeof(s->proc_key) || metrics < 0 ||
        (size_t)metrics >= sizeof(s->metrics_key) || help < 0 ||
        (size_t)help >= sizeof(s->help_key))
        return err_set(detail, ERR_INVALID, "cluster: name too long");
    return ERR_OK;
}

enum err status_create(struct loop *l, const struct status_options *options,
                       struct status **ret_status, struct err_detail *detail)
{
    struct status *s = mem_take(sizeof(*s));
    s->magic = STATUS_MAGIC;
    s->loop = l;
    s->options = *options;
    s->state = "starting";
    s->start_us = loop_now_us(l);
    pid_start_read(s->pid_start, sizeof(s->pid_start));
    enum err e = names_make(s, detail);
    if (e == ERR_OK)
        e = http_open(s, detail);
    if (e != ERR_OK) {
        s->magic = 0;
        mem_give(s);
        return e;
    }
    if (options->redis != NULL) {
        s->timer = loop_timer_create(l, timer_fired, s);
        loop_timer_start(s->timer, LOOK_US, true);
    }
    *ret_status = s;
    return ERR_OK;
}

void status_destroy(struct status **status_p)
{
    struct status *s = *status_p;
    if (s == NULL)
        return;
    CHECK_OBJ(s, STATUS_MAGIC);
    loop_timer_destroy(&s->timer);
    evhttp_free(s->http);
    unlink(s->path);
    if (s->options.redis != NULL && redis_up(s->options.redis)) {
        const char *argv[] = {"DEL", s->proc_key};
        size_t bytes[] = {3, strlen(s->proc_key)};
        /* A lost farewell is made good by the key's TTL. */
        if (redis_command(s->options.redis, NULL, NULL, 2, argv, bytes) != ERR_OK)
            log_debug(REDIS, "heartbeat key left to its TTL", "key=%s", s->proc_key);
    }
    s->magic = 0;
    mem_give(s);
    *status_p = NULL;
}

void status_set_state(struct status *s, const char *state)
{
    CHECK_OBJ(s, STATUS_MAGIC);
    if (strcmp(s->state, state) == 0)
        return;
    log_info(LOOP, "state", "from=%s to=%s", s->state, state);
    s->state = state;
    publish(s);
}

const char *status_state(const struct status *s)
{
    CHECK_OBJ(s, STATUS_MAGIC);
    return s->state;
}
