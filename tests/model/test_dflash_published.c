/* SPDX-License-Identifier: Apache-2.0 */
/* What published drafters have beyond the fixtures: their numbers of layers and taps, tables of
 * their own, fewer ids to draft from, a learned mask vector; and parts of other networks.  The
 * values are those of the random drafter, repeated. */
#include "tests/model/dflash_copy.h"

#include "lib/base/str.h"

/* ---- mask_embedding.pt: a zip of stored members ---- */

struct zip_out {
    uint8_t bytes[4096];
    size_t count, members;
    uint8_t directory[512];
    size_t directory_count;
};

static void put16(uint8_t *bytes, size_t *at, uint32_t value)
{
    bytes[(*at)++] = (uint8_t)value;
    bytes[(*at)++] = (uint8_t)(value >> 8);
}

static void put32(uint8_t *bytes, size_t *at, uint32_t value)
{
    put16(bytes, at, value & 0xffff);
    put16(bytes, at, value >> 16);
}

static void zip_member(struct zip_out *z, const char *name, const void *data, uint32_t bytes)
{
    size_t offset = z->count;
    put32(z->bytes, &z->count, 0x04034b50);
    for (uint32_t i = 0; i < 3; i++) /* version, flags, method 0 = stored */
        put16(z->bytes, &z->count, 0);
    put32(z->bytes, &z->count, 0); /* time */
    put32(z->bytes, &z->count, 0); /* crc */
    put32(z->bytes, &z->count, bytes);
    put32(z->bytes, &z->count, bytes);
    put16(z->bytes, &z->count, (uint32_t)strlen(name));
    put16(z->bytes, &z->count, 5); /* an extra field, as torch pads with */
    memcpy(z->bytes + z->count, name, strlen(name));
    z->count += strlen(name) + 5;
    memcpy(z->bytes + z->count, data, bytes);
    z->count += bytes;
    uint8_t *d = z->directory;
    size_t *at = &z->directory_count;
    put32(d, at, 0x02014b50);
    for (uint32_t i = 0; i < 6; i++)
        put16(d, at, 0);
    put32(d, at, 0);
    put32(d, at, bytes);
    put32(d, at, bytes);
    put16(d, at, (uint32_t)strlen(name));
    for (uint32_t i = 0; i < 4; i++)
        put16(d, at, 0);
    put32(d, at, 0);
    put32(d, at, (uint32_t)offset);
    memcpy(d + *at, name, strlen(name));
    *at += strlen(name);
    z->members++;
}

static void zip_end(struct zip_out *z)
{
    size_t start = z->count;
    memcpy(z->bytes + z->count, z->directory, z->directory_count);
    z->count += z->directory_count;
    put32(z->bytes, &z->count, 0x06054b50);
    put32(z->bytes, &z->count, 0);
    put16(z->bytes, &z->count, (uint32_t)z->members);
    put16(z->bytes, &z->count, (uint32_t)z->members);
    put32(z->bytes, &z->count, (uint32_t)z->directory_count);
    put32(z->bytes, &z->count, (uint32_t)start);
    put16(z->bytes, &z->count, 0);
}

struct mask_seen {
    float rows[8 * HIDDEN];
};

static void on_block_in(void *arg, const char *name, uint32_t layer, const float *values,
                        uint32_t rows, uint32_t width)
{
    struct mask_seen *seen = arg;
    (void)layer;
    if (strcmp(name, "block_in") == 0)
        memcpy(seen->rows, values, (size_t)rows * width * sizeof(float));
}

static void mask_of(struct dflash *d, struct mask_seen *seen)
{
    struct dflash_context context = context_new(d);
    struct dflash_block block = {.context = &context, .anchor = 7};
    memset(seen, 0, sizeof(*seen));
    dflash_probe(d, on_block_in, seen);
    dflash_draft(d, &block, 1);
    dflash_probe(d, NULL, NULL);
    mem_give(context.rows);
}

static void a_learned_mask_vector_takes_the_rows(void **state)
{
    (void)state;
    static struct zip_out z;
    struct copy c;
    struct mask_seen seen;
    uint16_t mask[HIDDEN];
    z = (struct zip_out){.count = 0};
    for (uint32_t i = 0; i < HIDDEN; i++)
        mask[i] = (uint16_t)(0x3f80 + i); /* 1 + i / 128 */
    zip_member(&z, "mask_embedding/data.pkl", "ctorch\nBFloat16Storage\n", 23);
    zip_member(&z, "mask_embedding/data/0", mask, sizeof(mask));
    zip_end(&z);
    copy_open(&c, NULL, NULL, NULL, NULL);
    put_file(&c, "mask_embedding.pt", z.bytes, z.count);
    struct dflash *d = load_copy(&c);
    mask_of(d, &seen);
    for (uint32_t j = 0; j < 8; j++)
        for (uint32_t i = 0; i < HIDDEN; i++)
            assert_true((seen.rows[j * HIDDEN + i] == 1 + (float)i / 128) == (j > 0));
    dflash_destroy(&d);
    /* Cut it is refused; altered it is refused, or all but one value at most is still the same. */
    struct rng rng;
    struct err_detail detail;
    uint32_t refused = 0, taken = 0, changed = 0;
    rng_init(&rng, 0x5eed00a1);
    for (uint32_t run = 0; run < 600; run++) {
        uint8_t bytes[4096];
        size_t count = z.count;
        memcpy(bytes, z.bytes, z.count);
        if (run % 6 == 0)
            count = rng_below(&rng, (uint32_t)z.count);
        else
            bytes[rng_below(&rng, (uint32_t)z.count)] ^= (uint8_t)(1 + rng_below(&rng, 255));
        put_file(&c, "mask_embedding.pt", bytes, count);
        if (load_from(c.dir, &d, &detail) != ERR_OK) {
            assert_non_null(strstr(detail.text, "mask_embedding.pt"));
            refused++;
            continue;
        }
        assert_int_equal(count, z.count);
        uint32_t others = 0;
        mask_of(d, &seen);
        for (uint32_t i = 0; i < HIDDEN; i++) {
            assert_true(isfinite(seen.rows[HIDDEN + i]));
            others += seen.rows[HIDDEN + i] != 1 + (float)i / 128;
        }
        assert_true(others <= 1);
        changed += others;
        taken++;
        dflash_destroy(&d);
    }
    assert_true(refused > 150 && taken > 150 && changed > 50);
    /* A value that is no number, by its place. */
    mask[77] = 0x7f80;
    z = (struct zip_out){.count = 0};
    zip_member(&z, "mask_embedding/data.pkl", "ctorch\nBFloat16Storage\n", 23);
    zip_member(&z, "mask_embedding/data/0", mask, sizeof(mask));
    zip_end(&z);
    put_file(&c, "mask_embedding.pt", z.bytes, z.count);
    assert_int_equal(load_from(c.dir, &d, &detail), ERR_INVALID);
    assert_non_null(strstr(detail.text, "mask_embedding.pt: not finite at [77]"));
    copy_close(&c);
}

/* ---- the geometries ---- */

struct published {
    const char *config;
    uint32_t layers, taps, tensors; /* tensors: of the published file */
    bool tables;                    /* own embed_tokens and lm_head */
};

static const struct published reference = {
    "{\"architectures\":[\"DFlash2DraftModel\"],\"hidden_size\":128,\"intermediate_size\":256,"
    "\"num_hidden_layers\":5,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
    "\"rms_norm_eps\":1e-05,\"vocab_size\":1024,\"hidden_act\":\"silu\",\"attention_bias\":false,"
    "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":10000.0},"
    "\"max_position_embeddings\":65536,\"layer_types\":[\"sliding_attention\","
    "\"sliding_attention\",\"sliding_attention\",\"sliding_attention\",\"sliding_attention\"],"
    "\"use_sliding_window\":true,\"sliding_window\":2048,\"is_causal\":false,"
    "\"num_target_layers\":45,\"dflash_config\":{\"block_size\":8,\"mask_token_id\":1012,"
    "\"target_layer_ids\":[5,14,24,33,42],\"conv_kernel_size\":2,\"conv_group_size\":16,"
    "\"selector_rank\":16,\"selector_top_k\":16}}",
    5, 5, 81, false};

static const struct published g = {
    "{\"architectures\":[\"DFlash2DraftModel\"],\"hidden_size\":128,\"intermediate_size\":256,"
    "\"num_hidden_layers\":8,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
    "\"rms_norm_eps\":1e-05,\"vocab_size\":1024,\"hidden_act\":\"silu\",\"attention_bias\":false,"
    "\"tie_word_embeddings\":false,\"mask_token_id\":1012,"
    "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":10000.0},"
    "\"max_position_embeddings\":65536,\"layer_types\":[\"full_attention\",\"full_attention\","
    "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
    "\"full_attention\",\"full_attention\"],\"num_target_layers\":45,"
    "\"dflash_config\":{\"block_size\":8,\"mask_token_id\":1012,"
    "\"target_layer_ids\":[5,9,14,19,24,28,33,38,42],\"conv_kernel_size\":2,"
    "\"conv_group_size\":16,\"selector_rank\":16,\"selector_top_k\":16}}",
    8, 9, 128, true};

static uint16_t bf16_of(float value) /* of values that have no more digits */
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

/* Row r is 1 + r / 1024 of bf16's digits; any two rows 8 apart differ. */
static void table_add(struct parts *f)
{
    uint16_t *table = mem_take_array(1024 * HIDDEN, sizeof(*table));
    for (uint32_t i = 0; i < 1024 * HIDDEN; i++)
        table[i] = bf16_of(1 + (float)(i / HIDDEN / 8) / 128);
    parts_add(f, "embed_tokens.weight", 1024, HIDDEN, table);
    mem_give(table);
}

/* Nothing but rows `first` and `first` + 1, one of which wins whatever the hidden state is. */
static void head_add(struct parts *f, uint32_t rows, uint32_t first)
{
    uint16_t *head = mem_take_array((uint64_t)rows * HIDDEN, sizeof(*head));
    memset(head, 0, (size_t)rows * HIDDEN * sizeof(*head));
    for (uint32_t i = 0; i < 2 * HIDDEN; i++)
        head[first * HIDDEN + i] = bf16_of(i < HIDDEN ? 8192 : -8192);
    parts_add(f, "lm_head.weight", rows, HIDDEN, head);
    mem_give(head);
}

/* fc for that many taps: the columns of the random one, again and again. */
static void fc_add(struct parts *f, const struct safetensors_tensor *fc, uint32_t taps)
{
    uint16_t *wide = mem_take_array((uint64_t)HIDDEN * taps * HIDDEN, sizeof(*wide));
    for (uint32_t r = 0; r < HIDDEN; r++)
        for (uint32_t t = 0; t < taps; t++)
            memcpy(wide + ((size_t)r * taps + t) * HIDDEN,
                   fc->data + ((size_t)r * TAPS + t % TAPS) * HIDDEN * sizeof(*wide),
                   HIDDEN * sizeof(*wide));
    parts_add(f, "fc.weight", HIDDEN, taps * HIDDEN, wide);
    mem_give(wide);
}

static void copy_tensor(struct parts *f, const struct safetensors_tensor *t, const char *name)
{
    uint64_t shape[3];
    for (uint32_t i = 0; i < t->dims; i++)
        shape[i] = t->shape[i];
    parts_add_shaped(f, name, "BF16", shape, t->dims, t->data, (size_t)t->bytes);
}

/* The random drafter's tensors with the names and numbers of a published one. */
static void published_parts(struct parts *f, const struct published *p)
{
    char path[1024], name[160];
    struct safetensors *set = NULL;
    struct err_detail detail;
    test_path(path, sizeof(path), RANDOM);
    assert_int_equal(safetensors_open_directory(path, &set, &detail), ERR_OK);
    parts_begin(f, 8u << 20);
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        if (strcmp(t->name, "fc.weight") == 0)
            fc_add(f, t, p->taps);
        else if (strncmp(t->name, "layers.", 7) != 0)
            copy_tensor(f, t, t->name);
        else
            for (uint32_t l = (uint32_t)(t->name[7] - '0'); l < p->layers; l += 3) {
                snprintf(name, sizeof(name), "layers.%u%s", l, t->name + 8);
                copy_tensor(f, t, name);
            }
    }
    safetensors_close(&set);
}

static void published_open(struct copy *c, struct parts *f, const struct published *p)
{
    copy_open(c, NULL, NULL, NULL, NULL);
    put_file(c, "config.json", p->config, strlen(p->config));
    published_parts(f, p);
}

static uint32_t tensors_of(const struct copy *c)
{
    struct safetensors *set = NULL;
    struct err_detail detail;
    assert_int_equal(safetensors_open_directory(c->dir, &set, &detail), ERR_OK);
    uint32_t count = safetensors_count(set);
    safetensors_close(&set);
    return count;
}

static struct dflash *load_published(struct copy *c, const struct published *p)
{
    char target[1024];
    struct dflash *d = NULL;
    struct err_detail detail;
    test_path(target, sizeof(target), "tests/golden/tiny-glm");
    struct dflash_options options = {.directory = c->dir,
                                     .target = target,
                                     .seqs_max = 1,
                                     .context_max = 4096,
                                     .threads = 1,
                                     .exact = true};
    assert_int_equal(tensors_of(c), p->tensors);
    if (dflash_load(&options, &d, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    assert_int_equal(dflash_config(d)->layers, p->layers);
    assert_int_equal(dflash_config(d)->tap_count, p->taps);
    return d;
}

/* 60 tokens of context, then one block. */
static void draft_published(struct dflash *d, uint32_t anchor, uint32_t ids[7],
                            struct block_seen *seen, struct mask_seen *in)
{
    uint32_t taps = dflash_config(d)->tap_count;
    struct dflash_context context = context_new(d);
    float *values = mem_take_array(60ull * taps * HIDDEN, sizeof(float));
    for (uint32_t i = 0; i < 60 * taps * HIDDEN; i++)
        values[i] = ((float)(i * 2654435761u % 2001) - 1000) / 500;
    dflash_context_append(d, &context, values, 60);
    draft(d, &context, anchor, ids, seen);
    struct dflash_block block = {.context = &context, .anchor = anchor};
    dflash_probe(d, on_block_in, in);
    dflash_draft(d, &block, 1);
    dflash_probe(d, NULL, NULL);
    mem_give(values);
    mem_give(context.rows);
}

static void five_sliding_layers_and_five_taps(void **state)
{
    (void)state;
    static const uint32_t taps[] = {5, 14, 24, 33, 42};
    struct copy c;
    struct parts f;
    struct block_seen seen;
    struct mask_seen in;
    uint32_t ids[7], plain[7];
    published_open(&c, &f, &reference);
    parts_write(&f, &c);
    struct dflash *d = load_published(&c, &reference), *random = load_below(RANDOM);
    assert_memory_equal(dflash_config(d)->taps, taps, sizeof(taps));
    assert_int_equal(dflash_reach(d), 2047);
    draft_published(d, 40, ids, &seen, &in);
    /* The tables are the target's. */
    struct dflash_context context = context_new(random);
    struct dflash_block block = {.context = &context, .anchor = 40};
    struct mask_seen want;
    dflash_probe(random, on_block_in, &want);
    dflash_draft(random, &block, 1);
    dflash_probe(random, NULL, NULL);
    memcpy(plain, block.ids, sizeof(plain));
    assert_memory_equal(in.rows, want.rows, sizeof(want.rows));
    assert_memory_not_equal(ids, plain, sizeof(ids));
    mem_give(context.rows);
    dflash_destroy(&d);
    dflash_destroy(&random);
    copy_close(&c);
}

static void eight_full_layers_nine_taps_and_own_tables(void **state)
{
    (void)state;
    static const uint32_t taps[] = {5, 9, 14, 19, 24, 28, 33, 38, 42};
    static struct zip_out z;
    struct copy c;
    struct parts f;
    struct block_seen seen;
    struct mask_seen in;
    uint32_t ids[7];
    uint16_t mask[HIDDEN];
    published_open(&c, &f, &g);
    table_add(&f);
    head_add(&f, 1024, 321);
    parts_write(&f, &c);
    for (uint32_t i = 0; i < HIDDEN; i++)
        mask[i] = bf16_of(-1 - (float)i / 128);
    z = (struct zip_out){.count = 0};
    zip_member(&z, "mask_embedding/data.pkl", "ctorch\nBFloat16Storage\n", 23);
    zip_member(&z, "mask_embedding/data/0", mask, sizeof(mask));
    zip_end(&z);
    put_file(&c, "mask_embedding.pt", z.bytes, z.count);
    struct dflash *d = load_published(&c, &g);
    assert_memory_equal(dflash_config(d)->taps, taps, sizeof(taps));
    assert_int_equal(dflash_reach(d), UINT32_MAX);
    for (uint32_t l = 0; l < 8; l++)
        assert_false(dflash_config(d)->layer_sliding[l] || dflash_config(d)->layer_causal[l]);
    draft_published(d, 40, ids, &seen, &in);
    for (uint32_t i = 0; i < 8 * HIDDEN; i++) {
        float want = i < HIDDEN ? 1 + 5.0f / 128 : -1 - (float)(i % HIDDEN) / 128;
        assert_true(in.rows[i] == want);
    }
    for (uint32_t j = 0; j < 7; j++)
        assert_true(ids[j] == 321 || ids[j] == 322);
    dflash_destroy(&d);
    copy_close(&c);
}

/* ---- fewer ids to draft from ---- */

enum d2t_fault {
    SOUND,
    MISSING,
    WRONG_TYPE,
    SHORT,
    TWICE,
    BACK,
    BEYOND,
    NEGATIVE,
    HUGE_ID,
    FAULTS
};

static void d2t_add(struct parts *f, uint32_t rows, enum d2t_fault fault)
{
    int64_t *to = mem_take_array(rows, sizeof(*to));
    for (uint32_t i = 0; i < rows; i++)
        to[i] = 2 * (int64_t)i; /* draft id i is id 3 * i */
    if (fault == TWICE)
        to[20] = to[19] - 1;
    if (fault == BACK)
        to[20] = -10;
    if (fault == BEYOND)
        to[rows - 1] = 1024 - (int64_t)rows + 1;
    if (fault == NEGATIVE)
        to[0] = -1;
    if (fault == HUGE_ID)
        to[rows - 1] = INT64_MAX;
    uint64_t shape[1] = {fault == SHORT ? rows - 1 : rows};
    if (fault != MISSING)
        parts_add_shaped(f, "d2t", fault == WRONG_TYPE ? "F64" : "I64", shape, 1, to,
                         shape[0] * sizeof(*to));
    mem_give(to);
}

static void drafts_come_from_fewer_ids(void **state)
{
    (void)state;
    enum { ROWS = 300 };
    char *config;
    size_t bytes;
    for (uint32_t fault = 0; fault < FAULTS; fault++) {
        struct copy c;
        struct parts f;
        struct dflash *d = NULL;
        struct err_detail detail;
        copy_open(&c, NULL, NULL, NULL, NULL);
        read_all(RANDOM, "config.json", &config, &bytes);
        replace(&config, &bytes, "\"vocab_size\": 1024",
                "\"vocab_size\": 1024, \"draft_vocab_size\": 300");
        put_file(&c, "config.json", config, bytes);
        mem_give(config);
        parts_read(&f);
        head_add(&f, ROWS, 100);
        d2t_add(&f, ROWS, (enum d2t_fault)fault);
        parts_write(&f, &c);
        enum err e = load_from(c.dir, &d, &detail);
        if (fault != SOUND) {
            if (e == ERR_OK || strstr(detail.text, "d2t") == NULL)
                fail_msg("fault %u: \"%s\" does not name d2t", fault, detail.text);
        } else {
            struct block_seen seen;
            uint32_t ids[7];
            assert_int_equal(e, ERR_OK);
            draft_of(d, ids, &seen);
            for (uint32_t j = 0; j < 7; j++)
                assert_true(ids[j] == 300 || ids[j] == 303);
            dflash_destroy(&d);
        }
        copy_close(&c);
    }
}

/* ---- parts of other networks ---- */

static void a_tensor_of_a_relative_is_refused_by_name(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"markov_head.weight", "DSpark"},
        {"confidence_head.weight", "DSpark"},
        {"gru.weight_ih", "Domino"},
        {"projector.weight", "Domino"},
        {"layers.0.tap_norm.weight", "Laguna"},
        {"context_gate.weight", "Laguna"},
        {"whatever.weight", "no part of a DFlash2 drafter"},
    };
    static const uint16_t values[8 * HIDDEN];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct copy c;
        struct parts f;
        struct dflash *d = NULL;
        struct err_detail detail;
        copy_open(&c, NULL, NULL, NULL, NULL);
        parts_read(&f);
        parts_add(&f, cases[i][0], 8, HIDDEN, values);
        parts_write(&f, &c);
        assert_int_equal(load_from(c.dir, &d, &detail), ERR_INVALID);
        if (strstr(detail.text, cases[i][0]) == NULL || strstr(detail.text, cases[i][1]) == NULL)
            fail_msg("\"%s\" does not name %s of %s", detail.text, cases[i][0], cases[i][1]);
        copy_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_learned_mask_vector_takes_the_rows),
        cmocka_unit_test(five_sliding_layers_and_five_taps),
        cmocka_unit_test(eight_full_layers_nine_taps_and_own_tables),
        cmocka_unit_test(drafts_come_from_fewer_ids),
        cmocka_unit_test(a_tensor_of_a_relative_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
