/* SPDX-License-Identifier: Apache-2.0 */
/* router/rt_queue.h - requests that wait for a worker, in the order they are served.
 *
 * Owned by the router's loop thread.  Pure.  Order: first those that were running already (the
 * front, oldest first); then by priority, lower first; at one priority the clients take turns;
 * within one client by age.  Holds at most flows_max requests, memory taken at create.  Admission
 * bounds (requests, tokens) are checked by the caller with rt_queue_count and _tokens. */
#ifndef ROUTER_RT_QUEUE_H
#define ROUTER_RT_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

struct rt_queue;
struct rt_request;

struct rt_queue *rt_queue_create(uint32_t flows_max);
void rt_queue_destroy(struct rt_queue **queue_p);

void rt_queue_push(struct rt_queue *q, struct rt_request *r);
void rt_queue_push_front(struct rt_queue *q, struct rt_request *r);
/* The first in the order of service with at most tokens_max ids that `may` be served now; NULL =
 * none.  Walks the queue.  may = NULL: any. */
struct rt_request *rt_queue_first(const struct rt_queue *q, uint32_t tokens_max,
                                  bool (*may)(void *arg, struct rt_request *r), void *arg);
/* Takes out the one that is served now: its client's turn is over. */
void rt_queue_serve(struct rt_queue *q, struct rt_request *r);
/* Takes out any; nobody's turn changes. */
void rt_queue_remove(struct rt_queue *q, struct rt_request *r);

uint32_t rt_queue_count(const struct rt_queue *q);
uint64_t rt_queue_tokens(const struct rt_queue *q); /* ids of all waiting requests */

#endif
