/* SPDX-License-Identifier: Apache-2.0 */
/* The header reader on any bytes: every tensor it accepts lies inside them.  Inputs that begin
 * with 'T' are a list of tensors, a few bytes each, in a header that is right; every linear in it
 * is looked at. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/str.h"
#include "lib/model/format_scan.h"
#include "lib/model/identity.h"
#include "lib/model/safetensors_header.h"

#define TENSORS_MAX 16u
#define BYTES_MAX   (1u << 20)

static const char *const prefixes[] = {"a", "a.b", "m.mlp.experts.0.up_proj",
                                       "m.mlp.experts.shared_h.up_proj", "m.mlp.down_proj"};
static const char *const suffixes[] = {"weight",
                                       "weight_packed",
                                       "weight_scale",
                                       "weight_scale_inv",
                                       "weight_scale_2",
                                       "weight_global_scale",
                                       "trellis",
                                       "suh",
                                       "svh",
                                       "su",
                                       "sv",
                                       "mcg",
                                       "mul1",
                                       "bias",
                                       "rank0.trellis",
                                       "rank0.suh",
                                       "rank0.svh",
                                       "rank1.trellis",
                                       "rank1.suh",
                                       "rank1.svh",
                                       "norm"};
static const uint32_t sizes[] = {0, 1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256, 40, 56, 129, 7};

struct input {
    const uint8_t *bytes;
    size_t left;
};

static uint8_t next(struct input *in)
{
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->bytes++;
}

/* Every byte of what was bound is read: the checks of values go over all of it. */
static bool look(void *arg, const struct format_linear *l)
{
    struct err_detail detail = {{0}};
    enum format_fault fault;
    char title[64];
    ++*(uint32_t *)arg;
    CHECK(strlen(l->prefix) > 0);
    if (l->err != ERR_OK) {
        const char *name = format_fault_name(l->fault);
        CHECK(l->fault != FORMAT_FAULT_NONE);
        CHECK(strncmp(l->detail->text, name, strlen(name)) == 0);
        return true;
    }
    CHECK(l->in > 0 && l->out > 0);
    CHECK(l->info.in == l->in && l->info.out == l->out);
    format_title(&l->info, title, sizeof(title));
    CHECK(format_bits(&l->info) > 0);
    if (l->info.kind == FORMAT_EXL3_RANKED)
        return true;
    CHECK(format_bytes(&l->weight) <= l->bytes);
    enum err e = format_check_values(l->prefix, &l->info, &l->weight, &fault, &detail);
    CHECK((e == ERR_OK) == (fault == FORMAT_FAULT_NONE));
    return true;
}

/* The file of the tensors: what is left of the input, again and again, is their data. */
static void write_tensors(struct input *in, struct str *out)
{
    struct str header;
    uint64_t at = 0;
    uint32_t count = next(in) % (TENSORS_MAX + 1);
    str_init(&header, 0);
    str_add_text(&header, "{");
    for (uint32_t i = 0; i < count; i++) {
        uint8_t prefix = next(in), suffix = next(in), dims = next(in) % 4;
        enum safetensors_dtype dtype = (enum safetensors_dtype)(next(in) % SAFETENSORS_DTYPE_COUNT);
        uint64_t bytes = safetensors_dtype_bytes(dtype);
        str_add_format(&header, "%s\"%s.%s\":{\"dtype\":\"%s\",\"shape\":[", i > 0 ? "," : "",
                       prefixes[prefix % ARRAY_COUNT(prefixes)],
                       suffixes[suffix % ARRAY_COUNT(suffixes)], safetensors_dtype_name(dtype));
        for (uint32_t d = 0; d < dims; d++) {
            uint32_t size = sizes[next(in) % ARRAY_COUNT(sizes)];
            bytes *= size;
            str_add_format(&header, "%s%u", d > 0 ? "," : "", size);
        }
        str_add_format(&header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                       (unsigned long long)(at + bytes));
        at += bytes;
    }
    str_add_text(&header, "}");
    uint64_t length = header.bytes;
    str_add(out, (const char *)&length, 8);
    str_add(out, header.text, header.bytes);
    str_fini(&header);
    for (uint64_t i = 0; i < at && out->bytes < BYTES_MAX; i += in->left + 1) {
        uint64_t take = at - i < in->left + 1 ? at - i : in->left + 1;
        str_add(out, take > 1 ? (const char *)in->bytes : "", take > 1 ? take - 1 : 0);
        str_add(out, "", 1);
    }
}

static void scan(const uint8_t *data, size_t size)
{
    static int fd = -1;
    struct input in = {data, size};
    struct str file;
    struct safetensors *set = NULL;
    struct err_detail detail = {{0}};
    char path[64], text[256];
    uint32_t linears = 0;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    CHECK(fd >= 0);
    str_init(&file, BYTES_MAX + 65536);
    write_tensors(&in, &file);
    CHECK(ftruncate(fd, 0) == 0);
    CHECK(pwrite(fd, file.text, file.bytes, 0) == (ssize_t)file.bytes);
    str_fini(&file);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (safetensors_open_file(path, &set, &detail) != ERR_OK)
        return; /* a name twice, or more data than there may be */
    const struct format_hint hint = {.kinds = 1u << FORMAT_NVFP4_MODELOPT};
    format_scan(set, &hint, look, &linears);
    CHECK(linears <= safetensors_count(set));
    identity_quantization(set, text, sizeof(text));
    safetensors_close(&set);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct arena arena;
    struct safetensors_list list = {NULL, 0, 0};
    struct err_detail detail = {{0}};
    if (size > 0 && data[0] == 'T') {
        scan(data + 1, size - 1);
        return 0;
    }
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
