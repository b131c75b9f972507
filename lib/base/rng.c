/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/rng.h"

#include <errno.h>
#include <math.h>
#include <sys/random.h>

#include "lib/base/check.h"

/* Constants of Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC'11). */
#define PHILOX_M0     0xD2511F53u
#define PHILOX_M1     0xCD9E8D57u
#define PHILOX_W0     0x9E3779B9u
#define PHILOX_W1     0xBB67AE85u
#define PHILOX_ROUNDS 10

void rng_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t ret_out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t p0 = (uint64_t)PHILOX_M0 * c0;
        uint64_t p1 = (uint64_t)PHILOX_M1 * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        uint32_t n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0;
        c1 = (uint32_t)p1;
        c2 = n2;
        c3 = (uint32_t)p0;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    ret_out[0] = c0;
    ret_out[1] = c1;
    ret_out[2] = c2;
    ret_out[3] = c3;
}

double rng_gumbel(uint64_t seed, uint64_t position, uint32_t token, uint32_t choice)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), token / 4, choice};
    uint32_t lanes[4];
    rng_philox4x32(counter, key, lanes);
    /* The half keeps u strictly inside (0, 1), so both logarithms are finite. */
    double u = ((double)lanes[token % 4] + 0.5) / 4294967296.0;
    DCHECK(u > 0.0 && u < 1.0);
    return -log(-log(u));
}

void rng_init(struct rng *r, uint64_t seed)
{
    CHECK(r != NULL);
    *r = (struct rng){.seed = seed};
}

uint32_t rng_u32(struct rng *r)
{
    uint32_t lane = (uint32_t)(r->count % 4);
    if (lane == 0) {
        uint64_t block = r->count / 4;
        const uint32_t key[2] = {(uint32_t)r->seed, (uint32_t)(r->seed >> 32)};
        const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), 0, 0};
        rng_philox4x32(counter, key, r->buffer);
    }
    r->count++;
    return r->buffer[lane];
}

uint64_t rng_u64(struct rng *r)
{
    uint64_t low = rng_u32(r);
    uint64_t high = rng_u32(r);
    return high << 32 | low;
}

uint32_t rng_below(struct rng *r, uint32_t bound)
{
    CHECK(bound > 0);
    /* The values under 2^32 mod bound would make the small results a little likelier. */
    uint32_t reject_below = (uint32_t)(-bound) % bound;
    uint32_t x;
    do {
        x = rng_u32(r);
    } while (x < reject_below);
    uint32_t result = x % bound;
    CHECK(result < bound);
    return result;
}

double rng_unit(struct rng *r)
{
    return (double)(rng_u64(r) >> 11) / 9007199254740992.0;
}

void rng_system(void *ret_bytes, size_t count)
{
    CHECK(ret_bytes != NULL || count == 0);
    unsigned char *bytes = ret_bytes;
    size_t done = 0;
    while (done < count) {
        ssize_t got = getrandom(bytes + done, count - done, 0);
        if (got < 0 && errno == EINTR)
            continue;
        CHECK(got > 0);
        done += (size_t)got;
    }
}
