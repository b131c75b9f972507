/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_epoch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/str.h"

#define PATH_BYTES 1024

/* Whether `other` may move the epoch on; then it does. */
static bool epoch_follow(uint32_t *epoch, uint32_t other)
{
    if (other <= *epoch)
        return true;
    if (other - *epoch > KM_EPOCH_REACH || other >= KM_EPOCH_MAX)
        return false;
    *epoch = other;
    return true;
}

enum err km_epoch_choose(uint32_t local, uint32_t arena, uint32_t redis,
                         struct km_epoch_choice *ret, struct err_detail *detail)
{
    uint32_t epoch = local;
    if (local >= KM_EPOCH_MAX)
        return err_set(detail, ERR_UNSUPPORTED,
                       "kv-epoch: %u is the last one; remove that file from state_dir", local);
    struct km_epoch_choice choice = {.arena_ignored = !epoch_follow(&epoch, arena)};
    choice.redis_ignored = !epoch_follow(&epoch, redis);
    choice.epoch = epoch + 1;
    *ret = choice;
    return ERR_OK;
}

static enum err epoch_path(const char *state_dir, uint32_t id, const char *suffix,
                           char ret_path[PATH_BYTES], struct err_detail *detail)
{
    char which[16] = "";
    if (id > 0)
        snprintf(which, sizeof(which), "-%u", id);
    int written = snprintf(ret_path, PATH_BYTES, "%s/kv-epoch%s%s", state_dir, which, suffix);
    if (written < 0 || written >= PATH_BYTES)
        return err_set(detail, ERR_TOO_LARGE, "state_dir is too long");
    return ERR_OK;
}

enum err km_epoch_read(const char *state_dir, uint32_t id, uint32_t *ret_epoch,
                       struct err_detail *detail)
{
    char path[PATH_BYTES], text[16];
    TRY(epoch_path(state_dir, id, "", path, detail));
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) {
        *ret_epoch = 0;
        return ERR_OK;
    }
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    ssize_t got = read(fd, text, sizeof(text));
    int fault = errno;
    close(fd);
    if (got < 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(fault));
    uint64_t value;
    if (got < 2 || (size_t)got == sizeof(text) || text[got - 1] != '\n' ||
        !text_to_u64(text, (size_t)got - 1, &value) || value > KM_EPOCH_MAX)
        return err_set(detail, ERR_CORRUPT, "%s: not an epoch", path);
    *ret_epoch = (uint32_t)value;
    return ERR_OK;
}

static enum err folder_sync(const char *folder, struct err_detail *detail)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", folder, strerror(errno));
    int rc = fsync(fd);
    int fault = errno;
    close(fd);
    /* Some file systems have no fsync of folders; the rename is then as durable as it gets. */
    if (rc != 0 && fault != EINVAL)
        return err_set(detail, ERR_IO, "%s: fsync: %s", folder, strerror(fault));
    return ERR_OK;
}

enum err km_epoch_write(const char *state_dir, uint32_t id, uint32_t epoch,
                        struct err_detail *detail)
{
    char path[PATH_BYTES], fresh[PATH_BYTES], text[16];
    CHECK(epoch > 0 && epoch <= KM_EPOCH_MAX);
    TRY(epoch_path(state_dir, id, "", path, detail));
    TRY(epoch_path(state_dir, id, ".new", fresh, detail));
    int bytes = snprintf(text, sizeof(text), "%u\n", epoch);
    CHECK(bytes > 1 && (size_t)bytes < sizeof(text));
    if (unlink(fresh) != 0 && errno != ENOENT)
        return err_set(detail, ERR_IO, "%s: %s", fresh, strerror(errno));
    int fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", fresh, strerror(errno));
    errno = ENOSPC; /* what a short write means */
    int fault = 0;
    if (write(fd, text, (size_t)bytes) != bytes || fsync(fd) != 0)
        fault = errno;
    if (close(fd) != 0 && fault == 0)
        fault = errno;
    if (fault == 0 && rename(fresh, path) != 0)
        fault = errno;
    if (fault != 0) {
        unlink(fresh);
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(fault));
    }
    return folder_sync(state_dir, detail);
}
