/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_audit.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "kvmgr/km_arena_file.h"
#include "lib/base/check.h"
#include "lib/base/str.h"

#define HEADERS_A_READ 64u
#define READS_MAX      4

static void audit_block(struct km_audit *audit, const void *bytes)
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
    audit->epochs_ahead += h.epoch > audit->superblock.epoch;
}

static void audit_slot(struct km_audit *audit, const void *bytes)
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
    audit->epochs_ahead += h.epoch > audit->superblock.epoch;
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

struct header_table {
    uint64_t at;
    uint32_t count;
    bool (*sound)(const void *header);
    void (*add)(struct km_audit *audit, const void *header);
};

/* A running kvmgr may be in the middle of a header: one that looks broken is read again. */
static enum err audit_headers(int fd, const struct header_table *table, struct km_audit *audit)
{
    uint8_t buffer[HEADERS_A_READ * KV_HEADER_BYTES];
    for (uint32_t done = 0; done < table->count; done += HEADERS_A_READ) {
        uint32_t left = table->count - done;
        uint32_t some = left < HEADERS_A_READ ? left : HEADERS_A_READ;
        uint64_t at = table->at + (uint64_t)done * KV_HEADER_BYTES;
        TRY(km_arena_file_read(fd, at, buffer, (size_t)some * KV_HEADER_BYTES));
        for (uint32_t i = 0; i < some; i++) {
            uint8_t *header = buffer + (size_t)i * KV_HEADER_BYTES;
            for (int tries = 0; tries < READS_MAX && !table->sound(header); tries++)
                TRY(km_arena_file_read(fd, at + (uint64_t)i * KV_HEADER_BYTES, header,
                                       KV_HEADER_BYTES));
            table->add(audit, header);
        }
    }
    return ERR_OK;
}

static enum err superblock_read(int fd, uint64_t file_bytes, struct kv_superblock *ret_superblock,
                                struct kv_layout *ret_layout, struct err_detail *detail)
{
    if (file_bytes < KV_SUPERBLOCK_BYTES)
        return err_set(detail, ERR_CORRUPT, "%" PRIu64 " bytes, no superblock", file_bytes);
    if (km_arena_file_read(fd, 0, ret_superblock, sizeof(*ret_superblock)) != ERR_OK)
        return err_set(detail, ERR_IO, "the superblock cannot be read");
    return kv_superblock_check(ret_superblock, file_bytes, ret_layout, detail);
}

enum err km_audit_read(const char *path, struct km_audit *ret_audit, struct err_detail *detail)
{
    struct km_audit audit = {0};
    struct kv_layout layout;
    int fd = -1;
    uint64_t file_bytes = 0;
    TRY(km_arena_file_open(path, false, &fd, &file_bytes, detail));
    enum err e = superblock_read(fd, file_bytes, &audit.superblock, &layout, detail);
    if (e != ERR_OK)
        goto out;
    struct header_table blocks = {layout.block_headers_at, layout.block_count, block_sound,
                                  audit_block};
    struct header_table slots = {layout.slot_headers_at, layout.slot_count, slot_sound, audit_slot};
    e = audit_headers(fd, &blocks, &audit);
    if (e == ERR_OK)
        e = audit_headers(fd, &slots, &audit);
    if (e != ERR_OK)
        e = err_set(detail, e, "the headers cannot be read");
    else
        *ret_audit = audit;
out:
    close(fd);
    return e;
}

bool km_audit_sound(const struct km_audit *audit)
{
    return audit->headers_broken == 0 && audit->epochs_ahead == 0;
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
    fprintf(out, "bytes: %" PRIu64 "\nblock_tokens: %u\n", s->arena_bytes, s->block_tokens);
    print_states(out, "blocks", audit->blocks_unused, audit->blocks_by_state);
    print_states(out, "slots", audit->slots_unused, audit->slots_by_state);
    fprintf(out, "headers broken: %" PRIu64 "\nheaders of a later epoch: %" PRIu64 "\n",
            audit->headers_broken, audit->epochs_ahead);
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
