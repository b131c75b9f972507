/* SPDX-License-Identifier: Apache-2.0 */
/* Membership: who is in the group, under which epoch, and how it is left. */
#include "worker/wk_fabric_parts.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "lib/base/clock.h"
#include "lib/base/mem.h"
#include "lib/base/rng.h"

static void sleep_us(uint64_t us)
{
    struct timespec t = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    nanosleep(&t, NULL);
}

static void own_publish(struct wk_fabric *f)
{
    f->own.sum = wk_status_sum(&f->own);
    f->link.ops->publish(f->link.self, &f->own);
}

/* False: nothing sound is known of the peer. */
static bool peer_look(struct wk_fabric *f, uint32_t peer, struct wk_status *ret_status,
                      uint64_t *ret_heard_us)
{
    f->link.ops->peer(f->link.self, peer, ret_status, ret_heard_us);
    return *ret_heard_us != 0 && wk_status_sound(ret_status);
}

static void *beater_main(void *arg)
{
    struct wk_fabric *f = arg;
    while (!atomic_load_explicit(&f->stop, memory_order_relaxed)) {
        f->link.ops->beat(f->link.self);
        sleep_us(WK_BEAT_MS * 1000u);
    }
    return NULL;
}

struct wk_fabric *wk_fabric_create(const struct wk_fabric_options *options)
{
    const struct wk_link *l = &options->link;
    CHECK(l->ops != NULL && l->ranks >= 1 && l->ranks <= WK_RANKS_MAX && l->rank < l->ranks);
    CHECK(options->deadline_ms > 0 && options->silence_ms >= 2 * WK_BEAT_MS);
    CHECK(l->message_bytes_max >= 64 && l->message_bytes_max % 64 == 0);
    struct wk_fabric *f = mem_take(sizeof *f);
    f->magic = WK_FABRIC_MAGIC;
    f->options = *options;
    f->link = *l;
    f->rank = l->rank;
    f->ranks = l->ranks;
    f->fault = ERR_EPOCH;
    err_set(&f->why, ERR_EPOCH, "the group has not been formed yet");
    while (f->own.incarnation == 0)
        rng_system(&f->own.incarnation, sizeof f->own.incarnation);
    f->own.settings = options->settings;
    own_publish(f);
    f->link.ops->beat(f->link.self);
    CHECK(pthread_create(&f->beater, NULL, beater_main, f) == 0);
    return f;
}

void wk_fabric_destroy(struct wk_fabric **fabric_p)
{
    CHECK(fabric_p != NULL);
    struct wk_fabric *f = *fabric_p;
    if (f == NULL)
        return;
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    wk_fabric_leave(f);
    atomic_store(&f->stop, true);
    CHECK(pthread_join(f->beater, NULL) == 0);
    wk_link_destroy(&f->link);
    f->magic = 0;
    mem_give(f);
    *fabric_p = NULL;
}

/* Proposing a higher epoch is how the others learn that this rank has left. */
static void group_leave(struct wk_fabric *f, enum err e)
{
    f->fault = e;
    f->stats.faults++;
    f->own.joined = 0;
    if (f->own.epoch < WK_EPOCH_MAX)
        f->own.epoch++;
    own_publish(f);
}

enum err wk_fabric_fail(struct wk_fabric *f, enum err e, const char *format, ...)
{
    CHECK(e != ERR_OK);
    if (f->fault != ERR_OK)
        return f->fault;
    va_list args;
    va_start(args, format);
    vsnprintf(f->why.text, sizeof f->why.text, format, args);
    va_end(args);
    group_leave(f, e);
    return e;
}

void wk_fabric_leave(struct wk_fabric *f)
{
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    if (f->fault == ERR_OK)
        wk_fabric_fail(f, ERR_CLOSED, "this rank left the group");
}

enum err wk_fabric_look(struct wk_fabric *f, const char *what)
{
    uint64_t now = clock_mono_us();
    for (uint32_t peer = 0; peer < f->ranks; peer++) {
        struct wk_status s;
        uint64_t heard_us;
        if (peer == f->rank)
            continue;
        if (!peer_look(f, peer, &s, &heard_us))
            return wk_fabric_fail(f, ERR_CLOSED, "%s of step %" PRIu64 ": rank %u is gone", what,
                                  f->step, peer);
        if (now > heard_us && now - heard_us > (uint64_t)f->options.silence_ms * 1000)
            return wk_fabric_fail(f, ERR_CLOSED,
                                  "%s of step %" PRIu64 ": rank %u silent for %" PRIu64 " ms", what,
                                  f->step, peer, (now - heard_us) / 1000);
        if (s.incarnation != f->own.members[peer])
            return wk_fabric_fail(f, ERR_CLOSED, "%s of step %" PRIu64 ": rank %u was restarted",
                                  what, f->step, peer);
        if (s.epoch > f->own.epoch)
            return wk_fabric_fail(f, ERR_EPOCH, "%s of step %" PRIu64 ": rank %u has left epoch %u",
                                  what, f->step, peer, f->own.epoch);
    }
    return ERR_OK;
}

static bool is_missing(struct wk_fabric *f, uint32_t peer, uint64_t *ret_sent)
{
    struct wk_status s;
    uint64_t heard_us;
    if (!peer_look(f, peer, &s, &heard_us) || !s.joined || s.epoch != f->own.epoch ||
        s.incarnation != f->own.members[peer])
        return false;
    *ret_sent = s.sent[f->rank];
    return s.sent[f->rank] > f->received[peer];
}

enum err wk_fabric_missing(struct wk_fabric *f, const char *what, uint32_t peer)
{
    uint64_t now = clock_mono_us(), sent = 0;
    if (f->waiting_us == 0)
        f->waiting_us = now;
    if (now - f->waiting_us >= WK_SHOW_US && memcmp(f->own.sent, f->sent, sizeof f->sent) != 0) {
        memcpy(f->own.sent, f->sent, sizeof f->sent);
        own_publish(f);
    }
    if (!is_missing(f, peer, &sent)) {
        f->missing_us = 0;
        return ERR_OK;
    }
    if (f->missing_us == 0)
        f->missing_us = now;
    if (now - f->missing_us < WK_MISSING_US)
        return ERR_OK;
    return wk_fabric_fail(f, ERR_CORRUPT,
                          "%s of step %" PRIu64 ": %" PRIu64 " messages of rank %u lost", what,
                          f->step, sent - f->received[peer], peer);
}

/* One look at the others: raises our proposal to the highest that is needed.  True when all are
 * there with the same one; `missing` names those that are not. */
static bool group_agree(struct wk_fabric *f, struct wk_status *peers, char *missing, size_t bytes)
{
    uint64_t now = clock_mono_us();
    uint32_t epoch = f->own.epoch;
    bool all = true;
    size_t at = 0;
    missing[0] = '\0';
    for (uint32_t peer = 0; peer < f->ranks; peer++) {
        struct wk_status *s = &peers[peer];
        uint64_t heard_us;
        if (peer == f->rank)
            continue;
        bool live = peer_look(f, peer, s, &heard_us) &&
                    (now <= heard_us || now - heard_us <= (uint64_t)f->options.silence_ms * 1000);
        /* A group that knows another incarnation of us, or none, is over. */
        bool ours = !s->joined || s->members[f->rank] == f->own.incarnation;
        if (live && s->epoch + !ours > epoch)
            epoch = s->epoch + !ours;
        if (live && s->epoch == f->own.epoch && s->epoch > 0 && ours)
            continue;
        all = false;
        int n = snprintf(missing + at, bytes - at, "%s%u", at > 0 ? ", " : "", peer);
        at = n > 0 && at + (size_t)n < bytes ? at + (size_t)n : at;
    }
    if (epoch != f->own.epoch) {
        f->own.epoch = epoch < WK_EPOCH_MAX ? epoch : WK_EPOCH_MAX;
        own_publish(f);
        return false;
    }
    return all;
}

static enum err settings_check(struct wk_fabric *f, const struct wk_status *peers,
                               struct err_detail *detail)
{
    for (uint32_t peer = 0; peer < f->ranks; peer++)
        if (peer != f->rank &&
            memcmp(&peers[peer].settings, &f->own.settings, sizeof f->own.settings) != 0)
            return err_set(detail, ERR_INVALID,
                           "rank %u has other weights or settings than rank %u: settings hash "
                           "%02x%02x%02x%02x... against %02x%02x%02x%02x...",
                           peer, f->rank, peers[peer].settings.bytes[0],
                           peers[peer].settings.bytes[1], peers[peer].settings.bytes[2],
                           peers[peer].settings.bytes[3], f->own.settings.bytes[0],
                           f->own.settings.bytes[1], f->own.settings.bytes[2],
                           f->own.settings.bytes[3]);
    return ERR_OK;
}

static uint64_t link_refused(const struct wk_fabric *f)
{
    return f->link.ops->refused != NULL ? f->link.ops->refused(f->link.self) : 0;
}

static void group_enter(struct wk_fabric *f, const struct wk_status *peers)
{
    for (uint32_t peer = 0; peer < f->ranks; peer++) {
        f->own.members[peer] = peer == f->rank ? f->own.incarnation : peers[peer].incarnation;
        f->sent[peer] = f->received[peer] = f->own.sent[peer] = 0;
    }
    f->waiting_us = f->missing_us = 0;
    f->refused = link_refused(f);
    f->own.joined = 1;
    f->step = 0;
    f->fault = ERR_OK;
    f->stats.joins++;
    own_publish(f);
}

static enum err join_late(struct wk_fabric *f, uint32_t wait_ms, const char *missing,
                          struct err_detail *detail)
{
    uint64_t refused = link_refused(f) - f->refused;
    char keys[96] = "";
    if (refused > 0)
        snprintf(keys, sizeof keys,
                 "; %" PRIu64 " connections were turned away: other keys than here, or none",
                 refused);
    return err_set(detail, ERR_TIMEOUT, "group of %u ranks: rank %u waited %u ms for: %s%s",
                   f->ranks, f->rank, wait_ms, missing[0] != '\0' ? missing : "agreement", keys);
}

enum err wk_fabric_join(struct wk_fabric *f, uint32_t wait_ms, struct err_detail *detail)
{
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    uint64_t end_us = clock_mono_us() + (uint64_t)wait_ms * 1000;
    struct wk_status peers[WK_RANKS_MAX] = {0};
    char missing[64];
    wk_fabric_leave(f);
    if (f->own.epoch == WK_EPOCH_MAX)
        return err_set(detail, ERR_EPOCH, "the group's epochs are used up: restart all its ranks");
    if (f->own.epoch == 0) {
        f->own.epoch = 1;
        own_publish(f);
    }
    for (;;) {
        if (group_agree(f, peers, missing, sizeof missing)) {
            TRY(settings_check(f, peers, detail));
            group_enter(f, peers);
            /* The others agreed on the same epoch or this fails, and we try again. */
            if (wk_barrier(f) == ERR_OK)
                return ERR_OK;
        }
        if (clock_mono_us() >= end_us)
            return join_late(f, wait_ms, missing, detail);
        f->link.ops->beat(f->link.self);
        sleep_us(500);
    }
}

uint32_t wk_fabric_rank(const struct wk_fabric *f)
{
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    return f->rank;
}

uint32_t wk_fabric_ranks(const struct wk_fabric *f)
{
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    return f->ranks;
}

uint32_t wk_fabric_epoch(const struct wk_fabric *f)
{
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    return f->own.epoch;
}

enum err wk_fabric_fault(const struct wk_fabric *f, struct err_detail *ret_detail)
{
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    if (f->fault != ERR_OK && ret_detail != NULL)
        *ret_detail = f->why;
    return f->fault;
}

const struct wk_fabric_stats *wk_fabric_stats(const struct wk_fabric *f)
{
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    return &f->stats;
}

void wk_fabric_step(struct wk_fabric *f, uint64_t step)
{
    CHECK_OBJ(f, WK_FABRIC_MAGIC);
    f->step = step;
}
