/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/cpu_pool.h"
#include "lib/model/tool/args.h"
#include "lib/model/tool/file_map.h"
#include "lib/model/tool/manifest.h"
#include "lib/model/tool/tool.h"
#include "lib/model/tool/writer.h"

#define PATH_BYTES  4096
#define CHUNK_BYTES ((uint64_t)4 << 20)

/* One component: a directory of files and where it goes. */
struct component {
    const char *from;
    char to[PATH_BYTES - 300];
    struct op_ctx ctx;
    struct tool_eta eta;
    uint64_t done, kept; /* kept: of interrupted copies */
    uint32_t copied, there;
    struct err_detail *detail;
};

static enum err io_fault(const struct component *c, const char *path)
{
    return err_set(c->detail, ERR_IO, "%s: %s", path, strerror(errno));
}

/* Bytes of an interrupted copy that are those of the source, in whole chunks. */
static uint64_t good_bytes(int fd, const struct file_map *source)
{
    uint8_t *chunk = mem_take(CHUNK_BYTES);
    uint64_t at = 0;
    for (;;) {
        uint64_t left = source->size - at, want = left < CHUNK_BYTES ? left : CHUNK_BYTES;
        ssize_t n = want > 0 ? pread(fd, chunk, want, (off_t)at) : 0;
        if (n <= 0 || (uint64_t)n != want || memcmp(chunk, source->bytes + at, want) != 0)
            break;
        at += want;
    }
    mem_give(chunk);
    return at;
}

static enum err copy_bytes(struct component *c, int fd, const struct file_map *source,
                           const char *path)
{
    uint64_t at = good_bytes(fd, source);
    c->done += at;
    c->kept += at;
    if (ftruncate(fd, (off_t)at) != 0)
        return io_fault(c, path);
    while (at < source->size) {
        uint64_t left = source->size - at, want = left < CHUNK_BYTES ? left : CHUNK_BYTES;
        ssize_t n = pwrite(fd, source->bytes + at, want, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return io_fault(c, path);
        at += (uint64_t)n;
        c->done += (uint64_t)n;
        tool_eta_show(&c->eta, c->done);
    }
    return fsync(fd) == 0 ? ERR_OK : io_fault(c, path);
}

/* Whether the file on the other side has these bytes, read back. */
static bool is_there(const char *path, uint64_t bytes, const uint8_t sha256[32])
{
    struct file_map map;
    struct err_detail ignored;
    uint8_t digest[32];
    if (file_map_open(NULL, path, &map, &ignored) != ERR_OK)
        return false;
    bool same = map.size == bytes;
    if (same)
        hash_sha256(map.bytes, map.size, digest);
    file_map_close(&map);
    return same && memcmp(digest, sha256, 32) == 0;
}

static enum err copy_file(struct component *c, const char *name, const struct manifest_file *file)
{
    char path[PATH_BYTES], last[PATH_BYTES];
    struct file_map source;
    snprintf(path, sizeof(path), "%s/%s.partial", c->to, name);
    snprintf(last, sizeof(last), "%s/%s", c->to, name);
    if (is_there(last, file->bytes, file->sha256)) {
        c->there++;
        c->done += file->bytes;
        return ERR_OK;
    }
    TRY(file_map_open(c->from, name, &source, c->detail));
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    enum err e = fd >= 0 ? copy_bytes(c, fd, &source, path) : io_fault(c, path);
    if (fd >= 0)
        close(fd);
    file_map_close(&source);
    if (e == ERR_OK && !is_there(path, file->bytes, file->sha256))
        e = err_set(c->detail, ERR_CORRUPT, "%s: what was written is not what was read", path);
    if (e == ERR_OK && rename(path, last) != 0)
        e = io_fault(c, last);
    c->copied++;
    return e;
}

/* A source that says what it is must be that. */
static enum err check_source(const struct component *c)
{
    char path[PATH_BYTES];
    uint32_t faults = 0;
    snprintf(path, sizeof(path), "%s/" FILE_MANIFEST_NAME, c->from);
    if (access(path, F_OK) != 0)
        return ERR_OK;
    TRY(manifest_verify(c->from, &c->ctx, &faults, c->detail));
    return faults == 0
               ? ERR_OK
               : err_set(c->detail, ERR_CORRUPT, "%s differs from its own manifest", c->from);
}

static enum err archive_component(const char *from, const char *destination, const char *what,
                                  const struct op_ctx *ctx, struct err_detail *detail)
{
    struct component c = {.from = from, .ctx = *ctx, .detail = detail};
    struct manifest m;
    uint64_t total = 0;
    uint32_t faults = 0;
    if (snprintf(c.to, sizeof(c.to), "%s/%s", destination, what) >= (int)sizeof(c.to) ||
        strlen(from) > PATH_BYTES - 300)
        return err_set(detail, ERR_INVALID, "%.200s...: path too long", destination);
    TRY(check_source(&c));
    TRY(writer_make_directory(c.to, detail));
    TRY(manifest_read_files(from, ctx, &m, detail));
    for (uint32_t i = 0; i < m.list.count; i++)
        total += m.files[i].bytes;
    tool_eta_start(&c.eta, "copying", total, "bytes");
    enum err e = ERR_OK;
    for (uint32_t i = 0; i < m.list.count && e == ERR_OK; i++)
        e = copy_file(&c, m.list.names[i], &m.files[i]);
    tool_eta_clear(&c.eta);
    manifest_fini(&m);
    /* The manifest is of the source, the check of the copy. */
    if (e == ERR_OK)
        e = manifest_store(from, c.to, ctx, detail);
    if (e == ERR_OK)
        e = manifest_verify(c.to, ctx, &faults, detail);
    if (e == ERR_OK && faults > 0)
        e = err_set(detail, ERR_CORRUPT, "%s: the copy differs", c.to);
    if (e == ERR_OK)
        printf("%s: %u files copied, %u were there, %.1f MB; %" PRIu64
               " bytes of interrupted copies kept\n",
               c.to, c.copied, c.there, (double)total / 1e6, c.kept);
    return e;
}

static enum err archive(int argc, char **argv, struct tool_threads *threads,
                        struct err_detail *detail)
{
    static const char *const names[] = {"the model directory", "the destination"};
    const char *places[2], *drafter = NULL, *count = NULL;
    const struct tool_option table[] = {{"drafter", &drafter, NULL}, {"threads", &count, NULL}};
    uint64_t value = 0;
    TRY(tool_args_places(argc, argv, table, ARRAY_COUNT(table), names, places, 2, detail));
    TRY(tool_u64("threads", count, 0, CPU_POOL_THREADS_MAX, &value, detail));
    tool_threads_start(threads, (uint32_t)value);
    TRY(writer_make_directory(places[1], detail));
    TRY(archive_component(places[0], places[1], "model", &threads->ctx, detail));
    if (drafter != NULL)
        TRY(archive_component(drafter, places[1], "drafter", &threads->ctx, detail));
    return ERR_OK;
}

int tool_archive(int argc, char **argv)
{
    struct err_detail detail = {{0}};
    struct tool_threads threads = {.pool = NULL};
    enum err e = archive(argc, argv, &threads, &detail);
    tool_threads_end(&threads);
    return e == ERR_OK ? 0 : tool_fail(&detail);
}
