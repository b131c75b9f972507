# shellcheck shell=bash disable=SC2154
# SPDX-License-Identifier: Apache-2.0
# Part of deploy/tandem.  Several machines: FILE has a line for each, `NAME ADDRESS ROLE...`

fabric_port=7400                                        # rank N listens on this + N
declare -A node_address=() node_roles=()
node_names=()
octet='(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])'   # no leading zero: some read it as octal
rank_addresses=()                                       # by rank

nodes_fault() { die "$nodes_file: $*"; }

nodes_read() {
    local line name address role rank roles_seen="" ranks=0 main="" words
    [ -r "$nodes_file" ] || die "cannot read $nodes_file"
    while IFS= read -r line || [ -n "$line" ]; do
        read -ra words <<< "${line%%#*}"
        [ "${#words[@]}" -gt 0 ] || continue
        name=${words[0]}; address=${words[1]:-}
        [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9.-]{0,62}$ ]] || nodes_fault "\"$name\" is no name of a node"
        [ -z "${node_address[$name]:-}" ] || nodes_fault "$name is there twice"
        [[ $address =~ ^($octet\.){3}$octet$ ]] || nodes_fault "$name: \"$address\" is no IPv4 address (four numbers of 0 to 255)"
        [ "${#words[@]}" -gt 2 ] || nodes_fault "$name has no role"
        node_names+=("$name"); node_address[$name]=$address; node_roles[$name]=" ${words[*]:2} "
        for role in "${words[@]:2}"; do
            case $role in
                worker-[0-7]) rank=${role#worker-}; ranks=$((ranks + 1)); rank_addresses[rank]=$address:$((fabric_port + rank)) ;;
                redis|kvmgr|kvmgr-[1-7]|drafter|router|gateway) ;;
                *) nodes_fault "$name: no role \"$role\" (redis kvmgr drafter router gateway worker-N kvmgr-N)" ;;
            esac
            [[ $roles_seen != *" $role "* ]] || nodes_fault "$role is there twice"
            roles_seen+=" $role "
        done
        [[ ${node_roles[$name]} != *" worker-0 "* ]] || main=$name
    done < "$nodes_file"
    [ -n "$main" ] || nodes_fault "no node has worker-0"
    [ "$(number_of groups 16)" = 1 ] || nodes_fault "several groups (worker.groups) run on one machine only"
    for ((rank = 0; rank < ranks; rank++)); do
        [ -n "${rank_addresses[rank]:-}" ] || nodes_fault "$ranks workers, but none is worker-$rank"
    done
    for name in "${node_names[@]}"; do      # each of these has the memory of its rank
        for role in ${node_roles[$name]}; do
            case $role in worker-[1-7]) role=kvmgr-${role#worker-} ;; kvmgr-*) role=worker-${role#kvmgr-} ;; *) continue ;; esac
            [[ ${node_roles[$name]} == *" $role "* ]] || nodes_fault "$role is missing on $name: a rank above 0 and the kvmgr of its number stand side by side"
        done
    done
    for role in redis kvmgr drafter router gateway; do      # these speak over sockets in run_dir
        [[ $roles_seen == *" $role "* ]] || nodes_fault "no node has $role"
        [[ ${node_roles[$main]} == *" $role "* ]] || nodes_fault "$role must be on $main, beside worker-0"
    done
    [ -n "$node_name" ] || node_name=$(own_node)
    [ -n "$node_name" ] || nodes_fault "this machine has none of the addresses; say --node NAME"
    [ -n "${node_address[$node_name]:-}" ] || nodes_fault "no node \"$node_name\" (${node_names[*]})"
}

own_addresses() { ip -o -4 addr show 2>/dev/null | sed 's/.* inet \([0-9.]*\).*/\1/'; }

own_node() {
    local name
    for name in "${node_names[@]}"; do
        grep -qxF -- "${node_address[$name]}" <<< "$(own_addresses)" && { printf '%s' "$name"; return; }
    done
}

here_runs() { [ -z "$nodes_file" ] || [[ ${node_roles[$node_name]} == *" $1 "* ]]; }

join_by() { local IFS=$1; shift; printf '%s' "$*"; }

node_instances() {      # the same where a file of nodes says what runs here: one group
    local rank fabric more="--ranks=${#rank_addresses[@]}"
    fabric=$(param_of worker-0 fabric); [ "$fabric" = nccl ] || fabric=tcp
    [ "${#node_names[@]}" -eq 1 ] || more+=" --fabric=$fabric --fabric_nodes=$(join_by , "${rank_addresses[@]}")"
    if [ "$1" != worker ]; then if here_runs "$1"; then echo "$1-0"; fi; fi
    if [ "$1" = kvmgr ]; then
        for ((rank = 1; rank < ${#rank_addresses[@]}; rank++)); do
            if here_runs "kvmgr-$rank"; then echo "kvmgr-$rank --id=$rank --role=arena"; fi
        done
    fi
    [ "$1" = worker ] || return 0
    for ((rank = 0; rank < ${#rank_addresses[@]}; rank++)); do
        if here_runs "worker-$rank"; then echo "worker-$rank --id=$rank --rank=$rank $more"; fi
    done
}
