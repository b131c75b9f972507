/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/metrics.h - counters, gauges and histograms from X-macro tables.
 *
 * Owned by the loop thread; plain integers and doubles, no atomics.  A process writes
 * <role>/xx_metrics.def with
 *
 *     COUNTER(ident, "exposed_name_total", "label=\"x\"" or "", "Help.")
 *     GAUGE(ident, "exposed_name", "", "Help.")
 *     HISTOGRAM(ident, "exposed_name", "", metrics_buckets_ttft, "Help.")
 *
 * Several rows may share an exposed name with different labels; they must stand together. */
#ifndef LIB_BASE_METRICS_H
#define LIB_BASE_METRICS_H

#include <stddef.h>
#include <stdint.h>

struct str;

enum metric_kind { METRIC_COUNTER, METRIC_GAUGE, METRIC_HISTOGRAM };

#define METRIC_BUCKETS_MAX 40

struct metric_buckets {
    uint32_t count;
    double upper[METRIC_BUCKETS_MAX];
};

struct metric {
    double value; /* counter, gauge */
    double sum;   /* histogram */
    uint64_t observations;
    uint64_t bucket_counts[METRIC_BUCKETS_MAX]; /* not cumulative */
};

struct metric_row {
    enum metric_kind kind;
    const char *name;
    const char *labels; /* may be "" */
    const struct metric_buckets *buckets;
    const char *help;
};

extern const struct metric_buckets metrics_buckets_ttft; /* http-api.md 9 */
extern const struct metric_buckets metrics_buckets_itl;
extern const struct metric_buckets metrics_buckets_latency;
extern const struct metric_buckets metrics_buckets_tokens; /* 1-2-5 ladder to 1 M */
extern const struct metric_buckets metrics_buckets_small;  /* 1..64 in powers of two */

static inline void metric_add(struct metric *m, double amount)
{
    m->value += amount;
}
static inline void metric_set(struct metric *m, double value)
{
    m->value = value;
}
void metric_observe(const struct metric_row *row, struct metric *m, double value);

/* Appends Prometheus text with HELP and TYPE.  common_labels ("a=\"b\"" or "") goes into every
 * sample. */
void metrics_render(const struct metric_row *rows, const struct metric *values, size_t count,
                    const char *common_labels, struct str *out);

/* HELP and TYPE of every name, without samples. */
void metrics_describe(const struct metric_row *rows, size_t count, struct str *out);

/* Calls back with every sample as (full name with labels, value text): what goes into the Redis
 * metrics hash.  Histogram buckets are cumulative, as Prometheus wants them. */
typedef void (*metrics_sample_fn)(void *arg, const char *sample, const char *value);
void metrics_each(const struct metric_row *rows, const struct metric *values, size_t count,
                  const char *common_labels, metrics_sample_fn fn, void *arg);

#endif
