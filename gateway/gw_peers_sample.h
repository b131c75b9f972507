/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_peers_sample.h - one sample of another process: checked, labelled, put in order.
 *
 * Any thread; pure but for the memory that `text` grows. */
#ifndef GATEWAY_GW_PEERS_SAMPLE_H
#define GATEWAY_GW_PEERS_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct str;

struct gw_sample {
    const char *family;               /* name without what a histogram appends */
    const char *process;              /* borrowed */
    const char *line;                 /* name{labels} value */
    uint32_t family_at, line_at;      /* in the text, until it is settled */
    uint32_t labels_at, labels_bytes; /* in the line: labels without le */
    uint32_t part; /* 0 _bucket, 1 _count, 2 _sum; 0 of all that is no histogram */
    double le;
};

struct gw_sample_source {
    const char *process;
    const char *vllm_labels; /* added to vllm: names that lack them */
    const char *help;        /* checked lines of that process: what is a histogram */
    const char *name;        /* name{labels}, as in Redis */
    size_t name_bytes;
    const char *value;
    size_t value_bytes;
};

/* Appends family and line to text.  False: not a sample, nothing is kept of it. */
bool gw_sample_make(const struct gw_sample_source *source, struct str *text,
                    struct gw_sample *ret_sample);
/* Once the text no longer moves. */
void gw_samples_settle(struct gw_sample *samples, uint32_t count, const char *text);
/* Within one family and process: by labels, buckets by their bound. */
int gw_sample_compare(const struct gw_sample *a, const struct gw_sample *b);

/* Keeps the lines that are "# HELP name text" and "# TYPE name kind". */
void gw_help_take(const char *text, size_t bytes, struct str *out);
/* Writes both lines of a family; false if its TYPE is not there. */
bool gw_help_write(const char *help, const char *family, struct str *out);

#endif
