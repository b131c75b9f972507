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
#define CHUNK_BYTES (128u << 10) /* read at once; stays in the second-level cache */
#define NO_LINEAR   UINT32_MAX

struct pass {
    const struct safetensors *set;
    const struct weights *weights;
    uint32_t *order;  /* tensors as they lie in the files */
    uint32_t *linear; /* [tensors] the linear whose codes it holds, or NO_LINEAR */
    uint32_t *pieces; /* piece i is order[pieces[i]] up to order[pieces[i + 1]] */
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
    if (x->shard != y->shard)
        return x->shard < y->shard ? -1 : 1;
    return x->data < y->data ? -1 : x->data > y->data;
}

static void plan(struct pass *p)
{
    uint32_t count = safetensors_count(p->set);
    const struct safetensors_tensor *first = count > 0 ? safetensors_at(p->set, 0) : NULL;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        p->order[i] = i;
        p->linear[i] = NO_LINEAR;
        p->total += safetensors_at(p->set, i)->bytes;
    }
    for (uint32_t l = 0; p->weights != NULL && l < p->weights->linear_count; l++)
        p->linear[p->weights->linears[l].tensor - first] = l;
    qsort_r(p->order, count, sizeof(*p->order), by_place, (void *)(uintptr_t)p->set);
    for (uint32_t i = 0; i < count; i++) {
        if (i == 0 || bytes >= PIECE_BYTES) {
            p->pieces[p->piece_count++] = i;
            bytes = 0;
        }
        bytes += safetensors_at(p->set, p->order[i])->bytes;
    }
    p->pieces[p->piece_count] = count;
}

/* Asks for the pages in one go: a file that is not in memory yet is then read in large requests
 * and not page by page.  A kernel without it only reads more slowly. */
static void read_ahead(const struct safetensors_tensor *t)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)t->data / page * page, end = (uintptr_t)t->data + t->bytes;
    if (t->bytes >= page)
        (void)madvise((void *)begin, end - begin, MADV_WILLNEED);
}

static void check(struct pass *p, uint32_t linear, bool codes_sound)
{
    struct err_detail ignored;
    if (codes_sound && weights_check_values(p->weights, linear, false, &ignored) == ERR_OK)
        return;
    unsigned seen = atomic_load(&p->first_bad);
    while (linear < seen && !atomic_compare_exchange_weak(&p->first_bad, &seen, linear))
        ;
}

static void run_tensor(struct pass *p, uint32_t index)
{
    const struct safetensors_tensor *t = safetensors_at(p->set, index);
    _Alignas(64) uint8_t chunk[CHUNK_BYTES];
    uint32_t linear = p->linear[index];
    const struct op_quantised *w = linear != NO_LINEAR ? &p->weights->linears[linear].stored : NULL;
    bool sound = true;
    struct hash_xxh3 h;
    read_ahead(t);
    hash_xxh3_init(&h);
    for (uint64_t at = 0; at < t->bytes; at += sizeof(chunk)) {
        size_t count = t->bytes - at < sizeof(chunk) ? t->bytes - at : sizeof(chunk);
        if (safetensors_read(p->set, t, at, chunk, count) != ERR_OK) {
            atomic_store(&p->unread, index); /* its pages are not to be touched */
            hash_xxh3_end(&h);
            return;
        }
        hash_xxh3_add(&h, chunk, count);
        sound = sound && (w == NULL || format_codes_sound(w, chunk, count));
    }
    p->hashes[index] = hash_xxh3_end(&h);
    if (w != NULL)
        check(p, linear, sound);
    uint64_t done = atomic_fetch_add(&p->done, t->bytes) + t->bytes;
    if (p->progress != NULL && pthread_equal(pthread_self(), p->caller))
        p->progress(p->arg, done, p->total);
}

/* The range only says how many threads there are to help: pieces are taken one by one, since they
 * differ in size. */
static void run_pieces(const void *arg, uint32_t begin, uint32_t end)
{
    struct pass *p = *(struct pass *const *)arg;
    for (uint32_t k = begin; k < end; k++) {
        uint32_t piece = atomic_fetch_add(&p->next, 1);
        CHECK(piece < p->piece_count);
        for (uint32_t i = p->pieces[piece]; i < p->pieces[piece + 1]; i++)
            run_tensor(p, p->order[i]);
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
                     .linear = mem_take_array(count + 1, sizeof(uint32_t)),
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
    mem_give(p.linear);
    mem_give(p.pieces);
    if (p.unread != NO_LINEAR) {
        const struct safetensors_tensor *t = safetensors_at(set, p.unread);
        return err_set(detail, ERR_IO, "%s: tensor \"%s\" cannot be read to its end",
                       safetensors_file_name(set, t->shard), t->name);
    }
    if (p.first_bad == NO_LINEAR)
        return ERR_OK;
    enum err e = weights_check_values(w, p.first_bad, true, detail);
    CHECK(e != ERR_OK);
    return e;
}
