/* SPDX-License-Identifier: Apache-2.0 */
/* The drafter's properties that no vector shows: what is refused, what must not matter, holes. */
#include "tests/model/dflash_copy.h"

#include "lib/base/str.h"

/* ---- files ---- */

static void unknown_things_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *config_from, *config_to, *tensor_from, *tensor_to, *names;
    } cases[] = {
        {NULL, NULL, "\"layers.1.mlp.up_proj.weight\"", "\"layers.1.mlp.up_proj.weighs\"",
         "layers.1.mlp.up_proj"},
        {NULL, NULL, "\"layers.0.self_attn.q_norm.weight\"", "\"layers.0.self_attn.m_norm.weight\"",
         "q_norm"},
        {"DFlash2DraftModel", "DSparkDraftModel", NULL, NULL, "DSparkDraftModel"},
        {"DFlash2DraftModel", "LagunaDFlashModel", NULL, NULL, "architectures"},
        {"DFlash2DraftModel", "LagunaDFlashModel", NULL, NULL, "LagunaDFlashModel"},
        {"DFlash2DraftModel", "MuseGlimmerDraftModel", NULL, NULL, "MuseGlimmerDraftModel"},
        {"DFlash2DraftModel", "DFlashDraftModel", NULL, NULL, "conv_kernel_size"},
        {"\"block_size\": 8", "\"block_size\": 8, \"markov_w1\": 3", NULL, NULL, "DSpark"},
        {"\"block_size\": 8", "\"block_size\": 8, \"gru_hidden_dim\": 3", NULL, NULL, "Domino"},
        {"\"block_size\": 8", "\"block_size\": 8, \"sample_from_anchor\": true", NULL, NULL,
         "sample_from_anchor"},
        {"\"block_size\": 8", "\"block_size\": 80", NULL, NULL, "block_size"},
        {"\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", NULL, NULL, "hidden_act"},
        {"\"rope_theta\": 10000.0", "\"rope_thata\": 10000.0", NULL, NULL, "rope_theta"},
        {"\"rope_type\": \"default\"", "\"rope_type\": \"yarn\"", NULL, NULL, "rope_type"},
        {"\"target_layer_ids\": [\n   4,\n   1,\n   6\n  ]", "\"target_layer_ids\": []", NULL, NULL,
         "target_layer_ids"},
        {"\"layer_types\": [\n  \"sliding_attention\",\n  \"sliding_attention\",\n  "
         "\"sliding_attention\"\n ]",
         "\"layer_types\": []", NULL, NULL, "layer_types"},
        {"\"architectures\": [\n  \"DFlash2DraftModel\"\n ]", "\"architectures\": []", NULL, NULL,
         "architectures"},
        {"\"num_target_layers\": 8", "\"num_target_layers\": 6", NULL, NULL, "target_layer_ids"},
        {"\"mask_token_id\": 1012", "\"mask_token_id\": 4096", NULL, NULL, "mask_token_id"},
        {"\"vocab_size\": 1024", "\"vocab_size\": 1000", NULL, NULL, "mask_token_id"},
        {"\"intermediate_size\": 256", "\"intermediate_size\": 255", NULL, NULL, "gate_proj"},
        {"\"head_dim\": 32", "\"head_dim\": 31", NULL, NULL, "head_dim"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct copy c;
        struct dflash *d = NULL;
        struct err_detail detail;
        copy_open(&c, cases[i].config_from, cases[i].config_to, cases[i].tensor_from,
                  cases[i].tensor_to);
        enum err e = load_from(c.dir, &d, &detail);
        if (e == ERR_OK || strstr(detail.text, cases[i].names) == NULL)
            fail_msg("case %zu: \"%s\" does not name %s", i, detail.text, cases[i].names);
        copy_close(&c);
    }
}

/* A v2 file whose config says v1 without its switches: the convolution must not go unseen. */
static void a_v2_file_is_no_v1_drafter(void **state)
{
    (void)state;
    struct copy c;
    struct dflash *d = NULL;
    struct err_detail detail;
    char *text;
    size_t bytes;
    copy_open(&c, NULL, NULL, NULL, NULL);
    read_all(RANDOM, "config.json", &text, &bytes);
    replace(&text, &bytes, "DFlash2DraftModel", "DFlashDraftModel");
    replace(&text, &bytes, "\"conv_kernel_size\"", "\"x1\"");
    replace(&text, &bytes, "\"conv_group_size\"", "\"x2\"");
    replace(&text, &bytes, "\"selector_rank\"", "\"x3\"");
    replace(&text, &bytes, "\"selector_top_k\"", "\"x4\"");
    put_file(&c, "config.json", text, bytes);
    mem_give(text);
    assert_int_equal(load_from(c.dir, &d, &detail), ERR_INVALID);
    assert_non_null(strstr(detail.text, "candidate_selector"));
    copy_close(&c);
}

static struct dflash_config parse(const char *text)
{
    struct dflash_config c;
    struct err_detail detail;
    if (dflash_config_parse(text, strlen(text), &c, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    return c;
}

#define GEOMETRY                                                                                   \
    "\"hidden_size\":96,\"intermediate_size\":256,\"num_hidden_layers\":2,"                        \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,\"rms_norm_eps\":1e-6,"   \
    "\"vocab_size\":260,\"hidden_act\":\"silu\""

static void both_spellings_become_one(void **state)
{
    (void)state;
    struct dflash_config flat =
        parse("{\"architectures\":[\"DFlash2DraftModel\"]," GEOMETRY
              ",\"rope_theta\":10000,\"layer_types\":[\"full_attention\",\"sliding_attention\"],"
              "\"sliding_window\":64,\"is_causal\":false,\"block_size\":8,\"num_target_layers\":6,"
              "\"dflash_config\":{\"mask_token_id\":259,\"target_layer_ids\":[3,1,2],"
              "\"conv_kernel_size\":2,\"conv_group_size\":16,\"selector_rank\":32,\"selector_top_"
              "k\":16}}");
    struct dflash_config other = parse(
        "{\"speculators_model_type\":\"dflash2\",\"transformer_layer_config\":{" GEOMETRY
        ",\"rope_parameters\":{\"rope_theta\":10000,\"rope_type\":\"default\"},"
        "\"layer_types\":[\"full_attention\",\"sliding_attention\"],\"sliding_window\":64},"
        "\"sliding_window_non_causal\":true,\"block_size\":8,\"mask_token_id\":259,"
        "\"num_target_layers\":6,\"aux_hidden_state_layer_ids\":[4,2,3],\"conv_kernel_size\":2,"
        "\"conv_group_size\":16,\"selector_rank\":32,\"selector_top_k\":16}");
    assert_memory_equal(&flat, &other, sizeof(flat));
    assert_int_equal(flat.taps[0], 3);
    assert_false(flat.layer_causal[0] || flat.layer_causal[1]);
    /* Without the key a sliding layer is causal; dflash_config.causal decides before that. */
    struct dflash_config legacy =
        parse("{\"architectures\":[\"DFlashDraftModel\"]," GEOMETRY
              ",\"rope_theta\":10000,\"layer_types\":[\"full_attention\",\"sliding_attention\"],"
              "\"sliding_window\":64,\"block_size\":16,\"dflash_config\":{\"block_size\":8,"
              "\"mask_token_id\":259,\"target_layer_ids\":[1]}}");
    assert_true(!legacy.layer_causal[0] && legacy.layer_causal[1]);
    assert_int_equal(legacy.block_size, 8); /* the nested one wins */
    uint32_t taps[5];
    struct err_detail detail;
    assert_int_equal(dflash_default_taps(36, 5, taps, &detail), ERR_OK);
    const uint32_t published[5] = {1, 9, 17, 25, 33};
    assert_memory_equal(taps, published, sizeof(taps));
    assert_int_equal(dflash_check_taps(&flat, 3, &detail), ERR_INVALID);
}

/* ---- what must not matter ---- */

static void batches_change_nothing(void **state)
{
    (void)state;
    struct dflash *d = load_below(RANDOM);
    struct dflash_context contexts[8];
    uint32_t alone[8][7], lengths[8] = {3, 200, 40, 127, 128, 129, 300, 1};
    struct dflash_block blocks[8];
    struct block_seen seen;
    for (uint32_t i = 0; i < 8; i++) {
        float *taps = made_up_taps(100 + i, lengths[i]);
        contexts[i] = context_new(d);
        dflash_context_append(d, &contexts[i], taps, lengths[i]);
        mem_give(taps);
        draft(d, &contexts[i], 30 + i, alone[i], &seen);
        blocks[i] = (struct dflash_block){.context = &contexts[i], .anchor = 30 + i};
    }
    dflash_draft(d, blocks, 8);
    for (uint32_t i = 0; i < 8; i++) {
        assert_memory_equal(blocks[i].ids, alone[i], sizeof(alone[i]));
        mem_give(contexts[i].rows);
    }
    dflash_destroy(&d);
}

/* Only distances count: the same rows at 0 and at 100,000, far beyond the drafter's own maximum. */
static void position_is_relative(void **state)
{
    (void)state;
    struct dflash *d = load_below(RANDOM);
    struct dflash_context near = context_new(d), far = context_new(d);
    struct block_seen a, b;
    uint32_t ids_near[7], ids_far[7];
    float *taps = made_up_taps(7, 150);
    dflash_context_append(d, &near, taps, 150);
    dflash_context_begin(&far, 100000);
    dflash_context_append(d, &far, taps, 150);
    draft(d, &near, 77, ids_near, &a);
    draft(d, &far, 77, ids_far, &b);
    for (uint32_t i = 0; i < 8 * HIDDEN; i++)
        assert_true(fabsf(a.hidden[i] - b.hidden[i]) < 1e-4f * fmaxf(1, fabsf(a.hidden[i])));
    assert_memory_equal(ids_near, ids_far, sizeof(ids_near));
    mem_give(taps);
    mem_give(near.rows);
    mem_give(far.rows);
    dflash_destroy(&d);
}

/* A context after a hole equals one that never had more; cropping equals never having gone on. */
static void holes_and_crops(void **state)
{
    (void)state;
    struct dflash *d = load_below(RANDOM);
    struct dflash_context suffix = context_new(d), whole = context_new(d), cropped = context_new(d);
    struct block_seen a, b;
    uint32_t ids_a[7], ids_b[7];
    float *taps = made_up_taps(9, 400);
    const uint64_t row = TAPS * HIDDEN;
    /* Rows that the window has passed do not matter: 400 rows, or the last 127 of them. */
    assert_int_equal(dflash_reach(d), 127);
    dflash_context_append(d, &whole, taps, 400);
    dflash_context_begin(&suffix, 400 - 127);
    dflash_context_append(d, &suffix, taps + (400 - 127) * row, 127);
    draft(d, &whole, 5, ids_a, &a);
    draft(d, &suffix, 5, ids_b, &b);
    assert_memory_equal(a.hidden, b.hidden, sizeof(a.hidden));
    /* Rows inside the window do. */
    dflash_context_begin(&suffix, 400 - 100);
    dflash_context_append(d, &suffix, taps + (400 - 100) * row, 100);
    draft(d, &suffix, 5, ids_b, &b);
    assert_memory_not_equal(a.hidden, b.hidden, sizeof(a.hidden));
    /* Back by 20 rows: as if the context had begun where the ring still reaches. */
    dflash_context_append(d, &cropped, taps, 400);
    dflash_context_crop(d, &cropped, 380);
    assert_int_equal(cropped.length, 380);
    assert_int_equal(cropped.first, 400 - 128);
    draft(d, &cropped, 5, ids_a, &a);
    dflash_context_begin(&suffix, 400 - 128);
    dflash_context_append(d, &suffix, taps + (400 - 128) * row, 108);
    draft(d, &suffix, 5, ids_b, &b);
    assert_memory_equal(a.hidden, b.hidden, sizeof(a.hidden));
    assert_memory_equal(ids_a, ids_b, sizeof(ids_a));
    /* An empty context drafts from the anchor alone. */
    dflash_context_begin(&suffix, 0);
    draft(d, &suffix, 5, ids_b, &b);
    mem_give(taps);
    mem_give(suffix.rows);
    mem_give(whole.rows);
    mem_give(cropped.rows);
    dflash_destroy(&d);
}

static void the_anchor_and_the_taps_matter(void **state)
{
    (void)state;
    struct dflash *d = load_below(RANDOM);
    struct dflash_context c = context_new(d), shifted = context_new(d);
    struct block_seen a, b;
    uint32_t ids[7];
    float *taps = made_up_taps(11, 61);
    dflash_context_append(d, &c, taps, 60);
    draft(d, &c, 5, ids, &a);
    draft(d, &c, 6, ids, &b);
    assert_memory_not_equal(a.hidden, b.hidden, sizeof(a.hidden));
    dflash_context_append(d, &shifted, taps + TAPS * HIDDEN, 60); /* one row late */
    draft(d, &shifted, 5, ids, &b);
    assert_memory_not_equal(a.hidden, b.hidden, sizeof(a.hidden));
    mem_give(taps);
    mem_give(c.rows);
    mem_give(shifted.rows);
    dflash_destroy(&d);
}

/* A channel far beyond what f16 holds, as large models have: sums and norms stay numbers, and the
 * others still count. */
static void an_outlier_channel_drowns_nothing(void **state)
{
    (void)state;
    struct dflash *d = load_below(RANDOM);
    struct dflash_context c = context_new(d), other = context_new(d);
    struct block_seen a, b;
    uint32_t ids[7];
    float *taps = made_up_taps(13, 60);
    for (uint32_t r = 0; r < 60 * TAPS; r++)
        taps[r * HIDDEN + 17] = r % 2 == 0 ? 4e5f : -4e5f;
    dflash_context_append(d, &c, taps, 60);
    draft(d, &c, 5, ids, &a); /* finite: asserted there */
    for (uint32_t r = 0; r < 60 * TAPS; r++)
        taps[r * HIDDEN + 18] += 1e5f;
    dflash_context_append(d, &other, taps, 60);
    draft(d, &other, 5, ids, &b);
    assert_memory_not_equal(a.hidden, b.hidden, sizeof(a.hidden));
    mem_give(taps);
    mem_give(c.rows);
    mem_give(other.rows);
    dflash_destroy(&d);
}

/* The random drafter without what only a v2 has. */
static void parts_of_v1(struct parts *f)
{
    char path[1024];
    struct safetensors *set = NULL;
    struct err_detail detail;
    size_t at = 0;
    test_path(path, sizeof(path), RANDOM);
    assert_int_equal(safetensors_open_directory(path, &set, &detail), ERR_OK);
    *f = (struct parts){.header = mem_take(1u << 16), .data = mem_take(2u << 20)};
    for (uint32_t i = 0; i < safetensors_count(set); i++) {
        const struct safetensors_tensor *t = safetensors_at(set, i);
        if (strstr(t->name, "_conv.") != NULL || strstr(t->name, "candidate_selector") != NULL)
            continue;
        at += (size_t)sprintf(f->header + at, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[%llu",
                              at == 0 ? "{" : ",", t->name, (unsigned long long)t->shape[0]);
        if (t->dims == 2)
            at += (size_t)sprintf(f->header + at, ",%llu", (unsigned long long)t->shape[1]);
        at += (size_t)sprintf(f->header + at, "],\"data_offsets\":[%zu,%zu]}", f->data_bytes,
                              f->data_bytes + (size_t)t->bytes);
        memcpy(f->data + f->data_bytes, t->data, t->bytes);
        f->data_bytes += t->bytes;
    }
    f->header[at++] = '}';
    f->header_bytes = at;
    safetensors_close(&set);
}

static void aliases_are_the_same_drafter(void **state)
{
    (void)state;
    static const char *const names[][2] = {
        {"\"fc.weight\"", "\"encoder.fc.weight\""},
        {"\"hidden_norm.weight\"", "\"encoder.output_norm_enc.weight\""},
        {"\"norm.weight\"", "\"model.norm.weight\""},
        {"\"layers.0.", "\"midlayer."},
        {"\"layers.1.", "\"model.layers.1."},
        {"predecessor_codebook\"", "predecessor_codebook.weight\""},
        {"successor_codebook\"", "successor_codebook.weight\""},
    };
    struct copy c;
    struct parts f;
    struct block_seen a, b;
    uint32_t ids_a[7], ids_b[7];
    copy_open(&c, NULL, NULL, NULL, NULL);
    parts_read(&f);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        replace(&f.header, &f.header_bytes, names[i][0], names[i][1]);
    parts_write(&f, &c);
    struct dflash *d = load_below(RANDOM), *other = load_copy(&c);
    draft_of(d, ids_a, &a);
    draft_of(other, ids_b, &b);
    assert_memory_equal(a.hidden, b.hidden, sizeof(a.hidden));
    assert_memory_equal(ids_a, ids_b, sizeof(ids_a));
    dflash_destroy(&d);
    dflash_destroy(&other);
    copy_close(&c);
}

/* A NaN or an infinity anywhere would only cost acceptance: it is refused by its tensor's name. */
static void what_is_not_finite_is_refused_by_name(void **state)
{
    (void)state;
    static const char *const names[] = {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.0.input_layernorm.weight",
        "layers.1.post_attention_layernorm.weight",
        "layers.2.self_attn.q_norm.weight",
        "layers.0.self_attn.k_norm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.2.mlp.down_proj.weight",
        "layers.1.attention_conv.base_kernel",
        "layers.1.mlp_conv.base_kernel",
        "layers.1.mlp_conv.kernel_projection.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection.weight",
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct copy c;
        struct parts f;
        struct dflash *d = NULL;
        struct err_detail detail;
        size_t count;
        copy_open(&c, NULL, NULL, NULL, NULL);
        parts_read(&f);
        uint16_t *values = parts_tensor(&f, names[i], &count);
        values[count - 1 - i] = i % 2 == 0 ? 0x7fc0 : 0xff80;
        parts_write(&f, &c);
        enum err e = load_from(c.dir, &d, &detail);
        if (e == ERR_OK || strstr(detail.text, names[i]) == NULL)
            fail_msg("\"%s\" does not name %s", detail.text, names[i]);
        copy_close(&c);
    }
}

/* Neutral convolutions and an empty codebook: the same drafts as a head without a selector. */
static void a_neutral_v2_is_a_v1(void **state)
{
    (void)state;
    struct copy c2, c1;
    struct parts f;
    struct block_seen a, b;
    uint32_t ids_a[7], ids_b[7];
    char name[96], *text;
    size_t count, bytes;
    copy_open(&c2, NULL, NULL, NULL, NULL);
    parts_read(&f);
    for (uint32_t l = 0; l < 3; l++) {
        for (uint32_t k = 0; k < 2; k++) {
            const char *which = k == 0 ? "attention_conv" : "mlp_conv";
            snprintf(name, sizeof(name), "layers.%u.%s.base_kernel", l, which);
            uint16_t *base = parts_tensor(&f, name, &count);
            assert_int_equal(count, 2 * 2 * HIDDEN);
            for (size_t i = 0; i < count; i++) /* [side, tap, channel]: one at tap 0 */
                base[i] = i / HIDDEN % 2 == 0 ? 0x3f80 : 0;
            snprintf(name, sizeof(name), "layers.%u.%s.kernel_projection.weight", l, which);
            memset(parts_tensor(&f, name, &count), 0, 2 * 2 * 8 * HIDDEN * 2);
            assert_int_equal(count, 2 * 2 * 8 * HIDDEN);
        }
    }
    uint16_t *codebook = parts_tensor(&f, "candidate_selector.predecessor_codebook", &count);
    memset(codebook, 0, count * 2);
    parts_write(&f, &c2);

    copy_open(&c1, NULL, NULL, NULL, NULL);
    read_all(RANDOM, "config.json", &text, &bytes);
    replace(&text, &bytes, "DFlash2DraftModel", "DFlashDraftModel");
    static const char *const switches[] = {"\"conv_kernel_size\"", "\"conv_group_size\"",
                                           "\"selector_rank\"", "\"selector_top_k\""};
    for (size_t i = 0; i < 4; i++)
        replace(&text, &bytes, switches[i], "\"unused\"");
    /* One key may stand once. */
    for (uint32_t i = 0; i < 3; i++) {
        char *at = strstr(text, "\"unused\"");
        at[6] = (char)('0' + i);
    }
    put_file(&c1, "config.json", text, bytes);
    mem_give(text);
    parts_of_v1(&f);
    parts_write(&f, &c1);
    struct dflash *v2 = load_copy(&c2), *v1 = load_copy(&c1);
    assert_true(dflash_config(v2)->v2 && !dflash_config(v1)->v2);
    draft_of(v2, ids_a, &a);
    draft_of(v1, ids_b, &b);
    assert_memory_equal(a.hidden, b.hidden, sizeof(a.hidden));
    assert_memory_equal(ids_a, ids_b, sizeof(ids_a));
    dflash_destroy(&v2);
    dflash_destroy(&v1);
    copy_close(&c2);
    copy_close(&c1);
}

/* Layers that see everything equal sliding ones as long as the window holds all; then not. */
static void full_and_causal_layers(void **state)
{
    (void)state;
    struct copy full, causal;
    struct block_seen a, b;
    uint32_t ids[7];
    copy_open(&full, "sliding_attention", "full_attention", NULL, NULL);
    copy_open(&causal, "\"is_causal\": false", "\"is_causal\": true", NULL, NULL);
    struct dflash *d = load_below(RANDOM), *f = load_copy(&full), *c = load_copy(&causal);
    assert_int_equal(dflash_reach(f), UINT32_MAX);
    draft_of(d, ids, &a);
    draft_of(f, ids, &b);
    assert_memory_equal(a.hidden, b.hidden, sizeof(a.hidden));
    draft_of(c, ids, &b);
    assert_memory_not_equal(a.hidden, b.hidden, sizeof(a.hidden));
    struct dflash_context far = {.rows = NULL}, near = context_new(d);
    float *taps = made_up_taps(33, 300);
    far.rows = mem_take(dflash_context_bytes(f));
    dflash_context_append(f, &far, taps, 300);
    dflash_context_append(d, &near, taps, 300);
    draft(f, &far, 40, ids, &a);
    draft(d, &near, 40, ids, &b);
    assert_memory_not_equal(a.hidden, b.hidden, sizeof(a.hidden));
    mem_give(taps);
    mem_give(far.rows);
    mem_give(near.rows);
    dflash_destroy(&d);
    dflash_destroy(&f);
    dflash_destroy(&c);
    copy_close(&full);
    copy_close(&causal);
}

/* Of a drafter whose config or one bit of one tensor is another. */
static struct hash128 context_fp_of(const char *from, const char *to, const char *tensor)
{
    struct copy c;
    struct parts f;
    struct err_detail detail;
    struct dflash *d = NULL;
    copy_open(&c, from, to, NULL, NULL);
    parts_read(&f);
    if (tensor != NULL) {
        size_t count;
        uint16_t *values = parts_tensor(&f, tensor, &count);
        values[count - 1] ^= 1;
    }
    parts_write(&f, &c);
    struct dflash_options options = {.directory = c.dir, .threads = 1, .context_only = true};
    if (dflash_load(&options, &d, &detail) != ERR_OK)
        fail_msg("%s", detail.text);
    struct hash128 fp = dflash_context_fp(d);
    dflash_destroy(&d);
    copy_close(&c);
    return fp;
}

static void whatever_makes_context_vectors_is_in_their_fingerprint(void **state)
{
    (void)state;
    struct hash128 plain = context_fp_of(NULL, NULL, NULL);
    struct hash128 same = context_fp_of(NULL, NULL, "layers.0.self_attn.k_proj.weight");
    assert_memory_equal(&plain, &same, sizeof(plain));
    struct hash128 others[] = {
        context_fp_of(NULL, NULL, "fc.weight"),
        context_fp_of(NULL, NULL, "hidden_norm.weight"),
        context_fp_of("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-06", NULL),
        context_fp_of("4,\n   1,", "1,\n   4,", NULL),
    };
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        assert_memory_not_equal(&plain, &others[i], sizeof(plain));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whatever_makes_context_vectors_is_in_their_fingerprint),
        cmocka_unit_test(unknown_things_are_refused_by_name),
        cmocka_unit_test(a_v2_file_is_no_v1_drafter),
        cmocka_unit_test(both_spellings_become_one),
        cmocka_unit_test(batches_change_nothing),
        cmocka_unit_test(position_is_relative),
        cmocka_unit_test(holes_and_crops),
        cmocka_unit_test(the_anchor_and_the_taps_matter),
        cmocka_unit_test(an_outlier_channel_drowns_nothing),
        cmocka_unit_test(aliases_are_the_same_drafter),
        cmocka_unit_test(what_is_not_finite_is_refused_by_name),
        cmocka_unit_test(a_neutral_v2_is_a_v1),
        cmocka_unit_test(full_and_causal_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
