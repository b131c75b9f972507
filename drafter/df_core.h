/* SPDX-License-Identifier: Apache-2.0 */
/* drafter/df_core.h - the drafter as a state machine: messages and ticks in, replies out.
 *
 * Owned by the drafter's loop thread.  Pure; all memory is the caller's.  Holds at most
 * sequences_max sequences of at most context_max tokens, tokens_max in all: the least recently used
 * one makes room.  A sequence silent for silence_us_max is dropped.  Nothing here is worth keeping:
 * a sequence that is gone is answered with ERR_NOT_FOUND and the worker opens it again.
 *
 * Tokens of a sequence are kept for every source.  n-gram drafts are answered at once; where a
 * network drafts, the answer is left to the shell (`ask`), which has the contexts. */
#ifndef DRAFTER_DF_CORE_H
#define DRAFTER_DF_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "drafter/df_ngram.h"
#include "proto/msg.h"

#define DF_SEQUENCES_MAX 256u
#define DF_PEERS_MAX     32u
#define DF_PEER_BYTES    32u
#define DF_NONE          UINT32_MAX

struct df_peer { /* routing id of a worker */
    uint8_t count;
    uint8_t bytes[DF_PEER_BYTES];
};

enum df_event_type { DF_MESSAGE = 1, DF_TICK = 2 };

struct df_event {
    enum df_event_type type;
    uint64_t now_us;
    uint64_t received_us;  /* when the burst with this message began */
    struct df_peer peer;   /* DF_MESSAGE */
    const struct msg *msg; /* checked by wire_check; of any type */
};

struct df_actions {
    bool reply;      /* send msg to the event's peer */
    bool ask;        /* msg is a DraftReply without drafts: the network fills it, then it is sent */
    uint32_t wanted; /* ask: drafts, at most */
    uint32_t anchor; /* ask: the last token, at length - 1 */
    uint32_t peer;   /* number of the peer, DF_NONE before its hello */
    bool fits;       /* hello: the network can draft for this target */
    const char *misfit; /* hello, the first of this process: the field that is why it cannot */
    uint32_t sequence;  /* that the message was about, DF_NONE = none */
    uint32_t length;    /* of it, in tokens */
    bool fresh;         /* it begins */
    bool cut;           /* its tokens from cut_length on were other ones */
    uint32_t cut_length;
    struct msg msg;
    uint32_t ids[MSG_DRAFT_IDS_MAX]; /* what msg points to */
    uint32_t freed_count;            /* sequences whose memory may go back to the system */
    uint32_t freed[DF_SEQUENCES_MAX];
};

struct df_core_options {
    uint32_t sequences_max; /* 1..DF_SEQUENCES_MAX */
    uint32_t context_max;
    uint64_t tokens_max;           /* >= context_max; bounds what memory is held for */
    uint32_t match_min, match_max; /* 1..DF_NGRAM_MAX */
    uint64_t silence_us_max;
    uint64_t deadline_us; /* later than this after received_us: no drafts */
    uint64_t incarnation;
    uint64_t seed; /* of the hash tables */
    /* The network; drafts 0 = there is none, n-gram drafts only. */
    uint32_t network_drafts;
    uint32_t network_hidden, network_vocab;
    struct hash128 network_tokenizer; /* of the tokens that it was made for */
    struct hash128 network_context;   /* dflash_context_fp */
    uint32_t tap_layer_count, tap_layers[MSG_TAPS_MAX], tap_type;
    uint32_t ngram_first; /* a match of so many tokens goes before the network; 0 = never */
};

struct df_counters {
    uint64_t opens, closes, contexts, proposals, hits, draft_ids;
    uint64_t not_found, stale, too_long, late, unsupported, misfits;
    uint64_t evicted, silent, superseded, foreign;
};

struct df_sequence {
    bool used;
    bool too_long; /* known, but not held: answered with ERR_CONTEXT */
    struct msg_id id;
    struct df_peer peer;
    uint32_t epoch;
    uint64_t last_us;
    uint64_t last_use; /* order of use, for eviction */
    uint32_t high;     /* most tokens since its memory was given back: so much of it is in use */
    struct df_ngram ngram;
};

struct df_known_peer {
    bool used;
    bool fits; /* the network was made for its model */
    struct df_peer peer;
    uint64_t incarnation;
    uint64_t last_use;
};

struct df_core {
    uint32_t magic;
    struct df_core_options options;
    uint64_t use;
    uint64_t tokens; /* sum of `high`: what memory is held for, also after a cut */
    uint32_t live;
    uint64_t now_us;
    struct df_counters counters;
    struct df_known_peer peers[DF_PEERS_MAX];
    struct df_sequence sequences[DF_SEQUENCES_MAX];
};

/* Bytes of one sequence's memory (a multiple of 4096) and of all of them. */
size_t df_core_sequence_bytes(const struct df_core_options *o);
size_t df_core_bytes(const struct df_core_options *o);

/* memory: df_core_bytes, 4096-byte aligned, any content; sequence i uses the i-th part of it. */
void df_core_init(struct df_core *core, const struct df_core_options *options, void *memory,
                  size_t bytes);
/* The network gave count drafts to an `ask`. */
void df_core_drafted(struct df_core *core, uint32_t count);
void df_core_step(struct df_core *core, const struct df_event *event,
                  struct df_actions *ret_actions);

#endif
