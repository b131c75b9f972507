/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_session.h - who has how many blocks: sessions, and the tenants they belong to.
 *
 * Owned by kvmgr's loop thread.  Everything is taken at create: about 80 bytes a session.  Pure.
 * A session is the keyed hash of its key under a tenant's salt; requests without a key share one
 * entry a tenant.  An entry that owns no block may be given to another session, the one used
 * longest ago first; while every entry owns blocks, or every tenant's entry is in use, newcomers go
 * without (KM_NONE): they are served and cached, but not pinned and not charged. */
#ifndef KVMGR_KM_SESSION_H
#define KVMGR_KM_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/base/err.h"
#include "lib/base/hash.h"

struct km_sessions;

struct km_session {
    struct hash128 sid; /* zeros: requests of a tenant that named no session */
    uint32_t tenant;
    uint32_t bucket_next, prev, next; /* list of use, oldest first */
    uint32_t blocks;                  /* charged to it */
    uint32_t tail;                    /* user: last block of its last turn, KM_NONE */
    struct hash128 tail_hash;         /* user: tail is void if its node has another hash */
    uint64_t pin_until_us;            /* user */
    bool used, pinned;                /* pinned: user */
    bool held;                        /* pinned by the operator: given up by nothing */
};

struct km_tenant {
    struct hash128 salt;
    uint32_t blocks;
    uint32_t sessions;
};

MUST_USE enum err km_sessions_create(uint32_t sessions_max, uint32_t tenants_max,
                                     struct km_sessions **ret);
void km_sessions_destroy(struct km_sessions **t_p);
uint64_t km_sessions_bytes(const struct km_sessions *t);

/* Finds or makes the entry and moves it to the end of the list of use. */
uint32_t km_sessions_use(struct km_sessions *t, const struct hash128 *sid,
                         const struct hash128 *salt);
struct km_session *km_sessions_at(const struct km_sessions *t, uint32_t index); /* NULL: KM_NONE */
struct km_tenant *km_sessions_tenant(const struct km_sessions *t, const struct km_session *s);
void km_sessions_charge(struct km_sessions *t, uint32_t index, int blocks);
/* KM_NONE: not known. */
uint32_t km_sessions_find(const struct km_sessions *t, const struct hash128 *sid,
                          const struct hash128 *salt);
void km_sessions_hold(struct km_sessions *t, uint32_t index, bool hold);
uint32_t km_sessions_held(const struct km_sessions *t); /* blocks of those that are held */
uint32_t km_sessions_count(const struct km_sessions *t);
/* Goes around: the next entry in use after *cursor_p, NULL after the last one (start again). */
struct km_session *km_sessions_next(struct km_sessions *t, uint32_t *cursor_p);

#endif
