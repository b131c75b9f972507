/* SPDX-License-Identifier: Apache-2.0 */
/* proto/wire.h - messages to frames and back: 32-byte header, protobuf body, payload frame.
 *
 * Pure.  The only place that sees protobuf-c.  Frames: [header][body][payload, only for messages
 * with an array marked "payload frame" in msg.h, and then always exactly one, possibly empty].
 * Header layout: design of record in docs/architecture.md, STATIC_CHECKed in wire.c:
 * 0 magic u32 "TDM1" LE, 4 version u8 (1), 5 type u8, 6 flags u16, 8 epoch u32, 12 body_bytes u32,
 * 16 id 16 bytes. */
#ifndef PROTO_WIRE_H
#define PROTO_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "proto/msg.h"

struct arena;

#define WIRE_HEADER_BYTES      32u
#define WIRE_MAGIC             0x314d4454u /* "TDM1" */
#define WIRE_VERSION           1u
#define WIRE_BODY_BYTES_MAX    (1u << 20)
#define WIRE_PAYLOAD_BYTES_MAX (8u << 20)
#define WIRE_FRAMES_MAX        3u

struct wire_frame { /* same layout as struct bus_frame */
    const void *bytes;
    size_t count;
};

/* Encodes into the arena (payload frames borrow the message's arrays).  ERR_TOO_LARGE, ERR_NOMEM.
 * A message that wire_check would refuse is a CHECK failure: it is our own bug. */
MUST_USE enum err wire_encode(struct arena *arena, const struct msg *m,
                              struct wire_frame ret_frames[WIRE_FRAMES_MAX], uint32_t *ret_count);

/* Decodes and checks.  Every refusal is ERR_INVALID (or ERR_TOO_LARGE, ERR_NOMEM) with the field in
 * detail; nothing of the message may then be used. */
MUST_USE enum err wire_decode(struct arena *arena, const struct wire_frame *frames, uint32_t count,
                              struct msg *ret_msg, struct err_detail *detail);

const char *msg_type_name(enum msg_type type); /* "RouterSubmit"; "?" if unknown */

#endif
