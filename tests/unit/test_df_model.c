/* SPDX-License-Identifier: Apache-2.0 */
/* The network as a source: contexts fed by a ring, with gaps, laps, garbage and many at once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "drafter/df_model.h"
#include "lib/base/rng.h"
#include "lib/model/dflash.h"
#include "proto/tap_ring.h"

#define ROW 384u /* 3 taps of 128 */

static const struct hash128 taps_go_whole;

struct rig {
    char path[64];
    void *memory;
    uint64_t bytes;
    struct tap_ring ring;
    struct df_model *model;
};

static struct df_model_options options(void)
{
    static char directory[1024], target[1024];
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    assert_non_null(root);
    snprintf(directory, sizeof directory, "%s/deploy/demo-drafter", root);
    snprintf(target, sizeof target, "%s/tests/golden/tiny-glm", root);
    return (struct df_model_options){.directory = directory,
                                     .target = target,
                                     .sequences_max = 48,
                                     .context_max = 4096,
                                     .tokens_max = 65536,
                                     .bytes_max = UINT64_C(1) << 30,
                                     .rings_max = 2,
                                     .context_min = 16,
                                     .threads = 1,
                                     .exact = true};
}

static void ring_file(struct rig *r, const struct tap_ring_geometry *g, uint64_t incarnation)
{
    snprintf(r->path, sizeof r->path, P_tmpdir "/tandem-taps-XXXXXX");
    int fd = mkstemp(r->path);
    assert_true(fd >= 0);
    r->bytes = tap_ring_bytes(g);
    assert_int_equal(ftruncate(fd, (off_t)r->bytes), 0);
    r->memory = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(r->memory != MAP_FAILED);
    close(fd);
    tap_ring_format(&r->ring, r->memory, g, incarnation);
}

static void ring_file_close(struct rig *r)
{
    munmap(r->memory, r->bytes);
    unlink(r->path);
}

static void rig_open(struct rig *r, uint32_t slots)
{
    struct df_model_options o = options();
    struct tap_ring_geometry g = {.type = TAP_F32, .tap_count = 3, .hidden = 128, .slots = slots};
    struct err_detail detail;
    ring_file(r, &g, 7);
    if (df_model_create(&o, &r->model, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    assert_int_equal(df_model_ring(r->model, 0, r->path, 7, &taps_go_whole, &detail), ERR_OK);
    assert_int_equal(df_model_rings(r->model), 1);
}

static void rig_close(struct rig *r)
{
    df_model_destroy(&r->model);
    ring_file_close(r);
}

static struct msg_id id_of(uint32_t number)
{
    struct msg_id id = {{1}};
    memcpy(id.bytes + 4, &number, sizeof number);
    return id;
}

/* The taps of sequence `number` at a position: any numbers, but always the same. */
static void put(struct rig *r, uint32_t number, uint32_t position)
{
    struct rng rng;
    float values[ROW];
    struct tap_record record = {.id = id_of(number), .position = position};
    rng_init(&rng, number * UINT64_C(1000003) + position);
    for (uint32_t i = 0; i < ROW; i++)
        values[i] = (float)(rng_unit(&rng) * 4 - 2);
    tap_ring_write(&r->ring, &record, values);
}

static void begin(struct rig *r, uint32_t sequence, uint32_t number, uint32_t length)
{
    struct msg_id id = id_of(number);
    df_model_begin(r->model, sequence, &id, 0);
    df_model_length(r->model, sequence, 0, length);
}

static struct df_model_ask ask(struct rig *r, uint32_t sequence, uint32_t position, uint32_t anchor)
{
    struct df_model_ask a = {.sequence = sequence, .position = position, .anchor = anchor};
    df_model_draft(r->model, &a, 1);
    return a;
}

static void rows_arrive_and_draft(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, 1024);
    begin(&r, 3, 9, 101);
    for (uint32_t p = 0; p < 100; p++)
        put(&r, 9, p);
    assert_int_equal(ask(&r, 3, 100, 40).count, 0); /* nothing was drained yet */
    df_model_drain(r.model, 0);
    struct df_model_ask first = ask(&r, 3, 100, 40);
    assert_int_equal(first.count, 7);
    assert_int_equal(ask(&r, 3, 99, 40).count, 0); /* the context is not at that position */
    assert_int_equal(ask(&r, 3, 101, 40).count, 0);
    assert_int_equal(ask(&r, 3, 100, 1u << 20).count, 0); /* no such token */
    for (uint32_t p = 90; p < 100; p++)                   /* the same again changes nothing */
        put(&r, 9, p);
    df_model_drain(r.model, 0);
    struct df_model_ask second = ask(&r, 3, 100, 40);
    assert_memory_equal(first.ids, second.ids, 7 * sizeof(uint32_t));
    /* Another sequence under the same number has nothing of this one. */
    begin(&r, 3, 10, 101);
    assert_int_equal(ask(&r, 3, 100, 40).count, 0);
    /* And one that begins late finds what the ring holds. */
    begin(&r, 3, 9, 101);
    df_model_refill(r.model, 3);
    struct df_model_ask third = ask(&r, 3, 100, 40);
    assert_int_equal(third.count, 7);
    assert_memory_equal(first.ids, third.ids, 7 * sizeof(uint32_t));
    rig_close(&r);
}

static void holes_wait_for_context(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, 1024);
    begin(&r, 0, 5, 61);
    for (uint32_t p = 0; p < 60; p++)
        if (p != 50)
            put(&r, 5, p);
    df_model_drain(r.model, 0);
    assert_int_equal(df_model_counters(r.model)->holes, 1);
    assert_int_equal(ask(&r, 0, 60, 8).count, 0); /* 9 rows behind the hole, 16 are needed */
    for (uint32_t p = 60; p < 67; p++)
        put(&r, 5, p);
    df_model_length(r.model, 0, 0, 68);
    df_model_drain(r.model, 0);
    struct df_model_ask a = ask(&r, 0, 67, 8);
    assert_int_equal(a.count, 7);
    /* Those drafts are those of the suffix alone. */
    begin(&r, 1, 6, 68);
    struct tap_record record;
    float values[ROW];
    for (uint64_t n = tap_ring_head(&r.ring) - 16, end = tap_ring_head(&r.ring); n < end; n++) {
        assert_true(tap_ring_read(&r.ring, n, &record, values));
        record.id = id_of(6);
        tap_ring_write(&r.ring, &record, values);
    }
    df_model_drain(r.model, 0);
    struct df_model_ask b = ask(&r, 1, 67, 8);
    assert_int_equal(b.count, 7);
    assert_memory_equal(a.ids, b.ids, 7 * sizeof(uint32_t));
    rig_close(&r);
}

static void a_long_prompt_laps_the_ring(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, 64);
    begin(&r, 0, 5, 1001);
    for (uint32_t p = 0; p < 1000; p++)
        put(&r, 5, p);
    df_model_drain(r.model, 0);
    const struct df_model_counters *c = df_model_counters(r.model);
    assert_int_equal(c->lost, 1000 - 64);
    assert_int_equal(c->records, 64);
    assert_int_equal(ask(&r, 0, 1000, 8).count, 7); /* from the 64 that are there */
    rig_close(&r);
}

static void rows_that_nobody_sees_are_not_computed(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, 2048);
    begin(&r, 0, 5, 1001);
    begin(&r, 1, 6, 1001);
    for (uint32_t p = 0; p < 1000; p++)
        put(&r, 5, p);
    df_model_drain(r.model, 0);
    assert_int_equal(df_model_counters(r.model)->records, 127); /* the window, less the anchor */
    assert_int_equal(df_model_counters(r.model)->holes, 0);
    assert_int_equal(ask(&r, 0, 1000, 8).count, 7);
    rig_close(&r);
}

/* Rows far beyond the known tokens are not kept: tokens_max bounds the memory of contexts. */
static void rows_far_ahead_are_not_kept(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, 4096);
    const struct df_model_counters *c = df_model_counters(r.model);
    begin(&r, 0, 5, 21);
    for (uint32_t p = 0; p < 21 + 1024; p++)
        put(&r, 5, p);
    df_model_drain(r.model, 0);
    assert_int_equal(c->records, 21 + 1024);
    assert_int_equal(c->lost, 0);
    for (uint32_t p = 21 + 1024; p < 21 + 1024 + 40; p++)
        put(&r, 5, p);
    df_model_drain(r.model, 0);
    assert_int_equal(c->records, 21 + 1024);
    assert_int_equal(c->lost, 40);
    /* With the tokens the rows are welcome. */
    df_model_length(r.model, 0, 0, 61);
    for (uint32_t p = 21 + 1024; p < 21 + 1024 + 40; p++)
        put(&r, 5, p);
    df_model_drain(r.model, 0);
    assert_int_equal(c->records, 21 + 1024 + 40);
    rig_close(&r);
}

static void more_proposals_than_a_batch(void **state)
{
    (void)state;
    struct rig r;
    struct df_model_ask alone[40], together[40];
    rig_open(&r, 4096);
    for (uint32_t i = 0; i < 40; i++) {
        begin(&r, i, 100 + i, 20 + i + 1);
        for (uint32_t p = 0; p < 20 + i; p++)
            put(&r, 100 + i, p);
    }
    df_model_drain(r.model, 0);
    for (uint32_t i = 0; i < 40; i++) {
        alone[i] = ask(&r, i, 20 + i, 30 + i);
        assert_int_equal(alone[i].count, 7);
        together[i] = (struct df_model_ask){.sequence = i, .position = 20 + i, .anchor = 30 + i};
    }
    df_model_draft(r.model, together, 40);
    for (uint32_t i = 0; i < 40; i++)
        assert_memory_equal(alone[i].ids, together[i].ids, 7 * sizeof(uint32_t));
    rig_close(&r);
}

static void garbage(struct rig *r, struct rng *rng, uint32_t number, uint32_t position)
{
    struct tap_record record = {.id = id_of(number), .position = position};
    float values[ROW];
    for (uint32_t k = 0; k < ROW; k++) {
        uint32_t bits = (uint32_t)rng_u64(rng); /* NaN and infinity among them */
        memcpy(&values[k], &bits, sizeof bits);
    }
    tap_ring_write(&r->ring, &record, values);
}

/* Whatever stands in the ring: nothing breaks, and other sequences do not notice. */
static void hostile_records(void **state)
{
    (void)state;
    struct rig r;
    struct rng rng;
    rig_open(&r, 256);
    rng_init(&rng, 0x5eed0091);
    begin(&r, 0, 1, 41);
    begin(&r, 1, 2, 4000);
    begin(&r, 2, 4, 1);
    uint32_t next = 0, drafted = 0;
    for (uint32_t p = 0; p < 40; p++)
        put(&r, 1, p);
    df_model_drain(r.model, 0);
    struct df_model_ask before = ask(&r, 0, 40, 8);
    assert_int_equal(before.count, 7);
    for (uint32_t run = 0; run < 400; run++) {
        for (uint32_t i = rng_below(&rng, 300); i > 0; i--) {
            uint32_t number = 2 + rng_below(&rng, 2);
            garbage(&r, &rng, number,
                    rng_below(&rng, 4) == 0 ? (uint32_t)rng_u64(&rng) : rng_below(&rng, 5000));
        }
        if (run % 3 == 0)
            ((uint8_t *)r.memory)[TAP_RING_HEADER_BYTES + rng_below(&rng, 256 * 1600)] ^= 0x40;
        /* One whose positions are right and whose values are anything: it does draft. */
        for (uint32_t i = 0; i < 8; i++)
            garbage(&r, &rng, 4, next++);
        df_model_length(r.model, 2, 0, next + 1);
        df_model_drain(r.model, 0);
        uint32_t at = rng_below(&rng, 2) ? next : rng_below(&rng, 4200);
        struct df_model_ask asked[2] = {
            ask(&r, 1, rng_below(&rng, 4200), rng_below(&rng, 1024)),
            ask(&r, 2, at, rng_below(&rng, 1024)),
        };
        drafted += asked[1].count > 0;
        assert_true(asked[1].count == 0 || at == next);
        for (uint32_t i = 0; i < 2; i++)
            for (uint32_t k = 0; k < asked[i].count; k++)
                assert_true(asked[i].ids[k] < 1012); /* always ids with a token */
        if (next > 3900) {
            begin(&r, 2, 4, 1);
            next = 0;
        }
    }
    assert_true(drafted > 100);
    struct df_model_ask after = ask(&r, 0, 40, 8);
    assert_int_equal(after.count, 7);
    assert_memory_equal(before.ids, after.ids, 7 * sizeof(uint32_t));
    rig_close(&r);
}

static void rings_are_checked(void **state)
{
    (void)state;
    struct rig r, other;
    struct err_detail detail;
    rig_open(&r, 64);
    struct tap_ring_geometry g = {.type = TAP_F32, .tap_count = 2, .hidden = 128, .slots = 8};
    ring_file(&other, &g, 9);
    assert_int_equal(df_model_ring(r.model, 1, other.path, 9, &taps_go_whole, &detail),
                     ERR_INVALID);
    assert_int_equal(df_model_ring(r.model, 1, r.path, 8, &taps_go_whole, &detail), ERR_EPOCH);
    assert_int_equal(df_model_ring(r.model, 1, "/nonexistent/ring", 8, &taps_go_whole, &detail),
                     ERR_IO);
    assert_int_equal(df_model_ring(r.model, 1, "/dev/null", 8, &taps_go_whole, &detail),
                     ERR_CORRUPT);
    assert_int_equal(truncate(other.path, 100), 0);
    assert_int_equal(df_model_ring(r.model, 1, other.path, 9, &taps_go_whole, &detail),
                     ERR_CORRUPT);
    assert_int_equal(df_model_rings(r.model), 1);
    df_model_drain(r.model, 1); /* without a ring: nothing to do */
    ring_file_close(&other);
    rig_close(&r);
}

/* A ring of context vectors: the same drafts as from taps, if the fc was this drafter's own. */
static void context_vectors_in_place_of_taps(void **state)
{
    (void)state;
    struct rig taps, vectors;
    struct err_detail detail;
    struct df_model_options o = options();
    struct dflash *reducer = NULL;
    struct dflash_options context_only = {
        .directory = o.directory, .threads = 1, .exact = true, .context_only = true};
    assert_int_equal(dflash_load(&context_only, &reducer, &detail), ERR_OK);
    struct hash128 fp = dflash_context_fp(reducer), other = fp;
    other.bytes[7] ^= 1;
    rig_open(&taps, 256);
    struct tap_ring_geometry g = {.type = TAP_F32, .tap_count = 1, .hidden = 128, .slots = 256};
    ring_file(&vectors, &g, 8);
    /* Refused by name: of another fc, told as taps, taps told as vectors. */
    assert_int_equal(df_model_ring(taps.model, 1, vectors.path, 8, &other, &detail), ERR_INVALID);
    assert_non_null(strstr(detail.text, "tap_context_fp"));
    assert_int_equal(df_model_ring(taps.model, 1, vectors.path, 8, &taps_go_whole, &detail),
                     ERR_INVALID);
    assert_non_null(strstr(detail.text, "1 taps of 128, expected 3 of 128"));
    assert_int_equal(df_model_ring(taps.model, 1, taps.path, 7, &fp, &detail), ERR_INVALID);
    assert_non_null(strstr(detail.text, "3 context vectors of 128, expected 1 of 128"));
    assert_int_equal(df_model_ring(taps.model, 1, vectors.path, 8, &fp, &detail), ERR_OK);
    struct msg_id id = id_of(9);
    df_model_begin(taps.model, 3, &id, 0);
    df_model_length(taps.model, 3, 0, 101);
    df_model_begin(taps.model, 4, &id, 1);
    df_model_length(taps.model, 4, 1, 101);
    for (uint32_t p = 0; p < 100; p++) {
        float values[ROW], vector[128];
        struct tap_record record;
        put(&taps, 9, p);
        assert_true(tap_ring_read(&taps.ring, p, &record, values));
        dflash_reduce(reducer, values, 1, vector);
        tap_ring_write(&vectors.ring, &record, vector);
        if (p % 30 == 29) { /* both rings in turn */
            df_model_drain(taps.model, 0);
            df_model_drain(taps.model, 1);
        }
    }
    df_model_drain(taps.model, 0);
    df_model_drain(taps.model, 1);
    struct df_model_ask a = ask(&taps, 3, 100, 40), b = ask(&taps, 4, 100, 40);
    assert_true(a.count == 7 && b.count == 7);
    assert_memory_equal(a.ids, b.ids, 7 * sizeof(uint32_t));
    /* And one that begins late finds them too. */
    df_model_begin(taps.model, 4, &id, 1);
    df_model_length(taps.model, 4, 1, 101);
    df_model_refill(taps.model, 4);
    b = ask(&taps, 4, 100, 40);
    assert_int_equal(b.count, 7);
    assert_memory_equal(a.ids, b.ids, 7 * sizeof(uint32_t));
    ring_file_close(&vectors);
    rig_close(&taps);
    dflash_destroy(&reducer);
}

static void the_budget_is_checked_at_start(void **state)
{
    (void)state;
    struct df_model_options o = options();
    struct df_model *m = NULL;
    struct err_detail detail;
    /* 48 sequences x 3 layers x 128 rows x K and V of 2 heads x 32 values of 4 bytes */
    uint64_t exactly = UINT64_C(48) * 3 * 128 * 2 * 2 * 32 * 4;
    o.bytes_max = exactly - 1;
    assert_int_equal(df_model_create(&o, &m, &detail), ERR_INVALID);
    assert_non_null(strstr(detail.text, "context_bytes_max"));
    o.bytes_max = exactly;
    assert_int_equal(df_model_create(&o, &m, &detail), ERR_OK);
    df_model_destroy(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_arrive_and_draft),
        cmocka_unit_test(holes_wait_for_context),
        cmocka_unit_test(a_long_prompt_laps_the_ring),
        cmocka_unit_test(rows_that_nobody_sees_are_not_computed),
        cmocka_unit_test(rows_far_ahead_are_not_kept),
        cmocka_unit_test(more_proposals_than_a_batch),
        cmocka_unit_test(hostile_records),
        cmocka_unit_test(rings_are_checked),
        cmocka_unit_test(context_vectors_in_place_of_taps),
        cmocka_unit_test(the_budget_is_checked_at_start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
