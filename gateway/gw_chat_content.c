/* SPDX-License-Identifier: Apache-2.0 */
/* Content of a message: a string, null, or a list of text parts and plain strings. */
#include "gateway/gw_chat_state.h"

#include <stdio.h>

#include "lib/base/check.h"
#include "lib/base/json.h"

static enum err content_part(struct gw_chat *c, const struct json *part, const char *path,
                             uint32_t index)
{
    char where[96];
    if (json_is(part, JSON_STRING)) {
        str_add(&c->joined, part->text, part->bytes);
        return ERR_OK;
    }
    (void)snprintf(where, sizeof(where), "%s[%u]", path, index);
    if (!json_is(part, JSON_OBJECT))
        return gw_chat_refuse(c, GW_CHAT_CONTENT_TYPE, where, "a part must be an object");
    if (!json_string_is(json_get(part, "type"), "text")) {
        (void)snprintf(where, sizeof(where), "%s[%u].type", path, index);
        return gw_chat_refuse(c, GW_CHAT_PART_TYPE, where,
                              "only parts of type \"text\" can be read: this model has no "
                              "pictures, video or sound");
    }
    const struct json *text = json_get(part, "text");
    if (!json_is(text, JSON_STRING)) {
        (void)snprintf(where, sizeof(where), "%s[%u].text", path, index);
        return gw_chat_refuse(c, GW_CHAT_CONTENT_TYPE, where, "must be a string");
    }
    str_add(&c->joined, text->text, text->bytes);
    return ERR_OK;
}

enum err gw_chat_content(struct gw_chat *c, const struct json *content, const char *path,
                         struct gw_chat_text *ret_text)
{
    CHECK_OBJ(c, GW_CHAT_MAGIC);
    *ret_text = (struct gw_chat_text){.text = "", .bytes = 0};
    if (gw_chat_absent(content))
        return ERR_OK;
    if (json_is(content, JSON_STRING)) {
        *ret_text = (struct gw_chat_text){.text = content->text, .bytes = content->bytes};
        return ERR_OK;
    }
    if (!json_is(content, JSON_ARRAY))
        return gw_chat_refuse(c, GW_CHAT_CONTENT_TYPE, path,
                              "must be a string, null or a list of parts");
    str_clear(&c->joined);
    uint32_t index = 0;
    for (const struct json *part = content->child; part; part = part->next)
        TRY(content_part(c, part, path, index++));
    if (c->joined.bytes > 0)
        *ret_text = (struct gw_chat_text){.text = c->joined.text, .bytes = c->joined.bytes};
    return ERR_OK;
}
