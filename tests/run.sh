#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh [--long] - installs what it needs on Debian 12, builds, runs every suite that needs no GPU.
# The last line is `N passed, N failed, N skipped`; the exit code is 0 only when nothing failed.
#   --long   also the full counts of the fault and equality suites (resumes by seed: see docs/testing.md)
set -u
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1
long=0
for argument in "$@"; do
    case $argument in
        --long) long=1 ;;
        *) echo "usage: tests/run.sh [--long]" >&2; exit 2 ;;
    esac
done
export TANDEM_LONG=$long
passed=0 failed=0 skipped=0
failures=()
jobs=$(nproc)

finish() {
    if [ ${#failures[@]} -gt 0 ]; then printf 'failed: %s\n' "${failures[@]}"; fi
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
    exit
}

broken() { echo "$1"; failed=$((failed + 1)); failures+=("$1"); finish; }

# step NAME COMMAND...: a build step; its output is shown only when it fails
step() {
    local name=$1 log; shift
    log=$(mktemp)
    if "$@" > "$log" 2>&1; then rm -f "$log"; else tail -n 60 "$log"; rm -f "$log"; broken "$name"; fi
}

# count BUILD: adds the results of the last `meson test` in BUILD, one line of JSON a test
count() {
    local result name
    while IFS=$'\t' read -r result name; do
        case $result in
            OK|EXPECTEDFAIL) passed=$((passed + 1)) ;;
            SKIP) skipped=$((skipped + 1)); echo "skipped: $name" ;;
            *) failed=$((failed + 1)); failures+=("$1: $name ($result)") ;;
        esac
    done < <(python3 -c '
import json, sys
for line in open(sys.argv[1]):
    test = json.loads(line)
    print(test["result"] + "\t" + test["name"])' "$1/meson-logs/testlog.json")
}

suite() {   # suite BUILD SUITE...: runs suites of a build and counts them
    local build=$1; shift
    local flags=()
    for s in "$@"; do flags+=(--suite "$s"); done
    run_tests "$build" "${flags[@]}"
}

run_tests() {   # run_tests BUILD ARGUMENTS OF MESON TEST...
    local build=$1; shift
    rm -f "$build/meson-logs/testlog.json"
    meson test -C "$build" --no-rebuild --print-errorlogs "$@" || true
    [ -f "$build/meson-logs/testlog.json" ] || broken "$build: no test ran"
    count "$build"
}

configure() {   # configure BUILD OPTIONS...
    local build=$1; shift
    if [ -f "$build/build.ninja" ]; then step "configure $build" meson configure "$build" "$@"; else
        step "configure $build" meson setup "$build" "$@"; fi
}

echo "== packages"
step "packages" ./deploy/install.sh deploy/packages.txt tests/packages.txt

echo "== build"
configure build -Dtests=true
step "build" ninja -C build -j "$jobs"
configure build-asan -Dtests=true -Db_sanitize=address,undefined -Dbuildtype=debugoptimized
step "build with sanitizers" ninja -C build-asan -j "$jobs"
# The parts that share memory between threads, under TSan.
threaded=(test_ring test_tap_ring test_cpu_pool test_tokenizer test_log)
configure build-tsan -Dtests=true -Db_sanitize=thread
step "build with TSan" ninja -C build-tsan -j "$jobs" "${threaded[@]/#/tests/unit/}"
if command -v clang > /dev/null; then
    export CC=clang
    configure build-fuzz -Dtests=true -Dfuzzing=true -Db_sanitize=address,undefined -Db_lundef=false
    unset CC
    step "build fuzzers" ninja -C build-fuzz -j "$jobs" fuzzers
fi

export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0:detect_stack_use_after_return=0
export TSAN_OPTIONS=halt_on_error=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
echo "== lint, units, model"
suite build lint unit ops model
echo "== units under ASan and UBSan"
suite build-asan unit ops
echo "== threads under TSan"
run_tests build-tsan "${threaded[@]}"
echo "== cluster"
suite build cluster

echo "== fuzzers"
fuzz_seconds=$([ "$long" = 1 ] && echo 300 || echo 10)
if [ -d build-fuzz ]; then
    work=$(mktemp -d)
    while IFS='|' read -r name _; do
        [ -n "$name" ] || continue
        mkdir -p "$work/$name"
        corpus=("$work/$name")
        [ -d "tests/fuzz/corpus/$name" ] && corpus+=("tests/fuzz/corpus/$name")
        if "build-fuzz/tests/fuzz/$name" -max_total_time="$fuzz_seconds" -timeout=10 -rss_limit_mb=2048 \
            -artifact_prefix="$work/" -verbosity=0 "${corpus[@]}" > "$work/$name.log" 2>&1; then
            passed=$((passed + 1)); echo "ok $name"
        else
            tail -n 40 "$work/$name.log"; failed=$((failed + 1)); failures+=("$name")
            cp "$work"/crash-* "$work"/timeout-* "$work"/oom-* build-fuzz/ 2>/dev/null
        fi
    done < tests/fuzz/list.txt
    rm -rf "$work"
else
    skipped=$((skipped + 1)); echo "skipped: fuzzers (no clang)"
fi
finish
