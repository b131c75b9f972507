/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/identity.h - what a model is, from its loaded bytes and never from a path.
 *
 * Start-up only.  The fingerprint is xxh3-128 over, for every tensor in name order, name, dtype,
 * dims, shape (u64 LE) and the xxh3-128 of its bytes; then config.json and tokenizer.json. */
#ifndef LIB_MODEL_IDENTITY_H
#define LIB_MODEL_IDENTITY_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/hash.h"

struct safetensors;

struct identity_texts {
    const char *config;
    size_t config_bytes;
    const char *tokenizer; /* NULL if there is none */
    size_t tokenizer_bytes;
    const char *chat_template; /* chat_template.jinja; NULL if there is none */
    size_t chat_template_bytes;
};

/* hashed may be NULL; it is told the bytes of every tensor. */
typedef void (*identity_hashed_fn)(void *arg, uint64_t bytes);
struct hash128 identity_fingerprint(const struct safetensors *set,
                                    const struct identity_texts *texts, identity_hashed_fn hashed,
                                    void *hashed_arg);
/* The same from hashes [safetensors_count] of the tensors' bytes. */
struct hash128 identity_fingerprint_of(const struct safetensors *set,
                                       const struct identity_texts *texts,
                                       const struct hash128 *hashes);

#endif
