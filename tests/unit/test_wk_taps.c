// SPDX-License-Identifier: Apache-2.0
/* The writer's side of the tap ring: its file and whose it is, its size, what is in it. */
#include "tests/model/harness.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/model/dflash.h"
#include "worker/wk_taps.h"

static uint64_t incarnation_new(void)
{
    uint64_t value;
    rng_system(&value, sizeof value);
    return value;
}

static struct wk_taps_options options_of(uint64_t incarnation)
{
    return (struct wk_taps_options){.incarnation = incarnation,
                                    .type = TAP_BF16,
                                    .hidden = 128,
                                    .layer_count = 3,
                                    .layers = {4, 1, 6},
                                    .bytes_max = 1u << 20};
}

static struct wk_taps *taps_new(const struct wk_taps_options *o)
{
    struct wk_taps *taps = NULL;
    struct err_detail detail;
    if (wk_taps_create(o, &taps, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return taps;
}

static uint64_t bytes_of(uint64_t incarnation) /* 0 = no such file */
{
    char path[TAP_RING_PATH_BYTES];
    struct stat st;
    wk_taps_path(incarnation, path);
    return stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

struct view {
    void *memory;
    uint64_t bytes;
    struct tap_ring ring;
};

static void view_open(struct view *v, uint64_t incarnation)
{
    char path[TAP_RING_PATH_BYTES];
    struct err_detail detail;
    wk_taps_path(incarnation, path);
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0);
    v->bytes = bytes_of(incarnation);
    v->memory = mmap(NULL, v->bytes, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(v->memory != MAP_FAILED);
    close(fd);
    if (tap_ring_open(&v->ring, v->memory, v->bytes, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
}

static void the_file_lives_as_long_as_the_object(void **state)
{
    (void)state;
    uint64_t first = incarnation_new(), second = incarnation_new();
    struct wk_taps_options o = options_of(first);
    struct wk_taps *a = taps_new(&o);
    struct view v;
    view_open(&v, first);
    assert_int_equal(v.ring.incarnation, first);
    assert_int_equal(v.ring.geometry.type, TAP_BF16);
    assert_int_equal(v.ring.geometry.tap_count, 3);
    assert_int_equal(v.ring.geometry.hidden, 128);
    /* bytes_max is kept to, and used */
    uint64_t slot = 64 + 3 * 128 * 2;
    assert_int_equal(v.ring.geometry.slots, (1u << 20) / slot);
    assert_int_equal(v.bytes, TAP_RING_HEADER_BYTES + v.ring.geometry.slots * slot);
    assert_int_equal(wk_taps_end(a), 0);
    assert_int_equal(wk_taps_end(NULL), 0);
    munmap(v.memory, v.bytes);
    /* The one that takes its place has a file of its own: both are there until one goes. */
    struct wk_taps_options next = options_of(second);
    struct wk_taps *b = taps_new(&next);
    assert_true(bytes_of(first) > 0 && bytes_of(second) > 0);
    wk_taps_destroy(&a);
    assert_null(a);
    assert_int_equal(bytes_of(first), 0);
    assert_true(bytes_of(second) > 0);
    wk_taps_destroy(&b);
    wk_taps_destroy(&b); /* NULL: nothing to do */
    assert_int_equal(bytes_of(second), 0);
}

static void refusals_leave_no_file_and_take_none(void **state)
{
    (void)state;
    uint64_t incarnation = incarnation_new();
    struct wk_taps_options o = options_of(incarnation), bad[4] = {o, o, o, o};
    struct wk_taps *taps = NULL;
    struct err_detail detail;
    bad[0].type = 9;
    bad[1].layer_count = 0;
    bad[2].hidden = 0;
    bad[3].hidden = 1u << 17;
    for (size_t i = 0; i < 4; i++) {
        detail.text[0] = 0;
        assert_int_equal(wk_taps_create(&bad[i], &taps, &detail), ERR_INVALID);
        assert_int_equal(strncmp(detail.text, "tap ring: ", 10), 0);
        assert_null(taps);
        assert_int_equal(bytes_of(incarnation), 0);
    }
    /* A live ring of that name stays what it is. */
    struct wk_taps *live = taps_new(&o);
    assert_int_equal(wk_taps_create(&o, &taps, &detail), ERR_IO);
    assert_non_null(strstr(detail.text, "tandem-taps."));
    assert_true(bytes_of(incarnation) > 0);
    wk_taps_destroy(&live);
    /* Room for the least number of records is taken in any case, and never more than the most. */
    o.bytes_max = 1;
    live = taps_new(&o);
    assert_int_equal(bytes_of(incarnation),
                     TAP_RING_HEADER_BYTES + WK_TAPS_SLOTS_MIN * (64 + 3 * 128 * 2));
    wk_taps_destroy(&live);
    o.bytes_max = UINT64_C(1) << 30;
    o.layer_count = 1;
    o.hidden = 8;
    live = taps_new(&o);
    assert_int_equal(bytes_of(incarnation), TAP_RING_HEADER_BYTES + WK_TAPS_SLOTS_MAX * 128);
    wk_taps_destroy(&live);
}

/* A worker that was killed leaves its ring; a sweep takes it and none that is in use. */
static void a_sweep_takes_what_the_dead_left(void **state)
{
    (void)state;
    uint64_t dead = incarnation_new(), other = incarnation_new(), mine = incarnation_new();
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct wk_taps_options o = options_of(dead), o2 = options_of(other);
        struct wk_taps *taps = NULL;
        bool made =
            wk_taps_create(&o, &taps, NULL) == ERR_OK && wk_taps_create(&o2, &taps, NULL) == ERR_OK;
        if (write(ready[1], made ? "y" : "n", 1) == 1)
            pause();
        _exit(1);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 'y');
    struct wk_taps_options o = options_of(mine);
    struct wk_taps *taps = taps_new(&o);
    wk_taps_sweep();
    assert_true(bytes_of(dead) > 0 && bytes_of(other) > 0 && bytes_of(mine) > 0);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_true(bytes_of(dead) > 0); /* it could not remove it */
    assert_true(wk_taps_sweep() >= 2);
    assert_true(bytes_of(dead) == 0 && bytes_of(other) == 0 && bytes_of(mine) > 0);
    wk_taps_destroy(&taps);
    close(ready[0]);
    close(ready[1]);
}

/* Another thing of a similar name is nobody's ring. */
static void a_sweep_knows_its_names(void **state)
{
    (void)state;
    char path[TAP_RING_PATH_BYTES];
    wk_taps_path(incarnation_new(), path);
    strcat(path, ".backup");
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    assert_true(fd >= 0);
    close(fd);
    wk_taps_sweep();
    assert_int_equal(unlink(path), 0); /* still there */
}

/* The demo drafter's fc, and the layers that it reads. */
static struct dflash *reducer_new(void)
{
    char path[1024];
    struct dflash *d = NULL;
    struct err_detail detail;
    test_path(path, sizeof path, "deploy/demo-drafter");
    struct dflash_options options = {
        .directory = path, .threads = 1, .exact = true, .context_only = true};
    if (dflash_load(&options, &d, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return d;
}

/* With a reducer one vector a row takes the place of all layers. */
static void check_rows(const struct view *v, const struct model_cursor *c, struct dflash *reducer,
                       uint32_t hidden, uint32_t first, uint32_t count, const struct msg_id *id)
{
    float *taps = mem_take_array(3 * hidden, sizeof(float)), *last = NULL;
    float *values = mem_take_array(3 * hidden, sizeof(float));
    float *vector = mem_take_array(hidden, sizeof(float));
    for (uint32_t r = 0; r < count; r++) {
        struct tap_record record;
        assert_true(tap_ring_read(&v->ring, r, &record, values));
        assert_memory_equal(&record.id, id, sizeof *id);
        assert_int_equal(record.position, 1000 + r);
        assert_int_equal(record.step, 99);
        for (uint32_t i = 0; i < 3; i++)
            memcpy(taps + i * hidden, model_cursor_watched(c, i) + (first + r) * hidden,
                   hidden * sizeof(float));
        last = taps;
        if (reducer != NULL) {
            dflash_reduce(reducer, taps, 1, vector);
            last = vector;
        }
        assert_memory_equal(values, last, (reducer != NULL ? 1 : 3) * hidden * sizeof(float));
    }
    /* The layers differ, or their order would not show. */
    assert_memory_not_equal(taps, taps + hidden, hidden * sizeof(float));
    mem_give(taps);
    mem_give(values);
    mem_give(vector);
}

/* What the model's own probe says of the layers: compared with the vectors elsewhere. */
struct means {
    uint32_t hidden, rows;
    float *layers; /* [8][rows, hidden] */
};

static void on_layer(void *arg, uint32_t layer, const float *mean, const int32_t *experts,
                     const uint8_t *attended, size_t attended_stride)
{
    struct means *m = arg;
    uint64_t floats = (uint64_t)m->rows * m->hidden;
    (void)experts, (void)attended, (void)attended_stride;
    assert_true(layer < 8);
    memcpy(m->layers + layer * floats, mean, floats * sizeof(float));
}

/* Rows of a batch by request and position, layers in the order that was asked for. */
static void rows_of_a_batch(struct dflash *reducer)
{
    enum { ROWS = 90, FIRST = 5, COUNT = 80 }; /* more than are reduced at once */
    struct model *m = test_model("tests/golden/tiny-glm", 1);
    const uint32_t hidden = model_info(m)->hidden;
    struct model_cursor *c = test_cursor(m, ROWS, 1, 128);
    struct test_cache cache;
    struct rng rng;
    rng_init(&rng, 0x5eed0053);
    cache_init(&cache, m, 16, 8, 2, &rng);
    uint64_t incarnation = incarnation_new();
    struct wk_taps_options o = options_of(incarnation);
    o.type = TAP_F32;
    o.hidden = hidden;
    o.reducer = reducer;
    if (reducer != NULL)
        memcpy(o.layers, dflash_config(reducer)->taps, 3 * sizeof *o.layers);
    struct wk_taps *taps = taps_new(&o);
    wk_taps_watch(taps, c);
    uint32_t ids[ROWS];
    for (uint32_t i = 0; i < ROWS; i++)
        ids[i] = 1 + rng_below(&rng, 200);
    struct model_seq seq = {.state_slot = 1,
                            .row_count = ROWS,
                            .fresh = true,
                            .logits_from = ROWS,
                            .blocks = cache_take(&cache, 6),
                            .block_count = 6};
    struct model_batch batch = {.seq_count = 1, .row_count = ROWS, .seqs = &seq, .ids = ids};
    struct means means = {.hidden = hidden, .rows = ROWS};
    means.layers = mem_take_array(UINT64_C(8) * ROWS * hidden, sizeof(float));
    struct model_probe probe = {.layer = on_layer, .arg = &means};
    model_cursor_probe(c, &probe);
    model_begin(c, &cache.kv, &batch);
    model_finish(c);
    for (uint32_t i = 0; i < 3; i++) /* after the layer, mean over the streams */
        assert_memory_equal(model_cursor_watched(c, i),
                            means.layers + (uint64_t)o.layers[i] * ROWS * hidden,
                            ROWS * hidden * sizeof(float));
    mem_give(means.layers);
    struct msg_id id = {{7, 7, 7}};
    wk_taps_write(taps, c, &id, 99, FIRST, COUNT, 1000);
    assert_int_equal(wk_taps_end(taps), COUNT);
    struct view v;
    view_open(&v, incarnation);
    assert_int_equal(v.ring.geometry.tap_count, reducer != NULL ? 1 : 3);
    uint64_t slot = 64 + (reducer != NULL ? 1 : 3) * hidden * sizeof(float);
    assert_int_equal(v.ring.geometry.slots, (1u << 20) / slot);
    check_rows(&v, c, reducer, hidden, FIRST, COUNT, &id);
    munmap(v.memory, v.bytes);
    wk_taps_destroy(&taps);
    cache_fini(&cache);
    model_cursor_destroy(&c);
    model_destroy(&m);
}

static void rows_of_a_batch_are_written(void **state)
{
    (void)state;
    rows_of_a_batch(NULL);
    struct dflash *reducer = reducer_new();
    rows_of_a_batch(reducer);
    dflash_destroy(&reducer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_file_lives_as_long_as_the_object),
        cmocka_unit_test(refusals_leave_no_file_and_take_none),
        cmocka_unit_test(a_sweep_takes_what_the_dead_left),
        cmocka_unit_test(a_sweep_knows_its_names),
        cmocka_unit_test(rows_of_a_batch_are_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
