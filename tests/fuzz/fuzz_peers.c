/* SPDX-License-Identifier: Apache-2.0 */
/* What other processes leave in Redis, or somebody else does: the page must stay valid.
 *
 * Input: HELP lines up to the first zero byte, then names and values, each ended by 0x02. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/gw_peers.h"
#include "lib/base/check.h"
#include "lib/base/metrics.h"
#include "lib/base/str.h"
#include "lib/net/redis.h"

#define ITEMS_MAX 64u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct metric_row rows[] = {
    {METRIC_COUNTER, "a_total", "", NULL, "A."},
    {METRIC_HISTOGRAM, "b_seconds", "", &metrics_buckets_small, "B."},
};
static const struct metric values[2];

static uint32_t split(const char *text, size_t bytes, struct redis_value *items)
{
    uint32_t count = 0;
    for (size_t at = 0; at < bytes && count < ITEMS_MAX;) {
        const char *end = memchr(text + at, 2, bytes - at);
        size_t n = end ? (size_t)(end - text) - at : bytes - at;
        items[count++] = (struct redis_value){.type = REDIS_STRING, .text = text + at, .bytes = n};
        at += n + 1;
    }
    return count;
}

/* Comments come in pairs before their samples, a family comes once, nothing breaks a line. */
static void check_page(const struct str *page)
{
    const char *names[4 * ITEMS_MAX];
    size_t bytes[4 * ITEMS_MAX];
    uint32_t families = 0;
    CHECK(page->bytes > 0 && page->text[page->bytes - 1] == '\n' && !page->overflow);
    CHECK(utf8_valid_prefix(page->text, page->bytes) == page->bytes);
    for (const char *line = page->text, *lf; *line; line = lf + 1) {
        lf = strchr(line, '\n');
        CHECK(lf != NULL && lf > line);
        for (const char *p = line; p < lf; p++)
            CHECK((unsigned char)*p >= ' ');
        if (strncmp(line, "# TYPE ", 7) == 0) {
            size_t n = strcspn(line + 7, " ");
            for (uint32_t i = 0; i < families; i++)
                CHECK(bytes[i] != n || memcmp(names[i], line + 7, n) != 0);
            CHECK(families < 4 * ITEMS_MAX);
            names[families] = line + 7;
            bytes[families++] = n;
        } else if (line[0] != '#') {
            CHECK(families > 0 && strncmp(line, names[families - 1], bytes[families - 1]) == 0);
            CHECK(memchr(line, ' ', (size_t)(lf - line)) != NULL);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct redis_value items[ITEMS_MAX];
    const struct gw_peers_options o = {.cluster = "c",
                                       .vllm_labels = "model_name=\"m\",engine=\"0\""};
    char *text = malloc(size + 1); /* so that reading past it shows */
    CHECK(text != NULL);
    memcpy(text, data, size);
    text[size] = '\0';
    size_t help = strlen(text);
    struct str page;
    str_init(&page, 0);
    struct gw_peers *p = gw_peers_create(&o);
    gw_peers_take_help(p, "worker-0", text, help);
    struct redis_value hash = {.type = REDIS_ARRAY, .items = items};
    if (help < size)
        hash.count = split(text + help + 1, size - help - 1, items);
    gw_peers_take(p, "worker-0", &hash);
    gw_peers_take(p, "worker-1", &hash); /* without types */
    gw_peers_render(p, rows, values, 2, "", &page);
    check_page(&page);
    gw_peers_destroy(&p);
    str_fini(&page);
    free(text);
    return 0;
}
