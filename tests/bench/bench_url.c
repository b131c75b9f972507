/* SPDX-License-Identifier: Apache-2.0 */
#include <netdb.h>
#include <stdio.h>
#include <string.h>

#include "lib/base/str.h"
#include "tests/bench/bench_http.h"

/* Splits "HOST[:PORT]", HOST maybe in brackets. */
static enum err split_host(const char *text, size_t bytes, char *ret_host, size_t host_bytes,
                           char ret_port[8], struct err_detail *detail)
{
    const char *host = text, *rest = memchr(text, ':', bytes);
    size_t n = rest ? (size_t)(rest - text) : bytes;
    if (bytes > 0 && text[0] == '[') {
        const char *close = memchr(text, ']', bytes);
        if (close == NULL)
            return err_set(detail, ERR_INVALID, "url: no ] after the address");
        host = text + 1;
        n = (size_t)(close - host);
        rest = close + 1 < text + bytes ? close + 1 : NULL;
    }
    if (n == 0 || n >= host_bytes)
        return err_set(detail, ERR_INVALID, "url: no host in it");
    memcpy(ret_host, host, n);
    ret_host[n] = '\0';
    uint64_t port = 80;
    if (rest != NULL &&
        (*rest != ':' || !text_to_u64(rest + 1, bytes - (size_t)(rest + 1 - text), &port) ||
         port == 0 || port > 65535))
        return err_set(detail, ERR_INVALID, "url: the port is not 1 to 65535");
    snprintf(ret_port, 8, "%u", (unsigned)port);
    return ERR_OK;
}

enum err bench_target_parse(const char *url, struct bench_target *ret_target,
                            struct err_detail *detail)
{
    struct bench_target t;
    memset(&t, 0, sizeof(t));
    if (strncmp(url, "http://", 7) != 0)
        return err_set(detail, ERR_UNSUPPORTED, "url: must begin with http://");
    const char *host = url + 7;
    for (const char *c = host; *c; c++)
        if ((unsigned char)*c <= ' ' || (unsigned char)*c >= 127 || strchr("?#@\\", *c) != NULL)
            return err_set(detail, ERR_INVALID, "url: character %d is not allowed in it",
                           (int)(c - url));
    size_t host_bytes = strcspn(host, "/");
    size_t path_bytes = strlen(host + host_bytes);
    const char *path = host + host_bytes;
    while (path_bytes > 0 && path[path_bytes - 1] == '/')
        path_bytes--;
    if (path_bytes >= 3 && memcmp(path + path_bytes - 3, "/v1", 3) == 0)
        path_bytes -= 3;
    if (host_bytes >= sizeof(t.host) || path_bytes >= sizeof(t.prefix))
        return err_set(detail, ERR_TOO_LARGE, "url: host and path have at most 255 bytes each");
    memcpy(t.host, host, host_bytes);
    memcpy(t.prefix, path, path_bytes);
    char name[256], port[8];
    TRY(split_host(host, host_bytes, name, sizeof(name), port, detail));
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
    int e = getaddrinfo(name, port, &hints, &found);
    if (e != 0)
        return err_set(detail, ERR_NOT_FOUND, "url: %s: %s", name, gai_strerror(e));
    memcpy(&t.address, found->ai_addr, found->ai_addrlen);
    t.address_bytes = found->ai_addrlen;
    freeaddrinfo(found);
    *ret_target = t;
    return ERR_OK;
}
