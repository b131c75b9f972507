/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_ids.h"

#include <stddef.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define WK_IDS_MAGIC 0x574b4944u
#define PAGE_IDS     256u

struct wk_ids {
    uint32_t magic;
    uint32_t seqs, pages_per_seq, page_count, context_max;
    uint32_t free_count;
    uint32_t *free_pages; /* a stack */
    uint32_t *pages;      /* [seqs][pages_per_seq] */
    uint32_t *counts;     /* [seqs] ids held */
    uint32_t *ids;        /* [page_count][PAGE_IDS] */
};

struct wk_ids *wk_ids_create(uint64_t tokens_max, uint32_t seqs, uint32_t context_max)
{
    CHECK(tokens_max > 0 && seqs > 0 && context_max > 0);
    struct wk_ids *s = mem_take(sizeof *s);
    s->magic = WK_IDS_MAGIC;
    s->seqs = seqs;
    s->context_max = context_max;
    s->pages_per_seq = (context_max + PAGE_IDS - 1) / PAGE_IDS;
    uint64_t all = (uint64_t)s->pages_per_seq * seqs;
    uint64_t wanted = (tokens_max + PAGE_IDS - 1) / PAGE_IDS + seqs;
    s->page_count = (uint32_t)(wanted < all ? wanted : all);
    s->free_pages = mem_take_array(s->page_count, sizeof *s->free_pages);
    s->pages = mem_take_array(all, sizeof *s->pages);
    s->counts = mem_take_array(seqs, sizeof *s->counts);
    s->ids = mem_take_array((size_t)s->page_count * PAGE_IDS, sizeof *s->ids);
    for (uint32_t i = 0; i < s->page_count; i++)
        s->free_pages[s->free_count++] = s->page_count - 1 - i;
    return s;
}

void wk_ids_destroy(struct wk_ids **ids_p)
{
    CHECK(ids_p != NULL);
    struct wk_ids *s = *ids_p;
    if (s == NULL)
        return;
    CHECK_OBJ(s, WK_IDS_MAGIC);
    mem_give(s->free_pages);
    mem_give(s->pages);
    mem_give(s->counts);
    mem_give(s->ids);
    s->magic = 0;
    mem_give(s);
    *ids_p = NULL;
}

static uint32_t *place(const struct wk_ids *s, uint32_t entry, uint32_t index)
{
    uint32_t page = s->pages[(size_t)entry * s->pages_per_seq + index / PAGE_IDS];
    DCHECK(page < s->page_count);
    return &s->ids[(size_t)page * PAGE_IDS + index % PAGE_IDS];
}

bool wk_ids_append(struct wk_ids *s, uint32_t entry, const uint32_t *ids, uint32_t count)
{
    CHECK_OBJ(s, WK_IDS_MAGIC);
    CHECK(entry < s->seqs && (ids != NULL || count == 0));
    uint32_t have = s->counts[entry];
    if (count > s->context_max - have)
        return false;
    uint32_t pages_have = (have + PAGE_IDS - 1) / PAGE_IDS;
    uint32_t pages_want = (have + count + PAGE_IDS - 1) / PAGE_IDS;
    if (pages_want - pages_have > s->free_count)
        return false;
    for (uint32_t i = pages_have; i < pages_want; i++)
        s->pages[(size_t)entry * s->pages_per_seq + i] = s->free_pages[--s->free_count];
    for (uint32_t done = 0; done < count;) {
        uint32_t room = PAGE_IDS - (have + done) % PAGE_IDS;
        uint32_t piece = count - done < room ? count - done : room;
        memcpy(place(s, entry, have + done), ids + done, (size_t)piece * sizeof *ids);
        done += piece;
    }
    s->counts[entry] = have + count;
    return true;
}

uint32_t wk_ids_count(const struct wk_ids *s, uint32_t entry)
{
    CHECK_OBJ(s, WK_IDS_MAGIC);
    CHECK(entry < s->seqs);
    return s->counts[entry];
}

uint32_t wk_ids_at(const struct wk_ids *s, uint32_t entry, uint32_t index)
{
    CHECK_OBJ(s, WK_IDS_MAGIC);
    CHECK(entry < s->seqs && index < s->counts[entry]);
    return *place(s, entry, index);
}

void wk_ids_copy(const struct wk_ids *s, uint32_t entry, uint32_t first, uint32_t count,
                 uint32_t *ret_ids)
{
    CHECK_OBJ(s, WK_IDS_MAGIC);
    CHECK(entry < s->seqs && first <= s->counts[entry] && count <= s->counts[entry] - first);
    for (uint32_t done = 0; done < count;) {
        uint32_t room = PAGE_IDS - (first + done) % PAGE_IDS;
        uint32_t piece = count - done < room ? count - done : room;
        memcpy(ret_ids + done, place(s, entry, first + done), (size_t)piece * sizeof *ret_ids);
        done += piece;
    }
}

void wk_ids_drop(struct wk_ids *s, uint32_t entry)
{
    CHECK_OBJ(s, WK_IDS_MAGIC);
    CHECK(entry < s->seqs);
    uint32_t pages = (s->counts[entry] + PAGE_IDS - 1) / PAGE_IDS;
    for (uint32_t i = 0; i < pages; i++)
        s->free_pages[s->free_count++] = s->pages[(size_t)entry * s->pages_per_seq + i];
    CHECK(s->free_count <= s->page_count);
    s->counts[entry] = 0;
}

uint64_t wk_ids_free(const struct wk_ids *s)
{
    CHECK_OBJ(s, WK_IDS_MAGIC);
    return (uint64_t)s->free_count * PAGE_IDS;
}
