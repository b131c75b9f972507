/* SPDX-License-Identifier: Apache-2.0 */
/* The drafter's head: rows without a token, and a head that is quantised at load. */
#include "tests/model/dflash_copy.h"

static struct dflash *load_head(const char *dir, bool head_8bit)
{
    struct dflash *d = NULL;
    struct err_detail detail;
    if (load_with(dir, head_8bit, &d, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return d;
}

/* A row of the head that would win everything is drafted where it has a token, never else. */
static void rows_without_a_token(bool head_8bit)
{
    char path[1024];
    struct safetensors *set = NULL;
    struct err_detail detail;
    uint32_t plain[7], planted[7];
    struct block_seen seen;
    test_path(path, sizeof(path), RANDOM);
    struct dflash *d = load_head(path, head_8bit);
    draft_of(d, plain, &seen);
    dflash_destroy(&d);
    test_path(path, sizeof(path), "tests/golden/tiny-glm");
    assert_int_equal(safetensors_open_directory(path, &set, &detail), ERR_OK);
    const struct safetensors_tensor *head = safetensors_find(set, "lm_head.weight");
    assert_non_null(head);
    assert_int_equal(head->bytes, 1024 * HIDDEN * 2);
    for (uint32_t with_token = 0; with_token < 2; with_token++) {
        struct copy c;
        struct parts f;
        uint32_t row = with_token ? 500 : 1015;
        uint16_t *values = mem_take(head->bytes);
        memcpy(values, head->data, head->bytes);
        for (uint32_t i = 0; i < HIDDEN; i++) { /* 16 times the row of the first draft */
            uint16_t v = values[plain[0] * HIDDEN + i];
            values[row * HIDDEN + i] = (v & 0x7f80) == 0 ? v : (uint16_t)(v + (4u << 7));
        }
        copy_open(&c, NULL, NULL, NULL, NULL);
        parts_read(&f);
        parts_add(&f, "lm_head.weight", 1024, HIDDEN, values);
        parts_write(&f, &c);
        d = load_head(c.dir, head_8bit);
        draft_of(d, planted, &seen);
        if (with_token)
            assert_int_equal(planted[0], 500);
        else
            assert_memory_equal(planted, plain, sizeof(plain));
        dflash_destroy(&d);
        copy_close(&c);
        mem_give(values);
    }
    safetensors_close(&set);
}

static void rows_without_a_token_are_never_drafted(void **state)
{
    (void)state;
    rows_without_a_token(false);
    rows_without_a_token(true);
}

/* Resident bytes of mappings whose line holds `what`. */
static uint64_t resident(const char *what)
{
    char line[1024];
    uint64_t kib = 0;
    bool of_it = false;
    FILE *f = fopen("/proc/self/smaps", "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f) != NULL) {
        unsigned long long n, end;
        if (sscanf(line, "%llx-%llx ", &n, &end) == 2)
            of_it = strstr(line, what) != NULL;
        else if (of_it && sscanf(line, "Rss: %llu kB", &n) == 1)
            kib += n;
    }
    fclose(f);
    return kib * 1024;
}

struct logits_seen {
    float top[7 * 16];
    uint32_t ids[7 * 16];
};

static void on_top(void *arg, const char *name, uint32_t layer, const float *values, uint32_t rows,
                   uint32_t width)
{
    struct logits_seen *seen = arg;
    (void)layer;
    if (strcmp(name, "top_logits") == 0)
        memcpy(seen->top, values, (size_t)rows * width * sizeof(float));
    else if (strcmp(name, "top_ids") == 0)
        memcpy(seen->ids, values, (size_t)rows * width * sizeof(float));
}

static void top_of(struct dflash *d, struct logits_seen *seen)
{
    struct dflash_context c = context_new(d);
    float *taps = made_up_taps(21, 60);
    struct dflash_block block = {.context = &c, .anchor = 40};
    dflash_context_append(d, &c, taps, 60);
    dflash_probe(d, on_top, seen);
    dflash_draft(d, &block, 1);
    dflash_probe(d, NULL, NULL);
    mem_give(taps);
    mem_give(c.rows);
}

static uint16_t *head_values(const char *below)
{
    char path[1024];
    struct safetensors *set = NULL;
    struct err_detail detail;
    test_path(path, sizeof(path), below);
    assert_int_equal(safetensors_open_directory(path, &set, &detail), ERR_OK);
    const struct safetensors_tensor *head = safetensors_find(set, "lm_head.weight");
    assert_non_null(head);
    assert_int_equal(head->bytes, 1024 * HIDDEN * 2);
    uint16_t *values = mem_take(head->bytes);
    memcpy(values, head->data, head->bytes);
    safetensors_close(&set);
    return values;
}

/* The file's pages of the head are given back, and what takes their place has half their size.  Of
 * the best rows the values are read again: what is said of these is the same bit for bit. */
static void a_head_of_8_bits_takes_less_and_says_the_same(void **state)
{
    (void)state;
    struct copy c;
    struct parts f;
    struct logits_seen seen[2];
    uint64_t bytes[2];
    uint16_t *values = head_values("tests/golden/tiny-glm");
    copy_open(&c, NULL, NULL, NULL, NULL);
    parts_read(&f);
    parts_add(&f, "lm_head.weight", 1024, HIDDEN, values);
    parts_write(&f, &c);
    mem_give(values);
    for (uint32_t narrow = 0; narrow < 2; narrow++) {
        struct dflash *d = load_head(c.dir, narrow == 1);
        bytes[narrow] = resident(c.dir);
        top_of(d, &seen[narrow]);
        assert_true((strstr(dflash_formats(d), "head fp8") != NULL) == (narrow == 1));
        dflash_destroy(&d);
    }
    uint64_t head = 1024 * HIDDEN * 2, page = (uint64_t)sysconf(_SC_PAGESIZE);
    print_message("head of %llu bytes: %llu resident bytes of the file, then %llu\n",
                  (unsigned long long)head, (unsigned long long)bytes[0],
                  (unsigned long long)bytes[1]);
    assert_true(bytes[0] >= head && bytes[1] <= bytes[0] - head + 2 * page);
    assert_memory_equal(&seen[0], &seen[1], sizeof(seen[0]));
    copy_close(&c);
}

static void what_a_head_of_8_bits_refuses_or_leaves(void **state)
{
    (void)state;
    struct copy c;
    struct parts f;
    struct dflash *d = NULL;
    struct err_detail detail;
    struct logits_seen seen[2];
    uint16_t *values = head_values("tests/golden/tiny-glm");
    /* What is not finite, by name. */
    copy_open(&c, NULL, NULL, NULL, NULL);
    parts_read(&f);
    values[700 * HIDDEN + 3] = 0x7f80;
    parts_add(&f, "lm_head.weight", 1024, HIDDEN, values);
    parts_write(&f, &c);
    assert_int_not_equal(load_with(c.dir, true, &d, &detail), ERR_OK);
    assert_non_null(strstr(detail.text, "lm_head"));
    copy_close(&c);
    /* What is that narrow already stays as it is. */
    copy_open(&c, NULL, NULL, NULL, NULL);
    parts_read(&f);
    uint8_t *codes = (uint8_t *)values;
    float *scales = mem_take_array(1024, sizeof(float));
    for (uint32_t i = 0; i < 1024 * HIDDEN; i++)
        codes[i] = (uint8_t)(i * 7 % 120);
    for (uint32_t i = 0; i < 1024; i++)
        scales[i] = 0.01f;
    parts_add_as(&f, "lm_head.weight", "F8_E4M3", 1024, HIDDEN, codes, 1024 * HIDDEN);
    parts_add_as(&f, "lm_head.weight_scale", "F32", 1024, 1, scales, 1024 * sizeof(float));
    parts_write(&f, &c);
    for (uint32_t narrow = 0; narrow < 2; narrow++) {
        d = load_head(c.dir, narrow == 1);
        top_of(d, &seen[narrow]);
        assert_null(strstr(dflash_formats(d), "head fp8"));
        dflash_destroy(&d);
    }
    assert_memory_equal(&seen[0], &seen[1], sizeof(seen[0]));
    copy_close(&c);
    mem_give(values);
    mem_give(scales);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_without_a_token_are_never_drafted),
        cmocka_unit_test(a_head_of_8_bits_takes_less_and_says_the_same),
        cmocka_unit_test(what_a_head_of_8_bits_refuses_or_leaves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
