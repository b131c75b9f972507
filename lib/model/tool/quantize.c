/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/quantize.h"

#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/model/config.h"
#include "lib/model/cpu_pool.h"
#include "lib/model/format_scan.h"
#include "lib/model/identity.h"
#include "lib/model/load_pass.h"
#include "lib/model/quant.h"
#include "lib/model/read_file.h"
#include "lib/model/tool/args.h"
#include "lib/model/tool/calib.h"
#include "lib/model/tool/prompt.h"
#include "lib/model/tool/texts.h"
#include "lib/model/tool/tool.h"
#include "lib/model/tool/writer.h"
#include "lib/text/tokenizer.h"

#define TEXT_BYTES_MAX ((size_t)256 << 20)
#define COPY_BYTES     (64u << 20) /* of a tensor that stays, at a time */

/* The whole run. */
struct run {
    struct quantize_options options;
    struct safetensors *set;
    struct writer *writer;
    struct quantize_plan plan;
    struct quantize_journal journal;
    struct tool_threads pool;
    uint32_t threads;
    struct model *model; /* with calibration */
    struct tokenizer *tokenizer;
    struct texts texts;
    struct calib *calib;
    struct tool_eta eta;
    uint64_t weights_done; /* of finished linears, this run */
    uint64_t weights_here; /* of the linear at hand */
};

static const char *const format_names[] = {"exl3", "nvfp4", "mxfp8", "fp8"};

const char *quantize_format_name(enum quantize_format format)
{
    return format_names[format];
}

void quantize_title(const struct quantize_options *o, char *ret_text, size_t bytes)
{
    if (o->format == QUANTIZE_EXL3)
        snprintf(ret_text, bytes, "exl3-%s %u.00 bpw", format_codebook_name(o->codebook), o->bits);
    else
        snprintf(ret_text, bytes, "%s", format_names[o->format]);
}

static void show(void *arg, uint64_t done, uint64_t total)
{
    struct run *r = arg;
    tool_eta_show(&r->eta, r->weights_done + r->weights_here * done / (total > 0 ? total : 1));
}

/* Linears that read the same input share its signs, so the seed goes by group. */
static uint64_t group_seed(const struct run *r, const struct quantize_linear *l)
{
    return r->options.seed * 1000003u + (uint64_t)l->layer * MODEL_INPUT_COUNT + l->which;
}

static enum err store(struct run *r, struct quantize_linear *l, const uint8_t *bytes,
                      struct err_detail *detail)
{
    struct hash128 hash = hash_xxh3_once(bytes, l->bytes);
    uint64_t at = 0;
    for (uint32_t k = 0; k < l->part_count; k++) {
        TRY(writer_put(r->writer, l->parts[k].tensor, 0, bytes + at, l->parts[k].bytes, detail));
        at += l->parts[k].bytes;
    }
    TRY(writer_sync(r->writer, detail));
    TRY(quantize_journal_add(&r->journal, l, &hash, detail));
    l->done = true;
    return ERR_OK;
}

static void print_linear(const struct quantize_linear *l, const char *title)
{
    printf("%-56s %s  error %.3e", l->prefix, title, l->result.relative_error);
    if (l->result.rows > 0)
        printf("  weighted %.3e  rows %" PRIu64, l->result.proxy_error, l->result.rows);
    printf("\n");
    fflush(stdout);
}

static enum err quantise_one(struct run *r, struct quantize_linear *l,
                             const struct quant_hessian *h, uint64_t rows,
                             struct err_detail *detail)
{
    char title[64];
    uint8_t *bytes = mem_take(l->bytes);
    r->weights_here = (uint64_t)l->source.in * l->source.out;
    enum err e = quantize_encode(l, &r->options, h, group_seed(r, l), &r->pool.ctx, show, r, bytes,
                                 &l->result, detail);
    l->result.rows = rows;
    if (e == ERR_OK)
        e = store(r, l, bytes, detail);
    mem_give(bytes);
    if (e != ERR_OK)
        return e;
    r->weights_done += r->weights_here;
    r->weights_here = 0;
    show(r, 0, 1);
    quantize_title(&r->options, title, sizeof(title));
    tool_eta_clear(&r->eta);
    print_linear(l, title);
    return ERR_OK;
}

static bool same_group(const struct quantize_linear *a, const struct quantize_linear *b)
{
    return a->layer == b->layer && a->which == b->which && a->expert == b->expert;
}

/* Linears [first, end) read the same input. */
static enum err quantise_group(struct run *r, uint32_t first, uint32_t end,
                               struct err_detail *detail)
{
    struct quant_hessian *h = NULL;
    uint64_t rows = 0;
    bool open = false;
    enum err e = ERR_OK;
    for (uint32_t i = first; i < end; i++)
        open = open || !r->plan.linears[i].done;
    const struct quantize_linear *l = &r->plan.linears[first];
    if (!open)
        return ERR_OK;
    if (r->calib != NULL && l->which != MODEL_INPUT_COUNT &&
        l->layer < model_config(r->model)->layers)
        h = calib_hessian(r->calib, l->which, l->expert, group_seed(r, l), &r->pool.ctx, &rows);
    if (h != NULL && !quant_hessian_usable(h))
        rows = 0;
    for (uint32_t i = first; i < end && e == ERR_OK; i++)
        if (!r->plan.linears[i].done)
            e = quantise_one(r, &r->plan.linears[i], h, rows, detail);
    quant_hessian_destroy(&h);
    return e;
}

static enum err quantise_all(struct run *r, struct err_detail *detail)
{
    const struct quantize_plan *p = &r->plan;
    uint32_t ran = 0; /* layers of the calibration */
    for (uint32_t i = 0; i < p->count;) {
        uint32_t end = i + 1;
        while (end < p->count && same_group(&p->linears[i], &p->linears[end]))
            end++;
        uint32_t layer = p->linears[i].layer;
        while (r->calib != NULL && ran <= layer && layer < model_config(r->model)->layers)
            calib_layer(r->calib, ran++ == layer);
        TRY(quantise_group(r, i, end, detail));
        i = end;
    }
    return ERR_OK;
}

static enum err copy_rest(struct run *r, struct err_detail *detail)
{
    for (uint32_t i = 0; i < r->plan.copy_count; i++) {
        const struct safetensors_tensor *t = safetensors_at(r->set, r->plan.copies[i]);
        for (uint64_t at = 0; at < t->bytes; at += COPY_BYTES) {
            uint64_t left = t->bytes - at;
            TRY(writer_put(r->writer, r->plan.copied[i], at, t->data + at,
                           left < COPY_BYTES ? left : COPY_BYTES, detail));
        }
        tool_progress("copying", i + 1, r->plan.copy_count);
    }
    return ERR_OK;
}

static enum err start_calibration(struct run *r, struct err_detail *detail)
{
    struct quantize_options *o = &r->options;
    TRY(tool_load(o->in, "exact", r->threads, &r->model, detail));
    TRY(prompt_tokenizer(o->in, &r->tokenizer, detail));
    if (r->tokenizer == NULL)
        return err_set(detail, ERR_NOT_FOUND, "%s/tokenizer.json: not found, but --calib needs it",
                       o->in);
    TRY(texts_read(o->calib, r->tokenizer, model_config(r->model)->vocab_size, o->calib_rows,
                   &r->texts, detail));
    fprintf(stderr, "calibration: %u texts, %" PRIu64 " tokens", r->texts.count, r->texts.tokens);
    if (r->texts.tokens_left_out > 0)
        fprintf(stderr, ", %" PRIu64 " left out (--calib-rows)", r->texts.tokens_left_out);
    fprintf(stderr, "\n");
    return calib_create(r->model, &r->texts, &r->calib, detail);
}

static void hashed(void *arg, uint64_t done, uint64_t total)
{
    (void)arg;
    tool_progress("hashing the input", done, total);
}

static enum err fingerprint(struct run *r, struct hash128 *ret, struct err_detail *detail)
{
    char *config = NULL, *tokenizer = NULL, *chat = NULL;
    size_t config_bytes = 0, tokenizer_bytes = 0, chat_bytes = 0;
    TRY(read_file(r->options.in, "config.json", TEXT_BYTES_MAX, &config, &config_bytes, detail));
    enum err e = read_file(r->options.in, "tokenizer.json", TEXT_BYTES_MAX, &tokenizer,
                           &tokenizer_bytes, detail);
    if (e == ERR_OK || e == ERR_NOT_FOUND)
        e = read_file(r->options.in, "chat_template.jinja", TEXT_BYTES_MAX, &chat, &chat_bytes,
                      detail);
    if (e == ERR_OK || e == ERR_NOT_FOUND) {
        struct identity_texts texts = {.config = config,
                                       .config_bytes = config_bytes,
                                       .tokenizer = tokenizer,
                                       .tokenizer_bytes = tokenizer_bytes,
                                       .chat_template = chat,
                                       .chat_template_bytes = chat_bytes};
        struct hash128 *hashes = mem_take_array(safetensors_count(r->set) + 1u, sizeof(*hashes));
        e = load_pass(r->set, NULL, &r->pool.ctx, hashed, NULL, hashes, detail);
        *ret = identity_fingerprint(r->set, &texts, hashes);
        mem_give(hashes);
    }
    free(config);
    free(tokenizer);
    free(chat);
    return e;
}

/* An output directory is new, empty, or one of an interrupted run. */
static enum err check_out(const char *out, struct err_detail *detail)
{
    DIR *dir = opendir(out);
    bool journal = false, other = false;
    if (dir == NULL)
        return ERR_OK;
    for (struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) {
        journal = journal || strcmp(d->d_name, "quantize.journal") == 0;
        other = other || (strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0);
    }
    closedir(dir);
    return other && !journal ? err_set(detail, ERR_INVALID,
                                       "%s is not empty, and no unfinished run lies there", out)
                             : ERR_OK;
}

static enum err prepare(struct run *r, bool *ret_resumed, struct err_detail *detail)
{
    const struct quantize_options *o = &r->options;
    struct hash128 source;
    TRY(check_out(o->out, detail));
    TRY(quantize_check_files(o, detail));
    TRY(safetensors_open_directory(o->in, &r->set, detail));
    TRY(fingerprint(r, &source, detail));
    TRY(writer_create(o->out, o->shard_bytes, &r->writer, detail));
    TRY(quantize_plan_make(r->set, o, r->writer, &r->plan, detail));
    TRY(quantize_journal_open(&r->journal, o, &source, ret_resumed, detail));
    TRY(writer_open(r->writer, *ret_resumed, detail));
    if (*ret_resumed)
        TRY(quantize_journal_read(&r->journal, o, &r->plan, r->writer, &r->pool.ctx, detail));
    return ERR_OK;
}

static void summarise(const struct run *r)
{
    double sum = 0, worst = 0, weights = 0;
    const struct quantize_linear *at = r->plan.linears;
    char title[64];
    for (uint32_t i = 0; i < r->plan.count; i++) {
        const struct quantize_linear *l = &r->plan.linears[i];
        double n = (double)l->source.in * l->source.out;
        sum += n * l->result.relative_error;
        weights += n;
        if (l->result.relative_error >= worst) {
            worst = l->result.relative_error;
            at = l;
        }
    }
    quantize_title(&r->options, title, sizeof(title));
    printf("%u linears, %.1f M weights in %s: mean error %.3e, largest %.3e (%s)\n", r->plan.count,
           weights / 1e6, title, sum / weights, worst, at->prefix);
    printf("%.1f MB in %s\n", (double)writer_total(r->writer) / 1e6, r->options.out);
}

static enum err run_all(struct run *r, struct err_detail *detail)
{
    bool resumed = false;
    uint64_t left = 0;
    uint32_t done = 0;
    tool_threads_start(&r->pool, r->threads);
    TRY(prepare(r, &resumed, detail));
    for (uint32_t i = 0; i < r->plan.count; i++) {
        const struct quantize_linear *l = &r->plan.linears[i];
        left += l->done ? 0 : (uint64_t)l->source.in * l->source.out;
        done += l->done ? 1 : 0;
    }
    if (resumed)
        fprintf(stderr, "going on: %u of %u linears are done\n", done, r->plan.count);
    if (r->options.calib != NULL)
        TRY(start_calibration(r, detail));
    tool_eta_start(&r->eta, "quantising", left, "weights");
    TRY(quantise_all(r, detail));
    tool_eta_clear(&r->eta);
    TRY(copy_rest(r, detail));
    TRY(quantize_write_files(&r->options, &r->plan, r->texts.tokens, detail));
    TRY(writer_finish(r->writer, detail));
    if (unlink(r->journal.path) != 0)
        return err_set(detail, ERR_IO, "%s: cannot be removed", r->journal.path);
    summarise(r);
    return ERR_OK;
}

static void end(struct run *r)
{
    calib_destroy(&r->calib);
    if (r->texts.count > 0)
        texts_fini(&r->texts);
    tokenizer_destroy(&r->tokenizer);
    model_destroy(&r->model);
    tool_threads_end(&r->pool);
    quantize_journal_close(&r->journal);
    if (r->plan.count > 0)
        quantize_plan_fini(&r->plan);
    writer_destroy(&r->writer);
    safetensors_close(&r->set);
}

enum err quantize_read_format(const char *format, const char *bits, const char *codebook,
                              struct quantize_options *o, struct err_detail *detail)
{
    static const uint32_t usual[] = {4, 4, 8, 8};
    uint64_t value = 0;
    uint32_t i = 0;
    while (format != NULL && i < ARRAY_COUNT(format_names) && strcmp(format, format_names[i]) != 0)
        i++;
    if (format == NULL || i == ARRAY_COUNT(format_names))
        return err_set(detail, ERR_INVALID, "--format: exl3, nvfp4, mxfp8 or fp8");
    o->format = (enum quantize_format)i;
    value = usual[i];
    TRY(tool_u64("bits", bits, 1, 8, &value, detail));
    if (o->format != QUANTIZE_EXL3 && value != usual[i])
        return err_set(detail, ERR_INVALID, "--bits: %s has %u", format, usual[i]);
    o->bits = (uint32_t)value;
    o->codebook = OP_CODEBOOK_MCG;
    if (codebook == NULL)
        return ERR_OK;
    for (uint32_t k = OP_CODEBOOK_3INST; k <= OP_CODEBOOK_MUL1; k++)
        if (strcmp(codebook, format_codebook_name((enum op_codebook)k)) == 0) {
            o->codebook = (enum op_codebook)k;
            return ERR_OK;
        }
    return err_set(detail, ERR_INVALID, "--codebook: mcg, mul1 or 3inst");
}

static enum err read_arguments(int argc, char **argv, struct run *r, struct err_detail *detail)
{
    static const char *const names[] = {"the model directory", "the output directory"};
    const char *places[2], *format = NULL, *bits = NULL, *layers = NULL, *codebook = NULL;
    const char *beam = NULL, *threads = NULL, *seed = NULL, *rows = NULL, *shard = NULL;
    struct quantize_options *o = &r->options;
    const struct tool_option table[] = {
        {"format", &format, NULL},    {"bits", &bits, NULL},       {"layers", &layers, NULL},
        {"calib", &o->calib, NULL},   {"beam", &beam, NULL},       {"threads", &threads, NULL},
        {"seed", &seed, NULL},        {"calib-rows", &rows, NULL}, {"codebook", &codebook, NULL},
        {"shard-bytes", &shard, NULL}};
    uint64_t beam_value = 0, thread_count = 0;
    o->calib_rows = 16384;
    o->shard_bytes = WRITER_SHARD_BYTES;
    TRY(tool_args_places(argc, argv, table, ARRAY_COUNT(table), names, places, 2, detail));
    TRY(quantize_read_format(format, bits, codebook, o, detail));
    if (layers != NULL && strcmp(layers, "experts") != 0 && strcmp(layers, "all") != 0)
        return err_set(detail, ERR_INVALID, "--layers: experts or all, not \"%s\"", layers);
    TRY(tool_u64("beam", beam, 0, QUANT_BEAM_MAX, &beam_value, detail));
    TRY(tool_u64("threads", threads, 0, CPU_POOL_THREADS_MAX, &thread_count, detail));
    TRY(tool_u64("seed", seed, 0, UINT32_MAX, &o->seed, detail));
    TRY(tool_u64("calib-rows", rows, 1, 1u << 20, &o->calib_rows, detail));
    TRY(tool_u64("shard-bytes", shard, 1, UINT64_MAX / 2, &o->shard_bytes, detail));
    if (o->calib != NULL && o->format != QUANTIZE_EXL3)
        return err_set(detail, ERR_INVALID, "--calib: only exl3 learns from texts");
    o->in = places[0];
    o->out = places[1];
    o->all = layers != NULL && strcmp(layers, "all") == 0;
    o->beam = (uint32_t)beam_value;
    r->threads = (uint32_t)thread_count;
    return ERR_OK;
}

int tool_quantize(int argc, char **argv)
{
    struct run r = {.threads = 0};
    struct err_detail detail = {{0}};
    r.journal.fd = -1;
    enum err e = read_arguments(argc, argv, &r, &detail);
    if (e == ERR_OK)
        e = run_all(&r, &detail);
    end(&r);
    return e == ERR_OK ? 0 : tool_fail(&detail);
}
