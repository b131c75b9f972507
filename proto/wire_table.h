/* SPDX-License-Identifier: Apache-2.0 */
/* proto/wire_table.h - which field of a plain message is which field of its protobuf body.
 *
 * Private to proto/: constant tables, one row a field, and the one converter that walks them.
 * Pure.  The macros check the C types of both sides at compile time, so that a row cannot lie. */
#ifndef PROTO_WIRE_TABLE_H
#define PROTO_WIRE_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

#include "lib/base/check.h"
#include "lib/base/err.h"
#include "proto/msg.h"

struct arena;

enum wire_kind {
    WIRE_U32, /* also protobuf enums, which are four bytes */
    WIRE_I32,
    WIRE_U64,
    WIRE_F64,
    WIRE_BOOL,
    WIRE_TEXT,         /* NULL is sent as "", and "" arrives for an absent field */
    WIRE_HASH,         /* 16 bytes, or none = zeros */
    WIRE_IDS,          /* u32 array; its length fills the count field */
    WIRE_FLOATS_AGREE, /* float array as long as a count field filled before */
    WIRE_SUB,          /* nested message; absent = all fields unset */
};

struct wire_struct;

struct wire_field {
    enum wire_kind kind;
    const char *name;
    size_t at, pb_at;
    size_t count_at, pb_count_at;
    const struct wire_struct *sub;
};

struct wire_struct {
    const ProtobufCMessageDescriptor *descriptor;
    const struct wire_field *fields;
    size_t field_count;
};

struct wire_payload { /* item_bytes 0 = the message has no payload frame */
    uint32_t item_bytes, align;
    size_t at, count_at;
};

struct wire_type {
    enum msg_type type;
    const char *name;
    const struct wire_struct *body;
    struct wire_payload payload;
    /* What a row cannot say: arrays whose length follows from several fields. */
    void (*encode_more)(const void *plain, void *pb);
    enum err (*decode_more)(void *plain, const void *pb, struct err_detail *detail);
};

/* Offset of a member that must have this type. */
#define WIRE_AT(structure, member, ctype)                                                          \
    (offsetof(structure, member) +                                                                 \
     0 * sizeof(char[__builtin_types_compatible_p(__typeof__(((structure *)0)->member), ctype)     \
                         ? 1                                                                       \
                         : -1]))
#define WIRE_AT_4(structure, member)                                                               \
    (offsetof(structure, member) + 0 * sizeof(char[sizeof(((structure *)0)->member) == 4 ? 1 : -1]))

/* A table file defines M (plain struct) and P (protobuf struct) around each list of rows. */
#define WIRE_ROW_U32(f)                                                                            \
    {                                                                                              \
        WIRE_U32, #f, WIRE_AT(M, f, uint32_t), WIRE_AT_4(P, f), 0, 0, NULL                         \
    }
#define WIRE_ROW_I32(f)                                                                            \
    {                                                                                              \
        WIRE_I32, #f, WIRE_AT(M, f, int32_t), WIRE_AT(P, f, int32_t), 0, 0, NULL                   \
    }
#define WIRE_ROW_U64(f)                                                                            \
    {                                                                                              \
        WIRE_U64, #f, WIRE_AT(M, f, uint64_t), WIRE_AT(P, f, uint64_t), 0, 0, NULL                 \
    }
#define WIRE_ROW_F64(f)                                                                            \
    {                                                                                              \
        WIRE_F64, #f, WIRE_AT(M, f, double), WIRE_AT(P, f, double), 0, 0, NULL                     \
    }
#define WIRE_ROW_BOOL(f)                                                                           \
    {                                                                                              \
        WIRE_BOOL, #f, WIRE_AT(M, f, bool), WIRE_AT(P, f, protobuf_c_boolean), 0, 0, NULL          \
    }
#define WIRE_ROW_TEXT(f)                                                                           \
    {                                                                                              \
        WIRE_TEXT, #f, WIRE_AT(M, f, const char *), WIRE_AT(P, f, char *), 0, 0, NULL              \
    }
#define WIRE_ROW_HASH(f)                                                                           \
    {                                                                                              \
        WIRE_HASH, #f, WIRE_AT(M, f, struct hash128), WIRE_AT(P, f, ProtobufCBinaryData), 0, 0,    \
            NULL                                                                                   \
    }
#define WIRE_ROW_IDS(f, count)                                                                     \
    {                                                                                              \
        WIRE_IDS, #f, WIRE_AT(M, f, const uint32_t *), WIRE_AT(P, f, uint32_t *),                  \
            WIRE_AT(M, count, uint32_t), WIRE_AT(P, n_##f, size_t), NULL                           \
    }
#define WIRE_ROW_FLOATS(f, count)                                                                  \
    {                                                                                              \
        WIRE_FLOATS_AGREE, #f, WIRE_AT(M, f, const float *), WIRE_AT(P, f, float *),               \
            WIRE_AT(M, count, uint32_t), WIRE_AT(P, n_##f, size_t), NULL                           \
    }
/* The nested plain struct may be a member (f) or the very struct (offset 0). */
#define WIRE_ROW_SUB(f, table)                                                                     \
    {                                                                                              \
        WIRE_SUB, #f, offsetof(M, f), offsetof(P, f), 0, 0, &(table)                               \
    }
#define WIRE_ROW_SELF(f, table)                                                                    \
    {                                                                                              \
        WIRE_SUB, #f, 0, offsetof(P, f), 0, 0, &(table)                                            \
    }

#define WIRE_STRUCT(descriptor_, rows)                                                             \
    {                                                                                              \
        &(descriptor_), rows, ARRAY_COUNT(rows)                                                    \
    }
#define WIRE_NO_PAYLOAD                                                                            \
    {                                                                                              \
        0, 0, 0, 0                                                                                 \
    }
#define WIRE_PAYLOAD(structure, f, count, ctype, bytes, align)                                     \
    {                                                                                              \
        bytes, align, WIRE_AT(structure, f, ctype), WIRE_AT(structure, count, uint32_t)            \
    }

/* Fills pb (initialised by its descriptor) from plain; borrows plain's texts and arrays.
 * ERR_NOMEM when the arena is full. */
MUST_USE enum err wire_struct_encode(struct arena *arena, const struct wire_struct *table,
                                     const void *plain, void *pb);
/* Fills plain from pb; borrows pb's texts and arrays. */
MUST_USE enum err wire_struct_decode(const struct wire_struct *table, const void *pb, void *plain,
                                     struct err_detail *detail);

/* One list per schema file. */
extern const struct wire_type wire_route_types[];
extern const size_t wire_route_type_count;
extern const struct wire_type wire_kv_types[];
extern const size_t wire_kv_type_count;
extern const struct wire_type wire_draft_types[];
extern const size_t wire_draft_type_count;
extern const struct wire_type wire_plan_types[];
extern const size_t wire_plan_type_count;

#endif
