#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# aarch64.sh [BUILD [packages|build|test]] - cross build for 64-bit Arm; golden, op and unit tests of
# what computes, run under qemu-user.  A word stands for that step alone.  Installs what it needs on Debian 12 where it may, and removes nothing; exit 77
# where it may not.  Development packages cannot be there for two architectures at once: the headers
# are those of this machine, and links stand in for what else an arm64 one would hold.
set -u
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1
build=${1:-build-aarch64} step=${2:-all}
libs=/usr/lib/aarch64-linux-gnu

# module of pkg-config, or - for a library without one; name for the linker; file; package
stand_ins="libsodium|sodium|libsodium.so.23|libsodium23
libcrypto|crypto|libcrypto.so.3|libssl3
libxxhash|xxhash|libxxhash.so.0|libxxhash0
libzstd|zstd|libzstd.so.1|libzstd1
jemalloc|jemalloc|libjemalloc.so.2|libjemalloc2
libevent|event|libevent-2.1.so.7|libevent-2.1-7
libevent_openssl|event_openssl|libevent_openssl-2.1.so.7|libevent-openssl-2.1-7
libzmq|zmq|libzmq.so.5|libzmq5
hiredis|hiredis|libhiredis.so.0.14|libhiredis0.14
libpcre2-8|pcre2-8|libpcre2-8.so.0|libpcre2-8-0
libprotobuf-c|protobuf-c|libprotobuf-c.so.1|libprotobuf-c1
-|http_parser|libhttp_parser.so.2.9|libhttp-parser2.9
cmocka|cmocka|libcmocka.so.0|libcmocka0
jansson|jansson|libjansson.so.4|libjansson4"

missing() {
    local tool library
    for tool in aarch64-linux-gnu-gcc qemu-aarch64-static meson ninja pkg-config; do
        command -v $tool > /dev/null || echo -n " $tool"
    done
    for library in $(cut -d'|' -f3 <<< "$stand_ins") libc.so.6; do
        [ -e $libs/$library ] || [ -e /lib/aarch64-linux-gnu/$library ] || echo -n " $library"
    done
}

install() {
    local as_root=()
    command -v apt-get > /dev/null || return 1
    if [ "$(id -u)" != 0 ]; then sudo -n true 2> /dev/null && as_root=(sudo -n) || return 1; fi
    "${as_root[@]}" dpkg --add-architecture arm64 && "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-remove \
            --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static \
            libc6:arm64 $(cut -d'|' -f4 <<< "$stand_ins" | sed 's/$/:arm64/')
}

# What runs: all tests of ops and of formats with their golden data, loading, and units below them.
# Whole models take too long in emulation.
model="test_formats_tables test_formats_detect test_formats_exl3 test_formats_other test_formats_cut
test_model_load"
units="test_arena test_hash test_json test_rng test_ring test_cpu_pool test_safetensors test_sampler
test_kv_layout test_block_hash test_str"

if [ -n "$(missing)" ] && [ "$step" != build ] && [ "$step" != test ]; then
    echo "installing:$(missing)"
    install > /dev/null || echo "the packages cannot be installed"
fi
if [ -n "$(missing)" ]; then echo "skipped: missing$(missing)"; exit 77; fi
[ "$step" != packages ] || exit 0

mkdir -p "$build-cross" || exit 1
cross=$(readlink -f "$build-cross")
while IFS='|' read -r module name file package; do
    [ -e "$libs/$file" ] && at=$libs || at=/lib/aarch64-linux-gnu
    ln -sf "$at/$file" "$cross/lib$name.so"
    [ "$module" = - ] || printf 'Name: %s\nDescription: stand-in for %s\nVersion: 1\nLibs: -L%s -l%s\n' \
        "$module" "$package" "$cross" "$name" > "$cross/$module.pc"
done <<< "$stand_ins"
cat > "$cross/cross.ini" <<INI
[binaries]
c = 'aarch64-linux-gnu-gcc'
ar = 'aarch64-linux-gnu-ar'
strip = 'aarch64-linux-gnu-strip'
pkgconfig = 'pkg-config'
exe_wrapper = 'qemu-aarch64-static'
[built-in options]
c_args = ['-idirafter', '/usr/include/$(uname -m)-linux-gnu']
c_link_args = ['-L$cross']
[properties]
pkg_config_libdir = '$cross'
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
[ "$step" != build ] || exec ninja -C "$build" $targets # so that a signal reaches it
if [ "$step" != test ]; then ninja -C "$build" $targets || exit 1; fi
# An emulated processor is some twenty times slower.
exec meson test -C "$build" --no-rebuild --print-errorlogs --timeout-multiplier 20 $tests
