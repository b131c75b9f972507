/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/synth.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kernels/op_number.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/model/format_scan.h"
#include "lib/model/tool/args.h"
#include "lib/model/tool/quantize.h"
#include "lib/model/tool/tool.h"
#include "lib/model/tool/writer.h"
#include "lib/model/weights.h"
#include "lib/model/weights_names.h"

#define CHUNK_BYTES ((uint64_t)4 << 20)
#define SPREAD_E4M3 1.3e2 /* deviation of a random E4M3 code's value */
#define SPREAD_E2M1 2.9
#define SPREAD_EXL3 1.244

/* What a tensor is filled with. */
enum fill {
    FILL_BITS,   /* any bits */
    FILL_E4M3,   /* any but the NaN codes */
    FILL_BYTE,   /* one byte, over and over */
    FILL_SIGNS,  /* F16: plus or minus value */
    FILL_WORD,   /* four bytes, once */
    FILL_F32,    /* value, over and over */
    FILL_BF16,   /* uniform with the deviation `value` */
    FILL_BF16_1, /* ones */
};

struct item {
    uint32_t tensor;
    enum fill fill;
    double value;
    uint32_t word;
};

struct synth {
    struct quantize_options options;
    bool plain; /* bf16 experts */
    uint64_t seed;
    struct synth_shape shape;
    struct writer *writer;
    struct item *items;
    uint32_t count, capacity;
    enum err err;
    struct err_detail *detail;
    struct tool_eta eta;
    uint64_t done;
};

static void add_item(struct synth *s, uint32_t tensor, enum fill fill, double value, uint32_t word)
{
    CHECK(s->count < s->capacity);
    s->items[s->count++] = (struct item){tensor, fill, value, word};
}

/* How the parts of a linear are filled so that its weights have the deviation `spread`. */
static void add_quantised(struct synth *s, const char *prefix, uint32_t out, uint32_t in)
{
    struct quantize_linear l = {.prefix = prefix};
    double spread = 1 / sqrt((double)in);
    char name[256];
    l.source.in = in;
    l.source.out = out;
    s->err = quantize_parts(&l, &s->options, s->detail);
    for (uint32_t k = 0; k < l.part_count && s->err == ERR_OK; k++) {
        const struct quantize_part *p = &l.parts[k];
        enum fill fill = FILL_BITS;
        double value = 0;
        uint32_t word = 0;
        if (strcmp(p->suffix, "suh") == 0 || strcmp(p->suffix, "svh") == 0) {
            fill = FILL_SIGNS;
            value = p->suffix[1] == 'u' ? spread / SPREAD_EXL3 : 1;
        } else if (p->dtype == SAFETENSORS_I32) {
            fill = FILL_WORD;
            word = s->options.codebook == OP_CODEBOOK_MCG ? 0xCBAC1FEDu : 0x83DCD12Du;
        } else if (p->dtype == SAFETENSORS_F32) {
            fill = FILL_F32;
            value = spread / (p->dims == 0 ? SPREAD_E2M1 : SPREAD_E4M3);
        } else if (p->dtype == SAFETENSORS_F8_E4M3) {
            fill = k == 0 ? FILL_E4M3 : FILL_BYTE;
            word = 0x38; /* 1 */
        } else if (k > 0) {
            fill = FILL_BYTE;
            word = (uint32_t)(127 + lround(log2(spread / SPREAD_E4M3)));
        }
        snprintf(name, sizeof(name), "%s.%s", prefix, p->suffix);
        add_item(s, writer_add(s->writer, name, p->dtype, p->dims, p->shape), fill, value, word);
    }
}

static bool ends_with(const char *name, const char *end)
{
    size_t bytes = strlen(name), tail = strlen(end);
    return bytes >= tail && strcmp(name + bytes - tail, end) == 0;
}

static void add_one(void *arg, const struct weights_want *want)
{
    struct synth *s = arg;
    const char *name = want->name;
    if (s->err != ERR_OK)
        return;
    if (!s->plain && format_is_expert(name)) {
        char prefix[192];
        memcpy(prefix, name, strlen(name) + 1);
        prefix[strlen(name) - strlen(".weight")] = '\0';
        add_quantised(s, prefix, (uint32_t)want->shape[0], (uint32_t)want->shape[1]);
    } else if (want->matrix != NULL || want->dims > 1) {
        uint32_t t = writer_add(s->writer, name, SAFETENSORS_BF16, want->dims, want->shape);
        double in = (double)want->shape[want->dims - 1];
        add_item(s, t, FILL_BF16, (strstr(name, "embed") != NULL ? 1 : 0.5) / sqrt(in), 0);
    } else if (strstr(name, "norm.weight") != NULL) {
        uint32_t t = writer_add(s->writer, name, SAFETENSORS_BF16, want->dims, want->shape);
        add_item(s, t, FILL_BF16_1, 0, 0);
    } else {
        uint32_t t = writer_add(s->writer, name, SAFETENSORS_F32, want->dims, want->shape);
        add_item(s, t, FILL_F32, ends_with(name, "_scale") ? 1 : 0, 0);
    }
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Words [first, first + bytes / 8) of a tensor: the same whatever the pieces. */
static void fill_piece(const struct item *item, uint64_t seed, uint64_t first, uint64_t bytes,
                       uint8_t *out)
{
    uint16_t plus = op_f16_from_f32((float)item->value);
    float value = (float)item->value;
    for (uint64_t at = 0; at < bytes; at += 8) {
        uint64_t bits = mix(seed + first + at / 8), word = bits;
        uint8_t *b = (uint8_t *)&word;
        uint16_t half[4];
        switch (item->fill) {
        case FILL_BITS:
            break;
        case FILL_E4M3:
            for (uint32_t i = 0; i < 8; i++)
                b[i] = (b[i] & OP_E4M3_NAN_MASK) == OP_E4M3_NAN_MASK ? 0 : b[i];
            break;
        case FILL_BYTE:
            memset(b, (int)item->word, 8);
            break;
        case FILL_SIGNS:
            for (uint32_t i = 0; i < 4; i++)
                half[i] = (uint16_t)(plus | (bits >> i & 1u) << 15);
            memcpy(b, half, 8);
            break;
        case FILL_WORD:
            memcpy(b, &item->word, 4);
            break;
        case FILL_F32:
            memcpy(b, &value, 4);
            memcpy(b + 4, &value, 4);
            break;
        case FILL_BF16:
            for (uint32_t i = 0; i < 4; i++)
                half[i] = op_bf16_from_f32((
                    float)(((double)(bits >> (16 * i) & 0xffff) / 32768 - 1) * item->value * 1.73));
            memcpy(b, half, 8);
            break;
        case FILL_BF16_1:
            for (uint32_t i = 0; i < 4; i++)
                half[i] = 0x3f80;
            memcpy(b, half, 8);
            break;
        }
        memcpy(out + at, b, bytes - at < 8 ? bytes - at : 8);
    }
}

static enum err fill_all(struct synth *s)
{
    uint8_t *piece = mem_take(CHUNK_BYTES);
    enum err e = ERR_OK;
    tool_eta_start(&s->eta, "writing", writer_total(s->writer), "bytes");
    for (uint32_t i = 0; i < s->count && e == ERR_OK; i++) {
        uint64_t total = writer_bytes(s->writer, s->items[i].tensor);
        uint64_t seed = mix(mix(s->seed) + i);
        for (uint64_t at = 0; at < total && e == ERR_OK; at += CHUNK_BYTES) {
            uint64_t bytes = total - at < CHUNK_BYTES ? total - at : CHUNK_BYTES;
            fill_piece(&s->items[i], seed, at / 8, bytes, piece);
            e = writer_put(s->writer, s->items[i].tensor, at, piece, bytes, s->detail);
            s->done += bytes;
            tool_eta_show(&s->eta, s->done);
        }
    }
    tool_eta_clear(&s->eta);
    mem_give(piece);
    return e;
}

static enum err write_config(const struct synth *s, const char *directory)
{
    struct str out;
    str_init(&out, 0);
    synth_config_write(&s->shape.config, &out);
    if (!s->plain) {
        str_add_text(&out, ",\n \"quantization_config\": ");
        quantize_config_entry(&out, &s->options, 0);
    }
    str_add_text(&out, "\n}\n");
    enum err e = writer_file(directory, "config.json", out.text, out.bytes, s->detail);
    str_fini(&out);
    return e;
}

static enum err write_model(struct synth *s, const char *directory)
{
    const struct model_config *c = &s->shape.config;
    char path[4096];
    snprintf(path, sizeof(path), "%s/config.json", directory);
    if (access(path, F_OK) == 0)
        return err_set(s->detail, ERR_INVALID, "%s: exists already", path);
    TRY(writer_create(directory, s->options.shard_bytes, &s->writer, s->detail));
    s->capacity = 64 + c->layers * (64 + 12 * c->experts);
    s->items = mem_take_array(s->capacity, sizeof(*s->items));
    struct weights *w = weights_create(c);
    weights_each(w, c, add_one, s);
    weights_destroy(&w);
    TRY(s->err);
    TRY(writer_open(s->writer, false, s->detail));
    TRY(fill_all(s));
    TRY(writer_finish(s->writer, s->detail));
    TRY(write_config(s, directory));
    printf("%s: %.1f M parameters, %.1f MB; %u layers, hidden %u, %u experts, %u per token\n",
           directory, (double)s->shape.parameters / 1e6, (double)writer_total(s->writer) / 1e6,
           c->layers, c->hidden, c->experts, c->experts_per_token);
    printf("a token reads %.1f M expert weights and %.1f M others, ratio %.2f\n",
           s->shape.active_experts / 1e6, s->shape.others / 1e6,
           s->shape.active_experts / s->shape.others);
    return ERR_OK;
}

/* "1.5B", "20M", "300000". */
static enum err read_params(const char *text, uint64_t *ret, struct err_detail *detail)
{
    size_t bytes = text != NULL ? strlen(text) : 0;
    double value = 0, unit = 1;
    if (bytes > 0 && (text[bytes - 1] == 'B' || text[bytes - 1] == 'M')) {
        unit = text[bytes - 1] == 'B' ? 1e9 : 1e6;
        bytes--;
    }
    if (bytes == 0 || !text_to_f64(text, bytes, &value) || !(value * unit >= 1e5) ||
        !(value * unit <= 1e13))
        return err_set(detail, ERR_INVALID, "--params: a number such as 1.5B or 20M");
    *ret = (uint64_t)(value * unit);
    return ERR_OK;
}

static enum err synth(int argc, char **argv, struct synth *s, struct err_detail *detail)
{
    const char *directory = NULL, *params = NULL, *format = "exl3", *bits = NULL, *codebook = NULL;
    const char *seed = NULL, *shard = NULL;
    const struct tool_option table[] = {{"params", &params, NULL}, {"format", &format, NULL},
                                        {"bits", &bits, NULL},     {"codebook", &codebook, NULL},
                                        {"seed", &seed, NULL},     {"shard-bytes", &shard, NULL}};
    uint64_t parameters = 0;
    TRY(tool_args(argc, argv, table, ARRAY_COUNT(table), &directory, detail));
    TRY(read_params(params, &parameters, detail));
    TRY(tool_u64("seed", seed, 0, UINT32_MAX, &s->seed, detail));
    TRY(tool_u64("shard-bytes", shard, 1, UINT64_MAX / 2, &s->options.shard_bytes, detail));
    s->plain = strcmp(format, "bf16") == 0;
    if (!s->plain)
        TRY(quantize_read_format(format, bits, codebook, &s->options, detail));
    TRY(synth_shape_find(parameters, &s->shape, detail));
    return write_model(s, directory);
}

int tool_synth(int argc, char **argv)
{
    struct err_detail detail = {{0}};
    struct synth s = {.detail = &detail};
    enum err e = synth(argc, argv, &s, &detail);
    writer_destroy(&s.writer);
    mem_give(s.items);
    return e == ERR_OK ? 0 : tool_fail(&detail);
}
