/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/tap_ring.h"

#include <string.h>

#include "lib/base/check.h"

#define RING_MAGIC   0x5044544bu /* "KTDP" */
#define RING_VERSION 1u
#define SLOT_HEADER  64u
#define SLOTS_MAX    (1u << 24)
#define BYTES_MAX    (UINT64_C(1) << 40)

/* Words of the header and of a slot's header, in units of 8 bytes. */
enum { HEAD_MAGIC = 0, HEAD_TYPE = 1, HEAD_HIDDEN = 2, HEAD_INCARNATION = 3, HEAD_COUNT = 8 };
enum { SLOT_STAMP = 0, SLOT_ID = 1, SLOT_POSITION = 3, SLOT_STEP = 4 };

STATIC_CHECK(sizeof(struct msg_id) == 16);

static uint64_t word_get(const uint8_t *base, uint64_t word)
{
    /* Acquire keeps the second look at the stamp behind the values; a plain load on x86. */
    return __atomic_load_n((const uint64_t *)(const void *)base + word, __ATOMIC_ACQUIRE);
}

static void word_set(uint8_t *base, uint64_t word, uint64_t value)
{
    /* Release keeps the values behind the stamp that says they are being written. */
    __atomic_store_n((uint64_t *)(void *)base + word, value, __ATOMIC_RELEASE);
}

static uint64_t slot_bytes_of(const struct tap_ring_geometry *g)
{
    uint64_t bytes = (uint64_t)g->tap_count * g->hidden * (g->type == TAP_F32 ? 4 : 2);
    return SLOT_HEADER + (bytes + 63) / 64 * 64;
}

uint64_t tap_ring_bytes(const struct tap_ring_geometry *g)
{
    if ((g->type != TAP_BF16 && g->type != TAP_F32) || g->tap_count == 0 ||
        g->tap_count > TAP_RING_TAPS_MAX || g->hidden == 0 || g->hidden > 1u << 16 ||
        g->slots == 0 || g->slots > SLOTS_MAX)
        return 0;
    uint64_t bytes = TAP_RING_HEADER_BYTES + g->slots * slot_bytes_of(g);
    return bytes <= BYTES_MAX ? bytes : 0;
}

void tap_ring_format(struct tap_ring *ring, void *memory, const struct tap_ring_geometry *g,
                     uint64_t incarnation)
{
    CHECK(tap_ring_bytes(g) != 0 && (uintptr_t)memory % 64 == 0);
    *ring = (struct tap_ring){memory, *g, slot_bytes_of(g), incarnation};
    word_set(ring->base, HEAD_TYPE, (uint64_t)g->type | (uint64_t)g->tap_count << 32);
    word_set(ring->base, HEAD_HIDDEN, (uint64_t)g->hidden | (uint64_t)g->slots << 32);
    word_set(ring->base, HEAD_INCARNATION, incarnation);
    word_set(ring->base, HEAD_MAGIC, RING_MAGIC | (uint64_t)RING_VERSION << 32);
}

enum err tap_ring_open(struct tap_ring *ring, void *memory, uint64_t bytes,
                       struct err_detail *detail)
{
    if (bytes < TAP_RING_HEADER_BYTES || (uintptr_t)memory % 64 != 0)
        return err_set(detail, ERR_CORRUPT, "tap ring: %llu bytes are no ring",
                       (unsigned long long)bytes);
    uint64_t magic = word_get(memory, HEAD_MAGIC), type = word_get(memory, HEAD_TYPE);
    uint64_t hidden = word_get(memory, HEAD_HIDDEN);
    if ((uint32_t)magic != RING_MAGIC)
        return err_set(detail, ERR_CORRUPT, "tap ring: magic: not a ring");
    if (magic >> 32 != RING_VERSION)
        return err_set(detail, ERR_UNSUPPORTED, "tap ring: version: %llu, supported is %u",
                       (unsigned long long)(magic >> 32), RING_VERSION);
    struct tap_ring_geometry g = {.type = (uint32_t)type,
                                  .tap_count = (uint32_t)(type >> 32),
                                  .hidden = (uint32_t)hidden,
                                  .slots = (uint32_t)(hidden >> 32)};
    if (tap_ring_bytes(&g) == 0)
        return err_set(detail, ERR_CORRUPT, "tap ring: type %u, %u taps of %u, %u slots", g.type,
                       g.tap_count, g.hidden, g.slots);
    if (tap_ring_bytes(&g) > bytes)
        return err_set(detail, ERR_TOO_LARGE, "tap ring: %u slots do not fit into %llu bytes",
                       g.slots, (unsigned long long)bytes);
    *ring = (struct tap_ring){memory, g, slot_bytes_of(&g), word_get(memory, HEAD_INCARNATION)};
    return ERR_OK;
}

static uint8_t *slot_of(const struct tap_ring *ring, uint64_t r)
{
    return ring->base + TAP_RING_HEADER_BYTES + r % ring->geometry.slots * ring->slot_bytes;
}

uint64_t tap_ring_head(const struct tap_ring *ring)
{
    return word_get(ring->base, HEAD_COUNT);
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Round to nearest, ties to even; a NaN stays one. */
static uint64_t bf16_of(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

void tap_ring_write(struct tap_ring *ring, const struct tap_record *record, const float *values)
{
    const struct tap_ring_geometry *g = &ring->geometry;
    uint64_t r = tap_ring_head(ring), count = (uint64_t)g->tap_count * g->hidden, id[2];
    uint8_t *slot = slot_of(ring, r), *data = slot + SLOT_HEADER;
    uint32_t each = g->type == TAP_F32 ? 2 : 4; /* values of a word */
    memcpy(id, &record->id, sizeof id);
    word_set(slot, SLOT_STAMP, 2 * r + 1);
    word_set(slot, SLOT_ID, id[0]);
    word_set(slot, SLOT_ID + 1, id[1]);
    word_set(slot, SLOT_POSITION, record->position);
    word_set(slot, SLOT_STEP, record->step);
    for (uint64_t i = 0; i < count; i += each) {
        uint64_t word = 0;
        for (uint32_t k = 0; k < each && i + k < count; k++)
            word |= (g->type == TAP_F32 ? (uint64_t)bits_of(values[i + k]) << 32 * k
                                        : bf16_of(values[i + k]) << 16 * k);
        word_set(data, i / each, word);
    }
    word_set(slot, SLOT_STAMP, 2 * r + 2);
    word_set(ring->base, HEAD_COUNT, r + 1);
}

static bool header_get(const struct tap_ring *ring, uint64_t r, struct tap_record *ret_record)
{
    const uint8_t *slot = slot_of(ring, r);
    uint64_t id[2];
    if (word_get(slot, SLOT_STAMP) != 2 * r + 2)
        return false;
    id[0] = word_get(slot, SLOT_ID);
    id[1] = word_get(slot, SLOT_ID + 1);
    memcpy(&ret_record->id, id, sizeof id);
    ret_record->position = (uint32_t)word_get(slot, SLOT_POSITION);
    ret_record->step = word_get(slot, SLOT_STEP);
    return true;
}

bool tap_ring_peek(const struct tap_ring *ring, uint64_t r, struct tap_record *ret_record)
{
    return header_get(ring, r, ret_record) && word_get(slot_of(ring, r), SLOT_STAMP) == 2 * r + 2;
}

bool tap_ring_read(const struct tap_ring *ring, uint64_t r, struct tap_record *ret_record,
                   float *ret_values)
{
    const struct tap_ring_geometry *g = &ring->geometry;
    const uint8_t *data = slot_of(ring, r) + SLOT_HEADER;
    uint64_t count = (uint64_t)g->tap_count * g->hidden;
    uint32_t each = g->type == TAP_F32 ? 2 : 4;
    if (!header_get(ring, r, ret_record))
        return false;
    for (uint64_t i = 0; i < count; i += each) {
        uint64_t word = word_get(data, i / each);
        for (uint32_t k = 0; k < each && i + k < count; k++) {
            uint32_t bits =
                g->type == TAP_F32 ? (uint32_t)(word >> 32 * k) : (uint32_t)(word >> 16 * k) << 16;
            memcpy(&ret_values[i + k], &bits, sizeof bits);
        }
    }
    return word_get(slot_of(ring, r), SLOT_STAMP) == 2 * r + 2;
}
