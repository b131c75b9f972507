/* SPDX-License-Identifier: Apache-2.0 */
/* proto/tap_ring.h - the shared-memory ring of hidden states: the worker writes, the drafter reads.
 *
 * Pure: works on memory that the caller mapped; one writer, any number of readers, in this or in
 * other processes.  A record holds one token's taps.  The writer never waits: it overwrites the
 * oldest record, and a reader that was too slow notices by the record's stamp.  A reader trusts
 * nothing: the header is checked once against the file's size, every record's numbers by its user.
 *
 * Layout, little-endian: header of 4096 bytes, then `slots` records of slot_bytes: stamp u64 (twice
 * the record's number and 2, one less while it is written), request id 16, position u32, 0 u32,
 * step u64, 24 bytes of zeros, then tap_count x hidden values (bf16 or f32) padded to 64 bytes.
 * Every word is an atomic of 8 bytes, so that a torn record is seen and no access is a race. */
#ifndef PROTO_TAP_RING_H
#define PROTO_TAP_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "proto/msg.h"

#define TAP_RING_HEADER_BYTES 4096u
#define TAP_RING_TAPS_MAX     16u
#define TAP_RING_PATH_BYTES   256u

enum tap_type { TAP_BF16 = 1, TAP_F32 = 2 };

struct tap_ring_geometry {
    uint32_t type; /* enum tap_type */
    uint32_t tap_count, hidden;
    uint32_t slots;
};

struct tap_record {
    struct msg_id id;
    uint32_t position;
    uint64_t step;
};

struct tap_ring {
    uint8_t *base;
    struct tap_ring_geometry geometry;
    uint64_t slot_bytes;
    uint64_t incarnation;
};

/* 0 where a number is out of bounds. */
uint64_t tap_ring_bytes(const struct tap_ring_geometry *g);

/* Writer: memory of tap_ring_bytes, all zero, 64-byte aligned. */
void tap_ring_format(struct tap_ring *ring, void *memory, const struct tap_ring_geometry *g,
                     uint64_t incarnation);
/* Reader: ERR_CORRUPT, ERR_UNSUPPORTED or ERR_TOO_LARGE where the header does not describe
 * `bytes` bytes. */
MUST_USE enum err tap_ring_open(struct tap_ring *ring, void *memory, uint64_t bytes,
                                struct err_detail *detail);

/* values [tap_count * hidden]; rounded to the ring's type. */
void tap_ring_write(struct tap_ring *ring, const struct tap_record *record, const float *values);

/* Number of records ever written; record r exists while r + slots >= head. */
uint64_t tap_ring_head(const struct tap_ring *ring);
/* What record r is about.  False: overwritten, or not written yet. */
bool tap_ring_peek(const struct tap_ring *ring, uint64_t r, struct tap_record *ret_record);
/* The same and its values, widened to f32. */
bool tap_ring_read(const struct tap_ring *ring, uint64_t r, struct tap_record *ret_record,
                   float *ret_values);

#endif
