#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# aarch64.sh [BUILD] - cross build for 64-bit Arm; golden, op and unit tests of what computes, run
# under qemu-user.  Exit 77 where compiler, emulator or arm64 libraries are not installed:
#   dpkg --add-architecture arm64 && apt-get update && apt-get install $(aarch64.sh --packages)
# Three development packages cannot be installed for two architectures at once.  What is built here
# needs none of their headers, so links to the arm64 run-time libraries stand in for them.
set -u
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1
packages="gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static libc6:arm64 libsodium-dev:arm64
libssl-dev:arm64 libxxhash-dev:arm64 libzstd-dev:arm64 libcmocka-dev:arm64 libjansson-dev:arm64
libzmq3-dev:arm64 libprotobuf-c-dev:arm64 libhiredis-dev:arm64 libpcre2-dev:arm64
libjemalloc2:arm64 libevent-2.1-7:arm64 libevent-openssl-2.1-7:arm64 libhttp-parser2.9:arm64"
if [ "${1:-}" = --packages ]; then echo $packages; exit 0; fi
build=${1:-build-aarch64}
libs=/usr/lib/aarch64-linux-gnu

# What runs: all tests of ops, those of formats and loading, golden vectors, and units below them.
model="test_formats_tables test_formats_detect test_formats_exl3 test_formats_other test_formats_cut
test_model_load test_model_golden"
units="test_arena test_hash test_json test_rng test_ring test_cpu_pool test_safetensors test_sampler
test_kv_layout test_block_hash test_str"

missing=""
for tool in aarch64-linux-gnu-gcc qemu-aarch64-static meson ninja pkg-config; do
    command -v $tool > /dev/null || missing="$missing $tool"
done
for library in libsodium.so libxxhash.so libcmocka.so libjansson.so libzmq.so libjemalloc.so.2; do
    [ -e $libs/$library ] || missing="$missing $libs/$library"
done
if [ -n "$missing" ]; then echo "skipped: missing$missing"; exit 77; fi

mkdir -p "$build-cross" || exit 1
cross=$(readlink -f "$build-cross")
stand_in() {    # stand_in MODULE LIBRARY RUNTIME
    ln -sf "$libs/$3" "$cross/lib$2.so"
    printf 'Name: %s\nDescription: stand-in\nVersion: 2.1\nLibs: -L%s -l%s\n' "$1" "$cross" "$2" \
        > "$cross/$1.pc"
}
stand_in jemalloc jemalloc libjemalloc.so.2
stand_in libevent event libevent-2.1.so.7
stand_in libevent_openssl event_openssl libevent_openssl-2.1.so.7
ln -sf "$(find $libs -name 'libhttp_parser.so.*' | sort | tail -n 1)" "$cross/libhttp_parser.so"
cat > "$cross/cross.ini" <<INI
[binaries]
c = 'aarch64-linux-gnu-gcc'
ar = 'aarch64-linux-gnu-ar'
strip = 'aarch64-linux-gnu-strip'
pkgconfig = 'pkg-config'
exe_wrapper = 'qemu-aarch64-static'
[built-in options]
c_link_args = ['-L$cross']
[properties]
pkg_config_libdir = '$libs/pkgconfig:/usr/share/pkgconfig:$cross'
[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'cortex-a76'
endian = 'little'
INI

[ -f "$build/build.ninja" ] || meson setup "$build" --cross-file "$cross/cross.ini" -Dtests=true ||
    exit 1
targets="" tests=""
for name in $(cut -d'|' -f1 tests/ops/list.txt); do
    targets="$targets tests/ops/$name" tests="$tests $name"
done
for name in $model; do targets="$targets tests/model/$name" tests="$tests $name"; done
for name in $units; do targets="$targets tests/unit/$name" tests="$tests $name"; done
rm -f "$build/meson-logs/testlog.json" # an older result must not count
ninja -C "$build" $targets || exit 1
# An emulated processor is some twenty times slower.
exec meson test -C "$build" --no-rebuild --print-errorlogs --timeout-multiplier 20 $tests
