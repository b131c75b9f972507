/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's logic against a table of our own: what is called in which order, and what every kind of
 * trouble ends in; and host memory through it, over a library of our own that moves bytes.  Two
 * threads are the ranks; device memory is memory. */
#include "tests/unit/fabric_world.h"

#include <stdatomic.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "worker/wk_nccl_host.h"
#include "worker/wk_ranks.h"

/* jemalloc's, where the program is linked with it. */
int mallctl(const char *name, void *old, size_t *old_bytes, void *new, size_t new_bytes)
    __attribute__((weak));

/* Where nothing hangs: 700 polls, each of which yields, take seconds on a machine that is busy. */
#define DEADLINE_MS 60000u

struct fake {
    int version, init_polls, stream_polls; /* polls until done; -1 = never */
    int init_result, gather_result, async_error, stream_error;
    int version_result, send_result, receive_result, end_result;
    bool exchange_hangs;
    int polls, inits, aborts, gathers, groups, sends, receives;
    int ctas_max, blocking, device, device_result;
    struct wk_nccl_id id;
};

/* One a rank; the table's functions find theirs by the thread. */
static _Thread_local struct fake *self;

static int fake_version(int *ret)
{
    *ret = self->version;
    return self->version_result;
}

static int fake_id(struct wk_nccl_id *ret)
{
    memset(ret->bytes, 0x5a, sizeof ret->bytes);
    return 0;
}

static int fake_init(void **ret_comm, int ranks, struct wk_nccl_id id, int rank,
                     struct wk_nccl_config *config)
{
    MUST(ranks == 2 && (rank == 0 || rank == 1));
    self->id = id;
    self->inits++;
    self->ctas_max = config->ctas_max;
    self->blocking = config->blocking;
    *ret_comm = self;
    self->polls = self->init_polls;
    return self->init_result;
}

static int fake_error(void *comm, int *ret)
{
    MUST(comm == self && self->aborts == 0);
    *ret = self->polls == 0 ? self->async_error : WK_NCCL_IN_PROGRESS;
    self->polls -= self->polls > 0;
    return 0;
}

static int fake_abort(void *comm)
{
    MUST(comm == self);
    return self->aborts++, 0;
}

static int fake_gather(const void *own, void *all, size_t count, int type, void *comm, void *stream)
{
    MUST(comm == self && stream == (void *)self && type == 0);
    memcpy(all, own, count);
    self->gathers++;
    return self->gather_result;
}

static int fake_send(const void *own, size_t count, int type, int peer, void *comm, void *stream)
{
    MUST(comm == self && count == 8 && type == 0 && peer < 2 && stream == (void *)self);
    MUST(((const char *)own)[0] == (char)('a' + peer));
    return self->sends++, self->send_result;
}

static int fake_receive(void *theirs, size_t count, int type, int peer, void *comm, void *stream)
{
    MUST(comm == self && count == 8 && type == 0 && peer < 2 && stream == (void *)self);
    ((char *)theirs)[0] = (char)('A' + peer);
    return self->receives++, self->receive_result;
}

static int fake_group(void)
{
    return self->groups++, 0;
}

static int fake_group_end(void)
{
    return self->groups++, self->end_result;
}

static const char *fake_text(int error)
{
    return error == 2 ? "unhandled system error" : "some error";
}

static int fake_query(void *stream)
{
    MUST(stream == (void *)self);
    if (self->stream_error != 0)
        return self->stream_error;
    if (self->exchange_hangs && self->sends > 0)
        return WK_CUDA_NOT_READY;
    if (self->stream_polls == 0)
        return 0;
    self->stream_polls -= self->stream_polls > 0;
    return WK_CUDA_NOT_READY;
}

static const char *fake_cuda_text(int error)
{
    return error == 719 ? "unspecified launch failure" : "some CUDA error";
}

static int fake_device(int device)
{
    self->device = device;
    return self->device_result;
}

static const struct wk_nccl_table table = {
    .get_version = fake_version,
    .get_unique_id = fake_id,
    .comm_init = fake_init,
    .comm_error = fake_error,
    .comm_abort = fake_abort,
    .all_gather = fake_gather,
    .send = fake_send,
    .receive = fake_receive,
    .group_start = fake_group,
    .group_end = fake_group_end,
    .error_text = fake_text,
    .stream_query = fake_query,
    .cuda_text = fake_cuda_text,
    .device_set = fake_device,
};

struct play {
    struct fake fakes[2];
    enum err created[2], gathered[2], exchanged[2], again[2], left[2];
    struct err_detail detail[2];
    uint64_t us[2];
    bool hangs;          /* something never ends: a short deadline */
    uint32_t gone;       /* rank 1 leaves the process instead of gathering */
    atomic_bool decided; /* rank 0 has a communicator, or has none */
};

static enum err gather(struct wk_nccl *n, const char *own, char *all)
{
    TRY(wk_nccl_all_gather(n, own, 8, all, self));
    return wk_nccl_wait(n, self, "all_gather");
}

static void body(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct play *p = w->arg;
    struct wk_nccl *n = NULL;
    char own[16] = "a.......b......", all[16];
    self = &p->fakes[rank];
    must_join(f, 10000);
    struct wk_nccl_options o = {.table = &table,
                                .fabric = f,
                                .deadline_ms = p->hangs ? 300 : DEADLINE_MS,
                                .ctas_max = 8,
                                .device = rank};
    uint64_t begun = clock_mono_us();
    p->created[rank] = wk_nccl_create(&o, &n, &p->detail[rank]);
    if (rank == 0)
        atomic_store(&p->decided, true);
    if (p->created[rank] == ERR_OK && !(p->gone && rank == 1)) {
        p->gathered[rank] = gather(n, own, all);
        p->again[rank] = gather(n, own, all);
        p->exchanged[rank] = wk_nccl_all_to_all(n, own, 8, all, self);
        if (p->exchanged[rank] == ERR_OK)
            p->exchanged[rank] = wk_nccl_wait(n, self, "all_to_all");
        if (p->exchanged[rank] == ERR_OK)
            MUST(all[0] == 'A' && all[8] == 'B');
        else /* nothing is called after the abort */
            MUST(wk_nccl_all_to_all(n, own, 8, all, self) == p->exchanged[rank]);
        wk_nccl_fault(n, &p->detail[rank]);
        p->left[rank] = p->exchanged[rank] == ERR_OK ? wk_barrier(f) : wk_fabric_fault(f, NULL);
    }
    while (p->gone && !atomic_load(&p->decided))
        usleep(1000);
    p->us[rank] = clock_mono_us() - begun;
    wk_nccl_destroy(&n);
}

static struct play play_run(const struct fake *rank0, const struct fake *rank1, uint32_t gone)
{
    struct world w;
    struct play p = {.fakes = {*rank0, *rank1}, .gone = gone};
    p.hangs = rank0->init_polls < 0 || (rank0->stream_polls < 0 && !gone);
    world_init(&w, 2, 1024);
    w.silence_ms =
        20000; /* a rank that goes says so; one that the machine forgets for a while lives */
    world_run(&w, body, &p);
    world_fini(&w);
    return p;
}

static const struct fake sound = {.version = 23000, .init_polls = 5, .stream_polls = 700};

static void test_sound(void **state)
{
    (void)state;
    struct play p = play_run(&sound, &sound, 0);
    for (int r = 0; r < 2; r++) {
        const struct fake *k = &p.fakes[r];
        if (p.created[r] + p.gathered[r] + p.again[r] + p.exchanged[r] + p.left[r] != ERR_OK)
            fail_msg("rank %d: %s", r, p.detail[r].text);
        assert_int_equal(k->inits, 1);
        assert_int_equal(k->gathers, 2);
        assert_int_equal(k->sends + k->receives, 4);
        assert_int_equal(k->groups, 2);
        assert_int_equal(k->aborts, 1); /* at the end: destroying might wait for the other */
        assert_int_equal(k->device, r);
        assert_int_equal(k->ctas_max, 8);
        assert_int_equal(k->blocking, 0);
        assert_int_equal(k->id.bytes[77], 0x5a); /* rank 0's id reached both */
    }
}

/* Both ranks end, in bounded time, with an abort and not a destroy. */
static void expect_failed(const struct play *p, int first, enum err code, const char *words)
{
    for (int r = 0; r < 2; r++) {
        assert_true(p->us[r] < DEADLINE_MS * 900);
        assert_int_equal(p->fakes[r].aborts, 1);
    }
    assert_non_null(strstr(p->detail[first].text, words));
    assert_true(p->created[first] == code || p->gathered[first] == code);
    assert_int_equal(p->gathered[first], p->again[first]);
}

static void test_init_hangs(void **state)
{
    (void)state;
    struct fake slow = sound;
    slow.init_polls = -1;
    struct play p = play_run(&slow, &slow, 0);
    expect_failed(&p, p.created[0] == ERR_TIMEOUT ? 0 : 1, ERR_TIMEOUT, "deadline passed");
}

static void test_init_fails(void **state)
{
    (void)state;
    struct fake bad = sound;
    bad.init_result = 2;
    struct play p = play_run(&sound, &bad, 0);
    assert_int_equal(p.created[1], ERR_IO);
    assert_non_null(strstr(p.detail[1].text, "communicator: unhandled system error"));
    assert_int_not_equal(p.created[0], ERR_OK); /* all or none */
    assert_int_equal(p.fakes[0].aborts, 1);
}

static void test_no_device(void **state)
{
    (void)state;
    struct fake bad = sound;
    bad.device_result = 719;
    struct play p = play_run(&sound, &bad, 0);
    assert_int_equal(p.created[1], ERR_IO);
    assert_non_null(strstr(p.detail[1].text, "device: unspecified launch failure"));
    assert_int_not_equal(p.created[0], ERR_OK);
}

/* What the library says of itself, against the least that is used and what the build knew. */
static void test_versions(void **state)
{
    (void)state;
    static const struct {
        int found, built;
        const char *refusal; /* NULL = taken */
    } rows[] = {
        {22304, 22304, NULL},
        {22807, 22304, NULL},
        {22304, 22807, NULL}, /* no more of it is used than that one has */
        {30001, 0, NULL},
        {22303, 22807, "is NCCL 2.23.3, too old: 2.23.4 or later is needed"},
        {2804, 22807, "is NCCL 2.8.4, too old: 2.23.4 or later is needed"},
        {0, 0, "is NCCL 0.0.0, too old"},
        {30001, 22807, "is NCCL 3.0.1, this worker was compiled for 2.28.7"},
    };
    struct fake k = sound;
    self = &k;
    for (size_t i = 0; i < ARRAY_COUNT(rows); i++) {
        struct err_detail detail = {{0}};
        int version = -1;
        k.version = rows[i].found;
        enum err e = wk_nccl_version(&table, rows[i].built, &version, &detail);
        assert_int_equal(e, rows[i].refusal == NULL ? ERR_OK : ERR_UNSUPPORTED);
        assert_int_equal(version, rows[i].refusal == NULL ? rows[i].found : -1);
        if (rows[i].refusal != NULL && strstr(detail.text, rows[i].refusal) == NULL)
            fail_msg("%s", detail.text);
    }
    struct err_detail detail = {{0}};
    int version;
    k.version_result = 2;
    assert_int_equal(wk_nccl_version(&table, 0, &version, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "tells no version: unhandled system error"));
}

static void test_collective_hangs(void **state)
{
    (void)state;
    struct fake stuck = sound;
    stuck.stream_polls = -1;
    struct play p = play_run(&stuck, &stuck, 0);
    expect_failed(&p, p.gathered[0] == ERR_TIMEOUT ? 0 : 1, ERR_TIMEOUT, "all_gather");
}

static void test_async_error(void **state)
{
    (void)state;
    struct fake bad = sound, stuck = sound;
    bad.gather_result = 2;
    stuck.stream_polls = -1;
    struct play p = play_run(&stuck, &bad, 0);
    expect_failed(&p, 1, ERR_IO, "all_gather: unhandled system error");
    bad = sound;
    bad.stream_error = 719;
    p = play_run(&stuck, &bad, 0);
    expect_failed(&p, 1, ERR_IO, "all_gather: unspecified launch failure");
}

/* Sending, receiving and the end of their group may each fail: the group is ended all the same,
 * then the communicator, and the rank that waits in its stream is not left there. */
static void test_exchange_fails(void **state)
{
    (void)state;
    struct fake stuck = sound, bad[3] = {sound, sound, sound};
    stuck.exchange_hangs = true;
    bad[0].send_result = bad[1].receive_result = bad[2].end_result = 2;
    for (int i = 0; i < 3; i++) {
        struct play p = play_run(&stuck, &bad[i], 0);
        const struct fake *k = &p.fakes[1];
        assert_int_equal(p.gathered[0] + p.gathered[1], ERR_OK);
        assert_int_equal(p.exchanged[1], ERR_IO);
        assert_non_null(strstr(p.detail[1].text, "nccl all_to_all: unhandled system error"));
        assert_int_equal(k->groups, 2);
        assert_int_equal(k->sends, i < 2 ? 1 : 2);
        assert_int_equal(k->receives, i);
        assert_int_not_equal(p.exchanged[0], ERR_OK);
        assert_int_not_equal(p.exchanged[0], ERR_TIMEOUT);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(p.fakes[r].aborts, 1);
            assert_int_not_equal(p.left[r], ERR_OK);
            assert_true(p.us[r] < DEADLINE_MS * 900);
        }
    }
}

/* A rank that has gone is noticed by its silence on the fabric, before any deadline. */
static void test_peer_gone(void **state)
{
    (void)state;
    struct fake stuck = sound;
    stuck.stream_polls = -1;
    struct play p = play_run(&stuck, &sound, 1);
    if (p.gathered[0] != ERR_CLOSED && p.gathered[0] != ERR_EPOCH)
        fail_msg("created %d, gathered %d: %s", p.created[0], p.gathered[0], p.detail[0].text);
    assert_int_equal(p.fakes[0].aborts, 1);
    assert_true(p.us[0] < DEADLINE_MS * 900);
}

/* ---- host memory, over a library that moves bytes ---- */

#define HOST_MAX (3 * WK_NCCL_PIECE_BYTES + 12)

static struct wk_nccl_table moving;

static void fill(uint8_t *bytes, size_t count, uint32_t seed)
{
    for (size_t i = 0; i < count; i++)
        bytes[i] = (uint8_t)(((i * 2654435761u + seed * 40503u) >> 7) + (i >> 18) * 7);
}

/* The same bits as the fabric's own, for sizes around a piece, and in place. */
static void compare_one(struct wk_fabric *f, struct wk_nccl_host *h, size_t bytes, uint8_t *m[4])
{
    uint32_t rank = wk_fabric_rank(f);
    float *a = (float *)(void *)m[2], *b = (float *)(void *)m[3];
    fill(m[0], 2 * bytes, rank + 1);
    MUST(wk_all_gather(f, m[0], bytes, m[1]) == ERR_OK);
    MUST(wk_nccl_host_gather(h, m[0], bytes, m[2]) == ERR_OK);
    MUST(memcmp(m[1], m[2], 2 * bytes) == 0);
    memmove(m[3] + rank * bytes, m[0], bytes);
    MUST(wk_nccl_host_gather(h, m[3] + rank * bytes, bytes, m[3]) == ERR_OK);
    MUST(memcmp(m[1], m[3], 2 * bytes) == 0);
    MUST(wk_all_to_all(f, m[0], bytes, m[1]) == ERR_OK);
    MUST(wk_nccl_host_to_all(h, m[0], bytes, m[2]) == ERR_OK);
    MUST(memcmp(m[1], m[2], 2 * bytes) == 0);
    size_t count = bytes / sizeof *a;
    for (size_t i = 0; i < count; i++)
        a[i] = b[i] = (float)m[0][i] / 7 + (float)rank * 1e-3f;
    MUST(wk_all_reduce(f, a, count) == ERR_OK);
    MUST(wk_nccl_host_reduce(h, b, count) == ERR_OK);
    MUST(memcmp(a, b, count * sizeof *a) == 0);
}

static void body_host(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    static const size_t sizes[] = {
        0,       4, 4096, WK_NCCL_PIECE_BYTES - 4, WK_NCCL_PIECE_BYTES, WK_NCCL_PIECE_BYTES + 4,
        HOST_MAX};
    struct wk_nccl_options o = {.table = &moving, .fabric = f, .deadline_ms = 20000};
    struct err_detail detail = {{0}};
    uint8_t *m[4];
    (void)w;
    must_join(f, 10000);
    for (int i = 0; i < 4; i++)
        MUST((m[i] = malloc(2 * HOST_MAX)) != NULL);
    for (int forming = 0; forming < 2; forming++) { /* a new communicator after the first */
        struct wk_nccl_host *h = NULL;
        if (wk_nccl_host_create(&o, &h, &detail) != ERR_OK)
            fprintf(stderr, "rank %u: %s\n", rank, detail.text);
        MUST(h != NULL);
        uint64_t before = 0, after = 0;
        size_t size = sizeof before;
        compare_one(f, h, 4, m); /* the loader takes memory for a library's own of a thread */
        if (mallctl != NULL)
            MUST(mallctl("thread.allocated", &before, &size, NULL, 0) == 0);
        for (size_t i = 0; i < ARRAY_COUNT(sizes); i++)
            compare_one(f, h, sizes[i], m);
        if (mallctl != NULL)
            MUST(mallctl("thread.allocated", &after, &size, NULL, 0) == 0);
        MUST(after == before); /* a call takes no memory */
        MUST(wk_barrier(f) == ERR_OK);
        wk_nccl_host_destroy(&h);
    }
    for (int i = 0; i < 4; i++)
        free(m[i]);
}

static void fake_load(void)
{
    char path[1024];
    struct err_detail detail = {{0}};
    struct wk_nccl_settings s = {.hca = "", .interface = ""};
    snprintf(path, sizeof path, "%s/tests/unit/libfake_nccl.so", getenv("TANDEM_BUILD_ROOT"));
    if (wk_nccl_load(path, path, &s, &moving, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
}

static void test_host(void **state)
{
    (void)state;
    struct world w;
    fake_load();
    assert_int_equal(wk_nccl_device(&moving, 1, NULL), ERR_OK);
    world_init(&w, 2, 16384);
    w.deadline_ms = 20000;
    world_run(&w, body_host, NULL);
    world_fini(&w);
}

/* What goes wrong with one exchange takes the group with it, on both ranks, in bounded time. */
static void body_trouble(struct world *w, struct wk_fabric *f, uint32_t rank)
{
    struct wk_nccl_options o = {.table = &moving, .fabric = f, .deadline_ms = 2000};
    struct err_detail *why = w->arg;
    struct wk_nccl_host *h = NULL;
    float values[8] = {0};
    must_join(f, 10000);
    enum err e = wk_nccl_host_create(&o, &h, &why[rank]);
    if (e == ERR_OK) {
        /* Ranks that differ in their sizes: the stream says so. */
        e = wk_nccl_host_reduce(h, values, rank == 0 ? 8 : 4);
        MUST(e != ERR_OK && wk_nccl_host_reduce(h, values, 8) == e);
        MUST(wk_nccl_host_to_all(h, values, 4, values + 4) == e);
    }
    MUST(e != ERR_OK && wk_fabric_fault(f, &why[rank]) != ERR_OK);
    wk_nccl_host_destroy(&h);
}

static void test_host_trouble(void **state)
{
    (void)state;
    static const char *const kinds[] = {"", "init", "gather", "stream"};
    for (size_t i = 0; i < ARRAY_COUNT(kinds); i++) {
        struct world w;
        struct err_detail why[2] = {{{0}}};
        setenv("FAKE_NCCL_FAIL", kinds[i], 1);
        fake_load();
        world_init(&w, 2, 16384);
        uint64_t begun = clock_mono_us();
        world_run(&w, body_trouble, why);
        world_fini(&w);
        assert_true(clock_mono_us() - begun < 10000000);
        assert_non_null(strstr(why[0].text, "nccl "));
    }
    unsetenv("FAKE_NCCL_FAIL");
}

/* ---- ranks that would exchange over different things ---- */

struct half {
    const char *path, *fake;
    uint32_t rank;
    bool nccl;
    enum err formed;
    struct err_detail detail;
};

static void *half_main(void *arg)
{
    static const atomic_bool stop = false;
    static const struct hash128 same;
    struct half *h = arg;
    struct wk_ranks *r = NULL;
    struct wk_ranks_options o = {.rank = h->rank,
                                 .ranks = 2,
                                 .path = h->path,
                                 .nodes = "",
                                 .deadline_ms = 20000,
                                 .silence_ms = 10000,
                                 .nccl = h->nccl,
                                 .nccl_settings = {.hca = "", .interface = ""},
                                 .nccl_library = h->fake,
                                 .cuda_library = h->fake};
    MUST(wk_ranks_create(&o, &r, &h->detail) == ERR_OK);
    h->formed = wk_ranks_form(r, &same, &stop, &h->detail);
    if (h->formed == ERR_OK)
        MUST(wk_barrier(wk_ranks_fabric(r)) == ERR_OK);
    usleep(300000); /* until the other has seen why */
    wk_ranks_destroy(&r);
    return NULL;
}

static void test_halves(void **state)
{
    struct world w;
    char fake[1024];
    (void)state;
    if (!wk_nccl_built())
        skip();
    snprintf(fake, sizeof fake, "%s/tests/unit/libfake_nccl.so", getenv("TANDEM_BUILD_ROOT"));
    for (int both = 0; both < 2; both++) {
        pthread_t threads[2];
        struct half halves[2] = {{.rank = 0, .nccl = both}, {.rank = 1, .nccl = true}};
        world_init(&w, 2, 1024);
        for (int i = 0; i < 2; i++) {
            halves[i].path = w.path;
            halves[i].fake = fake;
            assert_int_equal(pthread_create(&threads[i], NULL, half_main, &halves[i]), 0);
        }
        for (int i = 0; i < 2; i++)
            pthread_join(threads[i], NULL);
        for (int i = 0; i < 2; i++)
            assert_int_equal(halves[i].formed, both ? ERR_OK : ERR_INVALID);
        world_fini(&w);
    }
}

static void test_no_gpu(void **state)
{
    (void)state;
    struct err_detail detail;
    fake_load();
    assert_int_equal(wk_nccl_device(&moving, 2, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "cuda_device is 2, 2 are here"));
    setenv("FAKE_NCCL_FAIL", "device", 1);
    assert_int_equal(wk_nccl_device(&moving, 0, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "no CUDA-capable device is detected"));
    unsetenv("FAKE_NCCL_FAIL");
}

static void test_load(void **state)
{
    (void)state;
    struct wk_nccl_table t;
    struct err_detail detail;
    struct wk_nccl_settings s = {.buffer_bytes = 1048576, .hca = "rocep1s0f0", .interface = ""};
    assert_int_equal(wk_nccl_load("libno-such-nccl.so", NULL, &s, &t, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "libno-such-nccl.so"));
    assert_int_equal(wk_nccl_load("libm.so.6", NULL, &s, &t, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "libm.so.6: has no ncclGetVersion"));
    assert_string_equal(getenv("NCCL_BUFFSIZE"), "1048576");
    assert_string_equal(getenv("NCCL_IB_HCA"), "rocep1s0f0");
    assert_null(getenv("NCCL_SOCKET_IFNAME"));
    char fake[1024];
    snprintf(fake, sizeof fake, "%s/tests/unit/libfake_nccl.so", getenv("TANDEM_BUILD_ROOT"));
    setenv("FAKE_NCCL_VERSION", "21805", 1);
    assert_int_equal(wk_nccl_load(fake, fake, &s, &t, &detail), ERR_UNSUPPORTED);
    assert_non_null(strstr(detail.text, "is NCCL 2.18.5, too old"));
    setenv("FAKE_NCCL_VERSION", "30100", 1);
    assert_int_equal(wk_nccl_load(fake, fake, &s, &t, &detail),
                     wk_nccl_built() > 0 ? ERR_UNSUPPORTED : ERR_OK);
    if (wk_nccl_built() > 0)
        assert_non_null(strstr(detail.text, "is NCCL 3.1.0, this worker was compiled for 2."));
    unsetenv("FAKE_NCCL_VERSION");
    assert_int_equal(wk_nccl_load(fake, fake, &s, &t, &detail), ERR_OK);
    assert_int_equal(t.version, 22809);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sound),       cmocka_unit_test(test_init_hangs),
        cmocka_unit_test(test_init_fails),  cmocka_unit_test(test_no_device),
        cmocka_unit_test(test_versions),    cmocka_unit_test(test_collective_hangs),
        cmocka_unit_test(test_async_error), cmocka_unit_test(test_peer_gone),
        cmocka_unit_test(test_host),        cmocka_unit_test(test_host_trouble),
        cmocka_unit_test(test_halves),      cmocka_unit_test(test_no_gpu),
        cmocka_unit_test(test_load),        cmocka_unit_test(test_exchange_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
