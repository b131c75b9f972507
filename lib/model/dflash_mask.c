/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/dflash_mask.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/op_dtype.h"
#include "lib/model/dflash_parts.h"
#include "lib/model/read_file.h"

#define MASK_FILE      "mask_embedding.pt"
#define MASK_BYTES_MAX (8u << 20)
#define ENTRY_BYTES    46u /* of the central directory, names follow */
#define END_BYTES      22u
#define HEADER_BYTES   30u /* before a member */
#define ENTRY_MAGIC    0x02014b50u
#define END_MAGIC      0x06054b50u
#define HEADER_MAGIC   0x04034b50u

struct zip {
    const uint8_t *bytes;
    size_t count;
};

struct member {
    const uint8_t *bytes;
    size_t count;
};

static uint32_t u16_at(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static uint32_t u32_at(const uint8_t *p)
{
    return u16_at(p) | u16_at(p + 2) << 16;
}

static bool ends_with(const uint8_t *name, size_t bytes, const char *end)
{
    size_t n = strlen(end);
    return bytes >= n && memcmp(name + bytes - n, end, n) == 0;
}

/* Values of a member whose header lies at `at`; false where it is not stored or not inside. */
static bool member_at(const struct zip *z, uint64_t at, uint64_t bytes, struct member *ret)
{
    if (at + HEADER_BYTES > z->count || u32_at(z->bytes + at) != HEADER_MAGIC ||
        u16_at(z->bytes + at + 8) != 0)
        return false;
    uint64_t data = at + HEADER_BYTES + u16_at(z->bytes + at + 26) + u16_at(z->bytes + at + 28);
    if (data > z->count || bytes > z->count - data)
        return false;
    *ret = (struct member){z->bytes + data, (size_t)bytes};
    return true;
}

/* Looks the members up in the central directory, which stands at the end. */
static bool members_find(const struct zip *z, struct member *ret_values, struct member *ret_pickle)
{
    if (z->count < END_BYTES)
        return false;
    size_t end = z->count - END_BYTES;
    while (end > 0 && u32_at(z->bytes + end) != END_MAGIC)
        end--;
    if (u32_at(z->bytes + end) != END_MAGIC)
        return false;
    uint64_t at = u32_at(z->bytes + end + 16);
    bool values = false, pickle = false;
    for (uint32_t left = u16_at(z->bytes + end + 10); left > 0; left--) {
        if (at + ENTRY_BYTES > z->count || u32_at(z->bytes + at) != ENTRY_MAGIC)
            return false;
        const uint8_t *entry = z->bytes + at;
        size_t name = u16_at(entry + 28);
        if (at + ENTRY_BYTES + name > z->count)
            return false;
        if (ends_with(entry + ENTRY_BYTES, name, "/data/0"))
            values = member_at(z, u32_at(entry + 42), u32_at(entry + 24), ret_values);
        if (ends_with(entry + ENTRY_BYTES, name, "/data.pkl"))
            pickle = member_at(z, u32_at(entry + 42), u32_at(entry + 24), ret_pickle);
        at += ENTRY_BYTES + name + u16_at(entry + 30) + u16_at(entry + 32);
    }
    return values && pickle;
}

static bool mentions(const struct member *m, const char *word)
{
    size_t n = strlen(word);
    for (size_t i = 0; i + n <= m->count; i++)
        if (memcmp(m->bytes + i, word, n) == 0)
            return true;
    return false;
}

static enum err read_values(const struct zip *z, uint32_t hidden, struct dflash *d,
                            float **ret_mask, struct err_detail *detail)
{
    struct member values, pickle;
    if (!members_find(z, &values, &pickle))
        return err_set(detail, ERR_INVALID, MASK_FILE ": not a torch archive of stored members");
    bool bf16 = mentions(&pickle, "BFloat16Storage"), f32 = mentions(&pickle, "FloatStorage");
    bool f16 = mentions(&pickle, "HalfStorage");
    uint64_t each = bf16 || f16 ? 2 : 4;
    if (bf16 + f16 + f32 != 1)
        return err_set(detail, ERR_UNSUPPORTED, MASK_FILE ": not one tensor of bf16, f16 or f32");
    if (values.count != hidden * each)
        return err_set(detail, ERR_INVALID, MASK_FILE ": %zu bytes, expected %u values",
                       values.count, hidden);
    float *mask = dflash_take(d, hidden, sizeof(float));
    for (uint32_t i = 0; i < hidden; i++) {
        const uint8_t *p = values.bytes + i * each;
        mask[i] = bf16  ? op_f32_from_bf16((uint16_t)u16_at(p))
                  : f16 ? op_f32_from_f16((uint16_t)u16_at(p))
                        : op_f32_from_bits(u32_at(p));
        if (!isfinite(mask[i]))
            return err_set(detail, ERR_INVALID, MASK_FILE ": not finite at [%u]", i);
    }
    *ret_mask = mask;
    return ERR_OK;
}

enum err dflash_mask_read(const char *directory, uint32_t hidden, struct dflash *d,
                          float **ret_mask, struct err_detail *detail)
{
    char *text = NULL;
    size_t bytes = 0;
    enum err e = read_file(directory, MASK_FILE, MASK_BYTES_MAX, &text, &bytes, detail);
    if (e == ERR_NOT_FOUND)
        return ERR_OK;
    if (e != ERR_OK)
        return e;
    struct zip z = {(const uint8_t *)text, bytes};
    e = read_values(&z, hidden, d, ret_mask, detail);
    free(text);
    return e;
}
