/* SPDX-License-Identifier: Apache-2.0 */
/* The assembled exact path against the vectors of an independent implementation. */
#include "tests/model/harness.h"

#include "lib/model/tool/eval.h"

struct how {
    uint32_t threads, slice_rows, slice_layers;
};

static void evaluate(const char *directory, const char *golden, const struct how *how,
                     uint32_t cases_want)
{
    char path[1024], file[1100];
    struct safetensors *set = NULL;
    struct err_detail detail = {{0}};
    uint32_t cases = 0, failed = 0;
    struct model *m = test_model(directory, how->threads);
    test_path(path, sizeof(path), golden);
    snprintf(file, sizeof(file), "%s/golden.safetensors", path);
    assert_int_equal(safetensors_open_file(file, &set, &detail), ERR_OK);
    char model_path[1024];
    test_path(model_path, sizeof(model_path), directory);
    /* Measured: 4.1e-6 and 1.2e-5.  The published 1e-4 would not see the eps of the l2norm. */
    struct eval_options options = {.directory = model_path,
                                   .golden = path,
                                   .slice_rows = how->slice_rows,
                                   .slice_layers = how->slice_layers,
                                   .logit_bound = 8e-6,
                                   .stream_bound = 2.2e-5};
    enum err e = eval_random(m, set, &options, &cases, &failed, &detail);
    if (e == ERR_OK)
        e = eval_trained(m, set, &options, &cases, &failed, &detail);
    if (e != ERR_OK)
        fail_msg("%s", detail.text);
    assert_int_equal(cases, cases_want);
    assert_int_equal(failed, 0);
    safetensors_close(&set);
    model_destroy(&m);
}

static void test_random_model(void **state)
{
    (void)state;
    static const struct how hows[] = {{1, 0, 0}, {2, 7, 3}, {1, 1, 1}};
    for (size_t i = 0; i < sizeof(hows) / sizeof(hows[0]); i++)
        evaluate("tests/golden/model-random", "tests/golden/model-random", &hows[i], 3);
}

static void test_trained_model(void **state)
{
    (void)state;
    static const struct how how = {0, 0, 0};
    evaluate("tests/golden/tiny-glm", "tests/golden/model-trained", &how, 51);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_model),
                                       cmocka_unit_test(test_trained_model)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
