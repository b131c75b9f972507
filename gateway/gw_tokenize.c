/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_tokenize.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "gateway/gw_openai.h"
#include "lib/base/check.h"
#include "lib/base/mem.h"
#include "lib/base/ring.h"
#include "lib/net/loop.h"

#define TOKENIZE_MAGIC 0x6777544bu

struct tokenize_thread {
    struct gw_tokenize *owner;
    pthread_t thread;
    struct ring *in, *out;   /* of struct gw_job * */
    int wake_fd;             /* counts pushes */
    uint32_t pending;        /* loop thread's own count */
    struct gw_openai openai; /* this thread's alone */
};

struct gw_tokenize {
    uint32_t magic;
    struct gw_tokenize_options options;
    struct tokenize_thread *threads;
    struct loop_waker *waker;
    atomic_bool stop;
};

static void work(struct tokenize_thread *t, struct gw_job *job)
{
    const struct gw_openai_input input = {
        .endpoint = job->endpoint,
        .body = job->body.bytes,
        .body_bytes = job->body.count,
        .session_id = job->session_id,
        .request_id = job->request_id,
        .client_id = job->client_id,
        .seed = job->seed,
        .window = job->window,
    };
    if (job->endpoint == GW_CHAT || job->endpoint == GW_COMPLETION)
        job->ok = gw_openai_request(&t->openai, &input, &job->request, &job->refusal);
    else
        job->ok = gw_openai_tokenize(&t->openai, &input, &job->answer, &job->refusal);
}

static void *thread_main(void *arg)
{
    struct tokenize_thread *t = arg;
    while (!atomic_load(&t->owner->stop)) {
        struct gw_job *job = NULL;
        if (ring_pop(t->in, &job)) {
            work(t, job);
            CHECK(ring_push(t->out, &job)); /* as large as the way in */
            loop_wake(t->owner->waker);
            continue;
        }
        uint64_t count;
        (void)!read(t->wake_fd, &count, sizeof(count));
    }
    return NULL;
}

static void on_wake(void *arg)
{
    struct gw_tokenize *t = arg;
    CHECK_OBJ(t, TOKENIZE_MAGIC);
    for (uint32_t i = 0; i < t->options.threads; i++) {
        struct gw_job *job = NULL;
        while (ring_pop(t->threads[i].out, &job)) {
            CHECK(t->threads[i].pending > 0);
            t->threads[i].pending--;
            t->options.done(t->options.arg, job);
        }
    }
}

struct gw_tokenize *gw_tokenize_create(struct loop *l, const struct gw_checkpoint *checkpoint,
                                       const struct gw_tokenize_options *options)
{
    CHECK(options->threads > 0 && options->queue_max > 0 && options->done);
    struct gw_tokenize *t = mem_take(sizeof(*t));
    t->magic = TOKENIZE_MAGIC;
    t->options = *options;
    t->threads = mem_take_array(options->threads, sizeof(*t->threads));
    t->waker = loop_waker_create(l, on_wake, t);
    for (uint32_t i = 0; i < options->threads; i++) {
        struct tokenize_thread *th = &t->threads[i];
        th->owner = t;
        th->in = ring_create(options->queue_max, sizeof(struct gw_job *));
        th->out = ring_create(options->queue_max, sizeof(struct gw_job *));
        th->wake_fd = eventfd(0, EFD_CLOEXEC);
        CHECK(th->wake_fd >= 0);
        gw_openai_init(&th->openai, checkpoint, options->effort_default, options->clear_thinking);
        CHECK(pthread_create(&th->thread, NULL, thread_main, th) == 0);
    }
    return t;
}

static void wake(struct tokenize_thread *t)
{
    uint64_t one = 1;
    (void)!write(t->wake_fd, &one, sizeof(one));
}

void gw_tokenize_destroy(struct gw_tokenize **tokenize_p)
{
    struct gw_tokenize *t = *tokenize_p;
    if (!t)
        return;
    CHECK_OBJ(t, TOKENIZE_MAGIC);
    atomic_store(&t->stop, true);
    for (uint32_t i = 0; i < t->options.threads; i++) {
        struct tokenize_thread *th = &t->threads[i];
        wake(th);
        pthread_join(th->thread, NULL);
        ring_destroy(&th->in);
        ring_destroy(&th->out);
        close(th->wake_fd);
        gw_openai_fini(&th->openai);
    }
    loop_waker_destroy(&t->waker);
    mem_give(t->threads);
    mem_give(t);
    *tokenize_p = NULL;
}

bool gw_tokenize_push(struct gw_tokenize *t, struct gw_job *job)
{
    CHECK_OBJ(t, TOKENIZE_MAGIC);
    struct tokenize_thread *best = &t->threads[0];
    for (uint32_t i = 1; i < t->options.threads; i++)
        if (t->threads[i].pending < best->pending)
            best = &t->threads[i];
    if (best->pending >= t->options.queue_max || !ring_push(best->in, &job))
        return false;
    best->pending++;
    wake(best);
    return true;
}

uint32_t gw_tokenize_pending(const struct gw_tokenize *t)
{
    CHECK_OBJ(t, TOKENIZE_MAGIC);
    uint32_t count = 0;
    for (uint32_t i = 0; i < t->options.threads; i++)
        count += t->threads[i].pending;
    return count;
}
