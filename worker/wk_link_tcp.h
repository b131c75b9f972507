/* SPDX-License-Identifier: Apache-2.0 */
/* worker/wk_link_tcp.h - the link between ranks of several hosts, over ZeroMQ.
 *
 * Each rank listens for the ranks above it and connects to those below.  Statuses travel as
 * messages of their own; a rank that has not been heard for the fabric's silence_ms is dead. */
#ifndef WORKER_WK_LINK_TCP_H
#define WORKER_WK_LINK_TCP_H

#include "worker/wk_link.h"

struct peers_options;

/* ERR_BUSY, ERR_IO: names the address that could not be bound; the first may pass. */
MUST_USE enum err wk_link_tcp(const struct peers_options *options, struct wk_link *ret_link,
                              struct err_detail *detail);

#endif
