/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/op_format.h"

#include "kernels/op_dtype.h"
#include "kernels/op_exl3.h"
#include "lib/base/check.h"

static const void *advanced(const void *data, uint64_t bytes)
{
    return data != NULL ? (const uint8_t *)data + bytes : NULL;
}

static uint32_t scale_bytes(enum op_scale_dtype dtype)
{
    if (dtype == OP_SCALE_F32)
        return 4;
    return dtype == OP_SCALE_BF16 || dtype == OP_SCALE_F16 ? 2 : 1;
}

/* The scale of a row is found by its index in the whole matrix, never by slicing the grid: a
 * piece that begins inside a block keeps that block's scale and remembers how far inside. */
static void cut_scales(struct op_scales *s, uint32_t out_first, uint32_t in_first)
{
    uint64_t row = (uint64_t)s->row_phase + out_first;
    uint64_t column = (uint64_t)s->column_phase + in_first;
    uint64_t index = row / s->rows_shared * s->stride + column / s->columns_shared;
    s->data = advanced(s->data, index * scale_bytes(s->dtype));
    s->row_phase = (uint32_t)(row % s->rows_shared);
    s->column_phase = (uint32_t)(column % s->columns_shared);
}

static bool on_block(uint32_t first, uint32_t count, uint32_t size)
{
    return first % OP_EXL3_BLOCK == 0 && (count % OP_EXL3_BLOCK == 0 || first + count == size);
}

static bool cut_is_legal(const struct op_quantised *w, uint32_t out_first, uint32_t out_count,
                         uint32_t in_first, uint32_t in_count)
{
    if (out_count == 0 || in_count == 0 || out_first >= w->out || in_first >= w->in ||
        out_count > w->out - out_first || in_count > w->in - in_first)
        return false;
    if (w->format == OP_FORMAT_EXL3)
        return on_block(out_first, out_count, w->out) && on_block(in_first, in_count, w->in);
    bool nibbles = w->format == OP_FORMAT_MXFP4 || w->format == OP_FORMAT_NVFP4;
    return !nibbles || in_first % 2 == 0;
}

static void cut_exl3(struct op_quantised *w, uint32_t out_first, uint32_t in_first)
{
    uint64_t tile_bytes = 2 * op_exl3_tile_u16(w->half_bits);
    w->codes += in_first / OP_EXL3_TILE * w->row_bytes + out_first / OP_EXL3_TILE * tile_bytes;
    w->suh = advanced(w->suh, 2ull * in_first);
    w->svh = advanced(w->svh, 2ull * out_first);
    w->su = advanced(w->su, in_first / 8);
    w->sv = advanced(w->sv, out_first / 8);
}

enum err op_quantised_cut(const struct op_quantised *w, uint32_t out_first, uint32_t out_count,
                          uint32_t in_first, uint32_t in_count, struct op_quantised *ret_piece)
{
    if (!cut_is_legal(w, out_first, out_count, in_first, in_count))
        return ERR_INVALID;
    struct op_quantised piece = *w;
    piece.out = out_count;
    piece.in = in_count;
    piece.bias = in_first != 0
                     ? NULL
                     : advanced(w->bias, (uint64_t)out_first * op_dtype_bytes(w->bias_dtype));
    if (w->format == OP_FORMAT_EXL3) {
        cut_exl3(&piece, out_first, in_first);
    } else {
        uint64_t column_bytes = in_first;
        if (w->format == OP_FORMAT_PLAIN)
            column_bytes *= op_dtype_bytes(w->dtype);
        else
            cut_scales(&piece.scales, out_first, in_first);
        if (w->format == OP_FORMAT_MXFP4 || w->format == OP_FORMAT_NVFP4)
            column_bytes /= 2;
        piece.codes += out_first * w->row_bytes + column_bytes;
    }
    *ret_piece = piece;
    return ERR_OK;
}

void op_cut_range(uint32_t size, uint32_t ranks, uint32_t rank, uint32_t *ret_first,
                  uint32_t *ret_count)
{
    CHECK(ranks > 0 && rank < ranks);
    uint32_t blocks = size / OP_EXL3_BLOCK + (size % OP_EXL3_BLOCK != 0 ? 1 : 0);
    uint32_t each = blocks / ranks, more = blocks % ranks;
    uint32_t first = rank * each + (rank < more ? rank : more);
    uint64_t begin = (uint64_t)first * OP_EXL3_BLOCK;
    uint64_t end = begin + (uint64_t)(each + (rank < more ? 1 : 0)) * OP_EXL3_BLOCK;
    begin = begin < size ? begin : size;
    end = end < size ? end : size;
    *ret_first = (uint32_t)begin;
    *ret_count = (uint32_t)(end - begin);
}
