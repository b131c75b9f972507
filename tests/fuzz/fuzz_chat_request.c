/* SPDX-License-Identifier: Apache-2.0 */
/* Bodies of chat, completions, tokenize and detokenize (the first byte chooses) to the internal form,
 * and the refusal to JSON. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/gw_checkpoint.h"
#include "gateway/gw_openai.h"
#include "lib/base/check.h"
#include "lib/base/str.h"
#include "lib/text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct gw_checkpoint checkpoint;
static struct gw_openai openai;
static struct gw_request request;
static struct str out;

static void start(void)
{
    char path[4096];
    struct err_detail detail;
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    snprintf(path, sizeof(path), "%s/deploy/demo", root ? root : ".");
    if (gw_checkpoint_load(path, "m", 0, &checkpoint, &detail) != ERR_OK) {
        fprintf(stderr, "%s\n", detail.text);
        exit(2);
    }
    gw_openai_init(&openai, &checkpoint, "max", false);
    gw_request_init(&request, 16u << 20);
    str_init(&out, 64u << 20);
}

static void check_request(const struct gw_request *r)
{
    CHECK(r->prompt_count > 0 && r->n >= 1 && r->choice_count == r->prompt_count * r->n);
    for (uint32_t i = 0; i < r->prompt_count; i++) {
        CHECK(r->prompts[i].count > 0 && r->prompts[i].count < 300);
        for (uint32_t k = 0; k < r->prompts[i].count; k++)
            CHECK(r->prompts[i].ids[k] < checkpoint.id_count);
    }
    CHECK(r->base.sampling.temperature >= 0 && r->base.sampling.top_p > 0);
    CHECK(strlen(r->base.session_key) <= MSG_TEXT_MAX && strlen(r->base.spec) <= MSG_TEXT_MAX);
    CHECK(r->stop_count <= GW_STOPS_MAX && r->base.limits.stop_id_count <= MSG_STOP_IDS_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct gw_refusal refusal;
    if (checkpoint.tokenizer == NULL)
        start();
    if (size < 1 || size > 65536)
        return 0;
    struct gw_openai_input in = {
        .endpoint = (enum gw_endpoint)(data[0] % 4),
        .body = (const char *)data + 1,
        .body_bytes = size - 1,
        .session_id = "",
        .request_id = "r",
        .client_id = "",
        .window = 300,
    };
    bool ok;
    str_clear(&out);
    if (in.endpoint == GW_CHAT || in.endpoint == GW_COMPLETION) {
        gw_request_reset(&request);
        ok = gw_openai_request(&openai, &in, &request, &refusal);
        if (ok)
            check_request(&request);
    } else {
        ok = gw_openai_tokenize(&openai, &in, &out, &refusal);
    }
    if (!ok) {
        CHECK(refusal.status >= 400 && refusal.message[0]);
        str_clear(&out);
        gw_refusal_write(&out, &refusal);
    }
    CHECK(utf8_valid_prefix(out.text ? out.text : "", out.bytes) == out.bytes);
    return 0;
}
