/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_peers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/gw_peers_sample.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/metrics.h"
#include "lib/base/str.h"
#include "lib/net/redis.h"

#define PEERS_MAGIC     0x67777065u
#define FETCH_US        2000000u
#define PEERS_MAX       32u
#define SAMPLES_MAX     4096u
#define PEER_BYTES_MAX  (512u << 10)
#define SCAN_ROUNDS_MAX 64u
#define ARGUMENTS_MAX   6

struct peer {
    char process[40]; /* "worker-0"; "" = free */
    bool seen;        /* by the running scan */
    struct str help;  /* HELP and TYPE lines, checked */
    struct str text;  /* of the samples */
    uint32_t count;
    struct gw_sample *samples; /* sorted; they point into text */
};

struct gw_peers {
    uint32_t magic;
    struct gw_peers_options options;
    char prefix[128], help_prefix[128];
    uint64_t fetched_us;
    bool scanning;
    uint32_t scan_rounds;
    struct peer peers[PEERS_MAX];
    struct reply { /* what a command of the running scan is for */
        struct gw_peers *owner;
        uint32_t peer;
    } replies[PEERS_MAX];
};

/* ---- what a process has left ---- */

static struct peer *peer_find(struct gw_peers *p, const char *process, size_t bytes)
{
    struct peer *free_peer = NULL;
    if (bytes == 0 || bytes >= sizeof(p->peers[0].process))
        return NULL;
    for (size_t i = 0; i < bytes; i++) {
        char c = process[i];
        bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
        if (!plain)
            return NULL;
    }
    for (uint32_t i = 0; i < PEERS_MAX; i++) {
        struct peer *e = &p->peers[i];
        if (strlen(e->process) == bytes && memcmp(e->process, process, bytes) == 0)
            return e;
        if (!free_peer && !e->process[0])
            free_peer = e;
    }
    if (free_peer) {
        memcpy(free_peer->process, process, bytes);
        free_peer->process[bytes] = '\0';
    }
    return free_peer;
}

static void peer_take(struct gw_peers *p, struct peer *e, const struct redis_value *hash)
{
    str_clear(&e->text);
    e->count = 0;
    if (!e->samples)
        e->samples = mem_take_array(SAMPLES_MAX, sizeof(*e->samples));
    for (size_t i = 0; i + 1 < hash->count && e->count < SAMPLES_MAX; i += 2) {
        const struct redis_value *name = &hash->items[i], *value = &hash->items[i + 1];
        if (name->type != REDIS_STRING || value->type != REDIS_STRING)
            continue;
        const struct gw_sample_source source = {.process = e->process,
                                                .vllm_labels = p->options.vllm_labels,
                                                .help = e->help.bytes ? e->help.text : "",
                                                .name = name->text,
                                                .name_bytes = name->bytes,
                                                .value = value->text,
                                                .value_bytes = value->bytes};
        if (gw_sample_make(&source, &e->text, &e->samples[e->count]))
            e->count++;
    }
    if (e->text.overflow)
        e->count = 0;
    gw_samples_settle(e->samples, e->count, e->text.text);
}

void gw_peers_take(struct gw_peers *p, const char *process, const struct redis_value *hash)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    struct peer *e = peer_find(p, process, strlen(process));
    if (e)
        peer_take(p, e, hash);
}

void gw_peers_take_help(struct gw_peers *p, const char *process, const char *text, size_t bytes)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    struct peer *e = peer_find(p, process, strlen(process));
    if (!e)
        return;
    str_clear(&e->help);
    gw_help_take(text, bytes, &e->help);
}

/* ---- one page ---- */

struct page {
    uint32_t count;
    const struct gw_sample **samples; /* of all processes, by family */
    bool *written;
};

static int by_family(const void *a, const void *b)
{
    const struct gw_sample *x = *(const struct gw_sample *const *)a;
    const struct gw_sample *y = *(const struct gw_sample *const *)b;
    int order = strcmp(x->family, y->family);
    if (order == 0)
        order = strcmp(x->process, y->process);
    if (order == 0)
        order = gw_sample_compare(x, y);
    return order;
}

static void page_gather(const struct gw_peers *p, struct page *page)
{
    uint32_t all = 0;
    for (uint32_t i = 0; i < PEERS_MAX; i++)
        all += p->peers[i].count;
    page->count = 0;
    page->samples = mem_take_array(all + 1, sizeof(struct gw_sample *));
    page->written = mem_take_array(all + 1, sizeof(*page->written));
    for (uint32_t i = 0; i < PEERS_MAX; i++)
        for (uint32_t k = 0; k < p->peers[i].count; k++)
            page->samples[page->count++] = &p->peers[i].samples[k];
    CHECK(page->count == all);
    qsort(page->samples, all, sizeof(*page->samples), by_family);
}

/* All samples of one family that the others have. */
static void page_family(struct page *page, const char *family, struct str *out)
{
    uint32_t low = 0, high = page->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (strcmp(page->samples[middle]->family, family) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < page->count && strcmp(page->samples[low]->family, family) == 0; low++) {
        str_add_text(out, page->samples[low]->line);
        str_add_char(out, '\n');
        page->written[low] = true;
    }
}

static void page_describe(const struct gw_peers *p, const char *family, struct str *out)
{
    for (uint32_t i = 0; i < PEERS_MAX; i++) {
        const struct str *help = &p->peers[i].help;
        if (help->bytes && gw_help_write(help->text, family, out))
            return;
    }
    str_add_format(out,
                   "# HELP %s Of another process, which does not describe it.\n"
                   "# TYPE %s untyped\n",
                   family, family);
}

void gw_peers_render(const struct gw_peers *p, const struct metric_row *rows,
                     const struct metric *values, size_t count, const char *labels, struct str *out)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    struct page page;
    page_gather(p, &page);
    for (size_t i = 0, end; i < count; i = end) {
        end = i + 1;
        while (end < count && strcmp(rows[end].name, rows[i].name) == 0)
            end++;
        metrics_render(rows + i, values + i, end - i, labels, out);
        page_family(&page, rows[i].name, out);
    }
    for (uint32_t i = 0; i < page.count; i++) {
        if (page.written[i])
            continue;
        page_describe(p, page.samples[i]->family, out);
        page_family(&page, page.samples[i]->family, out);
    }
    mem_give(page.samples);
    mem_give(page.written);
}

/* ---- Redis ---- */

static enum err command(struct gw_peers *p, redis_fn fn, void *arg, int argc,
                        const char *const *argv)
{
    size_t bytes[ARGUMENTS_MAX];
    CHECK(argc <= ARGUMENTS_MAX);
    for (int i = 0; i < argc; i++)
        bytes[i] = strlen(argv[i]);
    return redis_command(p->options.redis, fn, arg, argc, argv, bytes);
}

static void on_hash(void *arg, enum err e, const struct redis_value *value)
{
    struct reply *r = arg;
    struct peer *peer = &r->owner->peers[r->peer];
    CHECK_OBJ(r->owner, PEERS_MAGIC);
    if (e == ERR_OK && value->type == REDIS_ARRAY && peer->process[0])
        peer_take(r->owner, peer, value);
}

static void on_help(void *arg, enum err e, const struct redis_value *value)
{
    struct reply *r = arg;
    CHECK_OBJ(r->owner, PEERS_MAGIC);
    struct peer *peer = &r->owner->peers[r->peer];
    if (e != ERR_OK || value->type != REDIS_STRING || !peer->process[0])
        return;
    str_clear(&peer->help);
    gw_help_take(value->text, value->bytes, &peer->help);
}

/* The key's end, "worker:0", names the process: worker-0. */
static void fetch_peer(struct gw_peers *p, const struct redis_value *key)
{
    char name[64], full[192];
    size_t prefix = strlen(p->prefix);
    if (key->type != REDIS_STRING || key->bytes <= prefix || key->bytes - prefix >= sizeof(name) ||
        memcmp(key->text, p->prefix, prefix) != 0)
        return;
    memcpy(name, key->text + prefix, key->bytes - prefix);
    name[key->bytes - prefix] = '\0';
    char own[32], process[64];
    snprintf(own, sizeof(own), "gateway:%u", p->options.own_id);
    snprintf(process, sizeof(process), "%s", name);
    char *colon = strchr(process, ':');
    if (!colon || strcmp(name, own) == 0)
        return;
    *colon = '-';
    struct peer *e = peer_find(p, process, strlen(process));
    if (!e || e->seen)
        return;
    e->seen = true;
    struct reply *r = &p->replies[e - p->peers];
    /* In this order: the samples are read with their types known. */
    snprintf(full, sizeof(full), "%s%s", p->help_prefix, name);
    (void)!command(p, on_help, r, 2, (const char *const[]){"GET", full});
    snprintf(full, sizeof(full), "%s%s", p->prefix, name);
    (void)!command(p, on_hash, r, 2, (const char *const[]){"HGETALL", full});
}

/* A process that left no key has gone: its samples go too.  Its place is free two scans later, when
 * no reply for it can be on its way any more. */
static void scan_over(struct gw_peers *p)
{
    p->scanning = false;
    for (uint32_t i = 0; i < PEERS_MAX; i++) {
        struct peer *e = &p->peers[i];
        if (e->seen)
            continue;
        if (e->count == 0)
            e->process[0] = '\0';
        e->count = 0;
        str_clear(&e->help);
    }
}

static void scan(struct gw_peers *p, const char *cursor);

static void on_scan(void *arg, enum err e, const struct redis_value *value)
{
    struct gw_peers *p = arg;
    CHECK_OBJ(p, PEERS_MAGIC);
    if (e != ERR_OK || value->type != REDIS_ARRAY || value->count != 2 ||
        value->items[0].type != REDIS_STRING || value->items[0].bytes > 20 ||
        value->items[1].type != REDIS_ARRAY) {
        p->scanning = false;
        return;
    }
    for (size_t i = 0; i < value->items[1].count; i++)
        fetch_peer(p, &value->items[1].items[i]);
    char cursor[24];
    snprintf(cursor, sizeof(cursor), "%.*s", (int)value->items[0].bytes, value->items[0].text);
    if (strcmp(cursor, "0") == 0 || ++p->scan_rounds > SCAN_ROUNDS_MAX)
        scan_over(p);
    else
        scan(p, cursor);
}

static void scan(struct gw_peers *p, const char *cursor)
{
    char pattern[160];
    snprintf(pattern, sizeof(pattern), "%s*", p->prefix);
    const char *argv[] = {"SCAN", cursor, "MATCH", pattern, "COUNT", "1000"};
    if (command(p, on_scan, p, 6, argv) != ERR_OK)
        p->scanning = false;
}

void gw_peers_tick(struct gw_peers *p, uint64_t now_us)
{
    CHECK_OBJ(p, PEERS_MAGIC);
    if (!p->options.redis || p->scanning || now_us - p->fetched_us < FETCH_US ||
        !redis_up(p->options.redis))
        return;
    p->fetched_us = now_us;
    p->scanning = true;
    p->scan_rounds = 0;
    for (uint32_t i = 0; i < PEERS_MAX; i++)
        p->peers[i].seen = false;
    scan(p, "0");
}

/* ---- life ---- */

struct gw_peers *gw_peers_create(const struct gw_peers_options *options)
{
    struct gw_peers *p = mem_take(sizeof(*p));
    p->magic = PEERS_MAGIC;
    p->options = *options;
    for (uint32_t i = 0; i < PEERS_MAX; i++) {
        str_init(&p->peers[i].text, PEER_BYTES_MAX);
        str_init(&p->peers[i].help, PEER_BYTES_MAX);
        p->replies[i].owner = p;
        p->replies[i].peer = i;
    }
    snprintf(p->prefix, sizeof(p->prefix), "tandem:{%.64s}:metrics:", options->cluster);
    snprintf(p->help_prefix, sizeof(p->help_prefix),
             "tandem:{%.64s}:metrics_help:", options->cluster);
    return p;
}

void gw_peers_destroy(struct gw_peers **peers_p)
{
    struct gw_peers *p = *peers_p;
    if (!p)
        return;
    CHECK_OBJ(p, PEERS_MAGIC);
    for (uint32_t i = 0; i < PEERS_MAX; i++) {
        str_fini(&p->peers[i].text);
        str_fini(&p->peers[i].help);
        mem_give(p->peers[i].samples);
    }
    p->magic = 0;
    mem_give(p);
    *peers_p = NULL;
}
