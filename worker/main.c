/* SPDX-License-Identifier: Apache-2.0 */
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "lib/net/role.h"
#include "worker/wk_follower.h"
#include "worker/wk_params.h"
#include "worker/wk_policy.h"
#include "worker/wk_shell.h"
#include "worker/wk_spec.h"

#define PARAM(name, type, def, lo, hi, unit, apply, help)                                          \
    PARAM_ROW(struct wk_params, name, type, def, lo, hi, unit, apply, help)
static const struct param wk_param_table[] = {
#include "lib/base/params_common.def"
#include "worker/wk_params.def"
};
#undef PARAM

/* Where a worker runs does not change what it computes. */
static const char *const hash_skip[] = {
    "run_dir",  "state_dir",      "redis",        "id",           "log_level",
    "rank",     "group",          "groups",       "fabric_keys",  "cuda_device",
    "nccl_hca", "nccl_interface", "nccl_library", "cuda_library", NULL};

static bool one_of(const char *value, const char *a, const char *b, const char *c)
{
    return strcmp(value, a) == 0 || strcmp(value, b) == 0 || (c != NULL && strcmp(value, c) == 0);
}

/* An address and a port, both in digits: a name could become any address. */
static bool node_parse(const char *node, size_t count, bool *ret_local)
{
    char text[INET_ADDRSTRLEN];
    struct in_addr address;
    const char *colon = memchr(node, ':', count);
    size_t host = colon != NULL ? (size_t)(colon - node) : count;
    if (colon == NULL || host >= sizeof text)
        return false;
    memcpy(text, node, host);
    text[host] = '\0';
    uint32_t port = 0;
    for (const char *p = colon + 1; p < node + count; p++) {
        if (*p < '0' || *p > '9' || port > UINT16_MAX)
            return false;
        port = port * 10 + (uint32_t)(*p - '0');
    }
    if (inet_pton(AF_INET, text, &address) != 1 || address.s_addr == 0)
        return false;
    *ret_local = ntohl(address.s_addr) >> 24 == 127;
    return port > 0 && port <= UINT16_MAX;
}

/* Without keys tcp is in the clear: on this host alone, or where somebody says that he knows. */
static void nodes_check(const struct wk_params *p, struct str *faults)
{
    uint32_t count = 0;
    if (p->ranks == 1 || !wk_params_tcp(p))
        return;
    for (const char *at = p->fabric_nodes; *at != '\0'; count++) {
        bool local = false;
        if (!node_parse(at, strcspn(at, ","), &local))
            str_add_format(faults, "fabric_nodes: address %u: want A.B.C.D:PORT\n", count + 1);
        else if (!local && p->fabric_keys[0] == '\0' && !p->insecure_tcp)
            str_add_format(faults,
                           "fabric_nodes: address %u is beyond loopback: give fabric_keys (tandem "
                           "keygen), or insecure_tcp = true\n",
                           count + 1);
        at += strcspn(at, ",");
        at += *at == ',';
    }
    if (count != p->ranks)
        str_add_format(faults, "fabric_nodes: %u addresses for ranks %u\n", count, p->ranks);
}

/* What single rows of the table cannot say. */
static enum err params_check(const void *params, struct err_detail *ret_faults)
{
    const struct wk_params *p = params;
    struct str faults;
    struct wk_spec spec;
    struct wk_ema_knobs ema;
    struct err_detail why;
    str_init(&faults, ERR_DETAIL_BYTES - 1);
    if (!one_of(p->numerics, "exact", "fast", NULL))
        str_add_format(&faults, "numerics: %s: exact or fast\n", p->numerics);
    if (strcmp(p->device, "cpu") != 0)
        str_add_format(&faults, "device: %s: this build has cpu only\n", p->device);
    if (p->rank >= p->ranks)
        str_add_format(&faults, "rank: %u of ranks %u\n", p->rank, p->ranks);
    if (p->dcp != 1 && p->dcp != p->ranks)
        str_add_format(&faults, "dcp: %u: 1 or as many as ranks, %u\n", p->dcp, p->ranks);
    if (p->group >= p->groups)
        str_add_format(&faults, "group: %u of groups %u\n", p->group, p->groups);
    if (!one_of(p->fabric, "local", "tcp", "nccl"))
        str_add_format(&faults, "fabric: %s: local, tcp or nccl\n", p->fabric);
    if (p->groups > 1 && p->ranks > 1 && wk_params_tcp(p))
        str_add_format(&faults,
                       "fabric: %s with groups (%u): all would use the same fabric_nodes; local, "
                       "or one group\n",
                       p->fabric, p->groups);
    nodes_check(p, &faults);
    if (!one_of(p->moe_split, "auto", "tp", "ep"))
        str_add_format(&faults, "moe_split: %s: auto, tp or ep\n", p->moe_split);
    if (!one_of(p->mtp_recycle, "post_norm", "pre_norm", NULL))
        str_add_format(&faults, "mtp_recycle: %s: post_norm or pre_norm\n", p->mtp_recycle);
    if (p->context_max != 0 && p->context_max < 64)
        str_add_format(&faults, "context_max: %u: 0 or at least 64\n", p->context_max);
    if (p->model[0] == '\0')
        str_add_text(&faults, "model: the folder of a checkpoint is needed\n");
    if (wk_spec_parse(p->spec, &spec, &why) != ERR_OK)
        str_add_format(&faults, "%s\n", why.text);
    if (wk_ema_set_parse(p->ema_set, &ema, &why) != ERR_OK)
        str_add_format(&faults, "%s\n", why.text);
    enum err e = ERR_OK;
    if (faults.bytes > 0)
        e = err_set(ret_faults, ERR_INVALID, "%.*s", (int)faults.bytes - 1, faults.text);
    str_fini(&faults);
    return e;
}

static void on_stop(void *arg)
{
    struct wk_shell **shell = arg;
    log_info(WORKER, "stopping", "");
    if (*shell != NULL)
        wk_shell_stop(*shell);
}

static void on_follower_stop(void *arg)
{
    log_info(WORKER, "stopping", "");
    loop_stop(arg);
}

/* A rank above 0. */
static int follow(struct loop *l, const struct wk_params *params, const struct role *role)
{
    struct wk_follower *follower = NULL;
    struct err_detail detail;
    loop_on_stop_signal(l, on_follower_stop, l);
    enum err e = wk_follower_create(l, params, &follower, &detail);
    if (e != ERR_OK)
        role_refuse(role, e, &detail);
    loop_run(l);
    int code = wk_follower_exit_code(follower);
    wk_follower_destroy(&follower);
    loop_destroy(&l);
    role_end(role);
    return code;
}

int main(int argc, char **argv)
{
    static struct wk_params params;
    struct role role = {.name = "worker",
                        .table = wk_param_table,
                        .count = ARRAY_COUNT(wk_param_table),
                        .params = &params,
                        .check = params_check};
    struct err_detail detail;
    char config_hash[33];
    role_load(&role, argc, argv);
    role_begin(&role);
    params_hash(role.table, role.count, &params, hash_skip, config_hash);

    struct loop *l = loop_create();
    if (params.rank > 0)
        return follow(l, &params, &role);
    struct wk_shell *shell = NULL;
    loop_on_stop_signal(l, on_stop, &shell);
    enum err e = wk_shell_create(l, &params, config_hash, &shell, &detail);
    if (e != ERR_OK)
        role_refuse(&role, e, &detail);
    loop_run(l);
    int code = wk_shell_exit_code(shell);
    if (!wk_shell_idle(shell)) {
        /* The device thread cannot be interrupted; what it still writes is nobody's any more. */
        wk_shell_leave(shell);
        role_end(&role);
        _exit(code);
    }
    wk_shell_destroy(&shell);
    loop_destroy(&l);
    role_end(&role);
    return code;
}
