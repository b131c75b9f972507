/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_arena_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/file_io.h"

static const char *kind_of(mode_t mode)
{
    if (S_ISDIR(mode))
        return "a directory";
    if (S_ISFIFO(mode))
        return "a pipe";
    if (S_ISSOCK(mode))
        return "a socket";
    return "a device";
}

static enum err file_check(int fd, const char *path, bool lock, uint64_t *ret_bytes,
                           struct err_detail *detail)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return err_set(detail, ERR_UNSUPPORTED, "%s is %s", path, kind_of(st.st_mode));
    if (st.st_uid != geteuid())
        return err_set(detail, ERR_UNSUPPORTED, "%s belongs to user %u, not to us (%u)", path,
                       (unsigned)st.st_uid, (unsigned)geteuid());
    if (lock && flock(fd, LOCK_EX | LOCK_NB) != 0)
        return err_set(detail, ERR_BUSY, "%s is in use by another process", path);
    if ((st.st_mode & 07777) != 0600)
        return err_set(detail, ERR_CORRUPT, "its mode was %04o, not 0600",
                       (unsigned)(st.st_mode & 07777));
    if (st.st_nlink != 1)
        return err_set(detail, ERR_CORRUPT, "it has %u names", (unsigned)st.st_nlink);
    *ret_bytes = (uint64_t)st.st_size;
    return ERR_OK;
}

enum err km_arena_file_open(const char *path, bool write, int *ret_fd, uint64_t *ret_bytes,
                            struct err_detail *detail)
{
    CHECK(path[0] != '\0');
    int fd = open(path, (write ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        if (errno == ENOENT)
            return err_set(detail, ERR_NOT_FOUND, "%s: not there", path);
        if (errno == ELOOP)
            return err_set(detail, ERR_UNSUPPORTED, "%s is a symbolic link", path);
        if (errno == EISDIR)
            return err_set(detail, ERR_UNSUPPORTED, "%s is a directory", path);
        if (errno == ENXIO)
            return err_set(detail, ERR_UNSUPPORTED, "%s is a socket or device", path);
        struct stat st;
        /* Our own file without our right to write it: not one that we made. */
        if (errno == EACCES && lstat(path, &st) == 0 && S_ISREG(st.st_mode) &&
            st.st_uid == geteuid())
            return err_set(detail, ERR_CORRUPT, "its mode was %04o, not 0600",
                           (unsigned)(st.st_mode & 07777));
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    }
    enum err e = file_check(fd, path, write, ret_bytes, detail);
    if (e != ERR_OK) {
        close(fd);
        return e;
    }
    *ret_fd = fd;
    return ERR_OK;
}

enum err km_arena_file_make(const char *path, uint64_t bytes, char *ret_temp, size_t temp_bytes,
                            int *ret_fd, struct err_detail *detail)
{
    CHECK(bytes > 0 && bytes <= INT64_MAX);
    int written = snprintf(ret_temp, temp_bytes, "%s.new", path);
    if (written < 0 || (size_t)written >= temp_bytes)
        return err_set(detail, ERR_TOO_LARGE, "arena_path is too long");
    if (unlink(ret_temp) != 0 && errno != ENOENT) /* of a kvmgr that was killed here */
        return err_set(detail, ERR_IO, "%s: %s", ret_temp, strerror(errno));
    int fd = open(ret_temp, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", ret_temp, strerror(errno));
    if (fchmod(fd, 0600) != 0 || flock(fd, LOCK_EX | LOCK_NB) != 0 ||
        ftruncate(fd, (off_t)bytes) != 0) {
        enum err e = err_set(detail, ERR_IO, "%s: %s", ret_temp, strerror(errno));
        close(fd);
        unlink(ret_temp);
        return e;
    }
    *ret_fd = fd;
    return ERR_OK;
}

enum err km_arena_file_sealed(int fd, const struct kv_layout *l, bool slot, uint32_t index,
                              uint32_t *ret_sum)
{
    struct kv_block_header block;
    struct kv_slot_header state;
    if (slot) {
        TRY(file_read_at(fd, l->slot_headers_at + (uint64_t)index * KV_HEADER_BYTES, &state,
                         sizeof(state)));
        if (kv_slot_header_check(&state) != ERR_OK || state.state != KV_COMMITTED)
            return ERR_CORRUPT;
        *ret_sum = state.data_crc;
        return ERR_OK;
    }
    TRY(file_read_at(fd, l->block_headers_at + (uint64_t)index * KV_HEADER_BYTES, &block,
                     sizeof(block)));
    if (kv_block_header_check(&block) != ERR_OK || block.state != KV_COMMITTED)
        return ERR_CORRUPT;
    *ret_sum = block.data_crc;
    return ERR_OK;
}

enum err km_arena_file_sum(int fd, uint64_t at, uint64_t count, uint32_t *ret_sum)
{
    uint8_t piece[KV_SUM_PIECE_BYTES];
    uint32_t sum = 0;
    while (count > 0) {
        size_t some = count < sizeof(piece) ? (size_t)count : sizeof(piece);
        TRY(file_read_at(fd, at, piece, some));
        sum = kv_data_sum_add(sum, piece, some);
        at += some;
        count -= some;
    }
    *ret_sum = kv_data_sum_end(sum);
    return ERR_OK;
}

uint64_t km_arena_file_system_bytes(const char *path)
{
    char folder[1024];
    int written = snprintf(folder, sizeof(folder), "%s", path);
    if (written < 0 || (size_t)written >= sizeof(folder))
        return 0;
    char *slash = strrchr(folder, '/');
    if (!slash)
        snprintf(folder, sizeof(folder), ".");
    else
        slash[slash == folder ? 1 : 0] = '\0';
    struct statvfs fs;
    if (statvfs(folder, &fs) != 0)
        return 0;
    return (uint64_t)fs.f_blocks * fs.f_frsize;
}

bool km_arena_header_unused(const void *header)
{
    static const uint8_t zeros[KV_HEADER_BYTES];
    return memcmp(header, zeros, sizeof(zeros)) == 0;
}
