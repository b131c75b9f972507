/* SPDX-License-Identifier: Apache-2.0 */
/* Frames cut from the input: first byte = count and payload alignment, then two bytes of length per
 * frame, then the frames.  What decodes must encode and decode again. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "proto/wire.h"
#include "proto/wire_check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct wire_frame frames[4], again[WIRE_FRAMES_MAX];
    struct err_detail detail;
    struct msg m, n;
    uint32_t encoded = 0;
    if (size < 1)
        return 0;
    uint32_t count = data[0] & 3;
    size_t at = 1 + 2u * count;
    if (size < at)
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        size_t bytes = data[1 + 2 * i] | (size_t)data[2 + 2 * i] << 8;
        if (bytes > size - at || i == count - 1)
            bytes = size - at;
        /* Own heap blocks, so that a read past the end is seen. */
        uint8_t *copy = malloc(bytes + 1);
        CHECK(copy != NULL);
        memcpy(copy + 1, data + at, bytes);
        frames[i] =
            (struct wire_frame){data[0] & 4 ? copy + 1 : memmove(copy, copy + 1, bytes), bytes};
        at += bytes;
    }
    /* The body length may be made right, else mutation seldom gets past it. */
    if ((data[0] & 8) != 0 && count >= 2 && frames[0].count == WIRE_HEADER_BYTES) {
        uint32_t bytes = (uint32_t)frames[1].count;
        memcpy((uint8_t *)(uintptr_t)frames[0].bytes + 12, &bytes, 4);
    }
    struct arena arena;
    arena_init(&arena, 1 << 14, 1 << 22);
    if (wire_decode(&arena, frames, count, &m, &detail) == ERR_OK) {
        CHECK(wire_check(&m, &detail) == ERR_OK);
        enum err e = wire_encode(&arena, &m, again, &encoded);
        if (e == ERR_OK) {
            CHECK(encoded == count);
            e = wire_decode(&arena, again, encoded, &n, &detail);
            CHECK(e == ERR_OK || e == ERR_NOMEM);
        }
    }
    arena_fini(&arena);
    for (uint32_t i = 0; i < count; i++)
        free((uint8_t *)(uintptr_t)frames[i].bytes - ((data[0] & 4) != 0));
    return 0;
}
