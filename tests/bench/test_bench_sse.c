/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "lib/base/arena.h"
#include "lib/base/rng.h"
#include "tests/bench/bench_chunk.h"
#include "tests/bench/bench_sse.h"

struct seen {
    char text[4096]; /* events, each followed by '|' */
    size_t bytes;
    uint64_t stop_after; /* 0 = never */
    uint64_t count;
};

static bool note(void *arg, const char *data, size_t bytes)
{
    struct seen *s = arg;
    assert_true(s->bytes + bytes + 2 < sizeof(s->text));
    memcpy(s->text + s->bytes, data, bytes);
    s->bytes += bytes;
    s->text[s->bytes++] = '|';
    s->text[s->bytes] = '\0';
    return ++s->count != s->stop_after;
}

static const char stream_text[] =
    ": hello\n\ndata: {\"a\":1}\n\ndata:no space\r\n\r\ndata:  two spaces\r\rdata: x\ndata: y\n\n"
    "event: message\nid: 7\nretry: 10\ndata: named\n\ndatas: other\n\ndata\n\n: ping\n\n\n\n"
    "data: [DONE]\n\n";
static const char stream_events[] = "{\"a\":1}|no space| two spaces|x\ny|named||[DONE]|";

static void events_do_not_depend_on_the_cuts(void **state)
{
    (void)state;
    struct rng rng;
    rng_init(&rng, 77);
    size_t all = sizeof(stream_text) - 1;
    for (uint32_t round = 0; round < 300; round++) {
        struct seen seen = {0};
        struct bench_sse sse;
        bench_sse_init(&sse, 64, note, &seen);
        size_t at = 0;
        while (at < all) {
            size_t piece = round == 0 ? all : round == 1 ? 1 : 1 + rng_below(&rng, 20);
            piece = piece < all - at ? piece : all - at;
            assert_int_equal(bench_sse_feed(&sse, stream_text + at, piece), ERR_OK);
            at += piece;
        }
        assert_string_equal(seen.text, stream_events);
        assert_int_equal(sse.event_count, 7);
        assert_int_equal(sse.comment_count, 2);
        assert_true(bench_sse_clean(&sse));
        bench_sse_fini(&sse);
    }
}

static void long_lines_are_refused_however_they_come(void **state)
{
    (void)state;
    char line[200];
    memset(line, 'x', sizeof(line));
    memcpy(line, "data: ", 6);
    line[198] = line[199] = '\n';
    for (size_t piece = 1; piece <= sizeof(line); piece += 13) {
        struct seen seen = {0};
        struct bench_sse sse;
        bench_sse_init(&sse, 100, note, &seen);
        enum err e = ERR_OK;
        for (size_t at = 0; at < sizeof(line) && e == ERR_OK; at += piece)
            e = bench_sse_feed(&sse, line + at,
                               piece < sizeof(line) - at ? piece : sizeof(line) - at);
        assert_int_equal(e, ERR_TOO_LARGE);
        assert_int_equal(seen.count, 0);
        assert_false(bench_sse_clean(&sse));
        bench_sse_fini(&sse);
    }
    /* Many short data lines make one long event. */
    struct seen seen = {0};
    struct bench_sse sse;
    bench_sse_init(&sse, 100, note, &seen);
    enum err e = ERR_OK;
    for (int i = 0; i < 100 && e == ERR_OK; i++)
        e = bench_sse_feed(&sse, "data: abc\n", 10);
    assert_int_equal(e, ERR_TOO_LARGE);
    bench_sse_fini(&sse);
}

static void the_receiver_may_stop_and_start_again(void **state)
{
    (void)state;
    struct seen seen = {.stop_after = 2};
    struct bench_sse sse;
    bench_sse_init(&sse, 64, note, &seen);
    assert_int_equal(bench_sse_feed(&sse, stream_text, sizeof(stream_text) - 1), ERR_OK);
    assert_int_equal(seen.count, 2);
    assert_int_equal(bench_sse_feed(&sse, "data: more\n\n", 12), ERR_OK);
    assert_int_equal(seen.count, 2);
    bench_sse_reset(&sse);
    assert_int_equal(bench_sse_feed(&sse, "data: half", 10), ERR_OK);
    assert_false(bench_sse_clean(&sse));
    bench_sse_reset(&sse);
    assert_int_equal(bench_sse_feed(&sse, "data: again\n\n", 13), ERR_OK);
    assert_string_equal(seen.text, "{\"a\":1}|no space|again|");
    bench_sse_fini(&sse);
}

/* ---- chunks ---- */

static enum err parse(const char *text, uint64_t *hash, struct bench_chunk *ret)
{
    struct arena arena;
    struct err_detail detail = {{0}};
    arena_init(&arena, 4096, 1 << 20);
    enum err e = bench_chunk_parse(&arena, text, strlen(text), hash, ret, &detail);
    assert_true(e == ERR_OK || detail.text[0] != '\0');
    arena_fini(&arena);
    return e;
}

static void chunks_are_read(void **state)
{
    (void)state;
    struct bench_chunk c;
    uint64_t hash = BENCH_HASH_START;
    assert_int_equal(
        parse("{\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":"
              "\"\"},\"finish_reason\":null}]}",
              &hash, &c),
        ERR_OK);
    assert_false(c.has_text || c.has_ids || c.done || c.is_error || c.has_usage);
    assert_true(hash == BENCH_HASH_START);
    assert_int_equal(parse("{\"choices\":[{\"delta\":{\"reasoning_content\":\"a\",\"reasoning\":"
                           "\"a\"},\"token_ids\":[5,6,7]}]}",
                           &hash, &c),
                     ERR_OK);
    assert_true(c.has_text && c.has_ids && c.id_count == 3);
    assert_int_equal(parse("{\"choices\":[{\"delta\":{},\"finish_reason\":\"length\","
                           "\"token_ids\":[]}],\"usage\":null}",
                           &hash, &c),
                     ERR_OK);
    assert_true(!c.has_text && c.has_ids && c.id_count == 0);
    assert_string_equal(c.finish, "length");
    assert_int_equal(parse("{\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":"
                           "{\"arguments\":\"{\"}}]}}]}",
                           &hash, &c),
                     ERR_OK);
    assert_true(c.has_text && !c.has_ids);
    assert_int_equal(parse("[DONE]", &hash, &c), ERR_OK);
    assert_true(c.done);
}

static void receipts_are_read(void **state)
{
    (void)state;
    struct bench_chunk c;
    uint64_t hash = BENCH_HASH_START;
    assert_int_equal(
        parse("{\"choices\":[],\"usage\":{\"prompt_tokens\":11,\"completion_tokens\":22,"
              "\"prompt_tokens_details\":{\"cached_tokens\":4},\"tandem\":{\"spec\":\"fixed:7\","
              "\"drafted\":70,\"accepted\":30,\"steps\":10,\"queue_ms\":1.5,\"prefill_ms\":2,"
              "\"decode_ms\":3e1,\"concurrency\":9,\"preempted\":1,\"resumed\":2,\"new\":[]}}}",
              &hash, &c),
        ERR_OK);
    assert_true(c.has_usage && c.has_receipt);
    assert_int_equal(c.prompt_tokens, 11);
    assert_int_equal(c.completion_tokens, 22);
    assert_int_equal(c.cached_tokens, 4);
    assert_string_equal(c.receipt.spec, "fixed:7");
    assert_int_equal(c.receipt.drafted, 70);
    assert_int_equal(c.receipt.accepted, 30);
    assert_int_equal(c.receipt.steps, 10);
    assert_int_equal(c.receipt.concurrency, 9);
    assert_true(c.receipt.queue_ms == 1.5 && c.receipt.prefill_ms == 2 &&
                c.receipt.decode_ms == 30);
    assert_int_equal(c.receipt.preempted, 1);
    assert_int_equal(c.receipt.resumed, 2);
}

static void errors_and_rubbish(void **state)
{
    (void)state;
    struct bench_chunk c;
    uint64_t hash = BENCH_HASH_START;
    assert_int_equal(parse("{\"error\":{\"message\":\"no\\nroom\",\"type\":\"server_error\","
                           "\"param\":null,\"code\":null}}",
                           &hash, &c),
                     ERR_OK);
    assert_true(c.is_error);
    assert_string_equal(c.detail, "server_error: no room");
    assert_int_equal(parse("{\"error\":\"text\"}", &hash, &c), ERR_OK);
    assert_string_equal(c.detail, "text");
    const char *const bad[] = {"",
                               "{",
                               "[]",
                               "{}",
                               "{\"choices\":{}}",
                               "{\"choices\":[1]}",
                               "{\"choices\":[{\"delta\":1}]}",
                               "{\"choices\":[{\"delta\":{},\"token_ids\":[1,\"2\"]}]}",
                               "{\"choices\":[{\"delta\":{},\"token_ids\":[1.5]}]}",
                               "\xff"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(parse(bad[i], &hash, &c), ERR_INVALID);
}

static void equal_ids_have_equal_hashes_however_chunked(void **state)
{
    (void)state;
    struct bench_chunk c;
    uint64_t one = BENCH_HASH_START, two = BENCH_HASH_START, other = BENCH_HASH_START;
    assert_int_equal(
        parse("{\"choices\":[{\"delta\":{\"content\":\"ab\"},\"token_ids\":[1,23]}]}", &one, &c),
        ERR_OK);
    assert_int_equal(
        parse("{\"choices\":[{\"delta\":{\"content\":\"a\"},\"token_ids\":[1]}]}", &two, &c),
        ERR_OK);
    assert_int_equal(
        parse("{\"choices\":[{\"delta\":{\"content\":\"b\"},\"token_ids\":[23]}]}", &two, &c),
        ERR_OK);
    assert_int_equal(
        parse("{\"choices\":[{\"delta\":{\"content\":\"ab\"},\"token_ids\":[12,3]}]}", &other, &c),
        ERR_OK);
    assert_true(one == two && one != other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_do_not_depend_on_the_cuts),
        cmocka_unit_test(long_lines_are_refused_however_they_come),
        cmocka_unit_test(the_receiver_may_stop_and_start_again),
        cmocka_unit_test(chunks_are_read),
        cmocka_unit_test(receipts_are_read),
        cmocka_unit_test(errors_and_rubbish),
        cmocka_unit_test(equal_ids_have_equal_hashes_however_chunked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
