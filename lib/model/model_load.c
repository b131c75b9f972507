/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/model_parts.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/mem.h"
#include "lib/model/announce.h"
#include "lib/model/cpu_pool.h"
#include "lib/model/format.h"
#include "lib/model/identity.h"
#include "lib/model/load_pass.h"
#include "lib/model/read_file.h"
#include "lib/model/safetensors.h"
#include "lib/model/vocabulary.h"
#include "lib/model/weights.h"

#define TEXT_BYTES_MAX  ((size_t)256 << 20)
#define WIDEN_BYTES_MAX ((uint64_t)1 << 30)

static uint64_t align64(uint64_t bytes)
{
    return (bytes + 63) & ~(uint64_t)63;
}

/* Where each layer's state lies in a slot. */
static void lay_out_state(struct model *m)
{
    const struct model_config *c = &m->config;
    uint64_t at = 0, dim = c->kda_dim, inner = c->kda_heads * dim;
    m->conv_ring_rows = c->conv_taps - 1 + MODEL_DRAFT_ROWS_MAX;
    m->index_ring_rows = c->index_kpool - 1 + MODEL_DRAFT_ROWS_MAX;
    for (uint32_t i = 0; i < c->layers; i++) {
        struct state_layer *s = &m->state[i];
        if (c->layer_dsa[i]) {
            m->dsa_number[i] = m->info.dsa_layers++;
            s->ring = at;
            at += align64((uint64_t)m->index_ring_rows * 2 * c->index_dim * sizeof(float));
            continue;
        }
        s->state = at;
        at += align64(inner * dim * sizeof(float));
        s->ring = at;
        at += align64(m->conv_ring_rows * 3 * inner * sizeof(float));
        s->journal = at;
        at += align64(MODEL_DRAFT_ROWS_MAX * op_kda_journal_floats(c->kda_heads, c->kda_dim) *
                      sizeof(float));
    }
    m->info.state_bytes = at;
    CHECK(m->info.state_bytes % 64 == 0);
    m->pools_kept = c->index_topk / c->index_kpool;
    m->selected_max = c->index_topk + c->index_kpool - 1;
}

static void add_stop_id(struct model_info *info, uint32_t id)
{
    for (uint32_t i = 0; i < info->stop_id_count; i++)
        if (info->stop_ids[i] == id)
            return;
    CHECK(info->stop_id_count < MODEL_STOP_IDS_MAX);
    info->stop_ids[info->stop_id_count++] = id;
}

static enum err fill_vocabulary(struct model *m, const struct identity_texts *texts,
                                struct err_detail *detail)
{
    uint32_t assistant = VOCABULARY_NO_ID;
    m->has_token = mem_take(m->config.vocab_size);
    if (texts->tokenizer != NULL)
        TRY(vocabulary_read(texts->tokenizer, texts->tokenizer_bytes, m->config.vocab_size,
                            m->has_token, &assistant, detail));
    else
        memset(m->has_token, 1, m->config.vocab_size);
    m->info.has_token = m->has_token;
    for (uint32_t i = 0; i < m->config.eos_count; i++)
        add_stop_id(&m->info, m->config.eos_ids[i]);
    if (assistant != VOCABULARY_NO_ID)
        add_stop_id(&m->info, assistant);
    return ERR_OK;
}

static void fill_info(struct model *m)
{
    const struct model_config *c = &m->config;
    m->info.vocab_size = c->vocab_size;
    m->info.layer_count = c->layers;
    m->info.hidden = c->hidden;
    m->info.context_max = c->context_max;
    m->info.latent_dim = c->kv_rank;
    m->info.index_dim = c->index_dim;
    m->info.index_kpool = c->index_kpool;
    lay_out_state(m);
}

static enum err take_share(struct model *m, const struct model_group *group,
                           struct err_detail *detail)
{
    m->group = group != NULL ? *group : (struct model_group){.ranks = 1};
    CHECK(m->group.ranks == 1 || (m->group.all_reduce != NULL && m->group.all_gather != NULL));
    if (m->group.interleave % m->whole.index_kpool != 0)
        return err_set(detail, ERR_UNSUPPORTED,
                       "interleave: %u, not a multiple of index_kpool %u: a pool would lie on two "
                       "ranks",
                       m->group.interleave, m->whole.index_kpool);
    CHECK(!dcp_on(m) || m->group.all_to_all != NULL);
    TRY(shard_plan(&m->whole, m->group.rank, m->group.ranks, m->group.moe, &m->shard, detail));
    m->config = shard_config(&m->whole, &m->shard);
    return ERR_OK;
}

/* Behind the last layer, in a cache of its own. */
static enum err want_mtp(struct model *m, bool only, struct err_detail *detail)
{
    uint32_t layer = m->whole.layers;
    if (layer >= MODEL_LAYERS_MAX)
        return err_set(detail, ERR_UNSUPPORTED, "mtp: behind %u layers, at most %u", layer,
                       MODEL_LAYERS_MAX - 1);
    m->config.layer_dsa[layer] = m->config.layer_moe[layer] = true;
    m->dsa_number[layer] = 0;
    m->state[layer] = (struct state_layer){0};
    if (only)
        weights_want_mtp_only(m->weights, &m->whole);
    else
        weights_want_mtp(m->weights, &m->whole);
    return ERR_OK;
}

/* Rank 0 of several runs the MTP layer by itself: a model of one rank that consists of it, the
 * embedding and the whole head, over the same files, threads and ops.  No other rank has a part in
 * it, so that drafts need no collectives. */
static enum err load_mtp_whole(struct model *m, const struct weights_bind_options *bind,
                               struct err_detail *detail)
{
    struct model *own = m->mtp = mem_take(sizeof *own);
    own->magic = MODEL_MAGIC;
    own->whole = m->whole;
    TRY(take_share(own, NULL, detail));
    own->ops = m->ops;
    own->ctx = m->ctx;
    fill_info(own);
    own->info.has_token = m->has_token;
    own->weights = weights_create_shard(&own->whole, &own->shard);
    TRY(want_mtp(own, true, detail));
    TRY(weights_bind(own->weights, &own->whole, m->tensors, bind, detail));
    for (uint32_t i = 0; i < own->weights->linear_count; i++)
        TRY(weights_check_values(own->weights, i, detail));
    weights_trust_values(own->weights);
    return ERR_OK;
}

static enum err load_tensors(struct model *m, const struct model_options *options,
                             const struct identity_texts *texts, struct err_detail *detail)
{
    struct format_hint hint;
    TRY(identity_hint(options->directory, &hint, detail));
    TRY(safetensors_open_directory(options->directory, &m->tensors, detail));
    m->weights = weights_create_shard(&m->whole, &m->shard);
    if (options->mtp && m->whole.mtp_layers == 0)
        return err_set(detail, ERR_INVALID,
                       "mtp: num_nextn_predict_layers is 0: the checkpoint has no such layer");
    if (options->mtp && m->group.ranks == 1)
        TRY(want_mtp(m, false, detail));
    op_table_cpu(&m->ops, options->numerics == MODEL_FAST ? OP_FAST_F32 : OP_EXACT, op_cpu_best());
    op_table_text(&m->ops, m->kernels, sizeof(m->kernels));
    m->info.kernels = m->kernels;
    /* The reference widens a weight at every use: worth doing once where the model is small. */
    struct weights_bind_options bind = {.widen = op_cpu_best() == OP_CPU_REF &&
                                                 weights_parameters(&m->whole) * sizeof(float) <=
                                                     WIDEN_BYTES_MAX,
                                        .hint = &hint,
                                        .ctx = &m->ctx};
    TRY(weights_bind(m->weights, &m->whole, m->tensors, &bind, detail));
    struct hash128 *hashes = mem_take_array(safetensors_count(m->tensors) + 1, sizeof(*hashes));
    enum err e = load_pass(m->tensors, m->weights, &m->ctx, options->progress,
                           options->progress_arg, hashes, detail);
    if (e == ERR_OK)
        weights_trust_values(m->weights);
    /* Its values are checked through the mapping: only of files that were read to their ends. */
    if (e == ERR_OK && options->mtp && m->group.ranks > 1 && m->group.rank == 0)
        e = load_mtp_whole(m, &bind, detail);
    m->info.model_fp = identity_fingerprint(m->tensors, texts, hashes);
    const struct identity_texts none = {.config = "", .tokenizer = ""};
    if (texts->tokenizer != NULL)
        m->info.tokenizer_fp = vocabulary_fp(texts->tokenizer, texts->tokenizer_bytes);
    m->info.weights_fp = identity_fingerprint(m->tensors, &none, hashes);
    mem_give(hashes);
    m->info.weight_bytes = safetensors_file_bytes(m->tensors);
    identity_quantization(m->tensors, m->info.quantization, sizeof(m->info.quantization));
    announce_warnings(m->weights, options->directory, &hint, m->info.warnings,
                      sizeof(m->info.warnings));
    return e;
}

static void start_threads(struct model *m, uint32_t threads)
{
    if (threads == 0) {
        long cores = sysconf(_SC_NPROCESSORS_ONLN);
        threads = cores > 0 ? (uint32_t)cores : 1;
    }
    if (threads > CPU_POOL_THREADS_MAX)
        threads = CPU_POOL_THREADS_MAX;
    m->info.threads = threads;
    if (threads < 2)
        return;
    m->pool = cpu_pool_create(threads);
    m->ctx.run = cpu_pool_run;
    m->ctx.pool = m->pool;
}

static enum err load(struct model *m, const struct model_options *options,
                     struct identity_texts *texts, struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0;
    TRY(read_file(options->directory, "config.json", TEXT_BYTES_MAX, &text, &bytes, detail));
    texts->config = text;
    texts->config_bytes = bytes;
    TRY(model_config_parse(texts->config, texts->config_bytes, &m->whole, detail));
    TRY(take_share(m, options->group, detail));
    enum err e =
        read_file(options->directory, "tokenizer.json", TEXT_BYTES_MAX, &text, &bytes, detail);
    if (e == ERR_OK) {
        texts->tokenizer = text;
        texts->tokenizer_bytes = bytes;
    } else if (e != ERR_NOT_FOUND) {
        return e;
    }
    e = read_file(options->directory, "chat_template.jinja", TEXT_BYTES_MAX, &text, &bytes, detail);
    if (e == ERR_OK) {
        texts->chat_template = text;
        texts->chat_template_bytes = bytes;
    } else if (e != ERR_NOT_FOUND) {
        return e;
    }
    fill_info(m);
    TRY(fill_vocabulary(m, texts, detail));
    start_threads(m, options->threads);
    return load_tensors(m, options, texts, detail);
}

enum err model_load(const struct model_options *options, struct model **ret_model,
                    struct err_detail *detail)
{
    struct identity_texts texts = {0};
    struct model *m = mem_take(sizeof(*m));
    m->magic = MODEL_MAGIC;
    enum err e = load(m, options, &texts, detail);
    free((void *)(uintptr_t)texts.config);
    free((void *)(uintptr_t)texts.tokenizer);
    free((void *)(uintptr_t)texts.chat_template);
    if (e != ERR_OK) {
        model_destroy(&m);
        return e;
    }
    *ret_model = m;
    return ERR_OK;
}

void model_destroy(struct model **model_p)
{
    struct model *m = *model_p;
    if (m == NULL)
        return;
    CHECK_OBJ(m, MODEL_MAGIC);
    model_destroy(&m->mtp); /* has no thread, file or vocabulary of its own */
    cpu_pool_destroy(&m->pool);
    weights_destroy(&m->weights);
    safetensors_close(&m->tensors);
    mem_give(m->has_token);
    m->magic = 0;
    mem_give(m);
    *model_p = NULL;
}

const struct model_config *model_config(const struct model *m)
{
    CHECK_OBJ(m, MODEL_MAGIC);
    return &m->whole;
}

const struct op_ctx *model_ctx(const struct model *m)
{
    CHECK_OBJ(m, MODEL_MAGIC);
    return &m->ctx;
}

const struct model_info *model_info(const struct model *m)
{
    CHECK_OBJ(m, MODEL_MAGIC);
    return &m->info;
}
