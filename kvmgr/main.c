/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kvmgr/km_arena.h"
#include "kvmgr/km_audit.h"
#include "kvmgr/km_params.h"
#include "kvmgr/km_rows_shell.h"
#include "kvmgr/km_shell.h"
#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/base/str.h"
#include "lib/net/loop.h"
#include "lib/net/role.h"

#define PARAM(name, type, def, lo, hi, unit, apply, help)                                          \
    PARAM_ROW(struct km_params, name, type, def, lo, hi, unit, apply, help)
static const struct param km_param_table[] = {
#include "lib/base/params_common.def"
#include "kvmgr/km_params.def"
};
#undef PARAM

#define AUDIT_TRIES    5
#define AUDIT_PAUSE_US 20000

static void dtype_check(struct str *faults, const char *name, const char *value, bool may_be_empty)
{
    if (strcmp(value, "f32") == 0 || strcmp(value, "bf16") == 0 || strcmp(value, "fp8") == 0 ||
        (may_be_empty && value[0] == '\0'))
        return;
    str_add_format(faults, "%s: %.16s: one of f32, bf16, fp8\n", name, value);
}

/* What single rows of the table cannot say. */
static enum err params_check(const void *params, struct err_detail *ret_faults)
{
    const struct km_params *p = params;
    struct str faults;
    str_init(&faults, ERR_DETAIL_BYTES);
    dtype_check(&faults, "kv_dtype", p->kv_dtype, false);
    dtype_check(&faults, "index_dtype", p->index_dtype, true);
    if (strcmp(p->snapshot_dtype, "f32") != 0 && strcmp(p->snapshot_dtype, "bf16") != 0)
        str_add_format(&faults, "snapshot_dtype: %.16s: f32 or bf16\n", p->snapshot_dtype);
    if (strcmp(p->role, "authority") != 0 && strcmp(p->role, "arena") != 0)
        str_add_format(&faults, "role: %s: authority or arena\n", p->role);
    if (p->block_tokens % 4 != 0)
        str_add_format(&faults, "block_tokens: %u is no multiple of 4\n", p->block_tokens);
    if ((p->kv_store_dir[0] != '\0') != (p->kv_store_bytes != 0))
        str_add_text(&faults, "kv_store_dir, kv_store_bytes: both or neither\n");
    size_t bytes = strlen(p->arena_path);
    if (utf8_valid_prefix(p->arena_path, bytes) != bytes)
        str_add_text(&faults, "arena_path: not valid UTF-8\n");
    if (bytes > 0 && p->arena_path[0] != '/')
        str_add_text(&faults, "arena_path: must be absolute, the worker opens it too\n");
    enum err e = ERR_OK;
    if (faults.bytes > 0)
        e = err_set(ret_faults, ERR_INVALID, "%.*s", (int)faults.bytes - 1, faults.text);
    str_fini(&faults);
    return e;
}

static int audit(const struct km_params *p)
{
    char path[KM_ARENA_PATH_BYTES];
    struct km_audit found;
    struct err_detail detail = {{0}};
    enum err e = ERR_OK;
    if (p->arena_path[0] == '\0')
        e = km_arena_default_path(p->cluster, p->run_dir, p->id, path, &detail);
    else
        snprintf(path, sizeof(path), "%s", p->arena_path);
    if (e == ERR_OK)
        e = km_audit_read(path, &found, &detail);
    if (e != ERR_OK) {
        fprintf(stderr, "tandem-kvmgr: %s\n", detail.text);
        return 1;
    }
    /* Beside a kvmgr that works, headers change while they are read. */
    for (int tries = 0;
         tries < AUDIT_TRIES && !(km_audit_sound(&found) && km_audit_chained(&found)); tries++) {
        usleep(AUDIT_PAUSE_US);
        if (km_audit_read(path, &found, &detail) != ERR_OK) {
            fprintf(stderr, "tandem-kvmgr: %s\n", detail.text);
            return 1;
        }
    }
    km_audit_print(stdout, path, &found);
    return km_audit_sound(&found) && km_audit_chained(&found) ? 0 : 1;
}

static void on_rows_stop(void *arg)
{
    loop_stop(arg);
}

static void on_stop(void *arg)
{
    struct km_shell *const *shell = arg;
    if (*shell)
        km_shell_stop(*shell);
}

/* The memory of a rank above 0. */
static int serve_rows(struct role *role)
{
    struct err_detail detail = {{0}};
    role_begin(role);
    struct loop *l = loop_create();
    struct km_rows_shell *shell = NULL;
    enum err e = km_rows_shell_create(l, role->params, &shell, &detail);
    if (e != ERR_OK)
        role_refuse(role, e, &detail);
    loop_on_stop_signal(l, on_rows_stop, l);
    loop_run(l);
    log_info(KVMGR, "stopping", "");
    km_rows_shell_destroy(&shell);
    loop_destroy(&l);
    role_end(role);
    return 0;
}

static int serve(struct role *role)
{
    struct err_detail detail = {{0}};
    role_begin(role);
    struct loop *l = loop_create();
    struct km_shell *shell = NULL;
    enum err e = km_shell_create(l, role->params, &shell, &detail);
    if (e != ERR_OK)
        role_refuse(role, e, &detail);
    loop_on_stop_signal(l, on_stop, &shell);
    loop_run(l);
    log_info(KVMGR, "stopping", "");
    int rc = km_shell_failed(shell) ? 1 : 0;
    km_shell_destroy(&shell);
    loop_destroy(&l);
    role_end(role);
    return rc;
}

int main(int argc, char **argv)
{
    static struct km_params params;
    struct role role = {.name = "kvmgr",
                        .table = km_param_table,
                        .count = ARRAY_COUNT(km_param_table),
                        .params = &params,
                        .check = params_check};
    bool only_audit = false;
    int kept = 1;
    for (int i = 1; i < argc; i++) { /* --audit is no parameter: it ends the process */
        if (strcmp(argv[i], "--audit") == 0)
            only_audit = true;
        else
            argv[kept++] = argv[i];
    }
    role_load(&role, kept, argv);
    if (only_audit)
        return audit(&params);
    return strcmp(params.role, "arena") == 0 ? serve_rows(&role) : serve(&role);
}
