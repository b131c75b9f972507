/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/load_pass.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/op_types.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/format.h"
#include "lib/model/safetensors.h"
#include "lib/model/weights.h"

#define PIECE_BYTES ((uint64_t)4 << 20)
#define CHUNK_BYTES (384u << 10) /* read at once; stays in the second-level cache */
#define NO_LINEAR   UINT32_MAX

struct role { /* what a tensor is to the checks; the lowest linear of several that share it */
    uint32_t linear; /* or NO_LINEAR */
    enum format_part part;
};

struct pass {
    const struct safetensors *set;
    const struct weights *weights;
    uint32_t *order;    /* tensors as they lie in the files */
    struct role *roles; /* [tensors] */
    uint32_t *pieces; /* piece i, all in one file, is order[pieces[i]] up to order[pieces[i + 1]] */
    uint32_t piece_count;
    struct hash128 *hashes;
    atomic_uint next;
    _Atomic uint64_t done;
    uint64_t total;
    atomic_uint first_bad;
    atomic_uint unread; /* a tensor that could not be read, or NO_LINEAR */
    pthread_t caller;
    load_pass_fn progress;
    void *arg;
};

static int by_place(const void *a, const void *b, void *arg)
{
    const struct safetensors *set = arg;
    const struct safetensors_tensor *x = safetensors_at(set, *(const uint32_t *)a);
    const struct safetensors_tensor *y = safetensors_at(set, *(const uint32_t *)b);
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* an empty one before what it touches */
}

/* The tensor that holds bytes from `data` on; UINT32_MAX if all that begin there are empty. */
static uint32_t tensor_at(const struct pass *p, const uint8_t *data)
{
    uint32_t low = 0, count = safetensors_count(p->set), high = count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const struct safetensors_tensor *t = safetensors_at(p->set, p->order[middle]);
        if (t->data < data || (t->data == data && t->bytes == 0))
            low = middle + 1;
        else
            high = middle;
    }
    if (low == count || safetensors_at(p->set, p->order[low])->data != data)
        return UINT32_MAX;
    return p->order[low];
}

static void give_roles(struct pass *p)
{
    for (uint32_t i = 0; i < safetensors_count(p->set); i++)
        p->roles[i].linear = NO_LINEAR;
    for (uint32_t l = 0; p->weights != NULL && l < p->weights->linear_count; l++) {
        const struct op_quantised *w = &p->weights->linears[l].stored;
        for (enum format_part part = 0; part < FORMAT_PART_COUNT; part++) {
            const void *data = format_part_data(w, part);
            uint32_t i = data != NULL ? tensor_at(p, data) : UINT32_MAX;
            if (i != UINT32_MAX && p->roles[i].linear == NO_LINEAR)
                p->roles[i] = (struct role){l, part};
        }
    }
}

static void plan(struct pass *p)
{
    uint32_t count = safetensors_count(p->set), shard = 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        p->order[i] = i;
    qsort_r(p->order, count, sizeof(*p->order), by_place, (void *)(uintptr_t)p->set);
    for (uint32_t i = 0; i < count; i++) {
        const struct safetensors_tensor *t = safetensors_at(p->set, p->order[i]);
        if (i == 0 || bytes >= PIECE_BYTES || t->shard != shard) {
            p->pieces[p->piece_count++] = i;
            bytes = 0;
        }
        shard = t->shard;
        bytes += t->bytes;
        p->total += t->bytes;
    }
    p->pieces[p->piece_count] = count;
    give_roles(p);
}

/* Asks for the pages in one go: a file that is not in memory yet is then read in large requests
 * and not page by page.  A kernel without it only reads more slowly. */
static void read_ahead(const uint8_t *first, const uint8_t *end)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)first / page * page;
    if (end > first)
        (void)madvise((void *)begin, (uintptr_t)end - begin, MADV_WILLNEED);
}

/* What one of a linear's tensors holds.  What seems wrong is looked at again as a whole, by the
 * check that names it. */
static void judge(struct pass *p, uint32_t linear, bool sound)
{
    struct err_detail ignored;
    if (sound || weights_check_values(p->weights, linear, &ignored) == ERR_OK)
        return;
    unsigned seen = atomic_load(&p->first_bad);
    while (linear < seen && !atomic_compare_exchange_weak(&p->first_bad, &seen, linear))
        ;
}

static bool bytes_sound(const struct pass *p, uint32_t index, const uint8_t *bytes, uint64_t count)
{
    const struct role *r = &p->roles[index];
    return r->linear == NO_LINEAR ||
           format_part_sound(&p->weights->linears[r->linear].stored, r->part, bytes, count);
}

static void end_tensor(struct pass *p, uint32_t index, bool sound)
{
    const struct role *r = &p->roles[index];
    uint64_t bytes = safetensors_at(p->set, index)->bytes;
    if (r->linear != NO_LINEAR)
        judge(p, r->linear, sound && format_global_sound(&p->weights->linears[r->linear].stored));
    uint64_t done = atomic_fetch_add(&p->done, bytes) + bytes;
    if (p->progress != NULL && pthread_equal(pthread_self(), p->caller))
        p->progress(p->arg, done, p->total);
}

/* False: it cannot be read, and its pages are not to be touched. */
static bool run_large(struct pass *p, uint32_t index, uint8_t *chunk)
{
    const struct safetensors_tensor *t = safetensors_at(p->set, index);
    bool sound = true, read = true;
    struct hash_xxh3 h;
    hash_xxh3_init(&h);
    for (uint64_t at = 0; at < t->bytes && read; at += CHUNK_BYTES) {
        size_t count = t->bytes - at < CHUNK_BYTES ? t->bytes - at : CHUNK_BYTES;
        read = safetensors_read(p->set, t, at, chunk, count) == ERR_OK;
        if (read) {
            hash_xxh3_add(&h, chunk, count);
            sound = sound && bytes_sound(p, index, chunk, count);
        }
    }
    p->hashes[index] = hash_xxh3_end(&h);
    if (read)
        end_tensor(p, index, sound);
    return read;
}

/* Tensors [begin, end) of the order, which a chunk holds with what lies between them. */
static bool run_small(struct pass *p, uint32_t begin, uint32_t end, uint8_t *chunk)
{
    const struct safetensors_tensor *first = safetensors_at(p->set, p->order[begin]);
    const struct safetensors_tensor *last = safetensors_at(p->set, p->order[end - 1]);
    size_t count = (size_t)(last->data + last->bytes - first->data);
    if (safetensors_read(p->set, first, 0, chunk, count) != ERR_OK)
        return false;
    for (uint32_t i = begin; i < end; i++) {
        const struct safetensors_tensor *t = safetensors_at(p->set, p->order[i]);
        const uint8_t *bytes = chunk + (t->data - first->data);
        p->hashes[p->order[i]] = hash_xxh3_once(bytes, t->bytes);
        end_tensor(p, p->order[i], bytes_sound(p, p->order[i], bytes, t->bytes));
    }
    return true;
}

static void run_piece(struct pass *p, uint32_t begin, uint32_t end)
{
    _Alignas(64) uint8_t chunk[CHUNK_BYTES];
    const struct safetensors_tensor *last = safetensors_at(p->set, p->order[end - 1]);
    read_ahead(safetensors_at(p->set, p->order[begin])->data, last->data + last->bytes);
    for (uint32_t i = begin, next; i < end; i = next) {
        const struct safetensors_tensor *t = safetensors_at(p->set, p->order[i]), *u = t;
        next = i;
        while (next < end && u->data + u->bytes <= t->data + CHUNK_BYTES && ++next < end)
            u = safetensors_at(p->set, p->order[next]);
        bool read = next > i ? run_small(p, i, next, chunk) : run_large(p, p->order[i], chunk);
        for (; !read && next > i + 1 && run_small(p, i, i + 1, chunk); i++) /* which of them? */
            continue;
        if (!read) {
            atomic_store(&p->unread, p->order[i]);
            return;
        }
        next = next > i ? next : i + 1;
    }
}

/* The range says nothing but that there is a thread to help: pieces differ in size, so each thread
 * takes one after the other until none is left. */
static void run_pieces(const void *arg, uint32_t begin, uint32_t end)
{
    struct pass *p = *(struct pass *const *)arg;
    CHECK(begin < end);
    for (;;) {
        uint32_t piece = atomic_fetch_add(&p->next, 1);
        if (piece >= p->piece_count)
            return;
        run_piece(p, p->pieces[piece], p->pieces[piece + 1]);
    }
}

enum err load_pass(const struct safetensors *set, const struct weights *w, const struct op_ctx *ctx,
                   load_pass_fn progress, void *arg, struct hash128 *ret_hashes,
                   struct err_detail *detail)
{
    uint32_t count = safetensors_count(set);
    struct pass p = {.set = set,
                     .weights = w,
                     .order = mem_take_array(count + 1, sizeof(uint32_t)),
                     .roles = mem_take_array(count + 1, sizeof(struct role)),
                     .pieces = mem_take_array(count + 1, sizeof(uint32_t)),
                     .hashes = ret_hashes,
                     .first_bad = NO_LINEAR,
                     .unread = NO_LINEAR,
                     .caller = pthread_self(),
                     .progress = progress,
                     .arg = arg};
    struct pass *shared = &p;
    plan(&p);
    op_for(ctx, p.piece_count, PIECE_BYTES, run_pieces, &shared);
    CHECK(p.unread != NO_LINEAR || atomic_load(&p.done) == p.total);
    if (progress != NULL && p.unread == NO_LINEAR)
        progress(arg, p.total, p.total);
    mem_give(p.order);
    mem_give(p.roles);
    mem_give(p.pieces);
    if (p.unread != NO_LINEAR) {
        const struct safetensors_tensor *t = safetensors_at(set, p.unread);
        return err_set(detail, ERR_IO, "%s: tensor \"%s\" cannot be read to its end",
                       safetensors_file_name(set, t->shard), t->name);
    }
    if (p.first_bad == NO_LINEAR)
        return ERR_OK;
    TRY(weights_check_values(w, p.first_bad, detail));
    return err_set(detail, ERR_CORRUPT, "tensor \"%s\": its file changes while it is read",
                   w->linears[p.first_bad].tensor->name);
}
