/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/text/added.h"

#include <stdlib.h>

#include "lib/base/check.h"

#define ADDED_MAGIC 0x61646465u

void added_init(struct added *a)
{
    *a = (struct added){.magic = ADDED_MAGIC};
}

void added_fini(struct added *a)
{
    if (a == NULL)
        return;
    free(a->nodes);
    *a = (struct added){0};
}

static enum err added_node_new(struct added *a, uint8_t byte, uint32_t *ret_node)
{
    if (a->node_count == a->node_capacity) {
        if (a->node_capacity >= ADDED_NODES_MAX)
            return ERR_TOO_LARGE;
        uint32_t capacity = a->node_capacity ? a->node_capacity * 2 : 256;
        struct added_node *nodes = realloc(a->nodes, (size_t)capacity * sizeof(*nodes));
        if (nodes == NULL)
            return ERR_NOMEM;
        a->nodes = nodes;
        a->node_capacity = capacity;
    }
    a->nodes[a->node_count] = (struct added_node){.byte = byte};
    *ret_node = a->node_count++;
    return ERR_OK;
}

static uint32_t added_child(const struct added *a, uint32_t node, uint8_t byte)
{
    uint32_t child = a->nodes[node].child;
    while (child != 0 && a->nodes[child].byte != byte)
        child = a->nodes[child].next;
    return child;
}

enum err added_put(struct added *a, const char *text, size_t count, uint32_t id)
{
    CHECK_OBJ(a, ADDED_MAGIC);
    CHECK(count >= 1);
    uint32_t node = 0;
    if (a->node_count == 0)
        TRY(added_node_new(a, 0, &node));
    node = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t child = added_child(a, node, (uint8_t)text[i]);
        if (child == 0) {
            TRY(added_node_new(a, (uint8_t)text[i], &child));
            a->nodes[child].next = a->nodes[node].child;
            a->nodes[node].child = child;
        }
        node = child;
    }
    if (a->nodes[node].id != 0)
        return ERR_INVALID;
    a->nodes[node].id = id + 1;
    a->first[(uint8_t)text[0]] = true;
    return ERR_OK;
}

bool added_next(const struct added *a, const char *text, size_t count, size_t from,
                size_t *ret_begin, size_t *ret_end, uint32_t *ret_id)
{
    CHECK_OBJ(a, ADDED_MAGIC);
    CHECK(from <= count);
    if (a->node_count == 0)
        return false;
    for (size_t at = from; at < count; at++) {
        if (!a->first[(uint8_t)text[at]])
            continue;
        size_t end = 0;
        uint32_t node = 0;
        for (size_t i = at; i < count; i++) {
            node = added_child(a, node, (uint8_t)text[i]);
            if (node == 0)
                break;
            if (a->nodes[node].id != 0) {
                end = i + 1;
                *ret_id = a->nodes[node].id - 1;
            }
        }
        if (end != 0) {
            *ret_begin = at;
            *ret_end = end;
            return true;
        }
    }
    return false;
}
