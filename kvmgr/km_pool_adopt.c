/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks that come from elsewhere than a lease: the tier, or an arena of the process before; and
 * the audit of everything. */
#include <stdlib.h>
#include <string.h>

#include "kvmgr/km_pool.h"
#include "kvmgr/km_pool_state.h"
#include "lib/base/check.h"

uint32_t km_pool_load(struct km_pool *p, const struct hash128 *hash, uint32_t parent,
                      uint32_t session)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    uint32_t block = pool_take(p, KM_NO_HOLDER);
    pool_insert(p, block, hash, parent, KM_NODE_LOADING, session);
    km_index_ref(p->index, block);
    return block;
}

bool km_pool_adopt(struct km_pool *p, uint32_t block, const struct hash128 *hash,
                   const struct hash128 *parent, uint32_t position)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    CHECK(p->fresh == 0 && p->free_head == KM_NONE); /* before anything is taken */
    static const struct hash128 zeros;
    if (block >= p->options.block_count || km_index_node(p->index, block)->state != KM_NODE_FREE ||
        km_index_find(p->index, hash) != KM_NONE)
        return false;
    uint32_t parent_block = KM_NONE;
    if (position > 0) {
        parent_block = km_index_find(p->index, parent);
        if (parent_block == KM_NONE ||
            km_index_node(p->index, parent_block)->position + 1u != position)
            return false;
    } else if (memcmp(parent, &zeros, sizeof(zeros)) != 0) {
        return false;
    }
    struct km_node *n = km_index_node(p->index, block);
    n->holder = KM_NO_HOLDER;
    pool_insert(p, block, hash, parent_block, KM_NODE_INDEXED, KM_NONE);
    p->used++;
    return true;
}

void km_pool_adopted(struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    CHECK(p->fresh == 0 && p->free_head == KM_NONE);
    uint32_t end = p->options.block_count;
    while (end > 0 && km_index_node(p->index, end - 1)->state == KM_NODE_FREE)
        end--;
    p->fresh = end;
    for (uint32_t block = end; block > 0; block--) { /* low numbers are taken first */
        struct km_node *n = km_index_node(p->index, block - 1);
        if (n->state != KM_NODE_FREE)
            continue;
        n->link = p->free_head;
        p->free_head = block - 1;
        p->free_listed++;
    }
    for (uint32_t block = 0; block < end; block++) {
        if (km_index_node(p->index, block)->state == KM_NODE_INDEXED)
            km_pool_settle(p, block);
    }
    for (uint32_t block = 0; block < end; block++)
        (void)km_pool_prune(p, km_index_node(p->index, block)->state == KM_NODE_INDEXED ? block
                                                                                        : KM_NONE);
}

/* --- audit */

static void audit_lease(const struct km_pool *p, const struct km_lease *lease, uint32_t *refs,
                        uint32_t *ret_held)
{
    uint32_t block = lease->first;
    for (uint32_t k = lease->shared_count; k < lease->block_count; k++) {
        const struct km_node *n = km_index_node(p->index, block);
        CHECK(block < p->fresh && n->holder == lease->state_slot);
        CHECK(n->state == KM_NODE_PRIVATE || n->state == KM_NODE_INDEXED);
        CHECK(k + 1 != lease->committed_count || block == lease->committed_last);
        refs[block]++;
        *ret_held += 1;
        block = n->link;
    }
    CHECK(block == KM_NONE);
    block = lease->shared_tail;
    for (uint32_t k = lease->shared_count; k > 0; k--) {
        const struct km_node *n = km_index_node(p->index, block);
        CHECK(n->state == KM_NODE_INDEXED && n->position == k - 1);
        refs[block]++;
        block = n->parent;
    }
    CHECK(block == KM_NONE);
    if (lease->held != KM_NONE)
        refs[lease->held]++;
}

static uint32_t audit_free_list(const struct km_pool *p)
{
    uint32_t listed = 0;
    for (uint32_t block = p->free_head; block != KM_NONE;) {
        const struct km_node *n = km_index_node(p->index, block);
        CHECK(block < p->fresh && n->state == KM_NODE_FREE && n->refs == 0);
        CHECK(listed++ < p->free_listed);
        block = n->link;
    }
    return listed;
}

void km_pool_audit(const struct km_pool *p)
{
    CHECK_OBJ(p, KM_POOL_MAGIC);
    km_index_audit(p->index);
    uint32_t *refs = calloc(p->options.block_count, sizeof(*refs));
    CHECK(refs != NULL);
    uint32_t held = 0, leases = 0, states[4] = {0}, owned = 0, leaving = 0;
    for (uint32_t i = 0; i < p->options.slot_count; i++) {
        if (p->leases[i].id == 0)
            continue;
        leases++;
        audit_lease(p, &p->leases[i], refs, &held);
    }
    for (uint32_t block = 0; block < p->options.block_count; block++) {
        const struct km_node *n = km_index_node(p->index, block);
        states[n->state]++;
        CHECK(refs[block] <= n->refs);
        if (n->state != KM_NODE_FREE && n->holder != KM_NO_HOLDER)
            owned++;
        leaving += n->leaving;
        CHECK(!n->leaving || n->state == KM_NODE_INDEXED);
        if (n->state >= KM_NODE_INDEXED &&
            n->parent != KM_NONE) /* what stays stands on something */
            CHECK(n->leaving || !km_index_node(p->index, n->parent)->leaving);
    }
    CHECK(owned == held && leaving == p->leaving);
    CHECK(audit_free_list(p) == p->free_listed);
    CHECK(states[KM_NODE_FREE] == p->free_listed + p->options.block_count - p->fresh);
    CHECK(states[KM_NODE_PRIVATE] + km_index_count(p->index) == p->used);
    CHECK(leases + p->entries_free == p->options.slot_count);
    free(refs);
}
