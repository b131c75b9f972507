/* SPDX-License-Identifier: Apache-2.0 */
/* What worker/wk_nccl.h says of NCCL and of the CUDA runtime, compared with their own headers where
 * the build has found them. */
#include "worker/wk_nccl.h"

#ifdef TANDEM_NCCL

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "lib/base/check.h"

STATIC_CHECK(sizeof(ncclUniqueId) == WK_NCCL_ID_BYTES);
STATIC_CHECK(NCCL_VERSION_CODE >= WK_NCCL_VERSION_MIN);
STATIC_CHECK(ncclInProgress == WK_NCCL_IN_PROGRESS && ncclSuccess == 0 && ncclInt8 == 0);
STATIC_CHECK(cudaErrorNotReady == WK_CUDA_NOT_READY && cudaSuccess == 0);
STATIC_CHECK(cudaMemcpyHostToDevice == WK_CUDA_TO_DEVICE);
STATIC_CHECK(cudaMemcpyDeviceToHost == WK_CUDA_TO_HOST);
STATIC_CHECK(cudaStreamNonBlocking == WK_CUDA_STREAM_APART);

#define SAME_PLACE(ours, theirs)                                                                   \
    STATIC_CHECK(offsetof(struct wk_nccl_config, ours) == offsetof(ncclConfig_t, theirs))
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster, cgaClusterSize);
SAME_PLACE(ctas_min, minCTAs);
SAME_PLACE(ctas_max, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
STATIC_CHECK(sizeof(struct wk_nccl_config) <= sizeof(ncclConfig_t));

/* Their enums and opaque pointers are the table's int and void *; what these functions take and in
 * which order is compared by the compiler. */
typedef ncclResult_t (*gather_fn)(const void *, void *, size_t, ncclDataType_t, ncclComm_t,
                                  cudaStream_t);
typedef ncclResult_t (*send_fn)(const void *, size_t, ncclDataType_t, int, ncclComm_t,
                                cudaStream_t);
typedef ncclResult_t (*receive_fn)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
typedef ncclResult_t (*init_fn)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
typedef ncclResult_t (*error_fn)(ncclComm_t, ncclResult_t *);
typedef cudaError_t (*copy_fn)(void *, const void *, size_t, enum cudaMemcpyKind, cudaStream_t);
#define SAME_TYPE(function, type)                                                                  \
    STATIC_CHECK(__builtin_types_compatible_p(__typeof__(&(function)), type))
SAME_TYPE(ncclAllGather, gather_fn);
SAME_TYPE(ncclSend, send_fn);
SAME_TYPE(ncclRecv, receive_fn);
SAME_TYPE(ncclCommInitRankConfig, init_fn);
SAME_TYPE(ncclCommGetAsyncError, error_fn);
SAME_TYPE(cudaMemcpyAsync, copy_fn);

int wk_nccl_built(void)
{
    return NCCL_VERSION_CODE;
}

#else

int wk_nccl_built(void)
{
    return 0;
}

#endif
