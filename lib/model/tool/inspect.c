/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>

#include "lib/base/check.h"
#include "lib/base/str.h"
#include "lib/model/config.h"
#include "lib/model/safetensors.h"
#include "lib/model/tool/args.h"
#include "lib/model/tool/tool.h"
#include "lib/model/weights.h"

static void print_tensor(const struct safetensors_tensor *t)
{
    printf("%-8s [", safetensors_dtype_name(t->dtype));
    for (uint32_t d = 0; d < t->dims; d++)
        printf("%s%" PRIu64, d > 0 ? ", " : "", t->shape[d]);
    printf("] %s\n", t->name);
}

static void print_formats(const struct safetensors *set)
{
    uint64_t tensors[SAFETENSORS_DTYPE_COUNT] = {0}, elements[SAFETENSORS_DTYPE_COUNT] = {0};
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        tensors[t->dtype]++;
        elements[t->dtype] += t->elements;
    }
    for (uint32_t d = 0; d < SAFETENSORS_DTYPE_COUNT; d++)
        if (tensors[d] > 0)
            printf("format: %s, %" PRIu64 " tensors, %" PRIu64 " values\n",
                   safetensors_dtype_name((enum safetensors_dtype)d), tensors[d], elements[d]);
}

static void print_model(const struct model *m)
{
    const struct model_config *c = model_config(m);
    const struct model_info *info = model_info(m);
    char fp[33];
    hex_encode(info->model_fp.bytes, sizeof(info->model_fp.bytes), fp);
    printf("model: %u layers (%u DSA), hidden %u, vocabulary %u, context %u\n", c->layers,
           info->dsa_layers, c->hidden, c->vocab_size, c->context_max);
    printf("experts: %u, %u per token\n", c->experts, c->experts_per_token);
    printf("quantization: %s\n", info->quantization);
    printf("parameters: %" PRIu64 " in the text model without MTP\n", weights_parameters(c));
    printf("state: %" PRIu64 " bytes per sequence\n", info->state_bytes);
    printf("fp: %s\n", fp);
}

int tool_inspect(int argc, char **argv)
{
    const char *directory = NULL;
    struct err_detail detail = {{0}};
    struct safetensors *set = NULL;
    struct model *m = NULL;
    if (tool_args(argc, argv, NULL, 0, &directory, &detail) != ERR_OK ||
        safetensors_open_directory(directory, &set, &detail) != ERR_OK)
        return tool_fail(&detail);
    for (uint32_t i = 0; i < safetensors_count(set); i++)
        print_tensor(safetensors_at(set, i));
    print_formats(set);
    safetensors_close(&set);
    if (tool_load(directory, NULL, 1, &m, &detail) != ERR_OK)
        return tool_fail(&detail);
    print_model(m);
    model_destroy(&m);
    return 0;
}
