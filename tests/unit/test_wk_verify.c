/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "lib/base/rng.h"
#include "lib/base/str.h"
#include "worker/wk_spec.h"
#include "worker/wk_verify.h"

static const uint32_t stops[] = {7, 9};

static struct wk_limits limits(uint32_t max, uint32_t min, uint32_t context)
{
    return (struct wk_limits){.output_tokens_max = max,
                              .output_tokens_min = min,
                              .context_max = context,
                              .stop_id_count = 2,
                              .stop_ids = stops};
}

static void accepts_up_to_the_first_miss(void **state)
{
    (void)state;
    struct wk_limits l = limits(100, 0, 1000);
    const uint32_t drafts[] = {1, 2, 3, 4};
    const uint32_t all[] = {1, 2, 3, 4, 5}, some[] = {1, 2, 8, 4, 5}, none[] = {5, 2, 3, 4, 5};
    struct wk_verdict v = wk_verify(&l, 10, 0, drafts, 4, all, 5);
    assert_int_equal(v.final_count, 5);
    assert_int_equal(v.accepted, 4);
    assert_int_equal(v.finish, MSG_FINISH_NONE);
    v = wk_verify(&l, 10, 0, drafts, 4, some, 5);
    assert_int_equal(v.final_count, 3);
    assert_int_equal(v.accepted, 2);
    v = wk_verify(&l, 10, 0, drafts, 4, none, 1);
    assert_int_equal(v.final_count, 1);
    assert_int_equal(v.accepted, 0);
    v = wk_verify(&l, 10, 0, NULL, 0, none, 1);
    assert_int_equal(v.final_count, 1);
}

static void truncates_before_the_count(void **state)
{
    (void)state;
    const uint32_t drafts[] = {1, 7, 3, 4}, sampled[] = {1, 7, 3, 4, 5};
    struct wk_limits l = limits(100, 0, 1000);
    struct wk_verdict v = wk_verify(&l, 10, 3, drafts, 4, sampled, 5);
    assert_int_equal(v.final_count, 2);
    assert_int_equal(v.accepted, 2); /* the stop id was a right draft and was delivered */
    assert_int_equal(v.finish, MSG_FINISH_STOP);
    l = limits(6, 0, 1000);
    v = wk_verify(&l, 10, 5, drafts, 4, sampled, 5);
    assert_int_equal(v.final_count, 1);
    assert_int_equal(v.finish, MSG_FINISH_LENGTH);
    l = limits(5, 0, 1000); /* the stop id is the last one allowed: stop wins */
    v = wk_verify(&l, 10, 3, drafts, 4, sampled, 5);
    assert_int_equal(v.final_count, 2);
    assert_int_equal(v.finish, MSG_FINISH_STOP);
    l = limits(100, 0, 11);
    v = wk_verify(&l, 10, 3, drafts, 4, sampled, 5);
    assert_int_equal(v.final_count, 1);
    assert_int_equal(v.finish, MSG_FINISH_LENGTH);
    l = limits(100, 5, 1000); /* output token 5 of at least 5 does not stop */
    v = wk_verify(&l, 10, 3, drafts, 4, sampled, 5);
    assert_int_equal(v.final_count, 5);
    assert_int_equal(v.finish, MSG_FINISH_NONE);
}

static void resumptions_that_are_over(void **state)
{
    (void)state;
    struct wk_limits l = limits(4, 2, 100);
    assert_int_equal(wk_verify_over(&l, 50, 0, 7), MSG_FINISH_NONE); /* the prompt's own id */
    assert_int_equal(wk_verify_over(&l, 50, 3, 7), MSG_FINISH_STOP);
    assert_int_equal(wk_verify_over(&l, 50, 2, 7), MSG_FINISH_NONE);
    assert_int_equal(wk_verify_over(&l, 50, 4, 1), MSG_FINISH_LENGTH);
    assert_int_equal(wk_verify_over(&l, 100, 1, 1), MSG_FINISH_LENGTH);
}

static void garbage_is_cut(void **state)
{
    (void)state;
    const uint8_t has[8] = {1, 1, 1, 0, 1, 1, 1, 1};
    const uint32_t a[] = {1, 2, 3, 4}, b[] = {8, 1}, c[] = {1, UINT32_MAX}, d[] = {0, 7};
    assert_int_equal(wk_verify_usable(a, 4, 8, has), 2);
    assert_int_equal(wk_verify_usable(b, 2, 8, has), 0);
    assert_int_equal(wk_verify_usable(c, 2, 8, has), 1);
    assert_int_equal(wk_verify_usable(d, 2, 8, has), 2);
    assert_int_equal(wk_verify_usable(NULL, 0, 8, has), 0);
}

static void drafts_never_pass_the_limits(void **state)
{
    (void)state;
    struct wk_limits l = limits(10, 0, 100);
    assert_int_equal(wk_verify_drafts_max(&l, 50, 0, 7), 7);
    assert_int_equal(wk_verify_drafts_max(&l, 50, 9, 7), 0);
    assert_int_equal(wk_verify_drafts_max(&l, 50, 7, 7), 2);
    assert_int_equal(wk_verify_drafts_max(&l, 99, 0, 7), 0);
    assert_int_equal(wk_verify_drafts_max(&l, 96, 0, 7), 3);
}

/* Whatever is drafted, step by step the tokens are those of the plain loop. */
static void any_drafts_give_the_plain_text(void **state)
{
    (void)state;
    struct rng r;
    rng_init(&r, 5);
    for (int run = 0; run < 2000; run++) {
        uint32_t text[64], got[64], count = 0, plain = 0;
        struct wk_limits l =
            limits(1 + rng_below(&r, 30), rng_below(&r, 4), 10 + rng_below(&r, 30));
        for (uint32_t i = 0; i < 64; i++)
            text[i] = rng_below(&r, 12);
        while (wk_verify_over(&l, 9 + plain, plain, plain ? text[plain - 1] : 0) == MSG_FINISH_NONE)
            plain++;
        uint32_t finish = MSG_FINISH_NONE;
        while (finish == MSG_FINISH_NONE) {
            uint32_t drafts[7];
            uint32_t k = wk_verify_drafts_max(&l, 9 + count, count, rng_below(&r, 8));
            for (uint32_t j = 0; j < k; j++)
                drafts[j] = rng_below(&r, 4) ? text[count + j] : rng_below(&r, 12);
            struct wk_verdict v = wk_verify(&l, 9 + count, count, drafts, k, text + count, k + 1);
            memcpy(got + count, text + count, v.final_count * sizeof *got);
            count += v.final_count;
            finish = v.finish;
            assert_true(count <= l.output_tokens_max && 9 + count <= l.context_max);
        }
        assert_int_equal(count, plain);
        assert_memory_equal(got, text, count * sizeof *got);
    }
}

/* What is refused is shown in whole characters: the text goes into a message. */
static void refused_names_stay_utf8(void **state)
{
    (void)state;
    static const char *const fronts[] = {"", "fixed:", "ngram:", "mtp:"};
    char text[64];
    struct wk_spec s;
    struct err_detail d;
    for (size_t f = 0; f < sizeof fronts / sizeof *fronts; f++)
        for (int pad = 0; pad < 4; pad++) {
            snprintf(text, sizeof text, "%s%.*s%s", fronts[f], pad, "xyz",
                     "\U0001F600\U0001F600\U0001F600\U0001F600\U0001F600\U0001F600\U0001F600"
                     "\U0001F600\U0001F600");
            assert_int_equal(wk_spec_parse(text, &s, &d), ERR_INVALID);
            assert_int_equal(utf8_valid_prefix(d.text, strlen(d.text)), strlen(d.text));
            assert_non_null(strstr(d.text, "\U0001F600: "));
        }
}

static void policies_by_name(void **state)
{
    (void)state;
    struct wk_spec s;
    struct err_detail d;
    assert_int_equal(wk_spec_parse("off", &s, &d), ERR_OK);
    assert_int_equal(s.draft_count, 0);
    assert_string_equal(s.effective, "off");
    assert_int_equal(wk_spec_parse("fixed:3", &s, &d), ERR_OK);
    assert_int_equal(s.draft_count, 3);
    assert_string_equal(s.effective, "fixed:3");
    assert_string_equal(s.source, "");
    assert_int_equal(wk_spec_parse("ngram:7", &s, &d), ERR_OK);
    assert_string_equal(s.source, "ngram");
    assert_string_equal(s.effective, "ngram:7");
    assert_int_equal(wk_spec_parse("ema", &s, &d), ERR_OK);
    assert_string_equal(s.effective, "ema");
    assert_int_equal(s.policy, WK_POLICY_EMA);
    assert_int_equal(wk_spec_parse("goodput", &s, &d), ERR_OK);
    assert_string_equal(s.effective, "goodput");
    assert_int_equal(s.policy, WK_POLICY_GOODPUT);
    assert_int_equal(s.draft_count, 7);
    assert_int_equal(wk_spec_parse("mtp:3", &s, &d), ERR_OK);
    assert_string_equal(s.source, "mtp");
    assert_string_equal(s.effective, "mtp:3");
    assert_int_equal(s.policy, WK_POLICY_FIXED);
    assert_int_equal(s.draft_count, 3);
    assert_int_equal(wk_spec_parse("mtp:8", &s, &d), ERR_INVALID);
    assert_non_null(strstr(d.text, "spec"));
    static const char *const bad[] = {"",         "fixed",    "fixed:",  "fixed:8",
                                      "fixed:77", "fixed:-1", "ngram:9", "FIXED:1",
                                      "off ",     "emaa",     "fixed:3 "};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(wk_spec_parse(bad[i], &s, &d), ERR_INVALID);
        assert_non_null(strstr(d.text, "spec"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepts_up_to_the_first_miss),
        cmocka_unit_test(truncates_before_the_count),
        cmocka_unit_test(resumptions_that_are_over),
        cmocka_unit_test(garbage_is_cut),
        cmocka_unit_test(drafts_never_pass_the_limits),
        cmocka_unit_test(any_drafts_give_the_plain_text),
        cmocka_unit_test(refused_names_stay_utf8),
        cmocka_unit_test(policies_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
