/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/quantize.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/op_exl3.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/format_scan.h"
#include "lib/model/tool/writer.h"

#define LAYERS_PREFIX "model.language_model.layers."

struct place {
    const char *rest;
    enum model_input which;
};

/* Linears of a layer whose input is observed. */
static const struct place places[] = {
    {"self_attn.q_proj", MODEL_INPUT_MIXER},
    {"self_attn.k_proj", MODEL_INPUT_MIXER},
    {"self_attn.v_proj", MODEL_INPUT_MIXER},
    {"self_attn.q_a_proj", MODEL_INPUT_MIXER},
    {"self_attn.kv_a_proj_with_mqa", MODEL_INPUT_MIXER},
    {"self_attn.q_b_proj", MODEL_INPUT_Q_B},
    {"self_attn.o_proj", MODEL_INPUT_O},
    {"self_attn.f_a_proj", MODEL_INPUT_MIXER},
    {"self_attn.g_a_proj", MODEL_INPUT_MIXER},
    {"self_attn.b_proj", MODEL_INPUT_MIXER},
    {"self_attn.indexer.wk", MODEL_INPUT_MIXER},
    {"self_attn.indexer.weights_proj", MODEL_INPUT_MIXER},
    {"self_attn.indexer.wq_b", MODEL_INPUT_Q_B},
    {"mlp.gate_proj", MODEL_INPUT_MLP},
    {"mlp.up_proj", MODEL_INPUT_MLP},
    {"mlp.down_proj", MODEL_INPUT_DOWN},
    {"mlp.shared_experts.gate_proj", MODEL_INPUT_MLP},
    {"mlp.shared_experts.up_proj", MODEL_INPUT_MLP},
    {"mlp.shared_experts.down_proj", MODEL_INPUT_DOWN},
};

static bool read_number(const char **text, uint32_t *ret)
{
    char *end = NULL;
    if (**text < '0' || **text > '9')
        return false;
    unsigned long value = strtoul(*text, &end, 10);
    if (*end != '.' || value >= UINT32_MAX)
        return false;
    *ret = (uint32_t)value;
    *text = end + 1;
    return true;
}

static bool expert_place(const char *rest, uint32_t *expert, enum model_input *which)
{
    static const char start[] = "mlp.experts.";
    if (strncmp(rest, start, sizeof(start) - 1) != 0)
        return false;
    rest += sizeof(start) - 1;
    if (!read_number(&rest, expert))
        return false;
    bool down = strcmp(rest, "down_proj") == 0;
    *which = down ? MODEL_INPUT_EXPERT_DOWN : MODEL_INPUT_EXPERT;
    return down || strcmp(rest, "gate_proj") == 0 || strcmp(rest, "up_proj") == 0;
}

/* Linears that no format serves: the router decides between experts by small differences, kv_b is
 * read by rows and by columns, so that a loader has to widen whatever it is, and the MTP layer's
 * own tables are those of the model. */
static bool stays(const char *rest)
{
    return strcmp(rest, "mlp.gate") == 0 || strcmp(rest, "self_attn.kv_b_proj") == 0 ||
           strcmp(rest, "embed_tokens") == 0 || strcmp(rest, "shared_head.head") == 0;
}

/* Whether the linear is to be quantised, and what it reads. */
static bool is_wanted(const char *prefix, bool all, struct quantize_linear *l)
{
    const char *rest = prefix + sizeof(LAYERS_PREFIX) - 1;
    l->which = MODEL_INPUT_COUNT;
    if (all && strcmp(prefix, "lm_head") == 0)
        return true;
    if (strncmp(prefix, LAYERS_PREFIX, sizeof(LAYERS_PREFIX) - 1) != 0 ||
        !read_number(&rest, &l->layer))
        return false;
    if (expert_place(rest, &l->expert, &l->which))
        return true;
    for (size_t i = 0; i < ARRAY_COUNT(places); i++)
        if (strcmp(rest, places[i].rest) == 0)
            l->which = places[i].which;
    return all && !stays(rest);
}

static uint32_t group_of(enum quantize_format format)
{
    return format == QUANTIZE_NVFP4 ? 16 : format == QUANTIZE_MXFP8 ? 32 : 1;
}

/* Experts are padded for EXL3, or refused.  Of the others one stays that is no whole number of
 * units: padding can make it larger, and no two ranks could share it. */
static bool can_hold(const struct op_quantised *w, enum quantize_format format)
{
    if (format == QUANTIZE_EXL3)
        return w->in % OP_EXL3_BLOCK == 0 && w->out % OP_EXL3_BLOCK == 0;
    return w->in % group_of(format) == 0;
}

static void add_part(struct quantize_linear *l, const char *suffix, enum safetensors_dtype dtype,
                     uint32_t dims, uint64_t a, uint64_t b, uint64_t c)
{
    CHECK(l->part_count < QUANTIZE_PARTS_MAX);
    struct quantize_part *p = &l->parts[l->part_count++];
    *p = (struct quantize_part){suffix, dtype, dims, {a, b, c}, 0, safetensors_dtype_bytes(dtype)};
    for (uint32_t d = 0; d < dims; d++)
        p->bytes *= p->shape[d];
    l->bytes += p->bytes;
}

enum err quantize_parts(struct quantize_linear *l, const struct quantize_options *o,
                        struct err_detail *detail)
{
    uint64_t in = l->source.in, out = l->source.out;
    uint64_t in_p = op_exl3_padded(l->source.in), out_p = op_exl3_padded(l->source.out);
    uint32_t group = group_of(o->format);
    if (in % group != 0)
        return err_set(detail, ERR_UNSUPPORTED, "%s: width %llu is no multiple of %u", l->prefix,
                       (unsigned long long)in, group);
    switch (o->format) {
    case QUANTIZE_EXL3:
        add_part(l, "trellis", SAFETENSORS_I16, 3, in_p / OP_EXL3_TILE, out_p / OP_EXL3_TILE,
                 16ull * o->bits);
        add_part(l, "suh", SAFETENSORS_F16, 1, in_p, 0, 0);
        add_part(l, "svh", SAFETENSORS_F16, 1, out_p, 0, 0);
        if (o->codebook != OP_CODEBOOK_3INST)
            add_part(l, format_codebook_name(o->codebook), SAFETENSORS_I32, 0, 0, 0, 0);
        break;
    case QUANTIZE_NVFP4:
        add_part(l, "weight", SAFETENSORS_U8, 2, out, in / 2, 0);
        add_part(l, "weight_scale", SAFETENSORS_F8_E4M3, 2, out, in / 16, 0);
        add_part(l, "weight_scale_2", SAFETENSORS_F32, 0, 0, 0, 0);
        break;
    case QUANTIZE_MXFP8:
        add_part(l, "weight", SAFETENSORS_F8_E4M3, 2, out, in, 0);
        add_part(l, "weight_scale", SAFETENSORS_U8, 2, out, in / 32, 0);
        break;
    case QUANTIZE_FP8:
        add_part(l, "weight", SAFETENSORS_F8_E4M3, 2, out, in, 0);
        add_part(l, "weight_scale_inv", SAFETENSORS_F32, 2, (out + 127) / 128, (in + 127) / 128, 0);
        break;
    }
    return ERR_OK;
}

struct making {
    const struct safetensors *set;
    const struct quantize_options *options;
    struct quantize_plan *plan;
    uint32_t capacity;
    enum err err;
    struct err_detail *detail;
};

static bool take_linear(void *arg, const struct format_linear *f)
{
    struct making *m = arg;
    struct quantize_plan *p = m->plan;
    struct quantize_linear l = {.layer = QUANTIZE_NO_LAYER};
    if (!is_wanted(f->prefix, m->options->all, &l))
        return true;
    if (f->err == ERR_OK && !format_is_expert(f->prefix) &&
        !can_hold(&f->weight, m->options->format)) {
        printf("%-56s stays: [%u, %u] in no whole units\n", f->prefix, f->out, f->in);
        return true;
    }
    if (f->err != ERR_OK)
        m->err = err_set(m->detail, f->err, "%s", f->detail->text);
    else if (f->info.kind == FORMAT_EXL3 || f->info.kind == FORMAT_EXL3_RANKED)
        m->err = err_set(m->detail, ERR_UNSUPPORTED, "%s is EXL3 already", f->prefix);
    else if (f->info.has_bias)
        m->err = err_set(m->detail, ERR_UNSUPPORTED, "%s has a bias", f->prefix);
    if (m->err != ERR_OK)
        return false;
    l.prefix = arena_strndup(&p->arena, f->prefix, strlen(f->prefix));
    l.source = f->weight;
    CHECK(l.prefix != NULL);
    m->err = quantize_parts(&l, m->options, m->detail);
    if (m->err != ERR_OK)
        return false;
    if (p->count == m->capacity) {
        m->capacity = m->capacity == 0 ? 1024 : m->capacity * 2;
        p->linears = realloc(p->linears, m->capacity * sizeof(l));
        CHECK(p->linears != NULL);
    }
    p->linears[p->count++] = l;
    p->weights += (uint64_t)l.source.in * l.source.out;
    return true;
}

/* By layer, as the calibration runs; the name decides within one. */
static int by_layer(const void *a, const void *b)
{
    const struct quantize_linear *x = a, *y = b;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    if (x->which != y->which)
        return x->which < y->which ? -1 : 1;
    if (x->expert != y->expert)
        return x->expert < y->expert ? -1 : 1;
    return strcmp(x->prefix, y->prefix);
}

static int by_prefix(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Every tensor under no chosen prefix stays as it is. */
static void take_copies(struct quantize_plan *p, const struct safetensors *set)
{
    const char **prefixes = mem_take_array(p->count + 1u, sizeof(*prefixes));
    for (uint32_t i = 0; i < p->count; i++)
        prefixes[i] = p->linears[i].prefix;
    qsort(prefixes, p->count, sizeof(*prefixes), by_prefix);
    p->copies = mem_take_array(safetensors_count(set) + 1u, sizeof(uint32_t));
    p->copied = mem_take_array(safetensors_count(set) + 1u, sizeof(uint32_t));
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        char prefix[FORMAT_PREFIX_BYTES];
        const char *name = safetensors_at(set, i)->name, *dot = strrchr(name, '.'), *key = prefix;
        size_t bytes = dot != NULL ? (size_t)(dot - name) : 0;
        bool taken = bytes > 0 && bytes < sizeof(prefix);
        if (taken) {
            memcpy(prefix, name, bytes);
            prefix[bytes] = '\0';
            taken = bsearch(&key, prefixes, p->count, sizeof(*prefixes), by_prefix) != NULL;
        }
        if (!taken)
            p->copies[p->copy_count++] = i;
    }
    mem_give(prefixes);
}

static void add_to_writer(struct quantize_plan *p, const struct safetensors *set, struct writer *w)
{
    char name[FORMAT_PREFIX_BYTES + 64];
    for (uint32_t i = 0; i < p->copy_count; i++) {
        const struct safetensors_tensor *t = safetensors_at(set, p->copies[i]);
        p->copied[i] = writer_add(w, t->name, t->dtype, t->dims, t->shape);
    }
    for (uint32_t i = 0; i < p->count; i++)
        for (uint32_t k = 0; k < p->linears[i].part_count; k++) {
            struct quantize_part *part = &p->linears[i].parts[k];
            snprintf(name, sizeof(name), "%s.%s", p->linears[i].prefix, part->suffix);
            part->tensor = writer_add(w, name, part->dtype, part->dims, part->shape);
        }
}

enum err quantize_plan_make(const struct safetensors *set, const struct quantize_options *options,
                            struct writer *writer, struct quantize_plan *ret_plan,
                            struct err_detail *detail)
{
    struct quantize_plan p = {.count = 0};
    struct making m = {.set = set, .options = options, .plan = &p, .detail = detail};
    for (uint32_t i = 0; i < safetensors_count(set); i++)
        if (safetensors_at(set, i)->dims > WRITER_DIMS_MAX)
            return err_set(detail, ERR_UNSUPPORTED, "tensor \"%.200s\": more than %u dimensions",
                           safetensors_at(set, i)->name, WRITER_DIMS_MAX);
    arena_init(&p.arena, 64 << 10, 0);
    format_scan(set, NULL, take_linear, &m);
    if (m.err == ERR_OK && p.count == 0)
        m.err = err_set(detail, ERR_INVALID, "%s: no linear to quantise", options->in);
    if (m.err != ERR_OK) {
        quantize_plan_fini(&p);
        return m.err;
    }
    qsort(p.linears, p.count, sizeof(*p.linears), by_layer);
    take_copies(&p, set);
    add_to_writer(&p, set, writer);
    *ret_plan = p;
    return ERR_OK;
}

void quantize_plan_fini(struct quantize_plan *p)
{
    free(p->linears);
    mem_give(p->copies);
    mem_give(p->copied);
    arena_fini(&p->arena);
    memset(p, 0, sizeof(*p));
}
