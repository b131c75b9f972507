/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "drafter/df_params.h"
#include "drafter/df_shell.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/net/loop.h"
#include "lib/net/role.h"

#define PARAM(name, type, def, lo, hi, unit, apply, help)                                          \
    PARAM_ROW(struct df_params, name, type, def, lo, hi, unit, apply, help)
static const struct param df_param_table[] = {
#include "lib/base/params_common.def"
#include "drafter/df_params.def"
};
#undef PARAM

/* What single rows of the table cannot say. */
static enum err params_check(const void *params, struct err_detail *ret_faults)
{
    const struct df_params *p = params;
    char text[ERR_DETAIL_BYTES] = "";
    size_t at = 0;
    if (strcmp(p->numerics, "exact") != 0 && strcmp(p->numerics, "fast") != 0)
        at += (size_t)snprintf(text + at, sizeof(text) - at, "numerics: %s: exact or fast\n",
                               p->numerics);
    if (strcmp(p->tap_type, "bf16") != 0 && strcmp(p->tap_type, "f32") != 0)
        at += (size_t)snprintf(text + at, sizeof(text) - at, "tap_type: %s: bf16 or f32\n",
                               p->tap_type);
    if (strcmp(p->draft_head, "own_bf16") != 0 && strcmp(p->draft_head, "own_8bit") != 0)
        at += (size_t)snprintf(text + at, sizeof(text) - at,
                               "draft_head: %s: own_bf16 or own_8bit\n", p->draft_head);
    if (p->match_min > p->match_max)
        at += (size_t)snprintf(text + at, sizeof(text) - at,
                               "match_min: %u is more than match_max %u\n", p->match_min,
                               p->match_max);
    if (p->context_max > p->tokens_max)
        at += (size_t)snprintf(text + at, sizeof(text) - at,
                               "context_max: %u is more than tokens_max %llu\n", p->context_max,
                               (unsigned long long)p->tokens_max);
    CHECK(at < sizeof(text));
    if (at == 0)
        return ERR_OK;
    text[at - 1] = '\0';
    return err_set(ret_faults, ERR_INVALID, "%s", text);
}

static void on_stop(void *arg)
{
    struct loop *l = arg;
    loop_stop(l);
}

int main(int argc, char **argv)
{
    static struct df_params params;
    struct role role = {.name = "drafter",
                        .table = df_param_table,
                        .count = ARRAY_COUNT(df_param_table),
                        .params = &params,
                        .check = params_check};
    struct err_detail detail;
    role_load(&role, argc, argv);
    role_begin(&role);

    struct loop *l = loop_create();
    struct df_shell *shell = NULL;
    loop_on_stop_signal(l, on_stop, l);
    enum err e = df_shell_create(l, &params, &shell, &detail);
    if (e != ERR_OK)
        role_refuse(&role, e, &detail);
    log_info(DRAFTER, "ready", "run_dir=%s", params.run_dir);
    loop_run(l);
    log_info(DRAFTER, "stopping", "");
    df_shell_destroy(&shell);
    loop_destroy(&l);
    role_end(&role);
    return 0;
}
