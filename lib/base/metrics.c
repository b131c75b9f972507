/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/metrics.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"

#define SAMPLE_BYTES 1024u
#define VALUE_BYTES  64u

/* clang-format off */
const struct metric_buckets metrics_buckets_ttft = {
    22, {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
         160, 640, 2560}};
const struct metric_buckets metrics_buckets_itl = {
    19, {.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}};
const struct metric_buckets metrics_buckets_latency = {
    21, {.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
         7680}};
const struct metric_buckets metrics_buckets_tokens = {
    19, {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000,
         200000, 500000, 1000000}};
const struct metric_buckets metrics_buckets_small = {7, {1, 2, 4, 8, 16, 32, 64}};
/* clang-format on */

void metric_observe(const struct metric_row *row, struct metric *m, double value)
{
    CHECK(row != NULL && m != NULL);
    CHECK(row->kind == METRIC_HISTOGRAM && row->buckets != NULL);
    CHECK(row->buckets->count <= METRIC_BUCKETS_MAX);
    uint32_t low = 0;
    uint32_t high = row->buckets->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (value <= row->buckets->upper[middle])
            high = middle;
        else
            low = middle + 1;
    }
    /* What is above the last bound shows in `observations` alone: that is the +Inf bucket. */
    if (low < row->buckets->count)
        m->bucket_counts[low]++;
    m->observations++;
    m->sum += value;
}

static void value_print(double value, char ret_text[VALUE_BYTES])
{
    if (isnan(value)) {
        snprintf(ret_text, VALUE_BYTES, "NaN");
    } else if (isinf(value)) {
        snprintf(ret_text, VALUE_BYTES, value > 0 ? "+Inf" : "-Inf");
    } else if (value == trunc(value) && fabs(value) < 1e15) {
        snprintf(ret_text, VALUE_BYTES, "%.0f", value == 0 ? 0.0 : value);
    } else {
        struct str text;
        str_init(&text, 0);
        json_write_f64(&text, value);
        snprintf(ret_text, VALUE_BYTES, "%s", text.text == NULL ? "NaN" : text.text);
        str_fini(&text);
    }
}

/* NAME+suffix{labels,common,le="x"}; le may be NULL. */
static void sample_print(const struct metric_row *row, const char *suffix, const char *common,
                         const char *le, char ret_text[SAMPLE_BYTES])
{
    const char *labels = row->labels == NULL ? "" : row->labels;
    bool first = labels[0] != '\0';
    bool second = common[0] != '\0';
    bool third = le != NULL;
    int count;
    if (!first && !second && !third)
        count = snprintf(ret_text, SAMPLE_BYTES, "%s%s", row->name, suffix);
    else
        count = snprintf(ret_text, SAMPLE_BYTES, "%s%s{%s%s%s%s%s%s%s}", row->name, suffix, labels,
                         first && (second || third) ? "," : "", common, second && third ? "," : "",
                         third ? "le=\"" : "", third ? le : "", third ? "\"" : "");
    /* Names and labels come from our tables and parameters, so this is a bound on those. */
    CHECK(count > 0 && (size_t)count < SAMPLE_BYTES);
}

static void histogram_each(const struct metric_row *row, const struct metric *m, const char *common,
                           metrics_sample_fn fn, void *arg)
{
    CHECK(row->buckets != NULL && row->buckets->count <= METRIC_BUCKETS_MAX);
    char sample[SAMPLE_BYTES];
    char value[VALUE_BYTES];
    char le[VALUE_BYTES];
    uint64_t total = 0;
    for (uint32_t i = 0; i < row->buckets->count; i++) {
        total += m->bucket_counts[i];
        value_print(row->buckets->upper[i], le);
        sample_print(row, "_bucket", common, le, sample);
        snprintf(value, sizeof value, "%" PRIu64, total);
        fn(arg, sample, value);
    }
    CHECK(total <= m->observations);
    snprintf(value, sizeof value, "%" PRIu64, m->observations);
    sample_print(row, "_bucket", common, "+Inf", sample);
    fn(arg, sample, value);
    sample_print(row, "_count", common, NULL, sample);
    fn(arg, sample, value);
    value_print(m->sum, value);
    sample_print(row, "_sum", common, NULL, sample);
    fn(arg, sample, value);
}

static void row_each(const struct metric_row *row, const struct metric *m, const char *common,
                     metrics_sample_fn fn, void *arg)
{
    CHECK(row->name != NULL && row->name[0] != '\0');
    if (row->kind == METRIC_HISTOGRAM) {
        histogram_each(row, m, common, fn, arg);
        return;
    }
    char sample[SAMPLE_BYTES];
    char value[VALUE_BYTES];
    sample_print(row, "", common, NULL, sample);
    value_print(m->value, value);
    fn(arg, sample, value);
}

void metrics_each(const struct metric_row *rows, const struct metric *values, size_t count,
                  const char *common_labels, metrics_sample_fn fn, void *arg)
{
    CHECK(rows != NULL || count == 0);
    CHECK(values != NULL || count == 0);
    CHECK(common_labels != NULL && fn != NULL);
    for (size_t i = 0; i < count; i++)
        row_each(&rows[i], &values[i], common_labels, fn, arg);
}

static void sample_append(void *arg, const char *sample, const char *value)
{
    str_add_format(arg, "%s %s\n", sample, value);
}

/* Before the first row of a name. */
static void describe_row(const struct metric_row *rows, size_t i, struct str *out)
{
    static const char *const kinds[] = {"counter", "gauge", "histogram"};
    CHECK((size_t)rows[i].kind < ARRAY_COUNT(kinds));
    if (i == 0 || strcmp(rows[i].name, rows[i - 1].name) != 0)
        str_add_format(out, "# HELP %s %s\n# TYPE %s %s\n", rows[i].name, rows[i].help,
                       rows[i].name, kinds[rows[i].kind]);
}

void metrics_describe(const struct metric_row *rows, size_t count, struct str *out)
{
    CHECK(rows != NULL || count == 0);
    for (size_t i = 0; i < count; i++)
        describe_row(rows, i, out);
}

void metrics_render(const struct metric_row *rows, const struct metric *values, size_t count,
                    const char *common_labels, struct str *out)
{
    CHECK(rows != NULL || count == 0);
    CHECK(common_labels != NULL && out != NULL);
    for (size_t i = 0; i < count; i++) {
        describe_row(rows, i, out);
        row_each(&rows[i], &values[i], common_labels, sample_append, out);
    }
}
