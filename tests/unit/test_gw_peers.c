/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_peers*: whatever order and rubbish Redis holds, the page is valid and complete. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "gateway/gw_peers.h"
#include "lib/base/metrics.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/net/redis.h"

#define ITEMS_MAX 256u

static const struct metric_row rows[] = {
    {METRIC_COUNTER, "shared_total", "kind=\"a\"", NULL, "Shared."},
    {METRIC_COUNTER, "shared_total", "kind=\"b\"", NULL, "Shared."},
    {METRIC_GAUGE, "own", "", NULL, "Own."},
};
static const struct metric_row theirs[] = {
    {METRIC_COUNTER, "shared_total", "kind=\"c\"", NULL, "Shared, says the other."},
    {METRIC_HISTOGRAM, "their_seconds", "kind=\"x\"", &metrics_buckets_latency, "Times."},
    {METRIC_HISTOGRAM, "their_seconds", "kind=\"y\"", &metrics_buckets_latency, "Times."},
    {METRIC_HISTOGRAM, "vllm:steps_total", "", &metrics_buckets_small, "A histogram all the same."},
    {METRIC_GAUGE, "their_count", "", NULL, "No part of a histogram."},
    {METRIC_GAUGE, "a_gauge", "", NULL, "First by name."},
};
static struct metric values[3], their_values[6];

static struct redis_value items[ITEMS_MAX];
static char texts[ITEMS_MAX][256];
static uint32_t item_count;
static struct rng rng;

static void add_item(void *arg, const char *sample, const char *value)
{
    assert_true(item_count + 2 <= ITEMS_MAX);
    const char *const pair[] = {sample, value};
    for (int i = 0; i < 2; i++) {
        struct redis_value *v = &items[item_count];
        snprintf(texts[item_count], sizeof(texts[0]), "%s", pair[i]);
        *v = (struct redis_value){
            .type = REDIS_STRING, .text = texts[item_count], .bytes = strlen(pair[i])};
        item_count++;
    }
}

/* The hash as Redis may give it: in any order. */
static void give(struct gw_peers *p, const char *process)
{
    for (uint32_t n = item_count / 2; n > 1; n--) {
        uint32_t k = rng_below(&rng, n);
        for (uint32_t i = 0; i < 2; i++) {
            struct redis_value swap = items[2 * (n - 1) + i];
            items[2 * (n - 1) + i] = items[2 * k + i];
            items[2 * k + i] = swap;
        }
    }
    gw_peers_take(p, process,
                  &(struct redis_value){.type = REDIS_ARRAY, .items = items, .count = item_count});
}

static struct gw_peers *begin(void)
{
    const struct gw_peers_options o = {.cluster = "c",
                                       .vllm_labels = "model_name=\"m\",engine=\"0\""};
    item_count = 0;
    return gw_peers_create(&o);
}

static void give_theirs(struct gw_peers *p, const char *process)
{
    struct str help;
    str_init(&help, 0);
    metrics_describe(theirs, 6, &help);
    gw_peers_take_help(p, process, help.text, help.bytes);
    item_count = 0;
    metrics_each(theirs, their_values, 6, "", add_item, NULL);
    give(p, process);
    str_fini(&help);
}

static void page(const struct gw_peers *p, struct str *out)
{
    str_clear(out);
    gw_peers_render(p, rows, values, 3, "", out);
}

static uint32_t count_of(const char *text, const char *what)
{
    uint32_t count = 0;
    for (const char *at = text; (at = strstr(at, what)) != NULL; at += strlen(what))
        count++;
    return count;
}

static void families_stand_together(void **state)
{
    struct str out;
    str_init(&out, 0);
    struct gw_peers *p = begin();
    give_theirs(p, "worker-1");
    give_theirs(p, "worker-0");
    page(p, &out);
    static const char head[] = "# HELP shared_total Shared.\n"
                               "# TYPE shared_total counter\n"
                               "shared_total{kind=\"a\"} 0\n"
                               "shared_total{kind=\"b\"} 0\n"
                               "shared_total{process=\"worker-0\",kind=\"c\"} 0\n"
                               "shared_total{process=\"worker-1\",kind=\"c\"} 0\n"
                               "# HELP own Own.\n"
                               "# TYPE own gauge\n"
                               "own 0\n"
                               "# HELP a_gauge First by name.\n"
                               "# TYPE a_gauge gauge\n"
                               "a_gauge{process=\"worker-0\"} 0\n"
                               "a_gauge{process=\"worker-1\"} 0\n"
                               "# HELP their_count No part of a histogram.\n"
                               "# TYPE their_count gauge\n";
    assert_int_equal(strncmp(out.text, head, strlen(head)), 0);
    assert_int_equal(count_of(out.text, "# TYPE their_seconds histogram\n"), 1);
    assert_int_equal(count_of(out.text, "# TYPE "), 6);
    assert_int_equal(count_of(out.text, "# HELP "), 6);
    /* Bounds rise, +Inf is last, then count and sum; the same text whatever the order was. */
    static const char buckets[] =
        "their_seconds_bucket{process=\"worker-0\",kind=\"x\",le=\"0.3\"} 1\n"
        "their_seconds_bucket{process=\"worker-0\",kind=\"x\",le=\"0.5\"} 1\n";
    assert_non_null(strstr(out.text, buckets));
    static const char last[] =
        "their_seconds_bucket{process=\"worker-0\",kind=\"x\",le=\"7680\"} 2\n"
        "their_seconds_bucket{process=\"worker-0\",kind=\"x\",le=\"+Inf\"} 3\n"
        "their_seconds_count{process=\"worker-0\",kind=\"x\"} 3\n"
        "their_seconds_sum{process=\"worker-0\",kind=\"x\"} 10020.1\n"
        "their_seconds_bucket{process=\"worker-0\",kind=\"y\",le=\"0.3\"} 0\n";
    assert_non_null(strstr(out.text, last));
    assert_non_null(strstr(out.text,
                           "vllm:steps_total_bucket{process=\"worker-1\",model_name=\"m\","
                           "engine=\"0\",le=\"16\"} 0\n"));
    assert_non_null(strstr(out.text, "their_count{process=\"worker-1\"} 0\n"));
    for (int i = 0; i < 50; i++) {
        struct str again;
        str_init(&again, 0);
        give_theirs(p, "worker-0");
        page(p, &again);
        assert_string_equal(again.text, out.text);
        str_fini(&again);
    }
    str_fini(&out);
    gw_peers_destroy(&p);
}

static void rubbish_is_dropped(void **state)
{
    static const char *const bad[][2] = {
        {"", "1"},
        {"9x", "1"},
        {"x y", "1"},
        {"x{", "1"},
        {"x}", "1"},
        {"x{a}", "1"},
        {"x{a=b}", "1"},
        {"x{a=\"b}", "1"},
        {"x{a=\"b\",}", "1"},
        {"x{a=\"b\"c=\"d\"}", "1"},
        {"x{a=\"b\",a=\"c\"}", "1"},
        {"x{a=\"\\x\"}", "1"},
        {"x{a=\"b\nc\"}", "1"},
        {"x{process=\"worker-7\"}", "1"},
        {"x{le=\"1\"}", "1"},
        {"x\ny", "1"},
        {"x{a=\"\xff\"}", "1"},
        {"x", ""},
        {"x", "1\n"},
        {"x", "one"},
        {"x", "1 2"},
        {"x", "0x10"},
        {"x", "+"},
        {"x", "e5"},
        {"x{a=\"b\"} 5\ny", "1"},
        {"h_bucket", "1"},
        {"h_bucket{le=\"x\"}", "1"},
        {"h_bucket{le=\"NaN\"}", "1"},
        {"h_bucket{le=\"1\",a=\"b\"}", "1"},
        {"h_sum{le=\"1\"}", "1"},
    };
    static const char help[] = "# TYPE h histogram\n# TYPE x nonsense\n# HELP x \\ bad\nfree text\n"
                               "# TYPE  y gauge\n# HELP 9 x\n# TYPE z gauge\x01\n#\n# TYPE\n";
    struct str out;
    str_init(&out, 0);
    struct gw_peers *p = begin();
    gw_peers_take_help(p, "worker-0", help, sizeof(help) - 1);
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        add_item(NULL, bad[i][0], bad[i][1]);
    give(p, "worker-0");
    page(p, &out);
    struct str none;
    str_init(&none, 0);
    metrics_render(rows, values, 3, "", &none);
    assert_string_equal(out.text, none.text);
    /* A good one beside them is kept, and what nobody describes is said to be so. */
    add_item(NULL, "x{a=\"q\\\"\\\\\\n\",b=\"{}\"}", "-1.5e+3");
    give(p, "worker-0");
    gw_peers_take(p, "no such name", &(struct redis_value){.type = REDIS_ARRAY});
    page(p, &out);
    assert_non_null(strstr(out.text, "# TYPE x untyped\nx{process=\"worker-0\",a=\"q\\\"\\\\\\n\","
                                     "b=\"{}\"} -1.5e+3\n"));
    str_fini(&none);
    str_fini(&out);
    gw_peers_destroy(&p);
}

static void bounded(void **state)
{
    struct gw_peers *p = begin();
    struct str out;
    str_init(&out, 0);
    add_item(NULL, "x", "1");
    for (uint32_t i = 0; i < 100; i++) {
        char process[32];
        snprintf(process, sizeof(process), "worker-%u", i);
        give(p, process);
    }
    page(p, &out);
    assert_int_equal(count_of(out.text, "x{process="), 32);
    str_fini(&out);
    gw_peers_destroy(&p);
}

int main(void)
{
    rng_init(&rng, 5);
    metric_observe(&theirs[1], &their_values[1], 0.1);
    metric_observe(&theirs[1], &their_values[1], 20);
    metric_observe(&theirs[1], &their_values[1], 10000);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(families_stand_together),
        cmocka_unit_test(rubbish_is_dropped),
        cmocka_unit_test(bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
