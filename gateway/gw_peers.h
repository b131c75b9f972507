/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_peers.h - the other processes' metrics, as they left them in Redis, on one page with
 * our own.
 *
 * Owned by the loop thread.  Up to 32 processes of 4096 samples.  What comes from Redis is checked:
 * a sample that is no valid line of Prometheus' text format is dropped. */
#ifndef GATEWAY_GW_PEERS_H
#define GATEWAY_GW_PEERS_H

#include <stddef.h>
#include <stdint.h>

struct gw_peers;
struct metric;
struct metric_row;
struct redis;
struct redis_value;
struct str;

struct gw_peers_options {
    struct redis *redis; /* borrowed; may be NULL */
    const char *cluster;
    uint32_t own_id;
    const char *vllm_labels; /* added to vllm: samples that lack them: model_name, engine */
};

struct gw_peers *gw_peers_create(const struct gw_peers_options *options);
/* After redis_destroy: replies on their way need the object. */
void gw_peers_destroy(struct gw_peers **peers_p);
/* Asks Redis every 2 s. */
void gw_peers_tick(struct gw_peers *p, uint64_t now_us);
/* One page: every family once, with HELP and TYPE; our own first. */
void gw_peers_render(const struct gw_peers *p, const struct metric_row *rows,
                     const struct metric *values, size_t count, const char *labels,
                     struct str *out);

/* What a process of this name ("worker-0") published: hash (name, value, ...) and HELP lines.  For
 * tests, and for the replies of Redis. */
void gw_peers_take(struct gw_peers *p, const char *process, const struct redis_value *hash);
void gw_peers_take_help(struct gw_peers *p, const char *process, const char *text, size_t bytes);

#endif
