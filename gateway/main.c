/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "gateway/gw_params.h"
#include "gateway/gw_shell.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/net/loop.h"
#include "lib/net/role.h"

#define PARAM(name, type, def, lo, hi, unit, apply, help)                                          \
    PARAM_ROW(struct gw_params, name, type, def, lo, hi, unit, apply, help)
static const struct param gw_param_table[] = {
#include "lib/base/params_common.def"
#include "gateway/gw_params.def"
};
#undef PARAM

struct process {
    struct loop *loop;
    struct gw_shell *shell;
    bool draining;
};

static bool one_of(const char *text, const char *const *words)
{
    for (; *words; words++)
        if (strcmp(text, *words) == 0)
            return true;
    return false;
}

static bool is_loopback(const char *listen)
{
    return strncmp(listen, "127.", 4) == 0 || strncmp(listen, "[::1]:", 6) == 0 ||
           strncmp(listen, "localhost:", 10) == 0;
}

/* Values that the table cannot judge, and pairs that contradict each other, all at once. */
static enum err params_check(const void *params, struct err_detail *ret_faults)
{
    const struct gw_params *p = params;
    static const char *const efforts[] = {"low", "high", "max", NULL};
    static const char *const fields[] = {"reasoning_content", "reasoning", "both", NULL};
    char text[ERR_DETAIL_BYTES] = "";
    size_t at = 0;
    if (!one_of(p->default_effort, efforts))
        at += (size_t)snprintf(text + at, sizeof(text) - at,
                               "default_effort: %.20s: low, high or max\n", p->default_effort);
    if (!one_of(p->reasoning_field, fields))
        at += (size_t)snprintf(text + at, sizeof(text) - at,
                               "reasoning_field: %.20s: reasoning_content, reasoning or both\n",
                               p->reasoning_field);
    if (!is_loopback(p->listen) && !p->insecure_listen)
        at += (size_t)snprintf(text + at, sizeof(text) - at,
                               "listen: %.100s is beyond loopback: plain HTTP there needs "
                               "insecure_listen = true\n",
                               p->listen);
    if (p->body_bytes_max > p->bodies_bytes_max)
        at += (size_t)snprintf(text + at, sizeof(text) - at,
                               "body_bytes_max is more than bodies_bytes_max\n");
    CHECK(at < sizeof(text));
    if (at == 0)
        return ERR_OK;
    text[at - 1] = '\0';
    return err_set(ret_faults, ERR_INVALID, "%s", text);
}

static void on_drained(void *arg)
{
    struct process *p = arg;
    loop_stop(p->loop);
}

/* The first signal lets running streams go on for a while, the second does not. */
static void on_stop(void *arg)
{
    struct process *p = arg;
    if (p->draining) {
        loop_stop(p->loop);
        return;
    }
    p->draining = true;
    log_info(GATEWAY, "draining", "");
    gw_shell_drain(p->shell, on_drained, p);
}

int main(int argc, char **argv)
{
    static struct gw_params params;
    struct role role = {.name = "gateway",
                        .table = gw_param_table,
                        .count = ARRAY_COUNT(gw_param_table),
                        .params = &params,
                        .check = params_check};
    struct err_detail detail;
    role_load(&role, argc, argv);
    role_begin(&role);

    struct process process = {.loop = loop_create()};
    enum err e = gw_shell_create(process.loop, &params, &process.shell, &detail);
    if (e != ERR_OK)
        role_refuse(&role, e, &detail);
    loop_on_stop_signal(process.loop, on_stop, &process);
    log_info(GATEWAY, "serving", "listen=%s model=%s", params.listen, params.model);
    loop_run(process.loop);
    log_info(GATEWAY, "stopping", "");
    gw_shell_destroy(&process.shell);
    loop_destroy(&process.loop);
    role_end(&role);
    return 0;
}
