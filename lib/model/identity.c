/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/identity.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/model/safetensors.h"

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
    return hash_xxh3_end(&h);
}

static void add_format(char *text, size_t bytes, enum safetensors_dtype dtype)
{
    size_t at = strlen(text);
    const char *name = safetensors_dtype_name(dtype);
    if (at > 0)
        at += (size_t)snprintf(text + at, bytes - at, " + ");
    for (; *name != 0 && at + 1 < bytes; name++)
        text[at++] = (char)tolower((unsigned char)*name);
    text[at] = 0;
}

void identity_quantization(const struct safetensors *set, char *ret_text, size_t bytes)
{
    uint64_t matrix[SAFETENSORS_DTYPE_COUNT] = {0}, all = 0;
    CHECK(bytes >= 64);
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        all += t->elements;
        if (t->dims >= 2)
            matrix[t->dtype] += t->elements;
    }
    ret_text[0] = 0;
    for (;;) {
        uint32_t best = 0;
        for (uint32_t d = 1; d < SAFETENSORS_DTYPE_COUNT; d++)
            best = matrix[d] > matrix[best] ? d : best;
        if (matrix[best] == 0 || strlen(ret_text) + 40 > bytes)
            break;
        add_format(ret_text, bytes, (enum safetensors_dtype)best);
        matrix[best] = 0;
    }
    size_t at = strlen(ret_text);
    double count = (double)all;
    if (count < 1e9)
        snprintf(ret_text + at, bytes - at, ", %.1f M parameters", count / 1e6);
    else
        snprintf(ret_text + at, bytes - at, ", %.1f B parameters", count / 1e9);
}
