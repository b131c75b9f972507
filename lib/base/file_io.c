/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/file_io.h"

#include <errno.h>
#include <unistd.h>

enum err file_read_at(int fd, uint64_t at, void *ret_bytes, size_t count)
{
    uint8_t *to = ret_bytes;
    while (count > 0) {
        ssize_t got = pread(fd, to, count, (off_t)at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got == 0)
            errno = ENODATA;
        if (got <= 0)
            return ERR_IO;
        to += got;
        at += (uint64_t)got;
        count -= (size_t)got;
    }
    return ERR_OK;
}

enum err file_write_at(int fd, uint64_t at, const void *bytes, size_t count)
{
    const uint8_t *from = bytes;
    while (count > 0) {
        ssize_t put = pwrite(fd, from, count, (off_t)at);
        if (put < 0 && errno == EINTR)
            continue;
        if (put == 0)
            errno = ENOSPC;
        if (put <= 0)
            return ERR_IO;
        from += put;
        at += (uint64_t)put;
        count -= (size_t)put;
    }
    return ERR_OK;
}
