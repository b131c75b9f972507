/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_store.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"

#define STORE_MAGIC   0x52545354u
#define REQUEST_MAGIC 0x52545251u

struct rt_store {
    uint32_t magic;
    uint32_t requests_max, request_count;
    struct rt_request *requests;
    uint32_t *free_slots; /* stack */
    struct rt_request **buckets;
    uint32_t bucket_mask;
    uint32_t page_count, pages_free;
    uint32_t *page_next;
    uint32_t page_first_free;
    uint32_t *words;
};

struct rt_store *rt_store_create(uint32_t requests_max, uint64_t tokens_max)
{
    CHECK(requests_max > 0 && requests_max <= 1u << 20);
    CHECK(tokens_max >= RT_PAGE_TOKENS && tokens_max <= 1ull << 34);
    struct rt_store *s = mem_take(sizeof(*s));
    s->magic = STORE_MAGIC;
    s->requests_max = requests_max;
    s->requests = mem_take_array(requests_max, sizeof(*s->requests));
    s->free_slots = mem_take_array(requests_max, sizeof(*s->free_slots));
    for (uint32_t i = 0; i < requests_max; i++)
        s->free_slots[i] = requests_max - 1 - i;
    uint32_t buckets = 16;
    while (buckets < 2 * requests_max)
        buckets *= 2;
    s->buckets = mem_take_array(buckets, sizeof(*s->buckets));
    s->bucket_mask = buckets - 1;
    s->page_count = (uint32_t)(tokens_max / RT_PAGE_TOKENS);
    s->pages_free = s->page_count;
    s->page_next = mem_take_array(s->page_count, sizeof(*s->page_next));
    for (uint32_t i = 0; i < s->page_count; i++)
        s->page_next[i] = i + 1 < s->page_count ? i + 1 : RT_PAGE_NONE;
    s->words = mem_take_array((size_t)s->page_count * RT_PAGE_TOKENS, sizeof(*s->words));
    return s;
}

void rt_store_destroy(struct rt_store **store_p)
{
    struct rt_store *s = *store_p;
    if (s == NULL)
        return;
    CHECK_OBJ(s, STORE_MAGIC);
    mem_give(s->words);
    mem_give(s->page_next);
    mem_give(s->buckets);
    mem_give(s->free_slots);
    mem_give(s->requests);
    s->magic = 0;
    mem_give(s);
    *store_p = NULL;
}

static struct rt_request **bucket_of(const struct rt_store *s, const struct msg_id *id)
{
    uint64_t words[2];
    memcpy(words, id->bytes, sizeof(words));
    uint64_t mixed = (words[0] ^ words[1]) * 0x9e3779b97f4a7c15ull;
    return &s->buckets[(uint32_t)(mixed >> 32) & s->bucket_mask];
}

struct rt_request *rt_store_find(const struct rt_store *s, const struct msg_id *id)
{
    CHECK_OBJ(s, STORE_MAGIC);
    for (struct rt_request *r = *bucket_of(s, id); r != NULL; r = r->hash_next) {
        CHECK_OBJ(r, REQUEST_MAGIC);
        if (memcmp(r->id.bytes, id->bytes, sizeof(id->bytes)) == 0)
            return r;
    }
    return NULL;
}

struct rt_request *rt_store_take(struct rt_store *s, const struct msg_id *id)
{
    CHECK_OBJ(s, STORE_MAGIC);
    DCHECK(rt_store_find(s, id) == NULL);
    if (s->request_count == s->requests_max)
        return NULL;
    s->request_count++;
    struct rt_request *r = &s->requests[s->free_slots[s->requests_max - s->request_count]];
    CHECK(r->state == RT_FREE && r->magic == 0);
    memset(r, 0, sizeof(*r));
    r->magic = REQUEST_MAGIC;
    r->state = RT_WAITING;
    r->id = *id;
    r->ids = (struct rt_chain){RT_PAGE_NONE, RT_PAGE_NONE, 0};
    r->bias = r->ids;
    rt_link_init(&r->place);
    rt_link_init(&r->of_gateway);
    rt_link_init(&r->pending);
    rt_link_init(&r->done);
    struct rt_request **bucket = bucket_of(s, id);
    r->hash_next = *bucket;
    *bucket = r;
    return r;
}

void rt_store_give(struct rt_store *s, struct rt_request **request_p)
{
    struct rt_request *r = *request_p;
    CHECK_OBJ(s, STORE_MAGIC);
    CHECK_OBJ(r, REQUEST_MAGIC);
    CHECK(rt_link_alone(&r->place) && rt_link_alone(&r->of_gateway));
    CHECK(rt_link_alone(&r->pending) && rt_link_alone(&r->done));
    rt_chain_free(s, &r->ids);
    rt_chain_free(s, &r->bias);
    struct rt_request **at = bucket_of(s, &r->id);
    while (*at != r) {
        CHECK(*at != NULL);
        at = &(*at)->hash_next;
    }
    *at = r->hash_next;
    r->magic = 0;
    r->state = RT_FREE;
    s->free_slots[s->requests_max - s->request_count] = (uint32_t)(r - s->requests);
    s->request_count--;
    *request_p = NULL;
}

uint32_t rt_store_count(const struct rt_store *s)
{
    CHECK_OBJ(s, STORE_MAGIC);
    return s->request_count;
}

uint32_t rt_store_slots(const struct rt_store *s)
{
    CHECK_OBJ(s, STORE_MAGIC);
    return s->requests_max;
}

struct rt_request *rt_store_at(struct rt_store *s, uint32_t slot)
{
    CHECK_OBJ(s, STORE_MAGIC);
    CHECK(slot < s->requests_max);
    struct rt_request *r = &s->requests[slot];
    return r->state == RT_FREE ? NULL : r;
}

uint64_t rt_store_free_tokens(const struct rt_store *s)
{
    CHECK_OBJ(s, STORE_MAGIC);
    return (uint64_t)s->pages_free * RT_PAGE_TOKENS;
}

bool rt_chain_append(struct rt_store *s, struct rt_chain *c, const uint32_t *words, uint32_t count)
{
    CHECK_OBJ(s, STORE_MAGIC);
    uint32_t used = c->count % RT_PAGE_TOKENS;
    uint32_t room = used == 0 ? 0 : RT_PAGE_TOKENS - used;
    uint32_t beyond = count > room ? count - room : 0;
    if ((beyond + (uint64_t)RT_PAGE_TOKENS - 1) / RT_PAGE_TOKENS > s->pages_free)
        return false;
    while (count > 0) {
        used = c->count % RT_PAGE_TOKENS;
        if (used == 0) {
            uint32_t page = s->page_first_free;
            CHECK(page != RT_PAGE_NONE && s->pages_free > 0);
            s->page_first_free = s->page_next[page];
            s->pages_free--;
            s->page_next[page] = RT_PAGE_NONE;
            if (c->count == 0)
                c->first = page;
            else
                s->page_next[c->last] = page;
            c->last = page;
        }
        uint32_t n = RT_PAGE_TOKENS - used < count ? RT_PAGE_TOKENS - used : count;
        memcpy(&s->words[(size_t)c->last * RT_PAGE_TOKENS + used], words, n * sizeof(*words));
        c->count += n;
        words += n;
        count -= n;
    }
    return true;
}

void rt_chain_read(const struct rt_store *s, const struct rt_chain *c, uint32_t from,
                   uint32_t count, uint32_t *ret_words)
{
    CHECK_OBJ(s, STORE_MAGIC);
    CHECK(from <= c->count && count <= c->count - from);
    uint32_t page = c->first;
    for (uint32_t skip = from / RT_PAGE_TOKENS; skip > 0 && count > 0; skip--)
        page = s->page_next[page];
    uint32_t used = from % RT_PAGE_TOKENS;
    while (count > 0) {
        CHECK(page < s->page_count);
        uint32_t n = RT_PAGE_TOKENS - used < count ? RT_PAGE_TOKENS - used : count;
        memcpy(ret_words, &s->words[(size_t)page * RT_PAGE_TOKENS + used], n * sizeof(*ret_words));
        ret_words += n;
        count -= n;
        used = 0;
        page = s->page_next[page];
    }
}

void rt_chain_free(struct rt_store *s, struct rt_chain *c)
{
    CHECK_OBJ(s, STORE_MAGIC);
    uint32_t page = c->count == 0 ? RT_PAGE_NONE : c->first;
    while (page != RT_PAGE_NONE) {
        uint32_t next = s->page_next[page];
        s->page_next[page] = s->page_first_free;
        s->page_first_free = page;
        s->pages_free++;
        page = next;
    }
    CHECK(s->pages_free <= s->page_count);
    *c = (struct rt_chain){RT_PAGE_NONE, RT_PAGE_NONE, 0};
}

void rt_text_set(struct rt_text *t, const char *text)
{
    size_t bytes = text == NULL ? 0 : strlen(text);
    CHECK(bytes <= MSG_TEXT_MAX);
    if (bytes > 0)
        memcpy(t->bytes, text, bytes);
    t->bytes[bytes] = '\0';
}
