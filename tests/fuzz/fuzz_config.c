/* SPDX-License-Identifier: Apache-2.0 */
/* config.json and tokenizer.json of any content: accepted values are in their bounds. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/op_types.h"
#include "lib/base/check.h"
#include "lib/model/config.h"
#include "lib/model/vocabulary.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model_config c;
    struct err_detail detail = {{0}};
    uint8_t has_token[512] = {0};
    uint32_t assistant = 0;
    if (model_config_parse((const char *)data, size, &c, &detail) == ERR_OK) {
        CHECK(c.layers > 0 && c.layers <= MODEL_LAYERS_MAX);
        CHECK(c.experts_per_token <= c.experts && c.experts <= OP_EXPERTS_MAX);
        CHECK(c.index_kpool > 1 && c.index_topk % c.index_kpool == 0);
        CHECK(c.index_topk / c.index_kpool <= OP_POOLS_KEPT_MAX);
        CHECK(c.kda_dim <= OP_HEAD_DIM_MAX && c.kv_rank <= OP_LATENT_MAX);
        CHECK(c.eos_count > 0 && c.eos_count <= MODEL_EOS_IDS_MAX);
    } else {
        CHECK(strncmp(detail.text, "config.json", 11) == 0);
    }
    if (vocabulary_read((const char *)data, size, sizeof(has_token), has_token, &assistant,
                        &detail) == ERR_OK)
        CHECK(assistant == VOCABULARY_NO_ID || has_token[assistant] == 1);
    return 0;
}
