/* SPDX-License-Identifier: Apache-2.0 */
/* kvmgr/km_store.h - the NVMe tier's files, and the thread that reads and writes them.
 *
 * Created, fed and polled by kvmgr's loop thread; the I/O thread is its own and shares nothing with
 * it but two bounded rings each way.  At most KM_STORE_MAX operations in flight (the core sees to
 * it).  Data go from and to the arena's file by its descriptor, in pieces, never through the loop.
 *
 * One object a file: kv_store_dir/<layout and model, 32 hex>/<xx>/<chain hash, 32 hex>.b or .s,
 * data (raw or zstd) padded to 4096 bytes, then a footer page {hash, layout, model, lengths, CRCs}.
 * A file is written under a temporary name, synced and renamed: it is whole or it is not there.
 * At start the footers are read, newest file first; a read renews a file's time.  O_DIRECT where
 * the file system takes it.  Folders of other layouts and models are not touched, but told: each
 * has its own kv_store_bytes, and whoever changes for good removes the old one by hand.
 *
 * Disk full or an I/O error turns the tier off until the next start: KM_STORE_OFF, with a text. */
#ifndef KVMGR_KM_STORE_H
#define KVMGR_KM_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "kvmgr/km_event.h"
#include "lib/base/err.h"
#include "lib/base/hash.h"

#define KM_STORE_MAGIC_FILE 0x534b4454u /* "TDKS" */
#define KM_STORE_VERSION    2u
#define KM_STORE_PAGE       4096u

struct km_store;
struct kv_layout;

struct km_store_footer { /* little-endian; the rest of its page is zero */
    uint32_t magic, version;
    struct hash128 hash, parent, layout_fp, model_fp; /* parent: of a block, the one before it */
    uint32_t kind;                                    /* enum km_object_kind */
    uint32_t zstd;                                    /* 1: the data are one zstd frame */
    uint32_t token_count;
    uint32_t reserved;
    uint64_t raw_bytes, stored_bytes;
    uint32_t data_crc; /* crc32c of the stored bytes */
    uint32_t crc;      /* crc32c of the bytes before it */
};

struct km_store_options {
    const char *dir;                /* borrowed for the call */
    int arena_fd;                   /* borrowed until km_store_close */
    const struct kv_layout *layout; /* copied */
    struct hash128 model_fp;
    int zstd_level;          /* 0 = off */
    void (*wake)(void *arg); /* from the I/O thread: something is to be polled */
    void *wake_arg;
};

enum km_store_news {
    KM_STORE_NOTHING,
    KM_STORE_RESULT,
    KM_STORE_FOUND,
    KM_STORE_OFF,
    KM_STORE_OTHERS
};

struct km_store_poll {
    enum km_store_news news;
    struct km_store_result result;
    struct km_store_object object;
    uint64_t bytes; /* OTHERS */
    char text[ERR_DETAIL_BYTES];
};

/* Makes and locks the folder, starts the thread, which first lists what is there.
 * ERR_BUSY: another process uses the folder.  ERR_IO, ERR_UNSUPPORTED: no tier. */
MUST_USE enum err km_store_open(const struct km_store_options *options, struct km_store **ret_store,
                                struct err_detail *detail);
/* Ends the thread after the operation it is in; what is queued is dropped. */
void km_store_close(struct km_store **store_p);
void km_store_submit(struct km_store *s, const struct km_store_item *item);
/* Next piece of news; NOTHING: none now. */
void km_store_poll(struct km_store *s, struct km_store_poll *ret);
bool km_store_direct(const struct km_store *s); /* O_DIRECT is used */

#endif
