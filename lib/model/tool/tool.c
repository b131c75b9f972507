/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/model/tool/tool.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/clock.h"

int tool_fail(const struct err_detail *detail)
{
    fprintf(stderr, "tandem-model: %s\n", detail->text);
    return 2;
}

void tool_progress(const char *what, uint64_t done, uint64_t total)
{
    static uint64_t shown_us;
    if (!isatty(STDERR_FILENO) || total == 0)
        return;
    uint64_t now = clock_mono_us();
    if (done < total && now - shown_us < 100000)
        return;
    shown_us = now;
    fprintf(stderr, "\r%s %3d %%%s", what, (int)((double)done * 100 / (double)total),
            done >= total ? "\r\033[K" : "");
    fflush(stderr);
}

static void show_load(void *arg, uint64_t done, uint64_t total)
{
    (void)arg;
    tool_progress("loading", done, total);
}

enum err tool_load(const char *directory, const char *numerics, uint32_t threads,
                   struct model **ret_model, struct err_detail *detail)
{
    struct model_options options = {
        .directory = directory, .numerics = MODEL_EXACT, .threads = threads, .progress = show_load};
    if (numerics != NULL && strcmp(numerics, "fast") == 0)
        options.numerics = MODEL_FAST;
    else if (numerics != NULL && strcmp(numerics, "exact") != 0)
        return err_set(detail, ERR_INVALID, "--numerics: exact or fast, not \"%s\"", numerics);
    return model_load(&options, ret_model, detail);
}
