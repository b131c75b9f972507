/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/quant_search.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define BEAM_MAGIC 0x6265616du
#define NO_END     UINT32_MAX

struct candidate {
    float cost;
    uint16_t state;
    uint16_t parent; /* number among the survivors of the step before */
};

/* What remains of a step for the way back. */
struct trace {
    uint16_t state, parent;
};

struct quant_beam {
    uint32_t magic;
    uint32_t bits, beam, node_mask;
    const struct quant_codebook *book;
    struct candidate *candidates; /* [65536] */
    struct candidate *survivors;  /* [beam] */
    uint32_t candidate_count, survivor_count;
    float *costs;   /* [65536] of every child of a step, survivor by survivor */
    float reach;    /* above the cheapest child: what the last step looked at */
    uint32_t *seen; /* [nodes] stamp << 16 | candidate, one candidate for a node */
    uint32_t stamp;
    struct trace *traces; /* [256][beam] */
};

struct quant_beam *quant_beam_create(const struct quant_codebook *book, uint32_t bits,
                                     uint32_t beam)
{
    CHECK(beam > 0 && (beam << bits) >= beam);
    struct quant_beam *b = mem_take(sizeof(*b));
    b->magic = BEAM_MAGIC;
    b->book = book;
    b->bits = bits;
    b->beam = beam < QUANT_STATES >> bits ? beam : QUANT_STATES >> bits;
    b->node_mask = (QUANT_STATES >> bits) - 1;
    b->candidates = mem_take_array(QUANT_STATES, sizeof(*b->candidates));
    b->costs = mem_take_array(QUANT_STATES, sizeof(*b->costs));
    b->survivors = mem_take_array(b->beam, sizeof(*b->survivors));
    b->seen = mem_take_array(b->node_mask + 1, sizeof(*b->seen));
    b->traces = mem_take_array(256ull * b->beam, sizeof(*b->traces));
    return b;
}

void quant_beam_destroy(struct quant_beam **b_p)
{
    struct quant_beam *b = *b_p;
    if (b == NULL)
        return;
    CHECK_OBJ(b, BEAM_MAGIC);
    mem_give(b->candidates);
    mem_give(b->survivors);
    mem_give(b->costs);
    mem_give(b->seen);
    mem_give(b->traces);
    b->magic = 0;
    mem_give(b);
    *b_p = NULL;
}

static void stamp_next(struct quant_beam *b)
{
    b->candidate_count = 0;
    if (++b->stamp < 1u << 16)
        return;
    memset(b->seen, 0, (b->node_mask + 1ull) * sizeof(*b->seen));
    b->stamp = 1;
}

/* Of two ways into a node only the cheaper one can matter. */
static void offer(struct quant_beam *b, uint32_t state, float cost, uint32_t parent)
{
    uint32_t node = state & b->node_mask, seen = b->seen[node];
    struct candidate *c = &b->candidates[seen & 0xffffu];
    if (seen >> 16 != b->stamp) {
        c = &b->candidates[b->candidate_count];
        b->seen[node] = b->stamp << 16 | b->candidate_count++;
    } else if (c->cost <= cost) {
        return;
    }
    *c = (struct candidate){cost, (uint16_t)state, (uint16_t)parent};
}

static bool before(const struct candidate *a, const struct candidate *c)
{
    return a->cost < c->cost || (a->cost == c->cost && a->state < c->state);
}

/* Puts the `keep` cheapest first, in any order (Hoare's selection). */
static void select_cheapest(struct candidate *c, uint32_t count, uint32_t keep)
{
    uint32_t low = 0, high = count; /* the boundary lies within [low, high) */
    while (high - low > 1 && keep > low && keep < high) {
        struct candidate pivot = c[low + (high - low) / 2];
        uint32_t i = low, j = high - 1;
        for (;;) {
            while (before(&c[i], &pivot))
                i++;
            while (before(&pivot, &c[j]))
                j--;
            if (i >= j)
                break;
            struct candidate swap = c[i];
            c[i++] = c[j];
            c[j--] = swap;
        }
        /* [low, i) is not above the pivot, [i, high) not below it. */
        uint32_t middle = i > low ? i : low + 1;
        if (keep <= middle)
            high = middle;
        else
            low = middle;
    }
}

static void survive(struct quant_beam *b, uint32_t position)
{
    uint32_t keep = b->candidate_count < b->beam ? b->candidate_count : b->beam;
    select_cheapest(b->candidates, b->candidate_count, keep);
    memcpy(b->survivors, b->candidates, keep * sizeof(*b->survivors));
    b->survivor_count = keep;
    struct trace *trace = b->traces + (size_t)position * b->beam;
    for (uint32_t i = 0; i < keep; i++)
        trace[i] = (struct trace){b->survivors[i].state, b->survivors[i].parent};
}

/* The first step of a free start: every state may come, so the nearest values outward from the
 * target are taken until there are nodes enough. */
static void step_free(struct quant_beam *b, float target, uint32_t position)
{
    const struct quant_codebook *book = b->book;
    uint32_t above = 0, high = QUANT_STATES;
    while (above < high) {
        uint32_t middle = above + (high - above) / 2;
        if (book->values[book->order[middle]] < target)
            above = middle + 1;
        else
            high = middle;
    }
    uint32_t below = above; /* [0, below) and [above, end) are left */
    stamp_next(b);
    while (b->candidate_count < b->beam && (below > 0 || above < QUANT_STATES)) {
        float up = above < QUANT_STATES ? book->values[book->order[above]] - target : INFINITY;
        float down = below > 0 ? target - book->values[book->order[below - 1]] : INFINITY;
        float difference = up <= down ? up : down;
        uint32_t state = up <= down ? book->order[above++] : book->order[--below];
        offer(b, state, difference * difference, 0);
    }
    survive(b, position);
}

/* Bits of a step that the end leaves no choice about: the lowest `count`, with this value. */
struct fixed_bits {
    uint32_t count, value;
};

/* With an end, the last bits of the ring are those of its node. */
static struct fixed_bits fixed_at(const struct quant_beam *b, uint32_t position, uint32_t end)
{
    uint32_t node_bits = 16 - b->bits, after = (255 - position) * b->bits;
    if (end == NO_END || after >= node_bits)
        return (struct fixed_bits){0, 0};
    uint32_t count = node_bits - after < b->bits ? node_bits - after : b->bits;
    return (struct fixed_bits){count, end >> after & ((1u << count) - 1)};
}

static uint32_t child_state(const struct quant_beam *b, uint32_t survivor, uint32_t child,
                            struct fixed_bits fixed)
{
    uint32_t node = b->survivors[survivor].state & b->node_mask;
    return node << b->bits | child << fixed.count | fixed.value;
}

static float fill_costs(struct quant_beam *b, float target, struct fixed_bits fixed)
{
    uint32_t children = 1u << (b->bits - fixed.count), step = 1u << fixed.count;
    float least = INFINITY;
    for (uint32_t i = 0; i < b->survivor_count; i++) {
        const float *values = b->book->values + child_state(b, i, 0, fixed);
        float *costs = b->costs + (size_t)i * children, base = b->survivors[i].cost;
        for (uint32_t n = 0; n < children; n++) {
            float difference = values[n * step] - target;
            costs[n] = base + difference * difference;
            least = costs[n] < least ? costs[n] : least;
        }
    }
    return least;
}

static uint32_t count_within(const float *costs, uint32_t count, float bound)
{
    int32_t within = 0;
    for (uint32_t i = 0; i < count; i++)
        within += costs[i] <= bound;
    return (uint32_t)within;
}

/* A bound that lets a few times the beam pass, found by halving and doubling from the last
 * step's: looking at every child one by one is what costs the time. */
static float bound_of(struct quant_beam *b, float least, uint32_t count)
{
    uint32_t enough = 2 * b->beam, plenty = 6 * b->beam;
    float reach = b->reach > 0 ? b->reach : 1;
    for (uint32_t tries = 0; tries < 64; tries++) {
        uint32_t within = count_within(b->costs, count, least + reach);
        if (within < enough && within < count)
            reach *= 2;
        else if (within > plenty && count_within(b->costs, count, least + reach / 2) >= enough)
            reach /= 2;
        else
            break;
    }
    b->reach = reach;
    return least + reach;
}

static void step(struct quant_beam *b, float target, uint32_t position, uint32_t end)
{
    struct fixed_bits fixed = fixed_at(b, position, end);
    uint32_t children = 1u << (b->bits - fixed.count), count = b->survivor_count * children;
    float least = fill_costs(b, target, fixed);
    float bound = count > 6 * b->beam ? bound_of(b, least, count) : INFINITY;
    do {
        stamp_next(b);
        for (uint32_t i = 0; i < count; i++)
            if (b->costs[i] <= bound)
                offer(b, child_state(b, i / children, i % children, fixed), b->costs[i],
                      i / children);
        /* Many ways may lead into few nodes: look further. */
        bound = b->candidate_count < b->beam && bound < INFINITY ? INFINITY : -1;
    } while (bound > 0);
    survive(b, position);
}

static uint32_t cheapest(const struct quant_beam *b)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < b->survivor_count; i++)
        if (before(&b->survivors[i], &b->survivors[best]))
            best = i;
    return best;
}

static uint32_t meeting_node(struct quant_beam *b, const float targets[256])
{
    step_free(b, targets[128], 128);
    for (uint32_t i = 129; i < 256 + 128; i++)
        step(b, targets[i % 256], i % 256, NO_END);
    uint32_t at = cheapest(b), state = 0;
    for (uint32_t i = 128; i > 0; i--) {
        const struct trace *trace = b->traces + (size_t)(i - 1) * b->beam + at;
        state = trace->state;
        at = trace->parent;
    }
    return state >> b->bits;
}

void quant_beam_tile(struct quant_beam *b, const float values[256], uint16_t ret_states[256])
{
    CHECK_OBJ(b, BEAM_MAGIC);
    uint32_t start = meeting_node(b, values);
    b->survivors[0] = (struct candidate){0, (uint16_t)start, 0};
    b->survivor_count = 1;
    for (uint32_t t = 0; t < 256; t++)
        step(b, values[t], t, start);
    uint32_t at = cheapest(b);
    CHECK((b->survivors[at].state & b->node_mask) == start);
    for (uint32_t t = 256; t > 0; t--) {
        const struct trace *trace = b->traces + (size_t)(t - 1) * b->beam + at;
        ret_states[t - 1] = trace->state;
        at = trace->parent;
    }
    CHECK((uint32_t)ret_states[0] >> b->bits == start);
}
