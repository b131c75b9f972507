/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include "kvmgr/km_arena_file.h"
#include "kvmgr/km_tier.h"
#include "lib/base/check.h"
#include "lib/base/file_io.h"
#include "lib/base/mem.h"
#include "lib/base/ring.h"
#include "lib/base/str.h"
#include "proto/kv_layout.h"

#define KM_STORE_MAGIC 0x4b4d5354u
#define FOUND_RING     4096u
#define PIECE_BYTES    (1u << 20) /* copied at a time: between pieces the thread may be stopped */
#define SHARDS         256u

STATIC_CHECK(sizeof(struct km_store_footer) == 112);

struct km_store {
    uint32_t magic;
    struct km_store_options options;
    struct kv_layout layout;
    char dir[600], base[700]; /* base: of this layout and model */
    int lock_fd;
    atomic_bool direct;
    struct ring *asked, *done, *found;
    sem_t wake;
    pthread_t thread;
    bool started;
    atomic_bool stop, off;
    atomic_uint off_told; /* 0: on, 1: off and not polled yet, 2: polled */
    char off_text[ERR_DETAIL_BYTES];
    atomic_uint others_told; /* as off_told: 0 = none found */
    uint32_t others;
    uint64_t others_bytes;
    /* The I/O thread's own: */
    uint8_t *raw, *packed; /* page-aligned */
    size_t raw_bytes, packed_bytes;
    uint64_t temp_serial;
    struct listed *listed;
    size_t listed_count, listed_max;
    ZSTD_CCtx *compress;
    ZSTD_DCtx *expand;
};

/* --- names */

static void object_path(const struct km_store *s, uint32_t kind, const struct hash128 *hash,
                        char *ret, size_t bytes)
{
    char hex[33];
    hex_encode(hash, sizeof(*hash), hex);
    snprintf(ret, bytes, "%s/%.2s/%s.%c", s->base, hex, hex, kind == KM_OBJECT_BLOCK ? 'b' : 's');
}

/* True for the name of an object; fills its kind and hash. */
static bool name_parse(const char *name, struct km_store_object *ret)
{
    if (strlen(name) != 34 || name[32] != '.' || (name[33] != 'b' && name[33] != 's') ||
        !hex_decode(name, 32, &ret->hash))
        return false;
    ret->kind = name[33] == 'b' ? KM_OBJECT_BLOCK : KM_OBJECT_SNAPSHOT;
    return true;
}

static bool is_temp(const char *name)
{
    return strncmp(name, "tmp-", 4) == 0;
}

static bool is_hex(const char *name, size_t chars)
{
    return strlen(name) == chars && strspn(name, "0123456789abcdef") == chars;
}

/* --- the arena's side */

static uint64_t data_bytes(const struct km_store *s, uint32_t kind)
{
    return kind == KM_OBJECT_BLOCK ? s->layout.block_bytes : s->layout.snapshot_bytes;
}

static uint64_t data_at(const struct km_store *s, const struct km_store_item *it)
{
    if (it->kind == KM_OBJECT_BLOCK)
        return kv_block_place(&s->layout, it->index).at;
    CHECK(it->index >= s->layout.live_count);
    return kv_slot_place(&s->layout, it->index).at;
}

static enum err copy_pieces(struct km_store *s, int fd, uint64_t at, uint8_t *bytes, uint64_t count,
                            bool write)
{
    while (count > 0) {
        size_t piece = count < PIECE_BYTES ? (size_t)count : PIECE_BYTES;
        if (atomic_load(&s->stop))
            return ERR_CLOSED;
        TRY(write ? file_write_at(fd, at, bytes, piece) : file_read_at(fd, at, bytes, piece));
        at += piece;
        bytes += piece;
        count -= piece;
    }
    return ERR_OK;
}

/* --- one operation */

static uint64_t padded(uint64_t bytes)
{
    return (bytes + KM_STORE_PAGE - 1) / KM_STORE_PAGE * KM_STORE_PAGE;
}

static void turn_off(struct km_store *s, const char *what, const char *path, int error)
{
    if (atomic_exchange(&s->off, true))
        return;
    snprintf(s->off_text, sizeof(s->off_text), "%s: %.300s: %s", what, path, strerror(error));
    atomic_store(&s->off_told, 1);
}

static int open_direct(struct km_store *s, const char *path, int flags)
{
    int fd = -1;
    if (atomic_load(&s->direct))
        fd = open(path, flags | O_DIRECT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd >= 0 || (atomic_load(&s->direct) && errno != EINVAL))
        return fd;
    atomic_store(&s->direct, false); /* the file system does not take it */
    return open(path, flags | O_CLOEXEC | O_NOFOLLOW, 0600);
}

/* Puts the object's bytes and footer into s->packed; the size of the file. */
static uint64_t object_pack(struct km_store *s, const struct km_store_item *it, uint64_t raw_bytes)
{
    struct km_store_footer f = {
        .magic = KM_STORE_MAGIC_FILE,
        .version = KM_STORE_VERSION,
        .hash = it->hash,
        .parent = it->parent,
        .layout_fp = s->layout.layout_fp,
        .model_fp = s->options.model_fp,
        .kind = it->kind,
        .token_count = it->token_count,
        .raw_bytes = raw_bytes,
        .stored_bytes = raw_bytes,
    };
    size_t room = s->packed_bytes - 2 * KM_STORE_PAGE, stored = 0;
    if (s->compress)
        stored = ZSTD_compressCCtx(s->compress, s->packed, room, s->raw, raw_bytes,
                                   s->options.zstd_level);
    if (s->compress && !ZSTD_isError(stored) && stored < raw_bytes) {
        f.zstd = 1;
        f.stored_bytes = stored;
    } else {
        memcpy(s->packed, s->raw, raw_bytes);
    }
    f.data_crc = hash_crc32c(0, s->packed, f.stored_bytes);
    f.crc = hash_crc32c(0, &f, offsetof(struct km_store_footer, crc));
    uint64_t at = padded(f.stored_bytes);
    memset(s->packed + f.stored_bytes, 0, at + KM_STORE_PAGE - f.stored_bytes);
    memcpy(s->packed + at, &f, sizeof(f));
    return at + KM_STORE_PAGE;
}

static enum err write_file(struct km_store *s, const char *path, uint64_t bytes)
{
    char temp[800], shard[800];
    snprintf(shard, sizeof(shard), "%.*s", (int)(strrchr(path, '/') - path), path);
    snprintf(temp, sizeof(temp), "%s/tmp-%" PRIu64, s->base, ++s->temp_serial);
    int fd = open_direct(s, temp, O_WRONLY | O_CREAT | O_TRUNC);
    if (fd < 0) {
        turn_off(s, "cannot be made", temp, errno);
        return ERR_IO;
    }
    enum err e = copy_pieces(s, fd, 0, s->packed, bytes, true);
    if (e == ERR_OK && fdatasync(fd) != 0)
        e = ERR_IO;
    if (e == ERR_IO)
        turn_off(s, "cannot be written", temp, errno);
    close(fd);
    if (e == ERR_OK && rename(temp, path) != 0 &&
        ((mkdir(shard, 0700) != 0 && errno != EEXIST) || rename(temp, path) != 0)) {
        turn_off(s, "cannot be renamed", path, errno);
        e = ERR_IO;
    }
    if (e != ERR_OK)
        unlink(temp);
    return e;
}

static enum err op_write(struct km_store *s, const struct km_store_item *it, uint64_t *ret_bytes)
{
    char path[800];
    uint64_t raw_bytes = data_bytes(s, it->kind);
    object_path(s, it->kind, &it->hash, path, sizeof(path));
    TRY(copy_pieces(s, s->options.arena_fd, data_at(s, it), s->raw, raw_bytes, false));
    /* Damage in memory must not get good checksums on the disk. */
    uint32_t sealed = 0;
    if (km_arena_file_sealed(s->options.arena_fd, &s->layout, it->kind == KM_OBJECT_SNAPSHOT,
                             it->index, &sealed) != ERR_OK ||
        (sealed != 0 && sealed != kv_data_sum(s->raw, raw_bytes)))
        return ERR_CORRUPT;
    uint64_t bytes = object_pack(s, it, raw_bytes);
    TRY(write_file(s, path, bytes));
    *ret_bytes = bytes;
    return ERR_OK;
}

/* Whether a footer is that of an object of ours, in a file of so many bytes. */
static bool footer_good(const struct km_store *s, const struct km_store_footer *f, uint32_t kind,
                        const struct hash128 *hash, uint64_t bytes)
{
    uint64_t raw_bytes = data_bytes(s, kind);
    return f->magic == KM_STORE_MAGIC_FILE && f->version == KM_STORE_VERSION &&
           f->crc == hash_crc32c(0, f, offsetof(struct km_store_footer, crc)) &&
           memcmp(&f->hash, hash, sizeof(*hash)) == 0 &&
           memcmp(&f->layout_fp, &s->layout.layout_fp, sizeof(f->layout_fp)) == 0 &&
           memcmp(&f->model_fp, &s->options.model_fp, sizeof(f->model_fp)) == 0 &&
           f->kind == kind && f->raw_bytes == raw_bytes && f->zstd <= 1 &&
           f->stored_bytes <= raw_bytes && padded(f->stored_bytes) + KM_STORE_PAGE == bytes;
}

/* The file's bytes are in s->packed: checks them and leaves the raw data in s->raw. */
static enum err object_unpack(struct km_store *s, const struct km_store_item *it, uint64_t bytes)
{
    struct km_store_footer f;
    uint64_t raw_bytes = data_bytes(s, it->kind);
    memcpy(&f, s->packed + bytes - KM_STORE_PAGE, sizeof(f));
    if (!footer_good(s, &f, it->kind, &it->hash, bytes) || f.token_count != it->token_count)
        return ERR_CORRUPT;
    if (f.data_crc != hash_crc32c(0, s->packed, f.stored_bytes))
        return ERR_CORRUPT;
    if (f.zstd == 0) {
        if (f.stored_bytes != raw_bytes)
            return ERR_CORRUPT;
        memcpy(s->raw, s->packed, raw_bytes);
        return ERR_OK;
    }
    size_t got = ZSTD_decompressDCtx(s->expand, s->raw, raw_bytes, s->packed, f.stored_bytes);
    return ZSTD_isError(got) || got != raw_bytes ? ERR_CORRUPT : ERR_OK;
}

static enum err op_read(struct km_store *s, const struct km_store_item *it)
{
    char path[800];
    struct stat st;
    object_path(s, it->kind, &it->hash, path, sizeof(path));
    int fd = open_direct(s, path, O_RDONLY);
    if (fd < 0) {
        if (errno == ENOENT || errno == ELOOP)
            return ERR_NOT_FOUND;
        turn_off(s, "cannot be opened", path, errno);
        return ERR_IO;
    }
    enum err e = ERR_CORRUPT;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= (off_t)KM_STORE_PAGE &&
        (uint64_t)st.st_size % KM_STORE_PAGE == 0 && (uint64_t)st.st_size <= s->packed_bytes) {
        errno = 0;
        e = copy_pieces(s, fd, 0, s->packed, (uint64_t)st.st_size, false);
        if (e == ERR_IO && errno != 0)
            turn_off(s, "cannot be read", path, errno);
        else if (e == ERR_OK)
            e = object_unpack(s, it, (uint64_t)st.st_size);
        if (e == ERR_OK)
            (void)futimens(fd, NULL); /* the order of use, for the next start */
    }
    close(fd);
    if (e == ERR_CORRUPT)
        unlink(path);
    if (e == ERR_OK)
        e = copy_pieces(s, s->options.arena_fd, data_at(s, it), s->raw, data_bytes(s, it->kind),
                        true);
    return e;
}

static void op_run(struct km_store *s, const struct km_store_item *it)
{
    struct km_store_result r = {.item = *it, .code = ERR_IO};
    char path[800];
    if (!atomic_load(&s->off)) {
        switch (it->op) {
        case KM_STORE_WRITE:
            r.code = op_write(s, it, &r.bytes);
            break;
        case KM_STORE_READ:
            r.code = op_read(s, it);
            break;
        case KM_STORE_REMOVE:
            object_path(s, it->kind, &it->hash, path, sizeof(path));
            r.code = unlink(path) == 0 || errno == ENOENT ? ERR_OK : ERR_IO;
            break;
        }
    }
    CHECK(ring_push(s->done, &r)); /* as large as what may be in flight */
    s->options.wake(s->options.wake_arg);
}

/* All that waits; true: the thread is to end. */
static bool ops_run(struct km_store *s)
{
    struct km_store_item it;
    while (!atomic_load(&s->stop) && ring_pop(s->asked, &it))
        op_run(s, &it);
    return atomic_load(&s->stop);
}

/* --- listing what is there */

static bool found_tell(struct km_store *s, const struct km_store_object *o)
{
    while (!ring_push(s->found, o)) {
        s->options.wake(s->options.wake_arg);
        if (ops_run(s))
            return false;
        usleep(1000);
    }
    return true;
}

struct listed { /* an object's file, before its footer is read */
    struct km_store_object object;
    struct timespec used;
};

static int newest_first(const void *x, const void *y)
{
    const struct timespec *a = &((const struct listed *)x)->used;
    const struct timespec *b = &((const struct listed *)y)->used;
    if (a->tv_sec != b->tv_sec)
        return a->tv_sec < b->tv_sec ? 1 : -1;
    return a->tv_nsec < b->tv_nsec ? 1 : a->tv_nsec > b->tv_nsec ? -1 : 0;
}

static bool list_add(struct km_store *s, const struct km_store_object *o, const struct stat *st)
{
    if (s->listed_count == s->listed_max) {
        size_t max = s->listed_max > 0 ? 2 * s->listed_max : 1024;
        struct listed *more = realloc(s->listed, max * sizeof(*more));
        if (!more)
            return false;
        s->listed = more;
        s->listed_max = max;
    }
    s->listed[s->listed_count++] = (struct listed){*o, st->st_mtim};
    return true;
}

/* Tells what was listed, last used first; files without a good footer go. */
static void listed_tell(struct km_store *s)
{
    if (s->listed_count > 0)
        qsort(s->listed, s->listed_count, sizeof(*s->listed), newest_first);
    bool stop = atomic_load(&s->stop);
    for (size_t i = 0; i < s->listed_count && !stop; i++) {
        struct km_store_object *o = &s->listed[i].object;
        struct km_store_footer f;
        char path[800];
        object_path(s, o->kind, &o->hash, path, sizeof(path));
        int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0)
            continue; /* removed meanwhile */
        bool good = o->bytes >= KM_STORE_PAGE &&
                    file_read_at(fd, o->bytes - KM_STORE_PAGE, &f, sizeof(f)) == ERR_OK &&
                    footer_good(s, &f, o->kind, &o->hash, o->bytes);
        (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
        if (good) {
            o->parent = f.parent;
            stop = !found_tell(s, o);
        } else {
            (void)unlink(path);
        }
        stop = stop || ops_run(s);
    }
    free(s->listed);
    s->listed = NULL;
    s->listed_count = s->listed_max = 0;
}

/* Lists one folder of objects.  Operations that come meanwhile go first. */
static void shard_walk(struct km_store *s, const char *path)
{
    DIR *d = opendir(path);
    if (!d)
        return;
    struct dirent *entry;
    bool stop = false;
    while (!stop && (entry = readdir(d)) != NULL) {
        struct km_store_object o;
        struct stat st;
        bool object = name_parse(entry->d_name, &o);
        if (!object)
            continue;
        if (fstatat(dirfd(d), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0 ||
            !S_ISREG(st.st_mode) || st.st_size <= 0) {
            (void)unlinkat(dirfd(d), entry->d_name, 0);
        } else {
            o.bytes = (uint64_t)st.st_size;
            stop = !list_add(s, &o, &st);
        }
        stop = stop || ops_run(s);
    }
    closedir(d);
}

static void base_walk(struct km_store *s, const char *base)
{
    char path[900];
    for (uint32_t i = 0; i < SHARDS && !atomic_load(&s->stop); i++) {
        snprintf(path, sizeof(path), "%s/%02x", base, i);
        shard_walk(s, path);
    }
    DIR *d = opendir(base);
    if (!d)
        return;
    struct dirent *entry;
    while ((entry = readdir(d)) != NULL) /* of a process that was killed while it wrote */
        if (is_temp(entry->d_name))
            (void)unlinkat(dirfd(d), entry->d_name, 0);
    closedir(d);
}

/* Bytes of what lies in one folder. */
static uint64_t folder_bytes(struct km_store *s, const char *path)
{
    DIR *d = opendir(path);
    struct dirent *entry;
    struct stat st;
    uint64_t bytes = 0;
    while (d && !ops_run(s) && (entry = readdir(d)) != NULL)
        if (fstatat(dirfd(d), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode))
            bytes += (uint64_t)st.st_size;
    if (d)
        closedir(d);
    return bytes;
}

/* What other layouts and models keep here is theirs: it is only told how much it is. */
static void others_count(struct km_store *s)
{
    DIR *d = opendir(s->dir);
    if (!d)
        return;
    struct dirent *entry;
    const char *ours = strrchr(s->base, '/') + 1;
    while (!atomic_load(&s->stop) && (entry = readdir(d)) != NULL) {
        char path[900];
        if (!is_hex(entry->d_name, 32) || strcmp(entry->d_name, ours) == 0)
            continue;
        for (uint32_t i = 0; i < SHARDS && !atomic_load(&s->stop); i++) {
            snprintf(path, sizeof(path), "%s/%.32s/%02x", s->dir, entry->d_name, i);
            s->others_bytes += folder_bytes(s, path);
        }
        s->others++;
    }
    closedir(d);
    if (s->others == 0 || atomic_load(&s->stop))
        return;
    atomic_store(&s->others_told, 1);
    s->options.wake(s->options.wake_arg);
}

static void *store_thread(void *arg)
{
    struct km_store *s = arg;
    CHECK_OBJ(s, KM_STORE_MAGIC);
    base_walk(s, s->base);
    listed_tell(s);
    s->options.wake(s->options.wake_arg);
    others_count(s);
    while (!ops_run(s))
        while (sem_wait(&s->wake) != 0)
            CHECK(errno == EINTR);
    return NULL;
}

/* --- loop thread */

static enum err folder_open(struct km_store *s, struct err_detail *detail)
{
    char path[700], layout[33], model[33];
    struct stat st;
    if ((mkdir(s->dir, 0700) != 0 && errno != EEXIST) || stat(s->dir, &st) != 0)
        return err_set(detail, ERR_IO, "kv_store_dir: %.300s: %s", s->dir, strerror(errno));
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 0077) != 0)
        return err_set(detail, ERR_UNSUPPORTED,
                       "kv_store_dir: %.300s: must be a folder of our own with mode 0700", s->dir);
    snprintf(path, sizeof(path), "%s/lock", s->dir);
    s->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (s->lock_fd < 0)
        return err_set(detail, ERR_IO, "kv_store_dir: %.300s: %s", path, strerror(errno));
    if (flock(s->lock_fd, LOCK_EX | LOCK_NB) != 0)
        return err_set(detail, ERR_BUSY, "kv_store_dir: %.300s is in use by another process",
                       s->dir);
    hex_encode(&s->layout.layout_fp, sizeof(struct hash128), layout);
    hex_encode(&s->options.model_fp, sizeof(struct hash128), model);
    snprintf(s->base, sizeof(s->base), "%s/%.16s%.16s", s->dir, layout, model);
    if (mkdir(s->base, 0700) != 0 && errno != EEXIST)
        return err_set(detail, ERR_IO, "kv_store_dir: %.300s: %s", s->base, strerror(errno));
    return ERR_OK;
}

static enum err memory_take(struct km_store *s, struct err_detail *detail)
{
    uint64_t block = s->layout.block_bytes, snapshot = s->layout.snapshot_bytes;
    s->raw_bytes = block > snapshot ? block : snapshot;
    s->packed_bytes = padded(ZSTD_compressBound(s->raw_bytes)) + 2 * KM_STORE_PAGE;
    if (posix_memalign((void **)&s->raw, KM_STORE_PAGE, padded(s->raw_bytes)) != 0)
        s->raw = NULL;
    if (posix_memalign((void **)&s->packed, KM_STORE_PAGE, s->packed_bytes) != 0)
        s->packed = NULL;
    s->expand = ZSTD_createDCtx();
    if (s->options.zstd_level > 0)
        s->compress = ZSTD_createCCtx();
    if (!s->raw || !s->packed || !s->expand || (s->options.zstd_level > 0 && !s->compress))
        return err_set(detail, ERR_NOMEM, "kv_store_dir: no memory for buffers of %zu bytes",
                       s->packed_bytes);
    return ERR_OK;
}

enum err km_store_open(const struct km_store_options *options, struct km_store **ret_store,
                       struct err_detail *detail)
{
    CHECK(options->dir[0] != '\0' && options->wake != NULL);
    struct km_store *s = mem_take(sizeof(*s));
    s->magic = KM_STORE_MAGIC;
    s->options = *options;
    s->layout = *options->layout;
    s->options.layout = NULL;
    s->options.dir = NULL;
    s->lock_fd = -1;
    atomic_init(&s->direct, true);
    snprintf(s->dir, sizeof(s->dir), "%s", options->dir);
    s->asked = ring_create(KM_STORE_MAX, sizeof(struct km_store_item));
    s->done = ring_create(KM_STORE_MAX, sizeof(struct km_store_result));
    s->found = ring_create(FOUND_RING, sizeof(struct km_store_object));
    CHECK(sem_init(&s->wake, 0, 0) == 0);
    enum err e = folder_open(s, detail);
    if (e == ERR_OK)
        e = memory_take(s, detail);
    if (e == ERR_OK && pthread_create(&s->thread, NULL, store_thread, s) != 0)
        e = err_set(detail, ERR_NOMEM, "kv_store_dir: no thread");
    if (e != ERR_OK) {
        km_store_close(&s);
        return e;
    }
    s->started = true;
    *ret_store = s;
    return ERR_OK;
}

void km_store_close(struct km_store **store_p)
{
    struct km_store *s = *store_p;
    if (!s)
        return;
    CHECK_OBJ(s, KM_STORE_MAGIC);
    atomic_store(&s->stop, true);
    sem_post(&s->wake);
    if (s->started)
        pthread_join(s->thread, NULL);
    if (s->lock_fd >= 0)
        close(s->lock_fd);
    ring_destroy(&s->asked);
    ring_destroy(&s->done);
    ring_destroy(&s->found);
    sem_destroy(&s->wake);
    ZSTD_freeCCtx(s->compress);
    ZSTD_freeDCtx(s->expand);
    free(s->raw);
    free(s->packed);
    free(s->listed);
    s->magic = 0;
    mem_give(s);
    *store_p = NULL;
}

void km_store_submit(struct km_store *s, const struct km_store_item *item)
{
    CHECK_OBJ(s, KM_STORE_MAGIC);
    CHECK(ring_push(s->asked, item));
    sem_post(&s->wake);
}

void km_store_poll(struct km_store *s, struct km_store_poll *ret)
{
    CHECK_OBJ(s, KM_STORE_MAGIC);
    *ret = (struct km_store_poll){.news = KM_STORE_NOTHING};
    if (ring_pop(s->done, &ret->result)) {
        ret->news = KM_STORE_RESULT;
    } else if (ring_pop(s->found, &ret->object)) {
        ret->news = KM_STORE_FOUND;
    } else if (atomic_load(&s->off_told) == 1) {
        atomic_store(&s->off_told, 2);
        ret->news = KM_STORE_OFF;
        snprintf(ret->text, sizeof(ret->text), "%s", s->off_text);
    } else if (atomic_load(&s->others_told) == 1) {
        atomic_store(&s->others_told, 2);
        ret->news = KM_STORE_OTHERS;
        ret->bytes = s->others_bytes;
        snprintf(ret->text, sizeof(ret->text),
                 "%.300s: %u folders of other models or layouts keep %" PRIu64
                 " bytes beyond kv_store_bytes; remove those that no configuration uses",
                 s->dir, s->others, s->others_bytes);
    }
}

bool km_store_direct(const struct km_store *s)
{
    CHECK_OBJ(s, KM_STORE_MAGIC);
    return atomic_load(&s->direct);
}
