/* SPDX-License-Identifier: Apache-2.0 */
/* lib/base/log.h - one line is one event: date level process group "message" key=value...
 *
 * Any thread.  Writes to stderr; `tandem up` sends that to a file.  Message constant, data in
 * keys.  error = someone must act; warn = degraded, self-healing; info = life cycle, never
 * requests; debug = anything, per group.  Prompts and tokens are never logged.  Repeats of one
 * call site beyond 10 a second are counted and reported as repeats=N. */
#ifndef LIB_BASE_LOG_H
#define LIB_BASE_LOG_H

#include <stdbool.h>

#include "lib/base/err.h"

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

enum log_group {
#define LOG_GROUP(name, text) LOG_##name,
#include "lib/base/log_groups.def"
#undef LOG_GROUP
    LOG_GROUP_COUNT
};

struct log_site {
    unsigned long long second;
    unsigned count;
};

void log_init(const char *process, enum log_level level);
bool log_level_parse(const char *text, enum log_level *ret_level); /* error warn info debug */
void log_set_level(enum log_level level);
void log_event(struct log_site *site, enum log_level level, enum log_group group,
               const char *message, const char *format, ...) PRINTF_LIKE(5, 6);

/* An event without keys has the empty format. */
#pragma GCC diagnostic ignored "-Wformat-zero-length"

/* log_warn(BUS, "frame dropped", "peer=%s reason=%s", peer, reason);  format "" = no keys */
#define log_at(level, group, message, ...)                                                         \
    do {                                                                                           \
        static struct log_site log_site_;                                                          \
        log_event(&log_site_, level, LOG_##group, message, __VA_ARGS__);                           \
    } while (0)
#define log_error(group, message, ...) log_at(LOG_ERROR, group, message, __VA_ARGS__)
#define log_warn(group, message, ...)  log_at(LOG_WARN, group, message, __VA_ARGS__)
#define log_info(group, message, ...)  log_at(LOG_INFO, group, message, __VA_ARGS__)
#define log_debug(group, message, ...) log_at(LOG_DEBUG, group, message, __VA_ARGS__)

#endif
