/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/bench_result.h"

#include "lib/base/check.h"

static const char *const names[] = {
#define BENCH_FAULT(code, text) text,
#include "tests/bench/bench_faults.def"
#undef BENCH_FAULT
};

const char *bench_fault_name(enum bench_fault fault)
{
    CHECK(fault < BENCH_FAULT_COUNT);
    return names[fault];
}

uint64_t bench_result_tokens(const struct bench_result *r)
{
    return !r->ids_seen && r->has_usage ? r->completion_tokens : r->token_count;
}

uint64_t bench_result_ttft_us(const struct bench_result *r)
{
    CHECK(r->first_us == 0 || r->first_us >= r->due_us);
    return r->first_us ? r->first_us - r->due_us : 0;
}

double bench_result_rate(const struct bench_result *r)
{
    uint64_t tokens = bench_result_tokens(r);
    if (r->last_us <= r->first_us || tokens <= r->first_token_count)
        return 0;
    return (double)(tokens - r->first_token_count) * 1e6 / (double)(r->last_us - r->first_us);
}

bool bench_result_failed(const struct bench_result *r)
{
    return r->fault != BENCH_NONE && r->fault != BENCH_STOPPED;
}
