/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/model/config.h"
#include "lib/model/sampler.h"
#include "lib/model/tool/args.h"
#include "lib/model/tool/draft_ngram.h"
#include "lib/model/tool/prompt.h"
#include "lib/model/tool/session.h"
#include "lib/model/tool/tool.h"
#include "lib/text/detokenizer.h"
#include "lib/text/tokenizer.h"

#define SLICE_ROWS     512
#define TOKENS_DEFAULT 1024
#define DRAFTS_MAX     (MODEL_DRAFT_ROWS_MAX - 1)

struct generate_options {
    const char *directory, *prompt, *ids_path, *numerics;
    struct sampler_params sampling;
    uint64_t tokens_max, threads;
    uint32_t drafts;    /* K; 0 = no verify steps */
    bool drafts_always; /* fixed:K: fill up with guesses that are hardly ever right */
    bool json;
};

struct generate {
    const struct generate_options *options;
    struct model *model;
    struct session *session;
    struct sampler *sampler;
    struct tokenizer *tokenizer; /* NULL without a tokenizer.json */
    struct detokenizer text_state;
    struct str text;
    size_t text_printed;
    struct token_ids ids; /* prompt, then output */
    uint32_t prompt_count, tokens_max;
    bool stopped;
};

static bool is_stop(const struct model_info *info, uint32_t id)
{
    for (uint32_t i = 0; i < info->stop_id_count; i++)
        if (info->stop_ids[i] == id)
            return true;
    return false;
}

static bool finished(const struct generate *g)
{
    return g->stopped || g->ids.count - g->prompt_count >= g->tokens_max;
}

static void show(struct generate *g)
{
    if (g->options->json || g->text.bytes == g->text_printed)
        return;
    fwrite(g->text.text + g->text_printed, 1, g->text.bytes - g->text_printed, stdout);
    fflush(stdout);
    g->text_printed = g->text.bytes;
}

/* The token of the position after the last id. */
static uint32_t pick_next(struct generate *g, const float *logits)
{
    struct sampler_result result;
    sampler_pick(g->sampler, &g->options->sampling, NULL, logits, g->ids.count, &result);
    CHECK(token_ids_add(&g->ids, result.id));
    if (is_stop(model_info(g->model), result.id))
        g->stopped = true;
    else if (g->tokenizer != NULL)
        (void)!detokenizer_add(&g->text_state, result.id, &g->text);
    show(g);
    return result.id;
}

static void step_plain(struct generate *g)
{
    pick_next(g, session_forward(g->session, &g->ids.ids[g->ids.count - 1], 1, 1));
}

/* The last id and up to K drafts in one verify step; what the sampler agrees with stays. */
static void step_verify(struct generate *g)
{
    uint32_t rows[MODEL_DRAFT_ROWS_MAX], count = (uint32_t)g->ids.count;
    uint32_t left = g->tokens_max - (count - g->prompt_count);
    uint32_t want = g->options->drafts < left - 1 ? g->options->drafts : left - 1;
    rows[0] = g->ids.ids[count - 1];
    uint32_t drafts = draft_ngram(g->ids.ids, count, rows + 1, want);
    while (g->options->drafts_always && drafts < want)
        rows[1 + drafts++] = rows[0];
    const float *logits = session_verify(g->session, rows, 1 + drafts);
    uint32_t accepted = 0;
    uint64_t width = model_info(g->model)->vocab_size;
    do {
        uint32_t id = pick_next(g, logits + accepted * width);
        accepted++;
        if (finished(g) || accepted > drafts || rows[accepted] != id)
            break;
    } while (true);
    session_accept(g->session, accepted);
}

static void show_prefill(void *arg, uint32_t done, uint32_t total)
{
    (void)arg;
    tool_progress("reading the prompt", done, total);
}

static void print_json(const struct generate *g)
{
    struct str out;
    str_init(&out, 0);
    str_add_text(&out, "{\"ids\": [");
    for (size_t i = g->prompt_count; i < g->ids.count; i++)
        str_add_format(&out, "%s%u", i > g->prompt_count ? ", " : "", g->ids.ids[i]);
    str_add_text(&out, "], \"text\": ");
    json_write_string(&out, g->text.text != NULL ? g->text.text : "", g->text.bytes);
    str_add_format(&out, ", \"finish_reason\": \"%s\"}", g->stopped ? "stop" : "length");
    puts(out.text);
    str_fini(&out);
}

static enum err read_prompt(struct generate *g, struct err_detail *detail)
{
    const struct generate_options *o = g->options;
    const struct model_info *info = model_info(g->model);
    TRY(prompt_tokenizer(o->directory, &g->tokenizer, detail));
    if (o->ids_path != NULL) {
        TRY(prompt_read_ids(o->ids_path, info->vocab_size, &g->ids, detail));
    } else if (g->tokenizer == NULL) {
        return err_set(detail, ERR_INVALID,
                       "--prompt: this model has no tokenizer.json, use --ids");
    } else {
        enum err e = tokenizer_encode(g->tokenizer, o->prompt, strlen(o->prompt), true, &g->ids);
        if (e != ERR_OK)
            return err_set(detail, e, "--prompt: %s", err_text(e));
    }
    if (g->ids.count == 0)
        return err_set(detail, ERR_INVALID, "the prompt is empty");
    for (size_t i = 0; i < g->ids.count; i++)
        if (g->ids.ids[i] >= info->vocab_size)
            return err_set(detail, ERR_INVALID, "id %u is outside the model's vocabulary",
                           g->ids.ids[i]);
    if (g->ids.count >= info->context_max)
        return err_set(detail, ERR_CONTEXT, "%zu prompt tokens, the context has %u", g->ids.count,
                       info->context_max);
    g->prompt_count = (uint32_t)g->ids.count;
    uint64_t room = info->context_max - g->prompt_count;
    g->tokens_max = (uint32_t)(o->tokens_max < room ? o->tokens_max : room);
    return ERR_OK;
}

static enum err generate(struct generate *g, struct err_detail *detail)
{
    TRY(tool_load(g->options->directory, g->options->numerics, (uint32_t)g->options->threads,
                  &g->model, detail));
    TRY(read_prompt(g, detail));
    const struct model_info *info = model_info(g->model);
    uint32_t rows = g->prompt_count < SLICE_ROWS ? g->prompt_count : SLICE_ROWS;
    if (rows < MODEL_DRAFT_ROWS_MAX)
        rows = MODEL_DRAFT_ROWS_MAX;
    struct session_options session = {g->prompt_count + g->tokens_max, rows, 0,
                                      MODEL_DRAFT_ROWS_MAX};
    TRY(session_create(g->model, &session, &g->session, detail));
    g->sampler = sampler_create(info->vocab_size, info->has_token);
    if (g->tokenizer != NULL)
        detokenizer_init(&g->text_state, g->tokenizer, false);
    pick_next(g, session_prefill(g->session, g->ids.ids, g->prompt_count, show_prefill, NULL));
    while (!finished(g)) {
        if (g->options->drafts > 0)
            step_verify(g);
        else
            step_plain(g);
    }
    if (g->tokenizer != NULL)
        detokenizer_end(&g->text_state, &g->text);
    show(g);
    if (g->options->json)
        print_json(g);
    else
        putchar('\n');
    return ERR_OK;
}

static enum err parse_spec(const char *text, struct generate_options *o, struct err_detail *detail)
{
    uint64_t k = 0;
    if (text == NULL || strcmp(text, "off") == 0)
        return ERR_OK;
    const char *colon = strchr(text, ':');
    o->drafts_always = strncmp(text, "fixed:", 6) == 0;
    if (colon == NULL || (!o->drafts_always && strncmp(text, "ngram:", 6) != 0))
        return err_set(detail, ERR_INVALID, "--spec: off, fixed:K or ngram:K, not \"%s\"", text);
    TRY(tool_u64("spec", colon + 1, 0, DRAFTS_MAX, &k, detail));
    o->drafts = (uint32_t)k;
    return ERR_OK;
}

static enum err parse(int argc, char **argv, struct generate_options *o, struct err_detail *detail)
{
    const char *temperature = NULL, *top_p = NULL, *seed = NULL, *tokens = NULL, *spec = NULL;
    const char *threads = NULL;
    const struct tool_option table[] = {{"prompt", &o->prompt, NULL},
                                        {"ids", &o->ids_path, NULL},
                                        {"temperature", &temperature, NULL},
                                        {"top-p", &top_p, NULL},
                                        {"seed", &seed, NULL},
                                        {"max-tokens", &tokens, NULL},
                                        {"spec", &spec, NULL},
                                        {"numerics", &o->numerics, NULL},
                                        {"threads", &threads, NULL},
                                        {"json", NULL, &o->json}};
    TRY(tool_args(argc, argv, table, ARRAY_COUNT(table), &o->directory, detail));
    if ((o->prompt == NULL) == (o->ids_path == NULL))
        return err_set(detail, ERR_INVALID, "generate: exactly one of --prompt and --ids");
    struct sampler_params *p = &o->sampling;
    p->temperature = 1;
    p->top_p = 1;
    p->repetition_penalty = 1;
    o->tokens_max = TOKENS_DEFAULT;
    TRY(prompt_defaults(o->directory, &p->temperature, &p->top_p, detail));
    TRY(tool_f64("temperature", temperature, 0, 100, &p->temperature, detail));
    TRY(tool_f64("top-p", top_p, 0, 1, &p->top_p, detail));
    TRY(tool_u64("seed", seed, 0, UINT64_MAX, &p->seed, detail));
    TRY(tool_u64("max-tokens", tokens, 1, 1u << 26, &o->tokens_max, detail));
    TRY(tool_u64("threads", threads, 0, 256, &o->threads, detail));
    return parse_spec(spec, o, detail);
}

int tool_generate(int argc, char **argv)
{
    struct generate_options options = {0};
    struct generate g = {.options = &options};
    struct err_detail detail = {{0}};
    if (parse(argc, argv, &options, &detail) != ERR_OK)
        return tool_fail(&detail);
    token_ids_init(&g.ids, (size_t)1 << 27);
    str_init(&g.text, 0);
    enum err e = generate(&g, &detail);
    session_destroy(&g.session);
    sampler_destroy(&g.sampler);
    tokenizer_destroy(&g.tokenizer);
    model_destroy(&g.model);
    token_ids_fini(&g.ids);
    str_fini(&g.text);
    return e == ERR_OK ? 0 : tool_fail(&detail);
}
