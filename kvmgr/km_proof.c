/* SPDX-License-Identifier: Apache-2.0 */
#include "kvmgr/km_proof.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#include "kvmgr/km_arena_file.h"
#include "kvmgr/km_tier.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/ring.h"
#include "proto/kv_layout.h"

#define KM_PROOFS_MAGIC 0x4b4d5046u

struct km_proofs {
    uint32_t magic;
    struct km_proofs_options options;
    struct kv_layout layout;
    struct ring *asked, *done;
    sem_t wake;
    pthread_t thread;
    bool started;
    atomic_bool stop;
};

static enum err item_read(const struct km_proofs *p, const struct km_proof *item)
{
    const struct kv_layout *l = &p->layout;
    bool slot = item->kind == KM_OBJECT_SNAPSHOT;
    struct kv_place place = slot ? kv_slot_place(l, item->index) : kv_block_place(l, item->index);
    uint32_t sealed, sum;
    if (km_arena_file_sealed(p->options.arena_fd, l, slot, item->index, &sealed) != ERR_OK)
        return ERR_CORRUPT;
    if (sealed == 0)
        return ERR_OK;
    if (km_arena_file_sum(p->options.arena_fd, place.at, place.bytes, &sum) != ERR_OK)
        return ERR_CORRUPT;
    return sum == sealed ? ERR_OK : ERR_CORRUPT;
}

static void *proofs_thread(void *arg)
{
    struct km_proofs *p = arg;
    struct km_proof item;
    CHECK_OBJ(p, KM_PROOFS_MAGIC);
    while (!atomic_load(&p->stop)) {
        if (!ring_pop(p->asked, &item)) {
            while (sem_wait(&p->wake) != 0)
                CHECK(errno == EINTR);
            continue;
        }
        item.code = item_read(p, &item);
        CHECK(ring_push(p->done, &item)); /* as large as what may be in flight */
        p->options.wake(p->options.wake_arg);
    }
    return NULL;
}

enum err km_proofs_open(const struct km_proofs_options *options, struct km_proofs **ret_proofs,
                        struct err_detail *detail)
{
    CHECK(options->wake != NULL && options->layout != NULL);
    struct km_proofs *p = mem_take(sizeof(*p));
    p->magic = KM_PROOFS_MAGIC;
    p->options = *options;
    p->layout = *options->layout;
    p->options.layout = NULL;
    p->asked = ring_create(KM_PROOFS_MAX, sizeof(struct km_proof));
    p->done = ring_create(KM_PROOFS_MAX, sizeof(struct km_proof));
    CHECK(sem_init(&p->wake, 0, 0) == 0);
    if (pthread_create(&p->thread, NULL, proofs_thread, p) != 0) {
        km_proofs_close(&p);
        return err_set(detail, ERR_NOMEM, "no thread to read the arena's data");
    }
    p->started = true;
    *ret_proofs = p;
    return ERR_OK;
}

void km_proofs_close(struct km_proofs **proofs_p)
{
    struct km_proofs *p = *proofs_p;
    if (!p)
        return;
    CHECK_OBJ(p, KM_PROOFS_MAGIC);
    atomic_store(&p->stop, true);
    sem_post(&p->wake);
    if (p->started)
        pthread_join(p->thread, NULL);
    ring_destroy(&p->asked);
    ring_destroy(&p->done);
    sem_destroy(&p->wake);
    p->magic = 0;
    mem_give(p);
    *proofs_p = NULL;
}

void km_proofs_submit(struct km_proofs *p, const struct km_proof *item)
{
    CHECK_OBJ(p, KM_PROOFS_MAGIC);
    CHECK(ring_push(p->asked, item));
    sem_post(&p->wake);
}

bool km_proofs_poll(struct km_proofs *p, struct km_proof *ret)
{
    CHECK_OBJ(p, KM_PROOFS_MAGIC);
    return ring_pop(p->done, ret);
}
