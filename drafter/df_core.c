/* SPDX-License-Identifier: Apache-2.0 */
#include "drafter/df_core.h"

#include <string.h>

#include "lib/base/check.h"

#define DF_CORE_MAGIC 0x4446434fu
#define PAGE_BYTES    4096u

size_t df_core_sequence_bytes(const struct df_core_options *o)
{
    return (df_ngram_bytes(o->context_max) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

size_t df_core_bytes(const struct df_core_options *o)
{
    return o->sequences_max * df_core_sequence_bytes(o);
}

void df_core_init(struct df_core *core, const struct df_core_options *options, void *memory,
                  size_t bytes)
{
    CHECK(options->sequences_max > 0 && options->sequences_max <= DF_SEQUENCES_MAX);
    CHECK(options->tokens_max >= options->context_max);
    CHECK(options->match_min > 0 && options->match_min <= options->match_max);
    CHECK(options->match_max <= DF_NGRAM_MAX && options->ngram_first <= DF_NGRAM_MAX);
    CHECK(options->network_drafts < MSG_DRAFT_IDS_MAX);
    CHECK(options->tap_layer_count <= MSG_TAPS_MAX);
    CHECK(bytes >= df_core_bytes(options));
    CHECK((uintptr_t)memory % PAGE_BYTES == 0);
    memset(core, 0, sizeof(*core));
    core->magic = DF_CORE_MAGIC;
    core->options = *options;
    size_t each = df_core_sequence_bytes(options);
    for (uint32_t i = 0; i < options->sequences_max; i++)
        df_ngram_init(&core->sequences[i].ngram, (char *)memory + i * each, each,
                      options->context_max, options->seed);
}

/* ---- sequences ---- */

static struct df_sequence *sequence_find(struct df_core *core, const struct msg_id *id)
{
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        struct df_sequence *s = &core->sequences[i];
        if (s->used && memcmp(&s->id, id, sizeof(*id)) == 0)
            return s;
    }
    return NULL;
}

/* Cleared when it is taken: a shell that gives its memory back makes no page dirty again. */
static void memory_free(struct df_core *core, struct df_sequence *s, struct df_actions *actions)
{
    CHECK(core->tokens >= s->high && s->high >= s->ngram.length);
    CHECK(actions->freed_count < DF_SEQUENCES_MAX);
    core->tokens -= s->high;
    s->ngram.length = 0;
    actions->freed[actions->freed_count++] = (uint32_t)(s - core->sequences);
}

static void sequence_drop(struct df_core *core, struct df_sequence *s, struct df_actions *actions)
{
    CHECK(s->used && core->live > 0);
    core->live--;
    s->used = false;
    memory_free(core, s, actions);
}

static struct df_sequence *sequence_oldest(struct df_core *core, const struct df_sequence *spared)
{
    struct df_sequence *oldest = NULL;
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        struct df_sequence *s = &core->sequences[i];
        if (s->used && s != spared && (oldest == NULL || s->last_use < oldest->last_use))
            oldest = s;
    }
    return oldest;
}

/* Takes back what was freed in this step and is used again: its memory must stay. */
static bool freed_forget(struct df_actions *actions, uint32_t index)
{
    for (uint32_t i = 0; i < actions->freed_count; i++) {
        if (actions->freed[i] == index) {
            actions->freed[i] = actions->freed[--actions->freed_count];
            return true;
        }
    }
    return false;
}

static struct df_sequence *sequence_take(struct df_core *core, struct df_actions *actions)
{
    struct df_sequence *found = NULL;
    for (uint32_t i = 0; i < core->options.sequences_max && found == NULL; i++) {
        if (!core->sequences[i].used)
            found = &core->sequences[i];
    }
    if (found == NULL) {
        found = sequence_oldest(core, NULL);
        CHECK(found != NULL);
        core->counters.evicted++;
        sequence_drop(core, found, actions);
    }
    if (!freed_forget(actions, (uint32_t)(found - core->sequences)))
        found->high = 0;
    core->tokens += found->high;
    df_ngram_clear(&found->ngram);
    actions->fresh = true;
    found->used = true;
    found->too_long = false;
    core->live++;
    CHECK(core->live <= core->options.sequences_max);
    return found;
}

static void sequence_touch(struct df_core *core, struct df_sequence *s)
{
    s->last_us = core->now_us;
    s->last_use = ++core->use;
}

/* Makes the tokens from base on equal to ids; what is already there stays. */
static enum err sequence_write(struct df_core *core, struct df_sequence *s, uint32_t base,
                               const uint32_t *ids, uint32_t count, struct df_actions *actions)
{
    CHECK(base <= s->ngram.length);
    if (count > core->options.context_max - base) {
        memory_free(core, s, actions);
        s->high = 0;
        s->too_long = true;
        core->counters.too_long++;
        return ERR_CONTEXT;
    }
    uint32_t same = 0;
    while (same < count && base + same < s->ngram.length && s->ngram.ids[base + same] == ids[same])
        same++;
    if (s->ngram.length > base + same) {
        actions->cut = true;
        actions->cut_length = base + same;
    }
    df_ngram_truncate(&s->ngram, base + same);
    uint32_t more = base + count > s->high ? base + count - s->high : 0;
    while (core->tokens + more > core->options.tokens_max) {
        struct df_sequence *oldest = sequence_oldest(core, s);
        CHECK(oldest != NULL); /* one sequence alone fits: context_max <= tokens_max */
        core->counters.evicted++;
        sequence_drop(core, oldest, actions);
    }
    core->tokens += more;
    s->high += more;
    if (same == count)
        return ERR_OK;
    enum err e = df_ngram_append(&s->ngram, ids + same, count - same);
    CHECK(e == ERR_OK);
    return ERR_OK;
}

/* ---- messages ---- */

static bool peer_same(const struct df_peer *a, const struct df_peer *b)
{
    return a->count == b->count && memcmp(a->bytes, b->bytes, a->count) == 0;
}

static struct df_known_peer *peer_find(struct df_core *core, const struct df_peer *peer)
{
    struct df_known_peer *oldest = &core->peers[0];
    for (uint32_t i = 0; i < DF_PEERS_MAX; i++) {
        struct df_known_peer *k = &core->peers[i];
        if (k->used && peer_same(&k->peer, peer))
            return k;
        if (!k->used || (oldest->used && k->last_use < oldest->last_use))
            oldest = k;
    }
    *oldest = (struct df_known_peer){.peer = *peer};
    return oldest;
}

/* Which field of the hello says that the network was made for another target; NULL = none. */
static const char *misfit_of(const struct df_core_options *o, const struct msg_draft_hello *h)
{
    if (h->hidden != o->network_hidden)
        return "hidden";
    if (h->vocab_size != o->network_vocab)
        return "vocab_size";
    if (memcmp(&h->tokenizer_fp, &o->network_tokenizer, sizeof h->tokenizer_fp) != 0)
        return "tokenizer_fp";
    for (uint32_t i = 0; i < o->tap_layer_count; i++)
        if (o->tap_layers[i] >= h->layers)
            return "layers";
    return NULL;
}

static void on_hello(struct df_core *core, const struct df_event *event, struct df_actions *actions)
{
    struct df_known_peer *k = peer_find(core, &event->peer);
    uint64_t incarnation = event->msg->u.draft_hello.incarnation;
    if (k->used && k->incarnation != incarnation) {
        /* Another process under the same name: the old one's sequences are nobody's. */
        for (uint32_t i = 0; i < core->options.sequences_max; i++) {
            struct df_sequence *s = &core->sequences[i];
            if (!s->used || !peer_same(&s->peer, &event->peer))
                continue;
            core->counters.superseded++;
            sequence_drop(core, s, actions);
        }
    }
    const struct msg_draft_hello *h = &event->msg->u.draft_hello;
    const struct df_core_options *o = &core->options;
    const char *misfit = o->network_drafts > 0 ? misfit_of(o, h) : NULL;
    if (!k->used || k->incarnation != incarnation)
        actions->misfit = misfit;
    k->used = true;
    k->incarnation = incarnation;
    k->last_use = ++core->use;
    k->fits = o->network_drafts > 0 && misfit == NULL;
    core->counters.misfits += misfit != NULL;
    actions->fits = k->fits;
    actions->peer = (uint32_t)(k - core->peers);
    actions->reply = true;
    actions->msg.type = MSG_DRAFT_HELLO_REPLY;
    actions->msg.u.draft_hello_reply =
        (struct msg_draft_hello_reply){.incarnation = core->options.incarnation,
                                       .source = k->fits ? "dflash" : "ngram",
                                       .draft_tokens_max = MSG_DRAFT_IDS_MAX};
    if (!k->fits)
        return;
    struct msg_draft_hello_reply *reply = &actions->msg.u.draft_hello_reply;
    reply->draft_tokens_max = o->network_drafts;
    reply->tap_layer_count = o->tap_layer_count;
    reply->tap_layers = o->tap_layers;
    reply->tap_hidden = o->network_hidden;
    reply->tap_type = o->tap_type;
    reply->tap_context_fp = o->network_context;
}

/* Says which sequence of which peer the message is about. */
static void about(struct df_core *core, const struct df_event *event, struct df_sequence *s,
                  struct df_actions *actions)
{
    actions->sequence = (uint32_t)(s - core->sequences);
    for (uint32_t i = 0; i < DF_PEERS_MAX; i++) {
        const struct df_known_peer *k = &core->peers[i];
        if (k->used && k->fits && peer_same(&k->peer, &event->peer))
            actions->peer = i;
    }
}

static void on_open(struct df_core *core, const struct df_event *event, struct df_actions *actions)
{
    const struct msg_draft_open *open = &event->msg->u.draft_open;
    core->counters.opens++;
    struct df_sequence *s = sequence_find(core, &event->msg->id);
    if (s == NULL)
        s = sequence_take(core, actions);
    s->id = event->msg->id;
    s->peer = event->peer;
    s->epoch = open->epoch;
    if (s->too_long) { /* its memory went back */
        df_ngram_clear(&s->ngram);
        actions->fresh = true;
    }
    s->too_long = false;
    sequence_touch(core, s);
    about(core, event, s, actions);
    /* Too long is remembered in the sequence; the worker learns it from the first proposal. */
    enum err e = sequence_write(core, s, 0, open->ids, open->ids_count, actions);
    CHECK(e == ERR_OK || s->too_long);
}

/* Brings the sequence to base + ids; the errors are those of DraftReply. */
static enum err context_apply(struct df_core *core, const struct df_event *event, uint32_t epoch,
                              uint32_t base, const uint32_t *ids, uint32_t count,
                              struct df_sequence **ret_sequence, struct df_actions *actions)
{
    struct df_sequence *s = sequence_find(core, &event->msg->id);
    if (s == NULL) {
        core->counters.not_found++;
        return ERR_NOT_FOUND;
    }
    *ret_sequence = s;
    sequence_touch(core, s);
    if (epoch == s->epoch && s->too_long)
        return ERR_CONTEXT;
    if (epoch != s->epoch || base > s->ngram.length) {
        core->counters.stale++;
        return ERR_EPOCH;
    }
    s->peer = event->peer;
    about(core, event, s, actions);
    return sequence_write(core, s, base, ids, count, actions);
}

static void on_context(struct df_core *core, const struct df_event *event,
                       struct df_actions *actions)
{
    const struct msg_draft_context *c = &event->msg->u.draft_context;
    struct df_sequence *s = NULL;
    core->counters.contexts++;
    /* No answer to this message: the next proposal gets the same error if it still holds. */
    enum err e =
        context_apply(core, event, c->epoch, c->base_length, c->ids, c->ids_count, &s, actions);
    CHECK(e != ERR_OK || s->ngram.length == c->base_length + c->ids_count);
}

static enum err propose(struct df_core *core, const struct df_event *event,
                        struct df_actions *actions, struct df_sequence **ret_sequence)
{
    const struct msg_draft_propose *p = &event->msg->u.draft_propose;
    struct df_sequence *s = NULL;
    enum err e =
        context_apply(core, event, p->epoch, p->base_length, p->ids, p->ids_count, &s, actions);
    *ret_sequence = s;
    if (e != ERR_OK)
        return e;
    if (s->ngram.length == 0 || s->ngram.ids[s->ngram.length - 1] != p->anchor) {
        /* Lengths agree and tokens do not: nothing held here can be trusted. */
        core->counters.stale++;
        sequence_drop(core, s, actions);
        *ret_sequence = NULL;
        return ERR_EPOCH;
    }
    bool network = actions->peer != DF_NONE && strcmp(p->source, "ngram") != 0;
    if (p->source[0] != '\0' && strcmp(p->source, network ? "dflash" : "ngram") != 0) {
        core->counters.unsupported++;
        return ERR_UNSUPPORTED;
    }
    CHECK(event->now_us >= event->received_us);
    if (event->now_us - event->received_us > core->options.deadline_us) {
        core->counters.late++;
        return ERR_TIMEOUT;
    }
    uint32_t wanted = p->draft_count < MSG_DRAFT_IDS_MAX ? p->draft_count : MSG_DRAFT_IDS_MAX;
    const struct df_core_options *o = &core->options;
    uint32_t least = network ? o->ngram_first : o->match_min, found = 0;
    if (least > 0) {
        uint32_t most = o->match_max > least ? o->match_max : least;
        found = df_ngram_propose(&s->ngram, least, most, wanted, actions->ids);
    }
    actions->msg.u.draft_reply.ids_count = found;
    actions->ask = network && found == 0;
    actions->wanted = wanted;
    actions->anchor = p->anchor;
    return ERR_OK;
}

static void on_propose(struct df_core *core, const struct df_event *event,
                       struct df_actions *actions)
{
    const struct msg_draft_propose *p = &event->msg->u.draft_propose;
    struct df_sequence *s = NULL;
    struct msg_draft_reply *reply = &actions->msg.u.draft_reply;
    core->counters.proposals++;
    actions->reply = true;
    actions->msg.type = MSG_DRAFT_REPLY;
    *reply = (struct msg_draft_reply){.epoch = p->epoch, .step = p->step, .ids = actions->ids};
    reply->code = propose(core, event, actions, &s);
    reply->base_length = s != NULL ? s->ngram.length : 0;
    actions->reply = !actions->ask;
    CHECK(reply->code == ERR_OK || reply->ids_count == 0);
    core->counters.hits += reply->ids_count > 0;
    core->counters.draft_ids += reply->ids_count;
}

static void on_close(struct df_core *core, const struct df_event *event, struct df_actions *actions)
{
    struct df_sequence *s = sequence_find(core, &event->msg->id);
    core->counters.closes++;
    if (s != NULL)
        sequence_drop(core, s, actions);
}

static void on_message(struct df_core *core, const struct df_event *event,
                       struct df_actions *actions)
{
    actions->msg.id = event->msg->id;
    actions->msg.epoch = event->msg->epoch;
    switch ((int)event->msg->type) {
    case MSG_DRAFT_HELLO:
        on_hello(core, event, actions);
        return;
    case MSG_DRAFT_OPEN:
        on_open(core, event, actions);
        return;
    case MSG_DRAFT_CONTEXT:
        on_context(core, event, actions);
        return;
    case MSG_DRAFT_PROPOSE:
        on_propose(core, event, actions);
        return;
    case MSG_DRAFT_CLOSE:
        on_close(core, event, actions);
        return;
    default:
        core->counters.foreign++; /* well-formed, but not for a drafter */
        return;
    }
}

static void on_tick(struct df_core *core, struct df_actions *actions)
{
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < core->options.sequences_max; i++) {
        struct df_sequence *s = &core->sequences[i];
        if (!s->used)
            continue;
        if (core->now_us - s->last_us > core->options.silence_us_max) {
            core->counters.silent++;
            sequence_drop(core, s, actions);
            continue;
        }
        tokens += s->high;
    }
    CHECK(tokens == core->tokens);
}

void df_core_drafted(struct df_core *core, uint32_t count)
{
    CHECK_OBJ(core, DF_CORE_MAGIC);
    core->counters.hits += count > 0;
    core->counters.draft_ids += count;
}

void df_core_step(struct df_core *core, const struct df_event *event,
                  struct df_actions *ret_actions)
{
    CHECK_OBJ(core, DF_CORE_MAGIC);
    CHECK(event->now_us >= core->now_us);
    core->now_us = event->now_us;
    ret_actions->reply = false;
    ret_actions->ask = false;
    ret_actions->fits = false;
    ret_actions->misfit = NULL;
    ret_actions->fresh = false;
    ret_actions->cut = false;
    ret_actions->length = 0;
    ret_actions->peer = DF_NONE;
    ret_actions->sequence = DF_NONE;
    ret_actions->freed_count = 0;
    memset(&ret_actions->msg, 0, sizeof(ret_actions->msg));
    switch (event->type) {
    case DF_MESSAGE:
        CHECK(event->msg != NULL && event->peer.count <= DF_PEER_BYTES);
        on_message(core, event, ret_actions);
        break;
    case DF_TICK:
        on_tick(core, ret_actions);
        break;
    }
    if (ret_actions->sequence != DF_NONE)
        ret_actions->length = core->sequences[ret_actions->sequence].ngram.length;
    CHECK(core->tokens <= core->options.tokens_max);
    CHECK(core->live <= core->options.sequences_max);
}
