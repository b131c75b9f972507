/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_verify.h"

#include <stddef.h>

#include "lib/base/check.h"

static bool is_stop(const struct wk_limits *limits, uint32_t id)
{
    for (uint32_t i = 0; i < limits->stop_id_count; i++)
        if (limits->stop_ids[i] == id)
            return true;
    return false;
}

struct wk_verdict wk_verify(const struct wk_limits *limits, uint32_t length, uint32_t output_count,
                            const uint32_t *drafts, uint32_t draft_count, const uint32_t *sampled,
                            uint32_t sampled_count)
{
    CHECK(limits != NULL && sampled != NULL && sampled_count >= 1);
    CHECK(drafts != NULL || draft_count == 0);
    CHECK(output_count < limits->output_tokens_max && length < limits->context_max);
    struct wk_verdict v = {.finish = MSG_FINISH_NONE};
    for (uint32_t j = 0; j < sampled_count && v.finish == MSG_FINISH_NONE; j++) {
        v.final_count = j + 1;
        uint32_t output_now = output_count + j + 1;
        if (output_now > limits->output_tokens_min && is_stop(limits, sampled[j]))
            v.finish = MSG_FINISH_STOP;
        else if (output_now >= limits->output_tokens_max || length + j + 1 >= limits->context_max)
            v.finish = MSG_FINISH_LENGTH;
        if (j >= draft_count || drafts[j] != sampled[j])
            break;
        v.accepted = j + 1;
    }
    CHECK(v.final_count >= 1 && v.final_count <= draft_count + 1);
    CHECK(v.accepted <= v.final_count && v.accepted + 1 >= v.final_count);
    return v;
}

uint32_t wk_verify_over(const struct wk_limits *limits, uint32_t length, uint32_t output_count,
                        uint32_t last_id)
{
    CHECK(limits != NULL);
    if (output_count > limits->output_tokens_min && is_stop(limits, last_id))
        return MSG_FINISH_STOP;
    if (output_count >= limits->output_tokens_max || length >= limits->context_max)
        return MSG_FINISH_LENGTH;
    return MSG_FINISH_NONE;
}

uint32_t wk_verify_usable(const uint32_t *drafts, uint32_t count, uint32_t vocab_size,
                          const uint8_t *has_token)
{
    CHECK(drafts != NULL || count == 0);
    CHECK(has_token != NULL && vocab_size > 0);
    for (uint32_t i = 0; i < count; i++)
        if (drafts[i] >= vocab_size || !has_token[drafts[i]])
            return i;
    return count;
}

uint32_t wk_verify_drafts_max(const struct wk_limits *limits, uint32_t length,
                              uint32_t output_count, uint32_t wanted)
{
    CHECK(limits != NULL);
    CHECK(output_count < limits->output_tokens_max && length < limits->context_max);
    uint32_t by_output = limits->output_tokens_max - output_count - 1;
    uint32_t by_context = limits->context_max - length - 1;
    uint32_t most = by_output < by_context ? by_output : by_context;
    return wanted < most ? wanted : most;
}
