/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of draft.proto. */
#include "proto/wire_table.h"

#include "proto/draft.pb-c.h"

#define M struct msg_draft_hello
#define P Tandem__V1__DraftHello
static const struct wire_field hello_rows[] = {
    WIRE_ROW_U64(incarnation),   WIRE_ROW_U32(epoch),
    WIRE_ROW_HASH(model_fp),     WIRE_ROW_U32(hidden),
    WIRE_ROW_U32(layers),        WIRE_ROW_U32(vocab_size),
    WIRE_ROW_TEXT(tap_ring),     WIRE_ROW_U64(tap_ring_incarnation),
    WIRE_ROW_HASH(tokenizer_fp), WIRE_ROW_HASH(tap_context_fp),
};
#undef M
#undef P
static const struct wire_struct hello_table =
    WIRE_STRUCT(tandem__v1__draft_hello__descriptor, hello_rows);

#define M struct msg_draft_hello_reply
#define P Tandem__V1__DraftHelloReply
static const struct wire_field hello_reply_rows[] = {
    WIRE_ROW_U64(incarnation),      WIRE_ROW_TEXT(source),
    WIRE_ROW_U32(draft_tokens_max), WIRE_ROW_IDS(tap_layers, tap_layer_count),
    WIRE_ROW_U32(tap_hidden),       WIRE_ROW_U32(tap_type),
    WIRE_ROW_HASH(tap_context_fp),
};
#undef M
#undef P
static const struct wire_struct hello_reply_table =
    WIRE_STRUCT(tandem__v1__draft_hello_reply__descriptor, hello_reply_rows);

#define M struct msg_draft_open
#define P Tandem__V1__DraftOpen
static const struct wire_field draft_open_rows[] = {
    WIRE_ROW_U32(epoch),
    WIRE_ROW_U32(ids_count),
    WIRE_ROW_U64(tap_end),
};
#undef M
#undef P
static const struct wire_struct draft_open_table =
    WIRE_STRUCT(tandem__v1__draft_open__descriptor, draft_open_rows);

#define M struct msg_draft_context
#define P Tandem__V1__DraftContext
static const struct wire_field context_rows[] = {
    WIRE_ROW_U32(epoch),
    WIRE_ROW_U32(base_length),
    WIRE_ROW_U32(ids_count),
    WIRE_ROW_U64(tap_end),
};
#undef M
#undef P
static const struct wire_struct context_table =
    WIRE_STRUCT(tandem__v1__draft_context__descriptor, context_rows);

#define M struct msg_draft_propose
#define P Tandem__V1__DraftPropose
static const struct wire_field propose_rows[] = {
    WIRE_ROW_U32(epoch),       WIRE_ROW_U32(base_length), WIRE_ROW_U32(anchor),
    WIRE_ROW_U32(draft_count), WIRE_ROW_U64(step),        WIRE_ROW_TEXT(source),
    WIRE_ROW_U32(ids_count),   WIRE_ROW_U64(tap_end),
};
#undef M
#undef P
static const struct wire_struct propose_table =
    WIRE_STRUCT(tandem__v1__draft_propose__descriptor, propose_rows);

#define M struct msg_draft_reply
#define P Tandem__V1__DraftReply
static const struct wire_field reply_rows[] = {
    WIRE_ROW_U32(code), WIRE_ROW_U32(epoch),          WIRE_ROW_U32(base_length),
    WIRE_ROW_U64(step), WIRE_ROW_IDS(ids, ids_count),
};
#undef M
#undef P
static const struct wire_struct reply_table =
    WIRE_STRUCT(tandem__v1__draft_reply__descriptor, reply_rows);

static const struct wire_struct close_table = {&tandem__v1__draft_close__descriptor, NULL, 0};

const struct wire_type wire_draft_types[] = {
    {MSG_DRAFT_HELLO, "DraftHello", &hello_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_DRAFT_HELLO_REPLY, "DraftHelloReply", &hello_reply_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_DRAFT_OPEN, "DraftOpen", &draft_open_table,
     WIRE_PAYLOAD(struct msg_draft_open, ids, ids_count, const uint32_t *, 4, 4), NULL, NULL},
    {MSG_DRAFT_CONTEXT, "DraftContext", &context_table,
     WIRE_PAYLOAD(struct msg_draft_context, ids, ids_count, const uint32_t *, 4, 4), NULL, NULL},
    {MSG_DRAFT_PROPOSE, "DraftPropose", &propose_table,
     WIRE_PAYLOAD(struct msg_draft_propose, ids, ids_count, const uint32_t *, 4, 4), NULL, NULL},
    {MSG_DRAFT_REPLY, "DraftReply", &reply_table, WIRE_NO_PAYLOAD, NULL, NULL},
    {MSG_DRAFT_CLOSE, "DraftClose", &close_table, WIRE_NO_PAYLOAD, NULL, NULL},
};
const size_t wire_draft_type_count = ARRAY_COUNT(wire_draft_types);
