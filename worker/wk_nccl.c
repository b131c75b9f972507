/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_nccl.h"

#include <dlfcn.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "worker/wk_fabric_parts.h"

#define NCCL_MAGIC        0x574b4e43u
#define NCCL_BYTES        0 /* the library's type of one byte */
#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_UNDEFINED    INT_MIN
/* The other ranks' life is looked at every so many polls. */
#define POLLS_PER_LOOK 256u

struct wk_nccl {
    uint32_t magic;
    struct wk_nccl_options options;
    const struct wk_nccl_table *t;
    struct wk_fabric *f;
    void *comm;
    enum err fault;
    struct err_detail why;
};

/* ---- library ---- */

struct symbol {
    const char *name;
    void **place;
};

static enum err symbols_find(void *library, const char *name, const struct symbol *symbols,
                             size_t count, struct err_detail *detail)
{
    for (size_t i = 0; i < count; i++) {
        *symbols[i].place = dlsym(library, symbols[i].name);
        if (*symbols[i].place == NULL)
            return err_set(detail, ERR_UNSUPPORTED, "%s: has no %s", name, symbols[i].name);
    }
    return ERR_OK;
}

/* The named library, or the first of the usual names that is there.  It stays open as long as the
 * process: neither of the two can be unloaded safely. */
static enum err library_load(const char *name, const char *const *usual, size_t usual_count,
                             const struct symbol *symbols, size_t count, struct err_detail *detail)
{
    bool named = name != NULL && name[0] != '\0';
    void *library = NULL;
    for (size_t i = 0; i < (named ? 1 : usual_count) && library == NULL; i++) {
        const char *why;
        const char *at = named ? name : usual[i];
        library = dlopen(at, RTLD_NOW | RTLD_LOCAL);
        if (library != NULL)
            return symbols_find(library, at, symbols, count, detail);
        why = dlerror();
        if (i == 0) /* the usual name, if none is there */
            err_set(detail, ERR_UNSUPPORTED, "fabric=nccl: %.300s",
                    why != NULL ? why : "cannot be opened");
    }
    return ERR_UNSUPPORTED;
}

/* As NCCL counts: 2.8.4 is 2804, 2.9.6 and what came later 20906. */
struct version_text {
    char text[24];
};

static struct version_text version_text(int version)
{
    struct version_text t;
    int major = version < 10000 ? 1000 : 10000;
    snprintf(t.text, sizeof t.text, "%d.%d.%d", version / major, version % major / 100,
             version % 100);
    return t;
}

enum err wk_nccl_version(const struct wk_nccl_table *table, int built, int *ret_version,
                         struct err_detail *detail)
{
    int version = 0, result = table->get_version(&version);
    if (result != 0)
        return err_set(detail, ERR_UNSUPPORTED, "fabric=nccl: the library tells no version: %s",
                       table->error_text(result));
    if (version < WK_NCCL_VERSION_MIN)
        return err_set(detail, ERR_UNSUPPORTED,
                       "fabric=nccl: the library is NCCL %s, too old: %s or later is needed",
                       version_text(version).text, version_text(WK_NCCL_VERSION_MIN).text);
    if (built > 0 && version / 10000 != built / 10000)
        return err_set(detail, ERR_UNSUPPORTED,
                       "fabric=nccl: the library is NCCL %s, this worker was compiled for %s",
                       version_text(version).text, version_text(built).text);
    *ret_version = version;
    return ERR_OK;
}

static void variables_set(const struct wk_nccl_settings *s)
{
    char text[16];
    if (s->buffer_bytes > 0) {
        snprintf(text, sizeof text, "%u", s->buffer_bytes);
        setenv("NCCL_BUFFSIZE", text, 1);
    }
    if (s->hca[0] != '\0')
        setenv("NCCL_IB_HCA", s->hca, 1);
    if (s->interface[0] != '\0')
        setenv("NCCL_SOCKET_IFNAME", s->interface, 1);
}

enum err wk_nccl_load(const char *nccl_name, const char *cuda_name,
                      const struct wk_nccl_settings *settings, struct wk_nccl_table *ret_table,
                      struct err_detail *detail)
{
    struct wk_nccl_table t;
    const struct symbol nccl[] = {
        {"ncclGetVersion", (void **)&t.get_version},
        {"ncclGetUniqueId", (void **)&t.get_unique_id},
        {"ncclCommInitRankConfig", (void **)&t.comm_init},
        {"ncclCommGetAsyncError", (void **)&t.comm_error},
        {"ncclCommAbort", (void **)&t.comm_abort},
        {"ncclAllGather", (void **)&t.all_gather},
        {"ncclSend", (void **)&t.send},
        {"ncclRecv", (void **)&t.receive},
        {"ncclGroupStart", (void **)&t.group_start},
        {"ncclGroupEnd", (void **)&t.group_end},
        {"ncclGetErrorString", (void **)&t.error_text},
    };
    const struct symbol cuda[] = {
        {"cudaGetDeviceCount", (void **)&t.device_count},
        {"cudaSetDevice", (void **)&t.device_set},
        {"cudaMalloc", (void **)&t.device_take},
        {"cudaFree", (void **)&t.device_give},
        {"cudaMallocHost", (void **)&t.host_take},
        {"cudaFreeHost", (void **)&t.host_give},
        {"cudaMemcpyAsync", (void **)&t.copy},
        {"cudaStreamCreateWithFlags", (void **)&t.stream_create},
        {"cudaStreamDestroy", (void **)&t.stream_destroy},
        {"cudaStreamQuery", (void **)&t.stream_query},
        {"cudaGetErrorString", (void **)&t.cuda_text},
    };
    /* A runtime alone, without its headers, has the numbered names only. */
    static const char *const nccl_names[] = {"libnccl.so.2"};
    static const char *const cuda_names[] = {"libcudart.so", "libcudart.so.13", "libcudart.so.12"};
    variables_set(settings);
    TRY(library_load(nccl_name, nccl_names, ARRAY_COUNT(nccl_names), nccl, ARRAY_COUNT(nccl),
                     detail));
    TRY(library_load(cuda_name, cuda_names, ARRAY_COUNT(cuda_names), cuda, ARRAY_COUNT(cuda),
                     detail));
    TRY(wk_nccl_version(&t, wk_nccl_built(), &t.version, detail));
    *ret_table = t;
    return ERR_OK;
}

enum err wk_nccl_device(const struct wk_nccl_table *table, uint32_t device,
                        struct err_detail *detail)
{
    int count = 0, result = table->device_count(&count);
    if (result != 0)
        return err_set(detail, ERR_UNSUPPORTED, "fabric=nccl needs a GPU on every node: %s",
                       table->cuda_text(result));
    if (count <= 0 || device >= (uint32_t)count)
        return err_set(detail, ERR_UNSUPPORTED,
                       "fabric=nccl needs a GPU on every node: cuda_device is %u, %d are here",
                       device, count);
    return ERR_OK;
}

/* ---- faults ---- */

/* Tears the communicator down and tells the other ranks through the fabric. */
static enum err nccl_fail(struct wk_nccl *n, enum err e, const char *what, const char *reason)
{
    if (n->fault != ERR_OK)
        return n->fault;
    n->fault = err_set(&n->why, e, "nccl %s: %s", what, reason);
    if (n->comm != NULL)
        n->t->comm_abort(n->comm);
    n->comm = NULL;
    /* Whoever left the group first has told why; that reason is then the fabric's. */
    wk_fabric_fail(n->f, e, "%s", n->why.text);
    return e;
}

enum err wk_nccl_cuda(struct wk_nccl *n, int result, const char *what)
{
    CHECK_OBJ(n, NCCL_MAGIC);
    return result == 0 ? ERR_OK : nccl_fail(n, ERR_IO, what, n->t->cuda_text(result));
}

static enum err nccl_check(struct wk_nccl *n, int result, const char *what)
{
    if (result == 0 || result == WK_NCCL_IN_PROGRESS)
        return ERR_OK;
    return nccl_fail(n, ERR_IO, what, n->t->error_text(result));
}

/* One look at what may have gone wrong meanwhile. */
static enum err nccl_look(struct wk_nccl *n, const char *what, uint64_t end_us, uint32_t polls)
{
    int error = 0;
    TRY(nccl_check(n, n->t->comm_error(n->comm, &error), what));
    TRY(nccl_check(n, error, what));
    if (clock_mono_us() >= end_us)
        return nccl_fail(n, ERR_TIMEOUT, what, "deadline passed");
    if (polls % POLLS_PER_LOOK == 0 && wk_fabric_look(n->f, what) != ERR_OK) {
        struct err_detail why = {{0}};
        enum err e = wk_fabric_fault(n->f, &why);
        return nccl_fail(n, e, what, why.text);
    }
    sched_yield();
    return ERR_OK;
}

static uint64_t deadline_us(const struct wk_nccl *n)
{
    return clock_mono_us() + (uint64_t)n->options.deadline_ms * 1000;
}

/* Until the communicator has taken the call in (it is a non-blocking one). */
static enum err accepted_wait(struct wk_nccl *n, const char *what)
{
    uint64_t end_us = deadline_us(n);
    for (uint32_t polls = 1;; polls++) {
        int error = 0;
        TRY(nccl_check(n, n->t->comm_error(n->comm, &error), what));
        if (error != WK_NCCL_IN_PROGRESS)
            return nccl_check(n, error, what);
        TRY(nccl_look(n, what, end_us, polls));
    }
}

enum err wk_nccl_wait(struct wk_nccl *n, void *stream, const char *what)
{
    CHECK_OBJ(n, NCCL_MAGIC);
    if (n->fault != ERR_OK)
        return n->fault;
    uint64_t end_us = deadline_us(n);
    for (uint32_t polls = 1;; polls++) {
        int state = n->t->stream_query(stream);
        if (state == 0)
            return ERR_OK;
        if (state != WK_CUDA_NOT_READY)
            return wk_nccl_cuda(n, state, what);
        TRY(nccl_look(n, what, end_us, polls));
    }
}

/* ---- life ---- */

static enum err comm_open(struct wk_nccl *n, const struct wk_nccl_id *id)
{
    struct wk_nccl_config config = {
        .size = sizeof config,
        .magic = NCCL_CONFIG_MAGIC,
        .version = WK_NCCL_VERSION_MIN,
        .blocking = 0, /* or nothing could be polled, nor aborted */
        .cga_cluster = NCCL_UNDEFINED,
        .ctas_min = NCCL_UNDEFINED,
        .ctas_max = n->options.ctas_max > 0 ? (int)n->options.ctas_max : NCCL_UNDEFINED,
        .split_share = NCCL_UNDEFINED,
    };
    int result = n->t->comm_init(&n->comm, (int)wk_fabric_ranks(n->f), *id,
                                 (int)wk_fabric_rank(n->f), &config);
    TRY(nccl_check(n, result, "communicator"));
    if (n->comm == NULL)
        return nccl_fail(n, ERR_IO, "communicator", "none was made");
    return accepted_wait(n, "communicator");
}

static enum err comm_form(struct wk_nccl *n)
{
    struct wk_nccl_id own = {{0}}, all[WK_RANKS_MAX];
    TRY(wk_nccl_cuda(n, n->t->device_set((int)n->options.device), "device"));
    /* An id begins a thread that waits for all ranks, for ever: not before all can come. */
    enum err e = wk_barrier(n->f);
    if (e == ERR_OK && wk_fabric_rank(n->f) == 0)
        TRY(nccl_check(n, n->t->get_unique_id(&own), "unique id"));
    if (e == ERR_OK)
        e = wk_all_gather(n->f, &own, sizeof own, all);
    if (e == ERR_OK)
        TRY(comm_open(n, &all[0]));
    if (e == ERR_OK)
        e = wk_barrier(n->f); /* all have it, or this fails on all */
    if (e == ERR_OK)
        return ERR_OK;
    struct err_detail why = {{0}};
    wk_fabric_fault(n->f, &why);
    return nccl_fail(n, e, "communicator", why.text);
}

enum err wk_nccl_create(const struct wk_nccl_options *options, struct wk_nccl **ret_nccl,
                        struct err_detail *detail)
{
    CHECK(options->table != NULL && options->fabric != NULL && options->deadline_ms > 0);
    struct wk_nccl *n = mem_take(sizeof *n);
    n->magic = NCCL_MAGIC;
    n->options = *options;
    n->t = options->table;
    n->f = options->fabric;
    enum err e = comm_form(n);
    if (e != ERR_OK) {
        if (detail != NULL)
            *detail = n->why;
        wk_nccl_destroy(&n);
        return e;
    }
    *ret_nccl = n;
    return ERR_OK;
}

void wk_nccl_destroy(struct wk_nccl **nccl_p)
{
    struct wk_nccl *n = *nccl_p;
    if (n == NULL)
        return;
    CHECK_OBJ(n, NCCL_MAGIC);
    if (n->comm != NULL)
        n->t->comm_abort(n->comm);
    n->magic = 0;
    mem_give(n);
    *nccl_p = NULL;
}

enum err wk_nccl_all_gather(struct wk_nccl *n, const void *own, size_t bytes, void *ret_all,
                            void *stream)
{
    CHECK_OBJ(n, NCCL_MAGIC);
    if (n->fault != ERR_OK)
        return n->fault;
    TRY(nccl_check(n, n->t->all_gather(own, ret_all, bytes, NCCL_BYTES, n->comm, stream),
                   "all_gather"));
    return accepted_wait(n, "all_gather");
}

/* The first result that is a fault, told when the group has ended: nothing is aborted inside. */
static int pairs_enqueue(struct wk_nccl *n, const uint8_t *own, size_t bytes, uint8_t *all,
                         void *stream)
{
    int result = 0;
    for (uint32_t peer = 0; peer < wk_fabric_ranks(n->f); peer++) {
        result = n->t->send(own + peer * bytes, bytes, NCCL_BYTES, (int)peer, n->comm, stream);
        if (result == 0 || result == WK_NCCL_IN_PROGRESS)
            result =
                n->t->receive(all + peer * bytes, bytes, NCCL_BYTES, (int)peer, n->comm, stream);
        if (result != 0 && result != WK_NCCL_IN_PROGRESS)
            break;
    }
    return result;
}

enum err wk_nccl_all_to_all(struct wk_nccl *n, const void *own, size_t bytes, void *ret_all,
                            void *stream)
{
    CHECK_OBJ(n, NCCL_MAGIC);
    CHECK(own != ret_all);
    if (n->fault != ERR_OK)
        return n->fault;
    TRY(nccl_check(n, n->t->group_start(), "all_to_all"));
    int queued = pairs_enqueue(n, own, bytes, ret_all, stream);
    int ended = n->t->group_end(); /* a group that was begun is ended whatever happened */
    TRY(nccl_check(n, queued, "all_to_all"));
    TRY(nccl_check(n, ended, "all_to_all"));
    return accepted_wait(n, "all_to_all");
}

enum err wk_nccl_fault(const struct wk_nccl *n, struct err_detail *ret_detail)
{
    CHECK_OBJ(n, NCCL_MAGIC);
    if (n->fault != ERR_OK && ret_detail != NULL)
        *ret_detail = n->why;
    return n->fault;
}
