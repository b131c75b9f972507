/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_nccl_host.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "worker/wk_fabric_parts.h"

#define HOST_MAGIC 0x574b4e48u

struct wk_nccl_host {
    uint32_t magic;
    const struct wk_nccl_table *t;
    struct wk_nccl *nccl;
    uint32_t rank, ranks;
    void *stream;
    /* [ranks, WK_NCCL_PIECE_BYTES] each: what is given, what comes; on the GPU, and pinned here */
    void *device_own, *device_all;
    uint8_t *own, *all;
};

static enum err host_memory(struct wk_nccl_host *h)
{
    const struct wk_nccl_table *t = h->t;
    size_t bytes = (size_t)h->ranks * WK_NCCL_PIECE_BYTES;
    void *own = NULL, *all = NULL;
    TRY(wk_nccl_cuda(h->nccl, t->stream_create(&h->stream, WK_CUDA_STREAM_APART), "stream"));
    TRY(wk_nccl_cuda(h->nccl, t->device_take(&h->device_own, bytes), "memory of the GPU"));
    TRY(wk_nccl_cuda(h->nccl, t->device_take(&h->device_all, bytes), "memory of the GPU"));
    TRY(wk_nccl_cuda(h->nccl, t->host_take(&own, bytes), "pinned memory"));
    h->own = own;
    TRY(wk_nccl_cuda(h->nccl, t->host_take(&all, bytes), "pinned memory"));
    h->all = all;
    return ERR_OK;
}

enum err wk_nccl_host_create(const struct wk_nccl_options *options, struct wk_nccl_host **ret_host,
                             struct err_detail *detail)
{
    struct wk_nccl_host *h = mem_take(sizeof *h);
    h->magic = HOST_MAGIC;
    h->t = options->table;
    h->rank = wk_fabric_rank(options->fabric);
    h->ranks = wk_fabric_ranks(options->fabric);
    enum err e = wk_nccl_create(options, &h->nccl, detail);
    if (e == ERR_OK && host_memory(h) != ERR_OK)
        e = wk_nccl_fault(h->nccl, detail);
    if (e == ERR_OK && (e = wk_barrier(options->fabric)) != ERR_OK)
        wk_fabric_fault(options->fabric, detail); /* another rank has no memory */
    if (e != ERR_OK) {
        wk_nccl_host_destroy(&h);
        return e;
    }
    *ret_host = h;
    return ERR_OK;
}

void wk_nccl_host_destroy(struct wk_nccl_host **host_p)
{
    struct wk_nccl_host *h = *host_p;
    if (h == NULL)
        return;
    CHECK_OBJ(h, HOST_MAGIC);
    wk_nccl_destroy(&h->nccl); /* first: ends what still uses the stream and the memory */
    if (h->stream != NULL)
        h->t->stream_destroy(h->stream);
    if (h->device_own != NULL)
        h->t->device_give(h->device_own);
    if (h->device_all != NULL)
        h->t->device_give(h->device_all);
    if (h->own != NULL)
        h->t->host_give(h->own);
    if (h->all != NULL)
        h->t->host_give(h->all);
    h->magic = 0;
    mem_give(h);
    *host_p = NULL;
}

static enum err host_copy(struct wk_nccl_host *h, void *to, const void *from, size_t bytes,
                          int kind, const char *what)
{
    return wk_nccl_cuda(h->nccl, h->t->copy(to, from, bytes, kind, h->stream), what);
}

/* h->own [bytes] of every rank to h->all [ranks, bytes]. */
static enum err piece_gather(struct wk_nccl_host *h, size_t bytes)
{
    const char *what = "all_gather";
    TRY(host_copy(h, h->device_own, h->own, bytes, WK_CUDA_TO_DEVICE, what));
    TRY(wk_nccl_all_gather(h->nccl, h->device_own, bytes, h->device_all, h->stream));
    TRY(host_copy(h, h->all, h->device_all, h->ranks * bytes, WK_CUDA_TO_HOST, what));
    return wk_nccl_wait(h->nccl, h->stream, what);
}

static size_t piece_of(size_t left)
{
    return left < WK_NCCL_PIECE_BYTES ? left : WK_NCCL_PIECE_BYTES;
}

enum err wk_nccl_host_reduce(struct wk_nccl_host *h, float *values, size_t count)
{
    CHECK_OBJ(h, HOST_MAGIC);
    const uint8_t *parts[WK_RANKS_MAX];
    TRY(wk_nccl_fault(h->nccl, NULL));
    for (size_t at = 0; at < count;) {
        size_t bytes = piece_of((count - at) * sizeof *values), n = bytes / sizeof *values;
        memcpy(h->own, values + at, bytes);
        TRY(piece_gather(h, bytes));
        for (uint32_t r = 0; r < h->ranks; r++)
            parts[r] = h->all + r * bytes;
        wk_fabric_sum(parts, h->ranks, values + at, n);
        at += n;
    }
    return ERR_OK;
}

enum err wk_nccl_host_gather(struct wk_nccl_host *h, const void *own, size_t bytes, void *ret_all)
{
    CHECK_OBJ(h, HOST_MAGIC);
    TRY(wk_nccl_fault(h->nccl, NULL));
    for (size_t at = 0; at < bytes;) {
        size_t n = piece_of(bytes - at);
        memcpy(h->own, (const uint8_t *)own + at, n);
        TRY(piece_gather(h, n));
        for (uint32_t r = 0; r < h->ranks; r++)
            memcpy((uint8_t *)ret_all + r * bytes + at, h->all + r * n, n);
        at += n;
    }
    return ERR_OK;
}

/* As piece_gather, each rank's part to that rank alone. */
static enum err piece_to_all(struct wk_nccl_host *h, size_t bytes)
{
    const char *what = "all_to_all";
    TRY(host_copy(h, h->device_own, h->own, h->ranks * bytes, WK_CUDA_TO_DEVICE, what));
    TRY(wk_nccl_all_to_all(h->nccl, h->device_own, bytes, h->device_all, h->stream));
    TRY(host_copy(h, h->all, h->device_all, h->ranks * bytes, WK_CUDA_TO_HOST, what));
    return wk_nccl_wait(h->nccl, h->stream, what);
}

enum err wk_nccl_host_to_all(struct wk_nccl_host *h, const void *own, size_t bytes, void *ret_all)
{
    CHECK_OBJ(h, HOST_MAGIC);
    CHECK(own != ret_all);
    TRY(wk_nccl_fault(h->nccl, NULL));
    for (size_t at = 0; at < bytes;) {
        size_t n = piece_of(bytes - at);
        for (uint32_t r = 0; r < h->ranks; r++)
            memcpy(h->own + r * n, (const uint8_t *)own + r * bytes + at, n);
        TRY(piece_to_all(h, n));
        for (uint32_t r = 0; r < h->ranks; r++)
            memcpy((uint8_t *)ret_all + r * bytes + at, h->all + r * n, n);
        at += n;
    }
    return ERR_OK;
}
