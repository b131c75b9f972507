/* SPDX-License-Identifier: Apache-2.0 */
/* tests/model/dflash_copy.h - altered copies of the random drafter, and contexts from numbers.
 *
 * For tests only; one thread. */
#ifndef TESTS_MODEL_DFLASH_COPY_H
#define TESTS_MODEL_DFLASH_COPY_H

#include "tests/model/harness.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/model/dflash.h"

#define RANDOM "tests/golden/dflash2/random"
#define HIDDEN 128u
#define TAPS   3u

/* ---- a folder with an altered copy of the random drafter ---- */

struct copy {
    char dir[64];
};

static inline void read_all(const char *below, const char *name, char **ret, size_t *ret_bytes)
{
    char path[1200], root[1024];
    test_path(root, sizeof(root), below);
    snprintf(path, sizeof(path), "%s/%s", root, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    long bytes = ftell(f);
    rewind(f);
    *ret = mem_take((size_t)bytes + 1);
    assert_int_equal(fread(*ret, 1, (size_t)bytes, f), (size_t)bytes);
    *ret_bytes = (size_t)bytes;
    fclose(f);
}

static inline void put_file(const struct copy *c, const char *name, const void *data, size_t bytes)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", c->dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

/* Replaces every `from` by `to`; same length in tensor files, whose offsets must hold. */
static inline void replace(char **text, size_t *bytes, const char *from, const char *to)
{
    size_t n = strlen(from), m = strlen(to), count = 0;
    char *out = mem_take(*bytes * (m > n ? m / n + 1 : 1) + 16);
    size_t at = 0;
    for (size_t i = 0; i < *bytes;) {
        if (i + n <= *bytes && memcmp(*text + i, from, n) == 0) {
            memcpy(out + at, to, m);
            at += m;
            i += n;
            count++;
        } else {
            out[at++] = (*text)[i++];
        }
    }
    if (count == 0)
        fail_msg("\"%s\" does not occur", from);
    mem_give(*text);
    *text = out;
    *bytes = at;
}

static inline void copy_open(struct copy *c, const char *config_from, const char *config_to,
                             const char *tensor_from, const char *tensor_to)
{
    char *text;
    size_t bytes;
    snprintf(c->dir, sizeof(c->dir), P_tmpdir "/tandem-dflash-XXXXXX");
    assert_non_null(mkdtemp(c->dir));
    read_all(RANDOM, "config.json", &text, &bytes);
    if (config_from != NULL)
        replace(&text, &bytes, config_from, config_to);
    put_file(c, "config.json", text, bytes);
    mem_give(text);
    read_all(RANDOM, "model.safetensors", &text, &bytes);
    if (tensor_from != NULL) {
        assert_int_equal(strlen(tensor_from), strlen(tensor_to));
        replace(&text, &bytes, tensor_from, tensor_to);
    }
    put_file(c, "model.safetensors", text, bytes);
    mem_give(text);
}

static inline void copy_close(struct copy *c)
{
    static const char *const names[] = {"config.json", "model.safetensors", "mask_embedding.pt"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char path[128];
        snprintf(path, sizeof(path), "%s/%s", c->dir, names[i]);
        unlink(path);
    }
    assert_int_equal(rmdir(c->dir), 0);
}

static inline enum err load_with(const char *dir, bool head_8bit, struct dflash **ret,
                                 struct err_detail *detail)
{
    char target[1024];
    test_path(target, sizeof(target), "tests/golden/tiny-glm");
    struct dflash_options options = {.directory = dir,
                                     .target = target,
                                     .seqs_max = 8,
                                     .context_max = 1u << 17,
                                     .threads = 1,
                                     .exact = true,
                                     .head_8bit = head_8bit};
    detail->text[0] = 0;
    return dflash_load(&options, ret, detail);
}

static inline enum err load_from(const char *dir, struct dflash **ret, struct err_detail *detail)
{
    return load_with(dir, false, ret, detail);
}

static inline struct dflash *load_below(const char *below)
{
    char path[1024];
    struct dflash *d = NULL;
    struct err_detail detail;
    test_path(path, sizeof(path), below);
    if (load_from(path, &d, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return d;
}

/* ---- contexts made up from numbers ---- */

static inline float *made_up_taps(uint64_t seed, uint32_t count)
{
    struct rng rng;
    rng_init(&rng, seed);
    float *taps = mem_take_array((uint64_t)count * TAPS * HIDDEN, sizeof(float));
    for (uint64_t i = 0; i < (uint64_t)count * TAPS * HIDDEN; i++)
        taps[i] = ((float)rng_below(&rng, 2001) - 1000) / 500;
    return taps;
}

static inline struct dflash_context context_new(const struct dflash *d)
{
    struct dflash_context c = {.rows = mem_take(dflash_context_bytes(d))};
    size_t bytes = dflash_context_bytes(d);
    memset(c.rows, 0xff, bytes < 8u << 20 ? bytes : 8u << 20); /* a hole that is read becomes NaN */
    return c;
}

struct block_seen {
    float hidden[8 * HIDDEN];
    uint32_t rows;
};

static inline void on_hidden(void *arg, const char *name, uint32_t layer, const float *values,
                             uint32_t rows, uint32_t width)
{
    struct block_seen *seen = arg;
    (void)layer;
    if (strcmp(name, "hidden") == 0) {
        memcpy(seen->hidden, values, 8 * width * sizeof(float)); /* of the first block */
        seen->rows = rows;
    }
}

static inline void draft(struct dflash *d, const struct dflash_context *c, uint32_t anchor,
                         uint32_t ids[7], struct block_seen *seen)
{
    struct dflash_block block = {.context = c, .anchor = anchor};
    dflash_probe(d, on_hidden, seen);
    dflash_draft(d, &block, 1);
    dflash_probe(d, NULL, NULL);
    memcpy(ids, block.ids, 7 * sizeof(uint32_t));
    for (uint32_t i = 0; i < 8 * HIDDEN; i++)
        assert_true(isfinite(seen->hidden[i]));
}

/* ---- tensor files put together anew ---- */

struct parts {
    char *header; /* JSON text */
    size_t header_bytes;
    char *data;
    size_t data_bytes;
};

static inline void parts_read(struct parts *f)
{
    char *file;
    size_t bytes;
    uint64_t n;
    read_all(RANDOM, "model.safetensors", &file, &bytes);
    memcpy(&n, file, sizeof(n));
    f->header = mem_take(n + 1);
    f->header_bytes = n;
    memcpy(f->header, file + 8, n);
    f->data_bytes = bytes - 8 - n;
    f->data = mem_take(f->data_bytes + (1u << 20)); /* room for more tensors */
    memcpy(f->data, file + 8 + n, f->data_bytes);
    mem_give(file);
}

static inline void parts_write(struct parts *f, const struct copy *c)
{
    size_t padded = (f->header_bytes + 7) / 8 * 8;
    char *file = mem_take(8 + padded + f->data_bytes);
    uint64_t n = padded;
    memcpy(file, &n, sizeof(n));
    memset(file + 8, ' ', padded);
    memcpy(file + 8, f->header, f->header_bytes);
    memcpy(file + 8 + padded, f->data, f->data_bytes);
    put_file(c, "model.safetensors", file, 8 + padded + f->data_bytes);
    mem_give(file);
    mem_give(f->header);
    mem_give(f->data);
}

/* Values of a tensor of the file, bf16. */
static inline uint16_t *parts_tensor(struct parts *f, const char *name, size_t *ret_count)
{
    char key[160];
    unsigned long long from, to;
    snprintf(key, sizeof(key), "\"%s\"", name);
    const char *at = strstr(f->header, key);
    if (at == NULL)
        fail_msg("%s is not in the file", name);
    at = strstr(at, "data_offsets");
    assert_non_null(at);
    at = strchr(at, '[');
    assert_int_equal(sscanf(at, "[%llu,%llu]", &from, &to), 2);
    *ret_count = (to - from) / 2;
    return (uint16_t *)(void *)(f->data + from);
}

/* An empty file with room for that many bytes of values. */
static inline void parts_begin(struct parts *f, size_t bytes_max)
{
    *f = (struct parts){.header = mem_take(2), .header_bytes = 2, .data = mem_take(bytes_max)};
    memcpy(f->header, "{}", 2);
}

static inline void parts_add_shaped(struct parts *f, const char *name, const char *dtype,
                                    const uint64_t *shape, uint32_t dims, const void *values,
                                    size_t bytes)
{
    char entry[320];
    size_t end = f->header_bytes;
    while (f->header[end - 1] != '}')
        end--;
    size_t n = (size_t)snprintf(entry, sizeof(entry), "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[",
                                f->header[end - 2] == '{' ? "" : ",", name, dtype);
    for (uint32_t i = 0; i < dims; i++)
        n += (size_t)snprintf(entry + n, sizeof(entry) - n, "%s%llu", i > 0 ? "," : "",
                              (unsigned long long)shape[i]);
    n += (size_t)snprintf(entry + n, sizeof(entry) - n, "],\"data_offsets\":[%zu,%zu]}}",
                          f->data_bytes, f->data_bytes + bytes);
    assert_true(n < sizeof(entry));
    char *header = mem_take(end + n + 1);
    memcpy(header, f->header, end - 1);
    memcpy(header + end - 1, entry, n);
    mem_give(f->header);
    f->header = header;
    f->header_bytes = end - 1 + n;
    memcpy(f->data + f->data_bytes, values, bytes);
    f->data_bytes += bytes;
}

static inline void parts_add_as(struct parts *f, const char *name, const char *dtype, uint32_t rows,
                                uint32_t width, const void *values, size_t bytes)
{
    const uint64_t shape[2] = {rows, width};
    parts_add_shaped(f, name, dtype, shape, 2, values, bytes);
}

static inline void parts_add(struct parts *f, const char *name, uint32_t rows, uint32_t width,
                             const void *values)
{
    parts_add_as(f, name, "BF16", rows, width, values, (size_t)rows * width * 2);
}

static inline struct dflash *load_copy(struct copy *c)
{
    struct dflash *d = NULL;
    struct err_detail detail;
    if (load_from(c->dir, &d, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return d;
}

static inline void draft_of(struct dflash *d, uint32_t ids[7], struct block_seen *seen)
{
    struct dflash_context c = context_new(d);
    float *taps = made_up_taps(21, 60);
    dflash_context_append(d, &c, taps, 60);
    draft(d, &c, 40, ids, seen);
    mem_give(taps);
    mem_give(c.rows);
}

#endif
