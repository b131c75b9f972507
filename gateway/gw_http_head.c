/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_http_head.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "lib/base/check.h"

#define GW_HEAD_MAGIC     0x67774864u
#define HEAD_KEEP_BYTES   4096u /* a larger buffer is given back at reset */
#define BLANK_LINES_MAX   4u    /* some clients end a body with an extra CRLF */
#define TRAILER_BYTES_MAX 8192u

static bool is_token(unsigned char c)
{
    static const char marks[] = "!#$%&'*+-.^_`|~";
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
        return true;
    return c != '\0' && strchr(marks, c) != NULL;
}

void gw_head_init(struct gw_head *h, const struct gw_head_limits *limits)
{
    CHECK(limits->fields_max <= GW_HEAD_FIELDS_MAX && limits->bytes_max >= 64);
    memset(h, 0, sizeof(*h));
    h->magic = GW_HEAD_MAGIC;
    h->limits = *limits;
}

void gw_head_fini(struct gw_head *h)
{
    CHECK_OBJ(h, GW_HEAD_MAGIC);
    free(h->text);
    memset(h, 0, sizeof(*h));
}

void gw_head_reset(struct gw_head *h)
{
    CHECK_OBJ(h, GW_HEAD_MAGIC);
    if (h->capacity > HEAD_KEEP_BYTES) {
        free(h->text);
        h->text = NULL;
        h->capacity = 0;
    }
    h->bytes = h->line_start = h->blank_lines = h->field_count = 0;
    h->state = GW_HEAD_MORE;
    h->minor = 1;
    h->status = 0;
    h->reason = NULL;
    h->method = h->path = h->query = NULL;
    h->chunked = h->has_length = h->expect_continue = h->expect_unknown = h->keep_alive = false;
    h->length = 0;
}

static enum gw_head_state refuse(struct gw_head *h, int status, const char *reason)
{
    h->state = GW_HEAD_REFUSED;
    h->status = status;
    h->reason = reason;
    return h->state;
}

static bool head_grow(struct gw_head *h)
{
    uint32_t capacity = h->capacity ? h->capacity * 2 : 1024;
    char *text = realloc(h->text, capacity);
    if (!text)
        return false;
    h->text = text;
    h->capacity = capacity;
    return true;
}

/* The method, target and version of the first line, cut in place. */
static enum gw_head_state parse_request_line(struct gw_head *h, char *line, uint32_t bytes)
{
    char *end = line + bytes;
    char *target = memchr(line, ' ', bytes);
    if (!target)
        return refuse(h, 400, "the request line has no target");
    for (char *p = line; p < target; p++)
        if (*p < 'A' || *p > 'Z')
            if (*p != '-')
                return refuse(h, 400, "the method is not made of capital letters");
    if (target == line)
        return refuse(h, 400, "the request line has no method");
    *target++ = '\0';
    char *version = memchr(target, ' ', (size_t)(end - target));
    if (!version)
        return refuse(h, 505, "HTTP/0.9 is not supported");
    if (version == target)
        return refuse(h, 400, "the request line has no target");
    if ((uint32_t)(version - target) > h->limits.target_bytes_max)
        return refuse(h, 414, "the request target is too long");
    for (char *p = target; p < version; p++)
        if ((unsigned char)*p <= ' ' || *p == 0x7f)
            return refuse(h, 400, "control character in the request target");
    *version++ = '\0';
    if (end - version != 8 || memcmp(version, "HTTP/", 5) != 0 || version[6] != '.' ||
        version[5] < '0' || version[5] > '9' || version[7] < '0' || version[7] > '9')
        return refuse(h, 400, "the request line does not end in an HTTP version");
    if (version[5] != '1' || version[7] > '1')
        return refuse(h, 505, "unsupported HTTP version; 1.0 and 1.1 are supported");
    h->minor = (uint32_t)(version[7] - '0');
    h->method = line;
    /* The absolute form is legal for every request; the authority in it is not used. */
    bool absolute = false;
    if (strncasecmp(target, "http://", 7) == 0 || strncasecmp(target, "https://", 8) == 0) {
        char *authority = strchr(target, ':') + 3;
        target = authority + strcspn(authority, "/?");
        absolute = true;
    }
    char *query = strchr(target, '?');
    h->query = "";
    if (query) {
        *query = '\0';
        h->query = query + 1;
    }
    h->path = absolute && *target == '\0' ? "/" : target;
    if (h->path[0] != '/' && strcmp(h->path, "*") != 0)
        return refuse(h, 400, "the request target is not a path");
    return GW_HEAD_MORE;
}

static enum gw_head_state parse_field(struct gw_head *h, uint32_t start, uint32_t bytes)
{
    char *line = h->text + start;
    if (*line == ' ' || *line == '\t')
        return refuse(h, 400, "folded header fields are not supported");
    if (h->field_count >= h->limits.fields_max)
        return refuse(h, 431, "too many header fields");
    char *colon = memchr(line, ':', bytes);
    if (!colon || colon == line)
        return refuse(h, 400, "a header line has no field name");
    for (char *p = line; p < colon; p++) {
        if (*p == ' ' || *p == '\t')
            return refuse(h, 400, "white space before the colon of a header field");
        if (!is_token((unsigned char)*p))
            return refuse(h, 400, "invalid character in a header field name");
    }
    char *value = colon + 1;
    char *end = line + bytes;
    while (value < end && (*value == ' ' || *value == '\t'))
        value++;
    while (end > value && (end[-1] == ' ' || end[-1] == '\t'))
        end--;
    for (char *p = value; p < end; p++)
        if (((unsigned char)*p < ' ' && *p != '\t') || *p == 0x7f)
            return refuse(h, 400, "control character in a header field value");
    *colon = '\0';
    *end = '\0'; /* at the latest the CR of this line */
    h->fields[h->field_count++] = (struct gw_head_field){
        .name = start,
        .name_bytes = (uint32_t)(colon - line),
        .value = (uint32_t)(value - h->text),
        .value_bytes = (uint32_t)(end - value),
    };
    return GW_HEAD_MORE;
}

static bool list_has(const char *list, const char *word)
{
    size_t bytes = strlen(word);
    while (*list) {
        list += strspn(list, " \t,");
        size_t n = strcspn(list, ",");
        size_t trimmed = n;
        while (trimmed && (list[trimmed - 1] == ' ' || list[trimmed - 1] == '\t'))
            trimmed--;
        if (trimmed == bytes && strncasecmp(list, word, bytes) == 0)
            return true;
        list += n;
    }
    return false;
}

static enum gw_head_state parse_length(struct gw_head *h, const char *value)
{
    uint64_t length = 0;
    if (!*value)
        return refuse(h, 400, "Content-Length is empty");
    for (const char *p = value; *p; p++) {
        if (*p < '0' || *p > '9')
            return refuse(h, 400, "Content-Length is not a number");
        if (length > (UINT64_MAX - 9) / 10)
            return refuse(h, 400, "Content-Length is too large");
        length = length * 10 + (uint64_t)(*p - '0');
    }
    h->has_length = true;
    h->length = length;
    return GW_HEAD_MORE;
}

/* The fields that decide where the message ends and what becomes of the connection. */
static enum gw_head_state parse_framing(struct gw_head *h)
{
    uint32_t hosts = 0, lengths = 0, codings = 0;
    const char *coding = NULL, *length = NULL;
    h->keep_alive = h->minor == 1;
    for (uint32_t i = 0; i < h->field_count; i++) {
        const char *name = h->text + h->fields[i].name;
        const char *value = h->text + h->fields[i].value;
        if (strcasecmp(name, "host") == 0) {
            hosts++;
        } else if (strcasecmp(name, "content-length") == 0) {
            lengths++;
            length = value;
        } else if (strcasecmp(name, "transfer-encoding") == 0) {
            codings++;
            coding = value;
        } else if (strcasecmp(name, "connection") == 0) {
            if (list_has(value, "close"))
                h->keep_alive = false;
            else if (h->minor == 0 && list_has(value, "keep-alive"))
                h->keep_alive = true;
        } else if (strcasecmp(name, "expect") == 0) {
            if (strcasecmp(value, "100-continue") == 0)
                h->expect_continue = h->minor == 1;
            else
                h->expect_unknown = true;
        }
    }
    if (hosts == 0 && h->minor == 1)
        return refuse(h, 400, "the Host header field is missing");
    if (hosts > 1)
        return refuse(h, 400, "more than one Host header field");
    if (lengths > 1)
        return refuse(h, 400, "more than one Content-Length header field");
    if (codings > 1)
        return refuse(h, 400, "more than one Transfer-Encoding header field");
    if (lengths && codings)
        return refuse(h, 400, "both Content-Length and Transfer-Encoding are given");
    if (codings) {
        if (h->minor == 0)
            return refuse(h, 400, "Transfer-Encoding in an HTTP/1.0 request");
        if (strcasecmp(coding, "chunked") != 0)
            return refuse(h, 501, "the only supported Transfer-Encoding is chunked");
        h->chunked = true;
    }
    return length ? parse_length(h, length) : GW_HEAD_MORE;
}

/* Cuts the whole head into lines; every line is known to end in CRLF. */
static enum gw_head_state parse_head(struct gw_head *h)
{
    uint32_t start = 0;
    bool first = true;
    while (start < h->bytes) {
        char *lf = memchr(h->text + start, '\n', h->bytes - start);
        CHECK(lf != NULL && lf > h->text && lf[-1] == '\r');
        uint32_t bytes = (uint32_t)(lf - 1 - (h->text + start));
        if (bytes == 0)
            break;
        enum gw_head_state s =
            first ? parse_request_line(h, h->text + start, bytes) : parse_field(h, start, bytes);
        if (s == GW_HEAD_REFUSED)
            return s;
        first = false;
        start += bytes + 2;
    }
    if (parse_framing(h) == GW_HEAD_REFUSED)
        return GW_HEAD_REFUSED;
    h->state = GW_HEAD_DONE;
    return h->state;
}

/* One byte is in the buffer: is the head still well formed, and is it over? */
static enum gw_head_state head_take(struct gw_head *h, char c)
{
    bool after_cr = h->bytes > h->line_start && h->text[h->bytes - 1] == '\r';
    if (after_cr && c != '\n')
        return refuse(h, 400, "a carriage return stands alone in the header");
    if (c == '\n' && !after_cr)
        return refuse(h, 400, "a header line ends in a bare line feed");
    if (c == '\0')
        return refuse(h, 400, "NUL in the header");
    h->text[h->bytes++] = c;
    if (c != '\n')
        return GW_HEAD_MORE;
    uint32_t line_bytes = h->bytes - h->line_start - 2;
    if (line_bytes == 0 && h->line_start == 0) {
        if (++h->blank_lines > BLANK_LINES_MAX)
            return refuse(h, 400, "too many empty lines before the request");
        h->bytes = 0;
        return GW_HEAD_MORE;
    }
    h->line_start = h->bytes;
    return line_bytes == 0 ? GW_HEAD_DONE : GW_HEAD_MORE;
}

enum gw_head_state gw_head_feed(struct gw_head *h, const char *bytes, size_t count,
                                size_t *ret_used)
{
    CHECK_OBJ(h, GW_HEAD_MAGIC);
    CHECK(h->state == GW_HEAD_MORE);
    size_t used = 0;
    enum gw_head_state s = GW_HEAD_MORE;
    while (used < count && s == GW_HEAD_MORE) {
        if (h->bytes >= h->limits.bytes_max) {
            s = refuse(h, 431, "the request header is too large");
            break;
        }
        if (h->bytes == h->capacity && !head_grow(h)) {
            s = refuse(h, 503, "out of memory");
            break;
        }
        s = head_take(h, bytes[used++]);
    }
    *ret_used = used;
    if (s == GW_HEAD_DONE)
        s = parse_head(h);
    return s;
}

const char *gw_head_value(const struct gw_head *h, const char *name)
{
    CHECK_OBJ(h, GW_HEAD_MAGIC);
    if (h->state != GW_HEAD_DONE)
        return NULL;
    for (uint32_t i = 0; i < h->field_count; i++)
        if (strcasecmp(h->text + h->fields[i].name, name) == 0)
            return h->text + h->fields[i].value;
    return NULL;
}

const char *gw_head_seen(const struct gw_head *h, const char *name, size_t *ret_bytes)
{
    CHECK_OBJ(h, GW_HEAD_MAGIC);
    size_t name_bytes = strlen(name);
    const char *end = h->text + h->bytes;
    for (const char *line = h->text, *next; line != NULL && line < end; line = next) {
        const char *lf = memchr(line, '\n', (size_t)(end - line));
        if (lf == NULL)
            break; /* not all of it is here */
        next = lf + 1;
        /* A parsed line has its colon and the end of its value cut by NUL. */
        if ((size_t)(lf - line) <= name_bytes || strncasecmp(line, name, name_bytes) != 0 ||
            (line[name_bytes] != ':' && line[name_bytes] != '\0'))
            continue;
        const char *value = line + name_bytes + 1;
        while (value < lf && (*value == ' ' || *value == '\t'))
            value++;
        const char *stop = value;
        while (stop < lf && *stop != '\0' && *stop != '\r')
            stop++;
        while (stop > value && (stop[-1] == ' ' || stop[-1] == '\t'))
            stop--;
        *ret_bytes = (size_t)(stop - value);
        return value;
    }
    return NULL;
}

void gw_trailer_init(struct gw_trailer *t)
{
    memset(t, 0, sizeof(*t));
}

enum gw_head_state gw_trailer_feed(struct gw_trailer *t, const char *bytes, size_t count,
                                   size_t *ret_used)
{
    for (size_t i = 0; i < count; i++) {
        char c = bytes[i];
        *ret_used = i + 1;
        if (++t->bytes > TRAILER_BYTES_MAX)
            return GW_HEAD_REFUSED;
        if (t->carriage_return) {
            if (c != '\n')
                return GW_HEAD_REFUSED;
            if (t->line_bytes == 0)
                return GW_HEAD_DONE;
            if (!t->colon)
                return GW_HEAD_REFUSED;
            t->carriage_return = t->colon = false;
            t->line_bytes = 0;
            continue;
        }
        if (c == '\r') {
            t->carriage_return = true;
            continue;
        }
        if (c == ':' && t->line_bytes > 0)
            t->colon = true;
        else if (!t->colon && !is_token((unsigned char)c))
            return GW_HEAD_REFUSED; /* also a fold, a bare LF and a space before the colon */
        else if (((unsigned char)c < ' ' && c != '\t') || c == 0x7f)
            return GW_HEAD_REFUSED;
        t->line_bytes++;
    }
    *ret_used = count;
    return GW_HEAD_MORE;
}
