/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "lib/base/check.h"
#include "lib/base/str.h"
#include "lib/model/config.h"
#include "lib/model/format_scan.h"
#include "lib/model/identity.h"
#include "lib/model/tool/args.h"
#include "lib/model/tool/tool.h"
#include "lib/model/weights.h"

#define TITLES_MAX 64

static void print_tensor(const struct safetensors_tensor *t)
{
    printf("%-8s [", safetensors_dtype_name(t->dtype));
    for (uint32_t d = 0; d < t->dims; d++)
        printf("%s%" PRIu64, d > 0 ? ", " : "", t->shape[d]);
    printf("] %s\n", t->name);
}

/* Linears of one title together. */
struct group {
    char title[64];
    uint64_t linears, weights, bytes;
};

struct survey {
    struct group groups[TITLES_MAX];
    uint32_t group_count, refused, mismatched;
};

static void add_to_group(struct survey *s, const char *title, const struct format_linear *l)
{
    uint32_t i = 0;
    while (i < s->group_count && strcmp(s->groups[i].title, title) != 0)
        i++;
    if (i == TITLES_MAX)
        return;
    if (i == s->group_count) {
        s->group_count++;
        strcpy(s->groups[i].title, title);
    }
    s->groups[i].linears++;
    s->groups[i].weights += (uint64_t)l->in * l->out;
    s->groups[i].bytes += l->bytes;
}

static bool print_linear(void *arg, const struct format_linear *l)
{
    struct survey *s = arg;
    char title[64];
    enum format_fault fault;
    struct err_detail detail = {{0}};
    if (l->err != ERR_OK) {
        printf("linear: %s refused: %s\n", l->prefix, l->detail->text);
        s->refused++;
        return true;
    }
    format_title(&l->info, title, sizeof(title));
    printf("linear: %s [%u, %u] %s%s%s", l->prefix, l->out, l->in, title,
           l->info.has_bias ? " + bias" : "",
           l->info.warnings & FORMAT_WARN_CONFIG_MISMATCH ? " (the config says otherwise)" : "");
    if (l->info.kind != FORMAT_EXL3_RANKED &&
        format_check_values(l->prefix, &l->info, &l->weight, &fault, &detail) != ERR_OK) {
        printf(" refused: %s", detail.text);
        s->refused++;
    }
    printf("\n");
    s->mismatched += l->info.warnings & FORMAT_WARN_CONFIG_MISMATCH ? 1 : 0;
    add_to_group(s, title, l);
    return true;
}

static void print_survey(const struct safetensors *set, const struct survey *s)
{
    uint64_t loose = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->group_count; i++)
        printf("format: %s, %" PRIu64 " linears, %" PRIu64 " weights, %" PRIu64
               " bytes, %.2f bits a weight\n",
               s->groups[i].title, s->groups[i].linears, s->groups[i].weights, s->groups[i].bytes,
               (double)s->groups[i].bytes * 8 / (double)s->groups[i].weights);
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        loose += format_is_part(t) ? 0 : t->bytes;
        count += format_is_part(t) ? 0 : 1;
    }
    printf("others: %u tensors, %" PRIu64 " bytes\n", count, loose);
    if (s->refused > 0)
        printf("refused: %u linears\n", s->refused);
}

static void print_warnings(const char *text)
{
    while (*text != '\0') {
        size_t bytes = strcspn(text, "\n");
        printf("warning: %.*s\n", (int)bytes, text);
        text += bytes + (text[bytes] != '\0');
    }
}

static void print_model(const struct model *m)
{
    const struct model_config *c = model_config(m);
    const struct model_info *info = model_info(m);
    char fp[33];
    hex_encode(info->model_fp.bytes, sizeof(info->model_fp.bytes), fp);
    print_warnings(info->warnings);
    printf("model: %u layers (%u DSA), hidden %u, vocabulary %u, context %u\n", c->layers,
           info->dsa_layers, c->hidden, c->vocab_size, c->context_max);
    printf("experts: %u, %u per token\n", c->experts, c->experts_per_token);
    printf("parameters: %" PRIu64 " in the text model without MTP\n", weights_parameters(c));
    printf("state: %" PRIu64 " bytes per sequence\n", info->state_bytes);
    printf("fp: %s\n", fp);
}

static bool has_config(const char *directory)
{
    char path[4096];
    struct stat st;
    int n = snprintf(path, sizeof(path), "%s/config.json", directory);
    return n > 0 && (size_t)n < sizeof(path) && stat(path, &st) == 0;
}

/* A file, or a directory without a config, is tensors and nothing else. */
static enum err inspect(const char *path, struct survey *s, struct err_detail *detail)
{
    struct safetensors *set = NULL;
    struct model *m = NULL;
    struct stat st;
    bool directory = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    char quantization[256];
    TRY(directory ? safetensors_open_directory(path, &set, detail)
                  : safetensors_open_file(path, &set, detail));
    for (uint32_t i = 0; i < safetensors_count(set); i++)
        print_tensor(safetensors_at(set, i));
    struct format_hint hint = {0};
    enum err e = directory ? identity_hint(path, &hint, detail) : ERR_OK;
    if (e != ERR_OK) {
        safetensors_close(&set);
        return e;
    }
    format_scan(set, &hint, print_linear, s);
    print_survey(set, s);
    identity_quantization(set, quantization, sizeof(quantization));
    printf("quantization: %s\n", quantization);
    safetensors_close(&set);
    if (!directory || !has_config(path))
        return ERR_OK;
    TRY(tool_load(path, NULL, 1, &m, detail));
    print_model(m);
    model_destroy(&m);
    return ERR_OK;
}

int tool_inspect(int argc, char **argv)
{
    const char *path = NULL;
    struct err_detail detail = {{0}};
    struct survey s = {.refused = 0};
    if (tool_args(argc, argv, NULL, 0, &path, &detail) != ERR_OK ||
        inspect(path, &s, &detail) != ERR_OK)
        return tool_fail(&detail);
    return s.refused > 0 ? 1 : 0;
}
