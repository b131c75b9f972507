/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/quant_search.h"

#include <math.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define VITERBI_MAGIC 0x76697465u
#define LANES         512u /* out-nodes worked on at a time, so that their costs stay in L1 */

/* The same arithmetic for wider registers where the machine has them. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) &&                             \
    !defined(__SANITIZE_ADDRESS__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

/* A node is what two successive states share, 16 - bits bits.  The state s = edge << (16 - bits) |
 * node leads into `node` from node s >> bits. */
struct quant_viterbi {
    uint32_t magic;
    uint32_t bits, nodes, edges;
    const struct quant_codebook *book;
    float *spread;    /* [65536] cost of each state's in-node */
    int32_t *best;    /* [nodes] bits of the cheapest cost into a node, low bits: its edge */
    uint8_t *edge_at; /* [256][nodes] */
};

struct quant_viterbi *quant_viterbi_create(const struct quant_codebook *book, uint32_t bits)
{
    struct quant_viterbi *v = mem_take(sizeof(*v));
    v->magic = VITERBI_MAGIC;
    v->book = book;
    v->bits = bits;
    v->edges = 1u << bits;
    v->nodes = QUANT_STATES >> bits;
    v->spread = mem_take_array(QUANT_STATES, sizeof(*v->spread));
    v->best = mem_take_array(v->nodes, sizeof(*v->best));
    v->edge_at = mem_take_array(256, v->nodes);
    return v;
}

void quant_viterbi_destroy(struct quant_viterbi **v_p)
{
    struct quant_viterbi *v = *v_p;
    if (v == NULL)
        return;
    CHECK_OBJ(v, VITERBI_MAGIC);
    mem_give(v->spread);
    mem_give(v->best);
    mem_give(v->edge_at);
    v->magic = 0;
    mem_give(v);
    *v_p = NULL;
}

/* NOTE: costs are not negative, so their bits order like integers; the edge is put into the low
 * bits of the mantissa, and one integer minimum carries both.  At 8 bits this leaves 15 bits of
 * mantissa, a few thousandths of one step's cost. */
static inline __attribute__((always_inline)) int32_t
cost_bits(float cost, float value, float target, int32_t keep, uint32_t edge)
{
    float difference = value - target;
    float sum = cost + difference * difference;
    int32_t bits;
    memcpy(&bits, &sum, sizeof(bits));
    return (bits & keep) | (int32_t)edge;
}

/* Two edges at a time, for half the traffic to `best`. */
WIDE static void relax(const float *restrict values, const float *restrict spread, float target,
                       uint32_t nodes, uint32_t edges, uint32_t first, uint32_t count,
                       int32_t *restrict best)
{
    int32_t keep = ~(int32_t)(edges - 1);
    for (uint32_t i = 0; i < count; i++)
        best[i] = INT32_MAX;
    for (uint32_t edge = 0; edge < edges; edge += 2) {
        const float *value = values + (size_t)edge * nodes + first;
        const float *cost = spread + (size_t)edge * nodes + first;
        for (uint32_t i = 0; i < count; i++) {
            int32_t a = cost_bits(cost[i], value[i], target, keep, edge);
            int32_t b = cost_bits(cost[nodes + i], value[nodes + i], target, keep, edge + 1);
            int32_t low = a < b ? a : b;
            best[i] = low < best[i] ? low : best[i];
        }
    }
}

/* Cost of node n to all states that come from it, n << bits and on.  A constant width lets the
 * compiler write whole registers. */
static inline __attribute__((always_inline)) void
spread_width(const int32_t *restrict best, uint32_t nodes, uint32_t width, float *restrict spread)
{
    int32_t keep = ~(int32_t)(width - 1);
    for (uint32_t n = 0; n < nodes; n++) {
        int32_t bits = best[n] & keep;
        float cost;
        memcpy(&cost, &bits, sizeof(cost));
        for (uint32_t i = 0; i < width; i++)
            spread[(size_t)n * width + i] = cost;
    }
}

WIDE static void spread_costs(const int32_t *restrict best, uint32_t nodes, uint32_t edges,
                              float *restrict spread)
{
    if (edges == 2)
        spread_width(best, nodes, 2, spread);
    else if (edges == 4)
        spread_width(best, nodes, 4, spread);
    else if (edges == 8)
        spread_width(best, nodes, 8, spread);
    else if (edges == 16)
        spread_width(best, nodes, 16, spread);
    else
        spread_width(best, nodes, edges, spread);
}

WIDE static void note_edges(const int32_t *restrict best, uint32_t nodes, uint32_t edges,
                            uint8_t *restrict edge_at)
{
    for (uint32_t n = 0; n < nodes; n++)
        edge_at[n] = (uint8_t)((uint32_t)best[n] & (edges - 1));
}

static void step(struct quant_viterbi *v, float target, uint32_t position)
{
    for (uint32_t first = 0; first < v->nodes; first += LANES)
        relax(v->book->values, v->spread, target, v->nodes, v->edges, first,
              v->nodes - first < LANES ? v->nodes - first : LANES, v->best + first);
    note_edges(v->best, v->nodes, v->edges, v->edge_at + (size_t)position * v->nodes);
    spread_costs(v->best, v->nodes, v->edges, v->spread);
}

static uint32_t state_into(const struct quant_viterbi *v, uint32_t position, uint32_t node)
{
    uint32_t edge = v->edge_at[(size_t)position * v->nodes + node];
    return edge << (16 - v->bits) | node;
}

/* Begins half way, free at both ends; the node before position 0 on the cheapest path. */
static uint32_t meeting_node(struct quant_viterbi *v, const float targets[256])
{
    uint32_t node = 0;
    memset(v->spread, 0, QUANT_STATES * sizeof(*v->spread));
    for (uint32_t i = 0; i < 256; i++)
        step(v, targets[(128 + i) % 256], (128 + i) % 256);
    for (uint32_t n = 1; n < v->nodes; n++)
        if (v->best[n] < v->best[node])
            node = n;
    for (uint32_t i = 128; i > 0; i--)
        node = state_into(v, i - 1, node) >> v->bits;
    return node;
}

void quant_viterbi_tile(struct quant_viterbi *v, const float values[256], uint16_t ret_states[256])
{
    CHECK_OBJ(v, VITERBI_MAGIC);
    uint32_t start = meeting_node(v, values);
    for (uint32_t s = 0; s < QUANT_STATES; s++)
        v->spread[s] = s >> v->bits == start ? 0.0f : INFINITY;
    for (uint32_t t = 0; t < 256; t++)
        step(v, values[t], t);
    uint32_t node = start;
    for (uint32_t t = 256; t > 0; t--) {
        uint32_t state = state_into(v, t - 1, node);
        ret_states[t - 1] = (uint16_t)state;
        node = state >> v->bits;
    }
    CHECK(node == start);
}
