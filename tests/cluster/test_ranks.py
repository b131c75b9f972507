# SPDX-License-Identifier: Apache-2.0
"""One model over two worker processes: the texts of one rank, and a group that heals."""
import os
import signal
import time

import cluster
from cluster import Cluster, free_port, greedy_cases, pid_alive, wait_for
from test_kv import BLOCK, Talk


def ids(c, case, **fields):
    got = c.stream(case["prompt"], path="/v1/completions", return_token_ids=True, temperature=0,
                   max_tokens=len(case["ids"]) + 8, timeout=90, **fields)
    assert got.done and got.error is None, got.error
    return got.ids


def rank_pid(c, rank):
    with open(os.path.join(c.run_dir, f"worker-{rank}.pid"), encoding="ascii") as f:
        return int(f.read())


def log_count(c, name, text):
    with open(os.path.join(c.run_dir, f"{name}.log"), encoding="utf-8", errors="replace") as f:
        return f.read().count(text)


def texts_equal(c, cases):
    for case in cases:
        for spec in ("off", "fixed:7"):
            got = ids(c, case, spec=spec)
            assert got == case["ids"], (case["name"], spec, got, case["ids"])


def test_local_gives_the_golden_ids():
    with Cluster(worker__ranks=2, worker__threads=1) as c:
        texts_equal(c, greedy_cases()[:6])
        assert log_count(c, "worker-1", '"group formed"') == 1
        c.ledger_settles()
        c.pool_settles()


def test_tcp_gives_the_golden_ids():
    nodes = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    with Cluster(worker__ranks=2, worker__threads=1, worker__fabric="tcp", worker__fabric_nodes=nodes) as c:
        texts_equal(c, greedy_cases()[:3])


def turns(ranks, after=None):
    """A talk of five turns, each compared with itself cold; the ids of each answer."""
    with Cluster(worker__ranks=ranks, worker__threads=1, kvmgr__block_tokens=BLOCK) as c:
        talk, answers = Talk(c, "ranks"), []
        for turn in range(5):
            if turn == 3 and after:
                after(c)
            before = len(talk.ids)
            cached = talk.turn()
            assert (cached > 0) == (turn > 0), (turn, cached)
            answers.append(talk.ids[before:])
        c.ledger_settles()
        c.pool_settles()
        return answers


def test_a_hit_gives_the_text_of_one_rank():
    """What was kept is there on every rank: rows, and the state at the end of them."""
    def new_rank_0(c):
        c.wait_restart("worker", c.kill("worker"))
        wait_for("ready again", 20, c.ready)
    alone = turns(1)
    assert turns(2) == alone
    assert turns(2, after=new_rank_0) == alone  # rank 1 still has its part


def stream_through(c, case, hurt):
    """Runs a long answer, hurts the group in the middle, returns its ids and the longest gap."""
    state = {"hurt": False, "last": time.monotonic(), "gap": 0.0}

    def on_event(result):
        now = time.monotonic()
        state["gap"], state["last"] = max(state["gap"], now - state["last"]), now
        if len(result.ids) >= 5 and not state["hurt"]:
            state["hurt"] = True
            hurt()
    got = c.stream(case["prompt"], path="/v1/completions", return_token_ids=True, temperature=0,
                   max_tokens=len(case["ids"]) + 8, timeout=90, on_event=on_event, spec="off")
    assert state["hurt"], "the answer was over before the fault"
    assert got.done and got.error is None, got.error
    return got.ids, state["gap"]


def test_a_killed_rank_comes_back():
    longest = max(greedy_cases(), key=lambda case: len(case["ids"]))
    with Cluster(worker__ranks=2, worker__threads=1) as c:
        for _ in range(2):
            old = rank_pid(c, 1)
            got, _ = stream_through(c, longest, lambda: os.kill(old, signal.SIGKILL))
            assert got == longest["ids"], (got, longest["ids"])
            wait_for("rank 1 restarted", 15,
                     lambda: rank_pid(c, 1) != old and pid_alive(rank_pid(c, 1)))
        texts_equal(c, greedy_cases()[:2])
        c.ledger_settles()
        c.pool_settles()


def test_a_stopped_rank_counts_as_dead_until_it_goes_on():
    longest = max(greedy_cases(), key=lambda case: len(case["ids"]))
    with Cluster(worker__ranks=2, worker__threads=1) as c:
        pid = rank_pid(c, 1)

        def stop_and_go():
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_for("group lost", 5, lambda: log_count(c, "worker-0", '"group lost"') > 0)
            finally:
                os.kill(pid, signal.SIGCONT)
        got, _ = stream_through(c, longest, stop_and_go)
        assert got == longest["ids"], (got, longest["ids"])
        assert log_count(c, "worker-1", '"group formed"') >= 2


def test_other_settings_are_refused():
    c = Cluster(worker__ranks=2, worker__threads=1, worker__moe_split="tp")
    try:
        c.up()
        raise AssertionError("experts of 128 columns were split over two ranks")
    except AssertionError as error:
        assert "128 columns wide" in str(error), error
    finally:
        c.__exit__()


def test_a_tier_is_refused():
    """It could keep the rows of one rank only."""
    c = Cluster(worker__ranks=2, worker__threads=1, kvmgr__block_tokens=BLOCK,
                kvmgr__kv_store_bytes=1 << 30)
    c.sets["kvmgr.kv_store_dir"] = os.path.join(c.dir, "tier")
    try:
        c.up()
    except AssertionError as error:
        assert "kv_store_dir" in str(error) and "ranks 2" in str(error), error
    else:
        raise AssertionError("the tier was taken with two ranks")
    finally:
        c.__exit__()


if __name__ == "__main__":
    cluster.main(globals())
