/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_nccl.h - the collectives that move device memory between ranks, over NCCL.
 *
 * Used beside a fabric, which carries the unique id, the verdicts and the signs of life; the
 * libraries are found at run time and called through a table, so that nothing here needs them to
 * build; wk_nccl_header.c compares the table with NCCL's own header where there is one.
 * Owner: the device thread.  Every wait polls the stream, the communicator's own error and the
 * other ranks' life, and ends in an abort at the deadline; after a fault every call fails until a
 * new communicator is made.  A communicator is always aborted, never destroyed: that would wait for
 * ranks which may be gone.  Sums are not NCCL's: ranks gather, then add in rank order, so that
 * all have the same bits.
 *
 * Two ranks over NCCL have not been run yet: the logic is tested against a table of our own. */
#ifndef WORKER_WK_NCCL_H
#define WORKER_WK_NCCL_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"

#define WK_NCCL_ID_BYTES     128u
#define WK_NCCL_VERSION_MIN  22304 /* 2.23.4: the first with the configuration used here */
#define WK_NCCL_IN_PROGRESS  7
#define WK_CUDA_NOT_READY    600
#define WK_CUDA_TO_DEVICE    1 /* kinds of copies */
#define WK_CUDA_TO_HOST      2
#define WK_CUDA_STREAM_APART 1u /* waits for no other stream */

struct wk_fabric;
struct wk_nccl;

struct wk_nccl_id { /* passed by value, as the library wants it */
    char bytes[WK_NCCL_ID_BYTES];
};

/* The head of the library's configuration; fields after these keep its own defaults. */
struct wk_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster, ctas_min, ctas_max;
    const char *net_name;
    int split_share;
};

struct wk_nccl_table {
    int (*get_version)(int *ret_version);
    int (*get_unique_id)(struct wk_nccl_id *ret_id);
    int (*comm_init)(void **ret_comm, int ranks, struct wk_nccl_id id, int rank,
                     struct wk_nccl_config *config);
    int (*comm_error)(void *comm, int *ret_error);
    int (*comm_abort)(void *comm);
    int (*all_gather)(const void *own, void *all, size_t count, int type, void *comm, void *stream);
    int (*send)(const void *own, size_t count, int type, int peer, void *comm, void *stream);
    int (*receive)(void *theirs, size_t count, int type, int peer, void *comm, void *stream);
    int (*group_start)(void);
    int (*group_end)(void);
    const char *(*error_text)(int error);
    /* of the CUDA runtime */
    int (*device_count)(int *ret_count);
    int (*device_set)(int device); /* of the calling thread */
    int (*device_take)(void **ret_bytes, size_t count);
    int (*device_give)(void *bytes);
    int (*host_take)(void **ret_bytes, size_t count); /* pinned: a copy then never waits */
    int (*host_give)(void *bytes);
    int (*copy)(void *to, const void *from, size_t count, int kind, void *stream);
    int (*stream_create)(void **ret_stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_query)(void *stream);
    const char *(*cuda_text)(int error);
    int version; /* of the library that was found */
};

struct wk_nccl_settings {
    uint32_t buffer_bytes; /* per channel and peer; 0 = the library's */
    uint32_t ctas_max;     /* 0 = the library's */
    const char *hca;       /* RDMA adapters, "" = any */
    const char *interface; /* for its own connections, "" = any */
};

/* The version of NCCL's header when this was built, as NCCL counts them; 0 = there was none.  What
 * a header does not vouch for is not used. */
int wk_nccl_built(void);

/* Names of the libraries, NULL or "" = the usual ones.  Sets the NCCL_* variables before the
 * library starts.  ERR_UNSUPPORTED: not there, a function is missing, or wk_nccl_version's reason;
 * detail names it. */
MUST_USE enum err wk_nccl_load(const char *nccl_name, const char *cuda_name,
                               const struct wk_nccl_settings *settings,
                               struct wk_nccl_table *ret_table, struct err_detail *detail);
/* ERR_UNSUPPORTED: the library is older than what is used of it, or of another major version than
 * `built` (0 = no matter), whose structures and numbers may be others. */
MUST_USE enum err wk_nccl_version(const struct wk_nccl_table *table, int built, int *ret_version,
                                  struct err_detail *detail);
/* ERR_UNSUPPORTED: there is no such GPU. */
MUST_USE enum err wk_nccl_device(const struct wk_nccl_table *table, uint32_t device,
                                 struct err_detail *detail);

struct wk_nccl_options {
    const struct wk_nccl_table *table; /* borrowed */
    struct wk_fabric *fabric;          /* joined; borrowed */
    uint32_t deadline_ms;
    uint32_t ctas_max;
    uint32_t device; /* number of the GPU */
};
/* All ranks call it; all succeed or none does. */
MUST_USE enum err wk_nccl_create(const struct wk_nccl_options *options, struct wk_nccl **ret_nccl,
                                 struct err_detail *detail);
void wk_nccl_destroy(struct wk_nccl **nccl_p);

/* Device memory; as the fabric's calls of the same names, but put into the stream, not waited for:
 * wk_nccl_wait says how they ended. */
MUST_USE enum err wk_nccl_all_gather(struct wk_nccl *n, const void *own, size_t bytes,
                                     void *ret_all, void *stream);
MUST_USE enum err wk_nccl_all_to_all(struct wk_nccl *n, const void *own, size_t bytes,
                                     void *ret_all, void *stream);
/* Until what was put into the stream is done, or a fault. */
MUST_USE enum err wk_nccl_wait(struct wk_nccl *n, void *stream, const char *what);
/* For a result of the CUDA runtime: anything but 0 is a fault. */
MUST_USE enum err wk_nccl_cuda(struct wk_nccl *n, int result, const char *what);
enum err wk_nccl_fault(const struct wk_nccl *n, struct err_detail *ret_detail);

#endif
