/* SPDX-License-Identifier: Apache-2.0 */
/* A library with the names of NCCL and of the CUDA runtime that moves the bytes for real, between
 * threads or processes of one host: "device" memory is memory, a communicator is a shared file
 * named by its id.  As theirs, nothing here blocks: what is put into a stream runs while the stream
 * is asked for.  Trouble on demand: FAKE_NCCL_FAIL=init|gather|stream|device, and a
 * FAKE_NCCL_VERSION.  For tests only. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RANKS_MAX   4
#define OPS_MAX     64
#define SLOT_BYTES  (RANKS_MAX << 20)
#define IN_PROGRESS 7
#define NOT_READY   600

struct place { /* of one rank, in the shared file */
    _Atomic uint64_t here, posted, taken;
    uint64_t count;
    uint8_t bytes[SLOT_BYTES];
};

struct comm {
    int rank, ranks;
    struct place *places; /* [ranks] */
    uint64_t number;      /* collectives begun */
    char name[128];
};

enum op_kind { COPY, GATHER, TO_ALL };
struct op {
    enum op_kind kind;
    void *to;
    const void *from;
    size_t count;
    struct comm *comm;
    int posted;
};

struct stream {
    struct op ops[OPS_MAX];
    int count;
};

static _Thread_local struct op group; /* between ncclGroupStart and End */
static _Thread_local struct stream *group_stream;

static int troubled(const char *what)
{
    const char *fail = getenv("FAKE_NCCL_FAIL");
    return fail != NULL && strcmp(fail, what) == 0;
}

int ncclGetVersion(int *ret);
int ncclGetVersion(int *ret)
{
    const char *version = getenv("FAKE_NCCL_VERSION");
    *ret = version != NULL ? atoi(version) : 22809;
    return *ret < 0 ? 3 : 0;
}

struct id {
    char bytes[128];
};

int ncclGetUniqueId(struct id *ret);
int ncclGetUniqueId(struct id *ret)
{
    static _Atomic int number;
    memset(ret, 0, sizeof *ret);
    snprintf(ret->bytes, sizeof ret->bytes, "/dev/shm/tandem-fake-nccl-%d-%d", (int)getpid(),
             atomic_fetch_add(&number, 1));
    return 0;
}

int ncclCommInitRankConfig(void **ret, int ranks, struct id id, int rank, void *config);
int ncclCommInitRankConfig(void **ret, int ranks, struct id id, int rank, void *config)
{
    size_t bytes = sizeof(struct place) * (size_t)ranks;
    int fd = open(id.bytes, O_RDWR | O_CREAT, 0600);
    (void)config;
    if (troubled("init") || ranks > RANKS_MAX || fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        return 2;
    struct comm *c = calloc(1, sizeof *c);
    c->rank = rank;
    c->ranks = ranks;
    c->places = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    atomic_store(&c->places[rank].here, 1);
    *ret = c;
    memcpy(c->name, id.bytes, sizeof c->name);
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(struct comm *c, int *ret);
int ncclCommGetAsyncError(struct comm *c, int *ret)
{
    *ret = 0;
    for (int r = 0; r < c->ranks; r++)
        if (!atomic_load(&c->places[r].here))
            *ret = IN_PROGRESS;
    if (*ret == 0)
        unlink(c->name); /* all have it open */
    return 0;
}

int ncclCommAbort(struct comm *c);
int ncclCommAbort(struct comm *c)
{
    unlink(c->name);
    munmap(c->places, sizeof(struct place) * (size_t)c->ranks);
    free(c);
    return 0;
}

static int put(struct stream *s, const struct op *op)
{
    if (s->count == OPS_MAX)
        return 3;
    s->ops[s->count++] = *op;
    return 0;
}

int ncclAllGather(const void *own, void *all, size_t count, int type, struct comm *c,
                  struct stream *s);
int ncclAllGather(const void *own, void *all, size_t count, int type, struct comm *c,
                  struct stream *s)
{
    struct op op = {GATHER, all, own, count, c, 0};
    return type != 0 || troubled("gather") ? 4 : put(s, &op);
}

int ncclGroupStart(void);
int ncclGroupStart(void)
{
    memset(&group, 0, sizeof group);
    group.kind = TO_ALL;
    return 0;
}

int ncclSend(const void *own, size_t count, int type, int peer, struct comm *c, struct stream *s);
int ncclSend(const void *own, size_t count, int type, int peer, struct comm *c, struct stream *s)
{
    group_stream = s;
    group.comm = c;
    group.count = count;
    if (peer == 0)
        group.from = own;
    return type != 0 || (const uint8_t *)own != (const uint8_t *)group.from + (size_t)peer * count;
}

int ncclRecv(void *theirs, size_t count, int type, int peer, struct comm *c, struct stream *s);
int ncclRecv(void *theirs, size_t count, int type, int peer, struct comm *c, struct stream *s)
{
    (void)c;
    (void)s;
    if (peer == 0)
        group.to = theirs;
    return type != 0 || (uint8_t *)theirs != (uint8_t *)group.to + (size_t)peer * count;
}

int ncclGroupEnd(void);
int ncclGroupEnd(void)
{
    return put(group_stream, &group);
}

const char *ncclGetErrorString(int error);
const char *ncclGetErrorString(int error)
{
    return error == 2 ? "unhandled system error" : "invalid usage";
}

/* 1: done; 0: another rank is awaited; -1: ranks differ. */
static int op_run(struct op *op)
{
    struct comm *c = op->comm;
    if (op->kind == COPY) {
        memcpy(op->to, op->from, op->count);
        return 1;
    }
    struct place *own = &c->places[c->rank];
    size_t given = op->kind == GATHER ? op->count : op->count * (size_t)c->ranks;
    if (!op->posted) {
        for (int r = 0; r < c->ranks; r++)
            if (atomic_load(&c->places[r].taken) < c->number)
                return 0;
        if (given > SLOT_BYTES)
            return -1;
        memcpy(own->bytes, op->from, given);
        own->count = given;
        op->posted = 1;
        atomic_store(&own->posted, ++c->number);
    }
    for (int r = 0; r < c->ranks; r++)
        if (atomic_load(&c->places[r].posted) < c->number)
            return 0;
    for (int r = 0; r < c->ranks; r++) {
        const struct place *p = &c->places[r];
        size_t at = op->kind == GATHER ? 0 : (size_t)c->rank * op->count;
        if (p->count != given)
            return -1;
        memcpy((uint8_t *)op->to + (size_t)r * op->count, p->bytes + at, op->count);
    }
    atomic_store(&own->taken, c->number);
    return 1;
}

int cudaStreamQuery(struct stream *s);
int cudaStreamQuery(struct stream *s)
{
    if (troubled("stream"))
        return 719;
    while (s->count > 0) {
        int done = op_run(&s->ops[0]);
        if (done <= 0)
            return done == 0 ? NOT_READY : 1;
        memmove(s->ops, s->ops + 1, (size_t)--s->count * sizeof *s->ops);
    }
    return 0;
}

int cudaStreamCreateWithFlags(struct stream **ret, unsigned flags);
int cudaStreamCreateWithFlags(struct stream **ret, unsigned flags)
{
    *ret = calloc(1, sizeof **ret);
    return flags == 1 ? 0 : 1;
}

int cudaStreamDestroy(struct stream *s);
int cudaStreamDestroy(struct stream *s)
{
    free(s);
    return 0;
}

int cudaMemcpyAsync(void *to, const void *from, size_t count, int kind, struct stream *s);
int cudaMemcpyAsync(void *to, const void *from, size_t count, int kind, struct stream *s)
{
    struct op op = {COPY, to, from, count, NULL, 0};
    return kind == 1 || kind == 2 ? put(s, &op) : 21;
}

int cudaGetDeviceCount(int *ret);
int cudaGetDeviceCount(int *ret)
{
    *ret = troubled("device") ? 0 : 2;
    return troubled("device") ? 100 : 0;
}

int cudaSetDevice(int device);
int cudaSetDevice(int device)
{
    return device < 2 ? 0 : 101;
}

int cudaMalloc(void **ret, size_t count);
int cudaMalloc(void **ret, size_t count)
{
    *ret = calloc(1, count);
    return 0;
}

int cudaFree(void *bytes);
int cudaFree(void *bytes)
{
    free(bytes);
    return 0;
}

int cudaMallocHost(void **ret, size_t count);
int cudaMallocHost(void **ret, size_t count)
{
    return cudaMalloc(ret, count);
}

int cudaFreeHost(void *bytes);
int cudaFreeHost(void *bytes)
{
    return cudaFree(bytes);
}

const char *cudaGetErrorString(int error);
const char *cudaGetErrorString(int error)
{
    return error == 100 ? "no CUDA-capable device is detected" : "unspecified launch failure";
}
