/* SPDX-License-Identifier: Apache-2.0 */
/* proto/msg.h - every message between processes as a plain struct (pure; cores see only these).
 *
 * A decoded message borrows arrays from the arena or the frames it was decoded from; they live
 * until the handler returns; whatever is kept is copied.  A NULL
 * text is sent as "" and never received.  wire_check has validated every count,
 * bound and enum named here before a core sees the message.  Flow: docs/architecture.md. */
#ifndef PROTO_MSG_H
#define PROTO_MSG_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

#define MSG_IDS_MAX          2097152u /* ids in a payload frame: 8 MiB */
#define MSG_TEXT_MAX         256u
#define MSG_STOP_IDS_MAX     64u
#define MSG_BIAS_MAX         1024u
#define MSG_TOP_LOGPROBS_MAX 20u
#define MSG_EMIT_IDS_MAX     1024u /* ids in one TokensEmitted */
#define MSG_CANARY_IDS_MAX   64u
#define MSG_BLOCKS_MAX       262144u /* block ids in one lease */
#define MSG_LIVE_IDS_MAX     8192u
#define MSG_DRAFT_IDS_MAX    16u
#define MSG_TAPS_MAX         16u
#define MSG_GRANTS_MAX       8u /* snapshot slots that a worker may write */
#define MSG_GROUPS_MAX       16u

enum msg_type { /* wire values: append only */
                MSG_NONE = 0,
                MSG_ROUTER_SUBMIT = 1,
                MSG_ROUTER_CANCEL = 2,
                MSG_SUBMIT_REPLY = 3,
                MSG_TOKENS_EMITTED = 4,
                MSG_WORKER_ASSIGN = 5,
                MSG_WORKER_CANCEL = 6,
                MSG_WORKER_DRAIN = 7,
                MSG_WORKER_RESUME = 8,
                MSG_ASSIGN_REPLY = 9,
                MSG_WORKER_STATE = 10,
                MSG_ROUTER_ANNOUNCE = 11,
                MSG_ROUTER_STATE = 12,
                MSG_KV_ATTACH = 20,
                MSG_KV_ATTACH_REPLY = 21,
                MSG_KV_OPEN = 22,
                MSG_KV_OPEN_REPLY = 23,
                MSG_KV_EXTEND = 24,
                MSG_KV_EXTEND_REPLY = 25,
                MSG_KV_COMMIT = 26,
                MSG_KV_SNAPSHOT = 27,
                MSG_KV_RELEASE = 28,
                MSG_KV_RECLAIM = 29,
                MSG_KV_PRESSURE = 30,
                MSG_KV_ADOPT = 31,
                MSG_KV_ADOPT_REPLY = 32,
                MSG_KV_PING = 33,
                MSG_KV_STATE = 34,
                MSG_KV_SNAPSHOT_REPLY = 35,
                MSG_DRAFT_HELLO = 40,
                MSG_DRAFT_HELLO_REPLY = 41,
                MSG_DRAFT_OPEN = 42,
                MSG_DRAFT_CONTEXT = 43,
                MSG_DRAFT_PROPOSE = 44,
                MSG_DRAFT_CLOSE = 45,
                MSG_DRAFT_REPLY = 46,
                MSG_STEP_PLAN = 50,
                MSG_STEP_DONE = 51,
};

/* 128-bit request id: random, made by the gateway, one per choice of a request. */
struct msg_id {
    uint8_t bytes[16];
};

enum msg_finish {
    MSG_FINISH_NONE = 0,   /* more to come */
    MSG_FINISH_STOP = 1,   /* a stop id was sampled (it is the last id) */
    MSG_FINISH_LENGTH = 2, /* output_tokens_max or the context is full */
    MSG_FINISH_CANCELLED = 3,
    MSG_FINISH_FAILED = 4, /* code says why */
};

struct msg_sampling {
    double temperature, top_p, min_p;
    uint32_t top_k;
    double repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    uint32_t choice;
    bool logprobs;
    uint32_t top_logprobs; /* <= MSG_TOP_LOGPROBS_MAX */
    uint32_t bias_count;   /* <= MSG_BIAS_MAX */
    const uint32_t *bias_ids;
    const float *bias_values;
};

struct msg_limits {
    uint32_t output_tokens_max; /* >= 1 */
    uint32_t output_tokens_min; /* stop ids are banned before this many */
    bool ignore_eos;            /* the model's own stop ids do not stop */
    uint32_t stop_id_count;     /* further stop ids, <= MSG_STOP_IDS_MAX */
    const uint32_t *stop_ids;
    uint64_t deadline_unix_us; /* 0 = none */
};

/* A request as gateway, router and worker know it (RouterSubmit, WorkerAssign).  ids = prompt and,
 * on a re-submission, the output tokens already final; the next token is output token
 * ids_count - prompt_count. */
struct msg_request {
    const char *session_key; /* text fields: NUL-terminated, <= MSG_TEXT_MAX bytes */
    const char *cache_salt;
    const char *effort; /* low, high, max; receipt only */
    const char *client_id;
    const char *spec; /* "" = the worker's own policy */
    int32_t priority; /* lower = earlier */
    uint32_t prompt_count;
    uint32_t ids_count;  /* prompt_count <= ids_count <= MSG_IDS_MAX, > 0 */
    const uint32_t *ids; /* payload frame */
    struct msg_sampling sampling;
    struct msg_limits limits;
    /* RouterSubmit: one of group_count choices of one client request, sent in order one after the
     * other; group_tokens = prompt tokens of all of them.  0 = alone. */
    uint64_t group_tokens;
    uint32_t group_index, group_count;
    /* RouterSubmit of a stream that has begun: as its tokens came; zeros = not known. */
    struct hash128 made_by;
    uint32_t attempt; /* 0 at first; counts assignments, in RouterSubmit repetitions */
    bool canary;      /* router's own; set on WorkerAssign only */
};

struct msg_receipt {
    uint32_t prompt_tokens, output_tokens, cached_tokens;
    uint32_t drafted, accepted, steps, preempted, resumed;
    uint32_t concurrency; /* requests running at admission, this one included */
    uint64_t queue_us, prefill_us, decode_us;
    uint64_t draft_us, verify_us; /* of decode_us: waited for drafts, verify steps computed */
    const char *spec;             /* effective policy */
    struct hash128 model_fp;
    const char *config_hash; /* hex */
};

/* Tokens of one request, in order.  seq = index of ids[0] among the output tokens: dense per
 * request; a receiver drops what it has and treats a jump as a gap. */
struct msg_tokens {
    uint32_t seq;
    uint32_t count; /* 0 allowed with a finish */
    const uint32_t *ids;
    bool logprobs;
    uint32_t top_count;      /* per token */
    const float *logprob;    /* [count] */
    const uint32_t *top_ids; /* [count * top_count] */
    const float *top_logprobs;
    uint32_t finish; /* enum msg_finish */
    uint32_t code;   /* enum err with MSG_FINISH_FAILED */
    /* With every finish but CANCELLED from afar; without a finish the counts so far,
     * and neither model_fp nor config_hash. */
    bool has_receipt;
    struct msg_receipt receipt;
    struct hash128 made_by; /* router -> gateway: kv_model_fp of whose tokens these are */
};

struct msg_submit_reply {
    uint32_t code; /* ERR_OK = accepted */
    uint32_t retry_after_ms;
    uint32_t concurrency;
    const char *text; /* what was refused and why; "" if accepted */
};

struct msg_assign_reply {
    uint32_t code;
    const char *text;
};

enum msg_worker_state {
    MSG_WORKER_LOADING = 1,
    MSG_WORKER_READY = 2,
    MSG_WORKER_DRAINING = 3,
    MSG_WORKER_FAILED = 4
};

struct msg_ledger { /* accepted = finished + failed + cancelled + live */
    uint64_t accepted, finished, failed, cancelled, live;
};

struct msg_worker_info { /* WorkerState: every 500 ms and on a change */
    uint32_t worker_id;
    uint64_t incarnation;
    uint32_t state; /* enum msg_worker_state */
    uint32_t seqs_live, seqs_max;
    uint64_t tokens_queued; /* prompt tokens not yet computed */
    uint32_t blocks_free, blocks_total, block_tokens;
    uint32_t context_max; /* the longest prompt + output it can take */
    uint32_t vocab_size;
    double decode_tokens_per_s, prefill_tokens_per_s;
    uint64_t step_us_last, gap_us_max;
    uint64_t step_age_us; /* since the step in flight began; 0 = none is */
    struct msg_ledger ledger;
    struct hash128 model_fp;
    const char *quantization;
    const char *numerics;
    const char *spec; /* default policy */
    const char *config_hash;
    const char *warnings;  /* ""; else one a line */
    uint32_t canary_count; /* prompt ids of the canary */
    const uint32_t *canary_ids;
    uint32_t canary_output_count; /* greedy ids that answer it */
    /* first 8 bytes of xxh3-128 over those ids as u32 LE, LE */
    uint64_t canary_hash;
    uint32_t drafter_state; /* 0 none, 1 up, 2 degraded (silent) */
    uint32_t kv_state;      /* 0 none, 1 attached, 2 silent */
    uint32_t group;         /* = id of the kvmgr that keeps its blocks, < MSG_GROUPS_MAX */
    /* Of that kvmgr and its arena, as its session maps are stamped; zeros = not attached.
     * kv_model_fp stands for checkpoint and numerics: who has the same goes on with any stream. */
    uint32_t kv_epoch;
    uint64_t kv_incarnation;
    struct hash128 kv_layout_fp, kv_model_fp;
};

struct msg_announce { /* gateway -> router every 500 ms: heartbeat */
    const char *kind; /* "gateway" */
    uint32_t id;
    uint64_t incarnation;
    uint32_t live_count;           /* <= MSG_LIVE_IDS_MAX; all requests the gateway still
                                               follows: the router cancels others of this gateway */
    const struct msg_id *live_ids; /* payload frame of 16-byte ids */
};

/* RouterState: router -> gateways, workers, every 500 ms */
struct msg_router_info {
    uint64_t incarnation;
    bool ready;         /* last canary on some worker was right and recent */
    const char *reason; /* why not */
    uint32_t workers_ready;
    uint32_t workers_live; /* heard and not failed: loading and drained ones too */
    uint32_t running, waiting;
    uint64_t tokens_waiting;
    uint32_t context_max; /* the largest of ready workers */
    uint32_t block_tokens, blocks_total, blocks_free;
    struct hash128 model_fp;
    const char *quantization;
    const char *spec;
    const char *config_hash; /* of the worker */
    const char *warnings;
    struct msg_ledger ledger;
};

/* ---- worker <-> kvmgr ---- */

struct msg_kv_attach { /* also repeated after a kvmgr restart */
    uint32_t worker_id;
    uint64_t incarnation;
    uint32_t dsa_layers, latent_dim, index_dim, index_kpool;
    uint64_t state_bytes; /* of one state slot's body */
    uint32_t seqs_max;    /* live state slots wanted */
    /* Context sharding: this arena holds the rows of one rank of `ranks`, `interleave` positions in
     * turn.  0, 1, 0: all rows. */
    uint32_t rank, ranks, interleave;
    struct hash128 model_fp;
    uint32_t rows_ranks; /* workers of the group: above 1 there are rows outside this arena */
    /* Of a rank above 0, to the kvmgr of its own node: what the authority's arena has.  0: lease
     * blocks, as rank 0 does. */
    uint32_t block_count, slot_count, live_slots, block_tokens;
    uint32_t kv_dtype, index_dtype, snapshot_dtype;
};
struct msg_kv_attach_reply {
    uint32_t code;
    const char *text;
    const char *arena_path;
    uint64_t incarnation; /* of kvmgr */
    uint32_t epoch;
    uint64_t arena_bytes;
    struct hash128 layout_fp; /* the worker computes kv_layout itself and compares */
    uint32_t block_tokens, block_count, slot_count;
    uint32_t kv_dtype, index_dtype; /* enum kv_dtype of proto/kv_layout.h */
    uint32_t snapshot_dtype;        /* the same, f32 or bf16 */
    uint32_t live_slots;            /* slots below are live ones, the others hold snapshots */
    uint32_t snapshot_every;        /* tokens between snapshots of a long prefill; 0 = none */
    uint32_t granted_count;         /* see msg_kv_snapshot_reply */
    const uint32_t *granted;
};

/* header id = request id.  A second open of the same request releases the first. */
struct msg_kv_open {
    const char *session_key, *cache_salt;
    uint32_t prompt_count;
    uint32_t blocks_wanted;       /* >= 1 */
    uint32_t hash_count;          /* chain hashes of the prompt's full blocks */
    const struct hash128 *hashes; /* payload frame */
    uint32_t reuse_max;           /* tokens that may come from the cache; 0 = none */
};
struct msg_kv_open_reply {
    uint32_t code; /* ERR_KV_FULL, ERR_EPOCH ... */
    const char *text;
    uint64_t lease;
    uint32_t epoch;
    uint32_t state_slot;
    uint32_t reusable_tokens; /* rows valid at the front; 0 without prefix reuse */
    uint32_t snapshot_slot;   /* UINT32_MAX = none */
    uint32_t block_count;
    const uint32_t *blocks; /* payload frame */
};
struct msg_kv_extend {
    uint64_t lease;
    uint32_t blocks_have, blocks_wanted; /* idempotent: lease shall hold have + wanted blocks */
};
struct msg_kv_extend_reply {
    uint32_t code;
    uint64_t lease;
    uint32_t blocks_have;
    uint32_t block_count;
    const uint32_t *blocks; /* the new ones; payload frame */
};
/* blocks [first, first + hash_count) are full and written */
struct msg_kv_commit {
    uint64_t lease;
    uint32_t first_block;
    uint32_t token_count; /* final tokens of the sequence so far */
    uint32_t hash_count;
    const struct hash128 *hashes; /* payload frame */
};
struct msg_kv_snapshot {
    uint64_t lease;
    uint32_t token_count;
    struct hash128 hash; /* chain hash at that boundary */
    uint32_t slot;       /* a granted one, which holds the copy now */
};
/* granted = all slots that this worker may write now; those that it has named in a KvSnapshot
 * without an answer are not free whatever a list says. */
struct msg_kv_snapshot_reply {
    uint32_t code; /* ERR_OK: kept.  Others: not kept */
    uint64_t lease;
    uint32_t slot;          /* as asked */
    uint32_t granted_count; /* <= MSG_GRANTS_MAX */
    const uint32_t *granted;
};
struct msg_kv_release {
    uint64_t lease;
    uint32_t token_count;
    bool keep; /* worth keeping (finished), else drop */
};
struct msg_kv_reclaim {
    uint64_t lease;
};
struct msg_kv_pressure {
    uint32_t blocks_free, blocks_total;
};
struct msg_kv_adopt_item {
    struct hash128 hash;
    uint32_t block;
};
struct msg_kv_adopt {
    const char *session_key;
    uint32_t count;
    const uint8_t *items; /* payload: count x 20 bytes {hash 16, block u32 LE} */
};
struct msg_kv_adopt_reply {
    uint32_t code;
    uint32_t valid_count; /* longest valid prefix */
};
/* every 500 ms; kvmgr drops leases that are not named */
struct msg_kv_ping {
    uint64_t incarnation; /* of the worker */
    uint32_t lease_count;
    const uint64_t *leases; /* payload frame, u64 LE */
};
struct msg_kv_state { /* answer to KvPing */
    uint64_t incarnation;
    uint32_t epoch;
    uint32_t blocks_free, blocks_leased, blocks_cached, blocks_total;
    uint32_t slots_free, slots_total; /* live */
    uint32_t snapshots_free, snapshots_total;
    uint64_t tokens_keepable; /* conversation tokens that can be kept beside running requests */
    uint32_t granted_count;   /* see msg_kv_snapshot_reply */
    const uint32_t *granted;
};

/* ---- worker <-> drafter ---- */

struct msg_draft_hello {
    uint64_t incarnation;
    uint32_t epoch;
    struct hash128 model_fp;
    uint32_t hidden, layers, vocab_size; /* of the target */
    const char *tap_ring;                /* path of the ring; "" = none yet */
    uint64_t tap_ring_incarnation;
    struct hash128 tokenizer_fp; /* lib/model/vocabulary.h */
    /* the ring holds context vectors that these weights made of the taps; zero: the taps */
    struct hash128 tap_context_fp;
};
struct msg_draft_hello_reply {
    uint64_t incarnation;
    const char *source; /* "ngram", "dflash" */
    uint32_t draft_tokens_max;
    /* hidden states that the source wants, in this order; none: it needs no taps */
    uint32_t tap_layer_count; /* 0..MSG_TAPS_MAX */
    const uint32_t *tap_layers;
    uint32_t tap_hidden, tap_type; /* enum tap_type */
    struct hash128 tap_context_fp; /* of the weights that make context vectors; zero: none */
};
/* tap_end: taps of all rows computed so far are in the ring's records before this number.
 * header id = request id; ids = payload: all tokens so far */
struct msg_draft_open {
    uint32_t epoch;
    uint64_t tap_end;
    uint32_t ids_count;
    const uint32_t *ids;
};
/* ids become tokens [base_length, base_length + count) */
struct msg_draft_context {
    uint32_t epoch;
    uint64_t tap_end;
    uint32_t base_length;
    uint32_t ids_count;
    const uint32_t *ids; /* payload frame */
};
/* ids as in DraftContext come along: one message a step */
struct msg_draft_propose {
    uint32_t epoch;
    uint64_t tap_end;
    uint32_t base_length; /* tokens the drafter must hold before ids */
    uint32_t anchor;      /* last token = token at length - 1 after ids */
    uint32_t draft_count; /* wanted, 1..MSG_DRAFT_IDS_MAX */
    uint64_t step;        /* echoed */
    const char *source;   /* "" = the drafter's own; "ngram" */
    uint32_t ids_count;
    const uint32_t *ids; /* payload frame */
};
struct msg_draft_reply {
    uint32_t code; /* ERR_NOT_FOUND: open again; ERR_EPOCH: stale base */
    uint32_t epoch;
    uint32_t base_length; /* length the drafts continue from */
    uint64_t step;
    uint32_t ids_count; /* 0..MSG_DRAFT_IDS_MAX */
    const uint32_t *ids;
};

/* ---- rank 0 <-> rank r ---- */

struct msg_step_plan {
    uint64_t step;
    uint32_t epoch_self, epoch_peer;
    struct hash128 plan_hash;
    uint32_t plan_bytes;
    const uint8_t *plan; /* payload: wk_plan encoding */
};
struct msg_step_done {
    uint64_t step;
    struct hash128 plan_hash;
    uint32_t status; /* enum err */
    uint64_t step_us;
};

struct msg {
    enum msg_type type;
    uint16_t flags;
    uint32_t epoch;   /* cluster epoch of the sender */
    struct msg_id id; /* request id, or step u64 LE + zeros, or zeros */
    union {
        struct msg_request request; /* ROUTER_SUBMIT, WORKER_ASSIGN */
        struct msg_submit_reply submit_reply;
        struct msg_tokens tokens;
        struct msg_assign_reply assign_reply;
        struct { /* WORKER_DRAIN; header id = worker id u64 LE + zeros, like WORKER_RESUME */
            uint64_t deadline_unix_us;
        } drain;
        struct msg_worker_info worker;
        struct msg_announce announce;
        struct msg_router_info router;
        struct msg_kv_attach kv_attach;
        struct msg_kv_attach_reply kv_attach_reply;
        struct msg_kv_open kv_open;
        struct msg_kv_open_reply kv_open_reply;
        struct msg_kv_extend kv_extend;
        struct msg_kv_extend_reply kv_extend_reply;
        struct msg_kv_commit kv_commit;
        struct msg_kv_snapshot kv_snapshot;
        struct msg_kv_snapshot_reply kv_snapshot_reply;
        struct msg_kv_release kv_release;
        struct msg_kv_reclaim kv_reclaim;
        struct msg_kv_pressure kv_pressure;
        struct msg_kv_adopt kv_adopt;
        struct msg_kv_adopt_reply kv_adopt_reply;
        struct msg_kv_ping kv_ping;
        struct msg_kv_state kv_state;
        struct msg_draft_hello draft_hello;
        struct msg_draft_hello_reply draft_hello_reply;
        struct msg_draft_open draft_open;
        struct msg_draft_context draft_context;
        struct msg_draft_propose draft_propose;
        struct msg_draft_reply draft_reply;
        struct msg_step_plan step_plan;
        struct msg_step_done step_done;
    } u; /* ROUTER_CANCEL, WORKER_CANCEL, WORKER_RESUME,
                                               DRAFT_CLOSE have no body fields */
};

#endif
