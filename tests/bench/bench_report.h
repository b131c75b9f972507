/* SPDX-License-Identifier: Apache-2.0 */
/* tests/bench/bench_report.h - what was measured, as a table for people or as JSON.
 *
 * Pure text into a buffer; one owner thread. */
#ifndef TESTS_BENCH_BENCH_REPORT_H
#define TESTS_BENCH_BENCH_REPORT_H

#include <stdint.h>

struct bench_hist;
struct bench_interval;
struct bench_measure;
struct bench_options;
struct str;

void bench_report_table(struct str *out, const struct bench_measure *m);
/* One row: label, percentiles divided by scale. */
void bench_report_row(struct str *out, const char *label, const struct bench_hist *h, double scale);
void bench_report_head(struct str *out, const char *what);                /* the columns of rows */
void bench_report_errors(struct str *out, const struct bench_measure *m); /* nothing if none */

/* {"tool": ..., "url": ..., "options": {...} without the closing brace. */
void bench_report_json_open(struct str *out, const struct bench_options *o, const char *mode);
void bench_report_json(struct str *out, const struct bench_measure *m); /* one object */
void bench_report_json_hist(struct str *out, const struct bench_hist *h, double scale);
/* A number, or null where there is none. */
void bench_report_json_f64(struct str *out, const char *key, double value);
void bench_report_json_interval(struct str *out, const struct bench_interval *i);

#endif
