/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/clock.h"
#include "lib/model/tool/tool.h"

static const char usage[] =
    "usage: tandem-model COMMAND DIR [options]\n"
    "\n"
    "  inspect DIR                what the checkpoint holds: formats, tensors, fingerprint\n"
    "  eval DIR --golden DIR      compare with golden vectors; one JSON line per case\n"
    "      [--numerics exact|fast] [--slice-rows N] [--slice-layers N] [--threads N]\n"
    "  generate DIR               continue a text\n"
    "      (--prompt TEXT | --ids FILE) [--temperature T] [--top-p P] [--seed N]\n"
    "      [--max-tokens N] [--spec off|fixed:K|ngram:K] [--numerics exact|fast]\n"
    "      [--threads N] [--json]\n";

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

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } commands[] = {{"eval", tool_eval}, {"generate", tool_generate}, {"inspect", tool_inspect}};
    if (argc >= 2 && strcmp(argv[1], "--version") == 0) {
        printf("tandem-model %s\n", TANDEM_VERSION);
        return 0;
    }
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0) {
        fputs(usage, argc < 2 ? stderr : stdout);
        return argc < 2 ? 2 : 0;
    }
    for (size_t i = 0; i < ARRAY_COUNT(commands); i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 2, argv + 2);
    fprintf(stderr, "tandem-model: unknown command %s\n%s", argv[1], usage);
    return 2;
}
