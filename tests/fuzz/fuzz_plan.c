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
        CHECK(s->row_count > 0 && s->state_slot < limits.slot_count && s->ids_at == rows);
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

/* A few plans one after another, each with its length before it: what one leaves behind meets the
 * next. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct wk_tables *t = wk_tables_create(ENTRIES, limits.vocab_size);
    struct wk_plan *p = wk_plan_create(4, 16, 32, 4 * TABLE_MAX);
    wk_tables_blocks(t, TABLE_MAX);
    room.paused = false;
    for (size_t at = 0; at + 2 <= size;) {
        size_t count = (size_t)data[at] | (size_t)data[at + 1] << 8;
        at += 2;
        if (count > size - at)
            count = size - at;
        uint8_t *bytes = mem_take(count + 1); /* of its size, so that a sanitizer sees more */
        memcpy(bytes, data + at, count);
        plan_run(t, p, bytes, count);
        mem_give(bytes);
        at += count;
    }
    wk_plan_destroy(&p);
    wk_tables_destroy(&t);
    return 0;
}
