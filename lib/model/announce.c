/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/announce.h"

#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/model/format_scan.h"
#include "lib/model/weights.h"

#define KIND(kind) (1u << FORMAT_##kind)
#define ANY_EXL3   (KIND(EXL3) | KIND(EXL3_RANKED))
#define ANY_NVFP4  (KIND(NVFP4_MODELOPT) | KIND(NVFP4_CT))
#define ANY_FP8    (KIND(FP8_BLOCK) | KIND(FP8_TENSOR) | KIND(FP8_CHANNEL))

static void add(char *text, size_t bytes, const char *more)
{
    size_t at = strlen(text);
    snprintf(text + at, bytes - at, "%s", more);
}

/* What names of directories say.  A word counts where no letter or digit adjoins it. */
static const struct claim {
    const char *word;
    uint32_t kinds;
} claims[] = {{"exl3", ANY_EXL3},
              {"tr3", ANY_EXL3},
              {"nvfp4", ANY_NVFP4},
              {"mxfp4", KIND(MXFP4)},
              {"mxfp8", KIND(MXFP8)},
              {"fp8", ANY_FP8 | KIND(MXFP8)},
              {"bf16", KIND(BF16)},
              {"fp16", KIND(F16)},
              {"fp32", KIND(F32)},
              {"gguf", 0},
              {"awq", 0},
              {"gptq", 0},
              {"int4", 0},
              {"int8", 0}};

static bool has_word(const char *name, const char *word)
{
    size_t bytes = strlen(word);
    for (const char *at = strcasestr(name, word); at != NULL; at = strcasestr(at + 1, word)) {
        bool begins = at == name || !isalnum((unsigned char)at[-1]);
        if (begins && !isalnum((unsigned char)at[bytes]))
            return true;
    }
    return false;
}

/* The number of "4.0bpw" or "4bpw"; false if none is said. */
static bool bits_said(const char *name, double *ret_bits)
{
    const char *at = strcasestr(name, "bpw");
    const char *begin = at;
    while (begin != NULL && begin > name && (isdigit((unsigned char)begin[-1]) || begin[-1] == '.'))
        begin--;
    if (begin == at)
        return false;
    *ret_bits = strtod(begin, NULL);
    return true;
}

struct held {
    uint32_t kinds;
    double bits; /* a weight, over all that are EXL3; 0: none */
    uint32_t off_hint, linears;
    const struct weights_linear *first_off;
};

static struct held look(const struct weights *w)
{
    struct held h = {0};
    double bits = 0, weights = 0;
    for (uint32_t i = 0; i < w->linear_count; i++) {
        const struct weights_linear *l = &w->linears[i];
        h.kinds |= 1u << l->info.kind;
        h.linears++;
        if (l->info.kind == FORMAT_EXL3) {
            double count = (double)l->info.out * l->info.in;
            bits += count * format_bits(&l->info);
            weights += count;
        }
        if ((l->info.warnings & FORMAT_WARN_CONFIG_MISMATCH) == 0)
            continue;
        if (h.off_hint++ == 0)
            h.first_off = l;
    }
    h.bits = weights > 0 ? bits / weights : 0;
    return h;
}

static void warn_name(const char *path, const struct held *h, char *text, size_t bytes)
{
    const char *slash = strrchr(path, '/'), *name = slash != NULL ? slash + 1 : path;
    char line[256];
    double bits = 0;
    for (size_t i = 0; i < ARRAY_COUNT(claims); i++) {
        if (!has_word(name, claims[i].word) || (h->kinds & claims[i].kinds) != 0)
            continue;
        snprintf(line, sizeof(line), "the directory's name says %s, but no tensor is so\n",
                 claims[i].word);
        add(text, bytes, line);
    }
    if (!bits_said(name, &bits) || (h->bits > 0 && fabs(bits - h->bits) < 0.5))
        return;
    snprintf(line, sizeof(line), "the directory's name says %.2f bits a weight, ", bits);
    add(text, bytes, line);
    if (h->bits > 0)
        snprintf(line, sizeof(line), "the EXL3 tensors have %.2f\n", h->bits);
    else
        snprintf(line, sizeof(line), "but no tensor is EXL3\n");
    add(text, bytes, line);
}

static void warn_config(const struct format_hint *hint, const struct held *h, char *text,
                        size_t bytes)
{
    char line[400], title[40], said[200] = "";
    for (uint32_t k = 0; k < FORMAT_KIND_COUNT; k++)
        if ((hint->kinds >> k & 1u) != 0)
            snprintf(said + strlen(said), sizeof(said) - strlen(said), "%s%s",
                     said[0] != 0 ? " or " : "", format_kind_name((enum format_kind)k));
    if (hint->unknown) {
        add(text, bytes, "the config announces a quantisation that is not known\n");
    } else if (h->off_hint > 0) {
        format_title(&h->first_off->info, title, sizeof(title));
        snprintf(line, sizeof(line),
                 "the config announces %s%s%s, but %u of %u linears differ: %s\n", said,
                 hint->has_codebook ? " with code book " : "",
                 hint->has_codebook ? format_codebook_name(hint->codebook) : "", h->off_hint,
                 h->linears, title);
        add(text, bytes, line);
    } else if (hint->kinds != 0 && (hint->kinds & h->kinds) == 0) {
        snprintf(line, sizeof(line), "the config announces %s, but no tensor is so\n", said);
        add(text, bytes, line);
    }
}

void announce_warnings(const struct weights *w, const char *directory,
                       const struct format_hint *hint, char *ret_text, size_t bytes)
{
    struct held h = look(w);
    char *real = realpath(directory, NULL);
    ret_text[0] = 0;
    warn_config(hint, &h, ret_text, bytes);
    warn_name(real != NULL ? real : directory, &h, ret_text, bytes);
    free(real);
    size_t at = strlen(ret_text);
    if (at > 0 && ret_text[at - 1] == '\n')
        ret_text[at - 1] = 0;
}
