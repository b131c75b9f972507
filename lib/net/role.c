/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/net/role.h"

#include <stdio.h>
#include <stdlib.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/net/status.h"

static void text_of(const struct role *r, const char *name, char *ret_text, size_t bytes)
{
    CHECK(params_print(r->table, r->count, r->params, name, ret_text, bytes));
}

void role_load(struct role *r, int argc, char **argv)
{
    struct err_detail detail = {{0}};
    char text[PARAM_STR_BYTES];
    enum log_level level;
    log_init(r->name, LOG_INFO);
    if (params_load(r->table, r->count, r->params, argc, argv, &detail) != ERR_OK ||
        (r->check != NULL && r->check(r->params, &detail) != ERR_OK))
        die("%s", detail.text);
    text_of(r, "log_level", text, sizeof(text));
    if (!log_level_parse(text, &level))
        die("log_level: %s: error, warn, info or debug", text);
    log_set_level(level);
    text_of(r, "id", text, sizeof(text));
    snprintf(r->instance, sizeof(r->instance), "%.16s-%.10s", r->name, text);
    text_of(r, "run_dir", r->run_dir, sizeof(r->run_dir));
}

static _Noreturn void leave(enum err code, const struct err_detail *why)
{
    if (code != ERR_BUSY)
        die("%s", why->text);
    log_error(LOOP, "cannot start now", "reason=\"%s\"", why->text);
    exit(1);
}

void role_begin(struct role *r)
{
    struct err_detail detail = {{0}};
    char state_dir[PARAM_STR_BYTES];
    text_of(r, "state_dir", state_dir, sizeof(state_dir));
    enum err e = process_begin(r->instance, r->run_dir, state_dir, &detail);
    if (e != ERR_OK)
        leave(e, &detail);
    params_log(r->table, r->count, r->params);
}

void role_refuse(const struct role *r, enum err code, const struct err_detail *why)
{
    CHECK(code != ERR_OK);
    role_end(r);
    leave(code, why);
}

void role_end(const struct role *r)
{
    process_end(r->instance, r->run_dir);
}

void role_endpoint(const char *run_dir, const char *role, uint32_t id, char *ret_endpoint,
                   size_t bytes)
{
    int n = id == 0 ? snprintf(ret_endpoint, bytes, "ipc://%s/%s.sock", run_dir, role)
                    : snprintf(ret_endpoint, bytes, "ipc://%s/%s-%u.sock", run_dir, role, id);
    CHECK(n > 0 && (size_t)n < bytes);
}
