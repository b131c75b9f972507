/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/block_hash.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"

#define PATH_BYTES 1024

STATIC_CHECK(sizeof(struct block_hash_key) == BLOCK_HASH_KEY_BYTES);
STATIC_CHECK(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

static enum err key_read(const char *path, struct block_hash_key *ret_key,
                         struct err_detail *detail)
{
    struct block_hash_key key;
    uint8_t extra;
    struct stat st;
    enum err e = ERR_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return err_set(detail, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO, "%s: %s", path,
                       strerror(errno));
    if (fstat(fd, &st) != 0)
        e = err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode) || (st.st_mode & 0777) != 0600)
        e = err_set(detail, ERR_INVALID, "%s: mode %03o, expected 600", path,
                    (unsigned)(st.st_mode & 0777));
    else if (st.st_size != (off_t)sizeof(key) || read(fd, &key, sizeof(key)) != sizeof(key) ||
             read(fd, &extra, 1) != 0)
        e = err_set(detail, ERR_INVALID, "%s: %lld bytes, expected %u", path, (long long)st.st_size,
                    BLOCK_HASH_KEY_BYTES);
    close(fd);
    if (e == ERR_OK)
        *ret_key = key;
    return e;
}

/* Written beside and linked into place, so that nobody ever reads half a key; the first of several
 * processes that start together wins. */
static enum err key_make(const char *path, struct err_detail *detail)
{
    struct block_hash_key key;
    char temporary[PATH_BYTES + 32];
    enum err e = ERR_OK;
    int bytes = snprintf(temporary, sizeof(temporary), "%s.%ld", path, (long)getpid());
    CHECK(bytes > 0 && (size_t)bytes < sizeof(temporary));
    rng_system(&key, sizeof(key));
    (void)unlink(temporary);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", temporary, strerror(errno));
    if (fchmod(fd, 0600) != 0 || write(fd, &key, sizeof(key)) != sizeof(key) || fsync(fd) != 0)
        e = err_set(detail, ERR_IO, "%s: %s", temporary, strerror(errno));
    close(fd);
    if (e == ERR_OK && link(temporary, path) != 0 && errno != EEXIST)
        e = err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    (void)unlink(temporary);
    return e;
}

enum err block_hash_key_load(const char *state_dir, struct block_hash_key *ret_key,
                             struct err_detail *detail)
{
    char path[PATH_BYTES];
    CHECK(state_dir != NULL && ret_key != NULL);
    int bytes = snprintf(path, sizeof(path), "%s/cluster.key", state_dir);
    if (bytes < 0 || (size_t)bytes >= sizeof(path))
        return err_set(detail, ERR_TOO_LARGE, "state_dir: path too long");
    enum err e = key_read(path, ret_key, detail);
    if (e != ERR_NOT_FOUND)
        return e;
    TRY(key_make(path, detail));
    return key_read(path, ret_key, detail);
}

struct hash128 block_hash_salt(const struct block_hash_key *key, const char *cache_salt)
{
    CHECK(key != NULL);
    if (cache_salt == NULL || cache_salt[0] == '\0')
        return (struct hash128){{0}};
    return hash_blake2b(key->bytes, sizeof(key->bytes), cache_salt, strlen(cache_salt), NULL, 0,
                        NULL, 0);
}

struct hash128 block_hash_next(const struct block_hash_key *key, const struct hash128 *parent,
                               const struct hash128 *salt, const uint32_t *ids, uint32_t count)
{
    CHECK(key != NULL && parent != NULL && salt != NULL);
    CHECK(ids != NULL || count == 0);
    return hash_blake2b(key->bytes, sizeof(key->bytes), parent->bytes, sizeof(parent->bytes),
                        salt->bytes, sizeof(salt->bytes), ids, (size_t)count * sizeof(*ids));
}

void block_hash_session(const struct block_hash_key *key, const char *session_key, char ret_hex[33])
{
    CHECK(key != NULL && session_key != NULL);
    struct hash128 h = hash_blake2b(key->bytes, sizeof(key->bytes), session_key,
                                    strlen(session_key), NULL, 0, NULL, 0);
    hex_encode(h.bytes, sizeof(h.bytes), ret_hex);
}
