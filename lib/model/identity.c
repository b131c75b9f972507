/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/identity.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
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
                                    const struct identity_texts *texts, identity_hashed_fn hashed,
                                    void *hashed_arg)
{
    uint32_t count = safetensors_count(set);
    struct hash128 *hashes = mem_take_array((size_t)count + 1, sizeof(*hashes));
    for (uint32_t i = 0; i < count; i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        hashes[i] = hash_xxh3_once(t->data, t->bytes);
        if (hashed != NULL)
            hashed(hashed_arg, t->bytes);
    }
    struct hash128 fp = identity_fingerprint_of(set, texts, hashes);
    mem_give(hashes);
    return fp;
}

struct hash128 identity_fingerprint_of(const struct safetensors *set,
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
