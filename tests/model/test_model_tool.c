/* SPDX-License-Identifier: Apache-2.0 */
/* tandem-model as a user runs it: the text does not depend on --spec, --threads or the slices. */
#include "tests/model/harness.h"

#include <sys/wait.h>
#include <unistd.h>

static int run(char *out, size_t bytes, const char *arguments)
{
    char command[2048];
    const char *root = getenv("TANDEM_BUILD_ROOT"), *source = getenv("TANDEM_SOURCE_ROOT");
    assert_non_null(root);
    assert_non_null(source);
    snprintf(command, sizeof(command), "cd '%s' && '%s/lib/model/tool/tandem-model' %s 2>&1",
             source, root, arguments);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    size_t got = fread(out, 1, bytes - 1, f);
    out[got] = 0;
    int status = pclose(f);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

#define DEMO "tests/golden/tiny-glm"
#define PROMPT                                                                                     \
    "--prompt '[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Repeat: apple forest "           \
    "letter<|assistant|><think>' "

static void test_spec_keeps_text(void **state)
{
    (void)state;
    static const char *const specs[] = {"--spec fixed:7", "--spec fixed:1 --threads 2",
                                        "--spec ngram:3", "--spec ngram:0"};
    static const char *const samplings[] = {"--temperature 0", "--temperature 1.6 --seed 3",
                                            "--temperature 2.5 --top-p 1 --seed 77"};
    for (size_t s = 0; s < 3; s++) {
        char want[8192], have[8192], arguments[1024];
        snprintf(arguments, sizeof(arguments),
                 "generate " DEMO " " PROMPT "%s --max-tokens 90 "
                 "--json",
                 samplings[s]);
        assert_int_equal(run(want, sizeof(want), arguments), 0);
        assert_non_null(strstr(want, "\"finish_reason\": \""));
        for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++) {
            snprintf(arguments, sizeof(arguments),
                     "generate " DEMO " " PROMPT "%s --max-tokens 90 --json %s", samplings[s],
                     specs[i]);
            assert_int_equal(run(have, sizeof(have), arguments), 0);
            assert_string_equal(have, want);
        }
    }
}

static void test_text(void **state)
{
    (void)state;
    char out[8192];
    assert_int_equal(run(out, sizeof(out), "generate " DEMO " " PROMPT "--temperature 0"), 0);
    assert_non_null(strstr(out, "</think>apple forest letter\n"));
    assert_int_equal(
        run(out, sizeof(out), "generate " DEMO " " PROMPT "--temperature 0 --max-tokens 3 --json"),
        0);
    assert_non_null(strstr(out, "\"finish_reason\": \"length\""));
}

static void test_ids_file(void **state)
{
    (void)state;
    char path[] = "/tmp/test_model_tool_XXXXXX", words[4096], list[4096], arguments[256];
    static const char *const texts[] = {"5 6\n7\t8 ", "[5, 6,\n7, 8]"};
    char *outs[] = {words, list};
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    snprintf(arguments, sizeof(arguments),
             "generate tests/golden/model-random --ids %s --json --max-tokens 20", path);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ftruncate(fd, 0), 0);
        assert_int_equal(pwrite(fd, texts[i], strlen(texts[i]), 0), strlen(texts[i]));
        assert_int_equal(run(outs[i], 4096, arguments), 0);
        assert_non_null(strstr(outs[i], "\"text\": \"\""));
    }
    assert_string_equal(words, list);
    static const char *const bad[] = {"", " ", "5 x", "1024", "[5, \"6\"]", "[5", "-1", "5.0"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(ftruncate(fd, 0), 0);
        assert_int_equal(pwrite(fd, bad[i], strlen(bad[i]), 0), strlen(bad[i]));
        assert_int_equal(run(words, sizeof(words), arguments), 2);
    }
    close(fd);
    unlink(path);
}

static void test_faults(void **state)
{
    (void)state;
    static const struct {
        const char *arguments, *named;
    } cases[] = {
        {"", "usage"},
        {"explode x", "explode"},
        {"eval " DEMO, "--golden"},
        {"eval", "directory"},
        {"eval " DEMO " --golden tests/golden/ops", "golden.safetensors"},
        {"eval " DEMO " --golden tests/golden/model-random --numerics best", "--numerics"},
        {"generate " DEMO, "--prompt"},
        {"generate " DEMO " --prompt a --ids b", "--prompt"},
        {"generate " DEMO " --prompt ''", "empty"},
        {"generate " DEMO " --prompt a --spec magic", "--spec"},
        {"generate " DEMO " --prompt a --spec fixed:8", "--spec"},
        {"generate " DEMO " --prompt a --top-p 2", "--top-p"},
        {"generate " DEMO " --prompt a --what", "--what"},
        {"generate tests/golden/model-random --prompt a", "tokenizer.json"},
        {"inspect tests/golden/ops", "model.safetensors"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char out[16384];
        int status = run(out, sizeof(out), cases[i].arguments);
        if (status != 2 || strstr(out, cases[i].named) == NULL)
            fail_msg("%s: status %d, \"%s\"", cases[i].arguments, status, out);
    }
}

/* Another model's vectors: the answer is no, and the exit status says so. */
static void test_eval_says_no(void **state)
{
    (void)state;
    char out[8192];
    int status = run(out, sizeof(out), "eval " DEMO " --golden tests/golden/model-random");
    assert_int_equal(status, 1);
    assert_non_null(strstr(out, "\"ok\": false"));
    assert_int_equal(run(out, sizeof(out), "inspect " DEMO " | tail -7"), 0);
    assert_non_null(strstr(out, "quantization: bf16, 5.3 M parameters"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_spec_keeps_text),
                                       cmocka_unit_test(test_text), cmocka_unit_test(test_ids_file),
                                       cmocka_unit_test(test_faults),
                                       cmocka_unit_test(test_eval_says_no)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
