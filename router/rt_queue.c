/* SPDX-License-Identifier: Apache-2.0 */
#include "router/rt_queue.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "router/rt_store.h"

#define QUEUE_MAGIC 0x52545155u

struct rt_flow { /* one client at one priority; exists while it has requests */
    struct rt_link link;
    struct rt_link requests;
    int32_t priority;
    struct rt_text client_id;
};

struct rt_queue {
    uint32_t magic;
    uint32_t count;
    uint64_t tokens;
    struct rt_link front;
    struct rt_link flows; /* by priority; within one priority in order of turns */
    struct rt_link unused;
    uint32_t flows_max;
    struct rt_flow *all;
};

struct rt_queue *rt_queue_create(uint32_t flows_max)
{
    CHECK(flows_max > 0);
    struct rt_queue *q = mem_take(sizeof(*q));
    q->magic = QUEUE_MAGIC;
    q->flows_max = flows_max;
    q->all = mem_take_array(flows_max, sizeof(*q->all));
    rt_link_init(&q->front);
    rt_link_init(&q->flows);
    rt_link_init(&q->unused);
    for (uint32_t i = 0; i < flows_max; i++) {
        rt_link_init(&q->all[i].link);
        rt_link_init(&q->all[i].requests);
        rt_link_insert_before(&q->unused, &q->all[i].link);
    }
    return q;
}

void rt_queue_destroy(struct rt_queue **queue_p)
{
    struct rt_queue *q = *queue_p;
    if (q == NULL)
        return;
    CHECK_OBJ(q, QUEUE_MAGIC);
    mem_give(q->all);
    q->magic = 0;
    mem_give(q);
    *queue_p = NULL;
}

static struct rt_request *request_of(struct rt_link *l)
{
    return rt_link_item(l, struct rt_request, place);
}

static struct rt_flow *flow_of(struct rt_link *l)
{
    return rt_link_item(l, struct rt_flow, link);
}

/* Behind all flows of its priority. */
static void flow_insert(struct rt_queue *q, struct rt_flow *f)
{
    struct rt_link *at = q->flows.prev;
    while (at != &q->flows && flow_of(at)->priority > f->priority)
        at = at->prev;
    rt_link_insert_before(at->next, &f->link);
}

static struct rt_flow *flow_find(struct rt_queue *q, const struct rt_request *r)
{
    for (struct rt_link *l = q->flows.next; l != &q->flows; l = l->next) {
        struct rt_flow *f = flow_of(l);
        if (f->priority == r->priority && strcmp(f->client_id.bytes, r->client_id.bytes) == 0)
            return f;
        if (f->priority > r->priority)
            break;
    }
    return NULL;
}

static void counted(struct rt_queue *q, const struct rt_request *r)
{
    CHECK(r->state == RT_WAITING);
    q->count++;
    q->tokens += r->ids.count;
}

void rt_queue_push(struct rt_queue *q, struct rt_request *r)
{
    CHECK_OBJ(q, QUEUE_MAGIC);
    struct rt_flow *f = flow_find(q, r);
    if (f == NULL) {
        CHECK(!rt_link_alone(&q->unused));
        f = flow_of(q->unused.next);
        rt_link_remove(&f->link);
        CHECK(rt_link_alone(&f->requests));
        f->priority = r->priority;
        f->client_id = r->client_id;
        flow_insert(q, f);
    }
    r->flow = f;
    rt_link_insert_before(&f->requests, &r->place);
    counted(q, r);
}

void rt_queue_push_front(struct rt_queue *q, struct rt_request *r)
{
    CHECK_OBJ(q, QUEUE_MAGIC);
    struct rt_link *at = q->front.prev;
    while (at != &q->front && request_of(at)->order > r->order)
        at = at->prev;
    r->flow = NULL;
    rt_link_insert_before(at->next, &r->place);
    counted(q, r);
}

struct rt_request *rt_queue_first(const struct rt_queue *q, uint32_t tokens_max,
                                  bool (*may)(void *arg, struct rt_request *r), void *arg)
{
    CHECK_OBJ(q, QUEUE_MAGIC);
    for (struct rt_link *l = q->front.next; l != &q->front; l = l->next) {
        struct rt_request *r = request_of(l);
        if (r->ids.count <= tokens_max && (may == NULL || may(arg, r)))
            return r;
    }
    for (struct rt_link *f = q->flows.next; f != &q->flows; f = f->next) {
        const struct rt_link *head = &flow_of(f)->requests;
        for (struct rt_link *l = head->next; l != head; l = l->next) {
            struct rt_request *r = request_of(l);
            if (r->ids.count <= tokens_max && (may == NULL || may(arg, r)))
                return r;
        }
    }
    return NULL;
}

static void take_out(struct rt_queue *q, struct rt_request *r, bool served)
{
    CHECK_OBJ(q, QUEUE_MAGIC);
    CHECK(!rt_link_alone(&r->place));
    CHECK(q->count > 0 && q->tokens >= r->ids.count);
    struct rt_flow *f = r->flow;
    rt_link_remove(&r->place);
    q->count--;
    q->tokens -= r->ids.count;
    r->flow = NULL;
    if (f == NULL)
        return;
    if (rt_link_alone(&f->requests)) {
        rt_link_remove(&f->link);
        rt_link_insert_before(&q->unused, &f->link);
    } else if (served) {
        rt_link_remove(&f->link);
        flow_insert(q, f);
    }
}

void rt_queue_serve(struct rt_queue *q, struct rt_request *r)
{
    take_out(q, r, true);
}

void rt_queue_remove(struct rt_queue *q, struct rt_request *r)
{
    take_out(q, r, false);
}

uint32_t rt_queue_count(const struct rt_queue *q)
{
    CHECK_OBJ(q, QUEUE_MAGIC);
    return q->count;
}

uint64_t rt_queue_tokens(const struct rt_queue *q)
{
    CHECK_OBJ(q, QUEUE_MAGIC);
    return q->tokens;
}
