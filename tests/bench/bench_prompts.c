/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_prompts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "tests/bench/bench_fields.h"

#define BENCH_PROMPTS_MAGIC   0x42505254u
#define BENCH_LINES_MAX       100000u
#define BENCH_FILE_BYTES_MAX  ((size_t)256 << 20)
#define BENCH_ARENA_BYTES_MAX ((size_t)1 << 30)

struct bench_prompts {
    uint32_t magic;
    uint32_t count;
    uint64_t seed;
    double words_per_token;
    struct arena arena; /* of one line's JSON */
    struct str file;
    size_t *line_start; /* count + 1 offsets into file; each line ends in a NUL */
    struct str text;    /* the drawn prompt */
    struct str value;
    struct bench_fields fields;
};

static const char *const words[] = {
    "river",   "stone",  "garden", "winter", "letter", "window", "forest", "bridge",
    "candle",  "market", "silver", "summer", "island", "mirror", "engine", "harbor",
    "the",     "a",      "of",     "and",    "to",     "in",     "that",   "with",
    "walks",   "holds",  "finds",  "keeps",  "turns",  "sees",   "makes",  "leaves",
    "old",     "small",  "bright", "quiet",  "green",  "heavy",  "early",  "open",
    "then",    "while",  "under",  "after",  "before", "near",   "above",  "between",
    "morning", "water",  "paper",  "number", "people", "story",  "road",   "house",
    "seven",   "three",  "often",  "never",  "slowly", "again",  "almost", "together",
};

struct bench_prompts *bench_prompts_create(uint64_t seed)
{
    struct bench_prompts *p = mem_take(sizeof(*p));
    p->magic = BENCH_PROMPTS_MAGIC;
    p->seed = seed;
    p->words_per_token = 1;
    arena_init(&p->arena, (size_t)64 << 10, BENCH_ARENA_BYTES_MAX);
    str_init(&p->file, BENCH_FILE_BYTES_MAX);
    str_init(&p->text, 0);
    str_init(&p->value, 0);
    return p;
}

void bench_prompts_destroy(struct bench_prompts **prompts_p)
{
    struct bench_prompts *p = *prompts_p;
    if (p == NULL)
        return;
    CHECK_OBJ(p, BENCH_PROMPTS_MAGIC);
    bench_fields_fini(&p->fields);
    arena_fini(&p->arena);
    str_fini(&p->file);
    str_fini(&p->text);
    str_fini(&p->value);
    mem_give(p->line_start);
    p->magic = 0;
    mem_give(p);
    *prompts_p = NULL;
}

static void set_messages(struct bench_prompts *p, const char *text, size_t bytes)
{
    str_clear(&p->value);
    str_add_text(&p->value, "[{\"role\":\"user\",\"content\":");
    json_write_string(&p->value, text, bytes);
    str_add_text(&p->value, "}]");
    CHECK(!p->value.overflow); /* a prompt is far below 1 GiB */
    CHECK(bench_fields_set(&p->fields, "messages", 8, p->value.text, p->value.bytes, NULL) ==
          ERR_OK);
}

/* Fills p->fields from one line of the file. */
static enum err read_line(struct bench_prompts *p, const char *line, size_t bytes,
                          struct err_detail *detail)
{
    bench_fields_fini(&p->fields);
    if (line[0] != '{') {
        set_messages(p, line, bytes);
        return ERR_OK;
    }
    arena_reset(&p->arena);
    struct json *root;
    struct json_error fault;
    const struct json_options options = {.bytes_max = BENCH_FILE_BYTES_MAX};
    enum err e = json_parse(&p->arena, &options, line, bytes, &root, &fault);
    if (e == ERR_INVALID)
        return err_set(detail, e, "no JSON: %s at byte %zu", fault.reason, fault.offset);
    if (e != ERR_OK)
        return err_set(detail, e, "%s", err_text(e));
    const struct json *prompt = json_get(root, "prompt");
    if (!json_is(json_get(root, "messages"), JSON_ARRAY) && !json_is(prompt, JSON_STRING))
        return err_set(detail, ERR_INVALID, "neither an array `messages` nor a string `prompt`");
    if (json_is(json_get(root, "messages"), JSON_ARRAY))
        return bench_fields_set_object(&p->fields, root, detail);
    set_messages(p, prompt->text, prompt->bytes);
    struct bench_fields rest = {0};
    e = bench_fields_set_object(&rest, root, detail);
    for (uint32_t i = 0; i < rest.count && e == ERR_OK; i++) {
        const char *key = rest.items[i].key, *value = rest.items[i].value;
        if (strcmp(key, "prompt") != 0)
            e = bench_fields_set(&p->fields, key, strlen(key), value, strlen(value), detail);
    }
    bench_fields_fini(&rest);
    return e;
}

static enum err read_file(struct bench_prompts *p, const char *path, struct err_detail *detail)
{
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    char piece[65536];
    size_t got;
    while ((got = fread(piece, 1, sizeof(piece), f)) > 0 && !p->file.overflow)
        str_add(&p->file, piece, got);
    bool failed = ferror(f) != 0;
    fclose(f);
    if (failed)
        return err_set(detail, ERR_IO, "%s: cannot be read", path);
    if (p->file.overflow)
        return err_set(detail, ERR_TOO_LARGE, "%s: over 256 MiB", path);
    return ERR_OK;
}

enum err bench_prompts_load(struct bench_prompts *p, const char *path, struct err_detail *detail)
{
    CHECK_OBJ(p, BENCH_PROMPTS_MAGIC);
    CHECK(p->count == 0);
    TRY(read_file(p, path, detail));
    str_add_char(&p->file, '\n');
    p->line_start = mem_take_array(BENCH_LINES_MAX + 1u, sizeof(*p->line_start));
    uint32_t number = 0;
    size_t at = 0;
    while (at < p->file.bytes) {
        number++;
        char *line = p->file.text + at;
        char *end = memchr(line, '\n', p->file.bytes - at);
        if (end == NULL)
            break;
        size_t bytes = (size_t)(end - line);
        while (bytes > 0 && line[bytes - 1] == '\r')
            bytes--;
        line[bytes] = '\0';
        if (bytes > 0) {
            struct err_detail fault = {{0}};
            if (strlen(line) != bytes || utf8_valid_prefix(line, bytes) != bytes)
                return err_set(detail, ERR_INVALID, "%s:%u: no UTF-8 text", path, number);
            if (p->count == BENCH_LINES_MAX)
                return err_set(detail, ERR_TOO_LARGE, "%s: over %u prompts", path, BENCH_LINES_MAX);
            enum err e = read_line(p, line, bytes, &fault);
            if (e != ERR_OK)
                return err_set(detail, e, "%s:%u: %s", path, number, fault.text);
            p->line_start[p->count++] = at;
        }
        at += (size_t)(end - line) + 1;
    }
    if (p->count == 0)
        return err_set(detail, ERR_INVALID, "%s: no prompt in it", path);
    return ERR_OK;
}

uint32_t bench_prompts_count(const struct bench_prompts *p)
{
    CHECK_OBJ(p, BENCH_PROMPTS_MAGIC);
    return p->count;
}

void bench_prompts_calibrate(struct bench_prompts *p, uint32_t tokens_asked,
                             uint64_t tokens_counted)
{
    CHECK_OBJ(p, BENCH_PROMPTS_MAGIC);
    /* Below this the template's own tokens weigh too much. */
    if (p->count > 0 || tokens_asked < 64 || tokens_counted == 0)
        return;
    double factor = p->words_per_token * tokens_asked / (double)tokens_counted;
    p->words_per_token = factor < 0.05 ? 0.05 : factor > 4 ? 4 : factor;
}

static void draw(struct bench_prompts *p, uint64_t index, uint32_t tokens)
{
    struct rng rng;
    rng_init(&rng, p->seed * UINT64_C(0x9e3779b97f4a7c15) + index);
    str_clear(&p->text);
    str_add_format(&p->text, "%016" PRIx64 ":", rng_u64(&rng));
    uint64_t count = (uint64_t)(tokens * p->words_per_token);
    for (uint64_t i = 0; i < count; i++) {
        str_add_char(&p->text, ' ');
        str_add_text(&p->text, words[rng_below(&rng, ARRAY_COUNT(words))]);
        if (i % 12 == 11)
            str_add_char(&p->text, '.');
    }
    str_add_text(&p->text, " Continue this text.");
}

const struct bench_fields *bench_prompts_draw(struct bench_prompts *p, uint64_t index,
                                              uint32_t tokens)
{
    CHECK_OBJ(p, BENCH_PROMPTS_MAGIC);
    bench_fields_fini(&p->fields);
    draw(p, index, tokens);
    set_messages(p, p->text.text, p->text.bytes);
    return &p->fields;
}

const struct bench_fields *bench_prompts_get(struct bench_prompts *p, uint64_t index,
                                             uint32_t tokens)
{
    CHECK_OBJ(p, BENCH_PROMPTS_MAGIC);
    if (p->count == 0)
        return bench_prompts_draw(p, index, tokens);
    const char *line = p->file.text + p->line_start[index % p->count];
    struct err_detail detail;
    CHECK(read_line(p, line, strlen(line), &detail) == ERR_OK); /* was read at load */
    return &p->fields;
}
