/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/eval.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/str.h"
#include "lib/base/json.h"
#include "lib/model/safetensors.h"
#include "lib/model/tool/args.h"
#include "lib/model/tool/tool.h"

static void add_number(struct str *out, double value)
{
    if (isfinite(value))
        str_add_format(out, "%.3g", value);
    else
        str_add_text(out, "null");
}

bool eval_report(const char *name, const struct eval_verdict *v, double logit_bound,
                 double stream_bound)
{
    bool ok = v->max_abs_logit <= logit_bound && v->max_abs_stream <= stream_bound &&
              v->sets_equal && v->ids_equal;
    struct str line;
    str_init(&line, 0);
    str_add_text(&line, "{\"case\": ");
    json_write_string(&line, name, strlen(name));
    str_add_text(&line, ", \"max_abs_logit\": ");
    add_number(&line, v->max_abs_logit);
    str_add_text(&line, ", \"max_abs_stream\": ");
    add_number(&line, v->max_abs_stream);
    str_add_format(&line, ", \"sets_equal\": %s, \"ok\": %s}", v->sets_equal ? "true" : "false",
                   ok ? "true" : "false");
    puts(line.text);
    fflush(stdout);
    str_fini(&line);
    return ok;
}

float eval_f32(const struct safetensors_tensor *t, uint64_t index)
{
    float value;
    CHECK(index < t->elements && t->dtype == SAFETENSORS_F32);
    memcpy(&value, t->data + index * sizeof(value), sizeof(value));
    return value;
}

int32_t eval_i32(const struct safetensors_tensor *t, uint64_t index)
{
    int32_t value;
    CHECK(index < t->elements && t->dtype == SAFETENSORS_I32);
    memcpy(&value, t->data + index * sizeof(value), sizeof(value));
    return value;
}

void eval_compare(const float *have, const struct safetensors_tensor *want, uint64_t first,
                  uint64_t count, double *max_abs)
{
    for (uint64_t i = 0; i < count; i++) {
        double difference = fabs((double)have[i] - eval_f32(want, first + i));
        if (!(difference <= *max_abs))
            *max_abs = isnan(difference) ? (double)INFINITY : difference;
    }
}

enum err eval_ids(const struct safetensors_tensor *t, uint32_t vocab_size, uint32_t **ret_ids,
                  struct err_detail *detail)
{
    if (t->dtype != SAFETENSORS_I32 || t->dims != 1 || t->elements == 0 ||
        t->elements > UINT32_MAX / 2)
        return err_set(detail, ERR_INVALID, "golden tensor \"%s\": not a list of I32 ids", t->name);
    uint32_t *ids = mem_take_array(t->elements, sizeof(*ids));
    for (uint64_t i = 0; i < t->elements; i++) {
        int32_t id = eval_i32(t, i);
        if (id < 0 || (uint32_t)id >= vocab_size) {
            mem_give(ids);
            return err_set(detail, ERR_INVALID,
                           "golden tensor \"%s\": id %d is outside the "
                           "model's vocabulary",
                           t->name, id);
        }
        ids[i] = (uint32_t)id;
    }
    *ret_ids = ids;
    return ERR_OK;
}

enum err eval_find(const struct safetensors *set, const char *name, const char *dtype,
                   uint64_t rows, uint64_t columns, const struct safetensors_tensor **ret,
                   struct err_detail *detail)
{
    const struct safetensors_tensor *t = safetensors_find(set, name);
    if (t != NULL &&
        (strcmp(safetensors_dtype_name(t->dtype), dtype) != 0 || t->dims == 0 || t->dims > 2 ||
         t->shape[t->dims - 1] != columns || (t->dims == 2 ? t->shape[0] : 1) != rows))
        return err_set(detail, ERR_INVALID, "golden tensor \"%s\": not %s [%llu, %llu]", name,
                       dtype, (unsigned long long)rows, (unsigned long long)columns);
    *ret = t;
    return ERR_OK;
}

static enum err eval_all(const char *directory, const struct eval_options *options,
                         const char *numerics, uint32_t threads, uint32_t *cases, uint32_t *failed,
                         struct err_detail *detail)
{
    struct model *m = NULL;
    struct safetensors *set = NULL;
    char path[4096];
    snprintf(path, sizeof(path), "%s/golden.safetensors", options->golden);
    enum err e = safetensors_open_file(path, &set, detail);
    if (e == ERR_OK)
        e = tool_load(directory, numerics, threads, &m, detail);
    if (e == ERR_OK)
        e = eval_random(m, set, options, cases, failed, detail);
    if (e == ERR_OK)
        e = eval_trained(m, set, options, cases, failed, detail);
    if (e == ERR_OK && *cases == 0)
        e = err_set(detail, ERR_INVALID, "%s: no case found", path);
    model_destroy(&m);
    safetensors_close(&set);
    return e;
}

int tool_eval(int argc, char **argv)
{
    const char *directory = NULL, *numerics = NULL, *rows = NULL, *layers = NULL, *threads = NULL;
    struct eval_options options = {0};
    const struct tool_option table[] = {{"golden", &options.golden, NULL},
                                        {"numerics", &numerics, NULL},
                                        {"slice-rows", &rows, NULL},
                                        {"slice-layers", &layers, NULL},
                                        {"threads", &threads, NULL}};
    struct err_detail detail = {{0}};
    uint64_t slice_rows = 0, slice_layers = 0, thread_count = 0;
    uint32_t cases = 0, failed = 0;
    if (tool_args(argc, argv, table, ARRAY_COUNT(table), &directory, &detail) != ERR_OK ||
        tool_u64("slice-rows", rows, 1, 65536, &slice_rows, &detail) != ERR_OK ||
        tool_u64("slice-layers", layers, 0, 1024, &slice_layers, &detail) != ERR_OK ||
        tool_u64("threads", threads, 0, 256, &thread_count, &detail) != ERR_OK)
        return tool_fail(&detail);
    if (options.golden == NULL) {
        (void)err_set(&detail, ERR_INVALID, "eval: --golden DIR is missing");
        return tool_fail(&detail);
    }
    options.directory = directory;
    options.slice_rows = (uint32_t)slice_rows;
    options.slice_layers = (uint32_t)slice_layers;
    if (eval_all(directory, &options, numerics, (uint32_t)thread_count, &cases, &failed, &detail) !=
        ERR_OK)
        return tool_fail(&detail);
    return failed > 0 ? 1 : 0;
}
