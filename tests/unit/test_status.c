/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/base/clock.h"
#include "lib/base/metrics.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "lib/net/redis.h"
#include "lib/net/status.h"

#define GIVE_UP_US 30000000u

static const struct metric_row rows[] = {
    {METRIC_COUNTER, "tandem_test_things_total", "", NULL, "Things."},
    {METRIC_HISTOGRAM, "tandem_test_seconds", "", &metrics_buckets_ttft, "Times."},
};
static struct metric values[2];

struct rig {
    char dir[64], redis_path[96], http_path[96];
    struct loop *loop;
    struct loop_timer *limit, *look;
    struct loop_waker *waker;
    struct redis *redis;
    struct status *status;
    pid_t server;
    bool gave_up;
    uint32_t refreshed, commands;
    struct status_command last;
    char session[64];
    /* one HTTP exchange, made by a thread */
    const char *request;
    char answer[65536];
    /* one Redis answer */
    bool answered, absent;
    char text[1024];
    int64_t integer;
};

static void on_limit(void *arg)
{
    struct rig *r = arg;
    r->gave_up = true;
    loop_stop(r->loop);
}

static void on_wake(void *arg)
{
    struct rig *r = arg;
    loop_stop(r->loop);
}

static void extra(void *arg, struct str *out)
{
    str_add_text(out, ",\"queue\":3");
}

static void refresh(void *arg)
{
    struct rig *r = arg;
    r->refreshed++;
}

static enum err command(void *arg, const struct status_command *c, struct err_detail *detail)
{
    struct rig *r = arg;
    r->commands++;
    r->last = *c;
    r->last.name = strcmp(c->name, "drain") == 0 ? "drain"
                   : strcmp(c->name, "pin") == 0 ? "pin"
                                                 : "undrain";
    snprintf(r->session, sizeof(r->session), "%s|%s", c->session, c->salt);
    if (c->has_worker && c->worker == 9)
        return err_set(detail, ERR_NOT_FOUND, "worker: no worker 9");
    return ERR_OK;
}

static void heartbeat(void *arg, void (*add)(void *, const char *, const char *), void *add_arg)
{
    add(add_arg, "inflight", "5");
    add(add_arg, "empty", "");
}

static bool with_pins;

static void rig_open(struct rig *r, bool with_redis)
{
    memset(r, 0, sizeof(*r));
    snprintf(r->dir, sizeof(r->dir), P_tmpdir "/tandem-status-XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->redis_path, sizeof(r->redis_path), "%s/redis.sock", r->dir);
    snprintf(r->http_path, sizeof(r->http_path), "%s/router-7.http", r->dir);
    r->loop = loop_create();
    r->limit = loop_timer_create(r->loop, on_limit, r);
    loop_timer_start(r->limit, GIVE_UP_US, false);
    r->waker = loop_waker_create(r->loop, on_wake, r);
    if (with_redis) {
        struct redis_options o = {.operation_ms = 2000, .connect_ms = 1000};
        redis_address("", r->dir, &o);
        r->redis = redis_create(r->loop, &o);
    }
    struct status_options o = {.role = "router",
                               .id = 7,
                               .cluster = "c",
                               .run_dir = r->dir,
                               .incarnation = 0xabcdef,
                               .redis = r->redis,
                               .rows = rows,
                               .values = values,
                               .metric_count = 2,
                               .common_labels = "x=\"y\"",
                               .extra = extra,
                               .refresh = refresh,
                               .heartbeat = heartbeat,
                               .command = command,
                               .pins = with_pins,
                               .arg = r};
    struct err_detail detail;
    assert_int_equal(status_create(r->loop, &o, &r->status, &detail), ERR_OK);
}

static void rig_close(struct rig *r)
{
    status_destroy(&r->status);
    redis_destroy(&r->redis);
    loop_waker_destroy(&r->waker);
    loop_timer_destroy(&r->look);
    loop_timer_destroy(&r->limit);
    loop_destroy(&r->loop);
    if (r->server > 0) {
        kill(r->server, SIGKILL);
        waitpid(r->server, NULL, 0);
    }
    unlink(r->redis_path);
    assert_int_equal(access(r->http_path, F_OK), -1);
    assert_int_equal(rmdir(r->dir), 0);
    assert_false(r->gave_up);
}

static void *http_thread(void *arg)
{
    struct rig *r = arg;
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct timeval limit = {.tv_sec = 20};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memcpy(a.sun_path, r->http_path, strlen(r->http_path));
    size_t got = 0;
    if (connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0 &&
        send(fd, r->request, strlen(r->request), MSG_NOSIGNAL) > 0) {
        ssize_t n;
        while (got + 1 < sizeof(r->answer) &&
               (n = recv(fd, r->answer + got, sizeof(r->answer) - 1 - got, 0)) > 0)
            got += (size_t)n;
    }
    r->answer[got] = '\0';
    close(fd);
    loop_wake(r->waker);
    return NULL;
}

static const char *http(struct rig *r, const char *request)
{
    pthread_t thread;
    r->request = request;
    assert_int_equal(pthread_create(&thread, NULL, http_thread, r), 0);
    loop_run(r->loop);
    pthread_join(thread, NULL);
    assert_false(r->gave_up);
    const char *body = strstr(r->answer, "\r\n\r\n");
    return body != NULL ? body + 4 : "";
}

static void health_and_metrics(void **state)
{
    struct rig r;
    rig_open(&r, false);
    struct stat st;
    assert_int_equal(stat(r.http_path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    status_set_state(r.status, "ready");
    const char *body = http(&r, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_non_null(strstr(r.answer, " 200 "));
    json_t *j = json_loads(body, 0, NULL);
    assert_non_null(j);
    assert_string_equal(json_string_value(json_object_get(j, "name")), "router-7");
    assert_string_equal(json_string_value(json_object_get(j, "role")), "router");
    assert_string_equal(json_string_value(json_object_get(j, "state")), "ready");
    assert_string_equal(json_string_value(json_object_get(j, "redis")), "off");
    assert_string_equal(json_string_value(json_object_get(j, "incarnation")), "0000000000abcdef");
    assert_int_equal(json_integer_value(json_object_get(j, "pid")), getpid());
    assert_int_equal(json_integer_value(json_object_get(j, "queue")), 3);
    json_decref(j);
    metric_add(&values[0], 4);
    body = http(&r, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_non_null(strstr(r.answer, " 200 "));
    assert_non_null(strstr(body, "tandem_test_things_total{x=\"y\"} 4"));
    assert_int_equal(r.refreshed, 1);
    http(&r, "GET /other HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_non_null(strstr(r.answer, " 404 "));
    http(&r, "POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx");
    assert_null(strstr(r.answer, " 200 "));
    http(&r, "\x16\x03\x01 nonsense\r\n\r\n");
    assert_null(strstr(r.answer, " 200 "));
    http(&r, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_non_null(strstr(r.answer, " 200 "));
    rig_close(&r);
}

static void commands(void **state)
{
    struct rig r;
    rig_open(&r, false);
    const char *body = http(&r, "POST /drain?worker=3&deadline_ms=2500 HTTP/1.0\r\n\r\n");
    assert_non_null(strstr(r.answer, " 200 "));
    assert_string_equal(body, "{\"ok\":true}\n");
    assert_string_equal(r.last.name, "drain");
    assert_true(r.last.has_worker);
    assert_int_equal(r.last.worker, 3);
    assert_int_equal(r.last.deadline_ms, 2500);
    http(&r, "POST /undrain HTTP/1.0\r\n\r\n");
    assert_string_equal(r.last.name, "undrain");
    assert_false(r.last.has_worker);
    assert_int_equal(r.last.deadline_ms, 0);
    body = http(&r, "POST /drain?worker=9 HTTP/1.0\r\n\r\n");
    assert_non_null(strstr(r.answer, " 404 "));
    assert_non_null(strstr(body, "no worker 9"));
    assert_int_equal(r.commands, 3);
    static const char *const bad[] = {
        "worker=x",     "worker=-1", "deadline_ms=86400001", "worker=99999999999999999999999",
        "deadline_ms=", "worker"};
    for (uint32_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char request[128];
        snprintf(request, sizeof(request), "POST /drain?%s HTTP/1.0\r\n\r\n", bad[i]);
        http(&r, request);
        assert_non_null(strstr(r.answer, " 400 "));
    }
    http(&r, "GET /drain HTTP/1.0\r\n\r\n"); /* asking changes nothing */
    assert_non_null(strstr(r.answer, " 404 "));
    http(&r, "POST /reload HTTP/1.0\r\n\r\n");
    assert_non_null(strstr(r.answer, " 404 "));
    http(&r, "POST /pin?session=a&seconds=5 HTTP/1.0\r\n\r\n"); /* not of this role */
    assert_non_null(strstr(r.answer, " 404 "));
    assert_int_equal(r.commands, 3);
    rig_close(&r);
    with_pins = true;
    rig_open(&r, false);
    with_pins = false;
    http(&r, "POST /pin?session=a%20%26b&salt=%C3%A4&seconds=5 HTTP/1.0\r\n\r\n");
    assert_non_null(strstr(r.answer, " 200 "));
    assert_string_equal(r.last.name, "pin");
    assert_string_equal(r.session, "a &b|\xc3\xa4");
    assert_int_equal(r.last.seconds, 5);
    http(&r, "POST /pin?session=a&seconds=x HTTP/1.0\r\n\r\n");
    assert_non_null(strstr(r.answer, " 400 "));
    assert_int_equal(r.commands, 1);
    rig_close(&r);
}

/* ---- Redis ---- */

static void server_start(struct rig *r)
{
    r->server = fork();
    assert_true(r->server >= 0);
    if (r->server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int null = open("/dev/null", O_RDWR);
        dup2(null, 1);
        dup2(null, 2);
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", r->redis_path,
               "--save", "", "--appendonly", "no", "--dir", r->dir, (char *)NULL);
        _exit(127);
    }
}

static void on_answer(void *arg, enum err e, const struct redis_value *value)
{
    struct rig *r = arg;
    r->answered = true;
    r->absent = e != ERR_OK || value->type == REDIS_NIL;
    r->integer = e == ERR_OK ? value->integer : -1;
    snprintf(r->text, sizeof(r->text), "%.*s", e == ERR_OK ? (int)value->bytes : 0,
             e == ERR_OK && value->text != NULL ? value->text : "");
    loop_stop(r->loop);
}

static void ask(struct rig *r, int argc, const char *const *argv)
{
    size_t bytes[4];
    assert_true(argc <= 4);
    for (int i = 0; i < argc; i++)
        bytes[i] = strlen(argv[i]);
    r->answered = false;
    assert_int_equal(redis_command(r->redis, on_answer, r, argc, argv, bytes), ERR_OK);
    while (!r->answered && !r->gave_up)
        loop_run(r->loop);
    assert_false(r->gave_up);
}

static void run_for(struct rig *r, uint64_t us)
{
    if (r->look == NULL)
        r->look = loop_timer_create(r->loop, on_wake, r);
    loop_timer_start(r->look, us, false);
    loop_run(r->loop);
    assert_false(r->gave_up);
}

#define PROC    "tandem:{c}:proc:router:7"
#define METRICS "tandem:{c}:metrics:router:7"

static void heartbeat_and_metrics_in_redis(void **state)
{
    struct rig r;
    rig_open(&r, true);
    server_start(&r);
    while (!redis_up(r.redis))
        run_for(&r, 5000);
    status_set_state(r.status, "ready");
    ask(&r, 3, (const char *const[]){"HGET", PROC, "state"});
    assert_string_equal(r.text, "ready");
    ask(&r, 3, (const char *const[]){"HGET", PROC, "incarnation"});
    assert_string_equal(r.text, "0000000000abcdef");
    ask(&r, 3, (const char *const[]){"HGET", PROC, "inflight"});
    assert_string_equal(r.text, "5");
    ask(&r, 3, (const char *const[]){"HEXISTS", PROC, "empty"});
    assert_int_equal(r.integer, 1);
    ask(&r, 2, (const char *const[]){"TTL", PROC});
    assert_in_range(r.integer, 1, 6);
    ask(&r, 2, (const char *const[]){"TTL", METRICS});
    assert_in_range(r.integer, 1, 15);
    ask(&r, 3, (const char *const[]){"HGET", METRICS, "tandem_test_things_total{x=\"y\"}"});
    assert_false(r.absent);
    ask(&r, 2, (const char *const[]){"GET", "tandem:{c}:metrics_help:router:7"});
    assert_non_null(strstr(r.text, "# TYPE tandem_test_seconds histogram\n"));
    assert_non_null(strstr(r.text, "# HELP tandem_test_seconds Times.\n"));
    /* Lost data come back by themselves within one period. */
    ask(&r, 1, (const char *const[]){"FLUSHALL"});
    uint64_t start_us = clock_mono_us();
    do {
        run_for(&r, 50000);
        ask(&r, 2, (const char *const[]){"EXISTS", PROC});
    } while (r.integer == 0);
    assert_true(clock_mono_us() - start_us < 10000000);
    status_destroy(&r.status);
    ask(&r, 2, (const char *const[]){"EXISTS", PROC});
    assert_int_equal(r.integer, 0);
    rig_close(&r);
}

static void process_begin_and_end(void **state)
{
    char dir[64], run[96], data[96], pid_path[128], text[32] = "";
    snprintf(dir, sizeof(dir), P_tmpdir "/tandem-process-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(run, sizeof(run), "%s/a/run/", dir);
    snprintf(data, sizeof(data), "%s/state", dir);
    snprintf(pid_path, sizeof(pid_path), "%s/a/run/router-7.pid", dir);
    struct err_detail d;
    mode_t mask = umask(0022);
    assert_int_equal(process_begin("router-7", run, data, &d), ERR_OK);
    struct stat st;
    assert_int_equal(stat(run, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0700);
    FILE *f = fopen(pid_path, "r");
    assert_non_null(f);
    assert_non_null(fgets(text, sizeof(text), f));
    fclose(f);
    assert_int_equal(atol(text), getpid());

    /* A second instance is refused and leaves the PID file alone. */
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "test_status", "second", run, data, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), ERR_BUSY);
    assert_int_equal(access(pid_path, F_OK), 0);

    process_end("router-7", run);
    assert_int_equal(access(pid_path, F_OK), -1);
    assert_int_equal(process_begin("router-7", run, data, &d), ERR_OK);
    process_end("router-7", run);
    assert_int_equal(process_begin("router-7", pid_path, data, &d), ERR_OK); /* a free name */
    process_end("router-7", pid_path);
    chmod(data, 0777);
    assert_int_equal(process_begin("router-7", run, data, &d), ERR_INVALID);
    assert_non_null(strstr(d.text, "state_dir"));
    umask(mask);
    char command[160];
    snprintf(command, sizeof(command), "rm -r '%s'", dir);
    assert_int_equal(system(command), 0);
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "second") == 0)
        return (int)process_begin("router-7", argv[2], argv[3], NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(health_and_metrics),
        cmocka_unit_test(commands),
        cmocka_unit_test(heartbeat_and_metrics_in_redis),
        cmocka_unit_test(process_begin_and_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
