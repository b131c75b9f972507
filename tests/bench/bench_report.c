/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_report.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"
#include "tests/bench/bench_measure.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/bench_stats.h"

#define MS   1000.0 /* histograms count microseconds */
#define RATE 1000.0 /* and thousandths of a token a second */

static const double shares[] = {0.5, 0.9, 0.99};
static const char *const share_names[] = {"p50", "p90", "p99"};

/* ---- table ---- */

void bench_report_head(struct str *out, const char *what)
{
    str_add_format(out, "%-26s %9s %9s %9s %9s %9s %9s\n", what, "mean", "min", "p50", "p90", "p99",
                   "max");
}

void bench_report_row(struct str *out, const char *label, const struct bench_hist *h, double scale)
{
    CHECK(scale > 0);
    if (h->count == 0) {
        str_add_format(out, "%-26s %9s\n", label, "-");
        return;
    }
    str_add_format(out, "%-26s %9.2f %9.2f", label, bench_hist_mean(h) / scale,
                   (double)h->min / scale);
    for (size_t i = 0; i < ARRAY_COUNT(shares); i++)
        str_add_format(out, " %9.2f", (double)bench_hist_percentile(h, shares[i]) / scale);
    str_add_format(out, " %9.2f\n", (double)h->max / scale);
}

static void names_line(struct str *out, const char *label, const struct bench_names *n)
{
    if (n->count == 0)
        return;
    str_add_format(out, "%-26s", label);
    for (uint32_t i = 0; i < n->count; i++)
        str_add_format(out, " %s %" PRIu64, n->names[i], n->times[i]);
    str_add_char(out, '\n');
}

void bench_report_errors(struct str *out, const struct bench_measure *m)
{
    if (m->failed_count == 0)
        return;
    str_add_format(out, "%-26s", "errors");
    for (uint32_t i = 0; i < BENCH_FAULT_COUNT; i++)
        if (m->faults[i] > 0 && i != BENCH_NONE && i != BENCH_STOPPED)
            str_add_format(out, " %s %" PRIu64, bench_fault_name((enum bench_fault)i),
                           m->faults[i]);
    str_add_char(out, '\n');
    names_line(out, "  by status", &m->http_statuses);
    for (uint32_t i = 0; i < m->sample_count; i++)
        str_add_format(out, "  %s\n", m->samples[i]);
}

static void receipts(struct str *out, const struct bench_measure *m)
{
    if (m->receipt_count == 0)
        return;
    bench_report_row(out, "queue ms", &m->queue, MS);
    bench_report_row(out, "prefill ms", &m->prefill, MS);
    bench_report_row(out, "decode ms", &m->decode, MS);
    names_line(out, "speculation", &m->specs);
    str_add_format(out, "%-26s %" PRIu64 " drafted, %" PRIu64 " accepted", "drafts", m->drafted,
                   m->accepted);
    if (m->drafted > 0)
        str_add_format(out, " (%.1f %%)", 100.0 * (double)m->accepted / (double)m->drafted);
    if (m->steps > 0)
        str_add_format(out, ", %.2f tokens a step",
                       (double)m->receipt_token_count / (double)m->steps);
    str_add_char(out, '\n');
    if (m->preempted + m->resumed > 0)
        str_add_format(out, "%-26s %" PRIu64 " preempted, %" PRIu64 " resumed\n", "interruptions",
                       m->preempted, m->resumed);
}

void bench_report_table(struct str *out, const struct bench_measure *m)
{
    str_add_format(out,
                   "%-26s %" PRIu64 " started, %" PRIu64 " finished, %" PRIu64 " stopped, %" PRIu64
                   " failed in %.2f s\n",
                   "streams", m->started_count, m->faults[BENCH_NONE], m->faults[BENCH_STOPPED],
                   m->failed_count, bench_measure_seconds(m));
    str_add_format(out,
                   "%-26s %" PRIu64 " generated, %.1f tok/s in all; prompts %" PRIu64
                   ", of them cached %" PRIu64 "\n\n",
                   "tokens", m->token_count, bench_measure_rate(m), m->prompt_token_count,
                   m->cached_token_count);
    bench_report_head(out, "");
    bench_report_row(out, "first token ms", &m->ttft, MS);
    bench_report_row(out, "gap between events ms", &m->gap, MS);
    bench_report_row(out, "time per token ms", &m->token_gap, MS);
    bench_report_row(out, "tok/s of a stream", &m->rate, RATE);
    bench_report_row(out, "whole stream ms", &m->duration, MS);
    receipts(out, m);
    names_line(out, "finish", &m->finishes);
    if (m->no_ids_count > 0)
        str_add_format(out, "%-26s %" PRIu64 " streams without token_ids: counted by usage\n",
                       "note", m->no_ids_count);
    if (m->no_usage_count > 0)
        str_add_format(out, "%-26s %" PRIu64 " streams without usage\n", "note", m->no_usage_count);
    if (m->count_mismatch_count > 0)
        str_add_format(out, "%-26s %" PRIu64 " streams whose token_ids and usage differ\n", "note",
                       m->count_mismatch_count);
    if (m->late_start_count > 0)
        str_add_format(out, "%-26s %" PRIu64 " requests waited for a free stream\n", "note",
                       m->late_start_count);
    bench_report_errors(out, m);
}

/* ---- JSON ---- */

void bench_report_json_f64(struct str *out, const char *key, double value)
{
    str_add_format(out, "\"%s\":", key);
    if (isfinite(value))
        json_write_f64(out, value);
    else
        str_add_text(out, "null");
}

void bench_report_json_hist(struct str *out, const struct bench_hist *h, double scale)
{
    str_add_format(out, "{\"count\":%" PRIu64, h->count);
    if (h->count > 0) {
        str_add_char(out, ',');
        bench_report_json_f64(out, "mean", bench_hist_mean(h) / scale);
        str_add_char(out, ',');
        bench_report_json_f64(out, "min", (double)h->min / scale);
        for (size_t i = 0; i < ARRAY_COUNT(shares); i++) {
            str_add_char(out, ',');
            bench_report_json_f64(out, share_names[i],
                                  (double)bench_hist_percentile(h, shares[i]) / scale);
        }
        str_add_char(out, ',');
        bench_report_json_f64(out, "max", (double)h->max / scale);
    }
    str_add_char(out, '}');
}

void bench_report_json_interval(struct str *out, const struct bench_interval *i)
{
    str_add_format(out, "{\"pairs\":%zu,", i->count);
    bench_report_json_f64(out, "median", i->count ? i->median : (double)NAN);
    str_add_char(out, ',');
    bench_report_json_f64(out, "low", i->count ? i->low : (double)NAN);
    str_add_char(out, ',');
    bench_report_json_f64(out, "high", i->count ? i->high : (double)NAN);
    str_add_char(out, '}');
}

static void json_names(struct str *out, const char *key, const struct bench_names *n)
{
    str_add_format(out, ",\"%s\":{", key);
    for (uint32_t i = 0; i < n->count; i++) {
        if (i > 0)
            str_add_char(out, ',');
        json_write_string(out, n->names[i], strlen(n->names[i]));
        str_add_format(out, ":%" PRIu64, n->times[i]);
    }
    str_add_char(out, '}');
}

static void json_string(struct str *out, const char *key, const char *text)
{
    str_add_format(out, "\"%s\":", key);
    json_write_string(out, text, strlen(text));
}

void bench_report_json_open(struct str *out, const struct bench_options *o, const char *mode)
{
    str_add_text(out, "{\"tool\":\"tandem-bench\",\"version\":\"" TANDEM_VERSION "\",");
    json_string(out, "mode", mode);
    str_add_text(out, ",\"options\":{");
    bool first = true;
#define VALUE_u32(key, value)  str_add_format(out, "\"%s\":%u", key, value)
#define VALUE_flag(key, value) str_add_format(out, "\"%s\":%s", key, (value) ? "true" : "false")
#define VALUE_u64(key, value)  str_add_format(out, "\"%s\":%" PRIu64, key, value)
#define VALUE_f64(key, value)  bench_report_json_f64(out, key, value)
#define VALUE_str(key, value)  json_string(out, key, value)
#define BENCH_OPTION(name, type, ...)                                                              \
    if (!first)                                                                                    \
        str_add_char(out, ',');                                                                    \
    first = false;                                                                                 \
    VALUE_##type(#name, o->name);
#include "tests/bench/bench_options.def"
#undef BENCH_OPTION
    str_add_char(out, '}');
}

static void json_errors(struct str *out, const struct bench_measure *m)
{
    str_add_format(out, ",\"failed\":%" PRIu64 ",\"errors\":{", m->failed_count);
    bool first = true;
    for (uint32_t i = 0; i < BENCH_FAULT_COUNT; i++) {
        if (m->faults[i] == 0 || i == BENCH_NONE || i == BENCH_STOPPED)
            continue;
        str_add_format(out, "%s\"%s\":%" PRIu64, first ? "" : ",",
                       bench_fault_name((enum bench_fault)i), m->faults[i]);
        first = false;
    }
    str_add_char(out, '}');
    json_names(out, "http_statuses", &m->http_statuses);
    str_add_text(out, ",\"error_samples\":[");
    for (uint32_t i = 0; i < m->sample_count; i++) {
        if (i > 0)
            str_add_char(out, ',');
        size_t bytes = strlen(m->samples[i]); /* may have been cut inside a character */
        json_write_string(out, m->samples[i], utf8_valid_prefix(m->samples[i], bytes));
    }
    str_add_char(out, ']');
}

static void json_receipts(struct str *out, const struct bench_measure *m)
{
    str_add_format(out,
                   ",\"receipts\":{\"count\":%" PRIu64 ",\"drafted\":%" PRIu64
                   ",\"accepted\":%" PRIu64 ",\"steps\":%" PRIu64 ",",
                   m->receipt_count, m->drafted, m->accepted, m->steps);
    bench_report_json_f64(out, "acceptance",
                          m->drafted ? (double)m->accepted / (double)m->drafted : (double)NAN);
    str_add_char(out, ',');
    bench_report_json_f64(out, "tokens_per_step",
                          m->steps ? (double)m->receipt_token_count / (double)m->steps
                                   : (double)NAN);
    str_add_format(
        out, ",\"preempted\":%" PRIu64 ",\"resumed\":%" PRIu64 ",\"concurrency_max\":%" PRIu64,
        m->preempted, m->resumed, m->concurrency_max);
    json_names(out, "specs", &m->specs);
    str_add_char(out, '}');
}

void bench_report_json(struct str *out, const struct bench_measure *m)
{
    str_add_format(out, "{\"started\":%" PRIu64 ",\"finished\":%" PRIu64 ",\"stopped\":%" PRIu64,
                   m->started_count, m->faults[BENCH_NONE], m->faults[BENCH_STOPPED]);
    json_errors(out, m);
    str_add_char(out, ',');
    bench_report_json_f64(out, "seconds", bench_measure_seconds(m));
    str_add_format(
        out, ",\"tokens\":%" PRIu64 ",\"prompt_tokens\":%" PRIu64 ",\"cached_tokens\":%" PRIu64 ",",
        m->token_count, m->prompt_token_count, m->cached_token_count);
    bench_report_json_f64(out, "tokens_per_s", bench_measure_rate(m));
    const struct {
        const char *key;
        const struct bench_hist *hist;
        double scale;
    } hists[] = {
        {"ttft_ms", &m->ttft, MS},           {"gap_ms", &m->gap, MS},
        {"token_gap_ms", &m->token_gap, MS}, {"stream_tokens_per_s", &m->rate, RATE},
        {"duration_ms", &m->duration, MS},   {"queue_ms", &m->queue, MS},
        {"prefill_ms", &m->prefill, MS},     {"decode_ms", &m->decode, MS},
    };
    for (size_t i = 0; i < ARRAY_COUNT(hists); i++) {
        str_add_format(out, ",\"%s\":", hists[i].key);
        bench_report_json_hist(out, hists[i].hist, hists[i].scale);
    }
    json_receipts(out, m);
    json_names(out, "finish", &m->finishes);
    str_add_format(out,
                   ",\"no_usage\":%" PRIu64 ",\"no_token_ids\":%" PRIu64
                   ",\"count_mismatch\":%" PRIu64 ",\"late_starts\":%" PRIu64 "}",
                   m->no_usage_count, m->no_ids_count, m->count_mismatch_count,
                   m->late_start_count);
}
