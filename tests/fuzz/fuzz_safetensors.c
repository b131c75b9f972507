/* SPDX-License-Identifier: Apache-2.0 */
/* The header reader on any bytes: every tensor it accepts lies inside them. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/model/safetensors_header.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct arena arena;
    struct safetensors_list list = {NULL, 0, 0};
    struct err_detail detail = {{0}};
    arena_init(&arena, 4096, 64u << 20);
    enum err e = safetensors_read_header(data, size, "input", 0, &arena, &list, &detail);
    uint64_t covered = 0;
    for (uint32_t i = 0; e == ERR_OK && i < list.count; i++) {
        const struct safetensors_tensor *t = &list.tensors[i];
        CHECK(t->data >= data && t->bytes <= size && t->data + t->bytes <= data + size);
        CHECK(t->bytes == t->elements * safetensors_dtype_bytes(t->dtype));
        CHECK(strlen(t->name) > 0);
        covered += t->bytes;
    }
    CHECK(covered <= size);
    CHECK(e == ERR_OK || detail.text[0] != 0);
    free(list.tensors);
    arena_fini(&arena);
    return 0;
}
