#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# install.sh LIST... - installs the Debian packages named in the lists that are not there yet.
set -eu
missing=()
for list in "$@"; do
    while IFS= read -r package; do
        [ -n "$package" ] || continue
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done < "$list"
done
[ ${#missing[@]} -gt 0 ] || exit 0
as_root=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo > /dev/null || { echo "install as root first: apt-get install ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
# The distribution's own redis service is not wanted: tandem starts a server of its own.
"${as_root[@]}" env RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
