/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/host.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib/base/hash.h"
#include "lib/base/str.h"

void host_boot_id(char ret_id[HOST_BOOT_BYTES])
{
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    ret_id[0] = '\0';
    if (f == NULL)
        return;
    if (fgets(ret_id, HOST_BOOT_BYTES, f) == NULL)
        ret_id[0] = '\0';
    fclose(f);
    ret_id[strcspn(ret_id, "\n")] = '\0';
}

uint32_t host_boot(void)
{
    char id[HOST_BOOT_BYTES];
    host_boot_id(id);
    return id[0] != '\0' ? hash_crc32c(0, id, strlen(id)) : 0;
}

enum err host_memory_path(const char *cluster, const char *run_dir, const char *suffix,
                          char ret_path[HOST_PATH_BYTES], struct err_detail *detail)
{
    char *absolute = realpath(run_dir, NULL);
    if (absolute == NULL)
        return err_set(detail, ERR_IO, "run_dir: %s: %s", run_dir, strerror(errno));
    struct hash128 hash = hash_xxh3_once(absolute, strlen(absolute));
    free(absolute);
    char hex[33], name[65];
    hex_encode(&hash, sizeof hash, hex);
    snprintf(name, sizeof name, "%s", cluster);
    for (char *c = name; *c != '\0'; c++) { /* a cluster's name is no path */
        if (!isalnum((unsigned char)*c) && *c != '-' && *c != '_' && *c != '.')
            *c = '_';
    }
    snprintf(ret_path, HOST_PATH_BYTES, "/dev/shm/tandem-%s-%.16s%s", name, hex, suffix);
    return ERR_OK;
}
