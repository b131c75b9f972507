/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_audit.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvmgr/km_arena_file.h"
#include "lib/base/check.h"
#include "lib/base/file_io.h"
#include "lib/base/str.h"

#define HEADERS_A_READ 64u
#define READS_MAX      4

/* --- chains */

struct chain_block {
    struct hash128 hash, parent;
    uint32_t position;
    bool chained;
};

struct chains {
    struct chain_block *blocks; /* committed ones */
    uint32_t *order;            /* their places, by rising position */
    uint32_t count;
    struct kv_slot_header *snapshots;
    uint32_t snapshot_count;
};

static int by_hash(const void *x, const void *y)
{
    return memcmp(&((const struct chain_block *)x)->hash, &((const struct chain_block *)y)->hash,
                  sizeof(struct hash128));
}

static int by_position(const void *x, const void *y, void *arg)
{
    const struct chain_block *blocks = arg;
    uint32_t a = blocks[*(const uint32_t *)x].position, b = blocks[*(const uint32_t *)y].position;
    return a < b ? -1 : a > b;
}

static struct chain_block *chain_find(const struct chains *c, const struct hash128 *hash)
{
    struct chain_block key = {.hash = *hash};
    return bsearch(&key, c->blocks, c->count, sizeof(key), by_hash);
}

static void chains_count(struct chains *c, uint32_t block_tokens, struct km_audit *audit)
{
    static const struct hash128 zeros;
    qsort(c->blocks, c->count, sizeof(*c->blocks), by_hash);
    for (uint32_t i = 0; i < c->count; i++) {
        c->order[i] = i;
        audit->doubled += i > 0 && by_hash(&c->blocks[i - 1], &c->blocks[i]) == 0;
    }
    qsort_r(c->order, c->count, sizeof(*c->order), by_position, c->blocks);
    for (uint32_t i = 0; i < c->count; i++) {
        struct chain_block *b = &c->blocks[c->order[i]];
        const struct chain_block *parent = b->position > 0 ? chain_find(c, &b->parent) : NULL;
        if (b->position == 0)
            b->chained = memcmp(&b->parent, &zeros, sizeof(zeros)) == 0;
        else
            b->chained = parent && parent->chained && parent->position + 1 == b->position;
        *(b->chained ? &audit->chained : &audit->unchained) += 1;
    }
    for (uint32_t i = 0; i < c->snapshot_count; i++) {
        const struct chain_block *b = chain_find(c, &c->snapshots[i].hash);
        bool good = b && b->chained &&
                    (uint64_t)(b->position + 1) * block_tokens == c->snapshots[i].token_count;
        *(good ? &audit->snapshots : &audit->snapshots_stray) += 1;
    }
}

/* --- headers */

struct header_table {
    bool slots;
    uint64_t at;
    uint32_t count;
    const struct kv_layout *layout;
    struct kv_place (*place)(const struct kv_layout *layout, uint32_t index);
    bool (*sound)(const void *header);
    uint32_t (*data_crc)(const void *header);
    void (*add)(struct km_audit *audit, struct chains *chains, const void *header);
};

static void audit_block(struct km_audit *audit, struct chains *chains, const void *bytes)
{
    struct kv_block_header h;
    memcpy(&h, bytes, sizeof(h));
    if (km_arena_header_unused(&h)) {
        audit->blocks_unused++;
        return;
    }
    if (kv_block_header_check(&h) != ERR_OK) {
        audit->headers_broken++;
        return;
    }
    CHECK(h.state < ARRAY_COUNT(audit->blocks_by_state));
    audit->blocks_by_state[h.state]++;
    if (h.state == KV_COMMITTED)
        chains->blocks[chains->count++] = (struct chain_block){h.hash, h.parent, h.position, false};
    audit->epochs_ahead += h.epoch > audit->superblock.epoch;
}

static void audit_slot(struct km_audit *audit, struct chains *chains, const void *bytes)
{
    struct kv_slot_header h;
    memcpy(&h, bytes, sizeof(h));
    if (km_arena_header_unused(&h)) {
        audit->slots_unused++;
        return;
    }
    if (kv_slot_header_check(&h) != ERR_OK) {
        audit->headers_broken++;
        return;
    }
    CHECK(h.state < ARRAY_COUNT(audit->slots_by_state));
    audit->slots_by_state[h.state]++;
    if (h.state == KV_COMMITTED)
        chains->snapshots[chains->snapshot_count++] = h;
    audit->epochs_ahead += h.epoch > audit->superblock.epoch;
}

/* A header that changed meanwhile says nothing about the data that were read. */
static void audit_data(int fd, const struct header_table *table, uint32_t index, const void *header,
                       struct km_audit *audit)
{
    uint8_t again[KV_HEADER_BYTES];
    uint32_t said = table->data_crc(header), sum;
    struct kv_place place = table->place(table->layout, index);
    if (said == 0 || km_arena_file_sum(fd, place.at, place.bytes, &sum) != ERR_OK)
        return;
    if (sum != said &&
        file_read_at(fd, table->at + (uint64_t)index * KV_HEADER_BYTES, again, sizeof(again)) ==
            ERR_OK &&
        memcmp(again, header, sizeof(again)) == 0)
        audit->data_broken++;
}

/* What was never used has no guard yet. */
static void audit_guard(int fd, const struct header_table *table, uint32_t index,
                        const void *header, struct km_audit *audit)
{
    static const uint8_t zeros[KV_GUARD_BYTES_MAX];
    uint8_t found[KV_GUARD_BYTES_MAX], whole[KV_GUARD_BYTES_MAX];
    struct kv_place place = table->place(table->layout, index);
    uint64_t count = place.guard_bytes;
    CHECK(count <= sizeof(found));
    kv_guard_fill(whole, count);
    if (file_read_at(fd, place.guard_at, found, count) != ERR_OK ||
        memcmp(found, whole, count) == 0)
        return;
    if ((km_arena_header_unused(header) || !table->sound(header)) &&
        memcmp(found, zeros, count) == 0)
        return;
    if (audit->guards_broken++ > 0)
        return;
    audit->guard_slot = table->slots;
    audit->guard_index = index;
}

static uint32_t block_crc(const void *header)
{
    struct kv_block_header h;
    memcpy(&h, header, sizeof(h));
    return h.state == KV_COMMITTED && kv_block_header_check(&h) == ERR_OK ? h.data_crc : 0;
}

static uint32_t slot_crc(const void *header)
{
    struct kv_slot_header h;
    memcpy(&h, header, sizeof(h));
    return h.state == KV_COMMITTED && kv_slot_header_check(&h) == ERR_OK ? h.data_crc : 0;
}

static bool block_sound(const void *header)
{
    struct kv_block_header h;
    memcpy(&h, header, sizeof(h));
    return km_arena_header_unused(&h) || kv_block_header_check(&h) == ERR_OK;
}

static bool slot_sound(const void *header)
{
    struct kv_slot_header h;
    memcpy(&h, header, sizeof(h));
    return km_arena_header_unused(&h) || kv_slot_header_check(&h) == ERR_OK;
}

/* A running kvmgr may be in the middle of a header: one that looks broken is read again. */
static enum err audit_headers(int fd, const struct header_table *table, struct km_audit *audit,
                              struct chains *chains)
{
    uint8_t buffer[HEADERS_A_READ * KV_HEADER_BYTES];
    for (uint32_t done = 0; done < table->count; done += HEADERS_A_READ) {
        uint32_t left = table->count - done;
        uint32_t some = left < HEADERS_A_READ ? left : HEADERS_A_READ;
        uint64_t at = table->at + (uint64_t)done * KV_HEADER_BYTES;
        TRY(file_read_at(fd, at, buffer, (size_t)some * KV_HEADER_BYTES));
        for (uint32_t i = 0; i < some; i++) {
            uint8_t *header = buffer + (size_t)i * KV_HEADER_BYTES;
            for (int tries = 0; tries < READS_MAX && !table->sound(header); tries++)
                TRY(file_read_at(fd, at + (uint64_t)i * KV_HEADER_BYTES, header, KV_HEADER_BYTES));
            table->add(audit, chains, header);
            audit_data(fd, table, done + i, header, audit);
            audit_guard(fd, table, done + i, header, audit);
        }
    }
    return ERR_OK;
}

static enum err superblock_read(int fd, uint64_t file_bytes, struct kv_superblock *ret_superblock,
                                struct kv_layout *ret_layout, struct err_detail *detail)
{
    if (file_bytes < KV_SUPERBLOCK_BYTES)
        return err_set(detail, ERR_CORRUPT, "%" PRIu64 " bytes, no superblock", file_bytes);
    if (file_read_at(fd, 0, ret_superblock, sizeof(*ret_superblock)) != ERR_OK)
        return err_set(detail, ERR_IO, "the superblock cannot be read");
    return kv_superblock_check(ret_superblock, file_bytes, ret_layout, detail);
}

enum err km_audit_read(const char *path, struct km_audit *ret_audit, struct err_detail *detail)
{
    struct km_audit audit = {0};
    struct chains chains = {0};
    struct kv_layout layout;
    int fd = -1;
    uint64_t file_bytes = 0;
    TRY(km_arena_file_open(path, false, &fd, &file_bytes, detail));
    enum err e = superblock_read(fd, file_bytes, &audit.superblock, &layout, detail);
    if (e != ERR_OK)
        goto out;
    struct header_table blocks = {false,
                                  layout.block_headers_at,
                                  layout.block_count,
                                  &layout,
                                  kv_block_place,
                                  block_sound,
                                  block_crc,
                                  audit_block};
    struct header_table slots = {true,
                                 layout.slot_headers_at,
                                 layout.slot_count,
                                 &layout,
                                 kv_slot_place,
                                 slot_sound,
                                 slot_crc,
                                 audit_slot};
    chains.blocks = calloc(layout.block_count, sizeof(*chains.blocks));
    chains.order = calloc(layout.block_count, sizeof(*chains.order));
    chains.snapshots = calloc(layout.slot_count, sizeof(*chains.snapshots));
    if (!chains.blocks || !chains.order || !chains.snapshots) {
        e = err_set(detail, ERR_NOMEM, "no memory for %u headers", layout.block_count);
        goto out;
    }
    e = audit_headers(fd, &blocks, &audit, &chains);
    if (e == ERR_OK)
        e = audit_headers(fd, &slots, &audit, &chains);
    if (e != ERR_OK) {
        e = err_set(detail, e, "the headers cannot be read");
        goto out;
    }
    chains_count(&chains, layout.geometry.block_tokens, &audit);
    *ret_audit = audit;
out:
    free(chains.blocks);
    free(chains.order);
    free(chains.snapshots);
    close(fd);
    return e;
}

bool km_audit_sound(const struct km_audit *audit)
{
    uint64_t blocks = audit->blocks_unused, slots = audit->slots_unused;
    for (uint32_t i = 0; i < ARRAY_COUNT(audit->blocks_by_state); i++) {
        blocks += audit->blocks_by_state[i];
        slots += audit->slots_by_state[i];
    }
    return audit->headers_broken == 0 && audit->epochs_ahead == 0 &&
           blocks == audit->superblock.block_count && slots == audit->superblock.slot_count;
}

bool km_audit_chained(const struct km_audit *audit)
{
    CHECK(audit->chained + audit->unchained == audit->blocks_by_state[KV_COMMITTED]);
    if (audit->superblock.flags &
        KV_FLAG_FOLLOWS) /* the authority's headers say what is in chains */
        return audit->data_broken == 0;
    return audit->unchained == 0 && audit->doubled == 0 && audit->snapshots_stray == 0 &&
           audit->data_broken == 0 && audit->guards_broken == 0;
}

static void print_states(FILE *out, const char *what, uint64_t unused, const uint64_t by_state[3])
{
    fprintf(out,
            "%s: %" PRIu64 " unused, %" PRIu64 " free, %" PRIu64 " writing, %" PRIu64
            " committed\n",
            what, unused, by_state[KV_FREE], by_state[KV_WRITING], by_state[KV_COMMITTED]);
}

void km_audit_print(FILE *out, const char *path, const struct km_audit *audit)
{
    const struct kv_superblock *s = &audit->superblock;
    char layout[33], model[33];
    hex_encode(&s->layout_fp, sizeof(s->layout_fp), layout);
    hex_encode(&s->model_fp, sizeof(s->model_fp), model);
    fprintf(out, "arena: %s\n", path);
    fprintf(out, "epoch: %u\nincarnation: %016" PRIx64 "\nlayout_fp: %s\nmodel_fp: %s\n", s->epoch,
            s->incarnation, layout, model);
    fprintf(out, "bytes: %" PRIu64 "\nblock_tokens: %u\nsnapshots: %s\nrole: %s\n", s->arena_bytes,
            s->block_tokens, s->snapshot_dtype == KV_BF16 ? "bf16" : "f32",
            s->flags & KV_FLAG_FOLLOWS ? "arena" : "authority");
    print_states(out, "blocks", audit->blocks_unused, audit->blocks_by_state);
    print_states(out, "slots", audit->slots_unused, audit->slots_by_state);
    fprintf(out, "headers broken: %" PRIu64 "\nheaders of a later epoch: %" PRIu64 "\n",
            audit->headers_broken, audit->epochs_ahead);
    uint64_t unused = audit->blocks_unused + audit->blocks_by_state[KV_FREE];
    uint64_t committed = audit->blocks_by_state[KV_COMMITTED];
    uint64_t leased = audit->blocks_by_state[KV_WRITING];
    fprintf(out,
            "chains: %" PRIu64 " blocks in chains, %" PRIu64 " behind a hole, %" PRIu64
            " twice\nsnapshots: %" PRIu64 " of blocks in chains, %" PRIu64 " stray\n",
            audit->chained, audit->unchained, audit->doubled, audit->snapshots,
            audit->snapshots_stray);
    fprintf(out, "data other than committed: %" PRIu64 "\nguards overwritten: %" PRIu64,
            audit->data_broken, audit->guards_broken);
    if (audit->guards_broken > 0)
        fprintf(out, ", first behind %s %u", audit->guard_slot ? "slot" : "block",
                audit->guard_index);
    fprintf(out, "\n");
    fprintf(out,
            "sum: %" PRIu64 " free + %" PRIu64 " committed + %" PRIu64 " leased = %" PRIu64
            " of %u: %s\n",
            unused, committed, leased, unused + committed + leased, s->block_count,
            unused + committed + leased == s->block_count ? "ok" : "WRONG");
}

uint32_t km_audit_epoch(const char *path)
{
    struct kv_superblock s;
    struct kv_layout layout;
    uint64_t file_bytes = 0;
    int fd = -1;
    if (km_arena_file_open(path, false, &fd, &file_bytes, NULL) != ERR_OK)
        return 0;
    enum err e = superblock_read(fd, file_bytes, &s, &layout, NULL);
    close(fd);
    return e == ERR_OK ? s.epoch : 0;
}
