/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/json.h"

#include <string.h>

#include "lib/base/check.h"
#include "lib/base/str.h"

struct json *json_get(const struct json *value, const char *key)
{
    CHECK(key != NULL);
    if (!json_is(value, JSON_OBJECT))
        return NULL;
    size_t key_bytes = strlen(key);
    for (struct json *m = value->child; m != NULL; m = m->next)
        if (m->key_bytes == key_bytes && memcmp(m->key, key, key_bytes) == 0)
            return m;
    return NULL;
}

struct json *json_at(const struct json *array, uint32_t index)
{
    if (!json_is(array, JSON_ARRAY) || index >= array->count)
        return NULL;
    struct json *item = array->child;
    for (uint32_t i = 0; i < index; i++)
        item = item->next;
    CHECK(item != NULL);
    return item;
}

bool json_is(const struct json *value, enum json_type type)
{
    return value != NULL && value->type == type;
}

bool json_string_is(const struct json *value, const char *text)
{
    CHECK(text != NULL);
    return json_is(value, JSON_STRING) && value->bytes == strlen(text) &&
           memcmp(value->text, text, value->bytes) == 0;
}

bool json_u64(const struct json *value, uint64_t *ret)
{
    CHECK(ret != NULL);
    if (!json_is(value, JSON_NUMBER))
        return false;
    if (value->bytes == 2 && memcmp(value->text, "-0", 2) == 0) {
        *ret = 0;
        return true;
    }
    return text_to_u64(value->text, value->bytes, ret);
}

bool json_i64(const struct json *value, int64_t *ret)
{
    CHECK(ret != NULL);
    return json_is(value, JSON_NUMBER) && text_to_i64(value->text, value->bytes, ret);
}

bool json_f64(const struct json *value, double *ret)
{
    CHECK(ret != NULL);
    return json_is(value, JSON_NUMBER) && text_to_f64(value->text, value->bytes, ret);
}

bool json_bool(const struct json *value, bool *ret)
{
    CHECK(ret != NULL);
    if (!json_is(value, JSON_BOOL))
        return false;
    *ret = value->boolean;
    return true;
}
