/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_taps.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/dflash.h"
#include "lib/model/model.h"

#define WK_TAPS_MAGIC 0x574b5450u
#define RING_FOLDER   "/dev/shm"
#define RING_PREFIX   "tandem-taps."
#define REDUCE_ROWS   64u

STATIC_CHECK(TAP_RING_TAPS_MAX == MODEL_WATCH_MAX);
STATIC_CHECK(TAP_RING_TAPS_MAX == MSG_TAPS_MAX);

struct wk_taps {
    uint32_t magic;
    struct wk_taps_options options;
    char path[TAP_RING_PATH_BYTES];
    struct tap_ring ring;
    uint64_t bytes;
    int fd;         /* holds the lock that says: alive */
    float *record;  /* [1 or, with a reducer, REDUCE_ROWS][layer_count, hidden] */
    float *vectors; /* with a reducer: [REDUCE_ROWS, hidden] */
};

void wk_taps_path(uint64_t incarnation, char ret_path[TAP_RING_PATH_BYTES])
{
    snprintf(ret_path, TAP_RING_PATH_BYTES, RING_FOLDER "/" RING_PREFIX "%016" PRIx64, incarnation);
}

static bool ring_name(const char *name)
{
    size_t prefix = strlen(RING_PREFIX);
    return strncmp(name, RING_PREFIX, prefix) == 0 && strlen(name + prefix) == 16 &&
           strspn(name + prefix, "0123456789abcdef") == 16;
}

uint32_t wk_taps_sweep(void)
{
    uint32_t count = 0;
    DIR *folder = opendir(RING_FOLDER);
    if (folder == NULL)
        return 0;
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        if (!ring_name(entry->d_name))
            continue;
        int fd = openat(dirfd(folder), entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0)
            continue; /* of another user, or gone meanwhile */
        if (flock(fd, LOCK_EX | LOCK_NB) == 0 && unlinkat(dirfd(folder), entry->d_name, 0) == 0)
            count++;
        close(fd);
    }
    closedir(folder);
    return count;
}

/* Locked, and still under its name: a sweep may have come between. */
static int lock_own(int fd)
{
    struct stat st;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 || fstat(fd, &st) != 0)
        return errno;
    return st.st_nlink > 0 ? 0 : ENOENT;
}

static enum err file_create(struct wk_taps *t, void **ret_memory, struct err_detail *detail)
{
    t->fd = open(t->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (t->fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", t->path, strerror(errno));
    void *memory = MAP_FAILED;
    int why = lock_own(t->fd);
    /* Taken now: a full /dev/shm is a refusal here and would be a signal at the first write. */
    if (why == 0)
        why = posix_fallocate(t->fd, 0, (off_t)t->bytes);
    if (why == 0) {
        memory = mmap(NULL, t->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, t->fd, 0);
        why = errno;
    }
    if (memory == MAP_FAILED) {
        unlink(t->path);
        close(t->fd);
        /* Another worker's sweep was quicker than our lock: the next try has another name. */
        enum err e = why == EWOULDBLOCK || why == ENOENT ? ERR_BUSY : ERR_IO;
        return err_set(detail, e, "%s: %llu bytes: %s", t->path, (unsigned long long)t->bytes,
                       strerror(why));
    }
    *ret_memory = memory;
    return ERR_OK;
}

enum err wk_taps_create(const struct wk_taps_options *o, struct wk_taps **ret_taps,
                        struct err_detail *detail)
{
    struct tap_ring_geometry g = {.type = o->type,
                                  .tap_count = o->reducer != NULL ? 1 : o->layer_count,
                                  .hidden = o->hidden,
                                  .slots = 1};
    uint64_t one = tap_ring_bytes(&g);
    if (one == 0 || o->layer_count == 0 || o->layer_count > TAP_RING_TAPS_MAX)
        return err_set(detail, ERR_INVALID, "tap ring: type %u, %u layers of %u", o->type,
                       o->layer_count, o->hidden);
    uint64_t slots = o->bytes_max / (one - TAP_RING_HEADER_BYTES);
    g.slots = slots < WK_TAPS_SLOTS_MIN   ? WK_TAPS_SLOTS_MIN
              : slots > WK_TAPS_SLOTS_MAX ? WK_TAPS_SLOTS_MAX
                                          : (uint32_t)slots;
    struct wk_taps *t = mem_take(sizeof *t);
    t->magic = WK_TAPS_MAGIC;
    t->options = *o;
    t->bytes = tap_ring_bytes(&g);
    wk_taps_path(o->incarnation, t->path);
    void *memory = NULL;
    enum err e = file_create(t, &memory, detail);
    if (e != ERR_OK) {
        mem_give(t);
        return e;
    }
    tap_ring_format(&t->ring, memory, &g, o->incarnation);
    uint64_t row = (uint64_t)o->layer_count * o->hidden;
    t->record = mem_take_array(o->reducer != NULL ? REDUCE_ROWS * row : row, sizeof(float));
    if (o->reducer != NULL)
        t->vectors = mem_take_array((uint64_t)REDUCE_ROWS * o->hidden, sizeof(float));
    *ret_taps = t;
    return ERR_OK;
}

void wk_taps_destroy(struct wk_taps **taps_p)
{
    struct wk_taps *t = *taps_p;
    if (t == NULL)
        return;
    CHECK_OBJ(t, WK_TAPS_MAGIC);
    munmap(t->ring.base, t->bytes);
    unlink(t->path);
    close(t->fd);
    mem_give(t->record);
    mem_give(t->vectors);
    t->magic = 0;
    mem_give(t);
    *taps_p = NULL;
}

void wk_taps_watch(const struct wk_taps *t, struct model_cursor *c)
{
    model_cursor_watch(c, t != NULL ? t->options.layers : NULL,
                       t != NULL ? t->options.layer_count : 0);
}

/* One row's taps, layer after layer. */
static void row_taps(const struct wk_taps *t, const struct model_cursor *c, uint32_t row,
                     float *ret_taps)
{
    const uint64_t hidden = t->options.hidden;
    for (uint32_t i = 0; i < t->options.layer_count; i++)
        memcpy(ret_taps + i * hidden, model_cursor_watched(c, i) + row * hidden,
               hidden * sizeof(float));
}

void wk_taps_write(struct wk_taps *t, const struct model_cursor *c, const struct msg_id *id,
                   uint64_t step, uint32_t first, uint32_t count, uint32_t position)
{
    CHECK_OBJ(t, WK_TAPS_MAGIC);
    const uint64_t hidden = t->options.hidden, row = t->options.layer_count * hidden;
    struct dflash *reducer = t->options.reducer;
    uint32_t most = reducer != NULL ? REDUCE_ROWS : 1;
    for (uint32_t done = 0, now; done < count; done += now) {
        now = count - done < most ? count - done : most;
        for (uint32_t r = 0; r < now; r++)
            row_taps(t, c, first + done + r, t->record + r * row);
        if (reducer != NULL)
            dflash_reduce(reducer, t->record, now, t->vectors);
        for (uint32_t r = 0; r < now; r++) {
            struct tap_record record = {.id = *id, .position = position + done + r, .step = step};
            tap_ring_write(&t->ring, &record,
                           reducer != NULL ? t->vectors + r * hidden : t->record);
        }
    }
}

uint64_t wk_taps_end(const struct wk_taps *t)
{
    return t != NULL ? tap_ring_head(&t->ring) : 0;
}
