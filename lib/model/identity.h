/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/identity.h - what a model is, from its loaded bytes and never from a path.
 *
 * Start-up only.  The fingerprint is xxh3-128 over, for every tensor in name order, name, dtype,
 * dims, shape (u64 LE) and the xxh3-128 of its bytes; then config.json and tokenizer.json. */
#ifndef LIB_MODEL_IDENTITY_H
#define LIB_MODEL_IDENTITY_H

#include <stddef.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

struct format_hint;
struct safetensors;

struct identity_texts {
    const char *config;
    size_t config_bytes;
    const char *tokenizer; /* NULL if there is none */
    size_t tokenizer_bytes;
    const char *chat_template; /* chat_template.jinja; NULL if there is none */
    size_t chat_template_bytes;
};

/* hashes [safetensors_count]: of the tensors' bytes, as lib/model/load_pass.h makes them. */
struct hash128 identity_fingerprint(const struct safetensors *set,
                                    const struct identity_texts *texts,
                                    const struct hash128 *hashes);

/* "exl3-mcg 4.00 bpw (routed experts) + bf16 (rest), 5.3 M parameters": the formats of the linears,
 * the most common first; without routed experts, or where all is alike, without the words in
 * brackets.  Padding counts as parameters. */
void identity_quantization(const struct safetensors *set, char *ret_text, size_t bytes);

/* What config.json and, if there is one, hf_quant_config.json of a directory announce.  No file
 * announces nothing, nor does a text that is not JSON: whoever needs the config parses it. */
MUST_USE enum err identity_hint(const char *directory, struct format_hint *ret_hint,
                                struct err_detail *detail);

#endif
