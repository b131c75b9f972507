/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of kv.proto. */
#include "proto/wire_table.h"

#include "proto/kv.pb-c.h"

#define M struct msg_kv_attach
#define P Tandem__V1__KvAttach
static const struct wire_field attach_rows[] = {
    WIRE_ROW_U32(worker_id),    WIRE_ROW_U64(incarnation),    WIRE_ROW_U32(dsa_layers),
    WIRE_ROW_U32(latent_dim),   WIRE_ROW_U32(index_dim),      WIRE_ROW_U32(index_kpool),
    WIRE_ROW_U64(state_bytes),  WIRE_ROW_U32(seqs_max),       WIRE_ROW_U32(rank),
    WIRE_ROW_U32(ranks),        WIRE_ROW_HASH(model_fp),      WIRE_ROW_U32(interleave),
    WIRE_ROW_U32(rows_ranks),   WIRE_ROW_U32(block_count),    WIRE_ROW_U32(slot_count),
    WIRE_ROW_U32(block_tokens), WIRE_ROW_U32(kv_dtype),       WIRE_ROW_U32(index_dtype),
    WIRE_ROW_U32(live_slots),   WIRE_ROW_U32(snapshot_dtype),
};
#undef M
#undef P
static const struct wire_struct attach_table =
    WIRE_STRUCT(tandem__v1__kv_attach__descriptor, attach_rows);

#define M struct msg_kv_attach_reply
#define P Tandem__V1__KvAttachReply
static const struct wire_field attach_reply_rows[] = {
    WIRE_ROW_U32(code),
    WIRE_ROW_TEXT(text),
    WIRE_ROW_TEXT(arena_path),
    WIRE_ROW_U64(incarnation),
    WIRE_ROW_U32(epoch),
    WIRE_ROW_U64(arena_bytes),
    WIRE_ROW_HASH(layout_fp),
    WIRE_ROW_U32(block_tokens),
    WIRE_ROW_U32(block_count),
    WIRE_ROW_U32(slot_count),
    WIRE_ROW_U32(kv_dtype),
    WIRE_ROW_U32(index_dtype),
    WIRE_ROW_U32(live_slots),
    WIRE_ROW_U32(snapshot_every),
    WIRE_ROW_IDS(granted, granted_count),
    WIRE_ROW_U32(snapshot_dtype),
};
#undef M
#undef P
static const struct wire_struct attach_reply_table =
    WIRE_STRUCT(tandem__v1__kv_attach_reply__descriptor, attach_reply_rows);

#define M struct msg_kv_open
#define P Tandem__V1__KvOpen
static const struct wire_field open_rows[] = {
    WIRE_ROW_TEXT(session_key),  WIRE_ROW_TEXT(cache_salt), WIRE_ROW_U32(prompt_count),
    WIRE_ROW_U32(blocks_wanted), WIRE_ROW_U32(hash_count),  WIRE_ROW_U32(reuse_max),
};
#undef M
#undef P
static const struct wire_struct open_table =
    WIRE_STRUCT(tandem__v1__kv_open__descriptor, open_rows);

#define M struct msg_kv_open_reply
#define P Tandem__V1__KvOpenReply
static const struct wire_field open_reply_rows[] = {
    WIRE_ROW_U32(code),          WIRE_ROW_TEXT(text),       WIRE_ROW_U64(lease),
    WIRE_ROW_U32(epoch),         WIRE_ROW_U32(state_slot),  WIRE_ROW_U32(reusable_tokens),
    WIRE_ROW_U32(snapshot_slot), WIRE_ROW_U32(block_count),
};
#undef M
#undef P
static const struct wire_struct open_reply_table =
    WIRE_STRUCT(tandem__v1__kv_open_reply__descriptor, open_reply_rows);

#define M struct msg_kv_extend
#define P Tandem__V1__KvExtend
static const struct wire_field extend_rows[] = {
    WIRE_ROW_U64(lease),
    WIRE_ROW_U32(blocks_have),
    WIRE_ROW_U32(blocks_wanted),
};
#undef M
#undef P
static const struct wire_struct extend_table =
    WIRE_STRUCT(tandem__v1__kv_extend__descriptor, extend_rows);

#define M struct msg_kv_extend_reply
#define P Tandem__V1__KvExtendReply
static const struct wire_field extend_reply_rows[] = {
    WIRE_ROW_U32(code),
    WIRE_ROW_U64(lease),
    WIRE_ROW_U32(blocks_have),
    WIRE_ROW_U32(block_count),
};
#undef M
#undef P
static const struct wire_struct extend_reply_table =
    WIRE_STRUCT(tandem__v1__kv_extend_reply__descriptor, extend_reply_rows);

#define M struct msg_kv_commit
#define P Tandem__V1__KvCommit
static const struct wire_field commit_rows[] = {
    WIRE_ROW_U64(lease),
    WIRE_ROW_U32(first_block),
    WIRE_ROW_U32(token_count),
    WIRE_ROW_U32(hash_count),
};
#undef M
#undef P
static const struct wire_struct commit_table =
    WIRE_STRUCT(tandem__v1__kv_commit__descriptor, commit_rows);

#define M struct msg_kv_snapshot
#define P Tandem__V1__KvSnapshot
static const struct wire_field snapshot_rows[] = {
    WIRE_ROW_U64(lease),
    WIRE_ROW_U32(token_count),
    WIRE_ROW_HASH(hash),
    WIRE_ROW_U32(slot),
};
#undef M
#undef P
static const struct wire_struct snapshot_table =
    WIRE_STRUCT(tandem__v1__kv_snapshot__descriptor, snapshot_rows);

#define M struct msg_kv_snapshot_reply
#define P Tandem__V1__KvSnapshotReply
static const struct wire_field snapshot_reply_rows[] = {
    WIRE_ROW_U32(code),
    WIRE_ROW_U64(lease),
    WIRE_ROW_U32(slot),
    WIRE_ROW_IDS(granted, granted_count),
};
#undef M
#undef P
static const struct wire_struct snapshot_reply_table =
    WIRE_STRUCT(tandem__v1__kv_snapshot_reply__descriptor, snapshot_reply_rows);

#define M struct msg_kv_release
#define P Tandem__V1__KvRelease
static const struct wire_field release_rows[] = {
    WIRE_ROW_U64(lease),
    WIRE_ROW_U32(token_count),
    WIRE_ROW_BOOL(keep),
};
#undef M
#undef P
static const struct wire_struct release_table =
    WIRE_STRUCT(tandem__v1__kv_release__descriptor, release_rows);

#define M struct msg_kv_reclaim
#define P Tandem__V1__KvReclaim
static const struct wire_field reclaim_rows[] = {
    WIRE_ROW_U64(lease),
};
#undef M
#undef P
static const struct wire_struct reclaim_table =
    WIRE_STRUCT(tandem__v1__kv_reclaim__descriptor, reclaim_rows);

#define M struct msg_kv_pressure
#define P Tandem__V1__KvPressure
static const struct wire_field pressure_rows[] = {
    WIRE_ROW_U32(blocks_free),
    WIRE_ROW_U32(blocks_total),
};
#undef M
#undef P
static const struct wire_struct pressure_table =
    WIRE_STRUCT(tandem__v1__kv_pressure__descriptor, pressure_rows);

#define M struct msg_kv_adopt
#define P Tandem__V1__KvAdopt
static const struct wire_field adopt_rows[] = {
    WIRE_ROW_TEXT(session_key),
    WIRE_ROW_U32(count),
};
#undef M
#undef P
static const struct wire_struct adopt_table =
    WIRE_STRUCT(tandem__v1__kv_adopt__descriptor, adopt_rows);

#define M struct msg_kv_adopt_reply
#define P Tandem__V1__KvAdoptReply
static const struct wire_field adopt_reply_rows[] = {
    WIRE_ROW_U32(code),
    WIRE_ROW_U32(valid_count),
};
#undef M
#undef P
static const struct wire_struct adopt_reply_table =
    WIRE_STRUCT(tandem__v1__kv_adopt_reply__descriptor, adopt_reply_rows);

#define M struct msg_kv_ping
#define P Tandem__V1__KvPing
static const struct wire_field ping_rows[] = {
    WIRE_ROW_U64(incarnation),
    WIRE_ROW_U32(lease_count),
};
#undef M
#undef P
static const struct wire_struct ping_table =
    WIRE_STRUCT(tandem__v1__kv_ping__descriptor, ping_rows);

#define M struct msg_kv_state
#define P Tandem__V1__KvState
static const struct wire_field state_rows[] = {
    WIRE_ROW_U64(incarnation),     WIRE_ROW_U32(epoch),
    WIRE_ROW_U32(blocks_free),     WIRE_ROW_U32(blocks_leased),
    WIRE_ROW_U32(blocks_cached),   WIRE_ROW_U32(blocks_total),
    WIRE_ROW_U32(slots_free),      WIRE_ROW_U32(slots_total),
    WIRE_ROW_U32(snapshots_free),  WIRE_ROW_U32(snapshots_total),
    WIRE_ROW_U64(tokens_keepable), WIRE_ROW_IDS(granted, granted_count),
};
#undef M
#undef P
static const struct wire_struct state_table =
    WIRE_STRUCT(tandem__v1__kv_state__descriptor, state_rows);

const struct wire_type wire_kv_types[] = {
    {MSG_KV_ATTACH, "KvAttach", &attach_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_KV_ATTACH_REPLY, "KvAttachReply", &attach_reply_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_KV_OPEN, "KvOpen", &open_table,
     WIRE_PAYLOAD(struct msg_kv_open, hashes, hash_count, const struct hash128 *, 16, 1), NULL,
     NULL},
    {MSG_KV_OPEN_REPLY, "KvOpenReply", &open_reply_table,
     WIRE_PAYLOAD(struct msg_kv_open_reply, blocks, block_count, const uint32_t *, 4, 4), NULL,
     NULL},
    {MSG_KV_EXTEND, "KvExtend", &extend_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_KV_EXTEND_REPLY, "KvExtendReply", &extend_reply_table,
     WIRE_PAYLOAD(struct msg_kv_extend_reply, blocks, block_count, const uint32_t *, 4, 4), NULL,
     NULL},
    {MSG_KV_COMMIT, "KvCommit", &commit_table,
     WIRE_PAYLOAD(struct msg_kv_commit, hashes, hash_count, const struct hash128 *, 16, 1), NULL,
     NULL},
    {MSG_KV_SNAPSHOT, "KvSnapshot", &snapshot_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_KV_RELEASE, "KvRelease", &release_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_KV_RECLAIM, "KvReclaim", &reclaim_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_KV_PRESSURE, "KvPressure", &pressure_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_KV_ADOPT, "KvAdopt", &adopt_table,
     WIRE_PAYLOAD(struct msg_kv_adopt, items, count, const uint8_t *, 20, 1), NULL, NULL},
    {MSG_KV_ADOPT_REPLY, "KvAdoptReply", &adopt_reply_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_KV_PING, "KvPing", &ping_table,
     WIRE_PAYLOAD(struct msg_kv_ping, leases, lease_count, const uint64_t *, 8, 8), NULL, NULL},
    {MSG_KV_STATE, "KvState", &state_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_KV_SNAPSHOT_REPLY, "KvSnapshotReply", &snapshot_reply_table, WIRE_NO_PAYLOAD, NULL, NULL},
};
const size_t wire_kv_type_count = ARRAY_COUNT(wire_kv_types);
