/* SPDX-License-Identifier: Apache-2.0 */
/* tandem-keygen FILE - a new CURVE key pair for the nodes of a cluster (`tandem keygen`). */
#include <stdio.h>

#include "lib/net/keys.h"

int main(int argc, char **argv)
{
    struct err_detail detail;
    if (argc != 2 || argv[1][0] == '-' || argv[1][0] == '\0') {
        fprintf(stderr, "usage: tandem keygen FILE\n");
        return 2;
    }
    if (keys_make(argv[1], &detail) != ERR_OK) {
        fprintf(stderr, "tandem keygen: %s\n", detail.text);
        return 1;
    }
    printf("%s: copy it to every node, mode 600; whoever has it belongs to the cluster\n", argv[1]);
    return 0;
}
