# shellcheck shell=bash disable=SC2154
# SPDX-License-Identifier: Apache-2.0
# Part of deploy/tandem.  The supervisor (its own process; started by up), starting and ending of roles.

supervise() {
    local name=$1 delay_ms=200 restarts=0 child=0 stopping=0 code started
    local -a command
    [ -s "$run_dir/$name.args" ] || exit 1
    mapfile -t command < "$run_dir/$name.args"
    echo $$ > "$run_dir/$name.super"
    echo 0 > "$run_dir/$name.restarts"
    cd "$root" || exit 1      # relative paths in configuration files mean the checkout
    trap 'stopping=1; [ "$child" -gt 0 ] && kill -TERM "$child" 2>/dev/null' TERM INT HUP
    while [ "$stopping" = 0 ]; do
        started=$SECONDS
        "${command[@]}" >> "$run_dir/$name.log" 2>&1 < /dev/null &
        child=$!
        [ "$stopping" = 1 ] && kill -TERM "$child" 2>/dev/null
        [[ $name == redis-* ]] && echo "$child" > "$run_dir/$name.pid"
        wait "$child"; code=$?
        while alive "$child"; do wait "$child"; code=$?; done
        [ "$stopping" = 1 ] && break
        [ -e "$run_dir/$name.args" ] || exit 0    # taken down without us
        # 2 is a fault of the configuration; what may pass (an address still taken) ends with 1
        if [ "$code" = 2 ] && [ $((SECONDS - started)) -lt 5 ]; then
            printf '%s tandem: %s refused its configuration; not started again\n' "$(date -u +%FT%TZ)" "$name" >> "$run_dir/$name.log"
            echo failed > "$run_dir/$name.failed"
            break
        fi
        [ $((SECONDS - started)) -ge 10 ] && delay_ms=200
        restarts=$((restarts + 1)); echo "$restarts" > "$run_dir/$name.restarts"
        printf '%s tandem: %s ended with %s, started again in %s ms\n' "$(date -u +%FT%TZ)" "$name" "$code" "$delay_ms" >> "$run_dir/$name.log"
        sleep "$(printf '%d.%03d' $((delay_ms / 1000)) $((delay_ms % 1000)))" & child=$!
        wait "$child"
        [ "$stopping" = 1 ] && break
        delay_ms=$((delay_ms * 2)); [ "$delay_ms" -gt 5000 ] && delay_ms=5000
    done
    rm -f "$run_dir/$name.super"
}

start_role() {
    local name=$1
    if supervised "$name"; then return; fi
    # A role whose supervisor was killed is ended first: its new supervisor starts it again.
    end_pid "$(pid_of "$name.pid")" 10
    rm -f "$run_dir/$name.failed" "$run_dir/$name.super"
    touch "$run_dir/$name.log"
    setsid "$BASH" "$here/tandem" --run_dir "$run_dir" supervise "$name" > /dev/null 2>&1 < /dev/null &
    echo $! > "$run_dir/$name.super"      # at once: a `down` that follows must find it
    disown
}

end_pid() {     # end_pid PID SECONDS: TERM, wait, KILL; only a process of this run_dir
    local pid=$1 tenths=$(($2 * 10))
    alive "$pid" && ours "$pid" || return 0
    kill -TERM "$pid" 2>/dev/null
    while [ "$tenths" -gt 0 ] && alive "$pid"; do sleep 0.1; tenths=$((tenths - 1)); done
    if alive "$pid"; then kill -KILL "$pid" 2>/dev/null; fi
}
