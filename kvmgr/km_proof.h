/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_proof.h - reads committed data of the arena and says whether they are what their header
 * was sealed for.
 *
 * Created, fed and polled by kvmgr's loop thread; the reading thread is its own and shares nothing
 * with it but a bounded ring each way: at most KM_PROOFS_MAX in flight (the core sees to it).  What
 * is read must stay committed until its answer is there. */
#ifndef KVMGR_KM_PROOF_H
#define KVMGR_KM_PROOF_H

#include <stdbool.h>
#include <stdint.h>

#include "kvmgr/km_event.h"
#include "lib/base/err.h"

struct km_proofs;
struct kv_layout;

struct km_proofs_options {
    int arena_fd;                   /* borrowed until km_proofs_close */
    const struct kv_layout *layout; /* copied */
    void (*wake)(void *arg);        /* from the thread: something is to be polled */
    void *wake_arg;
};

/* ERR_NOMEM: no thread. */
MUST_USE enum err km_proofs_open(const struct km_proofs_options *options,
                                 struct km_proofs **ret_proofs, struct err_detail *detail);
/* Ends the thread after what it is at; what waits is dropped. */
void km_proofs_close(struct km_proofs **proofs_p);
void km_proofs_submit(struct km_proofs *p, const struct km_proof *item);
/* The next answer, its code filled: ERR_OK or ERR_CORRUPT (also if it cannot be read). */
bool km_proofs_poll(struct km_proofs *p, struct km_proof *ret);

#endif
