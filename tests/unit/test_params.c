/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/params.h"

struct sample {
#define PARAM(name, type, ...) PARAM_CTYPE_##type name;
#include "lib/base/params_common.def"
#undef PARAM
    uint32_t requests_max;
    uint64_t bytes_max;
    bool verify;
    double ratio;
    param_str listen;
};

#define PARAM(name, type, def, lo, hi, unit, apply, help)                                          \
    PARAM_ROW(struct sample, name, type, def, lo, hi, unit, apply, help)
/* clang-format off */
static const struct param table[] = {
#include "lib/base/params_common.def"
    PARAM(requests_max, u32, 1024, 1, 1000000, "requests", RESTART, "Upper bound on requests.")
    PARAM(bytes_max, u64, 1073741824, 0, 0, "bytes", RESTART, "Any.")
    PARAM(verify, bool, true, 0, 1, "", LIVE, "Check what is read.")
    PARAM(ratio, f64, 0.5, 0, 1, "", LIVE, "Share.")
    PARAM(listen, str, "127.0.0.1:8080", 0, 20, "address", RESTART, "Where clients come.")
};
/* clang-format on */
#undef PARAM

#define COUNT ARRAY_COUNT(table)

static char file_path[] = "params-XXXXXX";
static char config_argument[64];
static struct sample sample;
static struct err_detail faults;

static int make_file(void **state)
{
    (void)state;
    /* A short relative path, so that a list of faults that name it fits. */
    const char *root = getenv("TANDEM_BUILD_ROOT");
    if (root != NULL && chdir(root) != 0)
        return -1;
    int fd = mkstemp(file_path);
    if (fd < 0)
        return -1;
    close(fd);
    snprintf(config_argument, sizeof config_argument, "--config=%s", file_path);
    return 0;
}

static int drop_file(void **state)
{
    (void)state;
    return unlink(file_path);
}

static void write_file(const char *text, size_t bytes)
{
    FILE *f = fopen(file_path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

static enum err load(const char *a, const char *b, const char *c)
{
    const char *argv[5] = {"test", a, b, c, NULL};
    int argc = 1;
    while (argc < 4 && argv[argc] != NULL)
        argc++;
    memset(&sample, 0xee, sizeof sample);
    memset(&faults, 0, sizeof faults);
    return params_load(table, COUNT, &sample, argc, (char **)argv, &faults);
}

static void defaults(void **state)
{
    (void)state;
    assert_int_equal(load(NULL, NULL, NULL), ERR_OK);
    assert_int_equal(sample.requests_max, 1024);
    assert_int_equal(sample.bytes_max, 1073741824);
    assert_true(sample.verify);
    assert_true(sample.ratio == 0.5);
    assert_string_equal(sample.listen, "127.0.0.1:8080");
    assert_string_equal(sample.run_dir, "/run/tandem");
    assert_string_equal(sample.redis, "");
    assert_int_equal(sample.id, 0);
}

static void sources_rise(void **state)
{
    (void)state;
    static const char text[] = "# comment\n"
                               "\n"
                               "  requests_max = 7  \r\n"
                               "verify=false\n"
                               "listen = \"a b#c\"   # quoted\n"
                               "run_dir = /x/y # bare\n"
                               "\tcluster = a#b\n"
                               "redis = \"\"\n"
                               "ratio = 1e-2";
    write_file(text, strlen(text));
    assert_int_equal(load("--requests_max=9", config_argument, "--bytes_max=18446744073709551615"),
                     ERR_OK);
    assert_int_equal(sample.requests_max, 9); /* the command line wins wherever it stands */
    assert_true(sample.bytes_max == UINT64_MAX);
    assert_false(sample.verify);
    assert_string_equal(sample.listen, "a b#c");
    assert_string_equal(sample.run_dir, "/x/y");
    assert_string_equal(sample.cluster, "a#b");
    assert_string_equal(sample.redis, "");
    assert_true(sample.ratio == 0.01);
    assert_int_equal(load(config_argument, config_argument, NULL), ERR_OK);
    assert_int_equal(sample.requests_max, 7);
    assert_int_equal(load("--listen=x=y", "--listen=", NULL), ERR_OK);
    assert_string_equal(sample.listen, "");
}

static void all_faults_at_once(void **state)
{
    (void)state;
    assert_int_equal(load("--requests_max=0", "--ratio=x", "--colour=red"), ERR_INVALID);
    assert_string_equal(faults.text, "--requests_max: \"0\" is out of range 1 to 1000000\n"
                                     "--ratio: \"x\" is not a number\n"
                                     "--colour: no such parameter");
    assert_int_equal(load("requests_max=1", "--verify", "-h"), ERR_INVALID);
    assert_string_equal(faults.text, "requests_max=1: want --name=value\n"
                                     "--verify: want --name=value\n"
                                     "-h: want --name=value");
    static const char *const bad[] = {
        "--requests_max=-1",
        "--requests_max=4294967296",
        "--requests_max= 1",
        "--requests_max=",
        "--requests_max=1.0",
        "--requests_max=1000001",
        "--verify=maybe",
        "--verify=",
        "--ratio=nan",
        "--ratio=1.01",
        "--ratio=-0.1",
        "--=1",
        "--listen=123456789012345678901",
        "--listen=\xff",
        "--bytes_max=18446744073709551616",
        "--config=",
        "--config",
    };
    for (size_t i = 0; i < ARRAY_COUNT(bad); i++)
        if (load(bad[i], NULL, NULL) != ERR_INVALID || faults.text[0] == '\0')
            fail_msg("%s was accepted", bad[i]);
}

static void file_faults_name_their_line(void **state)
{
    (void)state;
    static const char text[] = "requests_max = x\n"
                               "nonsense\n"
                               "= 4\n"
                               "listen = \"open\n"
                               "listen = \"a\" b\n"
                               "colour = red\n"
                               "id = 3\n"
                               "id = 4\n";
    char want[1024];
    write_file(text, strlen(text));
    assert_int_equal(load(config_argument, NULL, NULL), ERR_INVALID);
    snprintf(want, sizeof want,
             "%s:1: requests_max: \"x\" is not a whole number\n"
             "%s:2: want name = value\n"
             "%s:3: want name = value\n"
             "%s:4: closing quote missing\n"
             "%s:5: text after the closing quote\n"
             "%s:6: colour: no such parameter\n",
             file_path, file_path, file_path, file_path, file_path, file_path);
    assert_memory_equal(faults.text, want, strlen(want));
    assert_non_null(strstr(faults.text, ":8: id: given twice"));

    assert_int_equal(load("--config=/nonexistent/x", NULL, NULL), ERR_INVALID);
    assert_string_equal(faults.text, "--config=/nonexistent/x: No such file or directory");
    write_file("id = 1\0 2\n", 10);
    assert_int_equal(load(config_argument, NULL, NULL), ERR_INVALID);
    char *line = malloc(9000);
    memset(line, 'x', 9000);
    write_file(line, 9000);
    free(line);
    assert_int_equal(load(config_argument, NULL, NULL), ERR_INVALID);
    assert_non_null(strstr(faults.text, ":1: line longer"));
}

static void many_faults_are_counted(void **state)
{
    (void)state;
    char text[4000] = "";
    size_t used = 0;
    for (int i = 0; i < 100; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "unknown_%d = 1\n", i);
    write_file(text, used);
    assert_int_equal(load(config_argument, NULL, NULL), ERR_INVALID);
    int lines = 0;
    for (const char *p = faults.text; (p = strchr(p, '\n')) != NULL; p++)
        lines++;
    unsigned more = 0;
    assert_int_equal(sscanf(strrchr(faults.text, '\n'), "\nand %u more", &more), 1);
    assert_int_equal(lines + (int)more, 100);
}

static void printing(void **state)
{
    (void)state;
    char text[64];
    assert_int_equal(load("--ratio=0.10", "--verify=no", NULL), ERR_OK);
    static const char *const want[][2] = {
        {"ratio", "0.1"},
        {"verify", "false"},
        {"requests_max", "1024"},
        {"bytes_max", "1073741824"},
        {"listen", "127.0.0.1:8080"},
        {"redis", ""},
    };
    for (size_t i = 0; i < ARRAY_COUNT(want); i++) {
        assert_true(params_print(table, COUNT, &sample, want[i][0], text, sizeof text));
        assert_string_equal(text, want[i][1]);
    }
    assert_false(params_print(table, COUNT, &sample, "rati", text, sizeof text));
    assert_false(params_print(table, COUNT, &sample, "", text, sizeof text));
}

static void hash_follows_the_values(void **state)
{
    (void)state;
    char first[33], same[33], other[33];
    const char *const skip[] = {"id", "run_dir", NULL};
    assert_int_equal(load("--id=1", NULL, NULL), ERR_OK);
    params_hash(table, COUNT, &sample, skip, first);
    assert_int_equal(strlen(first), 32);
    assert_int_equal(load("--id=2", "--run_dir=/z", "--ratio=0.50"), ERR_OK);
    params_hash(table, COUNT, &sample, skip, same);
    assert_string_equal(first, same);
    params_hash(table, COUNT, &sample, NULL, other);
    assert_string_not_equal(first, other);
    assert_int_equal(load("--ratio=0.25", NULL, NULL), ERR_OK);
    params_hash(table, COUNT, &sample, skip, other);
    assert_string_not_equal(first, other);
}

/* What a call that prints and exits says on the given stream. */
static void run_child(const char *argument, char *ret_text, size_t text_bytes)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], argument == NULL ? STDERR_FILENO : STDOUT_FILENO);
        enum err e = load(argument, NULL, NULL);
        if (e == ERR_OK)
            params_log(table, COUNT, &sample);
        _exit(argument == NULL ? 0 : 3);
    }
    close(ends[1]);
    size_t used = 0;
    ssize_t got;
    while ((got = read(ends[0], ret_text + used, text_bytes - 1 - used)) > 0)
        used += (size_t)got;
    ret_text[used] = '\0';
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void help_version_and_log(void **state)
{
    (void)state;
    static char text[65536];
    run_child("--help", text, sizeof text);
    assert_non_null(strstr(text, "  --requests_max=requests  [1024; 1 to 1000000]\n"
                                 "      Upper bound on requests.\n"));
    assert_non_null(strstr(text, "  --verify=true|false  [true; live]\n"));
    assert_non_null(strstr(text, "  --listen=address  [\"127.0.0.1:8080\"]\n"));
    run_child("--version", text, sizeof text);
    assert_string_equal(text, "tandem " TANDEM_VERSION "\n");
    run_child(NULL, text, sizeof text);
    for (size_t i = 0; i < COUNT; i++)
        assert_non_null(strstr(text, table[i].name));
    assert_non_null(strstr(text, " info tandem param \"value\" requests_max=1024\n"));
    assert_non_null(strstr(text, " redis=\"\"\n"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),
        cmocka_unit_test(sources_rise),
        cmocka_unit_test(all_faults_at_once),
        cmocka_unit_test(file_faults_name_their_line),
        cmocka_unit_test(many_faults_are_counted),
        cmocka_unit_test(printing),
        cmocka_unit_test(hash_follows_the_values),
        cmocka_unit_test(help_version_and_log),
    };
    return cmocka_run_group_tests(tests, make_file, drop_file);
}
