/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/eval.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/model/config.h"
#include "lib/model/model.h"
#include "lib/model/safetensors.h"
#include "lib/model/tool/prompt.h"
#include "lib/model/tool/session.h"
#include "lib/model/tool/tool.h"
#include "lib/text/tokenizer.h"

#define BOUND          1e-3 /* golden/model-trained: logits after the prompt */
#define SLICE_ROWS     256
#define LINE_BYTES_MAX (16u << 20)
#define ANSWER_MAX     65536

/* The answers of greedy.jsonl, by name. */
struct answers {
    struct arena arena;
    struct answer {
        const char *name;
        uint32_t *ids;
        uint32_t count;
        const char *prompt; /* may be NULL */
        size_t prompt_bytes;
        bool used;
        struct answer *next;
    } * first;
};

static enum err add_answer(struct answers *a, const struct json *line, struct err_detail *detail)
{
    const struct json *name = json_get(line, "name"), *ids = json_get(line, "ids");
    const struct json *prompt = json_get(line, "prompt");
    if (!json_is(name, JSON_STRING) || !json_is(ids, JSON_ARRAY) || ids->count > ANSWER_MAX)
        return err_set(detail, ERR_INVALID, "greedy.jsonl: a line lacks name or ids");
    struct answer *answer = arena_alloc(&a->arena, sizeof(*answer));
    if (answer == NULL)
        return ERR_NOMEM;
    answer->name = arena_strndup(&a->arena, name->text, name->bytes);
    answer->ids = arena_alloc_array(&a->arena, ids->count + 1u, sizeof(uint32_t));
    if (json_is(prompt, JSON_STRING)) {
        answer->prompt = arena_strndup(&a->arena, prompt->text, prompt->bytes);
        answer->prompt_bytes = prompt->bytes;
    }
    if (answer->name == NULL || answer->ids == NULL)
        return err_set(detail, ERR_NOMEM, "greedy.jsonl: too large");
    for (const struct json *v = ids->child; v != NULL; v = v->next) {
        uint64_t id = 0;
        if (!json_u64(v, &id) || id > UINT32_MAX)
            return err_set(detail, ERR_INVALID, "greedy.jsonl: \"%s\": not a list of ids",
                           answer->name);
        answer->ids[answer->count++] = (uint32_t)id;
    }
    answer->next = a->first;
    a->first = answer;
    return ERR_OK;
}

static enum err read_answers(struct answers *a, const char *directory, struct err_detail *detail)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/greedy.jsonl", directory);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return errno == ENOENT ? ERR_OK : err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    char *line = NULL;
    size_t capacity = 0;
    enum err e = ERR_OK;
    struct json_options options = {.bytes_max = LINE_BYTES_MAX};
    for (ssize_t n; e == ERR_OK && (n = getline(&line, &capacity, file)) > 0;) {
        struct json *root = NULL;
        struct json_error where = {0, ""};
        struct arena nodes;
        if (n == 1)
            continue;
        arena_init(&nodes, 64 << 10, 256u << 20);
        e = json_parse(&nodes, &options, line, (size_t)n, &root, &where);
        e = e == ERR_OK ? add_answer(a, root, detail)
                        : err_set(detail, e, "%s: not JSON: %s", path, where.reason);
        arena_fini(&nodes);
    }
    free(line);
    fclose(file);
    return e;
}

static struct answer *find_answer(const struct answers *a, const char *name)
{
    for (struct answer *v = a->first; v != NULL; v = v->next)
        if (strcmp(v->name, name) == 0)
            return v;
    return NULL;
}

static uint32_t best_id(const float *logits, const struct model_info *info)
{
    uint32_t best = UINT32_MAX;
    for (uint32_t v = 0; v < info->vocab_size; v++)
        if (info->has_token[v] && (best == UINT32_MAX || logits[v] > logits[best]))
            best = v;
    return best;
}

struct trained_case {
    char name[256];
    const uint32_t *ids;
    uint32_t count;
    const struct answer *answer;                  /* may be NULL */
    const struct safetensors_tensor *last_logits; /* may be NULL */
};

static enum err run_case(struct model *m, const struct trained_case *k,
                         const struct eval_options *options, struct eval_verdict *v,
                         struct err_detail *detail)
{
    const struct model_info *info = model_info(m);
    uint32_t rows = options->slice_rows > 0 ? options->slice_rows : SLICE_ROWS;
    uint32_t tokens = k->count + (k->answer != NULL ? k->answer->count : 0) + 1;
    struct session_options session = {tokens, rows, options->slice_layers, 1};
    struct session *s = NULL;
    TRY(session_create(m, &session, &s, detail));
    const float *logits = session_prefill(s, k->ids, k->count, NULL, NULL);
    if (k->last_logits != NULL)
        eval_compare(logits, k->last_logits, 0, info->vocab_size, &v->max_abs_logit);
    for (uint32_t i = 0; k->answer != NULL && i < k->answer->count; i++) {
        uint32_t id = best_id(logits, info);
        if (id != k->answer->ids[i]) {
            v->ids_equal = false;
            break;
        }
        if (i + 1 < k->answer->count)
            logits = session_forward(s, &id, 1, 1);
    }
    session_destroy(&s);
    return ERR_OK;
}

static enum err eval_named(struct model *m, const struct safetensors *set, uint32_t index,
                           const struct answers *answers, const struct eval_options *options,
                           uint32_t *failed, struct err_detail *detail)
{
    const struct safetensors_tensor *t = safetensors_at(set, index);
    size_t bytes = strlen(t->name) - strlen(".prompt_ids");
    struct trained_case k = {.count = (uint32_t)t->elements};
    uint32_t *ids = NULL, vocab = model_config(m)->vocab_size;
    char name[400];
    if (bytes >= sizeof(k.name))
        return err_set(detail, ERR_INVALID, "golden tensor \"%.200s\": name too long", t->name);
    memcpy(k.name, t->name, bytes);
    snprintf(name, sizeof(name), "%s.last_logits", k.name);
    TRY(eval_find(set, name, "F32", 1, vocab, &k.last_logits, detail));
    TRY(eval_ids(t, vocab, &ids, detail));
    k.ids = ids;
    struct answer *answer = find_answer(answers, k.name);
    if (answer != NULL)
        answer->used = true;
    k.answer = answer;
    struct eval_verdict v = {.sets_equal = true, .ids_equal = true};
    enum err e = run_case(m, &k, options, &v, detail);
    mem_give(ids);
    if (e == ERR_OK)
        *failed += eval_report(k.name, &v, BOUND, BOUND) ? 0 : 1;
    return e;
}

/* Answers whose prompt stands in greedy.jsonl as text only. */
static enum err eval_texts(struct model *m, const struct answers *answers,
                           const struct eval_options *options, uint32_t *cases, uint32_t *failed,
                           struct err_detail *detail)
{
    struct tokenizer *tokenizer = NULL;
    struct token_ids ids;
    enum err e = prompt_tokenizer(options->directory, &tokenizer, detail);
    token_ids_init(&ids, 1u << 24);
    for (const struct answer *v = answers->first; e == ERR_OK && v != NULL; v = v->next) {
        if (v->used)
            continue;
        token_ids_clear(&ids);
        if (v->prompt == NULL || tokenizer == NULL ||
            tokenizer_encode(tokenizer, v->prompt, v->prompt_bytes, true, &ids) != ERR_OK ||
            ids.count == 0) {
            e = err_set(detail, ERR_INVALID,
                        "greedy.jsonl: \"%s\": no prompt_ids, and no prompt "
                        "that can be encoded",
                        v->name);
            break;
        }
        struct trained_case k = {.ids = ids.ids, .count = (uint32_t)ids.count, .answer = v};
        struct eval_verdict verdict = {.sets_equal = true, .ids_equal = true};
        e = run_case(m, &k, options, &verdict, detail);
        *cases += 1;
        if (e == ERR_OK)
            *failed += eval_report(v->name, &verdict, BOUND, BOUND) ? 0 : 1;
    }
    token_ids_fini(&ids);
    tokenizer_destroy(&tokenizer);
    return e;
}

enum err eval_trained(struct model *m, const struct safetensors *set,
                      const struct eval_options *options, uint32_t *cases, uint32_t *failed,
                      struct err_detail *detail)
{
    static const char suffix[] = ".prompt_ids";
    struct answers answers = {.first = NULL};
    arena_init(&answers.arena, 64 << 10, 64u << 20);
    enum err e = read_answers(&answers, options->golden, detail);
    for (uint32_t i = 0; e == ERR_OK && i < safetensors_count(set); i++) {
        const char *name = safetensors_at(set, i)->name;
        size_t bytes = strlen(name), tail = sizeof(suffix) - 1;
        tool_progress("evaluating", i + 1, safetensors_count(set));
        if (bytes <= tail || strcmp(name + bytes - tail, suffix) != 0)
            continue;
        (*cases)++;
        e = eval_named(m, set, i, &answers, options, failed, detail);
    }
    if (e == ERR_OK)
        e = eval_texts(m, &answers, options, cases, failed, detail);
    arena_fini(&answers.arena);
    return e;
}
