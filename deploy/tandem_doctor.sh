# shellcheck shell=bash disable=SC2154
# SPDX-License-Identifier: Apache-2.0
# Part of deploy/tandem.  Checks of this machine, this checkout, and its place among the nodes.

# check WHAT HINT COMMAND...: ok when the command is
check() {
    if "${@:3}" > /dev/null 2>&1; then say "ok    $1"; else say "FAULT $1: $2"; doctor_faults=$((doctor_faults + 1)); fi
}

has_link() { [[ $(ip -o link show dev "$1") == *LOWER_UP* ]]; }

leaves_by() { [[ "$(ip -o route get "$1") " == *" dev $2 "* ]]; }     # leaves_by ADDRESS DEVICE

is_private() { [ -f "$1" ] && [ "$(stat -L -c %a "$1")" = 600 ]; }

is_yes() { [[ $1 =~ ^(true|1|on|yes)$ ]]; }

descriptors_reach() { [ "$(ulimit -Hn)" = unlimited ] || [ "$(ulimit -Hn)" -ge "$1" ]; }

free_kib_above() { [ "$(awk '/MemAvailable/{print $2}' /proc/meminfo)" -gt "$1" ]; }

doctor_nodes() {
    local name own worker keys device
    nodes_read
    own=${node_address[$node_name]}
    say "note  this machine is $node_name: ${node_roles[$node_name]# }"
    device=$(ip -o -4 addr show 2>/dev/null | awk -v a="$own" '{split($4, p, "/"); if (p[1] == a) print $2}' | head -n 1)
    check "$own is an address of this machine" "ip addr; give the fast port this address (deploy/two-sparks/README.md)" [ -n "$device" ]
    [ "${#node_names[@]}" -gt 1 ] || return
    if [ -n "$device" ]; then
        say "note  $device: $(ip -o link show dev "$device" | grep -o 'mtu [0-9]*') (9000 on both ends is quicker), $(cat "/sys/class/net/$device/speed" 2>/dev/null || echo ?) Mbit/s"
        check "the link of $device is up" "cable, or ip link set $device up" has_link "$device"
    fi
    worker=$(grep -o 'worker-[0-7]' <<< "${node_roles[$node_name]}" | head -n 1)
    keys=$(param_of "$worker" fabric_keys)
    if [ -n "$keys" ]; then
        [[ $keys = /* ]] || keys=$root/$keys
        check "the key file $keys is here, mode 600" "tandem keygen FILE once, then copy it to every node; chmod 600" is_private "$keys"
    else
        check "workers have fabric_keys or insecure_tcp" "tandem keygen FILE, and fabric_keys = FILE in worker.conf" is_yes "$(param_of "$worker" insecure_tcp)"
    fi
    [ -n "$(param_of "$worker" fabric_bandwidth_mb_min)" ] || say "note  worker.conf has no fabric_bandwidth_mb_min: a link that fell back to a slow path would go unnoticed"
    for name in "${node_names[@]}"; do
        [ "$name" = "$node_name" ] && continue
        check "there is a route to $name (${node_address[$name]})" "ip route" ip route get "${node_address[$name]}"
        check "the route to $name leaves by $device" "the ranks would speak over another interface: ip route" leaves_by "${node_address[$name]}" "$device"
    done
}

cmd_doctor() {
    local role model doctor_faults=0
    for role in "${ROLES[@]}"; do
        [ "$role" = redis ] || check "$role is built" "run ./deploy/quickstart.sh or build by hand (README)" [ -x "$build_dir/$role/tandem-$role" ]
    done
    check "redis-server is installed" "install the package redis-server" command -v redis-server
    check "curl is installed" "install the package curl" command -v curl
    check "/dev/shm is writable" "the KV arena lives there; mount a tmpfs" [ -w /dev/shm ]
    check "descriptor limit allows 4,096" "raise the hard limit of open files" descriptors_reach 4096
    [ -z "$nodes_file" ] || doctor_nodes
    check "memory of 1 GiB is free" "stop something, or lower kvmgr.arena_bytes" free_kib_above 1048576
    model=$(param_of worker-0 model); model=${model:-deploy/demo}
    [ -d "$model" ] || model=$root/$model
    check "model $model can be read" "tandem-model inspect says why" "$build_dir/lib/model/tool/tandem-model" inspect "$model"
    [ "$doctor_faults" = 0 ]
}
