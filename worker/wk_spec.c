/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_spec.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"

#define SHOWN_BYTES_MAX 32u /* of what is refused */

static bool starts_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* Bytes of a refused text to show: whole characters only, since the refusal goes out as UTF-8. */
static int shown(const char *text)
{
    return (int)utf8_valid_prefix(text, strnlen(text, SHOWN_BYTES_MAX));
}

static enum err counted(const char *text, const char *prefix, const char *source,
                        struct wk_spec *ret_spec, struct err_detail *detail)
{
    CHECK(starts_with(text, prefix));
    const char *digits = text + strlen(prefix);
    if (digits[0] < '0' || digits[0] > '7' || digits[1] != '\0')
        return err_set(detail, ERR_INVALID, "spec: %.*s: a count of 0 to 7 is expected",
                       shown(text), text);
    struct wk_spec spec = {.draft_count = (uint32_t)(digits[0] - '0'), .source = source};
    spec.policy = spec.draft_count > 0 ? WK_POLICY_FIXED : WK_POLICY_OFF;
    snprintf(spec.effective, sizeof spec.effective, "%s%c", prefix, digits[0]);
    *ret_spec = spec;
    return ERR_OK;
}

enum err wk_spec_parse(const char *text, struct wk_spec *ret_spec, struct err_detail *detail)
{
    CHECK(text != NULL && ret_spec != NULL);
    if (strcmp(text, "off") == 0) {
        *ret_spec = (struct wk_spec){.source = "", .effective = "off"};
        return ERR_OK;
    }
    if (strcmp(text, "ema") == 0 || strcmp(text, "goodput") == 0) {
        *ret_spec = (struct wk_spec){.policy = text[0] == 'e' ? WK_POLICY_EMA : WK_POLICY_GOODPUT,
                                     .draft_count = WK_SPEC_DRAFTS_MAX,
                                     .source = ""};
        snprintf(ret_spec->effective, sizeof ret_spec->effective, "%s", text);
        return ERR_OK;
    }
    if (starts_with(text, "fixed:"))
        return counted(text, "fixed:", "", ret_spec, detail);
    if (starts_with(text, "ngram:"))
        return counted(text, "ngram:", "ngram", ret_spec, detail);
    if (starts_with(text, "mtp:"))
        return counted(text, "mtp:", WK_SOURCE_MTP, ret_spec, detail);
    return err_set(detail, ERR_INVALID,
                   "spec: %.*s: not one of off, fixed:K, ngram:K, mtp:K, ema, goodput", shown(text),
                   text);
}
