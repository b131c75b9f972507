/* SPDX-License-Identifier: Apache-2.0 */
/* An object file of the tier of any bytes: the listing and a read never crash, and what is told or
 * read had a whole footer of this layout and model. */
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvmgr/km_arena.h"
#include "kvmgr/km_store.h"
#include "kvmgr/km_tier.h"
#include "lib/base/check.h"

#define OBJECT_MAX (64u << 10)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char folder[64], path[96], dir[96], object[400];
static struct km_arena *arena;
static struct hash128 hash, model_fp;
static uint8_t good[OBJECT_MAX];
static size_t good_bytes;

static void remove_all(void)
{
    char command[128];
    snprintf(command, sizeof(command), "rm -rf '%s'", folder);
    CHECK(system(command) == 0);
}

static void wake(void *arg)
{
}

static struct km_store *store_open(void)
{
    struct km_store *s = NULL;
    struct err_detail detail = {{0}};
    struct km_store_options o = {.dir = dir,
                                 .arena_fd = km_arena_fd(arena),
                                 .layout = km_arena_layout(arena),
                                 .model_fp = model_fp,
                                 .zstd_level = 1,
                                 .wake = wake};
    CHECK(km_store_open(&o, &s, &detail) == ERR_OK);
    return s;
}

/* Carries one operation out; *ret_found: objects that the listing told until then. */
static enum err operation(struct km_store *s, enum km_store_op op, uint32_t index,
                          uint32_t *ret_found)
{
    struct km_store_item it = {.op = op,
                               .kind = KM_OBJECT_BLOCK,
                               .index = index,
                               .token_count = 16,
                               .hash = hash,
                               .parent = {{9}}};
    struct km_store_poll news;
    km_store_submit(s, &it);
    for (;;) {
        km_store_poll(s, &news);
        if (news.news == KM_STORE_RESULT)
            return news.result.code;
        *ret_found += news.news == KM_STORE_FOUND;
        if (news.news == KM_STORE_NOTHING)
            usleep(20);
    }
}

/* A sound object, as bytes. */
static void good_make(void)
{
    struct km_arena_options o = {.arena_bytes = 96u << 10,
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
                                 .slot_count = 3,
                                 .epoch = 1,
                                 .incarnation = 1};
    struct km_arena_report report;
    struct err_detail detail = {{0}};
    snprintf(folder, sizeof(folder), P_tmpdir "/tandem-fuzz-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    atexit(remove_all);
    snprintf(path, sizeof(path), "%s/arena.kv", folder);
    snprintf(dir, sizeof(dir), "%s/store", folder);
    o.path = path;
    CHECK(km_arena_open(&o, &arena, &report, &detail) == ERR_OK);
    memset(&hash, 0xab, sizeof(hash));
    memset(&model_fp, 0x5a, sizeof(model_fp));
    struct km_store *s = store_open();
    struct hash128 parent = {{9}};
    uint32_t found = 0, block = 0;
    km_arena_blocks_writing(arena, &block, 1);
    km_arena_blocks_commit(arena, &block, 1, 0, &parent, &hash);
    CHECK(operation(s, KM_STORE_WRITE, block, &found) == ERR_OK);
    km_store_close(&s);
    char command[200];
    snprintf(command, sizeof(command), "ls %s/*/ab/*.b", dir);
    FILE *f = popen(command, "re");
    CHECK(f != NULL && fgets(object, sizeof(object), f) != NULL);
    pclose(f);
    object[strcspn(object, "\n")] = '\0';
    int fd = open(object, O_RDONLY | O_CLOEXEC);
    ssize_t got = read(fd, good, sizeof(good));
    close(fd);
    CHECK(got >= 2 * (ssize_t)KM_STORE_PAGE);
    good_bytes = (size_t)got;
}

/* First byte: 0 the rest is the file; else it is patches {offset u16, byte} on a sound one, with
 * bit 1 the data and with bit 2 the footer sealed again, with bit 4 the file cut. */
static void object_make(const uint8_t *data, size_t size)
{
    static uint8_t image[OBJECT_MAX];
    size_t bytes = good_bytes, footer_at = good_bytes - KM_STORE_PAGE;
    const void *from = image;
    memcpy(image, good, good_bytes);
    if (size == 0 || data[0] == 0) {
        from = data + (size > 0);
        bytes = size > 0 ? size - 1 : 0;
    } else {
        struct km_store_footer f;
        for (size_t i = 1; i + 3 <= size; i += 3) {
            size_t at = ((size_t)data[i] << 8 | data[i + 1]) % (good_bytes + sizeof(f));
            at = at < good_bytes ? at : footer_at + at - good_bytes; /* it counts twice */
            image[at] = data[i + 2];
        }
        memcpy(&f, image + footer_at, sizeof(f));
        if (data[0] & 2 && f.stored_bytes <= footer_at)
            f.data_crc = hash_crc32c(0, image, f.stored_bytes);
        if (data[0] & 4)
            f.crc = hash_crc32c(0, &f, offsetof(struct km_store_footer, crc));
        memcpy(image + footer_at, &f, sizeof(f));
        if (data[0] & 16 && size > 2)
            bytes = ((size_t)data[1] << 8 | data[2]) % good_bytes;
    }
    int fd = open(object, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, from, bytes) == (ssize_t)bytes);
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (good_bytes == 0)
        good_make();
    object_make(data, size);
    struct km_store *s = store_open();
    uint32_t found = 0;
    enum err e = operation(s, KM_STORE_READ, 1, &found);
    CHECK(e == ERR_OK || e == ERR_CORRUPT || e == ERR_NOT_FOUND);
    CHECK(found <= 1 && (e != ERR_OK || access(object, F_OK) == 0));
    CHECK(e != ERR_CORRUPT || access(object, F_OK) != 0);
    km_store_close(&s);
    return 0;
}
