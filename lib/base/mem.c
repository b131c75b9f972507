/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/base/mem.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "lib/base/check.h"
#include "lib/base/err.h"

#define MEM_ALIGN      64u /* one cache line, one AVX-512 register */
#define MEM_HUGE       ((size_t)2 << 20)
#define MEM_HUGE_LEAST (2 * MEM_HUGE) /* below, huge pages would save too few faults */

void *mem_take(size_t bytes)
{
    size_t padded = bytes == 0 ? MEM_ALIGN : bytes;
    size_t align = padded >= MEM_HUGE_LEAST ? MEM_HUGE : MEM_ALIGN;
    void *memory = NULL;
    if (posix_memalign(&memory, align, padded) != 0)
        die("out of memory: %zu bytes wanted at start", bytes);
    CHECK((uintptr_t)memory % align == 0);
    /* One fault for 2 MiB and not 512, which in a virtual machine take longer than to fill them.
     * A kernel without huge pages only says no. */
    if (align == MEM_HUGE)
        (void)madvise(memory, padded / MEM_HUGE * MEM_HUGE, MADV_HUGEPAGE);
    /* Touching every page now means that running out shows at start, not under load. */
    memset(memory, 0, padded);
    return memory;
}

void *mem_take_array(size_t count, size_t item_bytes)
{
    size_t bytes;
    CHECK(item_bytes > 0);
    if (__builtin_mul_overflow(count, item_bytes, &bytes))
        die("out of memory: %zu items of %zu bytes wanted at start", count, item_bytes);
    return mem_take(bytes);
}

void mem_give(void *pointer)
{
    free(pointer);
}
