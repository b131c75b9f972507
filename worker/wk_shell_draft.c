/* SPDX-License-Identifier: Apache-2.0 */
/* The shell's side of the drafter: hellos, and what it says goes to the core. */
#include <inttypes.h>
#include <stdio.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "worker/wk_shell_state.h"

void wk_shell_draft_beat(struct wk_shell *s)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    if (s->core == NULL)
        return;
    struct msg m = {.type = MSG_DRAFT_HELLO, .epoch = s->kv.epoch};
    m.u.draft_hello = (struct msg_draft_hello){
        .incarnation = s->incarnation,
        .epoch = s->kv.epoch,
        .model_fp = wk_exec_loaded(s->exec)->info->model_fp,
    };
    wk_shell_beat(s, WK_DRAFTER, &m);
}

void wk_shell_draft_message(struct wk_shell *s, const struct msg *m)
{
    CHECK_OBJ(s, WK_SHELL_MAGIC);
    if (s->core == NULL)
        return;
    if (m->type == MSG_DRAFT_HELLO_REPLY &&
        m->u.draft_hello_reply.incarnation != s->drafter_incarnation) {
        s->drafter_incarnation = m->u.draft_hello_reply.incarnation;
        snprintf(s->drafter_source, sizeof s->drafter_source, "%.31s",
                 m->u.draft_hello_reply.source);
        log_info(WORKER, "drafter up", "source=%s drafts_max=%u incarnation=%016" PRIx64,
                 m->u.draft_hello_reply.source, m->u.draft_hello_reply.draft_tokens_max,
                 s->drafter_incarnation);
    }
    struct wk_event event = {.type = WK_EV_MSG, .msg = m};
    wk_shell_step(s, &event);
}
