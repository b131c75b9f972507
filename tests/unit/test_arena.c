/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"

static void memory_is_zeroed_aligned_and_apart(void **state)
{
    (void)state;
    struct arena a;
    struct rng rng;
    rng_init(&rng, 0x5eed0001);
    arena_init(&a, 512, 0);
    for (int round = 0; round < 3; round++) {
        unsigned char *blocks[200];
        size_t sizes[200];
        for (int i = 0; i < 200; i++) {
            sizes[i] = rng_below(&rng, 900);
            blocks[i] = arena_alloc(&a, sizes[i]);
            assert_non_null(blocks[i]);
            assert_int_equal((uintptr_t)blocks[i] % 16, 0);
            for (size_t k = 0; k < sizes[i]; k++)
                assert_int_equal(blocks[i][k], 0);
            memset(blocks[i], i + 1, sizes[i]);
        }
        for (int i = 0; i < 200; i++)
            for (size_t k = 0; k < sizes[i]; k++)
                assert_int_equal(blocks[i][k], i + 1);
        assert_false(a.overflow);
        arena_reset(&a);
        assert_int_equal(a.bytes_used, 0);
    }
    arena_fini(&a);
}

static void bound_is_kept_and_marked(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a, 256, 1024);
    /* The whole bound can be used, however the chunks are cut. */
    for (int i = 0; i < 64; i++)
        assert_non_null(arena_alloc(&a, 16));
    assert_false(a.overflow);
    assert_int_equal(a.bytes_used, 1024);
    assert_null(arena_alloc(&a, 1));
    assert_true(a.overflow);
    assert_null(arena_strndup(&a, "x", 1));
    arena_reset(&a);
    assert_false(a.overflow);
    assert_non_null(arena_alloc(&a, 100));
    assert_null(arena_alloc(&a, 2000));
    assert_true(a.overflow);
    arena_fini(&a);

    arena_init(&a, 4096, 100); /* a chunk larger than the bound */
    assert_non_null(arena_alloc(&a, 90));
    assert_null(arena_alloc(&a, 16));
    arena_fini(&a);
}

static void first_chunk_is_kept_over_resets(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a, 1024, 0);
    void *first = arena_alloc(&a, 64);
    for (int i = 0; i < 100; i++)
        assert_non_null(arena_alloc(&a, 700));
    arena_reset(&a);
    assert_ptr_equal(arena_alloc(&a, 64), first);
    arena_fini(&a);
}

static void sizes_that_cannot_be_are_refused(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a, 0, 0);
    assert_null(arena_alloc(&a, SIZE_MAX));
    assert_true(a.overflow);
    arena_reset(&a);
    assert_null(arena_alloc_array(&a, SIZE_MAX / 2, 3));
    assert_true(a.overflow);
    arena_reset(&a);
    assert_null(arena_alloc_array(&a, (size_t)1 << 33, (size_t)1 << 33));
    assert_true(a.overflow);
    arena_reset(&a);
    uint64_t *numbers = arena_alloc_array(&a, 10, sizeof *numbers);
    assert_non_null(numbers);
    assert_int_equal(numbers[9], 0);
    assert_non_null(arena_alloc_array(&a, 0, 8));
    assert_false(a.overflow);
    arena_fini(&a);
}

static void copies(void **state)
{
    (void)state;
    struct arena a;
    arena_init(&a, 64, 0);
    char *text = arena_strndup(&a, "abcdef", 3);
    assert_string_equal(text, "abc");
    assert_string_equal(arena_strndup(&a, NULL, 0), "");
    const unsigned char bytes[5] = {0, 1, 2, 3, 255};
    unsigned char *copy = arena_copy(&a, bytes, sizeof bytes);
    assert_memory_equal(copy, bytes, sizeof bytes);
    assert_non_null(arena_copy(&a, NULL, 0));
    assert_string_equal(text, "abc");
    arena_fini(&a);
}

static void mem_is_zeroed_and_aligned(void **state)
{
    (void)state;
    for (size_t bytes = 0; bytes < 300; bytes += 37) {
        unsigned char *memory = mem_take(bytes);
        assert_int_equal((uintptr_t)memory % 64, 0);
        for (size_t i = 0; i < bytes; i++)
            assert_int_equal(memory[i], 0);
        mem_give(memory);
    }
    uint32_t *numbers = mem_take_array(100, sizeof *numbers);
    assert_int_equal(numbers[99], 0);
    mem_give(numbers);
    mem_give(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_zeroed_aligned_and_apart),
        cmocka_unit_test(bound_is_kept_and_marked),
        cmocka_unit_test(first_chunk_is_kept_over_resets),
        cmocka_unit_test(sizes_that_cannot_be_are_refused),
        cmocka_unit_test(copies),
        cmocka_unit_test(mem_is_zeroed_and_aligned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
