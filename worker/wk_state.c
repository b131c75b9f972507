/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_state.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/model/model.h"

#define STATE_ALIGN 64u
#define AT_ONCE     16u /* a fixed count, which the compiler makes vectors of */

STATIC_CHECK(STATE_ALIGN == AT_ONCE * sizeof(float));

static uint8_t *live_at(const struct model_kv *kv, uint32_t slot, uint64_t state_bytes)
{
    CHECK(slot < kv->slot_count && kv->slot_stride >= state_bytes);
    return kv->slots + slot * kv->slot_stride;
}

static uint8_t *snapshot_at(const struct model_kv *kv, uint32_t slot, uint64_t bytes)
{
    CHECK(slot >= kv->slot_count && slot - kv->slot_count < kv->snapshot_count);
    CHECK(kv->snapshot_stride >= bytes);
    return kv->snapshots + (slot - kv->slot_count) * kv->snapshot_stride;
}

static uint64_t snapshot_bytes(const struct model_kv *kv, uint64_t state_bytes)
{
    CHECK(kv->snapshot_type == KV_ROW_F32 || kv->snapshot_type == KV_ROW_BF16);
    CHECK(state_bytes % STATE_ALIGN == 0);
    return kv->snapshot_type == KV_ROW_BF16 ? state_bytes / 2 : state_bytes;
}

static void narrow(uint16_t *restrict to, const uint32_t *restrict from, uint64_t count)
{
    for (uint64_t at = 0; at < count; at += AT_ONCE) {
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            uint32_t bits = from[at + i];
            uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
            uint32_t quiet = (bits >> 16) | 0x40u;
            to[at + i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
        }
    }
}

static void widen(uint32_t *restrict to, const uint16_t *restrict from, uint64_t count)
{
    for (uint64_t at = 0; at < count; at += AT_ONCE)
        for (uint32_t i = 0; i < AT_ONCE; i++)
            to[at + i] = (uint32_t)from[at + i] << 16;
}

void wk_state_keep(const struct model_kv *kv, uint32_t snapshot, uint32_t live,
                   uint64_t state_bytes)
{
    uint64_t bytes = snapshot_bytes(kv, state_bytes);
    const uint8_t *from = live_at(kv, live, state_bytes);
    uint8_t *to = snapshot_at(kv, snapshot, bytes);
    if (kv->snapshot_type == KV_ROW_BF16)
        narrow((uint16_t *)(void *)to, (const uint32_t *)(const void *)from,
               state_bytes / sizeof(float));
    else
        memcpy(to, from, bytes);
}

void wk_state_restore(const struct model_kv *kv, uint32_t live, uint32_t snapshot,
                      uint64_t state_bytes)
{
    uint64_t bytes = snapshot_bytes(kv, state_bytes);
    const uint8_t *from = snapshot_at(kv, snapshot, bytes);
    uint8_t *to = live_at(kv, live, state_bytes);
    if (kv->snapshot_type == KV_ROW_BF16)
        widen((uint32_t *)(void *)to, (const uint16_t *)(const void *)from,
              state_bytes / sizeof(float));
    else
        memcpy(to, from, bytes);
}
