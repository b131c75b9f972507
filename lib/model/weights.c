/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/weights.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/op_dtype.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/safetensors.h"
#include "lib/model/weights_names.h"

#define READ_FLOATS_MAX ((uint64_t)1 << 20)

struct weights *weights_create(const struct model_config *config)
{
    struct shard whole;
    CHECK(shard_plan(config, 0, 1, SHARD_MOE_EP, &whole, NULL) == ERR_OK);
    return weights_create_shard(config, &whole);
}

static void take_experts(struct weights_layer *l, const struct shard *shard)
{
    l->gate = mem_take_array(shard->experts.count, sizeof(*l->gate));
    l->up = mem_take_array(shard->experts.count, sizeof(*l->up));
    l->down = mem_take_array(shard->experts.count, sizeof(*l->down));
}

struct weights *weights_create_shard(const struct model_config *config, const struct shard *shard)
{
    struct weights *w = mem_take(sizeof(*w));
    w->shard = *shard;
    w->layer_count = config->layers;
    w->layers = mem_take_array(config->layers + 1u, sizeof(*w->layers));
    for (uint32_t i = 0; i < config->layers; i++) {
        struct weights_layer *l = &w->layers[i];
        if (!config->layer_dsa[i]) {
            uint64_t part = (uint64_t)shard->kda_heads.count * config->kda_dim * config->conv_taps;
            l->kda.conv = mem_take_array(3 * part, sizeof(float));
            for (int k = 0; k < 3; k++)
                l->kda.conv_part[k] = l->kda.conv + (uint64_t)k * part;
        }
        if (config->layer_moe[i])
            take_experts(l, shard);
    }
    return w;
}

void weights_want_mtp(struct weights *w, const struct model_config *config)
{
    CHECK(config->mtp_layers > 0 && w->linears == NULL && !w->has_mtp);
    w->has_mtp = true;
    take_experts(&w->layers[w->layer_count], &w->shard);
}

void weights_want_mtp_only(struct weights *w, const struct model_config *config)
{
    weights_want_mtp(w, config);
    w->only_mtp = true;
}

void weights_destroy(struct weights **w_p)
{
    struct weights *w = *w_p;
    if (w == NULL)
        return;
    for (uint32_t i = 0; i <= w->layer_count; i++) {
        mem_give(w->layers[i].kda.conv);
        mem_give(w->layers[i].gate);
        mem_give(w->layers[i].up);
        mem_give(w->layers[i].down);
    }
    mem_give(w->layers);
    mem_give(w->linears);
    mem_give(w->pool);
    mem_give(w);
    *w_p = NULL;
}

struct bind {
    const struct safetensors *set;
    struct weights *weights;
    const struct weights_bind_options *options;
    uint8_t *used;   /* [tensors] */
    uint64_t floats; /* first pass: needed; second pass: used */
    uint32_t linears;
    enum err err;
    struct err_detail *detail;
};

static void shape_text(const uint64_t *shape, uint32_t dims, char *text, size_t bytes)
{
    size_t at = 0;
    text[0] = 0;
    for (uint32_t i = 0; i < dims && at + 24 < bytes; i++)
        at += (size_t)snprintf(text + at, bytes - at, "%s%llu", i > 0 ? "," : "",
                               (unsigned long long)shape[i]);
}

static bool shape_fits(const struct weights_want *want, const struct safetensors_tensor *t)
{
    if (want->squeeze) { /* any number of ones around the values */
        uint64_t elements = 1;
        for (uint32_t i = 0; i < want->dims; i++)
            elements *= want->shape[i];
        bool ones = true;
        for (uint32_t i = 0; i < t->dims; i++)
            ones = ones && (t->shape[i] == 1 || t->shape[i] == elements);
        return ones && t->elements == elements;
    }
    return t->dims == want->dims &&
           memcmp(t->shape, want->shape, want->dims * sizeof(uint64_t)) == 0;
}

static bool is_plain(const struct safetensors_tensor *t)
{
    return t->dtype == SAFETENSORS_F32 || t->dtype == SAFETENSORS_BF16 ||
           t->dtype == SAFETENSORS_F16;
}

/* A tensor that has to be plain. */
static const struct safetensors_tensor *find(struct bind *b, const struct weights_want *want)
{
    const struct safetensors_tensor *t = safetensors_find(b->set, want->name);
    if (t == NULL) {
        b->err = err_set(b->detail, ERR_INVALID, "tensor \"%s\" is missing", want->name);
        return NULL;
    }
    if (!shape_fits(want, t)) {
        char have[128], need[128];
        shape_text(t->shape, t->dims, have, sizeof(have));
        shape_text(want->shape, want->dims, need, sizeof(need));
        b->err = err_set(b->detail, ERR_INVALID, "tensor \"%s\": shape [%s], expected [%s]",
                         want->name, have, need);
        return NULL;
    }
    if (!is_plain(t)) {
        b->err = err_set(b->detail, ERR_UNSUPPORTED,
                         "tensor \"%s\": dtype %s is not supported, only BF16, F16 and F32",
                         want->name, safetensors_dtype_name(t->dtype));
        return NULL;
    }
    return t;
}

static enum op_dtype dtype_of(const struct safetensors_tensor *t)
{
    return t->dtype == SAFETENSORS_F32 ? OP_F32 : t->dtype == SAFETENSORS_BF16 ? OP_BF16 : OP_F16;
}

static uint64_t pool_share(uint64_t elements)
{
    return (elements + 15) & ~(uint64_t)15; /* keeps every tensor 64-byte aligned */
}

/* "x.weight" -> "x"; false for a matrix whose name has no such end: it can only be plain. */
static bool prefix_of(const struct weights_want *want, char prefix[sizeof(want->name)])
{
    static const char end[] = ".weight";
    size_t bytes = strlen(want->name), end_bytes = sizeof(end) - 1;
    if (bytes <= end_bytes || strcmp(want->name + bytes - end_bytes, end) != 0)
        return false;
    memcpy(prefix, want->name, bytes - end_bytes);
    prefix[bytes - end_bytes] = 0;
    return true;
}

/* A matrix without companions: the tensor itself and nothing else. */
static bool bind_bare(struct bind *b, const struct weights_want *want, struct weights_linear *l)
{
    const struct safetensors_tensor *t = find(b, want);
    if (t == NULL)
        return false;
    b->used[t - safetensors_at(b->set, 0)] = 1;
    l->tensor = t;
    l->info.kind = t->dtype == SAFETENSORS_F32    ? FORMAT_F32
                   : t->dtype == SAFETENSORS_BF16 ? FORMAT_BF16
                                                  : FORMAT_F16;
    l->info.out = (uint32_t)want->shape[0];
    l->info.in = (uint32_t)want->shape[1];
    l->stored = (struct op_quantised){.format = OP_FORMAT_PLAIN,
                                      .out = l->info.out,
                                      .in = l->info.in,
                                      .codes = t->data,
                                      .row_bytes = t->bytes / l->info.out,
                                      .dtype = dtype_of(t)};
    return true;
}

static bool bind_format(struct bind *b, const struct weights_want *want, const char *prefix,
                        struct weights_linear *l)
{
    enum format_fault fault;
    char name[2 * sizeof(want->name)];
    if (format_mark(b->set, prefix, b->used) == 0) {
        b->err = err_set(b->detail, ERR_INVALID, "tensor \"%s\" is missing", want->name);
        return false;
    }
    b->err = format_bind(b->set, prefix, (uint32_t)want->shape[0], (uint32_t)want->shape[1],
                         b->options->hint, &l->info, &l->stored, &fault, b->detail);
    if (b->err != ERR_OK)
        return false;
    snprintf(name, sizeof(name), "%s.%s", prefix, l->info.weight);
    l->tensor = safetensors_find(b->set, name);
    CHECK(l->tensor != NULL);
    return true;
}

/* A plain matrix may stay in the file only where its elements are aligned there. */
static bool stays(const struct bind *b, const struct weights_want *want,
                  const struct weights_linear *l)
{
    const struct op_quantised *s = &l->piece;
    if (want->dense)
        return false;
    if (s->format != OP_FORMAT_PLAIN)
        return !want->dense_quantised && !(want->dense_exl3 && s->format == OP_FORMAT_EXL3);
    return !b->options->widen && (uintptr_t)s->codes % op_dtype_bytes(s->dtype) == 0;
}

static uint64_t piece_bytes(const struct weights_linear *l)
{
    return (uint64_t)l->piece.out * l->piece.in * op_dtype_bytes(l->piece.dtype);
}

/* What this rank holds of the matrix; false where that is nothing, or where the storage cannot be
 * cut there. */
static bool cut_matrix(struct bind *b, const struct weights_want *want, struct weights_linear *l)
{
    uint32_t out = l->info.out, in = l->info.in;
    bool rows = want->cut == WEIGHTS_ROWS, columns = want->cut == WEIGHTS_COLUMNS;
    l->piece = l->stored;
    if (want->cut == WEIGHTS_WHOLE || (want->first == 0 && want->count == (rows ? out : in)))
        return true;
    if (want->count == 0) {
        l->place = NULL;
        return false;
    }
    if (op_quantised_cut(&l->stored, rows ? want->first : 0, rows ? want->count : out,
                         columns ? want->first : 0, columns ? want->count : in,
                         &l->piece) == ERR_OK)
        return true;
    b->err = err_set(b->detail, ERR_UNSUPPORTED,
                     "tensor \"%s\": rank %u's %s [%u, %u) begin or end inside a unit of %s",
                     want->name, b->weights->shard.rank, rows ? "rows" : "columns", want->first,
                     want->first + want->count, format_kind_name(l->info.kind));
    return false;
}

static void check_matrix(struct bind *b, const struct weights_want *want)
{
    struct weights_linear *l = &b->weights->linears[b->linears++];
    char prefix[sizeof(want->name)];
    if (!(prefix_of(want, prefix) ? bind_format(b, want, prefix, l) : bind_bare(b, want, l)))
        return;
    l->place = want->matrix;
    if (!cut_matrix(b, want, l))
        return;
    l->dense = !stays(b, want, l);
    l->copied = !l->dense && l->piece.format == OP_FORMAT_PLAIN && l->piece.in != l->info.in;
    if (l->dense)
        b->floats += pool_share((uint64_t)l->piece.out * l->piece.in);
    else if (l->copied)
        b->floats += pool_share(piece_bytes(l) / sizeof(float) + 1);
    if ((l->dense || l->copied) && l->piece.bias != NULL)
        b->err = err_set(b->detail, ERR_UNSUPPORTED, "tensor \"%s.%s\": no bias can stand here",
                         prefix, l->info.bias);
}

/* Elements of a vector that this rank holds. */
static uint64_t vector_count(const struct weights_want *want, const struct safetensors_tensor *t)
{
    return want->cut == WEIGHTS_WHOLE ? t->elements : t->elements / want->shape[0] * want->count;
}

static void check_one(void *arg, const struct weights_want *want)
{
    struct bind *b = arg;
    if (b->err != ERR_OK)
        return;
    if (want->matrix != NULL) {
        check_matrix(b, want);
        return;
    }
    const struct safetensors_tensor *t = find(b, want);
    if (t == NULL)
        return;
    b->used[t - safetensors_at(b->set, 0)] = 1;
    if (*want->vector == NULL)
        b->floats += pool_share(vector_count(want, t));
}

static float *take_pool(struct bind *b, uint64_t elements)
{
    float *out = b->weights->pool + b->floats;
    b->floats += pool_share(elements);
    CHECK(b->floats <= b->weights->pool_floats);
    return out;
}

/* Widens count elements from `begin` on, which points into the mapped tensor.  They are read: most
 * of these tensors are small and lie apart, and each would cost a page fault. */
static void read_floats(struct bind *b, const struct safetensors_tensor *t, const uint8_t *begin,
                        uint64_t count, float *out)
{
    _Alignas(64) uint8_t chunk[16 << 10];
    enum op_dtype dtype = dtype_of(t);
    uint32_t each = op_dtype_bytes(dtype), most = sizeof(chunk) / each;
    for (uint64_t i = 0; i < count && b->err == ERR_OK; i += most) {
        uint32_t now = count - i < most ? (uint32_t)(count - i) : most;
        const struct op_quantised row = {.out = 1, .in = now, .codes = chunk, .dtype = dtype};
        uint64_t at = (uint64_t)(begin - t->data) + i * each;
        if (safetensors_read(b->set, t, at, chunk, (size_t)now * each) != ERR_OK)
            b->err = err_set(b->detail, ERR_IO, "%s: tensor \"%s\" cannot be read to its end",
                             safetensors_file_name(b->set, t->shard), t->name);
        else
            op_quantised_row(&row, 0, 0, now, out + i);
    }
}

/* A small plain matrix whose rows lie behind one another; a large one is spread over threads. */
static bool read_at_once(const struct op_quantised *w)
{
    return w->format == OP_FORMAT_PLAIN && w->row_bytes == w->in * op_dtype_bytes(w->dtype) &&
           (uint64_t)w->out * w->in <= READ_FLOATS_MAX;
}

static void bind_matrix(struct bind *b)
{
    struct weights_linear *l = &b->weights->linears[b->linears++];
    if (l->place == NULL)
        return;
    if (l->dense) {
        uint64_t count = (uint64_t)l->piece.out * l->piece.in;
        float *out = take_pool(b, count);
        struct op_dequantise_args a = {.w = &l->piece, .y = out};
        if (read_at_once(&l->piece))
            read_floats(b, l->tensor, l->piece.codes, count, out);
        else
            CHECK(op_dequantise_ref(&a, b->options->ctx) == ERR_OK);
        *l->place = (struct op_weight){.data = out, .dtype = OP_F32};
    } else if (l->copied) {
        uint64_t row = piece_bytes(l) / l->piece.out;
        uint8_t *out = (uint8_t *)take_pool(b, piece_bytes(l) / sizeof(float) + 1);
        for (uint32_t r = 0; r < l->piece.out; r++)
            memcpy(out + r * row, l->piece.codes + r * l->piece.row_bytes, row);
        *l->place = (struct op_weight){.data = out, .dtype = l->piece.dtype};
    } else if (l->piece.format == OP_FORMAT_PLAIN && l->piece.bias == NULL) {
        *l->place = (struct op_weight){.data = l->piece.codes, .dtype = l->piece.dtype};
    } else {
        *l->place = (struct op_weight){.quantised = &l->piece};
    }
}

static void bind_one(void *arg, const struct weights_want *want)
{
    struct bind *b = arg;
    if (b->err != ERR_OK)
        return;
    if (want->matrix != NULL) {
        bind_matrix(b);
        return;
    }
    const struct safetensors_tensor *t = find(b, want);
    CHECK(t != NULL);
    uint64_t count = vector_count(want, t), each = t->elements / want->shape[0];
    if (*want->vector == NULL)
        *want->vector = take_pool(b, count);
    read_floats(b, t, t->data + want->first * each * op_dtype_bytes(dtype_of(t)), count,
                *want->vector);
    for (uint64_t i = 0; i < count && b->err == ERR_OK; i++)
        if (!isfinite((*want->vector)[i]))
            b->err = err_set(b->detail, ERR_CORRUPT, "tensor \"%s\": not finite at [%llu]",
                             want->name, (unsigned long long)i);
}

static bool left_alone(const char *name, const struct model_config *config)
{
    static const char layers[] = WEIGHTS_PREFIX "layers.";
    if (strncmp(name, "model.visual.", 13) == 0)
        return true;
    if (strncmp(name, layers, sizeof(layers) - 1) != 0)
        return false;
    char *end = NULL;
    unsigned long layer = strtoul(name + sizeof(layers) - 1, &end, 10);
    return *end == '.' && layer >= config->layers && layer < config->layers + config->mtp_layers;
}

static enum err check_extra(const struct bind *b, const struct model_config *config)
{
    for (uint32_t i = 0; i < safetensors_count(b->set); i++) {
        const char *name = safetensors_at(b->set, i)->name;
        if (!b->used[i] && !left_alone(name, config))
            return err_set(b->detail, ERR_INVALID, "tensor \"%.200s\" is no part of this model",
                           name);
    }
    return ERR_OK;
}

static void count_linear(void *arg, const struct weights_want *want)
{
    *(uint32_t *)arg += want->matrix != NULL;
}

enum err weights_bind(struct weights *w, const struct model_config *config,
                      const struct safetensors *set, const struct weights_bind_options *options,
                      struct err_detail *detail)
{
    CHECK(w->pool == NULL && w->linears == NULL);
    struct bind b = {.set = set, .weights = w, .options = options, .detail = detail};
    weights_each(w, config, count_linear, &w->linear_count);
    w->linears = mem_take_array(w->linear_count, sizeof(*w->linears));
    b.used = mem_take(safetensors_count(set) + 1);
    weights_each(w, config, check_one, &b);
    if (b.err == ERR_OK && !w->only_mtp)
        b.err = check_extra(&b, config);
    mem_give(b.used);
    if (b.err != ERR_OK)
        return b.err;
    w->pool_floats = b.floats;
    w->pool = mem_take_array(b.floats, sizeof(float));
    b.floats = 0;
    b.linears = 0;
    weights_each(w, config, bind_one, &b);
    CHECK(b.floats == w->pool_floats || b.err != ERR_OK);
    return b.err;
}

enum err weights_check_values(const struct weights *w, uint32_t linear, struct err_detail *detail)
{
    CHECK(linear < w->linear_count);
    const struct weights_linear *l = &w->linears[linear];
    const char *name = l->tensor->name;
    char prefix[256];
    enum format_fault fault;
    if (l->info.weight == NULL) { /* bare */
        struct format_info info = l->info;
        const char *dot = strrchr(name, '.');
        info.weight = dot != NULL ? dot + 1 : name;
        snprintf(prefix, sizeof(prefix), "%.*s", dot != NULL ? (int)(dot - name) : 0, name);
        return format_check_values(prefix, &info, &l->stored, &fault, detail);
    }
    snprintf(prefix, sizeof(prefix), "%.*s", (int)(strlen(name) - strlen(l->info.weight) - 1),
             name);
    return format_check_values(prefix, &l->info, &l->stored, &fault, detail);
}

void weights_trust_values(struct weights *w)
{
    for (uint32_t i = 0; i < w->linear_count; i++)
        w->linears[i].piece.no_nan = true;
}

static void count_one(void *arg, const struct weights_want *want)
{
    uint64_t elements = 1;
    for (uint32_t i = 0; i < want->dims; i++)
        elements *= want->shape[i];
    *(uint64_t *)arg += elements;
}

uint64_t weights_parameters(const struct model_config *config)
{
    uint64_t count = 0;
    struct weights *w = weights_create(config);
    weights_each(w, config, count_one, &count);
    weights_destroy(&w);
    return count;
}
