/* SPDX-License-Identifier: Apache-2.0 */
/* gateway/gw_shell_state.h - the shell's data, shared by its files only.
 *
 * Owned by the loop thread.  An exchange is one request from its complete body to the end of its
 * answer; there are params.requests_max of them, taken at start. */
#ifndef GATEWAY_GW_SHELL_STATE_H
#define GATEWAY_GW_SHELL_STATE_H

#include "gateway/gw_answer.h"
#include "gateway/gw_checkpoint.h"
#include "gateway/gw_core.h"
#include "gateway/gw_http.h"
#include "gateway/gw_params.h"
#include "gateway/gw_sse.h"
#include "gateway/gw_tokenize.h"
#include "lib/base/metrics.h"

#define GW_SHELL_MAGIC   0x47575348u
#define GW_KEYS_MAX      64u
#define GW_KEY_BYTES_MAX 256u
#define GW_SCRATCH_COUNT 3
#define GW_TEXT_MAX      4097

enum {
#define COUNTER(ident, ...)   GW_M_##ident,
#define GAUGE(ident, ...)     GW_M_##ident,
#define HISTOGRAM(ident, ...) GW_M_##ident,
#include "gateway/gw_metrics.def"
#undef COUNTER
#undef GAUGE
#undef HISTOGRAM
    GW_M_COUNT
};

extern const struct metric_row gw_metric_rows[GW_M_COUNT];

struct gw_shell;
struct bus;
struct bus_socket;
struct gw_status;
struct redis;

enum exchange_state {
    EXCHANGE_FREE,
    EXCHANGE_TEXT,   /* with a tokenizer thread */
    EXCHANGE_ENGINE, /* submitted */
};

struct gw_exchange {
    enum exchange_state state;
    struct gw_shell *shell;
    struct gw_http_request *http; /* NULL: the client is gone */
    struct gw_job job;
    struct gw_answer answer;
    bool answer_open;
    bool streaming;
    struct gw_sse sse;
    bool in_core; /* flow is valid */
    uint32_t flow;
    bool gone_pending; /* the answer failed: CLOSE is on its way */
    uint64_t received_us, submitted_us;
    uint64_t first_us, last_us; /* tokens of any choice */
    uint32_t live_index;
};

/* The latest RouterState. */
struct gw_router {
    bool known;
    bool ready;
    uint64_t seen_us, incarnation;
    uint64_t live_us; /* when it knew of a living worker last, or began */
    uint32_t workers_ready, running, waiting, context_max;
    uint32_t block_tokens, blocks_total, blocks_free;
    char model_fp[33];
    char spec[MSG_TEXT_MAX + 1], config_hash[MSG_TEXT_MAX + 1];
    char reason[GW_TEXT_MAX], quantization[GW_TEXT_MAX], warnings[GW_TEXT_MAX];
};

/* What one step of the core makes necessary; done when its actions are. */
enum deferred_type { DEFER_CUT, DEFER_CLOSE, DEFER_BUSY, DEFER_COMPLETE };
struct gw_deferred {
    enum deferred_type type;
    uint32_t flow, choice;
    struct msg_id id;
    struct gw_exchange *exchange;
};

struct gw_shell {
    uint32_t magic;
    const struct gw_params *params;
    struct loop *loop;
    struct gw_checkpoint checkpoint;
    struct gw_http *http;
    struct gw_tokenize *tokenize;
    struct gw_core *core;
    struct gw_actions actions;
    struct bus *bus;
    struct bus_socket *socket;
    struct redis *redis;
    struct gw_status *status;
    struct loop_timer *tick_timer;
    struct arena wire_in, wire_out;
    uint64_t incarnation, announced_us;
    uint64_t connected_us;
    bool reconnected; /* since the last RouterState */
    struct gw_router router;
    struct msg_id *live_ids;
    uint32_t *resubmit_ids; /* prompt and output of one leg, taken when first needed */

    struct gw_exchange *exchanges;
    struct gw_exchange **free_list;
    struct gw_exchange **live;
    uint32_t free_count, live_count;

    bool stepping;
    uint32_t deferred_count, deferred_max;
    struct gw_deferred *deferred;

    struct str scratch[GW_SCRATCH_COUNT];
    struct str sse_buffer;
    struct str reply;
    struct metric metrics[GW_M_COUNT];

    uint32_t key_count;
    char keys[GW_KEYS_MAX][GW_KEY_BYTES_MAX];
    bool draining;
    uint64_t drain_until_us, idle_since_us;
    void (*drained)(void *arg);
    void *drained_arg;
};

/* gw_shell.c */
void gw_shell_step(struct gw_shell *s, struct gw_event *event);
void gw_shell_defer(struct gw_shell *s, const struct gw_deferred *d);
uint64_t gw_shell_now(struct gw_shell *s);
void gw_metric_add(struct gw_shell *s, uint32_t metric, double amount);
void gw_metric_observe(struct gw_shell *s, uint32_t metric, double value);

/* gw_exchange.c: one request with the engine, driven by the core's actions */
void gw_exchange_start(struct gw_shell *s, struct gw_http_request *http, enum gw_endpoint endpoint);
void gw_exchange_text_done(void *arg, struct gw_job *job);
void gw_exchange_action(struct gw_shell *s, const struct gw_action *a, const struct gw_event *e);
void gw_exchange_complete(struct gw_exchange *x);
void gw_exchange_gone(struct gw_exchange *x, enum gw_http_gone why);
void gw_exchange_fail_all(struct gw_shell *s, enum err code);
void gw_exchange_tick(struct gw_shell *s, uint64_t now_us);

/* gw_shell_http.c: routes */
void gw_shell_http_head(void *arg, struct gw_http_request *r);
void gw_shell_http_request(void *arg, struct gw_http_request *r);
void gw_shell_http_gone(void *arg, struct gw_http_request *r, enum gw_http_gone why);
void gw_shell_refuse(struct gw_shell *s, struct gw_http_request *r,
                     const struct gw_refusal *refusal, const char *headers);

/* gw_models.c: answers that need no engine */
/* Tokens of prompt and answer together: what the model allows, or less if the pool holds less. */
uint32_t gw_shell_window(const struct gw_shell *s);
void gw_models_list(struct gw_shell *s, struct gw_http_request *r);
void gw_models_one(struct gw_shell *s, struct gw_http_request *r, const char *id);
void gw_models_version(struct gw_shell *s, struct gw_http_request *r);
void gw_models_health(struct gw_shell *s, struct gw_http_request *r);
void gw_models_ready(struct gw_shell *s, struct gw_http_request *r);
void gw_models_load(struct gw_shell *s, struct gw_http_request *r);
void gw_models_metrics(struct gw_shell *s, struct gw_http_request *r);

/* gw_status.c: own window, and the other processes' metrics */
MUST_USE enum err gw_status_create(struct gw_shell *s, struct gw_status **ret_status,
                                   struct err_detail *detail);
void gw_status_destroy(struct gw_status **status_p);
void gw_status_tick(struct gw_status *t, uint64_t now_us);
void gw_status_metrics(struct gw_status *t, struct str *out);
bool gw_shell_ready(struct gw_shell *s, const char **ret_reason);

#endif
