/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/base/clock.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"

#define GIVE_UP_US 30000000u

/* A real server on a unix socket in a folder of its own, a client, and a ticking timer that shows
 * that the loop is never held up. */
struct rig {
    char dir[64], path[96];
    pid_t server;
    struct loop *loop;
    struct loop_timer *limit, *tick, *wait;
    struct redis *redis;
    bool gave_up;
    bool want_up, waiting_state;
    uint32_t want_answers, answers;
    enum err last_error;
    enum redis_type last_type;
    int64_t last_integer;
    char last_text[128];
    uint32_t changes;
    uint64_t tick_us, gap_us_max;
};

static void server_start(struct rig *r)
{
    r->server = fork();
    assert_true(r->server >= 0);
    if (r->server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int null = open("/dev/null", O_RDWR);
        dup2(null, 1);
        dup2(null, 2);
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", r->path, "--save", "",
               "--appendonly", "no", "--dir", r->dir, (char *)NULL);
        _exit(127);
    }
}

static void server_end(struct rig *r)
{
    if (r->server <= 0)
        return;
    kill(r->server, SIGKILL);
    assert_int_equal(waitpid(r->server, NULL, 0), r->server);
    r->server = 0;
}

static void on_limit(void *arg)
{
    struct rig *r = arg;
    r->gave_up = true;
    loop_stop(r->loop);
}

static void on_tick(void *arg)
{
    struct rig *r = arg;
    uint64_t now_us = clock_mono_us();
    if (r->tick_us != 0 && now_us - r->tick_us > r->gap_us_max)
        r->gap_us_max = now_us - r->tick_us;
    r->tick_us = now_us;
    if (r->waiting_state && redis_up(r->redis) == r->want_up)
        loop_stop(r->loop);
}

static void on_wait(void *arg)
{
    struct rig *r = arg;
    loop_stop(r->loop);
}

static void on_change(void *arg, bool up)
{
    struct rig *r = arg;
    assert_true(up == redis_up(r->redis));
    r->changes++;
}

static void on_answer(void *arg, enum err e, const struct redis_value *value)
{
    struct rig *r = arg;
    assert_true((e == ERR_OK) == (value != NULL));
    r->last_error = e;
    if (value != NULL) {
        r->last_type = value->type;
        r->last_integer = value->integer;
        snprintf(r->last_text, sizeof(r->last_text), "%.*s", (int)value->bytes,
                 value->text != NULL ? value->text : "");
    }
    if (++r->answers == r->want_answers)
        loop_stop(r->loop);
}

static void rig_open(struct rig *r, uint32_t operation_ms, uint32_t inflight_max)
{
    memset(r, 0, sizeof(*r));
    snprintf(r->dir, sizeof(r->dir), P_tmpdir "/tandem-redis-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->path, sizeof(r->path), "%s/redis.sock", r->dir);
    r->loop = loop_create();
    r->limit = loop_timer_create(r->loop, on_limit, r);
    r->tick = loop_timer_create(r->loop, on_tick, r);
    r->wait = loop_timer_create(r->loop, on_wait, r);
    loop_timer_start(r->limit, GIVE_UP_US, false);
    loop_timer_start(r->tick, 5000, true);
    struct redis_options o = {
        .operation_ms = operation_ms, .connect_ms = 1000, .inflight_max = inflight_max};
    redis_address("", r->dir, &o);
    r->redis = redis_create(r->loop, &o);
    redis_on_change(r->redis, on_change, r);
}

static void rig_close(struct rig *r)
{
    redis_destroy(&r->redis);
    loop_timer_destroy(&r->limit);
    loop_timer_destroy(&r->tick);
    loop_timer_destroy(&r->wait);
    loop_destroy(&r->loop);
    server_end(r);
    unlink(r->path);
    assert_int_equal(rmdir(r->dir), 0);
    assert_false(r->gave_up);
}

static void wait_up(struct rig *r, bool up)
{
    r->want_up = up;
    r->waiting_state = true;
    if (redis_up(r->redis) != up)
        loop_run(r->loop);
    r->waiting_state = false;
    assert_false(r->gave_up);
    assert_true(redis_up(r->redis) == up);
}

static void wait_answers(struct rig *r, uint32_t count)
{
    r->want_answers = count;
    if (r->answers < count)
        loop_run(r->loop);
    assert_false(r->gave_up);
    assert_int_equal(r->answers, count);
    r->answers = 0;
}

static void run_for(struct rig *r, uint64_t us)
{
    loop_timer_start(r->wait, us, false);
    loop_run(r->loop);
    assert_false(r->gave_up);
}

static enum err send_words(struct rig *r, int count, const char *const *words)
{
    size_t bytes[8];
    assert_true(count <= 8);
    for (int i = 0; i < count; i++)
        bytes[i] = strlen(words[i]);
    return redis_command(r->redis, on_answer, r, count, words, bytes);
}

#define SEND(r, ...)                                                                               \
    send_words(r, (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)),                   \
               (const char *const[]){__VA_ARGS__})

static void on_array(void *arg, enum err e, const struct redis_value *value)
{
    struct rig *r = arg;
    assert_int_equal(e, ERR_OK);
    assert_int_equal(value->type, REDIS_ARRAY);
    assert_int_equal(value->count, 5);
    assert_int_equal(value->items[0].integer, 1);
    assert_int_equal(value->items[1].type, REDIS_ARRAY);
    assert_int_equal(value->items[1].count, 2);
    assert_int_equal(value->items[1].items[0].type, REDIS_ARRAY);
    assert_int_equal(value->items[1].items[0].items[0].integer, 7);
    assert_int_equal(value->items[1].items[1].bytes, 3);
    assert_memory_equal(value->items[1].items[1].text, "a\0b", 3);
    assert_int_equal(value->items[2].type, REDIS_ARRAY);
    assert_int_equal(value->items[2].count, 0);
    assert_int_equal(value->items[3].type, REDIS_NIL);
    assert_int_equal(value->items[4].type, REDIS_STRING);
    on_answer(arg, e, value);
    (void)r;
}

static void values_of_every_type(void **state)
{
    struct rig r;
    rig_open(&r, 2000, 0);
    assert_int_equal(SEND(&r, "PING"), ERR_CLOSED);
    server_start(&r);
    wait_up(&r, true);
    assert_int_equal(r.changes, 1);
    assert_int_equal(SEND(&r, "SET", "k", "v1"), ERR_OK);
    wait_answers(&r, 1);
    assert_int_equal(r.last_type, REDIS_STATUS);
    assert_string_equal(r.last_text, "OK");
    assert_int_equal(SEND(&r, "GET", "k"), ERR_OK);
    wait_answers(&r, 1);
    assert_int_equal(r.last_type, REDIS_STRING);
    assert_string_equal(r.last_text, "v1");
    assert_int_equal(SEND(&r, "GET", "absent"), ERR_OK);
    wait_answers(&r, 1);
    assert_int_equal(r.last_type, REDIS_NIL);
    assert_int_equal(SEND(&r, "INCR", "k"), ERR_OK);
    wait_answers(&r, 1);
    assert_int_equal(r.last_type, REDIS_ERROR);
    assert_int_equal(SEND(&r, "INCR", "n"), ERR_OK);
    wait_answers(&r, 1);
    assert_int_equal(r.last_integer, 1);
    const char *lua = "return {1, {{7}, 'a\\0b'}, {}, false, 'x'}";
    assert_int_equal(redis_script(r.redis, lua, on_array, &r, 0, 0, NULL, NULL), ERR_OK);
    wait_answers(&r, 1);
    rig_close(&r);
}

static void scripts_survive_a_flush(void **state)
{
    struct rig r;
    rig_open(&r, 2000, 0);
    server_start(&r);
    wait_up(&r, true);
    const char *lua = "return ARGV[1] .. KEYS[1]";
    const char *argv[] = {"key", "arg"};
    size_t bytes[] = {3, 3};
    for (int i = 0; i < 6; i++) {
        if (i % 2 == 1) { /* the server forgets: NOSCRIPT, then again */
            assert_int_equal(SEND(&r, "SCRIPT", "FLUSH"), ERR_OK);
            wait_answers(&r, 1);
        }
        for (int k = 0; k < 3; k++)
            assert_int_equal(redis_script(r.redis, lua, on_answer, &r, 1, 2, argv, bytes), ERR_OK);
        wait_answers(&r, 3);
        assert_int_equal(r.last_error, ERR_OK);
        assert_int_equal(r.last_type, REDIS_STRING);
        assert_string_equal(r.last_text, "argkey");
    }
    rig_close(&r);
}

static void inflight_is_bounded(void **state)
{
    struct rig r;
    rig_open(&r, 5000, 16);
    server_start(&r);
    wait_up(&r, true);
    uint32_t accepted = 0;
    for (int i = 0; i < 40; i++) {
        enum err e = SEND(&r, "PING");
        assert_true(e == ERR_OK || e == ERR_BUSY);
        accepted += e == ERR_OK;
    }
    assert_int_equal(accepted, 15);
    wait_answers(&r, accepted);
    assert_int_equal(SEND(&r, "PING"), ERR_OK); /* room again */
    wait_answers(&r, 1);
    rig_close(&r);
}

static void stopped_server_delays_nothing(void **state)
{
    struct rig r;
    rig_open(&r, 500, 0);
    server_start(&r);
    wait_up(&r, true);
    kill(r.server, SIGSTOP);
    r.gap_us_max = 0;
    uint64_t start_us = clock_mono_us();
    for (int i = 0; i < 10; i++)
        assert_int_equal(SEND(&r, "SET", "late", "before"), ERR_OK);
    wait_answers(&r, 10);
    assert_true(r.last_error == ERR_TIMEOUT || r.last_error == ERR_CLOSED);
    assert_true(clock_mono_us() - start_us >= 490000);
    assert_true(clock_mono_us() - start_us < 5000000);
    assert_false(redis_up(r.redis));
    assert_int_equal(r.changes, 2);
    assert_int_equal(SEND(&r, "PING"), ERR_CLOSED);
    /* Probes to the stopped server get no further: it accepts but does not answer. */
    run_for(&r, 1500000);
    assert_false(redis_up(r.redis));
    assert_true(r.gap_us_max < 1000000);
    kill(r.server, SIGCONT);
    wait_up(&r, true);
    /* The first answer on the new connection belongs to the first command on it. */
    assert_int_equal(SEND(&r, "ECHO", "fresh"), ERR_OK);
    wait_answers(&r, 1);
    assert_int_equal(r.last_error, ERR_OK);
    assert_string_equal(r.last_text, "fresh");
    assert_true(redis_stats(r.redis)->timeouts >= 1);
    rig_close(&r);
}

static void killed_and_restarted(void **state)
{
    struct rig r;
    rig_open(&r, 1000, 0);
    server_start(&r);
    wait_up(&r, true);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 5; i++)
            assert_int_equal(SEND(&r, "DEBUG", "SLEEP", "0"), ERR_OK);
        server_end(&r);
        wait_answers(&r, 5); /* each once: answered before the end, or closed */
        wait_up(&r, false);
        server_start(&r);
        wait_up(&r, true);
        assert_int_equal(SEND(&r, "PING"), ERR_OK);
        wait_answers(&r, 1);
        assert_int_equal(r.last_error, ERR_OK);
    }
    assert_int_equal(r.changes, 5);
    assert_int_equal(redis_stats(r.redis)->reconnects, 3);
    rig_close(&r);
}

static void destroy_answers_what_is_in_flight(void **state)
{
    struct rig r;
    rig_open(&r, 5000, 0);
    server_start(&r);
    wait_up(&r, true);
    assert_int_equal(SEND(&r, "SET", "farewell", "1"), ERR_OK);
    redis_destroy(&r.redis);
    assert_int_equal(r.answers, 1);
    assert_int_equal(r.last_error, ERR_CLOSED);
    r.answers = 0;
    /* What was sent last has left all the same. */
    struct redis_options o = {.operation_ms = 5000, .connect_ms = 1000};
    redis_address("", r.dir, &o);
    r.redis = redis_create(r.loop, &o);
    wait_up(&r, true);
    assert_int_equal(SEND(&r, "GET", "farewell"), ERR_OK);
    wait_answers(&r, 1);
    assert_string_equal(r.last_text, "1");
    rig_close(&r);
}

/* A TCP address that swallows everything: a listener whose backlog is full. */
static void blackholed_tcp_delays_nothing(void **state)
{
    struct rig r;
    rig_open(&r, 20, 0);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(a);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &bytes), 0);
    assert_int_equal(listen(fd, 0), 0);
    struct redis_options o = {0};
    snprintf(o.address, sizeof(o.address), "127.0.0.1:%d", ntohs(a.sin_port));
    redis_destroy(&r.redis);
    r.redis = redis_create(r.loop, &o);
    r.gap_us_max = 0;
    r.tick_us = 0;
    run_for(&r, 1500000);
    assert_false(redis_up(r.redis));
    assert_true(redis_stats(r.redis)->timeouts >= 2);
    assert_true(r.gap_us_max < 1000000);
    close(fd);
    rig_close(&r);
}

/* A server that answers with what is no Redis protocol. */
static void garbage_from_the_server(void **state)
{
    struct rig r;
    rig_open(&r, 20, 0);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(a);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &bytes), 0);
    assert_int_equal(listen(fd, 8), 0);
    struct redis_options o = {.connect_ms = 200};
    snprintf(o.address, sizeof(o.address), "127.0.0.1:%d", ntohs(a.sin_port));
    redis_destroy(&r.redis);
    r.redis = redis_create(r.loop, &o);
    const char *noise[] = {"HTTP/1.1 400 Bad\r\n\r\n", "*99999999\r\n", "$-5\r\n",
                           "-LOADING x\r\n"};
    for (int i = 0; i < 4; i++) {
        int peer = -1;
        for (int tries = 0; peer < 0 && tries < 1000; tries++) {
            run_for(&r, 5000);
            peer = accept(fd, NULL, NULL);
        }
        assert_true(peer >= 0);
        assert_true(write(peer, noise[i], strlen(noise[i])) > 0);
        run_for(&r, 50000);
        assert_false(redis_up(r.redis));
        close(peer);
    }
    close(fd);
    rig_close(&r);
}

/* Answers to questions that were never asked. */
static void unasked_answers(void **state)
{
    struct rig r;
    rig_open(&r, 500, 0);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof(a);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &bytes), 0);
    assert_int_equal(listen(fd, 8), 0);
    struct redis_options o = {.connect_ms = 1000, .operation_ms = 500};
    snprintf(o.address, sizeof(o.address), "127.0.0.1:%d", ntohs(a.sin_port));
    redis_destroy(&r.redis);
    r.redis = redis_create(r.loop, &o);
    int peer = -1;
    for (int tries = 0; peer < 0 && tries < 1000; tries++) {
        run_for(&r, 5000);
        peer = accept(fd, NULL, NULL);
    }
    assert_true(peer >= 0);
    const char *noise = "+PONG\r\n+UNASKED\r\n:5\r\n$3\r\nabc\r\n*1\r\n:1\r\n";
    assert_true(write(peer, noise, strlen(noise)) > 0);
    while (redis_stats(r.redis)->errors == 0)
        run_for(&r, 5000);
    assert_false(redis_up(r.redis));
    close(peer);
    close(fd);
    rig_close(&r);
}

static void addresses(void **state)
{
    struct rig r;
    rig_open(&r, 20, 0);
    const char *bad[] = {
        "off", "", "nocolon", ":1", "127.0.0.1:0", "127.0.0.1:70000", "unix:", "127.0.0.1:1x"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        redis_destroy(&r.redis);
        struct redis_options o = {0};
        snprintf(o.address, sizeof(o.address), "%s", bad[i]);
        r.redis = redis_create(r.loop, &o);
        run_for(&r, 1000);
        assert_false(redis_up(r.redis));
        assert_int_equal(SEND(&r, "PING"), ERR_CLOSED);
    }
    struct redis_options o = {0};
    redis_address("", "some/dir", &o);
    assert_string_equal(o.address, "unix:some/dir/redis.sock");
    redis_address("off", "some/dir", &o);
    assert_string_equal(o.address, "off");
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_of_every_type),
        cmocka_unit_test(scripts_survive_a_flush),
        cmocka_unit_test(inflight_is_bounded),
        cmocka_unit_test(stopped_server_delays_nothing),
        cmocka_unit_test(killed_and_restarted),
        cmocka_unit_test(destroy_answers_what_is_in_flight),
        cmocka_unit_test(blackholed_tcp_delays_nothing),
        cmocka_unit_test(garbage_from_the_server),
        cmocka_unit_test(unasked_answers),
        cmocka_unit_test(addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
