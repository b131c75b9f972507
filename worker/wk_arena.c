/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_arena.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/check.h"

static bool same(const struct hash128 *a, const struct hash128 *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* The layout as this process computes it must be that of kvmgr and that of the file. */
static enum err file_agrees(const struct msg_kv_attach_reply *r, const struct kv_layout *layout,
                            const struct hash128 *model_fp, const struct kv_superblock *superblock,
                            struct err_detail *detail)
{
    struct kv_layout file;
    TRY(kv_superblock_check(superblock, r->arena_bytes, &file, detail));
    if (!same(&layout->layout_fp, &r->layout_fp) || !same(&file.layout_fp, &r->layout_fp))
        return err_set(detail, ERR_CORRUPT, "layout_fp: kvmgr, arena and worker differ");
    if (layout->block_count != r->block_count || file.block_count != r->block_count ||
        layout->slot_count != r->slot_count || file.slot_count != r->slot_count)
        return err_set(detail, ERR_CORRUPT, "block_count: %u said, %u computed, %u in the file",
                       r->block_count, layout->block_count, file.block_count);
    if (layout->live_count != r->live_slots || file.live_count != r->live_slots)
        return err_set(detail, ERR_CORRUPT, "live_slots: %u said, %u computed, %u in the file",
                       r->live_slots, layout->live_count, file.live_count);
    if (!same(&superblock->model_fp, model_fp))
        return err_set(detail, ERR_CORRUPT, "model_fp: the arena is another model's");
    if (superblock->incarnation != r->incarnation || superblock->epoch != r->epoch)
        return err_set(detail, ERR_EPOCH, "incarnation: the arena is another kvmgr's");
    return ERR_OK;
}

enum err wk_arena_map(const struct msg_kv_attach_reply *r, const struct kv_layout *layout,
                      const struct hash128 *model_fp, uint64_t worker,
                      struct wk_mapping *ret_mapping, struct err_detail *detail)
{
    struct stat st;
    int fd = open(r->arena_path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%.300s: %s", r->arena_path, strerror(errno));
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size != r->arena_bytes ||
        r->arena_bytes < KV_SUPERBLOCK_BYTES || r->arena_bytes < layout->arena_bytes) {
        close(fd);
        return err_set(detail, ERR_CORRUPT, "%.300s: size is not %" PRIu64, r->arena_path,
                       r->arena_bytes);
    }
    struct flock lock = {
        .l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = kv_lock_at(worker), .l_len = 1};
    if (fcntl(fd, F_OFD_SETLK, &lock) != 0) {
        close(fd);
        return err_set(detail, ERR_IO, "%.300s: lock: %s", r->arena_path, strerror(errno));
    }
    void *base = mmap(NULL, r->arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED)
        return err_set(detail, ERR_NOMEM, "%.300s: %s", r->arena_path, strerror(errno));
    struct kv_superblock superblock;
    memcpy(&superblock, base, sizeof superblock);
    enum err e = file_agrees(r, layout, model_fp, &superblock, detail);
    if (e != ERR_OK) {
        munmap(base, r->arena_bytes);
        return e;
    }
    *ret_mapping = (struct wk_mapping){.base = base, .bytes = r->arena_bytes, .layout = *layout};
    return ERR_OK;
}

void wk_arena_unmap(struct wk_mapping *m)
{
    if (m->base != NULL)
        munmap(m->base, m->bytes);
    *m = (struct wk_mapping){.base = NULL};
}

struct model_kv wk_arena_model_kv(const struct wk_mapping *m)
{
    const struct kv_layout *l = &m->layout;
    CHECK(m->base != NULL);
    return (struct model_kv){
        .blocks = m->base + l->blocks_at,
        .block_stride = l->block_bytes,
        .layer_stride = l->layer_stride,
        .index_offset = l->index_offset,
        .block_tokens = l->geometry.block_tokens,
        .block_count = l->block_count,
        .slots = m->base + l->slots_at,
        .slot_stride = l->live_bytes,
        .slot_count = l->live_count,
        .snapshots = m->base + l->slots_at + l->live_count * l->live_bytes,
        .snapshot_stride = l->snapshot_bytes,
        .snapshot_count = l->slot_count - l->live_count,
        .kv_type = (enum kv_row)(l->geometry.kv_dtype - KV_F32),
        .index_type = (enum kv_row)(l->geometry.index_dtype - KV_F32),
        .snapshot_type = (enum kv_row)(l->geometry.snapshot_dtype - KV_F32),
    };
}
