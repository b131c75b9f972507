/* SPDX-License-Identifier: Apache-2.0 */
/* lib/model/tool/manifest.h - what a checkpoint's files and tensors are, byte for byte.
 *
 * Start-up only; hashing is spread over the context's threads.  Text form: tandem-manifest.json. */
#ifndef LIB_MODEL_TOOL_MANIFEST_H
#define LIB_MODEL_TOOL_MANIFEST_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/op_types.h"
#include "lib/base/err.h"
#include "lib/base/hash.h"
#include "lib/model/tool/file_map.h"

struct safetensors;
struct str;

struct manifest_file {
    uint64_t bytes;
    uint8_t sha256[32];
};

/* What lies in a directory now. */
struct manifest {
    struct file_list list;
    struct manifest_file *files; /* [list.count] */
    struct safetensors *set;
    struct hash128 *hashes; /* [safetensors_count(set)] */
    struct hash128 fingerprint;
    char model_type[64];
    char licence[128]; /* "" if none is stated */
};

/* The files alone; then the tensors, which need a checkpoint that can be opened. */
MUST_USE enum err manifest_read_files(const char *directory, const struct op_ctx *ctx,
                                      struct manifest *ret_manifest, struct err_detail *detail);
MUST_USE enum err manifest_read_tensors(const char *directory, const struct op_ctx *ctx,
                                        struct manifest *m, struct err_detail *detail);
void manifest_fini(struct manifest *m);

/* What the manifest says of the whole, beside files and tensors. */
struct manifest_titles {
    char quantization[256], name[512], fingerprint[33];
};
void manifest_titles(const struct manifest *m, struct manifest_titles *ret_titles);

void manifest_write(const struct manifest *m, struct str *out);

/* Prints every difference between the manifest's text and what lies there; *ret_faults counts
 * them.  set_fault: why the tensors could not be read, NULL if they were. */
MUST_USE enum err manifest_check(const char *text, uint64_t bytes, const struct manifest *m,
                                 const char *set_fault, uint32_t *ret_faults,
                                 struct err_detail *detail);

/* Verifies a directory against its own manifest: prints, counts. */
MUST_USE enum err manifest_verify(const char *directory, const struct op_ctx *ctx,
                                  uint32_t *ret_faults, struct err_detail *detail);
/* Makes the manifest of a directory and writes it there. */
MUST_USE enum err manifest_store(const char *directory, const char *destination,
                                 const struct op_ctx *ctx, struct err_detail *detail);

#endif
