/* SPDX-License-Identifier: Apache-2.0 */
/* Every file and directory of tests/golden/formats/bad: the legal ones give their tensors, all
 * others are refused with a class that bad.json allows. */
#include "tests/unit/golden_lines.h"

#include <fcntl.h>
#include <unistd.h>

#include "lib/base/clock.h"
#include "lib/base/str.h"
#include "lib/model/safetensors.h"

#define FORMATS "tests/golden/formats/"

static struct arena arena;
static char *text;
static struct json *root;

static int setup(void **state)
{
    (void)state;
    char path[1024];
    size_t bytes = 0;
    struct json_error where = {0, ""};
    golden_path(path, sizeof(path), FORMATS "bad.json");
    text = golden_read(path, &bytes);
    arena_init(&arena, 1 << 20, 0);
    assert_int_equal(json_parse(&arena, NULL, text, bytes, &root, &where), ERR_OK);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    arena_fini(&arena);
    free(text);
    return 0;
}

static const char *copy(const struct json *value)
{
    assert_true(json_is(value, JSON_STRING));
    return arena_strndup(&arena, value->text, value->bytes);
}

/* "FILE: class: ..." */
static bool has_class(const char *detail, const char *class)
{
    char wanted[64];
    snprintf(wanted, sizeof(wanted), ": %s: ", class);
    return strstr(detail, wanted) != NULL;
}

static void check_tensor(const struct safetensors *set, const struct json *want)
{
    const struct safetensors_tensor *t = safetensors_find(set, copy(json_get(want, "name")));
    assert_non_null(t);
    assert_string_equal(safetensors_dtype_name(t->dtype), copy(json_get(want, "dtype")));
    const struct json *shape = json_get(want, "shape"), *hex = json_get(want, "hex");
    assert_int_equal(t->dims, shape->count);
    for (uint32_t d = 0; d < t->dims; d++) {
        uint64_t size = 0;
        assert_true(json_u64(json_at(shape, d), &size));
        assert_int_equal(t->shape[d], size);
    }
    uint8_t data[256];
    assert_true(t->bytes <= sizeof(data) && hex->bytes == 2 * t->bytes);
    assert_true(t->bytes == 0 || hex_decode(hex->text, hex->bytes, data));
    assert_memory_equal(t->data, data, t->bytes);
}

static void judge(const char *id, const struct json *entry, enum err e, struct safetensors *set,
                  const char *detail)
{
    const char *expect = copy(json_get(entry, "expect"));
    if (strcmp(expect, "ok") == 0) {
        if (e != ERR_OK)
            fail_msg("%s: refused: %s", id, detail);
        const struct json *tensors = json_get(entry, "tensors");
        for (const struct json *v = tensors != NULL ? tensors->child : NULL; v != NULL; v = v->next)
            check_tensor(set, v);
        if (tensors != NULL)
            assert_int_equal(safetensors_count(set), tensors->count);
        safetensors_close(&set);
        return;
    }
    if (e == ERR_OK)
        fail_msg("%s: accepted, expected %s", id, expect);
    bool good = has_class(detail, expect);
    const struct json *also = json_get(entry, "also");
    for (const struct json *v = also != NULL ? also->child : NULL; v != NULL; v = v->next)
        good = good || has_class(detail, copy(v));
    if (!good)
        fail_msg("%s: \"%s\", expected %s", id, detail, expect);
}

static void test_files(void **state)
{
    (void)state;
    uint32_t count = 0;
    for (const struct json *v = json_get(root, "files")->child; v != NULL; v = v->next, count++) {
        char below[512], path[1024];
        struct safetensors *set = NULL;
        struct err_detail detail = {{0}};
        snprintf(below, sizeof(below), FORMATS "%s", copy(json_get(v, "file")));
        golden_path(path, sizeof(path), below);
        enum err e = safetensors_open_file(path, &set, &detail);
        judge(below, v, e, set, detail.text);
    }
    assert_int_equal(count, 146);
}

static void test_directories(void **state)
{
    (void)state;
    uint32_t count = 0;
    for (const struct json *v = json_get(root, "sharded")->child; v != NULL; v = v->next, count++) {
        char below[512], path[1024];
        struct safetensors *set = NULL;
        struct err_detail detail = {{0}};
        snprintf(below, sizeof(below), FORMATS "%s", copy(json_get(v, "dir")));
        golden_path(path, sizeof(path), below);
        enum err e = safetensors_open_directory(path, &set, &detail);
        judge(below, v, e, set, detail.text);
    }
    assert_int_equal(count, 23);
}

static void write_recipe(FILE *f, const struct json *parts)
{
    for (const struct json *p = parts->child; p != NULL; p = p->next) {
        uint64_t repeat = 0;
        uint8_t bytes[512];
        const struct json *hex = json_get(p, "hex");
        assert_true(json_u64(json_get(p, "repeat"), &repeat));
        assert_true(hex->bytes <= 2 * sizeof(bytes) && hex_decode(hex->text, hex->bytes, bytes));
        for (uint64_t i = 0; i < repeat; i++)
            assert_int_equal(fwrite(bytes, 1, hex->bytes / 2, f), hex->bytes / 2);
    }
}

static void test_recipes(void **state)
{
    (void)state;
    uint32_t count = 0;
    for (const struct json *v = json_get(root, "recipes")->child; v != NULL; v = v->next, count++) {
        char path[] = "/tmp/test_safetensors_XXXXXX";
        struct safetensors *set = NULL;
        struct err_detail detail = {{0}};
        int fd = mkstemp(path);
        assert_true(fd >= 0);
        FILE *f = fdopen(fd, "wb");
        assert_non_null(f);
        write_recipe(f, json_get(v, "parts"));
        assert_int_equal(fclose(f), 0);
        uint64_t start = clock_mono_us();
        enum err e = safetensors_open_file(path, &set, &detail);
        assert_true(clock_mono_us() - start < 10000000); /* a second, on a busy machine */
        unlink(path);
        judge(copy(json_get(v, "id")), v, e, set, detail.text);
    }
    assert_int_equal(count, 7);
}

static void test_absent(void **state)
{
    (void)state;
    struct safetensors *set = NULL;
    struct err_detail detail = {{0}};
    assert_int_equal(safetensors_open_file("/nonexistent/model.safetensors", &set, &detail),
                     ERR_NOT_FOUND);
    assert_int_equal(safetensors_open_directory("/nonexistent", &set, &detail), ERR_NOT_FOUND);
    assert_non_null(strstr(detail.text, "model.safetensors"));
    assert_true(fcntl(0, F_GETFD) >= 0); /* no descriptor of others is closed */
    safetensors_close(&set);
    assert_null(set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_files), cmocka_unit_test(test_directories),
        cmocka_unit_test(test_recipes), cmocka_unit_test(test_absent)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
