#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# quickstart.sh - from a fresh Debian 12 to a streamed answer: installs, builds, starts the five
# roles and Redis on the bundled demo model, asks one question, leaves them running.
set -eu
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
root=$(dirname "$here")
cd "$root"
"$here/install.sh" "$here/packages.txt"
[ -f build/build.ninja ] || meson setup build -Dtests=false > /dev/null
ninja -C build --quiet || { echo "the build failed" >&2; exit 1; }
folders=()      # what says where the cluster lives goes to every command; the rest is for `up`
for ((i = 1; i <= $#; i++)); do
    case ${!i} in
        --run_dir=*|--state_dir=*|--run-dir=*|--state-dir=*) folders+=("${!i}") ;;
        --run_dir|--state_dir|--run-dir|--state-dir) j=$((i + 1)); folders+=("${!i}" "${!j}") ;;
    esac
done
"$here/tandem" up "$@"
question="Say the alphabet."
echo
echo "> $question"
"$here/tandem" ${folders[@]+"${folders[@]}"} chat --temperature 0 --effort low "$question"
echo
echo "It goes on running.  Next:"
echo "  ./deploy/tandem chat \"Hello\"      ./deploy/tandem status      ./deploy/tandem down"
[ ${#folders[@]} -eq 0 ] || echo "  (each with ${folders[*]})"
