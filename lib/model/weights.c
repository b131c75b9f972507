/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/weights.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/op_dtype.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/safetensors.h"
#include "lib/model/weights_names.h"

struct weights *weights_create(const struct model_config *config)
{
    struct weights *w = mem_take(sizeof(*w));
    w->layer_count = config->layers;
    w->layers = mem_take_array(config->layers, sizeof(*w->layers));
    for (uint32_t i = 0; i < config->layers; i++) {
        struct weights_layer *l = &w->layers[i];
        if (!config->layer_dsa[i]) {
            uint64_t part = (uint64_t)config->kda_heads * config->kda_dim * config->conv_taps;
            l->kda.conv = mem_take_array(3 * part, sizeof(float));
            for (int k = 0; k < 3; k++)
                l->kda.conv_part[k] = l->kda.conv + (uint64_t)k * part;
        }
        if (config->layer_moe[i]) {
            l->gate = mem_take_array(config->experts, sizeof(*l->gate));
            l->up = mem_take_array(config->experts, sizeof(*l->up));
            l->down = mem_take_array(config->experts, sizeof(*l->down));
        }
    }
    return w;
}

void weights_destroy(struct weights **w_p)
{
    struct weights *w = *w_p;
    if (w == NULL)
        return;
    for (uint32_t i = 0; i < w->layer_count; i++) {
        mem_give(w->layers[i].kda.conv);
        mem_give(w->layers[i].gate);
        mem_give(w->layers[i].up);
        mem_give(w->layers[i].down);
    }
    mem_give(w->layers);
    mem_give(w->pool);
    mem_give(w);
    *w_p = NULL;
}

struct bind {
    const struct safetensors *set;
    struct weights *weights;
    uint8_t *used;   /* [tensors] */
    bool widen;      /* matrices too */
    uint64_t floats; /* first pass: needed; second pass: used */
    weights_bound_fn done;
    void *done_arg;
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
    if (t->dtype != SAFETENSORS_F32 && t->dtype != SAFETENSORS_BF16 &&
        t->dtype != SAFETENSORS_F16) {
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

/* A matrix may stay in the file only where its elements are aligned there. */
static bool stays_mapped(const struct bind *b, const struct weights_want *want,
                         const struct safetensors_tensor *t)
{
    return want->matrix != NULL && !b->widen && !want->widen &&
           (uintptr_t)t->data % op_dtype_bytes(dtype_of(t)) == 0;
}

static uint64_t pool_share(uint64_t elements)
{
    return (elements + 15) & ~(uint64_t)15; /* keeps every tensor 64-byte aligned */
}

static void check_one(void *arg, const struct weights_want *want)
{
    struct bind *b = arg;
    if (b->err != ERR_OK)
        return;
    const struct safetensors_tensor *t = find(b, want);
    if (t == NULL)
        return;
    b->used[t - safetensors_at(b->set, 0)] = 1;
    bool own_place = want->vector != NULL && *want->vector != NULL;
    if (!stays_mapped(b, want, t) && !own_place)
        b->floats += pool_share(t->elements);
}

static void widen_tensor(const struct safetensors_tensor *t, float *out)
{
    enum op_dtype dtype = dtype_of(t);
    for (uint64_t i = 0; i < t->elements; i++) {
        uint32_t word = 0; /* bytes are copied: the file may not align them */
        memcpy(&word, t->data + i * op_dtype_bytes(dtype), op_dtype_bytes(dtype));
        out[i] = dtype == OP_F32    ? op_f32_from_bits(word)
                 : dtype == OP_BF16 ? op_f32_from_bf16((uint16_t)word)
                                    : op_f32_from_f16((uint16_t)word);
    }
}

static void bind_one(void *arg, const struct weights_want *want)
{
    struct bind *b = arg;
    const struct safetensors_tensor *t = find(b, want);
    CHECK(t != NULL);
    if (stays_mapped(b, want, t)) {
        *want->matrix = (struct op_weight){.data = t->data, .dtype = dtype_of(t)};
    } else if (want->vector != NULL && *want->vector != NULL) {
        widen_tensor(t, *want->vector);
    } else {
        float *out = b->weights->pool + b->floats;
        b->floats += pool_share(t->elements);
        CHECK(b->floats <= b->weights->pool_floats);
        widen_tensor(t, out);
        if (want->matrix != NULL)
            *want->matrix = (struct op_weight){.data = out, .dtype = OP_F32};
        else
            *want->vector = out;
    }
    if (b->done != NULL)
        b->done(b->done_arg, t->bytes);
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

enum err weights_bind(struct weights *w, const struct model_config *config,
                      const struct safetensors *set, bool widen, weights_bound_fn done,
                      void *done_arg, struct err_detail *detail)
{
    CHECK(w->pool == NULL);
    struct bind b = {.set = set,
                     .weights = w,
                     .widen = widen,
                     .done = done,
                     .done_arg = done_arg,
                     .detail = detail};
    b.used = mem_take(safetensors_count(set) + 1);
    weights_each(w, config, check_one, &b);
    if (b.err == ERR_OK)
        b.err = check_extra(&b, config);
    mem_give(b.used);
    if (b.err != ERR_OK)
        return b.err;
    w->pool_floats = b.floats;
    w->pool = mem_take_array(b.floats, sizeof(float));
    b.floats = 0;
    weights_each(w, config, bind_one, &b);
    CHECK(b.err == ERR_OK);
    CHECK(b.floats == w->pool_floats);
    return ERR_OK;
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
