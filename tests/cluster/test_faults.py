# SPDX-License-Identifier: Apache-2.0
"""Processes killed, stopped and lied to while streams run: the text never changes."""
import http.client
import json
import os
import random
import signal
import threading
import time

import cluster
from cluster import Cluster, Load, greedy_cases, parallel, pid_alive, wait_for

REPEAT = greedy_cases(["repeat"])
ROUNDS = int(os.environ.get("TANDEM_ROUNDS", "0"))     # of the long run
LONGEST = max(greedy_cases(), key=lambda case: len(case["ids"]))


def complete(c, prompt, **fields):
    return c.stream(prompt, path="/v1/completions", return_token_ids=True,
                    **{"max_tokens": 200, "temperature": 0, **fields})


def under_load(c, hurt, rounds=6, threads=4, refusals=False):
    """Runs streams in `threads` threads while hurt(round) is called; checks every text.  refusals:
    a new request may get a 503 meanwhile, as it may while no router answers."""
    with Load(c, threads) as load:
        load.refusals_allowed = refusals
        for number in range(rounds):
            time.sleep(random.uniform(0.05, 0.4))
            hurt(number)
        time.sleep(0.3)
    assert load.done >= threads, load.done


def test_drafter_killed_at_any_moment():
    with Cluster() as c:
        def kill(_):
            try:
                old = c.kill("drafter")
                c.wait_restart("drafter", old, 20)
            except (OSError, ValueError):
                pass
        under_load(c, kill, rounds=ROUNDS or 5)
        c.ledger_settles()
        # and it drafts again
        wait_for("drafts again", 10, lambda: complete(c, REPEAT[0]["prompt"]).usage["tandem"][
            "accepted"] > 0)


def test_drafter_stopped_costs_only_speed():
    with Cluster() as c:
        pid = c.kill("drafter", signal.SIGSTOP)
        start = time.monotonic()
        got = complete(c, LONGEST["prompt"])
        assert got.ids == LONGEST["ids"]
        assert got.usage["tandem"]["accepted"] == 0
        assert time.monotonic() - start < 10
        # once it counts as silent nobody waits for it
        time.sleep(1.5)
        gaps_before = time.monotonic()
        got = complete(c, LONGEST["prompt"])
        assert got.ids == LONGEST["ids"] and time.monotonic() - gaps_before < 4
        os.kill(pid, signal.SIGCONT)
        wait_for("drafts again", 10, lambda: complete(c, REPEAT[0]["prompt"]).usage["tandem"][
            "accepted"] > 0)
        under_load(c, lambda n: os.kill(pid, signal.SIGSTOP if n % 2 == 0 else signal.SIGCONT), 6)


def test_redis_stopped_killed_flushed():
    with Cluster() as c:
        case = LONGEST
        baseline = sorted(timed(c, case) for _ in range(5))[2]
        pid = c.kill("redis", signal.SIGSTOP)
        time.sleep(0.5)
        stopped = sorted(timed(c, case) for _ in range(5))[2]
        assert stopped - baseline < 0.25, (baseline, stopped)
        wait_for("redis counted as down", 10, lambda: c.health("kvmgr")["redis"] != "up")
        assert c.ready()
        os.kill(pid, signal.SIGCONT)
        wait_for("redis up again", 10, lambda: c.health("kvmgr")["redis"] == "up")
        old = c.kill("redis")
        assert complete(c, case["prompt"]).ids == case["ids"]
        c.wait_restart("redis", old)
        wait_for("redis up again", 10, lambda: c.health("kvmgr")["redis"] == "up")
        c.redis("flushall")
        assert complete(c, case["prompt"]).ids == case["ids"]
        wait_for("heartbeats again", 8, lambda: "proc:router:0" in c.redis("keys", "*"))
        under_load(c, lambda n: c.redis("debug", "sleep", "0.3"), 4)


def timed(c, case):
    start = time.monotonic()
    assert complete(c, case["prompt"]).ids == case["ids"]
    return time.monotonic() - start


def test_gateway_killed_leaves_nothing_behind():
    with Cluster() as c:
        def doomed():
            try:
                c.stream("Repeat: " + "apple forest letter " * 3, temperature=1.0, max_tokens=4000,
                         ignore_eos=True)
            except (OSError, ValueError, AssertionError, Exception):  # the connection is cut
                pass
        threads = [threading.Thread(target=doomed, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_for("running", 10, lambda: c.health("worker")["ledger"]["live"] >= 6)
        old = c.kill("gateway")
        for thread in threads:
            thread.join(10)
        wait_for("reclaimed", 3, lambda: c.health("worker")["ledger"]["live"] <= 1)
        c.wait_restart("gateway", old)
        wait_for("ready", 10, c.ready)
        assert c.stream("Who are you?", temperature=0).finish == "stop"
        c.ledger_settles()
        c.pool_settles()


def test_stopped_roles_turn_readiness_red():
    for role in ("router", "worker", "kvmgr", "gateway"):
        with Cluster() as c:
            pid = c.kill(role, signal.SIGSTOP)
            wait_for(f"red with {role} stopped", 5, lambda: not c.ready())
            os.kill(pid, signal.SIGCONT)
            wait_for(f"green after {role}", 15, c.ready)
            assert c.stream("Who are you?", temperature=0).finish == "stop"


def test_readiness_is_red_under_load_too():
    """A stream that stands still is no sign of life."""
    with Cluster() as c:
        stream = threading.Thread(target=lambda: complete(
            c, LONGEST["prompt"], ignore_eos=True, max_tokens=3000, timeout=120), daemon=True)
        stream.start()
        wait_for("running", 10, lambda: c.health("worker")["seqs_live"] >= 1)
        assert c.ready()
        pid = c.kill("kvmgr", signal.SIGSTOP)
        wait_for("red with kvmgr stopped", 6, lambda: not c.ready())
        os.kill(pid, signal.SIGCONT)
        wait_for("green again", 15, c.ready)
        stream.join(90)
        assert not stream.is_alive(), "the stream hangs"


def test_kill_rounds():
    """kill -9 of any role, again and again in one cluster: every text right, nothing left behind."""
    bag = []
    groups = 1 + cluster.seed() % 2      # every other seed has two
    with Cluster(worker__groups=groups) as c, Load(c, 4) as load:
        load.wait_more(4)
        for number in range(ROUNDS or 10):
            start = time.monotonic()
            if not bag:
                bag = random.sample(c.names(), len(c.names()))
            role = bag.pop()
            time.sleep(random.uniform(0, 0.5))
            print(f"round {number}: {role}")
            if role == "gateway":
                load.may_cut(True)
            old = c.kill(role)
            c.wait_restart(role, old, 20)
            wait_for(f"ready after {role}", 20, c.ready)
            if role == "gateway":
                load.may_cut(False)
            load.wait_more(4)
            load.pause()
            c.ledger_settles(20)
            pool = c.pool_settles(20)
            assert pool["blocks_free"] + pool["blocks_cached"] == pool["blocks_total"], pool
            load.go_on()
            print(f"round of {time.monotonic() - start:.1f} s")
    print(f"groups {groups}, streams {load.done}, cut by a killed gateway {load.cut}")


def test_killed_router_worker_kvmgr_lose_no_stream():
    for role in ("worker", "kvmgr", "router"):
        with Cluster() as c:
            def kill(_, name=role):
                try:
                    old = c.kill(name)
                    c.wait_restart(name, old, 20)
                    wait_for("ready", 20, c.ready)
                except (OSError, ValueError):
                    pass
            under_load(c, kill, rounds=3, refusals=role == "router")
            c.ledger_settles()
            c.pool_settles()


def test_router_asleep_loses_no_stream():
    with Cluster() as c:
        def sleep(_):
            pid = c.kill("router", signal.SIGSTOP)
            time.sleep(4)
            os.kill(pid, signal.SIGCONT)
        under_load(c, sleep, rounds=2, refusals=True)
        c.ledger_settles()
        c.pool_settles()


def test_random_cancels_leave_nothing():
    base = random.randrange(1 << 30)
    with Cluster(worker__seqs_max=4) as c:
        def one(index):
            rng = random.Random(base + index)
            connection = http.client.HTTPConnection("127.0.0.1", c.port, timeout=20)
            prompt = rng.choice(greedy_cases())["prompt"]
            connection.request("POST", "/v1/completions", json.dumps(
                {"prompt": prompt, "stream": bool(index % 2), "ignore_eos": True,
                 "max_tokens": 4000, "n": 1 + index % 3}), {"Content-Type": "application/json"})
            time.sleep(rng.choice([0, 0.01, 0.05, 0.2, 0.5]))
            connection.sock.close()
            connection.close()
        count = int(os.environ.get("TANDEM_CANCELS", "60"))
        for start in range(0, count, 12):
            parallel([lambda i=i: one(i) for i in range(start, min(count, start + 12))], 60)
        c.ledger_settles(20)
        pool = c.pool_settles(20)
        assert pool["blocks_free"] + pool["blocks_cached"] == pool["blocks_total"], pool
        assert c.stream("Who are you?", temperature=0).finish == "stop"
        assert all(pid_alive(c.pid(role)) for role in cluster.ROLES)


cluster.main(globals())
