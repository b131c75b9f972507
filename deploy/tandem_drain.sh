# shellcheck shell=bash disable=SC2154
# SPDX-License-Identifier: Apache-2.0
# Part of deploy/tandem.  Drain, restart and rolling restart.

left_running=""                # what the last wait_empty still saw

instance() {    # instance NAME: "worker" means worker-0
    local name=${1:-}
    [ -n "$name" ] || die "$command_name: which role? (worker-N, drafter, router, gateway)"
    [[ $name =~ -[0-9]+$ ]] || name=$name-0
    [ -e "$run_dir/$name.args" ] || die "\"$1\" does not run in $run_dir"
    printf '%s' "$name"
}

ask_role() {    # ask_role NAME PATH: a command on its own socket; says why if it is refused
    local answer
    answer=$(curl -s --max-time 5 -X POST --unix-socket "$run_dir/$1.http" "http://localhost$2" 2>/dev/null)
    [[ $answer == '{"ok":true}'* ]] && return 0
    say "$1: $(json_text error "$answer")"
    return 1
}

ask_drain() {   # ask_drain drain|undrain NAME DEADLINE_MS
    case $2 in
        worker-*) ask_role router-0 "/$1?worker=${2#worker-}&deadline_ms=$3" ;;
        drafter-*|router-*|gateway-*) ask_role "$2" "/$1?deadline_ms=$3" ;;
        *) die "$2 cannot be drained: others hold what it keeps" ;;
    esac
}

work_of() {     # work_of NAME: what still runs there; empty if it does not say
    local health; health=$(health_of "$1")
    case $1 in
        worker-*)       # it is told once the next turns of its conversations may go elsewhere
            case $(json_text state "$health") in
                draining|"") json_number seqs_live "$health" ;;
                *) printf 'its last turns, %s' "$(json_number seqs_live "$health")" ;;
            esac ;;
        gateway-*) json_number requests_live "$health" ;;
        router-*) [ -n "$health" ] && echo $(($(json_number running "$health") + $(json_number queue "$health"))) ;;
        *) echo 0 ;;
    esac
}

wait_empty() {  # wait_empty NAME SECONDS (0 = for ever)
    local tenths=$(($2 * 10)) left="" shown=""
    while :; do
        left=$(work_of "$1")
        [ "$left" = 0 ] && break
        [ -t 2 ] && [ "$left" != "$shown" ] && printf '\r\033[K%s: %s running' "$1" "$left" >&2 && shown=$left
        if [ "$2" -gt 0 ]; then
            tenths=$((tenths - 1))
            [ "$tenths" -gt 0 ] || { left_running=$left; return 1; }
        fi
        sleep 0.1
    done
    [ -t 2 ] && [ -n "$shown" ] && printf '\r\033[K' >&2
    return 0
}

group_of() { local g; g=$(sed -n 's/^--group=//p' "$run_dir/$1.args" 2>/dev/null | tail -n 1); printf '%s' "${g:-0}"; }

# What a drained group has kept is written down: blocks to the tier, if it is on, and session maps.
flush_group() {
    local kvmgr=kvmgr-$1 tenths=300 health
    ask_role "$kvmgr" /drain || return 1
    while [ "$tenths" -gt 0 ]; do
        health=$(health_of "$kvmgr")
        if [[ $health == *'"flushing":false'* ]]; then
            # without Redis maps wait for it, and are written when it returns
            [[ $health != *'"redis":"up"'* || $health == *'"maps_waiting":0'* ]] && break
        fi
        sleep 0.1; tenths=$((tenths - 1))
    done
    [ "$(json_number unwritten "$health")" = 0 ] || { say "$kvmgr: $(json_number unwritten "$health") blocks are not written to the tier"; return 1; }
    [ "$(json_number maps_waiting "$health")" = 0 ] || say "$kvmgr: $(json_number maps_waiting "$health") session maps wait for Redis"
    return 0
}

cmd_drain() {
    local name; name=$(instance "${1:-}") || exit 2
    ask_drain drain "$name" $((deadline_s * 1000)) || exit 1
    # at its deadline a worker hands back and a gateway ends what still runs
    if wait_empty "$name" $((deadline_s > 0 ? deadline_s + 5 : 0)); then
        [[ $name == worker-* ]] && { flush_group "$(group_of "$name")" || exit 1; }
        say "$name is drained; tandem undrain $name, or tandem restart $name"
    else
        say "$name: ${left_running:-?} still running"; exit 1
    fi
}

cmd_undrain() {
    local name; name=$(instance "${1:-}") || exit 2
    ask_drain undrain "$name" 0 || exit 1
    say "$name takes work again"
}

ask_pin() {  # ask_pin pin|unpin SESSION SALT SECONDS: of every kvmgr that leases; one has to know the session
    local f answer done=1 said="no kvmgr runs here"
    for f in "$run_dir"/kvmgr-*.args; do
        grep -qx -e --role=arena "$f" && continue
        answer=$(curl -s --max-time 5 -G -X POST --unix-socket "${f%.args}.http" "http://localhost/$1" \
            --data-urlencode "session=$2" --data-urlencode "salt=$3" --data-urlencode "seconds=$4" 2>/dev/null)
        if [[ $answer == '{"ok":true}'* ]]; then
            [ "$1" = unpin ] || return 0
            done=0
        else
            said=${answer:-$(basename "$f" .args) does not answer}
        fi
    done
    [ "$done" = 0 ] && return 0
    say "$1: $said"
    return 1
}

cmd_pin() {
    [ -n "${1:-}" ] || die "pin: which session?"
    [[ ${2:-3600} =~ ^[0-9]{1,6}$ ]] || die "pin: $2: whole seconds"
    ask_pin pin "$1" "${3:-}" "${2:-3600}" || exit 1
    say "what is cached of $1 stays for ${2:-3600} s"
}

cmd_unpin() {
    [ -n "${1:-}" ] || die "unpin: which session?"
    ask_pin unpin "$1" "${3:-}" 0 || exit 1
    say "$1 is no longer pinned"
}

wait_ready() {  # wait_ready NAME: the role says so and the whole answers
    local tenths=600
    while [ "$tenths" -gt 0 ]; do
        # degraded: it serves, without Redis or its tier; but a rank on another node is without its group
        [[ $(json_text state "$(health_of "$1")") =~ $([ -e "$run_dir/router-0.args" ] && echo '^(ready|degraded)$' || echo '^ready$') ]] && { [ ! -e "$run_dir/gateway-0.args" ] || ready_now; } && return 0
        sleep 0.1; tenths=$((tenths - 1))
    done
    say "$1 is not ready 60 s after its restart; the others are left alone"
    return 1
}

groups_running() { local f; for f in "$run_dir"/worker-*.args; do group_of "$(basename "$f" .args)"; echo; done | sort -nu; }

leaders_of() {  # leaders_of GROUP: its rank 0, then the others
    local f
    for f in "$run_dir"/worker-*.args; do [ "$(group_of "$(basename "$f" .args)")" = "$1" ] && basename "$f" .args; done | sort -t - -k 2 -n
}

arenas_of() {   # arenas_of GROUP GROUPS: the kvmgrs of its ranks above 0
    local f n
    for f in "$run_dir"/kvmgr-*.args; do
        n=$(basename "$f" .args); n=${n#kvmgr-}
        [ "$n" -ge "$2" ] && [ $((n % $2)) = "$1" ] && echo "kvmgr-$n"
    done
}

# Short answers end in the group, the others go on in another one or after its restart.
hand_over() {   # hand_over GROUP
    local name; name=$(leaders_of "$1" | head -n 1)
    ask_drain drain "$name" 2000 && wait_empty "$name" 7 && flush_group "$1"
}

wait_groups() { # wait_groups COUNT: as the router sees it, that many serve
    local tenths=600
    while [ "$tenths" -gt 0 ]; do
        [ "$(json_number groups_ready "$(health_of router-0)")" = "$1" ] && return 0
        sleep 0.1; tenths=$((tenths - 1))
    done
    say "not all of $1 groups are ready 60 s after a restart; the others are left alone"
    return 1
}

restart_and_wait() { local name; for name in "$@"; do cmd_restart "$name"; done; for name in "$@"; do wait_ready "$name" || exit 1; done; }

# One after the other.  Of several groups each is emptied first and then renewed as a whole, while the
# others serve.  A single one is renewed role by role: its worker finds kvmgr and drafter again.  A
# gateway holds its clients' connections, so it is restarted when they have their answers.
cmd_rolling() {
    local f g name patience=${deadline_s:-0} groups
    [ "$patience" -gt 0 ] || patience=120
    if [ ! -e "$run_dir/router-0.args" ]; then      # a node without the front: running answers pause and go on
        for f in "$run_dir"/kvmgr-*.args; do restart_and_wait "$(basename "$f" .args)"; done
        for f in "$run_dir"/worker-*.args; do restart_and_wait "$(basename "$f" .args)"; done
        say "all roles restarted"
        return
    fi
    mapfile -t groups < <(groups_running)
    for g in "${groups[@]}"; do
        if [ "${#groups[@]}" -gt 1 ]; then
            hand_over "$g"
            # shellcheck disable=SC2046
            restart_and_wait "kvmgr-$g" $(arenas_of "$g" "${#groups[@]}") "drafter-$g" $(leaders_of "$g")
            wait_groups "${#groups[@]}" || exit 1
        else
            # shellcheck disable=SC2046
            restart_and_wait "kvmgr-$g" $(arenas_of "$g" 1)
            restart_and_wait "drafter-$g"
            hand_over "$g"
            # shellcheck disable=SC2046
            restart_and_wait $(leaders_of "$g")
        fi
    done
    restart_and_wait router-0
    for f in "$run_dir"/gateway-*.args; do
        name=$(basename "$f" .args)
        ask_drain drain "$name" 0 || exit 1
        if ! wait_empty "$name" "$patience"; then
            ask_drain undrain "$name" 0
            say "$name: ${left_running:-?} answers still running after $patience s; not restarted"
            exit 1
        fi
        restart_and_wait "$name"
    done
    say "all roles restarted"
}

cmd_restart() {
    local name=${1:-} pid tenths=150 old
    [ "$rolling" = 1 ] && { rolling=0; cmd_rolling; return; }
    [ -n "$name" ] || die "restart: which role? (${ROLES[*]})"
    [ -e "$run_dir/$name.args" ] || name=$name-0
    [ -e "$run_dir/$name.args" ] || die "\"$1\" does not run in $run_dir"
    old=$(pid_of "$name.pid")
    if ! supervised "$name"; then start_role "$name"; else end_pid "$old" 10; fi
    while [ "$tenths" -gt 0 ]; do
        pid=$(pid_of "$name.pid")
        if [ -n "$pid" ] && [ "$pid" != "$old" ] && alive "$pid"; then say "$name restarted, pid $pid"; return 0; fi
        sleep 0.1; tenths=$((tenths - 1))
    done
    die "$name did not come back; see: tandem logs $name"
}
