/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "drafter/df_core.h"
#include "lib/base/rng.h"

struct rig {
    struct df_core *core;
    struct df_actions *actions;
    void *memory;
    uint64_t now_us;
    struct df_peer peer;
};

static void rig_open(struct rig *r, struct df_core_options o)
{
    memset(r, 0, sizeof(*r));
    o.match_min = o.match_min != 0 ? o.match_min : 1;
    o.match_max = o.match_max != 0 ? o.match_max : 4;
    o.silence_us_max = 120000000;
    o.deadline_us = 50000;
    o.incarnation = 77;
    o.seed = 42;
    assert_int_equal(posix_memalign(&r->memory, 4096, df_core_bytes(&o)), 0);
    r->core = calloc(1, sizeof(*r->core));
    r->actions = calloc(1, sizeof(*r->actions));
    assert_true(r->core != NULL && r->actions != NULL);
    df_core_init(r->core, &o, r->memory, df_core_bytes(&o));
    r->now_us = 1000;
    r->peer = (struct df_peer){.count = 8, .bytes = "worker-0"};
}

static void rig_close(struct rig *r)
{
    free(r->memory);
    free(r->core);
    free(r->actions);
}

static void step(struct rig *r, const struct msg *m)
{
    struct df_event event = {.type = m != NULL ? DF_MESSAGE : DF_TICK,
                             .now_us = r->now_us,
                             .received_us = r->now_us,
                             .peer = r->peer,
                             .msg = m};
    df_core_step(r->core, &event, r->actions);
}

static struct msg_id id_of(uint32_t number)
{
    struct msg_id id = {{0}};
    memcpy(id.bytes, &number, sizeof(number));
    return id;
}

static void hello(struct rig *r, uint64_t incarnation)
{
    struct msg m = {.type = MSG_DRAFT_HELLO, .u.draft_hello = {.incarnation = incarnation}};
    step(r, &m);
    assert_true(r->actions->reply);
    assert_int_equal(r->actions->msg.type, MSG_DRAFT_HELLO_REPLY);
    assert_int_equal(r->actions->msg.u.draft_hello_reply.incarnation, 77);
    assert_string_equal(r->actions->msg.u.draft_hello_reply.source, "ngram");
}

static void open_seq(struct rig *r, uint32_t number, uint32_t epoch, const uint32_t *ids,
                     uint32_t count)
{
    struct msg m = {.type = MSG_DRAFT_OPEN,
                    .id = id_of(number),
                    .u.draft_open = {.epoch = epoch, .ids_count = count, .ids = ids}};
    step(r, &m);
    assert_false(r->actions->reply);
}

static void context(struct rig *r, uint32_t number, uint32_t epoch, uint32_t base,
                    const uint32_t *ids, uint32_t count)
{
    struct msg m = {
        .type = MSG_DRAFT_CONTEXT,
        .id = id_of(number),
        .u.draft_context = {.epoch = epoch, .base_length = base, .ids_count = count, .ids = ids}};
    step(r, &m);
    assert_false(r->actions->reply);
}

static const struct msg_draft_reply *ask(struct rig *r, uint32_t number,
                                         struct msg_draft_propose propose)
{
    struct msg m = {.type = MSG_DRAFT_PROPOSE, .id = id_of(number), .epoch = 9};
    if (propose.source == NULL)
        propose.source = "";
    if (propose.draft_count == 0)
        propose.draft_count = 3;
    m.u.draft_propose = propose;
    step(r, &m);
    assert_true(r->actions->reply);
    assert_int_equal(r->actions->msg.type, MSG_DRAFT_REPLY);
    assert_int_equal(r->actions->msg.epoch, 9);
    assert_memory_equal(&r->actions->msg.id, &m.id, sizeof(m.id));
    const struct msg_draft_reply *reply = &r->actions->msg.u.draft_reply;
    assert_int_equal(reply->step, propose.step);
    assert_int_equal(reply->epoch, propose.epoch);
    assert_true(reply->code == ERR_OK || reply->ids_count == 0);
    return reply;
}

static void close_seq(struct rig *r, uint32_t number)
{
    struct msg m = {.type = MSG_DRAFT_CLOSE, .id = id_of(number)};
    step(r, &m);
    assert_false(r->actions->reply);
}

static const uint32_t song[] = {1, 2, 3, 4, 1, 2, 3};

static void a_sequence_from_open_to_close(void **state)
{
    struct rig r;
    rig_open(&r,
             (struct df_core_options){.sequences_max = 4, .context_max = 64, .tokens_max = 256});
    hello(&r, 5);
    struct msg_draft_propose p = {.epoch = 1, .base_length = 7, .anchor = 3, .step = 11};
    assert_int_equal(ask(&r, 1, p)->code, ERR_NOT_FOUND);
    open_seq(&r, 1, 1, song, 7);
    const struct msg_draft_reply *reply = ask(&r, 1, p);
    assert_int_equal(reply->code, ERR_OK);
    assert_int_equal(reply->base_length, 7);
    assert_int_equal(reply->ids_count, 3);
    assert_int_equal(reply->ids[0], 4);
    assert_int_equal(reply->ids[1], 1);
    assert_int_equal(reply->ids[2], 2);

    /* New tokens come with the proposal; a repeat of it does no harm. */
    const uint32_t next[] = {4, 9};
    p = (struct msg_draft_propose){
        .epoch = 1, .base_length = 7, .anchor = 9, .ids = next, .ids_count = 2, .step = 12};
    for (int i = 0; i < 3; i++) {
        reply = ask(&r, 1, p);
        assert_int_equal(reply->code, ERR_OK);
        assert_int_equal(reply->base_length, 9);
        assert_int_equal(reply->ids_count, 0);
    }
    /* Below what is held: rewritten from there. */
    const uint32_t other[] = {2, 3};
    p = (struct msg_draft_propose){
        .epoch = 1, .base_length = 5, .anchor = 3, .ids = other, .ids_count = 2};
    reply = ask(&r, 1, p);
    assert_int_equal(reply->code, ERR_OK);
    assert_int_equal(reply->base_length, 7);
    assert_int_equal(reply->ids[0], 4);
    context(&r, 1, 1, 7, next, 2);
    assert_int_equal(r.core->sequences[0].ngram.length, 9);
    close_seq(&r, 1);
    assert_int_equal(r.actions->freed_count, 1);
    close_seq(&r, 1);
    assert_int_equal(r.actions->freed_count, 0);
    assert_int_equal(ask(&r, 1, p)->code, ERR_NOT_FOUND);
    assert_int_equal(r.core->tokens, 0);
    rig_close(&r);
}

static void every_refusal(void **state)
{
    struct rig r;
    rig_open(&r, (struct df_core_options){.sequences_max = 4, .context_max = 16, .tokens_max = 32});
    open_seq(&r, 1, 1, song, 7);
    struct msg_draft_propose p = {.epoch = 2, .base_length = 7, .anchor = 3};
    assert_int_equal(ask(&r, 1, p)->code, ERR_EPOCH);
    p.epoch = 1;
    p.base_length = 8;
    const struct msg_draft_reply *reply = ask(&r, 1, p);
    assert_int_equal(reply->code, ERR_EPOCH);
    assert_int_equal(reply->base_length, 7);
    p.base_length = 7;
    p.source = "dflash";
    assert_int_equal(ask(&r, 1, p)->code, ERR_UNSUPPORTED);
    p.source = "ngram";
    assert_int_equal(ask(&r, 1, p)->code, ERR_OK);
    p.anchor = 8; /* lengths agree, tokens do not */
    assert_int_equal(ask(&r, 1, p)->code, ERR_EPOCH);
    assert_int_equal(ask(&r, 1, p)->code, ERR_NOT_FOUND);

    /* Late behind others. */
    open_seq(&r, 1, 1, song, 7);
    struct msg m = {.type = MSG_DRAFT_PROPOSE,
                    .id = id_of(1),
                    .u.draft_propose = {
                        .epoch = 1, .base_length = 7, .anchor = 3, .draft_count = 3, .source = ""}};
    struct df_event event = {
        .type = DF_MESSAGE, .now_us = 200000, .received_us = 149999, .peer = r.peer, .msg = &m};
    df_core_step(r.core, &event, r.actions);
    assert_int_equal(r.actions->msg.u.draft_reply.code, ERR_TIMEOUT);
    event.received_us = 150000;
    df_core_step(r.core, &event, r.actions);
    assert_int_equal(r.actions->msg.u.draft_reply.code, ERR_OK);
    r.now_us = 200000;

    /* Too long is said so, and stays said, until a shorter open. */
    uint32_t many[17] = {0};
    open_seq(&r, 2, 1, many, 17);
    p = (struct msg_draft_propose){.epoch = 1, .base_length = 17, .anchor = 0};
    assert_int_equal(ask(&r, 2, p)->code, ERR_CONTEXT);
    assert_int_equal(ask(&r, 2, p)->code, ERR_CONTEXT);
    open_seq(&r, 2, 1, many, 16);
    p.base_length = 16;
    assert_int_equal(ask(&r, 2, p)->code, ERR_OK);
    p.ids = many;
    p.ids_count = 1;
    assert_int_equal(ask(&r, 2, p)->code, ERR_CONTEXT);

    /* Messages for others are counted. */
    struct msg foreign = {.type = MSG_KV_PING};
    step(&r, &foreign);
    assert_false(r.actions->reply);
    assert_int_equal(r.core->counters.foreign, 1);
    rig_close(&r);
}

static void room_is_made_by_age(void **state)
{
    struct rig r;
    rig_open(&r, (struct df_core_options){.sequences_max = 3, .context_max = 20, .tokens_max = 30});
    struct msg_draft_propose p = {.epoch = 1, .base_length = 7, .anchor = 3};
    for (uint32_t i = 1; i <= 3; i++)
        open_seq(&r, i, 1, song, 7);
    assert_int_equal(ask(&r, 1, p)->code, ERR_OK); /* 2 is the oldest now */
    open_seq(&r, 4, 1, song, 7);
    assert_int_equal(r.actions->freed_count, 0); /* its place is in use again */
    assert_int_equal(ask(&r, 2, p)->code, ERR_NOT_FOUND);
    assert_int_equal(ask(&r, 3, p)->code, ERR_OK);
    /* 21 tokens are held; 20 of one leave room for one other of 7. */
    uint32_t many[20] = {0};
    open_seq(&r, 4, 1, many, 20);
    assert_int_equal(r.core->live, 2);
    assert_int_equal(r.core->tokens, 27);
    assert_int_equal(ask(&r, 1, p)->code, ERR_NOT_FOUND);
    assert_int_equal(ask(&r, 3, p)->code, ERR_OK);

    /* Silence. */
    r.now_us += 119000000;
    p = (struct msg_draft_propose){.epoch = 1, .base_length = 7, .anchor = 3};
    assert_int_equal(ask(&r, 3, p)->code, ERR_OK);
    r.now_us += 2000000;
    step(&r, NULL);
    assert_int_equal(r.core->live, 1);
    assert_int_equal(r.actions->freed_count, 1);
    assert_int_equal(r.core->counters.silent, 1);
    rig_close(&r);
}

/* Tokens count as long as their memory is held: a cut does not make room for others. */
static void a_cut_makes_no_room(void **state)
{
    struct rig r;
    uint32_t many[20] = {0};
    rig_open(&r, (struct df_core_options){.sequences_max = 4, .context_max = 20, .tokens_max = 40});
    open_seq(&r, 1, 1, many, 20);
    open_seq(&r, 1, 1, song, 7); /* other ids: only the memory of the old ones is left */
    assert_true(r.actions->cut);
    assert_int_equal(r.core->tokens, 20);
    open_seq(&r, 2, 1, many, 20);
    assert_int_equal(r.core->live, 2);
    open_seq(&r, 3, 1, song, 7); /* 47 would be held */
    assert_int_equal(r.core->live, 2);
    assert_int_equal(r.core->tokens, 27);
    assert_int_equal(r.actions->freed_count, 1);
    /* What became too long gives everything back, and is whole again when it is opened anew. */
    context(&r, 2, 1, 20, many, 1);
    assert_int_equal(r.core->tokens, 7);
    assert_int_equal(r.actions->freed_count, 1);
    assert_int_equal(r.core->live, 2);
    memset(r.memory, 0, df_core_bytes(&r.core->options)); /* as the shell does with its part */
    open_seq(&r, 2, 1, song, 7);
    assert_true(r.actions->fresh);
    struct msg_draft_propose p = {.epoch = 1, .base_length = 7, .anchor = 3, .draft_count = 2};
    assert_int_equal(ask(&r, 2, p)->code, ERR_OK);
    rig_close(&r);
}

static void a_restarted_worker_leaves_nothing(void **state)
{
    struct rig r;
    rig_open(&r, (struct df_core_options){.sequences_max = 8, .context_max = 20, .tokens_max = 90});
    struct df_peer first = r.peer, second = {.count = 8, .bytes = "worker-1"};
    hello(&r, 5);
    open_seq(&r, 1, 1, song, 7);
    open_seq(&r, 2, 1, song, 7);
    r.peer = second;
    hello(&r, 6);
    open_seq(&r, 3, 1, song, 7);
    open_seq(&r, 2, 1, song, 7); /* moved over */
    r.peer = first;
    hello(&r, 5);
    assert_int_equal(r.core->live, 3);
    hello(&r, 50);
    assert_int_equal(r.core->live, 2);
    assert_int_equal(r.actions->freed_count, 1);
    /* More names than the table holds are no harm. */
    for (uint32_t i = 0; i < 3 * DF_PEERS_MAX; i++) {
        r.peer = (struct df_peer){.count = 4};
        memcpy(r.peer.bytes, &i, 4);
        hello(&r, i);
    }
    assert_int_equal(r.core->live, 2);
    rig_close(&r);
}

/* ---- against a naive model ---- */

#define IDS     12u
#define PLACES  5u
#define CONTEXT 40u
#define TOKENS  100u

struct naive_seq {
    bool used, too_long;
    uint32_t epoch, length, high, ids[CONTEXT];
    uint64_t use, last_us;
};

struct naive {
    struct naive_seq seqs[IDS];
    uint64_t use;
};

static uint32_t naive_count(const struct naive *n, uint32_t *ret_tokens)
{
    uint32_t count = 0;
    *ret_tokens = 0;
    for (uint32_t i = 0; i < IDS; i++) {
        count += n->seqs[i].used;
        *ret_tokens += n->seqs[i].used ? n->seqs[i].high : 0;
    }
    return count;
}

static uint32_t naive_evict(struct naive *n, uint32_t spared)
{
    uint32_t oldest = IDS;
    for (uint32_t i = 0; i < IDS; i++) {
        if (i != spared && n->seqs[i].used &&
            (oldest == IDS || n->seqs[i].use < n->seqs[oldest].use))
            oldest = i;
    }
    assert_true(oldest < IDS);
    n->seqs[oldest].used = false;
    return n->seqs[oldest].high;
}

static enum err naive_write(struct naive *n, uint32_t i, uint32_t base, const uint32_t *ids,
                            uint32_t count)
{
    struct naive_seq *s = &n->seqs[i];
    uint32_t tokens;
    if (base + count > CONTEXT) {
        s->length = s->high = 0;
        s->too_long = true;
        return ERR_CONTEXT;
    }
    s->length = base + count;
    s->high = s->length > s->high ? s->length : s->high;
    memcpy(s->ids + base, ids, count * sizeof(*ids));
    while (naive_count(n, &tokens) > 0 && tokens > TOKENS)
        naive_evict(n, i);
    return ERR_OK;
}

static enum err naive_apply(struct naive *n, uint32_t i, uint64_t now_us, uint32_t epoch,
                            uint32_t base, const uint32_t *ids, uint32_t count)
{
    struct naive_seq *s = &n->seqs[i];
    if (!s->used)
        return ERR_NOT_FOUND;
    s->use = ++n->use;
    s->last_us = now_us;
    if (epoch != s->epoch)
        return ERR_EPOCH;
    if (s->too_long)
        return ERR_CONTEXT;
    if (base > s->length)
        return ERR_EPOCH;
    return naive_write(n, i, base, ids, count);
}

static void naive_open(struct naive *n, uint32_t i, uint64_t now_us, uint32_t epoch,
                       const uint32_t *ids, uint32_t count)
{
    uint32_t tokens, high = 0; /* what lies in the place that it takes over stays in use */
    if (!n->seqs[i].used && naive_count(n, &tokens) == PLACES)
        high = naive_evict(n, i);
    if (!n->seqs[i].used) {
        n->seqs[i].length = 0;
        n->seqs[i].high = high;
    }
    n->seqs[i].used = true;
    n->seqs[i].too_long = false;
    n->seqs[i].epoch = epoch;
    n->seqs[i].use = ++n->use;
    n->seqs[i].last_us = now_us;
    assert_true(naive_write(n, i, 0, ids, count) == ERR_OK || n->seqs[i].too_long);
}

static void naive_propose(struct rig *r, struct naive *n, uint32_t i, struct rng *rng,
                          uint32_t epoch, uint32_t base, const uint32_t *ids, uint32_t count)
{
    enum err want = naive_apply(n, i, r->now_us, epoch, base, ids, count);
    struct naive_seq *s = &n->seqs[i];
    bool wrong = rng_below(rng, 20) == 0;
    uint32_t anchor = s->used && s->length > 0 ? s->ids[s->length - 1] : 0;
    struct msg_draft_propose p = {.epoch = epoch,
                                  .base_length = base,
                                  .ids = ids,
                                  .ids_count = count,
                                  .anchor = wrong ? anchor + 1 : anchor,
                                  .draft_count = 1 + rng_below(rng, 16),
                                  .step = rng_u64(rng)};
    uint32_t length = s->used ? s->length : 0;
    if (want == ERR_OK && (wrong || s->length == 0)) {
        want = ERR_EPOCH;
        s->used = false;
        length = 0;
    }
    const struct msg_draft_reply *reply = ask(r, i, p);
    assert_int_equal(reply->code, want);
    assert_int_equal(reply->base_length, length);
    if (want != ERR_OK)
        return;
    assert_true(reply->ids_count == 0 || reply->ids_count == p.draft_count);
    /* The drafts follow some earlier place that ends in the anchor. */
    bool explained = reply->ids_count == 0;
    for (uint32_t from = 1; from < s->length && !explained; from++) {
        uint32_t k = 0;
        while (s->ids[from - 1] == anchor && k < reply->ids_count &&
               reply->ids[k] ==
                   (from + k < s->length ? s->ids[from + k] : reply->ids[from + k - s->length]))
            k++;
        explained = k == reply->ids_count;
    }
    assert_true(explained);
}

static void random_events_against_naive(void **state)
{
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct rng rng;
        struct rig r;
        struct naive *n = calloc(1, sizeof(*n));
        rng_init(&rng, seed);
        rig_open(&r, (struct df_core_options){
                         .sequences_max = PLACES, .context_max = CONTEXT, .tokens_max = TOKENS});
        for (int turn = 0; turn < 1500; turn++) {
            uint32_t i = rng_below(&rng, IDS), ids[CONTEXT + 2];
            uint32_t count = rng_below(&rng, rng_below(&rng, 6) == 0 ? CONTEXT + 3 : 6);
            for (uint32_t k = 0; k < count; k++)
                ids[k] = rng_below(&rng, 3);
            uint32_t epoch = rng_below(&rng, 12) == 0;
            uint32_t length = n->seqs[i].used ? n->seqs[i].length : 0;
            uint32_t base = rng_below(&rng, 4) == 0 ? rng_below(&rng, CONTEXT + 1) : length;
            r.now_us += rng_below(&rng, turn % 100 == 0 ? 100000000 : 10000);
            switch (rng_below(&rng, 8)) {
            case 0:
                open_seq(&r, i, epoch, ids, count);
                naive_open(n, i, r.now_us, epoch, ids, count);
                break;
            case 1:
                close_seq(&r, i);
                n->seqs[i].used = false;
                break;
            case 2:
                context(&r, i, epoch, base, ids, count);
                (void)naive_apply(n, i, r.now_us, epoch, base, ids, count);
                break;
            case 3:
                step(&r, NULL);
                for (uint32_t k = 0; k < IDS; k++)
                    if (r.now_us - n->seqs[k].last_us > 120000000)
                        n->seqs[k].used = false;
                break;
            default:
                naive_propose(&r, n, i, &rng, epoch, base, ids, count);
                break;
            }
            uint32_t tokens;
            assert_int_equal(r.core->live, naive_count(n, &tokens));
            assert_int_equal(r.core->tokens, tokens);
        }
        free(n);
        rig_close(&r);
    }
}

/* A network answers only for the target it was made for; what it is asked goes to the shell. */
static void the_network_is_asked_where_it_fits(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r, (struct df_core_options){.sequences_max = 4,
                                          .context_max = 100,
                                          .tokens_max = 400,
                                          .network_drafts = 7,
                                          .network_hidden = 128,
                                          .network_vocab = 1024,
                                          .network_tokenizer = {.bytes = {[15] = 9}},
                                          .tap_layer_count = 2,
                                          .tap_layers = {6, 1},
                                          .tap_type = 1});
    static const struct {
        uint32_t hidden, layers, vocab;
        uint8_t tokenizer;
        const char *field;
    } misfits[] = {{64, 8, 1024, 9, "hidden"},        {128, 6, 1024, 9, "layers"},
                   {128, 8, 1000, 9, "vocab_size"},   {128, 8, 1024, 8, "tokenizer_fp"},
                   {128, 8, 1024, 0, "tokenizer_fp"}, {0, 0, 0, 0, "hidden"}};
    struct msg m = {.type = MSG_DRAFT_HELLO, .u.draft_hello = {.incarnation = 1}};
    const uint32_t ids[] = {5, 6, 7, 5, 6};
    for (size_t i = 0; i <= sizeof misfits / sizeof misfits[0]; i++) {
        bool fits = i == sizeof misfits / sizeof misfits[0];
        m.u.draft_hello.hidden = fits ? 128 : misfits[i].hidden;
        m.u.draft_hello.layers = fits ? 8 : misfits[i].layers;
        m.u.draft_hello.vocab_size = fits ? 1024 : misfits[i].vocab;
        m.u.draft_hello.tokenizer_fp.bytes[15] = fits ? 9 : misfits[i].tokenizer;
        m.u.draft_hello.incarnation = 1 + i;
        step(&r, &m);
        if (fits)
            assert_null(r.actions->misfit);
        else
            assert_string_equal(r.actions->misfit, misfits[i].field);
        step(&r, &m); /* said once for each process */
        assert_null(r.actions->misfit);
        const struct msg_draft_hello_reply *h = &r.actions->msg.u.draft_hello_reply;
        assert_string_equal(h->source, fits ? "dflash" : "ngram");
        assert_int_equal(h->tap_layer_count, fits ? 2 : 0);
        assert_int_equal(r.actions->fits, fits);
        open_seq(&r, 1, 3, ids, 5);
        assert_int_equal(r.actions->sequence != DF_NONE, true);
        struct msg p = {
            .type = MSG_DRAFT_PROPOSE,
            .id = id_of(1),
            .u.draft_propose = {
                .epoch = 3, .base_length = 5, .anchor = 6, .draft_count = 7, .source = ""}};
        step(&r, &p);
        assert_int_equal(r.actions->ask, fits);
        assert_int_equal(r.actions->reply, !fits);
        assert_int_equal(r.actions->length, 5);
        p.u.draft_propose.source = "ngram"; /* by name it is never the network */
        step(&r, &p);
        assert_true(r.actions->reply && !r.actions->ask);
        assert_int_equal(r.actions->msg.u.draft_reply.ids_count, 7);
    }
    /* Once a match counts for more than the network, only what has none goes there. */
    static const struct {
        uint32_t first, anchor;
        bool match;
    } orders[] = {{0, 6, false}, {2, 6, true}, {2, 9, false}, {3, 6, false}};
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++) {
        uint32_t text[] = {5, 6, 7, 5, orders[i].anchor};
        r.core->options.ngram_first = orders[i].first;
        open_seq(&r, 1, 3, text, 5);
        struct msg p = {.type = MSG_DRAFT_PROPOSE,
                        .id = id_of(1),
                        .u.draft_propose = {.epoch = 3,
                                            .base_length = 5,
                                            .anchor = orders[i].anchor,
                                            .draft_count = 7,
                                            .source = ""}};
        step(&r, &p);
        assert_true(r.actions->reply == orders[i].match && r.actions->ask != orders[i].match);
        assert_true(!orders[i].match || (r.actions->msg.u.draft_reply.ids_count == 7 &&
                                         r.actions->msg.u.draft_reply.ids[0] == 7));
    }
    open_seq(&r, 1, 3, ids, 5);
    assert_int_equal(r.core->counters.misfits, 2 * sizeof misfits / sizeof misfits[0]);
    /* Other tokens in the middle are told, so that the context goes back too. */
    const uint32_t other[] = {5, 6, 9};
    open_seq(&r, 1, 3, other, 3);
    assert_true(r.actions->cut && !r.actions->fresh);
    assert_int_equal(r.actions->cut_length, 2);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_sequence_from_open_to_close),
        cmocka_unit_test(every_refusal),
        cmocka_unit_test(room_is_made_by_age),
        cmocka_unit_test(a_cut_makes_no_room),
        cmocka_unit_test(a_restarted_worker_leaves_nothing),
        cmocka_unit_test(random_events_against_naive),
        cmocka_unit_test(the_network_is_asked_where_it_fits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
