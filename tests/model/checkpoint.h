/* SPDX-License-Identifier: Apache-2.0 */
/* tests/model/checkpoint.h - a copy of a checkpoint with its linears in formats of choice.
 *
 * For tests only; one thread.  The weights really are quantised, by lib/model/quant.h; a twin holds
 * the exactly decoded values as f32, so that both must compute the same. */
#ifndef TESTS_MODEL_CHECKPOINT_H
#define TESTS_MODEL_CHECKPOINT_H

#include "tests/model/harness.h"

#include <sys/stat.h>
#include <unistd.h>

#include "kernels/op_exl3.h"
#include "lib/model/format.h"
#include "lib/model/quant.h"

enum made_format {
    MADE_SAME,
    MADE_EXL3,
    MADE_MXFP8,
    MADE_NVFP4,
    MADE_NVFP4_CT,
    MADE_FP8_BLOCK,
    MADE_FP8_CHANNEL,
    MADE_FP8_TENSOR
};

/* What becomes of the tensor `name` ("x.weight"). */
typedef enum made_format (*made_rule)(const char *name);

struct made {
    FILE *data, *header;
    char *text; /* of the header */
    size_t text_bytes;
    uint64_t at;
    bool twin;
};

static inline void made_tensor(struct made *m, const char *name, const char *suffix,
                               const char *dtype, const char *shape, const void *bytes,
                               uint64_t count)
{
    static const uint8_t zeros[8] = {0};
    uint64_t pad = (8 - m->at % 8) % 8;
    assert_int_equal(fwrite(zeros, 1, pad, m->data), pad);
    m->at += pad;
    /* NOTE: no gaps are allowed between tensors, so the padding belongs to a tensor of its own. */
    if (pad > 0)
        fprintf(m->header,
                ",\"model.visual.pad%llu\":{\"dtype\":\"U8\",\"shape\":[%llu],"
                "\"data_offsets\":[%llu,%llu]}",
                (unsigned long long)m->at, (unsigned long long)pad,
                (unsigned long long)(m->at - pad), (unsigned long long)m->at);
    fprintf(m->header, ",\"%s%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%llu,%llu]}",
            name, suffix, dtype, shape, (unsigned long long)m->at,
            (unsigned long long)(m->at + count));
    assert_int_equal(fwrite(bytes, 1, count, m->data), count);
    m->at += count;
}

static inline const char *made_shape(char text[64], uint64_t a, uint64_t b)
{
    snprintf(text, 64, "%llu,%llu", (unsigned long long)a, (unsigned long long)b);
    return text;
}

/* Writes W as the twin does, or the parts given. */
static inline void made_dense(struct made *m, const char *name, const struct op_quantised *w)
{
    char shape[64];
    float *dense = mem_take_array((uint64_t)w->out * w->in, sizeof(float));
    struct op_dequantise_args a = {.w = w, .y = dense};
    const struct op_ctx ctx = {NULL, NULL};
    assert_int_equal(op_dequantise_ref(&a, &ctx), ERR_OK);
    made_tensor(m, name, ".weight", "F32", made_shape(shape, w->out, w->in), dense,
                4ull * w->out * w->in);
    mem_give(dense);
}

static inline void made_exl3(struct made *m, const char *name, const struct quant_matrix *w)
{
    char shape[64];
    struct err_detail detail = {{0}};
    struct quant_exl3 q;
    const struct op_ctx ctx = {NULL, NULL};
    struct quant_exl3_options options = {
        .bits = 4, .codebook = OP_CODEBOOK_MCG, .beam = 4, .scale = 1, .seed = 7};
    if (quant_exl3(w, NULL, &options, &ctx, &q, &detail) != ERR_OK)
        fail_msg("%s: %s", name, detail.text);
    struct op_quantised stored = quant_exl3_weight(&q);
    const uint32_t mcg = OP_EXL3_MARKER_MCG;
    if (m->twin) {
        made_dense(m, name, &stored);
    } else {
        snprintf(shape, sizeof(shape), "%u,%u,%u", q.in_padded / 16, q.out_padded / 16,
                 16 * q.bits);
        made_tensor(m, name, ".trellis", "I16", shape, q.trellis, q.trellis_bytes);
        snprintf(shape, sizeof(shape), "%u", q.in_padded);
        made_tensor(m, name, ".suh", "F16", shape, q.suh, 2ull * q.in_padded);
        snprintf(shape, sizeof(shape), "%u", q.out_padded);
        made_tensor(m, name, ".svh", "F16", shape, q.svh, 2ull * q.out_padded);
        made_tensor(m, name, ".mcg", "I32", "", &mcg, sizeof(mcg));
    }
    quant_exl3_fini(&q);
}

static inline void made_fp8(struct made *m, const char *name, const struct quant_matrix *w,
                            enum quant_fp8 kind)
{
    char shape[64];
    uint32_t rows = (w->out + 127) / 128, columns = (w->in + 127) / 128;
    uint8_t *codes = mem_take((uint64_t)w->out * w->in);
    float *scales = mem_take_array((uint64_t)w->out + (uint64_t)rows * columns, sizeof(float));
    assert_int_equal(quant_fp8(w, kind, codes, scales), ERR_OK);
    struct op_quantised stored = {
        .format = OP_FORMAT_FP8,
        .out = w->out,
        .in = w->in,
        .codes = codes,
        .row_bytes = w->in,
        .scales = {.data = scales, .rows_shared = 128, .columns_shared = 128, .stride = columns}};
    uint64_t count = (uint64_t)rows * columns;
    made_shape(shape, rows, columns);
    if (kind != QUANT_FP8_BLOCK) {
        stored.scales.rows_shared = kind == QUANT_FP8_CHANNEL ? 1 : OP_SHARED_BY_ALL;
        stored.scales.columns_shared = OP_SHARED_BY_ALL;
        stored.scales.stride = 1;
        count = kind == QUANT_FP8_CHANNEL ? w->out : 1;
        snprintf(shape, sizeof(shape), "%llu", (unsigned long long)count);
    }
    if (m->twin) {
        made_dense(m, name, &stored);
    } else {
        made_tensor(m, name, kind == QUANT_FP8_BLOCK ? ".weight_scale_inv" : ".weight_scale", "F32",
                    shape, scales, 4 * count);
        made_tensor(m, name, ".weight", "F8_E4M3", made_shape(shape, w->out, w->in), codes,
                    (uint64_t)w->out * w->in);
    }
    mem_give(codes);
    mem_give(scales);
}

static inline void made_micro(struct made *m, const char *name, const struct quant_matrix *w,
                              enum made_format format)
{
    char shape[64];
    bool mx = format == MADE_MXFP8, divides = format == MADE_NVFP4_CT;
    uint32_t shared = mx ? 32 : 16, row_bytes = mx ? w->in : w->in / 2;
    uint8_t *codes = mem_take((uint64_t)w->out * w->in);
    uint8_t *scales = mem_take((uint64_t)w->out * w->in / shared);
    float global = 0;
    struct op_quantised stored = {.format = mx ? OP_FORMAT_MXFP8 : OP_FORMAT_NVFP4,
                                  .out = w->out,
                                  .in = w->in,
                                  .codes = codes,
                                  .row_bytes = row_bytes,
                                  .global_divides = divides,
                                  .scales = {.data = scales,
                                             .dtype = mx ? OP_SCALE_E8M0 : OP_SCALE_E4M3,
                                             .rows_shared = 1,
                                             .columns_shared = shared,
                                             .stride = w->in / shared}};
    assert_int_equal(mx ? quant_mxfp8(w, codes, scales)
                        : quant_nvfp4(w, divides, codes, scales, &global),
                     ERR_OK);
    stored.global = global;
    if (m->twin) {
        made_dense(m, name, &stored);
    } else {
        made_tensor(m, name, divides ? ".weight_packed" : ".weight", mx ? "F8_E4M3" : "U8",
                    made_shape(shape, w->out, row_bytes), codes, (uint64_t)w->out * row_bytes);
        made_tensor(m, name, ".weight_scale", mx ? "U8" : "F8_E4M3",
                    made_shape(shape, w->out, w->in / shared), scales,
                    (uint64_t)w->out * w->in / shared);
        if (!mx)
            made_tensor(m, name, divides ? ".weight_global_scale" : ".weight_scale_2", "F32",
                        divides ? "1" : "", &global, sizeof(global));
    }
    mem_give(codes);
    mem_give(scales);
}

static inline void made_linear(struct made *m, const struct safetensors_tensor *t,
                               enum made_format format)
{
    char name[256];
    uint32_t out = (uint32_t)t->shape[0], in = (uint32_t)t->shape[1];
    float *wide = mem_take_array((uint64_t)out * in, sizeof(float));
    assert_int_equal(t->dtype, SAFETENSORS_BF16);
    struct op_quantised plain = {
        .out = out, .in = in, .codes = t->data, .row_bytes = 2ull * in, .dtype = OP_BF16};
    for (uint32_t o = 0; o < out; o++)
        op_quantised_row(&plain, o, 0, in, wide + (uint64_t)o * in);
    struct quant_matrix w = {.w = wide, .in = in, .out = out, .in_stride = 1, .out_stride = in};
    snprintf(name, sizeof(name), "%.*s", (int)(strlen(t->name) - strlen(".weight")), t->name);
    if (format == MADE_EXL3)
        made_exl3(m, name, &w);
    else if (format == MADE_FP8_BLOCK || format == MADE_FP8_CHANNEL || format == MADE_FP8_TENSOR)
        made_fp8(m, name, &w,
                 format == MADE_FP8_BLOCK     ? QUANT_FP8_BLOCK
                 : format == MADE_FP8_CHANNEL ? QUANT_FP8_CHANNEL
                                              : QUANT_FP8_TENSOR);
    else
        made_micro(m, name, &w, format);
    mem_give(wide);
}

static inline void made_copy(const char *from, const char *to)
{
    char buffer[65536];
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    if (in == NULL || out == NULL)
        fail_msg("cannot copy %s to %s", from, to);
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), in)) > 0;)
        assert_int_equal(fwrite(buffer, 1, n, out), n);
    fclose(in);
    assert_int_equal(fclose(out), 0);
}

static inline void made_join(const char *directory, const char *header, size_t header_bytes)
{
    char path[1200], body[1200], buffer[65536];
    snprintf(path, sizeof(path), "%s/model.safetensors", directory);
    snprintf(body, sizeof(body), "%s/body", directory);
    FILE *in = fopen(body, "rb"), *out = fopen(path, "wb");
    assert_non_null(in);
    assert_non_null(out);
    uint64_t bytes = header_bytes;
    assert_int_equal(fwrite(&bytes, 8, 1, out), 1);
    assert_int_equal(fwrite(header, 1, header_bytes, out), header_bytes);
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), in)) > 0;)
        assert_int_equal(fwrite(buffer, 1, n, out), n);
    fclose(in);
    assert_int_equal(fclose(out), 0);
    unlink(body);
}

/* Writes `directory`/{config.json, model.safetensors} from the model below the source root. */
static inline void made_checkpoint(const char *below, const char *directory, made_rule rule,
                                   bool twin)
{
    char path[1024], from[1100], to[1100];
    struct safetensors *set = NULL;
    struct err_detail detail = {{0}};
    struct made m = {.twin = twin};
    test_path(path, sizeof(path), below);
    if (safetensors_open_directory(path, &set, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    snprintf(from, sizeof(from), "%s/config.json", path);
    snprintf(to, sizeof(to), "%s/config.json", directory);
    made_copy(from, to);
    snprintf(from, sizeof(from), "%s/body", directory);
    m.data = fopen(from, "wb");
    m.header = open_memstream(&m.text, &m.text_bytes);
    assert_non_null(m.data);
    assert_non_null(m.header);
    fprintf(m.header, "{\"__metadata__\":{}");
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        enum made_format format = rule(t->name);
        char shape[64] = "";
        for (uint32_t d = 0; d < t->dims; d++)
            snprintf(shape + strlen(shape), sizeof(shape) - strlen(shape), "%s%llu",
                     d > 0 ? "," : "", (unsigned long long)t->shape[d]);
        if (format == MADE_SAME)
            made_tensor(&m, t->name, "", safetensors_dtype_name(t->dtype), shape, t->data,
                        t->bytes);
        else
            made_linear(&m, t, format);
    }
    fprintf(m.header, "}");
    assert_int_equal(fclose(m.header), 0);
    assert_int_equal(fclose(m.data), 0);
    made_join(directory, m.text, m.text_bytes);
    free(m.text);
    safetensors_close(&set);
}

static inline void made_remove(const char *directory)
{
    static const char *const names[] = {"config.json", "model.safetensors", "body"};
    for (int i = 0; i < 3; i++) {
        char path[1200];
        snprintf(path, sizeof(path), "%s/%s", directory, names[i]);
        unlink(path);
    }
    rmdir(directory);
}

static inline bool name_has(const char *name, const char *part)
{
    return strstr(name, part) != NULL;
}

#endif
