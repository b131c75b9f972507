/* SPDX-License-Identifier: Apache-2.0 */
/* An arena file of any bytes: audit and recovery never crash, and what was opened is sound. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvmgr/km_arena.h"
#include "kvmgr/km_audit.h"
#include "lib/base/check.h"

#define ARENA_BYTES (96u << 10)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char folder[64], path[96];
static uint8_t good[ARENA_BYTES];
static size_t good_bytes;

static struct km_arena_options options_of(uint32_t epoch)
{
    struct km_arena_options o = {
        .path = path,
        .arena_bytes = ARENA_BYTES,
        .geometry = {.dsa_layers = 1,
                     .latent_dim = 8,
                     .index_dim = 8,
                     .index_kpool = 4,
                     .block_tokens = 16,
                     .kv_dtype = KV_F32,
                     .index_dtype = KV_F32,
                     .snapshot_dtype = KV_BF16,
                     .ranks = 1,
                     .interleave = 16,
                     .state_bytes = 100},
        .live_count = 1,
        .slot_count = 2,
        .epoch = epoch,
        .incarnation = 1,
    };
    return o;
}

static struct km_arena *open_any(uint32_t epoch)
{
    struct km_arena_options o = options_of(epoch);
    struct km_arena *a = NULL;
    struct km_arena_report report;
    struct err_detail detail = {{0}};
    CHECK(km_arena_open(&o, &a, &report, &detail) == ERR_OK);
    CHECK(report.adopted || report.replaced || epoch == 1);
    return a;
}

static void remove_all(void)
{
    unlink(path);
    rmdir(folder);
}

/* A sound file with used blocks, as bytes. */
static void good_make(void)
{
    snprintf(folder, sizeof(folder), P_tmpdir "/tandem-fuzz-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    atexit(remove_all);
    snprintf(path, sizeof(path), "%s/arena.kv", folder);
    struct km_arena *a = open_any(1);
    uint32_t blocks[] = {0, 1, 2, 5}, slot = 1;
    struct hash128 hashes[2] = {{{1}}, {{2}}}, parent = {{0}};
    km_arena_blocks_writing(a, blocks, 4);
    km_arena_blocks_commit(a, blocks, 2, 0, &parent, hashes);
    km_arena_slots_writing(a, &slot, 1, true);
    km_arena_close(&a);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = read(fd, good, sizeof(good));
    close(fd);
    CHECK(got > 8192);
    good_bytes = (size_t)got;
}

static void file_put(const void *bytes, size_t count)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, bytes, count) == (ssize_t)count);
    close(fd);
}

/* First byte: 0 the rest is the file; else it is patches {offset u16, byte} on a sound file, with
 * bit 1 the superblock sealed again, with bit 2 the file cut. */
static void file_make(const uint8_t *data, size_t size)
{
    static uint8_t image[ARENA_BYTES];
    size_t bytes = good_bytes;
    if (size == 0 || data[0] == 0) {
        file_put(data + (size > 0), size > 0 ? size - 1 : 0);
        return;
    }
    memcpy(image, good, good_bytes);
    for (size_t i = 1; i + 3 <= size; i += 3) {
        size_t at = ((size_t)data[i] << 8 | data[i + 1]) % good_bytes;
        image[at] = data[i + 2];
    }
    if (data[0] & 2) {
        struct kv_superblock s;
        memcpy(&s, image, sizeof(s));
        kv_superblock_seal(&s);
        memcpy(image, &s, sizeof(s));
    }
    if (data[0] & 4 && size > 2)
        bytes = ((size_t)data[1] << 8 | data[2]) % good_bytes;
    file_put(image, bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (good_bytes == 0)
        good_make();
    file_make(data, size);
    struct km_audit audit;
    struct err_detail detail;
    (void)!km_audit_read(path, &audit, &detail);
    (void)km_audit_epoch(path);
    struct km_arena *a = open_any(7);
    uint32_t blocks[] = {0, 1, 5}, slot = 0;
    km_arena_blocks_writing(a, blocks, 3);
    km_arena_blocks_free(a, blocks, 2);
    km_arena_slots_writing(a, &slot, 1, false);
    km_arena_close(&a);
    CHECK(km_audit_read(path, &audit, &detail) == ERR_OK);
    CHECK(km_audit_sound(&audit) && audit.blocks_by_state[KV_WRITING] == 1);
    CHECK(audit.superblock.epoch == 7 && audit.slots_by_state[KV_WRITING] == 1);
    return 0;
}
