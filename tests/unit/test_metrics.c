/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "lib/base/metrics.h"
#include "lib/base/str.h"

static const struct metric_buckets three = {3, {0.5, 1, 2.5}};

static const struct metric_row rows[] = {
    {METRIC_COUNTER, "tandem_requests_total", "code=\"200\"", NULL, "Answers."},
    {METRIC_COUNTER, "tandem_requests_total", "code=\"503\"", NULL, "Answers."},
    {METRIC_GAUGE, "tandem_queue", "", NULL, "Waiting."},
    {METRIC_HISTOGRAM, "tandem_wait_seconds", "kind=\"a\"", &three, "Time."},
};

static void rendered_text(void **state)
{
    (void)state;
    struct metric values[4] = {{0}};
    struct str out;
    metric_add(&values[0], 1);
    metric_add(&values[0], 2);
    metric_set(&values[2], 0.25);
    metric_observe(&rows[3], &values[3], 0.1);
    metric_observe(&rows[3], &values[3], 0.5); /* bounds are inclusive */
    metric_observe(&rows[3], &values[3], 2);
    metric_observe(&rows[3], &values[3], 100);
    str_init(&out, 0);
    metrics_render(rows, values, 4, "id=\"3\"", &out);
    assert_string_equal(out.text, "# HELP tandem_requests_total Answers.\n"
                                  "# TYPE tandem_requests_total counter\n"
                                  "tandem_requests_total{code=\"200\",id=\"3\"} 3\n"
                                  "tandem_requests_total{code=\"503\",id=\"3\"} 0\n"
                                  "# HELP tandem_queue Waiting.\n"
                                  "# TYPE tandem_queue gauge\n"
                                  "tandem_queue{id=\"3\"} 0.25\n"
                                  "# HELP tandem_wait_seconds Time.\n"
                                  "# TYPE tandem_wait_seconds histogram\n"
                                  "tandem_wait_seconds_bucket{kind=\"a\",id=\"3\",le=\"0.5\"} 2\n"
                                  "tandem_wait_seconds_bucket{kind=\"a\",id=\"3\",le=\"1\"} 2\n"
                                  "tandem_wait_seconds_bucket{kind=\"a\",id=\"3\",le=\"2.5\"} 3\n"
                                  "tandem_wait_seconds_bucket{kind=\"a\",id=\"3\",le=\"+Inf\"} 4\n"
                                  "tandem_wait_seconds_count{kind=\"a\",id=\"3\"} 4\n"
                                  "tandem_wait_seconds_sum{kind=\"a\",id=\"3\"} 102.6\n");
    str_clear(&out);
    metrics_render(rows + 2, values + 2, 1, "", &out);
    assert_non_null(strstr(out.text, "\ntandem_queue 0.25\n"));
    str_fini(&out);
}

static void values_are_spelled_for_prometheus(void **state)
{
    (void)state;
    static const struct {
        double value;
        const char *text;
    } cases[] = {
        {0, "x 0\n"},           {-0.0, "x 0\n"},
        {-3, "x -3\n"},         {1e14, "x 100000000000000\n"},
        {1e300, "x 1e+300\n"},  {0.1, "x 0.1\n"},
        {INFINITY, "x +Inf\n"}, {-INFINITY, "x -Inf\n"},
        {NAN, "x NaN\n"},
    };
    const struct metric_row row = {METRIC_GAUGE, "x", "", NULL, "h"};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct metric value = {.value = cases[i].value};
        struct str out;
        str_init(&out, 0);
        metrics_render(&row, &value, 1, "", &out);
        assert_non_null(strstr(out.text, cases[i].text));
        str_fini(&out);
    }
}

struct seen {
    int count;
    bool bucket;
};

static void see(void *arg, const char *sample, const char *value)
{
    struct seen *seen = arg;
    seen->count++;
    if (strcmp(sample, "tandem_wait_seconds_bucket{kind=\"a\",le=\"1\"}") == 0)
        seen->bucket = strcmp(value, "1") == 0;
}

static void each_gives_all_samples(void **state)
{
    (void)state;
    struct metric values[4] = {{0}};
    struct seen seen = {0};
    metric_observe(&rows[3], &values[3], 0.7);
    metrics_each(rows, values, 4, "", see, &seen);
    assert_int_equal(seen.count, 2 + 1 + 4 + 2);
    assert_true(seen.bucket);
}

static void bucket_tables_rise(void **state)
{
    (void)state;
    const struct metric_buckets *tables[] = {&metrics_buckets_ttft, &metrics_buckets_itl,
                                             &metrics_buckets_latency, &metrics_buckets_tokens,
                                             &metrics_buckets_small};
    for (size_t t = 0; t < 5; t++) {
        assert_in_range(tables[t]->count, 1, METRIC_BUCKETS_MAX);
        for (uint32_t i = 1; i < tables[t]->count; i++)
            assert_true(tables[t]->upper[i] > tables[t]->upper[i - 1]);
    }
    assert_true(metrics_buckets_ttft.upper[metrics_buckets_ttft.count - 1] == 2560);
    assert_true(metrics_buckets_itl.upper[metrics_buckets_itl.count - 1] == 80);
    assert_true(metrics_buckets_tokens.upper[metrics_buckets_tokens.count - 1] == 1000000);
    assert_true(metrics_buckets_small.upper[metrics_buckets_small.count - 1] == 64);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rendered_text),
        cmocka_unit_test(values_are_spelled_for_prometheus),
        cmocka_unit_test(each_gives_all_samples),
        cmocka_unit_test(bucket_tables_rise),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
