/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/peers_key.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include "lib/base/check.h"

#define KEY_BYTES 32u

static enum err secret_read(const char *path, uint8_t *ret_secret, struct err_detail *detail)
{
    struct stat st;
    enum err e = ERR_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%.300s: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0)
        e = err_set(detail, ERR_IO, "%.300s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode) || (st.st_mode & 077) != 0 || st.st_uid != geteuid())
        e = err_set(detail, ERR_INVALID, "%.300s: must be a file of our own with mode 0600", path);
    else if (st.st_size != KEY_BYTES || read(fd, ret_secret, KEY_BYTES) != KEY_BYTES)
        e = err_set(detail, ERR_INVALID, "%.300s: %lld bytes, a key has %u", path,
                    (long long)st.st_size, KEY_BYTES);
    close(fd);
    return e;
}

enum err peers_key_load(const char *path, struct peers_key *ret_key, struct err_detail *detail)
{
    uint8_t secret[KEY_BYTES];
    struct peers_key key;
    if (!zmq_has("curve"))
        return err_set(detail, ERR_UNSUPPORTED, "%.300s: this ZeroMQ has no CURVE", path);
    TRY(secret_read(path, secret, detail));
    CHECK(zmq_z85_encode(key.key_secret, secret, KEY_BYTES) != NULL);
    if (zmq_curve_public(key.key_public, key.key_secret) != 0)
        return err_set(detail, ERR_INVALID, "%.300s: not a key", path);
    *ret_key = key;
    return ERR_OK;
}
