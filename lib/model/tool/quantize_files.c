/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/quantize.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/json.h"
#include "lib/base/str.h"
#include "lib/model/format_scan.h"
#include "lib/model/read_file.h"
#include "lib/model/tool/file_map.h"
#include "lib/model/tool/writer.h"

#define CONFIG_BYTES_MAX ((size_t)256 << 20)

/* Names of modules that stay as they are, for configs that list them. */
#define LEFT_OUT_EXPERTS                                                                           \
    "[\"*embed_tokens*\", \"*lm_head*\", \"*self_attn*\", \"*shared_experts*\", \"*mlp.gate\", "   \
    "\"*eh_proj*\", \"model.visual*\"]"
#define LEFT_OUT_ALL                                                                               \
    "[\"*embed_tokens*\", \"*shared_head*\", \"*kv_b_proj*\", \"*mlp.gate\", \"model.visual*\"]"

static void add_exl3(struct str *s, const struct quantize_options *o, uint64_t calib_tokens)
{
    str_add_format(s,
                   "{\"quant_method\": \"exl3\", \"version\": \"tandem %s\", \"bits\": %u, "
                   "\"head_bits\": %u, \"calibration\": {\"rows\": %llu, \"cols\": 1}, "
                   "\"out_scales\": \"auto\", \"codebook\": \"%s\", \"scope\": \"%s\", "
                   "\"non_routed_dtype_policy\": \"official_source_native\"}",
                   TANDEM_VERSION, o->bits, o->all ? o->bits : 16, (unsigned long long)calib_tokens,
                   format_codebook_name(o->codebook),
                   o->all ? "linears" : "glm53_routed_experts_only");
}

void quantize_config_entry(struct str *s, const struct quantize_options *o, uint64_t calib_tokens)
{
    const char *left = o->all ? LEFT_OUT_ALL : LEFT_OUT_EXPERTS;
    switch (o->format) {
    case QUANTIZE_EXL3:
        add_exl3(s, o, calib_tokens);
        break;
    case QUANTIZE_NVFP4:
    case QUANTIZE_MXFP8:
        str_add_format(s,
                       "{\"quant_method\": \"modelopt\", \"quant_algo\": \"%s\", "
                       "\"group_size\": %u, \"ignore\": %s}",
                       o->format == QUANTIZE_NVFP4 ? "W4A16_NVFP4" : "MXFP8",
                       o->format == QUANTIZE_NVFP4 ? 16 : 32, left);
        break;
    case QUANTIZE_FP8:
        str_add_format(s,
                       "{\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", \"activation_scheme\": "
                       "\"dynamic\", \"weight_block_size\": [128, 128], "
                       "\"modules_to_not_convert\": %s}",
                       left);
        break;
    }
}

/* The file's text with the quantization entry in place of its own; out NULL: it only has to be
 * possible. */
static enum err make_config(const struct quantize_options *o, uint64_t calib_tokens,
                            struct str *out, struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0;
    struct arena nodes;
    struct json *root = NULL;
    struct json_error where = {0, ""};
    struct json_options options = {.depth_max = 32};
    TRY(read_file(o->in, "config.json", CONFIG_BYTES_MAX, &text, &bytes, detail));
    arena_init(&nodes, 64 << 10, (size_t)1 << 30);
    enum err e = json_parse(&nodes, &options, text, bytes, &root, &where);
    if (e != ERR_OK || !json_is(root, JSON_OBJECT))
        e = err_set(detail, ERR_INVALID, "config.json: byte %zu: %s", where.offset,
                    e != ERR_OK ? where.reason : "not an object");
    if (e == ERR_OK && out != NULL) {
        str_add_text(out, "{");
        for (const struct json *v = root->child; v != NULL; v = v->next) {
            if (v->key_bytes == 19 && memcmp(v->key, "quantization_config", 19) == 0)
                continue;
            str_add_text(out, "\n ");
            json_write_string(out, v->key, v->key_bytes);
            str_add_text(out, ": ");
            json_write(out, v, JSON_NUMBERS_VERBATIM);
            str_add_text(out, ",");
        }
        str_add_text(out, "\n \"quantization_config\": ");
        quantize_config_entry(out, o, calib_tokens);
        str_add_text(out, "\n}\n");
    }
    arena_fini(&nodes);
    free(text);
    return e;
}

static enum err write_config(const struct quantize_options *o, uint64_t calib_tokens,
                             struct err_detail *detail)
{
    struct str s;
    str_init(&s, 0);
    enum err e = make_config(o, calib_tokens, &s, detail);
    if (e == ERR_OK)
        e = writer_file(o->out, "config.json", s.text, s.bytes, detail);
    str_fini(&s);
    return e;
}

static enum err write_hf_config(const struct quantize_options *o, struct err_detail *detail)
{
    struct str s;
    bool nvfp4 = o->format == QUANTIZE_NVFP4;
    if (!nvfp4 && o->format != QUANTIZE_MXFP8)
        return ERR_OK;
    str_init(&s, 0);
    str_add_format(&s,
                   "{\"producer\": {\"name\": \"tandem\", \"version\": \"%s\"},\n"
                   " \"quantization\": {\"quant_algo\": \"%s\", \"kv_cache_quant_algo\": null, "
                   "\"group_size\": %u, \"exclude_modules\": %s}}\n",
                   TANDEM_VERSION, nvfp4 ? "W4A16_NVFP4" : "MXFP8", nvfp4 ? 16 : 32,
                   o->all ? LEFT_OUT_ALL : LEFT_OUT_EXPERTS);
    enum err e = writer_file(o->out, "hf_quant_config.json", s.text, s.bytes, detail);
    str_fini(&s);
    return e;
}

static bool ends_with(const char *name, const char *end)
{
    size_t bytes = strlen(name), tail = strlen(end);
    return bytes >= tail && strcmp(name + bytes - tail, end) == 0;
}

/* Weights, their index and what described the old format are not taken over. */
static bool is_taken_over(const char *name)
{
    static const char *const left[] = {"config.json", "model.safetensors.index.json",
                                       "quantization_config.json", "hf_quant_config.json",
                                       "quantization_report.json"};
    for (size_t i = 0; i < sizeof(left) / sizeof(left[0]); i++)
        if (strcmp(name, left[i]) == 0)
            return false;
    return !ends_with(name, ".safetensors") && !ends_with(name, ".journal");
}

/* Every file that is taken over, whatever its size; copied, or opened and no more. */
static enum err take_files(const struct quantize_options *o, bool copy, struct err_detail *detail)
{
    struct file_list list;
    enum err e = ERR_OK;
    TRY(file_list_read(o->in, &list, detail));
    for (uint32_t i = 0; i < list.count && e == ERR_OK; i++) {
        struct file_map map;
        if (!is_taken_over(list.names[i]))
            continue;
        e = file_map_open(o->in, list.names[i], &map, detail);
        if (e != ERR_OK)
            break;
        if (copy)
            e = writer_file(o->out, list.names[i], map.bytes, map.size, detail);
        file_map_close(&map);
    }
    file_list_free(&list);
    return e;
}

enum err quantize_check_files(const struct quantize_options *options, struct err_detail *detail)
{
    TRY(make_config(options, 0, NULL, detail));
    return take_files(options, false, detail);
}

static enum err write_report(const struct quantize_options *o, const struct quantize_plan *plan,
                             struct err_detail *detail)
{
    struct str s;
    char title[64];
    quantize_title(o, title, sizeof(title));
    str_init(&s, 0);
    str_add_format(&s, "{\"format\": \"%s\", \"linears\": [", title);
    for (uint32_t i = 0; i < plan->count; i++) {
        const struct quantize_linear *l = &plan->linears[i];
        str_add_text(&s, i > 0 ? ",\n {\"name\": " : "\n {\"name\": ");
        json_write_string(&s, l->prefix, strlen(l->prefix));
        str_add_format(&s, ", \"in\": %u, \"out\": %u, \"calibration_rows\": %llu", l->source.in,
                       l->source.out, (unsigned long long)l->result.rows);
        str_add_format(&s, ", \"relative_error\": %.6g, \"proxy_error\": %.6g}",
                       l->result.relative_error, l->result.proxy_error);
    }
    str_add_text(&s, "\n]}\n");
    enum err e = writer_file(o->out, "quantization_report.json", s.text, s.bytes, detail);
    str_fini(&s);
    return e;
}

enum err quantize_write_files(const struct quantize_options *options,
                              const struct quantize_plan *plan, uint64_t calib_tokens,
                              struct err_detail *detail)
{
    TRY(take_files(options, true, detail));
    TRY(write_hf_config(options, detail));
    TRY(write_report(options, plan, detail));
    return write_config(options, calib_tokens, detail);
}
