/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "drafter/df_params.h"
#include "drafter/df_shell.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/net/loop.h"
#include "lib/net/status.h"

#define PARAM(name, type, def, lo, hi, unit, apply, help)                                          \
    PARAM_ROW(struct df_params, name, type, def, lo, hi, unit, apply, help)
static const struct param df_param_table[] = {
#include "lib/base/params_common.def"
#include "drafter/df_params.def"
};
#undef PARAM

/* What single rows of the table cannot say. */
static enum err params_check(const struct df_params *p, struct err_detail *ret_faults)
{
    char text[ERR_DETAIL_BYTES] = "";
    size_t at = 0;
    if (strcmp(p->numerics, "exact") != 0 && strcmp(p->numerics, "fast") != 0)
        at += (size_t)snprintf(text + at, sizeof(text) - at, "numerics: %s: exact or fast\n",
                               p->numerics);
    if (strcmp(p->tap_type, "bf16") != 0 && strcmp(p->tap_type, "f32") != 0)
        at += (size_t)snprintf(text + at, sizeof(text) - at, "tap_type: %s: bf16 or f32\n",
                               p->tap_type);
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
    struct err_detail detail;
    size_t count = ARRAY_COUNT(df_param_table);
    enum log_level level;
    log_init("drafter", LOG_INFO);
    if (params_load(df_param_table, count, &params, argc, argv, &detail) != ERR_OK ||
        params_check(&params, &detail) != ERR_OK)
        die("%s", detail.text);
    if (!log_level_parse(params.log_level, &level))
        die("log_level: %s: error, warn, info or debug", params.log_level);
    log_set_level(level);
    char name[32];
    snprintf(name, sizeof(name), "drafter-%u", params.id);
    if (process_begin(name, params.run_dir, params.state_dir, &detail) != ERR_OK)
        die("%s", detail.text);
    params_log(df_param_table, count, &params);

    struct loop *l = loop_create();
    struct df_shell *shell = NULL;
    loop_on_stop_signal(l, on_stop, l);
    if (df_shell_create(l, &params, &shell, &detail) != ERR_OK) {
        process_end(name, params.run_dir);
        die("%s", detail.text);
    }
    log_info(DRAFTER, "ready", "run_dir=%s", params.run_dir);
    loop_run(l);
    log_info(DRAFTER, "stopping", "");
    df_shell_destroy(&shell);
    loop_destroy(&l);
    process_end(name, params.run_dir);
    return 0;
}
