/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/draft_ngram.h"

#include <string.h>

#define GRAM_MAX 4

uint32_t draft_ngram(const uint32_t *ids, uint32_t count, uint32_t *drafts, uint32_t count_max)
{
    for (uint32_t n = GRAM_MAX; n >= 1; n--) {
        if (count <= n)
            continue;
        const uint32_t *tail = ids + count - n;
        for (uint32_t at = count - n; at-- > 0;) {
            if (memcmp(ids + at, tail, n * sizeof(*ids)) != 0)
                continue;
            uint32_t left = count - (at + n);
            uint32_t found = left < count_max ? left : count_max;
            memcpy(drafts, ids + at + n, found * sizeof(*ids));
            return found;
        }
    }
    return 0;
}
