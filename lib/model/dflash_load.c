/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of a DFlash drafter: names, aliases, formats by companions, what is borrowed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/op_dtype.h"
#include "lib/base/mem.h"
#include "lib/model/dflash_mask.h"
#include "lib/model/dflash_parts.h"
#include "lib/model/format.h"
#include "lib/model/read_file.h"
#include "lib/model/safetensors.h"
#include "lib/model/vocabulary.h"

#define TOKENIZER_BYTES_MAX (512u << 20)
#define NAME_BYTES          192

struct binding {
    struct dflash *drafter;
    uint8_t *used; /* [tensors] of the drafter's own files */
    uint32_t kinds[FORMAT_KIND_COUNT];
    struct hash_xxh3 *hash; /* of what is being bound; NULL = nobody asks */
    struct err_detail *detail;
};

/* ---- names ---- */

static const struct {
    const char *name, *other;
} aliases[] = {
    {"fc", "encoder.fc"},
    {"hidden_norm", "encoder.output_norm_enc"},
    {"layers.0.", "midlayer."},
};

static bool anything_under(const struct safetensors *set, const char *prefix)
{
    size_t bytes = strlen(prefix);
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const char *name = safetensors_at(set, i)->name;
        if (strncmp(name, prefix, bytes) == 0 && (name[bytes] == '.' || name[bytes] == 0))
            return true;
    }
    return false;
}

/* The spelling under which the file has the module; the plain one where it has none. */
static void spelling(const struct safetensors *set, const char *name, char ret[NAME_BYTES])
{
    char other[NAME_BYTES] = "";
    for (size_t i = 0; i < ARRAY_COUNT(aliases); i++) {
        size_t bytes = strlen(aliases[i].name);
        bool whole = aliases[i].name[bytes - 1] != '.' && strcmp(name, aliases[i].name) == 0;
        bool part = aliases[i].name[bytes - 1] == '.' && strncmp(name, aliases[i].name, bytes) == 0;
        if (whole || part)
            snprintf(other, sizeof other, "%s%s", aliases[i].other, name + bytes);
    }
    const char *names[] = {name, other};
    for (size_t i = 0; i < 2; i++) {
        for (int with_model = 0; names[i][0] != 0 && with_model < 2; with_model++) {
            snprintf(ret, NAME_BYTES, "%s%s", with_model ? "model." : "", names[i]);
            if (anything_under(set, ret))
                return;
        }
    }
    snprintf(ret, NAME_BYTES, "%s", name);
}

static void mark(struct binding *b, const struct safetensors_tensor *t)
{
    const uint64_t about[2] = {(uint64_t)t->dtype, t->bytes};
    b->used[t - safetensors_at(b->drafter->tensors, 0)] = 1;
    if (b->hash == NULL)
        return;
    hash_xxh3_add(b->hash, about, sizeof about);
    hash_xxh3_add(b->hash, t->data, t->bytes);
}

/* ---- values ---- */

static bool plain_dtype(const struct safetensors_tensor *t, enum op_dtype *ret)
{
    if (t->dtype != SAFETENSORS_F32 && t->dtype != SAFETENSORS_BF16 && t->dtype != SAFETENSORS_F16)
        return false;
    *ret = t->dtype == SAFETENSORS_F32 ? OP_F32 : t->dtype == SAFETENSORS_BF16 ? OP_BF16 : OP_F16;
    return true;
}

static enum err shape_check(const struct safetensors_tensor *t, uint32_t dims,
                            const uint64_t *shape, struct err_detail *detail)
{
    bool fits = t->dims == dims;
    for (uint32_t i = 0; fits && i < dims; i++)
        fits = t->shape[i] == shape[i];
    if (fits)
        return ERR_OK;
    char have[128] = "", need[128] = "";
    size_t at = 0;
    for (uint32_t i = 0; i < t->dims && at + 24 < sizeof have; i++)
        at += (size_t)snprintf(have + at, sizeof have - at, "%s%llu", i > 0 ? "," : "",
                               (unsigned long long)t->shape[i]);
    at = 0;
    for (uint32_t i = 0; i < dims; i++)
        at += (size_t)snprintf(need + at, sizeof need - at, "%s%llu", i > 0 ? "," : "",
                               (unsigned long long)shape[i]);
    return err_set(detail, ERR_INVALID, "tensor \"%s\": shape [%s], expected [%s]", t->name, have,
                   need);
}

static float value_at(const struct safetensors_tensor *t, enum op_dtype dtype, uint64_t i)
{
    uint32_t word = 0; /* bytes are copied: the file may not align them */
    memcpy(&word, t->data + i * op_dtype_bytes(dtype), op_dtype_bytes(dtype));
    return dtype == OP_F32    ? op_f32_from_bits(word)
           : dtype == OP_BF16 ? op_f32_from_bf16((uint16_t)word)
                              : op_f32_from_f16((uint16_t)word);
}

/* One NaN would make every draft wrong and nothing else: it must be seen here. */
static enum err finite_check(const struct safetensors_tensor *t, enum op_dtype dtype,
                             struct err_detail *detail)
{
    for (uint64_t i = 0; i < t->elements; i++)
        if (!isfinite(value_at(t, dtype, i)))
            return err_set(detail, ERR_INVALID, "tensor \"%s\": not finite at [%llu]", t->name,
                           (unsigned long long)i);
    return ERR_OK;
}

/* A plain tensor by name, with or without ".weight" behind it. */
static enum err find_plain(struct binding *b, const char *module, uint32_t dims,
                           const uint64_t *shape, const struct safetensors_tensor **ret_tensor,
                           enum op_dtype *ret_dtype)
{
    char name[NAME_BYTES], full[NAME_BYTES + 8];
    const struct safetensors *set = b->drafter->tensors;
    spelling(set, module, name);
    snprintf(full, sizeof full, "%s.weight", name);
    const struct safetensors_tensor *t = safetensors_find(set, full);
    if (t == NULL)
        t = safetensors_find(set, name);
    if (t == NULL)
        return err_set(b->detail, ERR_INVALID, "tensor \"%s\" is missing", full);
    TRY(shape_check(t, dims, shape, b->detail));
    if (!plain_dtype(t, ret_dtype))
        return err_set(b->detail, ERR_UNSUPPORTED,
                       "tensor \"%s\": dtype %s, only BF16, F16 and F32 are supported here",
                       t->name, safetensors_dtype_name(t->dtype));
    TRY(finite_check(t, *ret_dtype, b->detail));
    mark(b, t);
    *ret_tensor = t;
    return ERR_OK;
}

static void widen(const struct safetensors_tensor *t, enum op_dtype dtype, float *out)
{
    for (uint64_t i = 0; i < t->elements; i++)
        out[i] = value_at(t, dtype, i);
}

static enum err vector(struct binding *b, const char *module, uint32_t dims, const uint64_t *shape,
                       float **ret_values)
{
    const struct safetensors_tensor *t = NULL;
    enum op_dtype dtype;
    TRY(find_plain(b, module, dims, shape, &t, &dtype));
    *ret_values = dflash_take(b->drafter, t->elements, sizeof(float));
    widen(t, dtype, *ret_values);
    return ERR_OK;
}

static enum err norm(struct binding *b, const char *module, uint32_t n, float **ret_values)
{
    uint64_t shape[1] = {n};
    return vector(b, module, 1, shape, ret_values);
}

/* As it lies in the file where that is aligned, else a copy. */
static struct op_weight as_weight(struct dflash *d, const void *data, uint64_t elements,
                                  enum op_dtype dtype)
{
    uint64_t bytes = op_dtype_bytes(dtype);
    if ((uintptr_t)data % bytes == 0)
        return (struct op_weight){.data = data, .dtype = dtype};
    void *copy = dflash_take(d, elements, bytes);
    memcpy(copy, data, elements * bytes);
    return (struct op_weight){.data = copy, .dtype = dtype};
}

static enum err table(struct binding *b, const char *module, uint32_t rows, uint32_t width,
                      struct op_weight *ret_weight)
{
    const struct safetensors_tensor *t = NULL;
    enum op_dtype dtype;
    uint64_t shape[2] = {rows, width};
    TRY(find_plain(b, module, 2, shape, &t, &dtype));
    *ret_weight = as_weight(b->drafter, t->data, t->elements, dtype);
    return ERR_OK;
}

/* ---- linears ---- */

static enum err bind_from(struct binding *b, const struct safetensors *set, const char *prefix,
                          uint32_t out, uint32_t in, bool own, struct dflash_linear *ret)
{
    struct format_info info;
    enum format_fault fault;
    struct dflash *d = b->drafter;
    ret->out = out;
    ret->in = in;
    TRY(format_bind(set, prefix, out, in, NULL, &info, &ret->stored, &fault, b->detail));
    TRY(format_check_values(prefix, &info, &ret->stored, &fault, b->detail));
    ret->stored.no_nan = true;
    const char *parts[] = {info.weight, info.scale, info.global, info.input_scale};
    for (size_t i = 0; own && i < ARRAY_COUNT(parts); i++) {
        char name[NAME_BYTES + 32];
        snprintf(name, sizeof name, "%s.%s", prefix, parts[i] != NULL ? parts[i] : "");
        const struct safetensors_tensor *t = safetensors_find(set, name);
        if (parts[i] != NULL && t != NULL)
            mark(b, t);
    }
    b->kinds[info.kind]++;
    if (info.has_bias)
        return err_set(b->detail, ERR_UNSUPPORTED, "tensor \"%s.bias\": no layer has a bias",
                       prefix);
    if (ret->stored.format == OP_FORMAT_PLAIN)
        ret->weight = as_weight(d, ret->stored.codes, (uint64_t)out * in, ret->stored.dtype);
    else
        ret->weight = (struct op_weight){.quantised = &ret->stored};
    return ERR_OK;
}

static enum err linear(struct binding *b, const char *module, uint32_t out, uint32_t in,
                       struct dflash_linear *ret)
{
    char name[NAME_BYTES];
    spelling(b->drafter->tensors, module, name);
    return bind_from(b, b->drafter->tensors, name, out, in, true, ret);
}

/* ---- layers ---- */

static enum err conv(struct binding *b, const char *module, struct dflash_conv *ret)
{
    const struct dflash_config *c = &b->drafter->config;
    char name[NAME_BYTES];
    uint64_t shape[3] = {2, c->conv_taps, c->hidden};
    snprintf(name, sizeof name, "%s.base_kernel", module);
    TRY(vector(b, name, 3, shape, &ret->base));
    snprintf(name, sizeof name, "%s.kernel_projection", module);
    return linear(b, name, 2 * c->conv_taps * (c->hidden / c->conv_group), c->hidden, &ret->kernel);
}

static enum err layer(struct binding *b, uint32_t index, struct dflash_layer *l)
{
    const struct dflash_config *c = &b->drafter->config;
    uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const struct {
        const char *name;
        uint32_t out, in;
        struct dflash_linear *to;
    } linears[] = {
        {"self_attn.q_proj", q, c->hidden, &l->q},      {"self_attn.k_proj", kv, c->hidden, &l->k},
        {"self_attn.v_proj", kv, c->hidden, &l->v},     {"self_attn.o_proj", c->hidden, q, &l->o},
        {"mlp.gate_proj", c->ffn, c->hidden, &l->gate}, {"mlp.up_proj", c->ffn, c->hidden, &l->up},
        {"mlp.down_proj", c->hidden, c->ffn, &l->down},
    };
    const struct {
        const char *name;
        uint32_t n;
        float **to;
    } norms[] = {
        {"input_layernorm", c->hidden, &l->input_norm},
        {"post_attention_layernorm", c->hidden, &l->post_norm},
        {"self_attn.q_norm", c->head_dim, &l->q_norm},
        {"self_attn.k_norm", c->head_dim, &l->k_norm},
    };
    char name[NAME_BYTES];
    for (size_t i = 0; i < ARRAY_COUNT(linears); i++) {
        snprintf(name, sizeof name, "layers.%u.%s", index, linears[i].name);
        TRY(linear(b, name, linears[i].out, linears[i].in, linears[i].to));
    }
    for (size_t i = 0; i < ARRAY_COUNT(norms); i++) {
        snprintf(name, sizeof name, "layers.%u.%s", index, norms[i].name);
        TRY(norm(b, name, norms[i].n, norms[i].to));
    }
    if (!c->v2)
        return ERR_OK;
    snprintf(name, sizeof name, "layers.%u.attention_conv", index);
    TRY(conv(b, name, &l->attention_conv));
    snprintf(name, sizeof name, "layers.%u.mlp_conv", index);
    return conv(b, name, &l->mlp_conv);
}

/* ---- embedding and head ---- */

/* Own tensors where the file has them, else the target's. */
static enum err borrowed(struct binding *b, const char *module, const char *const *names,
                         uint32_t rows, struct dflash_linear *ret)
{
    struct dflash *d = b->drafter;
    char name[NAME_BYTES];
    spelling(d->tensors, module, name);
    if (anything_under(d->tensors, name))
        return bind_from(b, d->tensors, name, rows, d->config.hidden, true, ret);
    if (d->borrowed == NULL)
        TRY(safetensors_open_directory(d->options.target, &d->borrowed, b->detail));
    for (uint32_t i = 0; names[i] != NULL; i++)
        if (anything_under(d->borrowed, names[i]))
            return bind_from(b, d->borrowed, names[i], d->config.vocab_size, d->config.hidden,
                             false, ret);
    return err_set(b->detail, ERR_INVALID, "%s: neither the drafter nor the target has it", module);
}

/* d2t: target id = draft id + entry; t2d says the same as a mask and is only looked at. */
static enum err reduced_vocabulary(struct binding *b)
{
    struct dflash *d = b->drafter;
    const struct safetensors_tensor *to = safetensors_find(d->tensors, "d2t");
    const struct safetensors_tensor *mask = safetensors_find(d->tensors, "t2d");
    uint64_t shape[1] = {d->config.draft_vocab}, full[1] = {d->config.vocab_size};
    if (d->config.draft_vocab == 0)
        return ERR_OK;
    if (to == NULL || to->dtype != SAFETENSORS_I64)
        return err_set(b->detail, ERR_INVALID,
                       "tensor \"d2t\" is missing or not I64, but draft_vocab_size is smaller "
                       "than vocab_size");
    TRY(shape_check(to, 1, shape, b->detail));
    mark(b, to);
    if (mask != NULL) {
        TRY(shape_check(mask, 1, full, b->detail));
        mark(b, mask);
    }
    d->weights.head_ids = dflash_take(d, d->config.draft_vocab, sizeof(uint32_t));
    for (uint32_t i = 0; i < d->config.draft_vocab; i++) {
        int64_t offset;
        memcpy(&offset, to->data + i * sizeof offset, sizeof offset);
        int64_t id = offset > -(INT64_C(1) << 32) && offset < INT64_C(1) << 32 ? i + offset : -1;
        if (id < 0 || id >= (int64_t)d->config.vocab_size ||
            (i > 0 && (uint32_t)id <= d->weights.head_ids[i - 1]))
            return err_set(b->detail, ERR_INVALID,
                           "tensor \"d2t\": entry %u leads to no later id of the target", i);
        d->weights.head_ids[i] = (uint32_t)id;
    }
    return ERR_OK;
}

static enum err embedding(struct binding *b)
{
    static const char *const embed_names[] = {"model.language_model.embed_tokens",
                                              "model.embed_tokens", NULL};
    static const char *const head_names[] = {"lm_head", NULL};
    struct dflash *d = b->drafter;
    uint32_t rows = d->config.draft_vocab != 0 ? d->config.draft_vocab : d->config.vocab_size;
    TRY(borrowed(b, "embed_tokens", embed_names, d->config.vocab_size, &d->weights.embed));
    TRY(reduced_vocabulary(b));
    TRY(borrowed(b, "lm_head", head_names, rows, &d->weights.head));
    if (d->weights.head.out != rows)
        return err_set(b->detail, ERR_INVALID,
                       "draft_vocab_size: %u rows need a head of the drafter's own",
                       d->config.draft_vocab);
    if (d->weights.embed.stored.format == OP_FORMAT_EXL3)
        return err_set(b->detail, ERR_UNSUPPORTED, "embed_tokens: a table in EXL3 has no rows");
    return dflash_mask_read(d->options.directory, d->config.hidden, d, &d->weights.mask, b->detail);
}

/* Which ids have a token: the target's tokenizer says, whatever the tables' padding. */
static enum err tokens(struct binding *b)
{
    struct dflash *d = b->drafter;
    char *text = NULL;
    size_t bytes = 0;
    uint32_t assistant, count = 0;
    d->has_token = dflash_take(d, d->config.vocab_size, 1);
    TRY(read_file(d->options.target, "tokenizer.json", TOKENIZER_BYTES_MAX, &text, &bytes,
                  b->detail));
    enum err e =
        vocabulary_read(text, bytes, d->config.vocab_size, d->has_token, &assistant, b->detail);
    d->tokenizer_fp = vocabulary_fp(text, bytes);
    free(text);
    if (e != ERR_OK)
        return e;
    for (uint32_t i = 0; i < d->weights.head.out; i++)
        count += d->has_token[d->weights.head_ids != NULL ? d->weights.head_ids[i] : i];
    if (count < (d->config.v2 ? d->config.selector_top_k : 1))
        return err_set(b->detail, ERR_INVALID,
                       "tokenizer.json: %u tokens, fewer than selector_top_k", count);
    return ERR_OK;
}

/* ---- all ---- */

static const char *relative_of(const char *name)
{
    static const struct {
        const char *part, *who;
    } parts[] = {{"markov", " (a DSpark drafter)"},       {"gru", " (a Domino drafter)"},
                 {"projector", " (a Domino drafter)"},    {"tap_norm", " (a Laguna drafter)"},
                 {"context_gate", " (a Laguna drafter)"}, {"confidence", " (a DSpark drafter)"}};
    for (size_t i = 0; i < ARRAY_COUNT(parts); i++)
        if (strstr(name, parts[i].part) != NULL)
            return parts[i].who;
    return "";
}

static enum err nothing_left(const struct binding *b)
{
    const struct dflash *d = b->drafter;
    for (uint32_t i = 0; i < safetensors_count(d->tensors); i++) {
        const char *name = safetensors_at(d->tensors, i)->name;
        if (!b->used[i])
            return err_set(b->detail, ERR_INVALID,
                           "tensor \"%.200s\" is no part of a DFlash%s drafter%s", name,
                           d->config.v2 ? "2" : "", relative_of(name));
    }
    return ERR_OK;
}

/* fc's width tells how many taps there are where the config has no list. */
static enum err tap_count(struct binding *b)
{
    struct dflash *d = b->drafter;
    struct dflash_config *c = &d->config;
    if (c->tap_count != 0)
        return ERR_OK;
    char name[NAME_BYTES], full[NAME_BYTES + 8];
    spelling(d->tensors, "fc", name);
    snprintf(full, sizeof full, "%s.weight", name);
    const struct safetensors_tensor *t = safetensors_find(d->tensors, full);
    uint64_t count = t != NULL && t->dims == 2 ? t->shape[1] / c->hidden : 0;
    if (count == 0 || count > DFLASH_TAPS_MAX || t->shape[1] % c->hidden != 0)
        return err_set(b->detail, ERR_INVALID, "tensor \"%s\": its width is no 1 to %u taps", full,
                       DFLASH_TAPS_MAX);
    TRY(dflash_default_taps(c->target_layers, (uint32_t)count, c->taps, b->detail));
    c->tap_count = (uint32_t)count;
    return ERR_OK;
}

/* What context vectors are made with, and its fingerprint. */
static enum err context_part(struct binding *b)
{
    struct dflash *d = b->drafter;
    const struct dflash_config *c = &d->config;
    struct hash_xxh3 hash;
    hash_xxh3_init(&hash);
    hash_xxh3_add(&hash, &c->hidden, sizeof c->hidden);
    hash_xxh3_add(&hash, &c->rms_eps, sizeof c->rms_eps);
    hash_xxh3_add(&hash, c->taps, c->tap_count * sizeof *c->taps);
    b->hash = &hash;
    enum err e = linear(b, "fc", c->hidden, c->tap_count * c->hidden, &d->weights.fc);
    if (e == ERR_OK)
        e = norm(b, "hidden_norm", c->hidden, &d->weights.hidden_norm);
    b->hash = NULL;
    d->context_fp = hash_xxh3_end(&hash);
    return e;
}

static enum err bind_all(struct binding *b)
{
    struct dflash *d = b->drafter;
    const struct dflash_config *c = &d->config;
    struct dflash_weights *w = &d->weights;
    TRY(tap_count(b));
    TRY(context_part(b));
    if (d->options.context_only)
        return ERR_OK;
    TRY(norm(b, "norm", c->hidden, &w->norm));
    w->layers = dflash_take(d, c->layers, sizeof *w->layers);
    for (uint32_t l = 0; l < c->layers; l++)
        TRY(layer(b, l, &w->layers[l]));
    if (c->v2) {
        TRY(table(b, "candidate_selector.predecessor_codebook", c->vocab_size, c->selector_rank,
                  &w->predecessor));
        TRY(table(b, "candidate_selector.successor_codebook", c->vocab_size, c->selector_rank,
                  &w->successor));
        TRY(linear(b, "candidate_selector.hidden_projection", c->selector_rank, c->hidden,
                   &w->selector));
    }
    TRY(embedding(b));
    TRY(nothing_left(b));
    return tokens(b);
}

enum err dflash_load_tensors(struct dflash *d, struct err_detail *detail)
{
    struct binding b = {.drafter = d, .detail = detail};
    b.used = mem_take(safetensors_count(d->tensors) + 1);
    enum err e = bind_all(&b);
    mem_give(b.used);
    size_t at = 0;
    for (uint32_t k = 0; k < FORMAT_KIND_COUNT; k++)
        if (b.kinds[k] > 0 && at + 32 < sizeof d->formats)
            at += (size_t)snprintf(d->formats + at, sizeof d->formats - at, "%s%s (%u)",
                                   at > 0 ? ", " : "", format_kind_name((enum format_kind)k),
                                   b.kinds[k]);
    return e;
}
