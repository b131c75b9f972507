/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_canary.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/hash.h"

STATIC_CHECK(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

void rt_canary_reset(struct rt_canary *c, uint64_t now_us)
{
    CHECK(c != NULL);
    uint64_t asked = c->asked, failed = c->failed;
    *c = (struct rt_canary){.next_us = now_us, .asked = asked, .failed = failed};
}

bool rt_canary_is(const struct rt_canary *c, const struct msg_id *id)
{
    static const struct msg_id none;
    return memcmp(&c->id, id, sizeof(*id)) == 0 && memcmp(&c->id, &none, sizeof(none)) != 0;
}

bool rt_canary_due(const struct rt_canary *c, uint64_t now_us)
{
    return !c->active && now_us >= c->next_us;
}

void rt_canary_asked(struct rt_canary *c, const struct msg_id *id, uint64_t now_us)
{
    CHECK(!c->active);
    c->active = true;
    c->id = *id;
    c->sent_us = now_us;
    c->count = 0;
    c->asked++;
}

static void settle(struct rt_canary *c, enum rt_canary_verdict verdict,
                   const struct rt_canary_times *t, uint64_t now_us)
{
    CHECK(c->active);
    c->active = false;
    c->verdict = verdict;
    /* Counted from the question: a slow answer must not stretch the period. */
    c->next_us = c->sent_us + t->period_us > now_us ? c->sent_us + t->period_us : now_us;
    if (verdict == RT_CANARY_RIGHT)
        c->right_us = now_us;
    else
        c->failed++;
}

void rt_canary_refused(struct rt_canary *c, const struct rt_canary_times *t, uint64_t now_us)
{
    CHECK(c->active);
    c->active = false;
    c->next_us = now_us + t->period_us;
}

static uint64_t answer_hash(const struct rt_canary *c)
{
    struct hash128 h = hash_xxh3_once(c->ids, c->count * sizeof(c->ids[0]));
    uint64_t first;
    memcpy(&first, h.bytes, sizeof(first));
    return first;
}

bool rt_canary_answer(struct rt_canary *c, const struct msg_tokens *tokens,
                      const struct msg_worker_info *expected, const struct rt_canary_times *t,
                      uint64_t now_us)
{
    CHECK(c->active && tokens != NULL && expected != NULL);
    for (uint32_t i = 0; i < tokens->count; i++) {
        uint64_t at = (uint64_t)tokens->seq + i;
        if (at < c->count)
            continue; /* a repetition */
        if (at > c->count || at >= MSG_CANARY_IDS_MAX) {
            settle(c, RT_CANARY_WRONG, t, now_us);
            return true;
        }
        c->ids[c->count++] = tokens->ids[i];
    }
    if (tokens->finish == MSG_FINISH_NONE)
        return false;
    bool whole = tokens->finish == MSG_FINISH_LENGTH || tokens->finish == MSG_FINISH_STOP;
    bool refused = tokens->finish == MSG_FINISH_CANCELLED ||
                   (tokens->finish == MSG_FINISH_FAILED && err_retryable(tokens->code));
    if (refused) {
        rt_canary_refused(c, t, now_us);
        return true;
    }
    bool right = whole && c->count == expected->canary_output_count &&
                 answer_hash(c) == expected->canary_hash;
    settle(c, right ? RT_CANARY_RIGHT : RT_CANARY_WRONG, t, now_us);
    return true;
}

bool rt_canary_expire(struct rt_canary *c, const struct rt_canary_times *t, uint64_t now_us,
                      bool busy)
{
    uint64_t silence_us_max = busy ? t->silence_busy_us_max : t->silence_us_max;
    if (!c->active || now_us - c->sent_us <= silence_us_max)
        return false;
    settle(c, RT_CANARY_LATE, t, now_us);
    c->next_us = now_us; /* ask again at once: it may be well by now */
    return true;
}

void rt_canary_request(const struct msg_worker_info *info, struct msg_request *ret_request)
{
    CHECK(info->canary_count > 0 && info->canary_ids != NULL);
    *ret_request = (struct msg_request){
        .session_key = "",
        .cache_salt = "",
        .effort = "",
        .client_id = "",
        .spec = "",
        .prompt_count = info->canary_count,
        .ids_count = info->canary_count,
        .ids = info->canary_ids,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
        .limits = {.output_tokens_max =
                       info->canary_output_count > 0 ? info->canary_output_count : 1,
                   .ignore_eos = true},
        .canary = true,
    };
}
