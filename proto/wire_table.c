/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/wire_table.h"

#include <string.h>

#include "lib/base/arena.h"

STATIC_CHECK(sizeof(float) == 4 && sizeof(double) == 8);
STATIC_CHECK(sizeof(protobuf_c_boolean) == 4);
STATIC_CHECK(sizeof(struct hash128) == 16);

static const void *at(const void *base, size_t offset)
{
    return (const uint8_t *)base + offset;
}

static void *at_w(void *base, size_t offset)
{
    return (uint8_t *)base + offset;
}

static enum err sub_encode(struct arena *arena, const struct wire_field *f, const void *plain,
                           void *pb)
{
    ProtobufCMessage *sub = arena_alloc(arena, f->sub->descriptor->sizeof_message);
    if (sub == NULL)
        return ERR_NOMEM;
    protobuf_c_message_init(f->sub->descriptor, sub);
    memcpy(at_w(pb, f->pb_at), &sub, sizeof(sub));
    /* Depth is that of the constant tables, three at most. */
    return wire_struct_encode(arena, f->sub, at(plain, f->at), sub);
}

static void array_encode(const struct wire_field *f, const void *plain, void *pb)
{
    uint32_t count;
    memcpy(&count, at(plain, f->count_at), sizeof(count));
    size_t pb_count = count;
    memcpy(at_w(pb, f->pb_count_at), &pb_count, sizeof(pb_count));
    memcpy(at_w(pb, f->pb_at), at(plain, f->at), sizeof(void *));
}

static void field_encode(const struct wire_field *f, const void *plain, void *pb)
{
    switch (f->kind) {
    case WIRE_U32:
    case WIRE_I32:
        memcpy(at_w(pb, f->pb_at), at(plain, f->at), 4);
        break;
    case WIRE_U64:
    case WIRE_F64:
        memcpy(at_w(pb, f->pb_at), at(plain, f->at), 8);
        break;
    case WIRE_BOOL: {
        protobuf_c_boolean value = *(const bool *)at(plain, f->at);
        memcpy(at_w(pb, f->pb_at), &value, sizeof(value));
        break;
    }
    case WIRE_TEXT: {
        const char *text = *(const char *const *)at(plain, f->at);
        if (text == NULL)
            text = "";
        memcpy(at_w(pb, f->pb_at), &text, sizeof(text));
        break;
    }
    case WIRE_HASH: {
        const void *bytes = at(plain, f->at);
        ProtobufCBinaryData data = {.len = sizeof(struct hash128)};
        memcpy(&data.data, &bytes, sizeof(bytes));
        memcpy(at_w(pb, f->pb_at), &data, sizeof(data));
        break;
    }
    case WIRE_IDS:
    case WIRE_FLOATS_AGREE:
        array_encode(f, plain, pb);
        break;
    case WIRE_SUB:
        CHECK(false);
    }
}

enum err wire_struct_encode(struct arena *arena, const struct wire_struct *table, const void *plain,
                            void *pb)
{
    CHECK(table != NULL && plain != NULL && pb != NULL);
    CHECK(((ProtobufCMessage *)pb)->descriptor == table->descriptor);
    for (size_t i = 0; i < table->field_count; i++) {
        const struct wire_field *f = &table->fields[i];
        if (f->kind == WIRE_SUB)
            TRY(sub_encode(arena, f, plain, pb));
        else
            field_encode(f, plain, pb);
    }
    return ERR_OK;
}

static enum err array_decode(const struct wire_field *f, const void *pb, void *plain,
                             struct err_detail *detail)
{
    size_t pb_count;
    memcpy(&pb_count, at(pb, f->pb_count_at), sizeof(pb_count));
    if (pb_count > UINT32_MAX)
        return err_set(detail, ERR_TOO_LARGE, "%s: too many items", f->name);
    uint32_t count = (uint32_t)pb_count;
    if (f->kind == WIRE_IDS) {
        memcpy(at_w(plain, f->count_at), &count, sizeof(count));
    } else {
        uint32_t wanted;
        memcpy(&wanted, at(plain, f->count_at), sizeof(wanted));
        if (wanted != count)
            return err_set(detail, ERR_INVALID, "%s: %u items, expected %u", f->name, count,
                           wanted);
    }
    memcpy(at_w(plain, f->at), at(pb, f->pb_at), sizeof(void *));
    return ERR_OK;
}

static enum err sub_decode(const struct wire_field *f, const void *pb, void *plain,
                           struct err_detail *detail)
{
    const ProtobufCMessage *sub;
    memcpy(&sub, at(pb, f->pb_at), sizeof(sub));
    if (sub != NULL)
        return wire_struct_decode(f->sub, sub, at_w(plain, f->at), detail);
    /* Absent: the same as one with every field unset. */
    union {
        ProtobufCMessage base;
        uint8_t bytes[512];
    } empty;
    CHECK(f->sub->descriptor->sizeof_message <= sizeof(empty));
    protobuf_c_message_init(f->sub->descriptor, &empty);
    return wire_struct_decode(f->sub, &empty, at_w(plain, f->at), detail);
}

static enum err field_decode(const struct wire_field *f, const void *pb, void *plain,
                             struct err_detail *detail)
{
    switch (f->kind) {
    case WIRE_U32:
    case WIRE_I32:
        memcpy(at_w(plain, f->at), at(pb, f->pb_at), 4);
        break;
    case WIRE_U64:
    case WIRE_F64:
        memcpy(at_w(plain, f->at), at(pb, f->pb_at), 8);
        break;
    case WIRE_BOOL: {
        protobuf_c_boolean value;
        memcpy(&value, at(pb, f->pb_at), sizeof(value));
        *(bool *)at_w(plain, f->at) = value != 0;
        break;
    }
    case WIRE_TEXT: {
        const char *text;
        memcpy(&text, at(pb, f->pb_at), sizeof(text));
        CHECK(text != NULL);
        memcpy(at_w(plain, f->at), &text, sizeof(text));
        break;
    }
    case WIRE_HASH: {
        ProtobufCBinaryData data;
        memcpy(&data, at(pb, f->pb_at), sizeof(data));
        if (data.len != 0 && data.len != sizeof(struct hash128))
            return err_set(detail, ERR_INVALID, "%s: %zu bytes, expected 16", f->name, data.len);
        if (data.len != 0)
            memcpy(at_w(plain, f->at), data.data, sizeof(struct hash128));
        break;
    }
    case WIRE_IDS:
    case WIRE_FLOATS_AGREE:
        return array_decode(f, pb, plain, detail);
    case WIRE_SUB:
        return sub_decode(f, pb, plain, detail);
    }
    return ERR_OK;
}

enum err wire_struct_decode(const struct wire_struct *table, const void *pb, void *plain,
                            struct err_detail *detail)
{
    CHECK(table != NULL && pb != NULL && plain != NULL);
    CHECK(((const ProtobufCMessage *)pb)->descriptor == table->descriptor);
    for (size_t i = 0; i < table->field_count; i++)
        TRY(field_decode(&table->fields[i], pb, plain, detail));
    return ERR_OK;
}
