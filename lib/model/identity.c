/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/identity.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/model/format_scan.h"
#include "lib/model/read_file.h"

#define CONFIG_BYTES_MAX ((size_t)256 << 20)

static void add_u64(struct hash_xxh3 *h, uint64_t value)
{
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
    hash_xxh3_add(h, bytes, sizeof(bytes));
}

static void add_text(struct hash_xxh3 *h, const char *text, size_t bytes)
{
    add_u64(h, bytes);
    hash_xxh3_add(h, text, bytes);
}

struct hash128 identity_fingerprint(const struct safetensors *set,
                                    const struct identity_texts *texts,
                                    const struct hash128 *hashes)
{
    struct hash_xxh3 h;
    hash_xxh3_init(&h);
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        const char *dtype = safetensors_dtype_name(t->dtype);
        add_text(&h, t->name, strlen(t->name));
        add_text(&h, dtype, strlen(dtype));
        add_u64(&h, t->dims);
        for (uint32_t d = 0; d < t->dims; d++)
            add_u64(&h, t->shape[d]);
        hash_xxh3_add(&h, hashes[i].bytes, sizeof(hashes[i].bytes));
    }
    add_text(&h, texts->config, texts->config_bytes);
    add_text(&h, texts->tokenizer != NULL ? texts->tokenizer : "", texts->tokenizer_bytes);
    if (texts->chat_template != NULL)
        add_text(&h, texts->chat_template, texts->chat_template_bytes);
    return hash_xxh3_end(&h);
}

/* ---- what the linears are ---- */

#define KINDS_MAX (FORMAT_KIND_COUNT + 2) /* EXL3 once for each codebook */

enum part { PART_EXPERTS, PART_REST, PART_COUNT };

struct share {
    double weights, bits; /* bits: weighted sum */
    struct format_info info;
};

struct shares {
    struct share of[PART_COUNT][KINDS_MAX];
    double linear_weights;
};

static uint32_t kind_index(const struct format_info *info)
{
    bool exl3 = info->kind == FORMAT_EXL3;
    return exl3 && info->codebook != OP_CODEBOOK_3INST
               ? FORMAT_KIND_COUNT + (uint32_t)info->codebook - 1
               : (uint32_t)info->kind;
}

static bool add_linear(void *arg, const struct format_linear *l)
{
    struct shares *s = arg;
    if (l->err != ERR_OK)
        return true; /* the loader says so; here it only counts what can be counted */
    struct share *share =
        &s->of[format_is_expert(l->prefix) ? PART_EXPERTS : PART_REST][kind_index(&l->info)];
    double weights = (double)l->in * l->out;
    share->info = l->info;
    share->weights += weights;
    share->bits += weights * format_bits(&l->info);
    s->linear_weights += weights;
    return true;
}

static void add_text_to(char *text, size_t bytes, const char *more)
{
    size_t at = strlen(text);
    if (at + strlen(more) < bytes)
        memcpy(text + at, more, strlen(more) + 1);
}

static void share_title(const struct share *share, char text[64])
{
    if (share->info.kind == FORMAT_EXL3)
        snprintf(text, 64, "exl3-%s %.2f bpw", format_codebook_name(share->info.codebook),
                 share->bits / share->weights);
    else
        snprintf(text, 64, "%s", format_kind_name(share->info.kind));
}

/* "nvfp4_modelopt + bf16", the most weights first; "" where there is nothing. */
static void part_title(const struct share shares[KINDS_MAX], char *ret_text, size_t bytes)
{
    bool used[KINDS_MAX] = {false};
    ret_text[0] = '\0';
    for (;;) {
        uint32_t best = KINDS_MAX;
        for (uint32_t k = 0; k < KINDS_MAX; k++)
            if (!used[k] && shares[k].weights > 0 &&
                (best == KINDS_MAX || shares[k].weights > shares[best].weights))
                best = k;
        if (best == KINDS_MAX)
            return;
        char title[64];
        share_title(&shares[best], title);
        used[best] = true;
        add_text_to(ret_text, bytes, ret_text[0] != '\0' ? " + " : "");
        add_text_to(ret_text, bytes, title);
    }
}

/* Elements that belong to no linear: norms, convolutions, biases of the router. */
static double loose_elements(const struct safetensors *set)
{
    double count = 0;
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        if (!format_is_part(t))
            count += (double)t->elements;
    }
    return count;
}

void identity_quantization(const struct safetensors *set, char *ret_text, size_t bytes)
{
    struct shares s;
    char experts[128], rest[128], count[48];
    CHECK(bytes >= 64);
    memset(&s, 0, sizeof(s));
    format_scan(set, NULL, add_linear, &s);
    part_title(s.of[PART_EXPERTS], experts, sizeof(experts));
    part_title(s.of[PART_REST], rest, sizeof(rest));
    ret_text[0] = '\0';
    if (experts[0] == '\0' || rest[0] == '\0' || strcmp(experts, rest) == 0) {
        add_text_to(ret_text, bytes, experts[0] != '\0' ? experts : rest);
    } else {
        add_text_to(ret_text, bytes, experts);
        add_text_to(ret_text, bytes, " (routed experts) + ");
        add_text_to(ret_text, bytes, rest);
        add_text_to(ret_text, bytes, " (rest)");
    }
    double parameters = s.linear_weights + loose_elements(set);
    snprintf(count, sizeof(count), ", %.1f %c parameters",
             parameters < 1e9 ? parameters / 1e6 : parameters / 1e9, parameters < 1e9 ? 'M' : 'B');
    add_text_to(ret_text, bytes, count);
}

/* ---- what others say ---- */

enum err identity_hint(const char *directory, struct format_hint *ret_hint,
                       struct err_detail *detail)
{
    static const char *const names[] = {"config.json", "hf_quant_config.json"};
    char *texts[2] = {NULL, NULL};
    struct json *roots[2] = {NULL, NULL};
    struct arena nodes;
    enum err e = ERR_OK;
    arena_init(&nodes, 64 << 10, 64u << 20);
    for (int i = 0; i < 2 && e == ERR_OK; i++) {
        size_t bytes = 0;
        struct json_error where;
        e = read_file(directory, names[i], CONFIG_BYTES_MAX, &texts[i], &bytes, detail);
        if (e == ERR_OK && json_parse(&nodes, NULL, texts[i], bytes, &roots[i], &where) != ERR_OK)
            roots[i] = NULL;
        e = e == ERR_NOT_FOUND ? ERR_OK : e;
    }
    if (e == ERR_OK)
        format_hint_read(roots[0], roots[1], ret_hint);
    arena_fini(&nodes);
    free(texts[0]);
    free(texts[1]);
    return e;
}
