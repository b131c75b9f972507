/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "lib/base/check.h"
#include "lib/model/tool/tool.h"

static const char usage[] =
    "usage: tandem-model COMMAND DIR [options]\n"
    "\n"
    "  inspect DIR|FILE           what the checkpoint holds: formats, tensors, fingerprint\n"
    "  manifest DIR               write tandem-manifest.json: hashes of tensors and files\n"
    "  verify DIR                 compare with the manifest; names what differs\n"
    "  archive DIR DEST           copy with manifest and checks; goes on where it was\n"
    "      [--drafter DIR] [--threads N]\n"
    "  eval DIR --golden DIR      compare with golden vectors; one JSON line per case\n"
    "      [--numerics exact|fast] [--slice-rows N] [--slice-layers N] [--threads N]\n"
    "  compare A B --texts FILE   divergence and agreement, a JSON line per text\n"
    "      [--kld-max D] [--identical-min SHARE] [--numerics exact|fast] [--threads N]\n"
    "      [--tokens-max N]\n"
    "  generate DIR               continue a text\n"
    "      (--prompt TEXT | --ids FILE) [--temperature T] [--top-p P] [--seed N]\n"
    "      [--max-tokens N] [--spec off|fixed:K|ngram:K] [--numerics exact|fast]\n"
    "      [--threads N] [--json]\n"
    "  quantize IN OUT            write the checkpoint in another format; goes on where it was\n"
    "      --format exl3|nvfp4|mxfp8|fp8 [--bits K] [--layers experts|all] [--calib FILE]\n"
    "      [--calib-rows N] [--codebook mcg|mul1|3inst] [--beam B] [--seed N] [--threads N]\n"
    "      [--shard-bytes N]\n"
    "  synth DIR --params N       a checkpoint of random weights of a given size, for speed\n"
    "      [--format exl3|nvfp4|mxfp8|fp8|bf16] [--bits K] [--codebook C] [--seed N]\n"
    "      [--shard-bytes N]\n";

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } commands[] = {
        {"archive", tool_archive},   {"compare", tool_compare}, {"eval", tool_eval},
        {"generate", tool_generate}, {"inspect", tool_inspect}, {"manifest", tool_manifest},
        {"quantize", tool_quantize}, {"synth", tool_synth},     {"verify", tool_verify}};
    if (argc >= 2 && strcmp(argv[1], "--version") == 0) {
        printf("tandem-model %s\n", TANDEM_VERSION);
        return 0;
    }
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0) {
        fputs(usage, argc < 2 ? stderr : stdout);
        return argc < 2 ? 2 : 0;
    }
    for (size_t i = 0; i < ARRAY_COUNT(commands); i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 2, argv + 2);
    fprintf(stderr, "tandem-model: unknown command %s\n%s", argv[1], usage);
    return 2;
}
