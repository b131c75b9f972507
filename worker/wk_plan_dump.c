/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/wk_plan_dump.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/json.h"
#include "lib/base/str.h"
#include "worker/wk_plan.h"

static const char *kind_name(enum wk_plan_kind kind)
{
    switch (kind) {
    case WK_PLAN_PREFILL:
        return "prefill";
    case WK_PLAN_DECODE:
        return "decode";
    case WK_PLAN_ABANDON:
        return "abandon";
    }
    return "?";
}

static void add_hex(struct str *s, const uint8_t *bytes, size_t count)
{
    char text[2 * 64 + 1];
    for (size_t at = 0; at < count; at += 64) {
        hex_encode(bytes + at, count - at < 64 ? count - at : 64, text);
        str_add_text(s, text);
    }
}

static void add_head(struct str *s, const struct wk_plan_dump_head *h)
{
    str_add_format(s, "{\"dump\":\"tandem-plans\",\"version\":1,\"rank\":%u,\"ranks\":%u,", h->rank,
                   h->ranks);
    str_add_format(s, "\"epoch\":%u,\"now_us\":%" PRIu64 ",\"reason\":", h->epoch, h->now_us);
    json_write_string(s, h->reason, strlen(h->reason));
    str_add_text(s, "}\n");
}

static void add_plan(struct str *s, const struct wk_plan_past *p)
{
    str_add_format(s, "{\"step\":%" PRIu64 ",\"kind\":\"%s\",\"seqs\":%u,\"rows\":%u,", p->step,
                   kind_name(p->kind), p->seq_count, p->row_count);
    str_add_format(s, "\"layer_end\":%u,\"hash\":\"", p->layer_end);
    add_hex(s, p->hash.bytes, sizeof p->hash.bytes);
    str_add_format(s, "\",\"begun_us\":%" PRIu64 ",\"step_us\":", p->begun_us);
    if (p->step_us > 0)
        str_add_format(s, "%" PRIu64, p->step_us);
    else
        str_add_text(s, "null");
    str_add_text(s, ",\"encoding\":");
    if (p->encoding != NULL) {
        str_add_char(s, '"');
        add_hex(s, p->encoding, p->bytes);
        str_add_text(s, "\"}\n");
    } else {
        str_add_text(s, "null}\n");
    }
}

static enum err file_write(const char *path, const struct str *s, struct err_detail *detail)
{
    char temporary[512];
    int n = snprintf(temporary, sizeof temporary, "%s.new", path);
    if (n < 0 || (size_t)n >= sizeof temporary)
        return err_set(detail, ERR_INVALID, "plan dump: path too long");
    unlink(temporary);
    /* The encodings hold token ids: for the owner's eyes only. */
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", temporary, strerror(errno));
    size_t at = 0;
    int fault = 0;
    while (at < s->bytes && fault == 0) {
        ssize_t done = write(fd, s->text + at, s->bytes - at);
        if (done > 0)
            at += (size_t)done;
        else if (done == 0 || errno != EINTR)
            fault = done == 0 ? EIO : errno;
    }
    if (close(fd) != 0 && fault == 0)
        fault = errno;
    if (fault == 0 && rename(temporary, path) != 0)
        fault = errno;
    if (fault == 0)
        return ERR_OK;
    unlink(temporary);
    return err_set(detail, ERR_IO, "%s: %s", path, strerror(fault));
}

enum err wk_plan_dump(const struct wk_plan_ring *ring, const struct wk_plan_dump_head *head,
                      const char *path, struct err_detail *detail)
{
    struct str s;
    struct wk_plan_past past;
    CHECK(ring != NULL && head->reason != NULL && path != NULL);
    str_init(&s, 0);
    add_head(&s, head);
    for (uint32_t back = 0; wk_plan_ring_at(ring, back, &past); back++)
        add_plan(&s, &past);
    enum err e = s.overflow ? err_set(detail, ERR_NOMEM, "plan dump: larger than memory allows")
                            : file_write(path, &s, detail);
    str_fini(&s);
    return e;
}
