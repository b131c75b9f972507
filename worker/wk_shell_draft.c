/* SPDX-License-Identifier: Apache-2.0 */
/* The shell's side of the drafter: hellos, the tap ring it wants; what it says goes to the core. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "lib/model/dflash.h"
#include "worker/wk_shell_state.h"

void wk_shell_draft_beat(struct wk_shell *s)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    if (s->core == NULL)
        return;
    const struct model_info *info = wk_exec_loaded(s->exec)->info;
    struct msg m = {.type = MSG_DRAFT_HELLO, .epoch = s->kv.epoch};
    m.u.draft_hello = (struct msg_draft_hello){
        .incarnation = s->incarnation,
        .epoch = s->kv.epoch,
        .model_fp = info->model_fp,
        .hidden = info->hidden,
        .layers = info->layer_count,
        .vocab_size = info->vocab_size,
        .tap_ring = s->taps.options.layer_count > 0 ? s->taps.path : "",
        .tokenizer_fp = info->tokenizer_fp,
        .tap_ring_incarnation = s->taps.options.incarnation,
    };
    if (s->taps.options.reducer != NULL)
        m.u.draft_hello.tap_context_fp = dflash_context_fp(s->taps.options.reducer);
    wk_shell_beat(s, WK_DRAFTER, &m);
}

/* What a drafter asks for, bounded by what this model has. */
static enum err taps_check(const struct wk_shell *s, const struct msg_draft_hello_reply *h,
                           struct err_detail *detail)
{
    const struct model_info *info = wk_exec_loaded(s->exec)->info;
    if (h->tap_hidden != info->hidden)
        return err_set(detail, ERR_INVALID, "tap_hidden: %u, the model has %u", h->tap_hidden,
                       info->hidden);
    if (h->tap_type != TAP_BF16 && h->tap_type != TAP_F32)
        return err_set(detail, ERR_UNSUPPORTED, "tap_type: %u", h->tap_type);
    for (uint32_t i = 0; i < h->tap_layer_count; i++)
        if (h->tap_layers[i] >= info->layer_count)
            return err_set(detail, ERR_INVALID, "tap_layers: %u, the model has %u layers",
                           h->tap_layers[i], info->layer_count);
    return ERR_OK;
}

/* The worker's own copy of the drafter's fc, where it is this drafter's. */
static struct dflash *reducer_for(const struct wk_shell *s, const struct msg_draft_hello_reply *h)
{
    struct dflash *own = wk_exec_loaded(s->exec)->tap_fc;
    if (own == NULL)
        return NULL;
    const struct dflash_config *c = dflash_config(own);
    struct hash128 fp = dflash_context_fp(own);
    bool same = memcmp(&fp, &h->tap_context_fp, sizeof fp) == 0 && h->tap_hidden == c->hidden &&
                h->tap_layer_count == c->tap_count &&
                memcmp(h->tap_layers, c->taps, c->tap_count * sizeof *c->taps) == 0;
    return same ? own : NULL;
}

static bool taps_same(const struct wk_taps_options *o, const struct msg_draft_hello_reply *h)
{
    return o->layer_count == h->tap_layer_count && o->hidden == h->tap_hidden &&
           o->type == h->tap_type &&
           memcmp(o->layers, h->tap_layers, o->layer_count * sizeof *o->layers) == 0;
}

/* As it says, cut between two characters. */
static void source_take(struct wk_shell *s, const char *source)
{
    size_t room = sizeof s->drafter_source - 1, bytes = strnlen(source, room);
    bytes = utf8_valid_prefix(source, bytes);
    memcpy(s->drafter_source, source, bytes);
    s->drafter_source[bytes] = '\0';
}

/* A ring that fits stays: another drafter of the same kind finds in it what the last one had. */
static void taps_settle(struct wk_shell *s, const struct msg_draft_hello_reply *h)
{
    struct wk_tap_state *t = &s->taps;
    struct err_detail detail = {.text = ""};
    struct wk_taps *taps = NULL;
    struct dflash *reducer = reducer_for(s, h);
    if (h->tap_layer_count == 0 || t->refused ||
        (taps_same(&t->options, h) && t->options.reducer == reducer))
        return;
    struct wk_taps_options o = {
        .type = h->tap_type,
        .hidden = h->tap_hidden,
        .layer_count = h->tap_layer_count,
        .reducer = reducer,
        .bytes_max = s->params->tap_bytes,
    };
    rng_system(&o.incarnation, sizeof o.incarnation);
    memcpy(o.layers, h->tap_layers, h->tap_layer_count * sizeof *o.layers);
    enum err e = taps_check(s, h, &detail);
    if (e == ERR_OK)
        e = wk_taps_create(&o, &taps, &detail);
    if (e == ERR_BUSY)
        return; /* the drafter's next hello makes another */
    if (e != ERR_OK) {
        t->refused = true;
        log_error(WORKER, "no taps for the drafter", "reason=\"%s\"", detail.text);
        return;
    }
    if (wk_exec_taps(s->exec, &taps) != ERR_OK) {
        wk_taps_destroy(&taps); /* the drafter's next hello makes another */
        return;
    }
    t->options = o;
    wk_taps_path(o.incarnation, t->path);
    log_info(WORKER, "tap ring made", "path=%s layers=%u hidden=%u type=%s layout=%s", t->path,
             o.layer_count, o.hidden, o.type == TAP_BF16 ? "bf16" : "f32",
             reducer != NULL ? "reduced" : "raw");
    if (reducer == NULL && wk_exec_loaded(s->exec)->tap_fc != NULL)
        log_warn(WORKER, "taps go whole: the drafter's fc is not that of tap_fc", "tap_fc=%s",
                 s->params->tap_fc);
    wk_shell_draft_beat(s);
}

void wk_shell_draft_message(struct wk_shell *s, const struct msg *m)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    if (s->core == NULL)
        return;
    if (m->type == MSG_DRAFT_HELLO_REPLY) {
        const struct msg_draft_hello_reply *h = &m->u.draft_hello_reply;
        if (h->incarnation != s->drafter_incarnation) {
            s->drafter_incarnation = h->incarnation;
            s->taps.refused = false;
            source_take(s, h->source);
            log_info(WORKER, "drafter up",
                     "source=%s drafts_max=%u taps=%u incarnation=%016" PRIx64, h->source,
                     h->draft_tokens_max, h->tap_layer_count, s->drafter_incarnation);
        }
        taps_settle(s, h);
    }
    struct wk_event event = {.type = WK_EV_MSG, .msg = m};
    wk_shell_step(s, &event);
}
