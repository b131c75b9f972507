/* SPDX-License-Identifier: Apache-2.0 */
/* tandem-bench - load generator and report; speaks the public OpenAI protocol, never internals. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>

#include "lib/base/log.h"
#include "lib/base/str.h"
#include "tests/bench/bench_ab.h"
#include "tests/bench/bench_measure.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/bench_session.h"
#include "tests/bench/bench_solo.h"

/* The plain run; returns how many streams failed. */
static uint64_t run_load(struct bench_session *s, struct str *out)
{
    struct bench_measure *m = bench_measure_create();
    bench_session_load(s, m);
    if (s->options.json) {
        bench_report_json_open(out, &s->options, "load");
        str_add_text(out, ",\"run\":");
        bench_report_json(out, m);
        str_add_text(out, "}\n");
    } else {
        bench_report_table(out, m);
    }
    uint64_t failed = m->failed_count;
    bench_measure_destroy(&m);
    return failed;
}

/* A server that refuses the first requests is not worth a measurement. */
static uint64_t warm_up(struct bench_session *s)
{
    struct bench_measure *m = bench_measure_create();
    bench_session_warm_up(s, m);
    uint64_t failed = m->failed_count;
    for (uint32_t i = 0; i < m->sample_count; i++)
        fprintf(stderr, "tandem-bench: warm-up: %s\n", m->samples[i]);
    bench_measure_destroy(&m);
    return failed;
}

int main(int argc, char **argv)
{
    static struct bench_session session;
    log_init("bench", LOG_WARN);
    bench_session_init(&session, argc, argv);
    struct str out;
    str_init(&out, 0);
    bool held = true;
    uint64_t failed = warm_up(&session);
    if (failed == 0 && !session.interrupted) {
        if (session.options.solo_ratio)
            failed = bench_solo_run(&session, &out, &held);
        else if (session.options.ab[0] != NULL)
            failed = bench_ab_run(&session, &out);
        else
            failed = run_load(&session, &out);
    }
    if (out.bytes > 0)
        fwrite(out.text, 1, out.bytes, stdout);
    bool written = fflush(stdout) == 0;
    bool contract = session.options.contract;
    str_fini(&out);
    bench_session_fini(&session);
    return failed > 0 || !written || (contract && !held) ? 1 : 0;
}
