# shellcheck shell=bash disable=SC2154
# SPDX-License-Identifier: Apache-2.0
# Part of deploy/tandem.  Checks of this machine, this checkout, and its place among the nodes.

check() { if eval "$2" > /dev/null 2>&1; then say "ok    $1"; else say "FAULT $1: $3"; doctor_faults=$((doctor_faults + 1)); fi; }

doctor_nodes() {
    local name own keys device
    nodes_read
    own=${node_address[$node_name]}
    say "note  this machine is $node_name: ${node_roles[$node_name]# }"
    device=$(ip -o -4 addr show 2>/dev/null | awk -v a="$own" '{split($4, p, "/"); if (p[1] == a) print $2}' | head -n 1)
    check "$own is an address of this machine" "[ -n '$device' ]" "ip addr; give the fast port this address (deploy/two-sparks/README.md)"
    [ "${#node_names[@]}" -gt 1 ] || return
    if [ -n "$device" ]; then
        say "note  $device: $(ip -o link show dev "$device" | grep -o 'mtu [0-9]*') (9000 on both ends is quicker), $(cat "/sys/class/net/$device/speed" 2>/dev/null || echo ?) Mbit/s"
        check "the link of $device is up" "ip -o link show dev $device | grep -q LOWER_UP" "cable, or ip link set $device up"
    fi
    keys=$(sed -n 's/^fabric_keys=//p' <<< "${sets[all]:-}${sets[worker]:-}" | tail -n 1)
    [ -n "$keys" ] || keys=$(conf_value "$config_dir/worker.conf" fabric_keys)
    if [ -n "$keys" ]; then
        [[ $keys = /* ]] || keys=$root/$keys
        check "the key file $keys is here, mode 600" "[ -f '$keys' ] && [ \"\$(stat -c %a '$keys')\" = 600 ]" "tandem keygen FILE once, then copy it to every node; chmod 600"
    else
        check "workers have fabric_keys or insecure_tcp" "[ \"\$(conf_value '$config_dir/worker.conf' insecure_tcp)\" = true ]" "tandem keygen FILE, and fabric_keys = FILE in worker.conf"
    fi
    [ -n "$(conf_value "$config_dir/worker.conf" fabric_bandwidth_mb_min)" ] || say "note  worker.conf has no fabric_bandwidth_mb_min: a link that fell back to a slow path would go unnoticed"
    for name in "${node_names[@]}"; do
        [ "$name" = "$node_name" ] && continue
        check "there is a route to $name (${node_address[$name]})" "ip route get ${node_address[$name]}" "ip route"
        check "the route to $name leaves by $device" "[[ \"\$(ip -o route get ${node_address[$name]})\" == *\" dev $device \"* ]]" "the ranks would speak over another interface: ip route"
    done
}

cmd_doctor() {
    local role model doctor_faults=0
    for role in "${ROLES[@]}"; do
        [ "$role" = redis ] || check "$role is built" "[ -x '$build_dir/$role/tandem-$role' ]" "run ./deploy/quickstart.sh or build by hand (README)"
    done
    check "redis-server is installed" "command -v redis-server" "install the package redis-server"
    check "curl is installed" "command -v curl" "install the package curl"
    check "/dev/shm is writable" "[ -w /dev/shm ]" "the KV arena lives there; mount a tmpfs"
    check "descriptor limit allows 4,096" "[ \"\$(ulimit -Hn)\" = unlimited ] || [ \"\$(ulimit -Hn)\" -ge 4096 ]" "raise the hard limit of open files"
    [ -z "$nodes_file" ] || doctor_nodes
    check "memory of 1 GiB is free" "[ \"\$(awk '/MemAvailable/{print \$2}' /proc/meminfo)\" -gt 1048576 ]" "stop something, or lower kvmgr.arena_bytes"
    model=$(conf_value "$config_dir/worker.conf" model); model=${model:-deploy/demo}
    [ -d "$model" ] || model=$root/$model
    check "model $model can be read" "'$build_dir/lib/model/tool/tandem-model' inspect '$model'" "tandem-model inspect says why"
    [ "$doctor_faults" = 0 ]
}
