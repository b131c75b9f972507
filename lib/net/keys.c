/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/keys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include "lib/base/check.h"

#define FILE_BYTES_MAX 256u

STATIC_CHECK(FILE_BYTES_MAX > 2 * (KEYS_CHARS + 8));

/* Takes one line `NAME KEY`; the cursor moves behind it. */
static bool line_take(const char **at, const char *name, char *ret_key)
{
    size_t name_bytes = strlen(name);
    if (strncmp(*at, name, name_bytes) != 0 || (*at)[name_bytes] != ' ')
        return false;
    const char *key = *at + name_bytes + 1;
    if (strcspn(key, "\n") != KEYS_CHARS || key[KEYS_CHARS] != '\n')
        return false;
    memcpy(ret_key, key, KEYS_CHARS);
    ret_key[KEYS_CHARS] = '\0';
    *at = key + KEYS_CHARS + 1;
    return true;
}

/* Only a public key that follows from the secret one can open what is sealed with it. */
static bool is_pair(const struct keys *k)
{
    char derived[KEYS_CHARS + 1];
    uint8_t bytes[32];
    return zmq_z85_decode(bytes, k->key_public) != NULL &&
           zmq_z85_decode(bytes, k->key_secret) != NULL &&
           zmq_curve_public(derived, k->key_secret) == 0 && strcmp(derived, k->key_public) == 0;
}

enum err keys_read(const char *path, struct keys *ret_keys, struct err_detail *detail)
{
    char text[FILE_BYTES_MAX + 1];
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    ssize_t got = -1;
    bool file = fstat(fd, &st) == 0 && S_ISREG(st.st_mode), mine = file && (st.st_mode & 077) == 0;
    if (mine)
        got = read(fd, text, FILE_BYTES_MAX);
    close(fd);
    if (!file)
        return err_set(detail, ERR_IO, "%s: no file", path);
    if (!mine)
        return err_set(detail, ERR_IO, "%s: mode %03o, others may read it; it must be 600", path,
                       (unsigned)st.st_mode & 0777);
    if (got < 0)
        return err_set(detail, ERR_IO, "%s: cannot be read", path);
    text[got] = '\0';
    const char *at = text;
    struct keys keys;
    if (!line_take(&at, "public", keys.key_public) || !line_take(&at, "secret", keys.key_secret) ||
        *at != '\0')
        return err_set(detail, ERR_INVALID, "%s: not the two lines of `tandem keygen`", path);
    if (!is_pair(&keys))
        return err_set(detail, ERR_INVALID, "%s: the two keys are no pair", path);
    *ret_keys = keys;
    return ERR_OK;
}

enum err keys_make(const char *path, struct err_detail *detail)
{
    struct keys keys;
    char text[FILE_BYTES_MAX];
    if (zmq_curve_keypair(keys.key_public, keys.key_secret) != 0)
        return err_set(detail, ERR_UNSUPPORTED, "this libzmq has no CURVE");
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    int count =
        snprintf(text, sizeof text, "public %s\nsecret %s\n", keys.key_public, keys.key_secret);
    bool written = write(fd, text, (size_t)count) == count && fsync(fd) == 0;
    if (close(fd) != 0 || !written) {
        unlink(path);
        return err_set(detail, ERR_IO, "%s: could not be written", path);
    }
    return ERR_OK;
}
