/* SPDX-License-Identifier: Apache-2.0 */
/* The shell's side of proofs: their answers become events. */
#include "kvmgr/km_shell_state.h"

#include "kvmgr/km_proof.h"
#include "lib/base/check.h"
#include "lib/net/loop.h"

static void on_proof(void *arg)
{
    struct km_shell *s = arg;
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    struct km_event event = {.type = KM_EVENT_PROVED};
    event.u.proved.results = s->proved;
    for (uint32_t *count = &event.u.proved.count; s->proofs && *count < KM_SHELL_RESULTS;
         *count += 1)
        if (!km_proofs_poll(s->proofs, &s->proved[*count]))
            break;
    if (event.u.proved.count == 0)
        return;
    loop_wake(s->proof_waker); /* others have their turn first */
    km_shell_step(s, event);
}

static void wake(void *arg)
{
    loop_wake(arg);
}

enum err km_shell_proof_open(struct km_shell *s, struct err_detail *detail)
{
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    CHECK(s->arena != NULL && s->proofs == NULL);
    if (!s->proof_waker)
        s->proof_waker = loop_waker_create(s->loop, on_proof, s);
    struct km_proofs_options options = {.arena_fd = km_arena_fd(s->arena),
                                        .layout = km_arena_layout(s->arena),
                                        .wake = wake,
                                        .wake_arg = s->proof_waker};
    return km_proofs_open(&options, &s->proofs, detail);
}

void km_shell_proof_close(struct km_shell *s)
{
    CHECK_OBJ(s, KM_SHELL_MAGIC);
    km_proofs_close(&s->proofs);
}

void km_shell_proof_submit(struct km_shell *s, const struct km_action *action)
{
    CHECK(s->proofs != NULL);
    for (uint32_t i = 0; i < action->u.prove.count; i++)
        km_proofs_submit(s->proofs, &action->u.prove.items[i]);
}
