/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/wire.h"

#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "proto/wire_check.h"
#include "proto/wire_table.h"

STATIC_CHECK(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

struct wire_header {
    uint32_t magic;
    uint8_t version;
    uint8_t type;
    uint16_t flags;
    uint32_t epoch;
    uint32_t body_bytes;
    uint8_t id[16];
};
STATIC_CHECK(sizeof(struct wire_header) == WIRE_HEADER_BYTES);
STATIC_CHECK(offsetof(struct wire_header, magic) == 0);
STATIC_CHECK(offsetof(struct wire_header, version) == 4);
STATIC_CHECK(offsetof(struct wire_header, type) == 5);
STATIC_CHECK(offsetof(struct wire_header, flags) == 6);
STATIC_CHECK(offsetof(struct wire_header, epoch) == 8);
STATIC_CHECK(offsetof(struct wire_header, body_bytes) == 12);
STATIC_CHECK(offsetof(struct wire_header, id) == 16);
STATIC_CHECK(MSG_IDS_MAX * sizeof(uint32_t) == WIRE_PAYLOAD_BYTES_MAX);
STATIC_CHECK(MSG_BLOCKS_MAX * 20u <= WIRE_PAYLOAD_BYTES_MAX);
STATIC_CHECK(MSG_LIVE_IDS_MAX * sizeof(struct msg_id) <= WIRE_PAYLOAD_BYTES_MAX);

static const struct wire_type *in_list(const struct wire_type *types, size_t count, uint32_t number)
{
    for (size_t i = 0; i < count; i++) {
        if ((uint32_t)types[i].type == number)
            return &types[i];
    }
    return NULL;
}

static const struct wire_type *type_find(uint32_t number)
{
    if (number <= MSG_ROUTER_STATE)
        return in_list(wire_route_types, wire_route_type_count, number);
    if (number <= MSG_KV_SNAPSHOT_REPLY)
        return in_list(wire_kv_types, wire_kv_type_count, number);
    if (number <= MSG_DRAFT_REPLY)
        return in_list(wire_draft_types, wire_draft_type_count, number);
    return in_list(wire_plan_types, wire_plan_type_count, number);
}

const char *msg_type_name(enum msg_type type)
{
    const struct wire_type *t = type_find((uint32_t)type);
    return t != NULL ? t->name : "?";
}

static const void *payload_array(const struct wire_type *t, const struct msg *m)
{
    const void *array;
    memcpy(&array, (const uint8_t *)&m->u + t->payload.at, sizeof(array));
    return array;
}

static uint32_t payload_count(const struct wire_type *t, const struct msg *m)
{
    uint32_t count;
    memcpy(&count, (const uint8_t *)&m->u + t->payload.count_at, sizeof(count));
    return count;
}

static enum err body_encode(struct arena *arena, const struct wire_type *t, const struct msg *m,
                            struct wire_frame *ret_frame)
{
    ProtobufCMessage *pb = arena_alloc(arena, t->body->descriptor->sizeof_message);
    if (pb == NULL)
        return ERR_NOMEM;
    protobuf_c_message_init(t->body->descriptor, pb);
    TRY(wire_struct_encode(arena, t->body, &m->u, pb));
    if (t->encode_more != NULL)
        t->encode_more(&m->u, pb);
    size_t bytes = protobuf_c_message_get_packed_size(pb);
    if (bytes > WIRE_BODY_BYTES_MAX)
        return ERR_TOO_LARGE;
    uint8_t *body = arena_alloc(arena, bytes + 1);
    if (body == NULL)
        return ERR_NOMEM;
    CHECK(protobuf_c_message_pack(pb, body) == bytes);
    *ret_frame = (struct wire_frame){body, bytes};
    return ERR_OK;
}

enum err wire_encode(struct arena *arena, const struct msg *m,
                     struct wire_frame ret_frames[WIRE_FRAMES_MAX], uint32_t *ret_count)
{
    struct err_detail detail = {{0}};
    CHECK(arena != NULL && m != NULL);
    CHECK(wire_check(m, &detail) == ERR_OK);
    const struct wire_type *t = type_find((uint32_t)m->type);
    CHECK(t != NULL);
    struct wire_header *header = arena_alloc(arena, sizeof(*header));
    if (header == NULL)
        return ERR_NOMEM;
    struct wire_frame body = {NULL, 0};
    TRY(body_encode(arena, t, m, &body));
    *header = (struct wire_header){
        .magic = WIRE_MAGIC,
        .version = WIRE_VERSION,
        .type = (uint8_t)m->type,
        .flags = m->flags,
        .epoch = m->epoch,
        .body_bytes = (uint32_t)body.count,
    };
    memcpy(header->id, m->id.bytes, sizeof(header->id));
    struct wire_frame payload = {"", 0};
    if (t->payload.item_bytes != 0) {
        payload.count = (size_t)payload_count(t, m) * t->payload.item_bytes;
        if (payload.count > WIRE_PAYLOAD_BYTES_MAX)
            return ERR_TOO_LARGE;
        if (payload.count != 0)
            payload.bytes = payload_array(t, m);
    }
    ret_frames[0] = (struct wire_frame){header, sizeof(*header)};
    ret_frames[1] = body;
    ret_frames[2] = payload;
    *ret_count = t->payload.item_bytes != 0 ? 3 : 2;
    return ERR_OK;
}

static enum err header_decode(const struct wire_frame *frames, uint32_t count,
                              struct wire_header *ret_header, const struct wire_type **ret_type,
                              struct err_detail *detail)
{
    struct wire_header h;
    if (count < 2 || count > WIRE_FRAMES_MAX)
        return err_set(detail, ERR_INVALID, "frames: %u, expected 2 or 3", count);
    if (frames[0].count != sizeof(h))
        return err_set(detail, ERR_INVALID, "header: %zu bytes, expected 32", frames[0].count);
    memcpy(&h, frames[0].bytes, sizeof(h));
    if (h.magic != WIRE_MAGIC)
        return err_set(detail, ERR_INVALID, "magic: 0x%08x is not ours", h.magic);
    if (h.version != WIRE_VERSION)
        return err_set(detail, ERR_INVALID, "version: %u, only 1 is known", h.version);
    const struct wire_type *t = type_find(h.type);
    if (t == NULL)
        return err_set(detail, ERR_INVALID, "type: %u is unknown", h.type);
    if (frames[1].count > WIRE_BODY_BYTES_MAX)
        return err_set(detail, ERR_TOO_LARGE, "body: %zu bytes, at most %u", frames[1].count,
                       WIRE_BODY_BYTES_MAX);
    if (h.body_bytes != frames[1].count)
        return err_set(detail, ERR_INVALID, "body_bytes: %u, the body frame has %zu", h.body_bytes,
                       frames[1].count);
    uint32_t expected = t->payload.item_bytes != 0 ? 3 : 2;
    if (count != expected)
        return err_set(detail, ERR_INVALID, "frames: %u, %s has %u", count, t->name, expected);
    *ret_header = h;
    *ret_type = t;
    return ERR_OK;
}

/* The pb-c allocator over the request arena: bounded, nothing is freed one by one. */
static void *pb_alloc(void *arena, size_t bytes)
{
    return arena_alloc(arena, bytes);
}

static void pb_free(void *arena, void *pointer)
{
    (void)arena;
    (void)pointer;
}

static enum err body_decode(struct arena *arena, const struct wire_type *t,
                            const struct wire_frame *frame, struct msg *m,
                            struct err_detail *detail)
{
    ProtobufCAllocator allocator = {.alloc = pb_alloc, .free = pb_free, .allocator_data = arena};
    const uint8_t *bytes = frame->count != 0 ? frame->bytes : (const uint8_t *)"";
    bool overflow_before = arena->overflow;
    arena->overflow = false;
    ProtobufCMessage *pb =
        protobuf_c_message_unpack(t->body->descriptor, &allocator, frame->count, bytes);
    bool overflow = arena->overflow;
    arena->overflow = overflow || overflow_before;
    if (pb == NULL && overflow)
        return err_set(detail, ERR_NOMEM, "%s: body does not fit in the arena", t->name);
    if (pb == NULL)
        return err_set(detail, ERR_INVALID, "%s: body of %zu bytes does not parse", t->name,
                       frame->count);
    TRY(wire_struct_decode(t->body, pb, &m->u, detail));
    if (t->decode_more != NULL)
        TRY(t->decode_more(&m->u, pb, detail));
    return ERR_OK;
}

static enum err payload_decode(struct arena *arena, const struct wire_type *t,
                               const struct wire_frame *frame, struct msg *m,
                               struct err_detail *detail)
{
    uint32_t item = t->payload.item_bytes;
    uint32_t count = payload_count(t, m);
    if (frame->count > WIRE_PAYLOAD_BYTES_MAX)
        return err_set(detail, ERR_TOO_LARGE, "payload: %zu bytes, at most %u", frame->count,
                       WIRE_PAYLOAD_BYTES_MAX);
    if (frame->count % item != 0)
        return err_set(detail, ERR_INVALID, "payload: %zu bytes, not a multiple of %u",
                       frame->count, item);
    if (frame->count / item != count)
        return err_set(detail, ERR_INVALID, "payload: %zu items, the body says %u",
                       frame->count / item, count);
    const void *bytes = count != 0 ? frame->bytes : NULL;
    if (count != 0 && (uintptr_t)bytes % t->payload.align != 0) {
        bytes = arena_copy(arena, bytes, frame->count);
        if (bytes == NULL)
            return err_set(detail, ERR_NOMEM, "payload: does not fit in the arena");
    }
    memcpy((uint8_t *)&m->u + t->payload.at, &bytes, sizeof(bytes));
    return ERR_OK;
}

enum err wire_decode(struct arena *arena, const struct wire_frame *frames, uint32_t count,
                     struct msg *ret_msg, struct err_detail *detail)
{
    CHECK(arena != NULL && ret_msg != NULL);
    struct wire_header header = {0};
    const struct wire_type *t = NULL;
    struct msg m;
    memset(&m, 0, sizeof(m));
    TRY(header_decode(frames, count, &header, &t, detail));
    m.type = t->type;
    m.flags = header.flags;
    m.epoch = header.epoch;
    memcpy(m.id.bytes, header.id, sizeof(m.id.bytes));
    TRY(body_decode(arena, t, &frames[1], &m, detail));
    if (t->payload.item_bytes != 0)
        TRY(payload_decode(arena, t, &frames[2], &m, detail));
    TRY(wire_check(&m, detail));
    *ret_msg = m;
    return ERR_OK;
}
