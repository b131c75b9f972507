/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/tool.h - the subcommands of tandem-model.
 *
 * Each takes the arguments behind its name and returns the process's exit status: 0, 1 = the
 * answer is no, 2 = it could not be asked. */
#ifndef LIB_MODEL_TOOL_TOOL_H
#define LIB_MODEL_TOOL_TOOL_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"
#include "lib/model/model.h"

int tool_archive(int argc, char **argv);
int tool_compare(int argc, char **argv);
int tool_eval(int argc, char **argv);
int tool_generate(int argc, char **argv);
int tool_inspect(int argc, char **argv);
int tool_manifest(int argc, char **argv);
int tool_quantize(int argc, char **argv);
int tool_synth(int argc, char **argv);
int tool_verify(int argc, char **argv);

/* Prints "tandem-model: text" to stderr and returns 2. */
int tool_fail(const struct err_detail *detail);

/* Loads with progress on stderr if that is a terminal.  numerics: "exact", "fast" or NULL. */
MUST_USE enum err tool_load(const char *directory, const char *numerics, uint32_t threads,
                            struct model **ret_model, struct err_detail *detail);

/* Threads for ops outside a model; 0: one per core.  end takes what start never saw, too. */
struct cpu_pool;
struct tool_threads {
    struct cpu_pool *pool;
    struct op_ctx ctx;
};
void tool_threads_start(struct tool_threads *t, uint32_t count);
void tool_threads_end(struct tool_threads *t);

/* A bar on stderr, only if that is a terminal; done == total ends the line. */
void tool_progress(const char *what, uint64_t done, uint64_t total);

/* Long work with rate and time left: a line that renews itself on a terminal, else a new line
 * every ten seconds.  Any thread may show; others than the first are let go by. */
struct tool_eta {
    const char *what, *unit;
    uint64_t total, begin_us, shown_us;
    bool terminal, busy;
};
void tool_eta_start(struct tool_eta *t, const char *what, uint64_t total, const char *unit);
void tool_eta_show(struct tool_eta *t, uint64_t done);
void tool_eta_clear(struct tool_eta *t); /* before other output */

#endif
