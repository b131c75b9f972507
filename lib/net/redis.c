/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/redis.h"

#include <errno.h>
#include <hiredis/hiredis.h>
#include <hiredis/async.h>
#include <hiredis/adapters/libevent.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"

#define REDIS_MAGIC 0x52454431u

#define PROBE_FIRST_US 250000u
#define PROBE_LAST_US  2000000u
/* A deadline seen later than this was missed by our own loop: the answers may already lie in the
 * socket, and get as long again to be read. */
#define LATE_US           5000u
#define SCRIPTS_MAX       16u
#define REPLY_BYTES_MAX   (64u << 20)
#define COMMAND_BYTES_MAX (16u << 20)
#define ARGC_MAX          4096

enum phase { PHASE_OFF, PHASE_WAIT, PHASE_CONNECT, PHASE_UP };

struct op {
    struct redis *redis;
    struct op *prev, *next; /* in flight by age, or the free list by next */
    redis_fn fn;
    void *arg;
    uint64_t deadline_us;
    char *eval; /* the command with the script's text, for NOSCRIPT */
    size_t eval_bytes;
};

struct script {
    struct redis *redis;
    const char *text;
    char sha[41]; /* "" until the server has told it */
    bool asked;
};

struct redis {
    uint32_t magic;
    enum phase phase;
    struct loop *loop;
    struct redis_options options;
    char host[256]; /* numeric address, or the socket's path with port 0 */
    int port;
    redisAsyncContext *ac;
    struct loop_timer *probe;
    struct loop_timer *deadline;
    bool deadline_armed;
    bool late; /* the oldest command has had its extra time */
    bool told; /* the current outage is in the log */
    uint64_t probe_us;
    struct op *ops;
    struct op *op_free;
    struct op *oldest, *newest;
    uint32_t inflight;
    void (*change_fn)(void *arg, bool up);
    void *change_arg;
    struct arena arena; /* values of one reply */
    struct script scripts[SCRIPTS_MAX];
    uint32_t script_count;
    struct redis_stats stats;
};

/* ---- commands in flight ---- */

static struct op *op_take(struct redis *r, redis_fn fn, void *arg)
{
    struct op *op = r->op_free;
    CHECK(op != NULL && r->inflight < r->options.inflight_max);
    r->op_free = op->next;
    op->fn = fn;
    op->arg = arg;
    op->deadline_us = loop_now_us(r->loop) + r->options.operation_ms * 1000ull;
    op->next = NULL;
    op->prev = r->newest;
    if (r->newest != NULL)
        r->newest->next = op;
    else
        r->oldest = op;
    r->newest = op;
    r->inflight++;
    return op;
}

static void op_give(struct op *op)
{
    struct redis *r = op->redis;
    CHECK(r->inflight > 0);
    if (op->prev != NULL)
        op->prev->next = op->next;
    else
        r->oldest = op->next;
    if (op->next != NULL)
        op->next->prev = op->prev;
    else
        r->newest = op->prev;
    free(op->eval);
    *op = (struct op){.redis = r, .next = r->op_free};
    r->op_free = op;
    r->inflight--;
}

static void op_end(struct op *op, enum err e, const struct redis_value *value)
{
    redis_fn fn = op->fn;
    void *arg = op->arg;
    op_give(op); /* first: fn may send the next command */
    if (fn != NULL)
        fn(arg, e, value);
}

/* ---- breaker ---- */

static void connection_close(struct redis *r)
{
    redisAsyncContext *ac = r->ac;
    if (ac == NULL)
        return;
    r->ac = NULL;
    ac->data = NULL; /* callbacks of this connection have nobody to talk to */
    redisAsyncFree(ac);
}

static void fail_all(struct redis *r, enum err e)
{
    uint64_t now_us = loop_now_us(r->loop);
    while (r->oldest != NULL) {
        struct op *op = r->oldest;
        bool overdue = e == ERR_TIMEOUT && op->deadline_us > now_us;
        op_end(op, overdue ? ERR_CLOSED : e, NULL);
    }
}

/* The reason may be the server's own words: they stay inside their quotes and on their line. */
static void down_log(struct redis *r, const char *why)
{
    char text[128];
    snprintf(text, sizeof(text), "%s", why);
    for (char *c = text; *c != '\0'; c++)
        if (*c == '"' || (unsigned char)*c < ' ')
            *c = '\'';
    log_warn(REDIS, "redis down", "address=%s reason=\"%s\"", r->options.address, text);
}

/* Closing the connection is what keeps a late answer from being taken for the next command's. */
static void go_down(struct redis *r, enum err e, const char *why)
{
    bool was_up = r->phase == PHASE_UP;
    connection_close(r);
    r->phase = PHASE_WAIT;
    loop_timer_stop(r->deadline);
    r->deadline_armed = false;
    r->late = false;
    loop_timer_start(r->probe, r->probe_us, false);
    r->probe_us = 2 * r->probe_us > PROBE_LAST_US ? PROBE_LAST_US : 2 * r->probe_us;
    if (was_up || !r->told)
        down_log(r, why);
    r->told = true;
    fail_all(r, e);
    if (was_up && r->change_fn != NULL)
        r->change_fn(r->change_arg, false);
}

static void go_up(struct redis *r)
{
    CHECK(r->phase == PHASE_CONNECT);
    r->phase = PHASE_UP;
    r->probe_us = PROBE_FIRST_US;
    r->told = false;
    loop_timer_stop(r->deadline);
    r->deadline_armed = false;
    r->stats.reconnects++;
    for (uint32_t i = 0; i < r->script_count; i++)
        r->scripts[i].asked = false;
    log_info(REDIS, "redis up", "address=%s", r->options.address);
    if (r->change_fn != NULL)
        r->change_fn(r->change_arg, true);
}

/* ---- the guard: the last callback of every connection ----
 *
 * hiredis 0.14 ends the process by an assertion when an answer comes for which no callback waits.
 * So one that no command stands for waits at the end of the queue, always. */

static void unasked(redisAsyncContext *ac, void *reply, void *privdata)
{
    struct redis *r = ac->data;
    if (r == NULL || reply == NULL)
        return;
    r->stats.errors++;
    go_down(r, ERR_CLOSED, "answer without a question");
}

static void guard_add(redisAsyncContext *ac)
{
    CHECK(ac->replies.tail == NULL);
    redisCallback *guard = calloc(1, sizeof(*guard)); /* hiredis frees it with the others */
    CHECK(guard != NULL);
    guard->fn = unasked;
    ac->replies.head = guard;
    ac->replies.tail = guard;
}

/* A command was queued behind the guard: they change places. */
static void guard_last(redisAsyncContext *ac, redisCallback *guard)
{
    redisCallback *fresh = ac->replies.tail;
    if (fresh == guard)
        return;
    CHECK(guard->next == fresh && guard->fn == unasked);
    guard->fn = fresh->fn;
    guard->privdata = fresh->privdata;
    fresh->fn = unasked;
    fresh->privdata = NULL;
}

static int queue_argv(redisAsyncContext *ac, redisCallbackFn *fn, void *privdata, int argc,
                      const char **argv, const size_t *argv_bytes)
{
    redisCallback *guard = ac->replies.tail;
    CHECK(guard != NULL && guard->fn == unasked);
    int rc = redisAsyncCommandArgv(ac, fn, privdata, argc, argv, argv_bytes);
    guard_last(ac, guard);
    return rc;
}

static int queue_formatted(redisAsyncContext *ac, redisCallbackFn *fn, void *privdata,
                           const char *command, size_t bytes)
{
    redisCallback *guard = ac->replies.tail;
    CHECK(guard != NULL && guard->fn == unasked);
    int rc = redisAsyncFormattedCommand(ac, fn, privdata, command, bytes);
    guard_last(ac, guard);
    return rc;
}

/* ---- connecting ---- */

static void pinged(redisAsyncContext *ac, void *reply, void *privdata)
{
    struct redis *r = ac->data;
    const redisReply *value = reply;
    if (r == NULL || value == NULL)
        return;
    if (value->type == REDIS_REPLY_STATUS) {
        go_up(r);
        return;
    }
    r->stats.errors++;
    go_down(r, ERR_CLOSED, value->str != NULL ? value->str : "unexpected answer to PING");
}

static void authenticated(redisAsyncContext *ac, void *reply, void *privdata)
{
    /* PING, which follows, tells whether the server accepts us. */
}

static void connected(const redisAsyncContext *ac, int status)
{
    struct redis *r = ac->data;
    if (r == NULL)
        return;
    if (status != REDIS_OK) {
        r->stats.errors++;
        r->ac = NULL; /* hiredis frees it after this call */
        go_down(r, ERR_CLOSED, ac->errstr != NULL ? ac->errstr : "connect");
        return;
    }
    guard_add(r->ac);
    const char *password = getenv("TANDEM_REDIS_PASSWORD");
    int rc = REDIS_OK;
    if (password != NULL && password[0] != '\0')
        rc = queue_argv(r->ac, authenticated, NULL, 2, (const char *[]){"AUTH", password},
                        (const size_t[]){4, strlen(password)});
    if (rc == REDIS_OK)
        rc = queue_argv(r->ac, pinged, NULL, 1, (const char *[]){"PING"}, (const size_t[]){4});
    if (rc != REDIS_OK)
        go_down(r, ERR_CLOSED, "PING not sent");
}

static void disconnected(const redisAsyncContext *ac, int status)
{
    struct redis *r = ac->data;
    if (r == NULL)
        return;
    r->stats.errors++;
    r->ac = NULL;
    go_down(r, ERR_CLOSED, ac->errstr != NULL && ac->errstr[0] != '\0' ? ac->errstr : "closed");
}

/* Connects without waiting.  A stopped server still accepts on its backlog, therefore it is up only
 * when it has answered PING. */
static void probe_fired(void *arg)
{
    struct redis *r = arg;
    CHECK_OBJ(r, REDIS_MAGIC);
    CHECK(r->phase == PHASE_WAIT && r->ac == NULL);
    r->phase = PHASE_CONNECT;
    redisAsyncContext *ac =
        r->port == 0 ? redisAsyncConnectUnix(r->host) : redisAsyncConnect(r->host, r->port);
    if (ac == NULL) {
        go_down(r, ERR_CLOSED, "out of memory");
        return;
    }
    ac->data = r;
    r->ac = ac;
    if (ac->err != 0 || redisLibeventAttach(ac, loop_base(r->loop)) != REDIS_OK) {
        char why[160];
        snprintf(why, sizeof(why), "%s", ac->errstr != NULL ? ac->errstr : "connect");
        r->stats.errors++;
        go_down(r, ERR_CLOSED, why);
        return;
    }
    redisAsyncSetConnectCallback(ac, connected);
    redisAsyncSetDisconnectCallback(ac, disconnected);
    loop_timer_start(r->deadline, r->options.connect_ms * 1000ull, false);
    r->deadline_armed = true;
}

static void deadline_fired(void *arg)
{
    struct redis *r = arg;
    CHECK_OBJ(r, REDIS_MAGIC);
    r->deadline_armed = false;
    if (r->phase == PHASE_CONNECT) {
        r->stats.timeouts++;
        go_down(r, ERR_TIMEOUT, "no answer within the connect deadline");
        return;
    }
    if (r->phase != PHASE_UP || r->oldest == NULL)
        return;
    uint64_t now_us = loop_now_us(r->loop);
    uint64_t due_us = r->oldest->deadline_us, wait_us = 0;
    if (now_us < due_us) {
        wait_us = due_us - now_us;
    } else if (now_us - due_us > LATE_US && !r->late) {
        r->late = true;
        wait_us = LATE_US;
    } else {
        r->stats.timeouts++;
        go_down(r, ERR_TIMEOUT, "no answer within the operation deadline");
        return;
    }
    loop_timer_start(r->deadline, wait_us, false);
    r->deadline_armed = true;
}

/* ---- replies ---- */

static void value_scalar(const redisReply *reply, struct redis_value *ret_value)
{
    *ret_value = (struct redis_value){.type = REDIS_NIL};
    switch (reply->type) {
    case REDIS_REPLY_STRING:
        ret_value->type = REDIS_STRING;
        break;
    case REDIS_REPLY_STATUS:
        ret_value->type = REDIS_STATUS;
        break;
    case REDIS_REPLY_ERROR:
        ret_value->type = REDIS_ERROR;
        break;
    case REDIS_REPLY_INTEGER:
        ret_value->type = REDIS_INTEGER;
        ret_value->integer = reply->integer;
        return;
    case REDIS_REPLY_ARRAY:
        ret_value->type = REDIS_ARRAY;
        ret_value->count = reply->elements;
        return;
    default:
        return;
    }
    ret_value->text = reply->str;
    ret_value->bytes = (size_t)reply->len;
}

/* One array waiting for its items; hiredis nests at most 8 deep, but may have many side by side. */
struct pending_array {
    const redisReply *reply;
    struct redis_value *value;
    struct pending_array *next;
};

static bool value_array(struct arena *a, struct pending_array *array,
                        struct pending_array **pending)
{
    size_t count = array->reply->elements;
    struct redis_value *items = arena_alloc_array(a, count > 0 ? count : 1, sizeof(*items));
    if (items == NULL)
        return false;
    array->value->items = items;
    for (size_t i = 0; i < count; i++) {
        value_scalar(array->reply->element[i], &items[i]);
        if (items[i].type != REDIS_ARRAY)
            continue;
        struct pending_array *p = arena_alloc(a, sizeof(*p));
        if (p == NULL)
            return false;
        *p = (struct pending_array){array->reply->element[i], &items[i], *pending};
        *pending = p;
    }
    return true;
}

static bool value_from(struct arena *a, const redisReply *reply, struct redis_value *ret_value)
{
    value_scalar(reply, ret_value);
    if (ret_value->type != REDIS_ARRAY)
        return true;
    struct pending_array root = {reply, ret_value, NULL};
    struct pending_array *pending = &root;
    while (pending != NULL) {
        struct pending_array *array = pending;
        pending = array->next;
        if (!value_array(a, array, &pending))
            return false;
    }
    return true;
}

static void replied(redisAsyncContext *ac, void *reply_, void *privdata)
{
    struct redis *r = ac->data;
    const redisReply *reply = reply_;
    struct op *op = privdata;
    if (r == NULL || reply == NULL)
        return; /* the connection is ending: go_down answers for all */
    CHECK_OBJ(r, REDIS_MAGIC);
    CHECK(op->redis == r);
    r->late = false;
    if (reply->type == REDIS_REPLY_ERROR && op->eval != NULL &&
        strncmp(reply->str, "NOSCRIPT", 8) == 0) {
        char *eval = op->eval;
        op->eval = NULL;
        int rc = queue_formatted(r->ac, replied, op, eval, op->eval_bytes);
        redisFreeCommand(eval);
        if (rc == REDIS_OK)
            return;
        op_end(op, ERR_CLOSED, NULL);
        return;
    }
    struct redis_value value;
    bool whole = value_from(&r->arena, reply, &value);
    op_end(op, whole ? ERR_OK : ERR_INVALID, whole ? &value : NULL);
    arena_reset(&r->arena);
}

/* ---- public ---- */

static enum err address_parse(struct redis *r)
{
    const char *address = r->options.address;
    if (strncmp(address, "unix:", 5) == 0) {
        if (strlen(address + 5) == 0 || strlen(address + 5) > 107)
            return ERR_INVALID;
        snprintf(r->host, sizeof(r->host), "%s", address + 5);
        return ERR_OK;
    }
    const char *colon = strrchr(address, ':');
    uint64_t port;
    if (colon == NULL || colon == address || !text_to_u64(colon + 1, strlen(colon + 1), &port) ||
        port == 0 || port > 65535)
        return ERR_INVALID;
    char name[256];
    size_t bytes = (size_t)(colon - address);
    bool bracketed = bytes >= 2 && address[0] == '[' && colon[-1] == ']';
    snprintf(name, sizeof(name), "%.*s", (int)(bracketed ? bytes - 2 : bytes),
             bracketed ? address + 1 : address);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    if (getaddrinfo(name, NULL, &hints, &found) != 0)
        return ERR_NOT_FOUND;
    int rc = getnameinfo(found->ai_addr, found->ai_addrlen, r->host, sizeof(r->host), NULL, 0,
                         NI_NUMERICHOST);
    freeaddrinfo(found);
    r->port = (int)port;
    return rc == 0 ? ERR_OK : ERR_NOT_FOUND;
}

void redis_address(const char *param, const char *run_dir, struct redis_options *ret_options)
{
    char *address = ret_options->address;
    size_t bytes = sizeof(ret_options->address);
    int wrote = param[0] == '\0' ? snprintf(address, bytes, "unix:%s/redis.sock", run_dir)
                                 : snprintf(address, bytes, "%s", param);
    if (wrote < 0 || (size_t)wrote >= bytes)
        snprintf(address, bytes, "too long");
}

struct redis *redis_create(struct loop *l, const struct redis_options *options)
{
    struct redis *r = mem_take(sizeof(*r));
    r->magic = REDIS_MAGIC;
    r->loop = l;
    r->options = *options;
    r->options.connect_ms = options->connect_ms > 0 ? options->connect_ms : 50;
    r->options.operation_ms = options->operation_ms > 0 ? options->operation_ms : 20;
    r->options.inflight_max = options->inflight_max > 0 ? options->inflight_max : 1024;
    r->probe_us = PROBE_FIRST_US;
    arena_init(&r->arena, 16384, REPLY_BYTES_MAX);
    r->ops = mem_take_array(r->options.inflight_max, sizeof(*r->ops));
    for (uint32_t i = r->options.inflight_max; i-- > 0;) {
        r->ops[i] = (struct op){.redis = r, .next = r->op_free};
        r->op_free = &r->ops[i];
    }
    r->probe = loop_timer_create(l, probe_fired, r);
    r->deadline = loop_timer_create(l, deadline_fired, r);
    if (strcmp(options->address, "off") == 0)
        return r;
    enum err e = address_parse(r);
    if (e != ERR_OK) {
        log_error(REDIS, "redis address unusable, going on without", "address=%s reason=\"%s\"",
                  options->address, err_text(e));
        return r;
    }
    r->phase = PHASE_WAIT;
    loop_timer_start(r->probe, 0, false);
    return r;
}

void redis_destroy(struct redis **redis_p)
{
    struct redis *r = *redis_p;
    if (r == NULL)
        return;
    CHECK_OBJ(r, REDIS_MAGIC);
    r->change_fn = NULL;
    if (r->phase == PHASE_UP) {
        /* Farewells sent in this turn of the loop leave now if the socket takes them at once. */
        int done = 0;
        redisBufferWrite(&r->ac->c, &done);
    }
    r->phase = PHASE_OFF;
    connection_close(r);
    fail_all(r, ERR_CLOSED);
    CHECK(r->inflight == 0);
    loop_timer_destroy(&r->probe);
    loop_timer_destroy(&r->deadline);
    arena_fini(&r->arena);
    mem_give(r->ops);
    r->magic = 0;
    mem_give(r);
    *redis_p = NULL;
}

bool redis_up(const struct redis *r)
{
    CHECK_OBJ(r, REDIS_MAGIC);
    return r->phase == PHASE_UP;
}

bool redis_off(const struct redis *r)
{
    CHECK_OBJ(r, REDIS_MAGIC);
    return r->phase == PHASE_OFF;
}

void redis_on_change(struct redis *r, void (*fn)(void *arg, bool up), void *arg)
{
    CHECK_OBJ(r, REDIS_MAGIC);
    r->change_fn = fn;
    r->change_arg = arg;
}

static size_t argument_bytes(const char *const *argv, const size_t *argv_bytes, int index)
{
    return argv_bytes != NULL ? argv_bytes[index] : strlen(argv[index]);
}

static enum err command_check(struct redis *r, int argc, const char *const *argv,
                              const size_t *argv_bytes)
{
    CHECK_OBJ(r, REDIS_MAGIC);
    if (r->phase != PHASE_UP) {
        r->stats.refused++;
        return ERR_CLOSED;
    }
    /* One slot stays for SCRIPT LOAD, which a script may need beside itself. */
    if (r->inflight + 1 >= r->options.inflight_max) {
        r->stats.refused++;
        return ERR_BUSY;
    }
    size_t bytes = 0;
    for (int i = 0; i < argc; i++) {
        size_t more = argument_bytes(argv, argv_bytes, i);
        if (more > COMMAND_BYTES_MAX - bytes)
            return ERR_TOO_LARGE;
        bytes += more;
    }
    return argc <= ARGC_MAX ? ERR_OK : ERR_TOO_LARGE;
}

static enum err command_send(struct redis *r, struct op *op, int argc, const char *const *argv,
                             const size_t *argv_bytes)
{
    /* hiredis takes argv without const but does not write to it. */
    const char **plain = (const char **)(uintptr_t)argv;
    if (queue_argv(r->ac, replied, op, argc, plain, argv_bytes) != REDIS_OK) {
        op_give(op);
        return ERR_CLOSED;
    }
    r->stats.commands++;
    if (!r->deadline_armed) {
        loop_timer_start(r->deadline, r->options.operation_ms * 1000ull, false);
        r->deadline_armed = true;
    }
    return ERR_OK;
}

enum err redis_command(struct redis *r, redis_fn fn, void *arg, int argc, const char *const *argv,
                       const size_t *argv_bytes)
{
    CHECK(argc > 0);
    /* Subscriptions answer more than once: not in this interface. */
    CHECK(strncasecmp(argv[0], "subscribe", 9) != 0 && strncasecmp(argv[0], "psubscr", 7) != 0);
    TRY(command_check(r, argc, argv, argv_bytes));
    return command_send(r, op_take(r, fn, arg), argc, argv, argv_bytes);
}

static struct script *script_find(struct redis *r, const char *text)
{
    for (uint32_t i = 0; i < r->script_count; i++) {
        if (r->scripts[i].text == text || strcmp(r->scripts[i].text, text) == 0)
            return &r->scripts[i];
    }
    if (r->script_count == SCRIPTS_MAX)
        return NULL;
    struct script *s = &r->scripts[r->script_count++];
    *s = (struct script){.redis = r, .text = text};
    return s;
}

static void script_loaded(void *arg, enum err e, const struct redis_value *value)
{
    struct script *s = arg;
    if (e == ERR_OK && value->type == REDIS_STRING && value->bytes == sizeof(s->sha) - 1)
        memcpy(s->sha, value->text, sizeof(s->sha) - 1);
}

/* The server itself tells the SHA1 of a text once; until then the text is sent along. */
static void script_ask(struct redis *r, struct script *s)
{
    if (s == NULL || s->asked || s->sha[0] != '\0')
        return;
    const char *argv[] = {"SCRIPT", "LOAD", s->text};
    size_t bytes[] = {6, 4, strlen(s->text)};
    struct op *op = op_take(r, script_loaded, s);
    s->asked = command_send(r, op, 3, argv, bytes) == ERR_OK;
}

enum err redis_script(struct redis *r, const char *script, redis_fn fn, void *arg, int key_count,
                      int argc, const char *const *argv, const size_t *argv_bytes)
{
    CHECK(argc >= 0 && argc <= ARGC_MAX - 3 && key_count >= 0 && key_count <= argc);
    TRY(command_check(r, argc, argv, argv_bytes));
    char keys[16];
    snprintf(keys, sizeof(keys), "%d", key_count);
    size_t count = (size_t)argc + 3;
    const char **full = malloc(count * sizeof(*full));
    size_t *full_bytes = malloc(count * sizeof(*full_bytes));
    enum err e = ERR_NOMEM;
    if (full == NULL || full_bytes == NULL)
        goto out;
    full[0] = "EVAL", full_bytes[0] = 4;
    full[1] = script, full_bytes[1] = strlen(script);
    full[2] = keys, full_bytes[2] = strlen(keys);
    for (int i = 0; i < argc; i++) {
        full[i + 3] = argv[i];
        full_bytes[i + 3] = argument_bytes(argv, argv_bytes, i);
    }
    struct script *s = script_find(r, script);
    script_ask(r, s);
    struct op *op = op_take(r, fn, arg);
    if (s != NULL && s->sha[0] != '\0') {
        int bytes = redisFormatCommandArgv(&op->eval, (int)count, full, full_bytes);
        if (bytes < 0) {
            op->eval = NULL;
            op_give(op);
            goto out;
        }
        op->eval_bytes = (size_t)bytes;
        full[0] = "EVALSHA", full_bytes[0] = 7;
        full[1] = s->sha, full_bytes[1] = sizeof(s->sha) - 1;
    }
    e = command_send(r, op, (int)count, full, full_bytes);
out:
    free(full);
    free(full_bytes);
    return e;
}

const struct redis_stats *redis_stats(const struct redis *r)
{
    CHECK_OBJ(r, REDIS_MAGIC);
    return &r->stats;
}
