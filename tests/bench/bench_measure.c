/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_measure.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define LATE_US 10000u

struct bench_measure *bench_measure_create(void)
{
    return mem_take(sizeof(struct bench_measure));
}

void bench_measure_destroy(struct bench_measure **measure_p)
{
    mem_give(*measure_p);
    *measure_p = NULL;
}

static void count_name(struct bench_names *n, const char *name)
{
    if (name[0] == '\0')
        return;
    for (uint32_t i = 0; i < n->count; i++) {
        if (strcmp(n->names[i], name) == 0) {
            n->times[i]++;
            return;
        }
    }
    if (n->count == BENCH_NAMES_MAX) {
        snprintf(n->names[BENCH_NAMES_MAX - 1], BENCH_NAME_BYTES, "other");
        n->times[BENCH_NAMES_MAX - 1]++;
        return;
    }
    snprintf(n->names[n->count], BENCH_NAME_BYTES, "%s", name);
    n->times[n->count++] = 1;
}

void bench_measure_start(struct bench_measure *m)
{
    m->started_count++;
}

void bench_measure_tokens(struct bench_measure *m, uint64_t before_us, uint64_t now_us,
                          uint32_t tokens)
{
    CHECK(now_us >= before_us);
    m->live_token_count += tokens;
    if (before_us == 0)
        return;
    bench_hist_add(&m->gap, now_us - before_us, 1);
    if (tokens > 0)
        bench_hist_add(&m->token_gap, (now_us - before_us) / tokens, tokens);
}

static void add_receipt(struct bench_measure *m, const struct bench_result *r)
{
    const struct bench_receipt *t = &r->receipt;
    m->receipt_count++;
    m->receipt_token_count += r->completion_tokens;
    m->drafted += t->drafted;
    m->accepted += t->accepted;
    m->steps += t->steps;
    m->preempted += t->preempted;
    m->resumed += t->resumed;
    if (t->concurrency > m->concurrency_max)
        m->concurrency_max = t->concurrency;
    count_name(&m->specs, t->spec);
    struct bench_hist *const hists[] = {&m->queue, &m->prefill, &m->decode};
    const double ms[] = {t->queue_ms, t->prefill_ms, t->decode_ms};
    for (size_t i = 0; i < ARRAY_COUNT(ms); i++) {
        double us = ms[i] * 1000;
        bench_hist_add(hists[i],
                       us > 0 && us < 1e12 ? (uint64_t)us
                       : us > 0            ? BENCH_HIST_MAX
                                           : 0,
                       1);
    }
}

static void add_fault(struct bench_measure *m, const struct bench_result *r)
{
    m->faults[r->fault]++;
    if (!bench_result_failed(r))
        return;
    m->failed_count++;
    if (r->fault == BENCH_HTTP) {
        char status[BENCH_NAME_BYTES];
        snprintf(status, sizeof(status), "%d", r->http_status);
        count_name(&m->http_statuses, status);
    }
    for (uint32_t i = 0; i < m->sample_count; i++)
        if (strcmp(m->samples[i], r->detail) == 0)
            return;
    if (m->sample_count < BENCH_SAMPLES_MAX)
        memcpy(m->samples[m->sample_count++], r->detail, BENCH_TEXT_BYTES);
}

void bench_measure_end(struct bench_measure *m, const struct bench_result *r)
{
    CHECK(r->fault < BENCH_FAULT_COUNT);
    CHECK(r->end_us >= r->start_us && m->ended_count < m->started_count);
    m->ended_count++;
    if (m->first_start_us == 0 || r->start_us < m->first_start_us)
        m->first_start_us = r->start_us;
    if (r->end_us > m->last_end_us)
        m->last_end_us = r->end_us;
    m->late_start_count += r->start_us - r->due_us > LATE_US;
    add_fault(m, r);
    m->token_count += bench_result_tokens(r);
    if (r->first_us != 0) {
        bench_hist_add(&m->ttft, bench_result_ttft_us(r), 1);
        m->no_ids_count += !r->ids_seen;
    }
    double rate = bench_result_rate(r);
    if (rate > 0)
        bench_hist_add(&m->rate, (uint64_t)(rate * 1000 + 0.5), 1);
    if (r->has_usage) {
        m->prompt_token_count += r->prompt_tokens;
        m->cached_token_count += r->cached_tokens;
    }
    if (r->has_receipt)
        add_receipt(m, r);
    if (r->fault != BENCH_NONE)
        return;
    bench_hist_add(&m->duration, r->end_us - r->start_us, 1);
    count_name(&m->finishes, r->finish[0] ? r->finish : "none");
    m->no_usage_count += !r->has_usage;
    /* The end token is generated and counted, but has no text: servers differ on its id. */
    if (r->has_usage && r->ids_seen &&
        (r->completion_tokens < r->token_count || r->completion_tokens > r->token_count + 1))
        m->count_mismatch_count++;
}

double bench_measure_seconds(const struct bench_measure *m)
{
    uint64_t us = m->run_us ? m->run_us : m->last_end_us - m->first_start_us;
    return (double)us / 1e6;
}

double bench_measure_rate(const struct bench_measure *m)
{
    double seconds = bench_measure_seconds(m);
    return seconds > 0 ? (double)m->token_count / seconds : 0;
}
