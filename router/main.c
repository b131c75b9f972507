/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/net/loop.h"
#include "lib/net/role.h"
#include "router/rt_params.h"
#include "router/rt_shell.h"

#define PARAM(name, type, def, lo, hi, unit, apply, help)                                          \
    PARAM_ROW(struct rt_params, name, type, def, lo, hi, unit, apply, help)
static const struct param rt_param_table[] = {
#include "lib/base/params_common.def"
#include "router/rt_params.def"
};
#undef PARAM

/* Pairs that contradict each other, all at once. */
static enum err params_check(const void *params, struct err_detail *ret_faults)
{
    const struct rt_params *p = params;
    char text[ERR_DETAIL_BYTES] = "";
    size_t at = 0;
    if (p->queue_requests_max > p->requests_max)
        at += (size_t)snprintf(text + at, sizeof(text) - at,
                               "queue_requests_max: %u is more than requests_max %u\n",
                               p->queue_requests_max, p->requests_max);
    if (p->queue_tokens_max > p->store_tokens_max)
        at += (size_t)snprintf(text + at, sizeof(text) - at,
                               "queue_tokens_max: %llu is more than store_tokens_max %llu\n",
                               (unsigned long long)p->queue_tokens_max,
                               (unsigned long long)p->store_tokens_max);
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
    static struct rt_params params;
    struct role role = {.name = "router",
                        .table = rt_param_table,
                        .count = ARRAY_COUNT(rt_param_table),
                        .params = &params,
                        .check = params_check};
    struct err_detail detail;
    role_load(&role, argc, argv);
    role_begin(&role);

    struct loop *l = loop_create();
    struct rt_shell *shell = NULL;
    loop_on_stop_signal(l, on_stop, l);
    enum err e = rt_shell_create(l, &params, &shell, &detail);
    if (e != ERR_OK)
        role_refuse(&role, e, &detail);
    log_info(ROUTER, "serving", "run_dir=%s", params.run_dir);
    loop_run(l);
    log_info(ROUTER, "stopping", "");
    rt_shell_destroy(&shell);
    loop_destroy(&l);
    role_end(&role);
    return 0;
}
