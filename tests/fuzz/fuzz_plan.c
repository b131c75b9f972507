/* SPDX-License-Identifier: Apache-2.0 */
/* A plan of any bytes, as rank 0 might tell it: decoded, admitted, taken.  No CHECK is reached, and
 * what is admitted is what the model's cursor relies on. */
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "worker/wk_exec_tables.h"
#include "worker/wk_plan.h"
#include "worker/wk_plan_decode.h"

#define ENTRIES   4u
#define TABLE_MAX 8u
#define BT        4u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct wk_plan_limits limits = {.entries = ENTRIES,
                                             .live_slots = 4,
                                             .slot_count = 6,
                                             .block_count = 16,
                                             .table_max = TABLE_MAX,
                                             .context_max = 4 * TABLE_MAX,
                                             .vocab_size = 32,
                                             .layer_count = 5};
static struct wk_tables_room room = {
    .prefill_rows = 16, .prefill_seqs = 3, .decode_rows = 8, .decode_seqs = 2, .block_tokens = BT};

/* What model_begin CHECKs. */
static void cursor_check(struct wk_tables *t, const struct wk_plan *p)
{
    bool prefill = p->kind == WK_PLAN_PREFILL;
    uint64_t rows = 0, logits = 0;
    CHECK(p->seq_count > 0 && p->seq_count <= (prefill ? room.prefill_seqs : room.decode_seqs));
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct wk_plan_seq *s = &p->seqs[i];
        const struct wk_entry *e = wk_tables_at(t, s->entry);
        CHECK(s->row_count > 0 && s->state_slot < limits.live_slots && s->ids_at == rows);
        CHECK((uint64_t)e->block_count * BT >= (uint64_t)s->position_start + s->row_count);
        for (uint32_t b = 0; b < e->block_count; b++)
            CHECK(e->blocks[b] < limits.block_count);
        rows += s->row_count;
        logits += s->row_count - s->logits_from;
    }
    CHECK(rows == p->row_count && rows <= (prefill ? room.prefill_rows : room.decode_rows));
    CHECK(logits <= (prefill ? room.prefill_seqs : room.decode_rows));
}

static void plan_run(struct wk_tables *t, struct wk_plan *p, const uint8_t *bytes, size_t count)
{
    struct err_detail detail;
    if (wk_plan_decode(bytes, count, &limits, p, &detail) != ERR_OK ||
        wk_tables_admit(t, &room, p, &detail) != ERR_OK)
        return;
    wk_tables_take(t, p);
    if (p->kind == WK_PLAN_ABANDON || (p->kind == WK_PLAN_PREFILL && !p->begin)) {
        room.paused = p->kind == WK_PLAN_PREFILL && !p->finish;
        return;
    }
    cursor_check(t, p);
    for (uint32_t i = 0; i < p->seq_count; i++) {
        const struct wk_plan_seq *s = &p->seqs[i];
        if (p->kind == WK_PLAN_PREFILL)
            wk_tables_add(t, s->entry, p->ids + s->ids_at, s->row_count);
        else
            wk_tables_add(t, s->entry, s->final_ids, s->final_count);
    }
    if (p->kind == WK_PLAN_PREFILL)
        room.paused = !p->finish;
}

/* A batch of two sequences that begin, then a step of the first of them. */
static void good_fill(struct wk_plan *p, bool prefill)
{
    wk_plan_clear(p, 1, 1, prefill ? WK_PLAN_PREFILL : WK_PLAN_DECODE);
    p->begin = p->finish = prefill;
    p->seq_count = prefill ? 2 : 1;
    p->setup_count = prefill ? 2 : 0;
    for (uint32_t i = 0; i < p->seq_count; i++) {
        struct wk_plan_seq *s = &p->seqs[i];
        *s = (struct wk_plan_seq){.entry = i,
                                  .setup = prefill ? i : WK_NONE,
                                  .state_slot = i,
                                  .position_start = prefill ? 0 : 6,
                                  .row_count = prefill ? 6 : 2,
                                  .logits_from = prefill ? 5 : 0,
                                  .fresh = prefill,
                                  .journal = !prefill,
                                  .ids_at = p->row_count,
                                  .final_count = !prefill,
                                  .block_first = prefill ? 0 : 2,
                                  .block_count = prefill ? 2 : 0,
                                  .blocks_at = p->block_count};
        p->row_count += s->row_count;
        p->block_count += s->block_count;
        p->setups[i] = (struct wk_plan_setup){.repetition_penalty = 1 + i};
    }
    wk_plan_seal(p);
}

/* Patches {offset u16, byte} on a sound plan. */
static size_t good_patched(struct wk_plan *p, bool prefill, const uint8_t *data, size_t size,
                           uint8_t *ret_bytes)
{
    good_fill(p, prefill);
    size_t count = p->encoding_bytes;
    memcpy(ret_bytes, p->encoding, count);
    for (size_t i = 0; i + 3 <= size; i += 3)
        ret_bytes[((size_t)data[i] << 8 | data[i + 1]) % count] = data[i + 2];
    return count;
}

/* A few plans one after another: what one leaves behind meets the next.  Before each stand a mode,
 * 0 any bytes, 1 and 2 a sound plan with patches, and how many bytes belong to it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct wk_plan *p;
    static uint8_t *room_bytes;
    if (p == NULL) {
        p = wk_plan_create(4, 16, 32, 4 * TABLE_MAX);
        room_bytes = mem_take(p->encoding_bytes_max);
    }
    struct wk_tables *t = wk_tables_create(ENTRIES, limits.vocab_size);
    wk_tables_blocks(t, TABLE_MAX);
    room.paused = false;
    for (size_t at = 0; at + 3 <= size;) {
        uint8_t mode = data[at] % 3;
        size_t count = (size_t)data[at + 1] | (size_t)data[at + 2] << 8;
        at += 3;
        if (count > size - at)
            count = size - at;
        const uint8_t *from = data + at;
        size_t bytes_count = count;
        if (mode > 0) {
            bytes_count = good_patched(p, mode == 1, from, count, room_bytes);
            from = room_bytes;
        }
        uint8_t *bytes = mem_take(bytes_count + 1); /* of its size: a sanitizer sees what is read */
        memcpy(bytes, from, bytes_count);
        plan_run(t, p, bytes, bytes_count);
        mem_give(bytes);
        at += count;
    }
    wk_tables_destroy(&t);
    return 0;
}
