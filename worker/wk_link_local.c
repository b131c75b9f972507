/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_link_local.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "lib/base/clock.h"
#include "lib/base/mem.h"

#define LOCAL_MAGIC     0x574b4c4fu
#define LINK_MAGIC      0x574b4c4bu
#define FILE_MAGIC      0x314c4654u /* "TFL1" */
#define RING_SLOTS      2u
#define STATUS_WORDS    (sizeof(struct wk_status) / 8)
#define MESSAGE_MAX     (8u << 20)
#define SPINS_PER_CLOCK 64u

STATIC_CHECK(sizeof(struct wk_status) % 8 == 0);
STATIC_CHECK(sizeof(atomic_uint) == 4 && sizeof(_Atomic uint64_t) == 8);

/* The file: head, one rank_area per rank, then one ring per directed pair. */
struct file_head {
    uint32_t magic, ranks, message_bytes_max, zero;
    uint8_t pad[48];
};

struct rank_area {
    _Alignas(64) atomic_uint turn; /* odd while the status is being written */
    _Atomic uint64_t status[STATUS_WORDS];
    _Alignas(64) _Atomic uint64_t heard_us; /* of this rank's last beat, monotonic */
};

/* A writer and a reader; each line has one owner that writes it. */
struct ring_head {
    _Alignas(64) _Atomic uint64_t written; /* futex: its low word */
    atomic_uint writer_sleeps;
    _Alignas(64) _Atomic uint64_t taken; /* futex: its low word */
    atomic_uint reader_sleeps;
};

struct slot_head {
    struct wk_head head;
    uint8_t pad[16];
};
/* tests/cluster/test_ranks.py finds a plan on its way by these. */
STATIC_CHECK(sizeof(struct file_head) == 64 && sizeof(struct rank_area) == 256 &&
             sizeof(struct ring_head) == 128 && sizeof(struct slot_head) == 64);

struct wk_local {
    uint32_t magic;
    atomic_uint users;
    struct wk_local_options options;
    char path[256];
    uint8_t *base;
    size_t bytes;
};

struct local_link {
    uint32_t magic, rank;
    struct wk_local *local;
    int fd; /* holds the lock on our byte */
    bool holding[WK_RANKS_MAX];
};

static size_t ring_bytes(const struct wk_local_options *o)
{
    return sizeof(struct ring_head) +
           RING_SLOTS * (sizeof(struct slot_head) + (size_t)o->message_bytes_max);
}

static size_t file_bytes(const struct wk_local_options *o)
{
    return sizeof(struct file_head) + o->ranks * sizeof(struct rank_area) +
           (size_t)o->ranks * o->ranks * ring_bytes(o);
}

static struct rank_area *area_at(const struct wk_local *l, uint32_t rank)
{
    return (struct rank_area *)(void *)(l->base + sizeof(struct file_head)) + rank;
}

static struct ring_head *ring_at(const struct wk_local *l, uint32_t from, uint32_t to)
{
    size_t first = sizeof(struct file_head) + l->options.ranks * sizeof(struct rank_area);
    return (struct ring_head *)(void *)(l->base + first +
                                        ((size_t)from * l->options.ranks + to) *
                                            ring_bytes(&l->options));
}

static struct slot_head *slot_at(const struct wk_local *l, struct ring_head *r, uint64_t number)
{
    size_t step = sizeof(struct slot_head) + l->options.message_bytes_max;
    return (struct slot_head *)(void *)((uint8_t *)(r + 1) + number % RING_SLOTS * step);
}

/* ---- file ---- */

static enum err options_check(const struct wk_local_options *o, struct err_detail *detail)
{
    if (o->ranks < 2 || o->ranks > WK_RANKS_MAX)
        return err_set(detail, ERR_INVALID, "local link: %u ranks, 2 to %u", o->ranks,
                       WK_RANKS_MAX);
    if (o->message_bytes_max < 64 || o->message_bytes_max > MESSAGE_MAX ||
        o->message_bytes_max % 64 != 0)
        return err_set(detail, ERR_INVALID, "local link: message_bytes_max %u",
                       o->message_bytes_max);
    if (strlen(o->path) >= sizeof(((struct wk_local *)0)->path))
        return err_set(detail, ERR_INVALID, "local link: path too long");
    return ERR_OK;
}

/* Under a lock on the whole file: makes it, or checks that it is this group's. */
static enum err file_settle(int fd, const struct wk_local_options *o, struct err_detail *detail)
{
    struct stat st;
    struct file_head head = {FILE_MAGIC, o->ranks, o->message_bytes_max, 0, {0}}, have;
    size_t bytes = file_bytes(o);
    if (fstat(fd, &st) != 0)
        return err_set(detail, ERR_IO, "%s: %s", o->path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return err_set(detail, ERR_INVALID, "%s: not a regular file", o->path);
    if (st.st_size == 0) {
        if (ftruncate(fd, (off_t)bytes) != 0 ||
            pwrite(fd, &head, sizeof head, 0) != (ssize_t)sizeof head)
            return err_set(detail, ERR_IO, "%s: %s", o->path, strerror(errno));
        return ERR_OK;
    }
    if ((size_t)st.st_size != bytes || pread(fd, &have, sizeof have, 0) != (ssize_t)sizeof have ||
        memcmp(&have, &head, sizeof head) != 0)
        return err_set(detail, ERR_INVALID,
                       "%s: not the file of a group of %u ranks with messages of %u bytes; "
                       "remove it if no worker uses it",
                       o->path, o->ranks, o->message_bytes_max);
    return ERR_OK;
}

static enum err file_map(struct wk_local *l, struct err_detail *detail)
{
    int fd = open(l->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", l->path, strerror(errno));
    enum err e = ERR_OK;
    if (flock(fd, LOCK_EX) != 0)
        e = err_set(detail, ERR_IO, "%s: %s", l->path, strerror(errno));
    if (e == ERR_OK)
        e = file_settle(fd, &l->options, detail);
    if (e == ERR_OK) {
        l->bytes = file_bytes(&l->options);
        void *at = mmap(NULL, l->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED)
            e = err_set(detail, ERR_NOMEM, "%s: %s", l->path, strerror(errno));
        else
            l->base = at;
    }
    flock(fd, LOCK_UN); /* the mapping would hold it */
    close(fd);
    return e;
}

enum err wk_local_open(const struct wk_local_options *options, struct wk_local **ret_local,
                       struct err_detail *detail)
{
    TRY(options_check(options, detail));
    struct wk_local *l = mem_take(sizeof *l);
    l->magic = LOCAL_MAGIC;
    l->options = *options;
    snprintf(l->path, sizeof l->path, "%s", options->path);
    l->options.path = l->path;
    enum err e = file_map(l, detail);
    if (e != ERR_OK) {
        mem_give(l);
        return e;
    }
    *ret_local = l;
    return ERR_OK;
}

void wk_local_close(struct wk_local **local_p)
{
    struct wk_local *l = *local_p;
    if (l == NULL)
        return;
    CHECK_OBJ(l, LOCAL_MAGIC);
    CHECK(atomic_load(&l->users) == 0);
    CHECK(munmap(l->base, l->bytes) == 0);
    l->magic = 0;
    mem_give(l);
    *local_p = NULL;
}

/* ---- waiting ---- */

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* The low word of a counter is what a sleeper watches; both ends are of one host. */
static uint32_t *futex_word(_Atomic uint64_t *counter)
{
    return (uint32_t *)(void *)counter + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? 1 : 0);
}

static void counter_wake(_Atomic uint64_t *counter, atomic_uint *sleeps)
{
    if (atomic_load(sleeps) != 0)
        syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* True once the counter differs from `seen`. */
static bool counter_wait(_Atomic uint64_t *counter, uint64_t seen, atomic_uint *sleeps,
                         uint64_t spin_us, uint64_t wait_us)
{
    uint64_t begun = clock_mono_us(), past = 0;
    do {
        for (uint32_t i = 0; i < SPINS_PER_CLOCK; i++) {
            if (atomic_load_explicit(counter, memory_order_acquire) != seen)
                return true;
            relax();
        }
        past = clock_mono_us() - begun;
    } while (past < spin_us && past < wait_us);
    if (past >= wait_us)
        return atomic_load(counter) != seen;
    uint64_t left = wait_us - past;
    struct timespec t = {(time_t)(left / 1000000), (long)(left % 1000000) * 1000};
    atomic_store(sleeps, 1);
    if (atomic_load(counter) == seen)
        syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, (uint32_t)seen, &t, NULL, 0);
    atomic_store(sleeps, 0);
    return atomic_load(counter) != seen;
}

/* ---- link ---- */

static enum err local_send(void *self, uint32_t peer, const struct wk_head *head, const void *bytes,
                           uint64_t wait_us)
{
    struct local_link *k = self;
    CHECK_OBJ(k, LINK_MAGIC);
    CHECK(head->bytes <= k->local->options.message_bytes_max);
    struct ring_head *r = ring_at(k->local, k->rank, peer);
    uint64_t written = atomic_load_explicit(&r->written, memory_order_relaxed);
    uint64_t taken = atomic_load_explicit(&r->taken, memory_order_acquire);
    if (written - taken >= RING_SLOTS) {
        if (!counter_wait(&r->taken, taken, &r->writer_sleeps, k->local->options.spin_us, wait_us))
            return ERR_BUSY;
    }
    struct slot_head *slot = slot_at(k->local, r, written);
    slot->head = *head;
    if (head->bytes > 0)
        memcpy(slot + 1, bytes, head->bytes);
    atomic_store(&r->written, written + 1);
    counter_wake(&r->written, &r->reader_sleeps);
    return ERR_OK;
}

static enum err local_receive(void *self, uint32_t peer, struct wk_link_message *ret_message,
                              uint64_t wait_us)
{
    struct local_link *k = self;
    CHECK_OBJ(k, LINK_MAGIC);
    struct ring_head *r = ring_at(k->local, peer, k->rank);
    uint64_t taken = atomic_load_explicit(&r->taken, memory_order_relaxed);
    if (atomic_load_explicit(&r->written, memory_order_acquire) == taken &&
        !counter_wait(&r->written, taken, &r->reader_sleeps, k->local->options.spin_us, wait_us))
        return ERR_BUSY;
    struct slot_head *slot = slot_at(k->local, r, taken);
    ret_message->head = slot->head;
    ret_message->bytes = (const uint8_t *)(slot + 1);
    k->holding[peer] = true;
    return ERR_OK;
}

static void local_release(void *self, uint32_t peer)
{
    struct local_link *k = self;
    CHECK_OBJ(k, LINK_MAGIC);
    CHECK(k->holding[peer]);
    struct ring_head *r = ring_at(k->local, peer, k->rank);
    k->holding[peer] = false;
    atomic_fetch_add(&r->taken, 1);
    counter_wake(&r->taken, &r->writer_sleeps);
}

static void local_publish(void *self, const struct wk_status *own)
{
    struct local_link *k = self;
    CHECK_OBJ(k, LINK_MAGIC);
    struct rank_area *a = area_at(k->local, k->rank);
    uint64_t words[STATUS_WORDS];
    memcpy(words, own, sizeof words);
    unsigned turn = atomic_load_explicit(&a->turn, memory_order_relaxed) | 1u;
    atomic_store(&a->turn, turn);
    for (size_t i = 0; i < STATUS_WORDS; i++)
        atomic_store(&a->status[i], words[i]);
    atomic_store(&a->turn, turn + 1);
}

/* The lock of a dead process is gone whatever its last beat was. */
static bool rank_taken(const struct local_link *k, uint32_t rank)
{
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)rank, .l_len = 1};
    if (fcntl(k->fd, F_OFD_GETLK, &lock) != 0)
        return true; /* the beat decides */
    return lock.l_type != F_UNLCK;
}

static void local_peer(void *self, uint32_t peer, struct wk_status *ret_status,
                       uint64_t *ret_heard_us)
{
    struct local_link *k = self;
    CHECK_OBJ(k, LINK_MAGIC);
    struct rank_area *a = area_at(k->local, peer);
    uint64_t words[STATUS_WORDS];
    memset(ret_status, 0, sizeof *ret_status);
    *ret_heard_us = 0;
    if (!rank_taken(k, peer))
        return;
    for (int tries = 0; tries < 1000; tries++) {
        unsigned turn = atomic_load(&a->turn);
        for (size_t i = 0; i < STATUS_WORDS; i++)
            words[i] = atomic_load(&a->status[i]);
        if (turn % 2 == 0 && atomic_load(&a->turn) == turn) {
            memcpy(ret_status, words, sizeof words);
            break;
        }
    }
    *ret_heard_us = atomic_load_explicit(&a->heard_us, memory_order_relaxed);
}

static void local_beat(void *self)
{
    struct local_link *k = self;
    CHECK_OBJ(k, LINK_MAGIC);
    atomic_store_explicit(&area_at(k->local, k->rank)->heard_us, clock_mono_us(),
                          memory_order_relaxed);
}

static void local_destroy(void *self)
{
    struct local_link *k = self;
    CHECK_OBJ(k, LINK_MAGIC);
    close(k->fd);
    atomic_fetch_sub(&k->local->users, 1);
    k->magic = 0;
    mem_give(k);
}

static const struct wk_link_ops local_ops = {
    .name = "local",
    .send = local_send,
    .receive = local_receive,
    .release = local_release,
    .publish = local_publish,
    .peer = local_peer,
    .beat = local_beat,
    .destroy = local_destroy,
};

enum err wk_link_local(struct wk_local *local, uint32_t rank, struct wk_link *ret_link,
                       struct err_detail *detail)
{
    CHECK_OBJ(local, LOCAL_MAGIC);
    CHECK(rank < local->options.ranks);
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)rank, .l_len = 1};
    int fd = open(local->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", local->path, strerror(errno));
    if (fcntl(fd, F_OFD_SETLK, &lock) != 0) {
        close(fd);
        return err_set(detail, ERR_BUSY, "%s: rank %u is taken by a live worker", local->path,
                       rank);
    }
    struct local_link *k = mem_take(sizeof *k);
    k->magic = LINK_MAGIC;
    k->rank = rank;
    k->local = local;
    k->fd = fd;
    atomic_fetch_add(&local->users, 1);
    *ret_link = (struct wk_link){&local_ops, k, rank, local->options.ranks,
                                 local->options.message_bytes_max};
    return ERR_OK;
}
