#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh [--long] - installs what it needs on Debian 12, builds, runs every suite that needs no GPU.
# The last line is `N passed, N failed, N skipped`; the exit code is 0 only when nothing failed.
#   --long   also the full counts of the fault and equality suites.  What has passed is kept in
#            build/long-state-COMMIT; an interrupted run, started again, goes on after it.
set -u
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1
long=0
for argument in "$@"; do
    case $argument in
        --long) long=1 ;;
        *) echo "usage: tests/run.sh [--long]" >&2; exit 2 ;;
    esac
done
passed=0 failed=0 skipped=0
failures=()
measured=()
state=""
jobs=$(nproc)
builder="" builder_log=""
said=$(mktemp)      # by tests that failed: once more at the end, where a log that is cut keeps it

leave() {
    if [ -n "$builder" ]; then kill "$builder" 2> /dev/null; wait "$builder"; fi
    rm -f "$said"
    [ -z "$builder_log" ] || rm -f "$builder_log" "$builder_log.name"
}
trap leave EXIT
trap 'exit 130' INT TERM HUP

finish() {
    if [ "$long" = 1 ] && [ ${#measured[@]} -gt 0 ]; then
        echo "== for docs/measurements.md ($(uname -m), $(nproc) processors)"
        printf '| %s |\n' "${measured[@]}"
    fi
    [ ! -s "$said" ] || cat "$said"
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

# build_others: the builds that the first suites do not need, by what those leave of the processors.
# Most of a cluster test is waiting.
build_others() {
    local child=0
    renice -n 19 "$BASHPID" > /dev/null
    trap '[ "$child" = 0 ] || kill "$child"; exit 1' TERM INT HUP
    beside() {
        echo "$1" > "$builder_log.name"; shift
        "$@" > "$builder_log" 2>&1 &
        child=$!
        wait "$child" || exit 1
        child=0
    }
    beside "build with sanitizers" ninja -C build-asan -j "$jobs" suite_unit suite_ops
    beside "build with TSan" ninja -C build-tsan -j "$jobs" "${threaded[@]/#/tests/unit/}"
    [ ! -d build-fuzz ] || beside "build fuzzers" ninja -C build-fuzz -j "$jobs" fuzzers
    [ "$arm" != 0 ] || beside "cross build for 64-bit Arm" ./tests/aarch64.sh build-aarch64 build
}

# built: what build_others makes is there, or the run ends
built() {
    [ -n "$builder" ] || return
    if wait "$builder"; then builder=""; return; fi
    builder=""
    tail -n 60 "$builder_log"
    broken "$(cat "$builder_log.name")"
}

# count BUILD: adds the results of the last `meson test` in BUILD, one line of JSON a test
count() {
    local result name
    while IFS=$'\t' read -r result name; do
        case $result in
            OK|EXPECTEDFAIL) passed=$((passed + 1)) ;;
            measured:) measured+=("$name") ;;
            SKIP) skipped=$((skipped + 1)); echo "skipped: $name" ;;
            *) failed=$((failed + 1)); failures+=("$1: $name ($result)") ;;
        esac
    done < <(python3 -c '
import json, sys
for line in open(sys.argv[1]):
    test = json.loads(line)
    print(test["result"] + "\t" + test["name"])
    out = test.get("stdout", "").splitlines()
    for said in out:
        if said.startswith("measured: "):
            print("measured:\t" + said[10:])
    if test["result"] not in ("OK", "EXPECTEDFAIL", "SKIP"):
        with open(sys.argv[2], "a") as failures:
            lines = ["== said by " + test["name"]] + out[-40:] + test.get("stderr", "").splitlines()[-20:]
            failures.write("\n".join(line[:400] for line in lines) + "\n")' "$1/meson-logs/testlog.json" "$said" || printf 'ERROR\ttestlog.json cannot be read\n')
}

# once NAME COMMAND...: in the long run a step that has passed before is counted and not repeated
once() {
    local name=$1 counted before_p=$passed before_f=$failed before_s=$skipped; shift
    counted=$([ -n "$state" ] && sed -n "s/^step $name\t//p" "$state" 2>/dev/null | tail -n 1)
    if [ -n "$counted" ]; then
        echo "passed before: $name"
        passed=$((passed + ${counted% *})); skipped=$((skipped + ${counted#* }))
        return
    fi
    "$@"
    if [ -n "$state" ] && [ "$failed" = "$before_f" ]; then
        printf 'step %s\t%s %s\n' "$name" $((passed - before_p)) $((skipped - before_s)) >> "$state"
    fi
}

# rounds ARGUMENTS...: tests/rounds.py, counted by what it prints
rounds() {
    local line failed_before=$failed
    while IFS= read -r line; do
        case $line in
            "rounds.py ended"*)     # with a failure that it has named, or by itself
                [ "$failed" != "$failed_before" ] || broken "$line" ;;
            "ok "*) passed=$((passed + 1)); echo "$line" ;;
            "FAILED "*) failed=$((failed + 1)); failures+=("${line#FAILED }"); echo "$line" ;;
            "measured: "*) measured+=("${line#measured: }") ;;
            *) echo "$line" ;;
        esac
    done < <(python3 tests/rounds.py "$@" 2>&1 || echo "rounds.py ended with $?")
}

suite() {   # suite BUILD SUITE...: runs suites of a build and counts them
    local build=$1; shift
    local flags=()
    for s in "$@"; do flags+=(--suite "$s"); done
    run_tests "$build" "${flags[@]}"
}

run_tests() {   # run_tests BUILD ARGUMENTS OF MESON TEST...
    local build=$1 rc=0 before=$failed; shift
    rm -f "$build/meson-logs/testlog.json"
    meson test -C "$build" --no-rebuild --print-errorlogs "$@" || rc=$?
    [ -f "$build/meson-logs/testlog.json" ] || broken "$build: no test ran"
    count "$build"
    # ended in the middle: what did not run is in no line
    [ "$rc" = 0 ] || [ "$failed" != "$before" ] || broken "$build: meson test ended with $rc"
}

configure() {   # configure BUILD OPTIONS...
    local build=$1; shift
    if [ -f "$build/build.ninja" ]; then step "configure $build" meson configure "$build" "$@"; else
        step "configure $build" meson setup "$build" "$@"; fi
}

echo "== packages"
step "packages" ./deploy/install.sh deploy/packages.txt tests/packages.txt
./tests/aarch64.sh build-aarch64 packages
arm=$?

echo "== build"
configure build -Dtests=true
step "build" ninja -C build -j "$jobs"
configure build-asan -Dtests=true -Db_sanitize=address,undefined -Dbuildtype=debugoptimized
# The parts that share memory between threads, under TSan.
threaded=(test_ring test_tap_ring test_cpu_pool test_tokenizer test_log)
configure build-tsan -Dtests=true -Db_sanitize=thread
if command -v clang > /dev/null; then
    export CC=clang
    configure build-fuzz -Dtests=true -Dfuzzing=true -Db_sanitize=address,undefined -Db_lundef=false
    unset CC
fi
builder_log=$(mktemp)
build_others &
builder=$!

if [ "$long" = 1 ]; then
    # One file per state of the sources: a changed tree begins anew.
    key=$(git rev-parse --short=12 HEAD 2>/dev/null || echo tree)
    changes=$(git diff HEAD 2>/dev/null | sha256sum | cut -c1-8)
    [ -z "$(git status --porcelain -uno 2>/dev/null)" ] || key=$key-$changes
    state=$PWD/build/long-state-$key
    [ -e "$state" ] && echo "== goes on after what has passed: $state"
fi

export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0:detect_stack_use_after_return=0
export TSAN_OPTIONS=halt_on_error=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
echo "== lint, units, model"
once units suite build lint unit ops model
echo "== cluster"
if [ "$long" = 1 ]; then    # file by file, so that less is repeated
    for file in tests/cluster/test_*.py; do
        name=cluster_$(basename "${file#*/test_}" .py)
        once "$name" run_tests build "$name"
    done
    echo "== seeds"
    rounds seeds build "$state"
else
    run_tests build --suite cluster --no-suite clock --num-processes $((jobs < 4 ? jobs : 4))
fi
built
if [ "$long" = 0 ]; then echo "== cluster, judged by the clock"; run_tests build --suite clock; fi
echo "== units under ASan and UBSan"
once sanitizers suite build-asan unit ops
echo "== threads under TSan"
once threads run_tests build-tsan "${threaded[@]}"

echo "== 64-bit Arm, emulated"
if [ "$arm" = 0 ]; then
    rm -f build-aarch64/meson-logs/testlog.json     # an older result must not count
    ./tests/aarch64.sh build-aarch64 test
    if [ -f build-aarch64/meson-logs/testlog.json ]; then count build-aarch64
    else broken "tests for 64-bit Arm"; fi
else
    skipped=$((skipped + 1)); echo "skipped: 64-bit Arm"
fi

echo "== fuzzers"
if [ -d build-fuzz ]; then
    if [ "$long" = 1 ]; then rounds fuzz build-fuzz 120 "$state"; else rounds fuzz build-fuzz 10; fi
else
    skipped=$((skipped + 1)); echo "skipped: fuzzers (no clang)"
fi
finish
