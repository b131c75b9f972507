/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"
#include "lib/model/config.h"
#include "lib/model/tool/args.h"
#include "lib/model/tool/prompt.h"
#include "lib/model/tool/session.h"
#include "lib/model/tool/texts.h"
#include "lib/model/tool/tool.h"
#include "lib/text/tokenizer.h"

#define SLICE_ROWS 64u

/* Over the positions of a case, or of all of them. */
struct tally {
    uint64_t positions, agree;
    double kld_sum, kld_max;
    uint64_t answers, identical, own; /* cases with an answer; B gives it; A gives it */
};

struct pair {
    struct model *a, *b;
    const struct model_info *info;
};

static uint32_t best_id(const float *logits, const struct model_info *info)
{
    uint32_t best = UINT32_MAX;
    for (uint32_t v = 0; v < info->vocab_size; v++)
        if (info->has_token[v] && (best == UINT32_MAX || logits[v] > logits[best]))
            best = v;
    return best;
}

/* log of the sum of exp, over ids that have a token. */
static double log_total(const float *logits, const struct model_info *info)
{
    double top = -INFINITY, sum = 0;
    for (uint32_t v = 0; v < info->vocab_size; v++)
        if (info->has_token[v])
            top = fmax(top, (double)logits[v]);
    for (uint32_t v = 0; v < info->vocab_size; v++)
        if (info->has_token[v])
            sum += exp((double)logits[v] - top);
    return top + log(sum);
}

/* KL(A || B) of one position, in nats. */
static double divergence(const float *a, const float *b, const struct model_info *info)
{
    double total_a = log_total(a, info), total_b = log_total(b, info), kld = 0;
    for (uint32_t v = 0; v < info->vocab_size; v++) {
        if (!info->has_token[v])
            continue;
        double log_a = (double)a[v] - total_a, log_b = (double)b[v] - total_b;
        kld += exp(log_a) * (log_a - log_b);
    }
    return isfinite(kld) ? fmax(kld, 0) : (double)INFINITY;
}

/* Both walk the same ids, so their greedy texts are the same as long as both choose the next id. */
static void tally_rows(const struct pair *p, const struct text_case *c, uint32_t first,
                       uint32_t rows, const float *a, const float *b, struct tally *t, bool *own,
                       bool *identical)
{
    for (uint32_t r = 0; r < rows; r++) {
        const float *row_a = a + (size_t)r * p->info->vocab_size;
        const float *row_b = b + (size_t)r * p->info->vocab_size;
        uint32_t at = first + r, best_a = best_id(row_a, p->info), best_b = best_id(row_b, p->info);
        double kld = divergence(row_a, row_b, p->info);
        t->positions++;
        t->agree += best_a == best_b ? 1 : 0;
        t->kld_sum += kld;
        t->kld_max = fmax(t->kld_max, kld);
        if (at + 1 >= c->prompt_count && at + 1 < c->count) {
            *own = *own && best_a == c->ids[at + 1];
            *identical = *identical && best_b == c->ids[at + 1];
        }
    }
}

static enum err compare_case(const struct pair *p, const struct text_case *c, struct tally *t,
                             struct err_detail *detail)
{
    struct session_options options = {c->count + 1, SLICE_ROWS, 0, SLICE_ROWS};
    struct session *a = NULL, *b = NULL;
    bool own = true, identical = true;
    enum err e = session_create(p->a, &options, &a, detail);
    if (e == ERR_OK)
        e = session_create(p->b, &options, &b, detail);
    for (uint32_t at = 0; e == ERR_OK && at < c->count; at += SLICE_ROWS) {
        uint32_t rows = c->count - at < SLICE_ROWS ? c->count - at : SLICE_ROWS;
        const float *logits_a = session_forward(a, c->ids + at, rows, rows);
        const float *logits_b = session_forward(b, c->ids + at, rows, rows);
        tally_rows(p, c, at, rows, logits_a, logits_b, t, &own, &identical);
    }
    if (c->count > c->prompt_count && c->prompt_count > 0) {
        t->answers++;
        t->own += own ? 1 : 0;
        t->identical += identical ? 1 : 0;
    }
    session_destroy(&a);
    session_destroy(&b);
    return e;
}

static void print_tally(const char *name, const struct tally *t)
{
    struct str s;
    double positions = t->positions > 0 ? (double)t->positions : 1;
    str_init(&s, 0);
    str_add_text(&s, "{\"case\": ");
    json_write_string(&s, name, strlen(name));
    str_add_format(&s, ", \"positions\": %" PRIu64 ", \"kld_mean\": %.4g, \"kld_max\": %.4g",
                   t->positions, t->kld_sum / positions, t->kld_max);
    str_add_format(&s, ", \"top1\": %.5f, \"answers\": %" PRIu64, (double)t->agree / positions,
                   t->answers);
    str_add_format(&s, ", \"identical\": %" PRIu64 ", \"own\": %" PRIu64 "}", t->identical, t->own);
    puts(s.text);
    fflush(stdout);
    str_fini(&s);
}

static enum err compare_all(const struct pair *p, const struct texts *texts, struct tally *all,
                            struct err_detail *detail)
{
    struct tool_eta eta;
    tool_eta_start(&eta, "comparing", texts->tokens, "tokens");
    for (uint32_t i = 0; i < texts->count; i++) {
        struct tally t = {0};
        TRY(compare_case(p, &texts->cases[i], &t, detail));
        all->positions += t.positions;
        all->agree += t.agree;
        all->kld_sum += t.kld_sum;
        all->kld_max = fmax(all->kld_max, t.kld_max);
        all->answers += t.answers;
        all->identical += t.identical;
        all->own += t.own;
        tool_eta_clear(&eta);
        print_tally(texts->cases[i].name, &t);
        tool_eta_show(&eta, all->positions);
    }
    tool_eta_clear(&eta);
    return ERR_OK;
}

struct compare_options {
    const char *places[2], *texts, *numerics;
    double kld_max, identical_min;
    uint32_t threads;
    uint64_t tokens_max;
};

static enum err run(const struct compare_options *o, struct tally *all, struct err_detail *detail)
{
    struct pair p = {NULL, NULL, NULL};
    struct tokenizer *tokenizer = NULL;
    struct texts texts = {.count = 0};
    enum err e = tool_load(o->places[0], o->numerics, o->threads, &p.a, detail);
    if (e == ERR_OK)
        e = tool_load(o->places[1], o->numerics, o->threads, &p.b, detail);
    if (e == ERR_OK && model_info(p.a)->vocab_size != model_info(p.b)->vocab_size)
        e = err_set(detail, ERR_INVALID, "%s and %s: different vocabularies", o->places[0],
                    o->places[1]);
    if (e == ERR_OK)
        e = prompt_tokenizer(o->places[0], &tokenizer, detail);
    if (e == ERR_OK && tokenizer == NULL)
        e = err_set(detail, ERR_NOT_FOUND, "%s/tokenizer.json: not found", o->places[0]);
    if (e == ERR_OK) {
        p.info = model_info(p.a);
        e = texts_read(o->texts, tokenizer, p.info->vocab_size, o->tokens_max, &texts, detail);
    }
    if (e == ERR_OK) {
        e = compare_all(&p, &texts, all, detail);
        texts_fini(&texts);
    }
    tokenizer_destroy(&tokenizer);
    model_destroy(&p.b);
    model_destroy(&p.a);
    return e;
}

static enum err read_arguments(int argc, char **argv, struct compare_options *o,
                               struct err_detail *detail)
{
    static const char *const names[] = {"the first model", "the second model"};
    const char *kld = NULL, *identical = NULL, *threads = NULL, *tokens = NULL;
    const struct tool_option table[] = {
        {"texts", &o->texts, NULL},  {"numerics", &o->numerics, NULL},
        {"kld-max", &kld, NULL},     {"identical-min", &identical, NULL},
        {"threads", &threads, NULL}, {"tokens-max", &tokens, NULL}};
    uint64_t thread_count = 0;
    o->kld_max = INFINITY;
    o->tokens_max = 1u << 24;
    TRY(tool_args_places(argc, argv, table, ARRAY_COUNT(table), names, o->places, 2, detail));
    TRY(tool_f64("kld-max", kld, 0, 1e9, &o->kld_max, detail));
    TRY(tool_f64("identical-min", identical, 0, 1, &o->identical_min, detail));
    TRY(tool_u64("threads", threads, 0, 256, &thread_count, detail));
    TRY(tool_u64("tokens-max", tokens, 1, 1u << 30, &o->tokens_max, detail));
    o->threads = (uint32_t)thread_count;
    if (o->texts == NULL)
        return err_set(detail, ERR_INVALID, "compare: --texts FILE is missing");
    return ERR_OK;
}

int tool_compare(int argc, char **argv)
{
    struct compare_options o = {.texts = NULL};
    struct err_detail detail = {{0}};
    struct tally all = {0};
    if (read_arguments(argc, argv, &o, &detail) != ERR_OK || run(&o, &all, &detail) != ERR_OK)
        return tool_fail(&detail);
    print_tally("all", &all);
    double mean = all.kld_sum / (double)(all.positions > 0 ? all.positions : 1);
    bool enough = (double)all.identical >= o.identical_min * (double)all.answers;
    return mean <= o.kld_max && enough ? 0 : 1;
}
