/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/shard.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/model/config.h"

bool shard_moe_parse(const char *text, enum shard_moe *ret_moe)
{
    static const char *const names[] = {"auto", "tp", "ep"};
    for (uint32_t i = 0; i < ARRAY_COUNT(names); i++) {
        if (strcmp(text, names[i]) != 0)
            continue;
        *ret_moe = (enum shard_moe)i;
        return true;
    }
    return false;
}

struct shard_range shard_split(uint32_t size, uint32_t unit, uint32_t ranks, uint32_t rank)
{
    CHECK(unit > 0 && ranks > 0 && rank < ranks);
    uint32_t units = size / unit + (size % unit != 0);
    uint32_t each = units / ranks, more = units % ranks;
    uint64_t first = (uint64_t)(rank * each + (rank < more ? rank : more)) * unit;
    uint64_t end = first + (uint64_t)(each + (rank < more)) * unit;
    first = first < size ? first : size;
    end = end < size ? end : size;
    return (struct shard_range){(uint32_t)first, (uint32_t)(end - first)};
}

/* Whether every rank gets the same number of whole blocks. */
static bool even_blocks(uint32_t width, uint32_t ranks)
{
    return width % (SHARD_BLOCK * ranks) == 0;
}

static enum err moe_plan(const struct model_config *c, enum shard_moe moe, struct shard *s,
                         struct err_detail *detail)
{
    bool even = even_blocks(c->expert_width, s->ranks);
    s->shared = shard_split(c->expert_width, SHARD_BLOCK, s->ranks, s->rank);
    s->expert = (struct shard_range){0, c->expert_width};
    s->experts = (struct shard_range){0, c->experts};
    if (moe == SHARD_MOE_TP && !even && s->ranks > 1)
        return err_set(detail, ERR_UNSUPPORTED,
                       "moe_split=tp: experts are %u columns wide, which %u ranks cannot share in "
                       "multiples of %u; use moe_split=ep or auto",
                       c->expert_width, s->ranks, SHARD_BLOCK);
    s->experts_whole = moe == SHARD_MOE_EP || (moe == SHARD_MOE_AUTO && !even);
    if (!s->experts_whole) {
        s->expert = shard_split(c->expert_width, SHARD_BLOCK, s->ranks, s->rank);
        return ERR_OK;
    }
    if (c->experts < s->ranks)
        return err_set(detail, ERR_UNSUPPORTED, "moe_split=ep: %u experts for %u ranks", c->experts,
                       s->ranks);
    s->experts = shard_split(c->experts, 1, s->ranks, s->rank);
    return ERR_OK;
}

enum err shard_plan(const struct model_config *config, uint32_t rank, uint32_t ranks,
                    enum shard_moe moe, struct shard *ret_shard, struct err_detail *detail)
{
    CHECK(ranks > 0 && rank < ranks);
    struct shard s = {.rank = rank, .ranks = ranks};
    bool kda = false, dsa = false, sparse = false;
    if (ranks > SHARD_RANKS_MAX)
        return err_set(detail, ERR_UNSUPPORTED, "ranks: %u, at most %u", ranks, SHARD_RANKS_MAX);
    for (uint32_t i = 0; i < config->layers; i++) {
        kda = kda || !config->layer_dsa[i];
        dsa = dsa || config->layer_dsa[i];
        sparse = sparse || config->layer_moe[i];
    }
    if ((kda && config->kda_heads < ranks) || (dsa && config->heads < ranks))
        return err_set(detail, ERR_UNSUPPORTED, "ranks: %u for %u attention and %u KDA heads",
                       ranks, config->heads, config->kda_heads);
    if (config->vocab_size < ranks)
        return err_set(detail, ERR_UNSUPPORTED, "ranks: %u for a vocabulary of %u", ranks,
                       config->vocab_size);
    s.kda_heads = shard_split(config->kda_heads, 1, ranks, rank);
    s.heads = shard_split(config->heads, 1, ranks, rank);
    s.dense = shard_split(config->dense_width, SHARD_BLOCK, ranks, rank);
    s.vocab = shard_split(config->vocab_size, 1, ranks, rank);
    if (sparse)
        TRY(moe_plan(config, moe, &s, detail));
    *ret_shard = s;
    return ERR_OK;
}

struct model_config shard_config(const struct model_config *config, const struct shard *shard)
{
    struct model_config c = *config;
    c.kda_heads = shard->kda_heads.count;
    c.heads = shard->heads.count;
    c.dense_width = shard->dense.count;
    c.expert_width = shard->expert.count;
    return c;
}
