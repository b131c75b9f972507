/* SPDX-License-Identifier: Apache-2.0 */
#include "gateway/gw_parse_stop.h"

#include <stdlib.h>
#include <string.h>

#include "lib/base/check.h"

static enum err item_init(struct gw_parse_stop_item *item, const struct gw_parse_stop *stop)
{
    item->text = malloc(stop->bytes);
    item->back = calloc(stop->bytes, sizeof(*item->back));
    if (item->text == NULL || item->back == NULL)
        return ERR_NOMEM;
    memcpy(item->text, stop->text, stop->bytes);
    item->bytes = (uint32_t)stop->bytes;
    for (uint32_t i = 1, border = 0; i < item->bytes; i++) {
        while (border > 0 && item->text[i] != item->text[border])
            border = item->back[border - 1];
        border += item->text[i] == item->text[border];
        item->back[i] = border;
    }
    return ERR_OK;
}

enum err gw_parse_stops_init(struct gw_parse_stops *s, const struct gw_parse_stop *stops,
                             size_t count)
{
    *s = (struct gw_parse_stops){0};
    str_init(&s->held, 0);
    if (count > GW_PARSE_STOPS_MAX)
        return ERR_INVALID;
    if (count == 0)
        return ERR_OK;
    s->items = calloc(count, sizeof(*s->items));
    if (s->items == NULL)
        return ERR_NOMEM;
    s->count = count;
    for (size_t i = 0; i < count; i++) {
        if (stops[i].bytes == 0 || stops[i].bytes > INT32_MAX)
            return ERR_INVALID;
        TRY(item_init(&s->items[i], &stops[i]));
    }
    return ERR_OK;
}

void gw_parse_stops_fini(struct gw_parse_stops *s)
{
    for (size_t i = 0; i < s->count; i++) {
        free(s->items[i].text);
        free(s->items[i].back);
    }
    free(s->items);
    str_fini(&s->held);
    *s = (struct gw_parse_stops){0};
}

/* Takes one byte; true when the string is complete with it. */
static bool item_byte(struct gw_parse_stop_item *item, char byte)
{
    CHECK(item->matched < item->bytes);
    while (item->matched > 0 && item->text[item->matched] != byte)
        item->matched = item->back[item->matched - 1];
    item->matched += item->text[item->matched] == byte;
    return item->matched == item->bytes;
}

void gw_parse_stops_add(struct gw_parse_stops *s, const char *text, size_t bytes, struct str *out)
{
    if (s->found || bytes == 0)
        return;
    if (s->count == 0) {
        str_add(out, text, bytes);
        return;
    }
    size_t before = s->held.bytes;
    uint32_t keep = 0;
    str_add(&s->held, text, bytes);
    for (size_t at = 0; at < bytes && !s->found; at++) {
        uint32_t longest = 0;
        keep = 0;
        for (size_t i = 0; i < s->count; i++) {
            bool complete = item_byte(&s->items[i], text[at]);
            if (s->items[i].matched > keep)
                keep = s->items[i].matched;
            if (complete && s->items[i].bytes > longest) {
                longest = s->items[i].bytes;
                s->found = true;
                s->found_index = i;
            }
        }
        if (s->found) {
            CHECK(longest <= before + at + 1);
            str_add(out, s->held.text, before + at + 1 - longest);
            str_clear(&s->held);
        }
    }
    if (s->found || s->held.overflow)
        return;
    CHECK(keep <= s->held.bytes);
    str_add(out, s->held.text, s->held.bytes - keep);
    str_drop_front(&s->held, s->held.bytes - keep);
}

void gw_parse_stops_release(struct gw_parse_stops *s, struct str *out)
{
    if (s->held.bytes > 0)
        str_add(out, s->held.text, s->held.bytes);
    str_clear(&s->held);
    for (size_t i = 0; i < s->count; i++)
        s->items[i].matched = 0;
}
