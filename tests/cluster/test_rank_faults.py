# SPDX-License-Identifier: Apache-2.0
"""A group of two ranks under load, hurt again and again: no wrong token, no hang, nothing left behind.

TANDEM_ROUNDS rounds over tcp through a proxy (kills, stops, a cut, stalled, slow or bad cable), and as
many over shared memory (kills and stops)."""
import os
import random
import signal
import time

import cluster
from cluster import Cluster, Load, free_port, pid_alive, wait_for
from cable import Wire

ROUNDS = int(os.environ.get("TANDEM_ROUNDS", "0"))
SERVING_S = 10  # again, once the cause is gone


def rank_pid(c, rank):
    with open(os.path.join(c.run_dir, f"worker-{rank}.pid"), encoding="ascii") as f:
        return int(f.read())


def kill(c, name):
    path = os.path.join(c.run_dir, f"{name}.pid")
    with open(path, encoding="ascii") as f:
        old = int(f.read())
    os.kill(old, signal.SIGKILL)

    def back():
        with open(path, encoding="ascii") as f:
            text = f.read().strip()
        return text.isdigit() and int(text) != old and pid_alive(int(text))
    wait_for(f"{name} restarted", 15, back)


def freeze(c, rank):
    pid = rank_pid(c, rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(random.choice([0.3, 1.0, 3.0]))
    finally:
        os.kill(pid, signal.SIGCONT)


def cut(wire):
    wire.cut()
    time.sleep(random.choice([0.0, 0.5, 3.0]))


def stall(wire):
    wire.open.clear()
    time.sleep(random.choice([0.3, 1.0, 3.0]))


def slow(wire):
    wire.seconds = random.choice([0.002, 0.02])
    time.sleep(1.5)


def spoil(wire):
    wire.flip = random.choice([1, 3])
    time.sleep(0.3)


def rounds(c, faults, wire=None):
    bag, worst = [], 0.0
    with Load(c, 3) as load:
        load.wait_more(3)
        for number in range(ROUNDS or 5):
            start = time.monotonic()
            bag = bag or random.sample(sorted(faults), len(faults))
            name = bag.pop()
            time.sleep(random.uniform(0, 0.4))
            faults[name]()
            if wire:
                wire.mend()
            gone = time.monotonic()
            wait_for(f"ready after {name}", SERVING_S, c.ready)
            load.wait_more(1, SERVING_S)
            again = time.monotonic() - gone
            worst = max(worst, again)
            load.wait_more(2, 30)
            print(f"round of {time.monotonic() - start:.1f} s: {number}, {name}, serving after {again:.1f} s")
            if number % 5 == 4 or number + 1 == (ROUNDS or 5):
                load.pause()
                c.ledger_settles(20)
                pool = c.pool_settles(20)
                assert pool["blocks_free"] + pool["blocks_cached"] == pool["blocks_total"], pool
                load.go_on()
    print(f"streams {load.done}; serving again after {worst:.1f} s at most")


def test_rounds_over_shared_memory():
    with Cluster(worker__ranks=2, worker__threads=1, worker__dcp=random.choice([1, 2])) as c:
        faults = {"kill of rank 0": lambda: kill(c, "worker-0"), "kill of rank 1": lambda: kill(c, "worker-1"),
                  "kill of kvmgr": lambda: kill(c, "kvmgr-0"), "kill of rank 1's kvmgr": lambda: kill(c, "kvmgr-1"),
                  "stop of rank 0": lambda: freeze(c, 0), "stop of rank 1": lambda: freeze(c, 1)}
        rounds(c, faults)


def test_rounds_over_a_bad_cable():
    near, far = free_port(), free_port()
    wire = Wire("127.0.0.1", 0, ("127.0.0.1", near))
    try:
        c = Cluster(worker__ranks=2, worker__threads=1, worker__dcp=random.choice([1, 2]), worker__fabric="tcp",
                    worker__fabric_nodes=f"127.0.0.1:{near},127.0.0.1:{far}")
        c.sets["worker-1.fabric_nodes"] = f"127.0.0.1:{wire.port},127.0.0.1:{far}"
        with c:
            faults = {"kill of rank 0": lambda: kill(c, "worker-0"), "kill of rank 1": lambda: kill(c, "worker-1"),
                      "kill of rank 1's kvmgr": lambda: kill(c, "kvmgr-1"),
                      "stop of rank 0": lambda: freeze(c, 0), "stop of rank 1": lambda: freeze(c, 1),
                      "cut cable": lambda: cut(wire), "stalled cable": lambda: stall(wire),
                      "slow cable": lambda: slow(wire), "spoilt bytes": lambda: spoil(wire)}
            rounds(c, faults, wire)
            assert min(wire.carried) > 1 << 20, wire.carried
    finally:
        wire.close()


if __name__ == "__main__":
    cluster.main(globals())
