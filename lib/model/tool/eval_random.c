/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/eval.h"

#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/model/config.h"
#include "lib/model/model.h"
#include "lib/model/safetensors.h"
#include "lib/model/tool/session.h"
#include "lib/model/tool/tool.h"

#define BOUND 1e-4 /* golden/model-random: logits and streams */

/* A case is every C for which the tensor C.ids exists. */
struct random_case {
    const struct safetensors *set;
    const struct model_config *config;
    char name[256];
    uint32_t tokens;
    uint32_t row_first; /* of the slice in flight */
    uint32_t row_count;
    struct eval_verdict verdict;
    enum err err;
    struct err_detail *detail;
};

static const struct safetensors_tensor *layer_tensor(struct random_case *k, uint32_t layer,
                                                     const char *what, const char *dtype,
                                                     uint64_t columns)
{
    char name[400];
    const struct safetensors_tensor *t = NULL;
    snprintf(name, sizeof(name), "%s.layer%u.%s", k->name, layer, what);
    enum err e = eval_find(k->set, name, dtype, k->tokens, columns, &t, k->detail);
    if (e != ERR_OK)
        k->err = e;
    return e == ERR_OK ? t : NULL;
}

static void probe(void *arg, uint32_t layer, const float *mean_stream, const int32_t *experts,
                  const uint8_t *attend, size_t attend_stride)
{
    struct random_case *k = arg;
    uint64_t hidden = k->config->hidden, top_k = k->config->experts_per_token;
    const struct safetensors_tensor *t = layer_tensor(k, layer, "mean_stream", "F32", hidden);
    if (t != NULL)
        eval_compare(mean_stream, t, k->row_first * hidden, k->row_count * hidden,
                     &k->verdict.max_abs_stream);
    t = experts != NULL ? layer_tensor(k, layer, "experts", "I32", top_k) : NULL;
    for (uint64_t i = 0; t != NULL && i < k->row_count * top_k; i++)
        if (experts[i] != eval_i32(t, k->row_first * top_k + i))
            k->verdict.sets_equal = false;
    t = attend != NULL ? layer_tensor(k, layer, "attend", "U8", k->tokens) : NULL;
    for (uint32_t r = 0; t != NULL && r < k->row_count; r++) {
        const uint8_t *want = t->data + (uint64_t)(k->row_first + r) * k->tokens;
        for (uint32_t p = 0; p < k->tokens; p++) {
            uint8_t have = (attend[r * attend_stride + p / 8] >> (p % 8)) & 1;
            if (have != (want[p] != 0))
                k->verdict.sets_equal = false;
        }
    }
}

static enum err run_case(struct model *m, struct random_case *k, const uint32_t *ids,
                         const struct eval_options *options)
{
    char name[400];
    const struct safetensors_tensor *logits = NULL;
    uint32_t vocab = k->config->vocab_size;
    snprintf(name, sizeof(name), "%s.logits", k->name);
    TRY(eval_find(k->set, name, "F32", k->tokens, vocab, &logits, k->detail));
    uint32_t rows = options->slice_rows > 0 ? options->slice_rows : 512;
    rows = rows < k->tokens ? rows : k->tokens;
    struct session_options session = {k->tokens, rows, options->slice_layers, rows};
    struct session *s = NULL;
    TRY(session_create(m, &session, &s, k->detail));
    struct model_probe hook = {probe, k};
    model_cursor_probe(session_cursor(s), &hook);
    for (k->row_first = 0; k->row_first < k->tokens; k->row_first += k->row_count) {
        uint32_t left = k->tokens - k->row_first;
        k->row_count = left < rows ? left : rows;
        const float *have = session_forward(s, ids + k->row_first, k->row_count, k->row_count);
        if (logits != NULL)
            eval_compare(have, logits, (uint64_t)k->row_first * vocab,
                         (uint64_t)k->row_count * vocab, &k->verdict.max_abs_logit);
        tool_progress(k->name, k->row_first + k->row_count, k->tokens);
    }
    session_destroy(&s);
    return k->err;
}

enum err eval_random(struct model *m, const struct safetensors *set,
                     const struct eval_options *options, uint32_t *cases, uint32_t *failed,
                     struct err_detail *detail)
{
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        size_t bytes = strlen(t->name);
        if (bytes < 5 || strcmp(t->name + bytes - 4, ".ids") != 0)
            continue;
        struct random_case k = {.set = set, .config = model_config(m), .detail = detail};
        k.verdict.sets_equal = k.verdict.ids_equal = true;
        if (bytes - 4 >= sizeof(k.name))
            return err_set(detail, ERR_INVALID, "golden tensor \"%.200s\": name too long", t->name);
        memcpy(k.name, t->name, bytes - 4);
        uint32_t *ids = NULL;
        TRY(eval_ids(t, k.config->vocab_size, &ids, detail));
        k.tokens = (uint32_t)t->elements;
        enum err e = run_case(m, &k, ids, options);
        mem_give(ids);
        if (e != ERR_OK)
            return e;
        (*cases)++;
        double logit = options->logit_bound > 0 ? options->logit_bound : BOUND;
        double stream = options->stream_bound > 0 ? options->stream_bound : BOUND;
        *failed += eval_report(k.name, &k.verdict, logit, stream) ? 0 : 1;
    }
    return ERR_OK;
}
