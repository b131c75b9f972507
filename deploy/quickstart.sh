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
"$here/tandem" up "$@"
question="Say the alphabet."
echo
echo "> $question"
"$here/tandem" chat --temperature 0 --effort low "$question"
echo
echo "It goes on running.  Next:"
echo "  ./deploy/tandem chat \"Hello\"      ./deploy/tandem status      ./deploy/tandem down"
