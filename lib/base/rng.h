/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/rng.h - Philox4x32-10 (Salmon et al., SC'11) and a stream on top of it.
 *
 * Pure.  The counter form is the sampler's source of Gumbel noise and must give the same bits
 * on every machine and device. */
#ifndef LIB_BASE_RNG_H
#define LIB_BASE_RNG_H

#include <stddef.h>
#include <stdint.h>

/* out[0..3] = Philox4x32-10(counter, key). */
void rng_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t ret_out[4]);

/* Gumbel(seed, m, v, choice) as design.md 5.3: key = seed (low word, high word), counter =
 * (m low, m high, v / 4, choice), lane v % 4, u = (x + 0.5) / 2^32, result -log(-log u). */
double rng_gumbel(uint64_t seed, uint64_t position, uint32_t token, uint32_t choice);

/* A seeded stream for cores and tests. */
struct rng {
    uint64_t seed;
    uint64_t count;
    uint32_t buffer[4];
};
void rng_init(struct rng *r, uint64_t seed);
uint32_t rng_u32(struct rng *r);
uint64_t rng_u64(struct rng *r);
uint32_t rng_below(struct rng *r, uint32_t bound); /* uniform in [0, bound); bound > 0 */
double rng_unit(struct rng *r);                    /* [0, 1) */

/* Bytes from the operating system, for incarnations, request ids and seeds. */
void rng_system(void *ret_bytes, size_t count);

#endif
