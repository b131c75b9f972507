#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""House rules that a machine can check: lint.py layers|tidy|format|headers|commits.

layers   include table of docs/style.md, purity of all but the shells, outside libraries by file
tidy     SPDX line, size, names, words, every source named in a meson.build
format   clang-format 14 agrees
headers  each header compiles alone
commits  subject lines of the commits since the last merge base
"""
import os
import re
import shutil
import subprocess
import sys

ROOT = os.environ.get("TANDEM_SOURCE_ROOT") or os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

PROCESSES = ["gateway", "router", "worker", "drafter", "kvmgr"]
ALLOWED = {
    "lib/base": ["lib/base"],
    "lib/text": ["lib/base", "lib/text"],
    "lib/net": ["lib/base", "lib/net"],
    "proto": ["lib/base", "proto"],
    "kernels": ["lib/base", "kernels"],
    "lib/model/tool": ["lib/base", "lib/model", "lib/model/tool", "lib/text", "kernels"],
    "lib/model": ["lib/base", "kernels", "lib/model"],
    "gateway": ["lib/base", "lib/net", "lib/text", "proto", "gateway"],
    "router": ["lib/base", "lib/net", "proto", "router"],
    "kvmgr": ["lib/base", "lib/net", "proto", "kvmgr"],
    "worker": ["lib/base", "lib/net", "proto", "kernels", "lib/model", "worker"],
    "drafter": ["lib/base", "lib/net", "proto", "kernels", "lib/model", "drafter"],
}
# Outside libraries: header pattern -> files (regular expressions) that may include it.
OUTSIDE = [
    (r"^(sodium|openssl/(sha|evp))", [r"lib/base/hash\.c"]),
    (r"^openssl/", [r"gateway/gw_tls.*\.c", r"lib/base/hash\.c"]),
    (r"^xxhash", [r"lib/base/.*"]),
    (r"^jemalloc", [r"lib/base/.*"]),
    (r"^pcre2", [r"lib/text/.*"]),
    (r"^event2/bufferevent_ssl", [r"gateway/.*", r"lib/net/.*"]),
    (r"^event2/", [r"lib/net/.*", r"gateway/gw_http.*", r"gateway/gw_shell.*", r"gateway/gw_sse.*"]),
    (r"^zmq", [r"lib/net/(bus|peers|keys|zsock)\.c"]),
    (r"^hiredis", [r"lib/net/redis.*\.c"]),
    (r"^(protobuf-c|proto/.*\.pb-c|.*\.pb-c)", [r"proto/.*"]),
    (r"^http_parser", [r"gateway/gw_http.*\.c"]),
    (r"^zstd", [r"kvmgr/km_store\.c", r"lib/model/tool/.*"]),
    (r"^(immintrin|arm_neon|x86intrin|emmintrin)", [r"kernels/cpu/.*", r"kernels/op_cpu\.c"]),
    (r"^(cuda|nccl)", [r"kernels/cuda/.*", r"worker/wk_fabric_nccl\.c", r"worker/.*cuda.*"]),
    (r"^(cmocka|jansson)", [r"tests/.*"]),
]
CORE_FORBIDDEN = re.compile(
    r"lib/base/(clock|log)\.h|lib/net/|proto/(wire|wire_check|kv_layout)\.h|pthread|sys/|unistd")
# A role's files are pure, but for main.c, its shell and these, which exist to touch the world.
WORLD = [
    (r"(main|.*_shell.*)\.[ch]", "the shell"),
    (r"gateway/gw_http(_write|_conn|_chunk)?\.[ch]|gateway/gw_exchange\.c", "connections of clients"),
    (r"gateway/gw_(status|peers)\.c|kvmgr/km_map\.c", "Redis"),
    (r"gateway/gw_tokenize\.[ch]|worker/wk_exec(_run|_group|_state)?\.[ch]", "threads of their own"),
    (r"gateway/gw_checkpoint\.c|worker/wk_plan_dump\.c", "files read at start, written at a fault"),
    (r"worker/wk_(fabric|link|probe|canary|nccl|ranks|follower).*\.[ch]", "ranks, devices, and how long they take"),
    (r"kvmgr/km_(arena|audit|epoch|store).*\.[ch]", "arena and tier files"),
    (r"worker/wk_taps\.[ch]|drafter/df_model\.[ch]", "the tap ring's file; memory of contexts"),
]
WORLD_CALLS = re.compile(r"\b(time|gettimeofday|clock_\w+|rand|random|srand|rng_system|socket|connect|"
                         r"open|fopen|mmap|getenv|sleep|usleep|nanosleep|log_(?!site)\w+)\s*\(")
# Names that a client sees come from the system's randomness; nothing else depends on them.
WORLD_PLACES = {"gw_request_id_make"}
# Memory is taken when a thing is made and given back when it is ended ...
MEMORY_CALLS = re.compile(r"\b(malloc|calloc|realloc|free|mem_take\w*|mem_give)\s*\(")
MEMORY_PLACES = re.compile(r"(create|destroy|init|fini|open|close|take|give)(_\w+)?$|"
                           # asked by tests alone; the tables of another arena, at its attach
                           r"^km_(pool|index)_audit$|^wk_tables_blocks$")
# ... except by text of one client's request, whose size nobody knows before: bounded by its parser.
MEMORY_TEXT = re.compile(r"gateway/gw_(answer|chat|parse|http_head|openai)\w*\.c|kvmgr/km_map_image\.c")
CORE_ALLOWED_PROTO = {"proto/msg.h", "proto/block_hash.h"}
# Spelled apart, so that this file does not name them.
WORDS = re.compile(r"\b(" + "|".join(["TO" "DO", "FIX" "ME", "X" "XX", "HA" "CK", "st" "ub",
                                     "not imple" "mented", "place" "holder"]) + r")\b", re.I)
DRAWERS = re.compile(r"(^|/)[a-z]*_?(utils?|misc|common|manager|helpers?)\.[ch]$")
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.M)


def tracked():
    try:
        out = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"],
                             capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        out = [os.path.relpath(os.path.join(d, f), ROOT)
               for d, _, names in os.walk(ROOT) for f in names if "/build" not in d]
    return sorted(p for p in out if p and os.path.isfile(os.path.join(ROOT, p)))


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8", errors="replace") as f:
        return f.read()


def sources(suffixes=(".c", ".h", ".cu", ".cuh")):
    return [p for p in tracked() if p.endswith(suffixes)]


def folder_of(path):
    for folder in sorted(ALLOWED, key=len, reverse=True):
        if path.startswith(folder + "/"):
            return folder
    return None


def is_pure(path):
    if path.split("/", 1)[0] not in PROCESSES or path.endswith(".def"):
        return False
    return not any(re.fullmatch(pattern, path) or re.fullmatch(pattern, path.rsplit("/", 1)[1])
                   for pattern, _ in WORLD)


def functions(text):
    """(name, body) of the functions at the outermost level."""
    for match in re.finditer(r"^[a-z][^;{}#]*?\b(\w+)\([^;{}]*\)\n\{\n(.*?)^\}", text, re.M | re.S):
        yield match.group(1), match.group(2)


def pure_calls(path, text):
    faults = []
    code = re.sub(r"/\*.*?\*/|\"(\\\\.|[^\"])*\"", "", text, flags=re.S)
    for name, body in functions(code):
        for call in WORLD_CALLS.findall(body) if name not in WORLD_PLACES else []:
            faults.append(f"{path}: {name}() calls {call}(): this file is pure")
        if not MEMORY_PLACES.search(name) and not MEMORY_TEXT.fullmatch(path):
            for call in sorted(set(MEMORY_CALLS.findall(body))):
                faults.append(f"{path}: {name}() calls {call}(): memory is taken at create")
    return faults


def layers():
    faults = []
    for path in sources((".c", ".h", ".cu", ".cuh", ".def")):
        text = read(path)
        folder = folder_of(path)
        for kind, target in INCLUDE.findall(text):
            where = f"{path}: includes {target}"
            if target.endswith(".c"):
                faults.append(where + ": a .c file")
            if target.startswith("tests/") and not path.startswith("tests/"):
                faults.append(where + ": nothing includes tests/")
            target_folder = folder_of(target)
            if kind == '"' and folder and target_folder and target_folder not in ALLOWED[folder]:
                faults.append(f"{where}: {folder} may not include {target_folder}")
            if kind == '"' and folder and not target_folder and not target.endswith(".pb-c.h"):
                faults.append(where + ": not root-relative")
            if folder:
                for pattern, allowed in OUTSIDE:
                    if re.search(pattern, target):
                        if not any(re.fullmatch(a, path) for a in allowed):
                            faults.append(where + ": library belongs elsewhere")
                        break
            if is_pure(path):
                if CORE_FORBIDDEN.search(target):
                    faults.append(where + ": this file is pure")
                core = re.search(r"_core[a-z_]*\.[ch]$", path)
                if core and target.startswith("proto/") and target not in CORE_ALLOWED_PROTO:
                    faults.append(where + ": cores see only msg.h and block_hash.h")
        if is_pure(path) and path.endswith(".c"):
            faults += pure_calls(path, text)
    return faults


def tidy():
    faults = []
    builds = "\n".join(read(p) for p in tracked() if p.endswith("meson.build"))
    lists = "\n".join(read(p) for p in tracked() if p.endswith("list.txt"))
    for path in tracked():
        size = os.path.getsize(os.path.join(ROOT, path))
        if size > 20_000_000:
            faults.append(f"{path}: {size} bytes")
        is_source = path.endswith((".c", ".h", ".cu", ".cuh", ".def", ".proto", ".py", ".sh",
                                   "meson.build")) or path in ("deploy/tandem", ".ci/run")
        if not is_source:
            continue
        text = read(path)
        lines = text.split("\n")
        if not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]):
            faults.append(f"{path}: no SPDX line")
        if path.startswith("tests/lint/"):
            continue
        for number, line in enumerate(lines, 1):
            if "Not Implemented\"" in line:      # the reason phrase of status 501
                continue
            if WORDS.search(line):
                faults.append(f"{path}:{number}: unfinished work: {line.strip()[:60]}")
            if path.endswith((".c", ".h")) and len(line) > 100:
                faults.append(f"{path}:{number}: over 100 columns")
            if line != line.rstrip():
                faults.append(f"{path}:{number}: trailing space")
        if path.endswith((".c", ".h", ".cu", ".cuh")):
            if len(lines) > 1000:
                faults.append(f"{path}: {len(lines)} lines, split by idea")
            if DRAWERS.search(path):
                faults.append(f"{path}: a drawer's name")
            if path.endswith(".h") and "/golden/" not in path:
                guard = re.sub(r"[^A-Z0-9]", "_", path.upper())
                if f"#ifndef {guard}\n#define {guard}" not in text:
                    faults.append(f"{path}: guard is not {guard}")
        if path.endswith(".c"):
            name = os.path.basename(path)
            if name not in builds and os.path.splitext(name)[0] not in lists:
                faults.append(f"{path}: named in no meson.build")
    return faults


def clang_format():
    tool = shutil.which("clang-format-14") or shutil.which("clang-format")
    if not tool:
        print("clang-format is missing")
        sys.exit(77)
    files = [p for p in sources((".c", ".h")) if not p.endswith("lib/base/metrics.h")]
    faults = []
    for start in range(0, len(files), 40):
        run = subprocess.run([tool, "--dry-run", "-Werror", "--style=file"] +
                             files[start:start + 40], cwd=ROOT, capture_output=True, text=True,
                             check=False)
        if run.returncode:
            faults += sorted(set(line.split(":")[0] + ": not clang-formatted"
                                 for line in run.stderr.split("\n") if "error:" in line))
    return faults


def headers():
    faults = []
    for path in sources((".h",)):
        # What kernels/cpu includes is compiled per instruction set.
        flags = ["-mavx2", "-mfma", "-mf16c", "-DOP_ISA=avx2"] if path.startswith("kernels/cpu/") \
            and os.uname().machine == "x86_64" else []
        run = subprocess.run(["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror",
                              *flags, "-I.", "-fsyntax-only", "-x", "c", "-"], cwd=ROOT,
                             input=f'#include "{path}"\n', capture_output=True, text=True,
                             check=False)
        if run.returncode:
            if ".pb-c.h" in run.stderr:
                continue
            faults.append(f"{path}: does not compile alone: {run.stderr.splitlines()[0]}")
    return faults


# Published with a subject of 82 characters before the lint had run; history is not rewritten, so it
# stands here by its full name.  Nothing else is let off.
COMMITS_PUBLISHED = {"3039d1bec0b0bd87b144ccee3ed621eb5d589f6f"}


def commits():
    run = subprocess.run(["git", "-C", ROOT, "log", "--no-merges", "-n", "200", "--format=%H%x09%s"],
                         capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(77)
    faults = []
    for line in run.stdout.splitlines():
        name, subject = line.split("\t", 1)
        if name in COMMITS_PUBLISHED:
            continue
        if len(subject) > 72 or subject.endswith(".") or not re.match(r"[a-z0-9_/,. -]+: \S", subject):
            faults.append(f"{name[:7]}: subject is not `area: imperative`: {subject}")
    return faults


CHECKS = {"layers": layers, "tidy": tidy, "format": clang_format, "headers": headers,
          "commits": commits}


def main():
    names = sys.argv[1:] or list(CHECKS)
    bad = 0
    for name in names:
        faults = CHECKS[name]()
        for fault in faults:
            print(fault)
        bad += len(faults)
    print(f"{bad} faults")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
