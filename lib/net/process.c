/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/base/check.h"
#include "lib/base/log.h"
#include "lib/net/status.h"

#define PATH_BYTES 768

static int process_lock_fd = -1; /* held until process_end or the process's death */

/* Makes the folder and what is missing above it. */
static enum err folder_make(const char *what, const char *path, mode_t mode,
                            struct err_detail *detail)
{
    char part[PATH_BYTES];
    size_t bytes = strlen(path);
    if (bytes == 0 || bytes >= sizeof(part))
        return err_set(detail, ERR_INVALID, "%s: empty or too long", what);
    for (size_t i = 1; i <= bytes; i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        memcpy(part, path, i);
        part[i] = '\0';
        bool last = i == bytes || path[i + strspn(path + i, "/")] == '\0';
        if (mkdir(part, last ? mode : 0755) != 0 && errno != EEXIST)
            return err_set(detail, ERR_IO, "%s %s: mkdir %s: %s", what, path, part,
                           strerror(errno));
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        return err_set(detail, ERR_IO, "%s %s: not a folder", what, path);
    if ((st.st_mode & S_IWOTH) != 0)
        return err_set(detail, ERR_INVALID,
                       "%s %s: everyone may write there; use a folder of its "
                       "own with mode 0700",
                       what, path);
    return ERR_OK;
}

static enum err path_make(char ret_path[PATH_BYTES], const char *run_dir, const char *name,
                          const char *suffix, struct err_detail *detail)
{
    int wrote = snprintf(ret_path, PATH_BYTES, "%s/%s%s", run_dir, name, suffix);
    if (wrote < 0 || wrote >= PATH_BYTES)
        return err_set(detail, ERR_INVALID, "run_dir: path too long");
    return ERR_OK;
}

static enum err lock_take(const char *name, const char *run_dir, int *ret_fd,
                          struct err_detail *detail)
{
    char path[PATH_BYTES];
    TRY(path_make(path, run_dir, name, ".lock", detail));
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        int fault = errno;
        close(fd);
        if (fault == EWOULDBLOCK)
            return err_set(detail, ERR_BUSY, "%s is already running (%s is locked)", name, path);
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(fault));
    }
    *ret_fd = fd;
    return ERR_OK;
}

/* By rename: a reader sees the old file or the whole new one. */
static enum err pid_write(const char *name, const char *run_dir, struct err_detail *detail)
{
    char path[PATH_BYTES], fresh[PATH_BYTES];
    TRY(path_make(path, run_dir, name, ".pid", detail));
    TRY(path_make(fresh, run_dir, name, ".pid.new", detail));
    FILE *f = fopen(fresh, "we");
    if (f == NULL)
        return err_set(detail, ERR_IO, "%s: %s", fresh, strerror(errno));
    bool wrote = fprintf(f, "%ld\n", (long)getpid()) > 0;
    if (fclose(f) != 0 || !wrote || rename(fresh, path) != 0)
        return err_set(detail, ERR_IO, "%s: %s", path, strerror(errno));
    return ERR_OK;
}

enum err process_begin(const char *name, const char *run_dir, const char *state_dir,
                       struct err_detail *detail)
{
    CHECK(process_lock_fd < 0);
    signal(SIGPIPE, SIG_IGN);
    umask(0077);
    TRY(folder_make("run_dir", run_dir, 0700, detail));
    TRY(folder_make("state_dir", state_dir, 0700, detail));
    int fd = -1;
    TRY(lock_take(name, run_dir, &fd, detail));
    enum err e = pid_write(name, run_dir, detail);
    if (e != ERR_OK) {
        close(fd);
        return e;
    }
    process_lock_fd = fd;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &files) != 0)
            log_warn(LOOP, "descriptor limit not raised", "reason=\"%s\"", strerror(errno));
    }
    return ERR_OK;
}

void process_end(const char *name, const char *run_dir)
{
    if (process_lock_fd < 0)
        return; /* never begun: the file is another instance's */
    char path[PATH_BYTES];
    struct err_detail detail;
    if (path_make(path, run_dir, name, ".pid", &detail) == ERR_OK)
        unlink(path);
    /* The lock file stays: removing it would let two instances hold two different ones. */
    close(process_lock_fd);
    process_lock_fd = -1;
}
