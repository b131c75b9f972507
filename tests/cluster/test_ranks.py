# SPDX-License-Identifier: Apache-2.0
"""One model over two worker processes: the texts of one rank, and a group that heals."""
import ctypes
import json
import mmap
import os
import signal
import struct
import subprocess
import threading
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


def test_quantised_weights_give_the_text_of_one_rank():
    """The model as it ships: EXL3, split over the ranks."""
    model = os.path.join(cluster.ROOT, "deploy", "demo")
    cases, texts = greedy_cases()[:4], []
    for ranks in (1, 2):
        with Cluster(worker__ranks=ranks, worker__threads=1, worker__model=model,
                     gateway__model=model, drafter__target=model) as c:
            assert "exl3" in c.health("worker")["quantization"]
            texts.append([ids(c, case, spec=spec) for case in cases for spec in ("off", "fixed:7")])
    assert texts[0] == texts[1], texts


def test_tcp_gives_the_golden_ids():
    nodes = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    with Cluster(worker__ranks=2, worker__threads=1, worker__fabric="tcp", worker__fabric_nodes=nodes) as c:
        texts_equal(c, greedy_cases()[:3])


FAKE_NCCL = os.path.join(cluster.BUILD, "tests", "unit", "libfake_nccl.so")


def test_nccl_gives_the_golden_ids():
    """Activations over NCCL, here a library of our own that moves the bytes through a shared file; a
    communicator dies with its group and a new one is made."""
    fields = {"worker__ranks": 2, "worker__threads": 1, "worker__dcp": 2, "kvmgr__block_tokens": 128,
              "worker__fabric": "nccl", "worker__nccl_library": FAKE_NCCL, "worker__cuda_library": FAKE_NCCL}
    longest = max(greedy_cases(), key=lambda case: len(case["ids"]))
    nodes = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    for more in ({}, {"worker__fabric_nodes": nodes}):
        with Cluster(**fields, **more) as c:
            assert log_count(c, "worker-0", '"fabric measured" path=nccl') > 0
            texts_equal(c, greedy_cases()[:2])
            old = rank_pid(c, 1)
            got, _ = stream_through(c, longest, lambda pid=old: os.kill(pid, signal.SIGKILL))
            assert got == longest["ids"], (got, longest["ids"])
            texts_equal(c, greedy_cases()[:1])
            assert log_count(c, "worker-0", '"group formed"') == 2
            c.ledger_settles()
            c.pool_settles()


def test_nccl_without_a_gpu_is_refused():
    def said(**fields):
        run = subprocess.run(
            [os.path.join(cluster.BUILD, "worker", "tandem-worker"), "--ranks=2", "--fabric=nccl",
             *(f"--{key}={value}" for key, value in fields.items())], capture_output=True, text=True, timeout=20,
            check=False, cwd=cluster.ROOT, env={**os.environ, "FAKE_NCCL_FAIL": "device"})
        assert run.returncode == 2, run
        return run.stderr
    fake = {"nccl_library": FAKE_NCCL, "cuda_library": FAKE_NCCL}
    assert "needs a GPU on every node: no CUDA-capable device" in said(**fake)
    assert "/nowhere/libnccl.so.2: cannot open" in said(**{**fake, "nccl_library": "/nowhere/libnccl.so.2"})
    assert "libm.so.6: has no cudaGetDeviceCount" in said(**{**fake, "cuda_library": "libm.so.6"})


def pool_tokens(c):
    return int(c.redis("HGET", "tandem:{tandem}:pool:0", "blocks_total")) * 128


def test_cache_rows_by_position():
    """Each rank keeps its own positions: the same ids, and twice the tokens in the same arena."""
    cases = greedy_cases()
    longest = max(cases, key=lambda case: len(case["ids"]))
    shared = {"worker__ranks": 2, "worker__threads": 1, "kvmgr__block_tokens": 128}
    with Cluster(**shared) as c:
        whole = pool_tokens(c)
    nodes = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    for fields in ({"interleave": 4}, {"interleave": 64, "fabric": "tcp", "fabric_nodes": nodes}):
        with Cluster(worker__dcp=2, **shared, **{f"worker__{k}": v for k, v in fields.items()}) as c:
            texts_equal(c, cases[:4])
            old = rank_pid(c, 1)
            got, _ = stream_through(c, longest, lambda: os.kill(old, signal.SIGKILL))
            assert got == longest["ids"], (got, longest["ids"])
            c.ledger_settles()
            c.pool_settles()
            assert pool_tokens(c) >= 1.9 * whole, (pool_tokens(c), whole)


def turns(ranks, after=None, **sets):
    """A talk of five turns, each compared with itself cold; the ids of each answer."""
    with Cluster(worker__ranks=ranks, worker__threads=1, kvmgr__block_tokens=BLOCK, **sets) as c:
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
    assert turns(2, after=new_rank_0) == alone  # rank 1 still has its part
    assert turns(2, after=new_rank_0, worker__dcp=2, worker__interleave=BLOCK // 4) == alone


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


def rank_health(c, rank):
    return json.loads(c.role_page("worker", "/health", rank=rank))


def test_deaths_around_the_group():
    """kvmgr, rank 0, a drain, a rolling restart: the text goes on, and the group heals."""
    longest = max(greedy_cases(), key=lambda case: len(case["ids"]))
    with Cluster(worker__ranks=2, worker__threads=1, kvmgr__block_tokens=BLOCK) as c:
        for role in ("kvmgr", "worker", "kvmgr"):
            old = c.pid(role)
            got, _ = stream_through(c, longest, lambda pid=old: os.kill(pid, signal.SIGKILL))
            assert got == longest["ids"], (role, got, longest["ids"])
            c.wait_restart(role, old)
            wait_for("ready again", 20, c.ready)
        texts_equal(c, greedy_cases()[:2])

        for command in (("drain", "worker", "--deadline", "1"), ("restart", "--rolling")):
            said = []
            thread = threading.Thread(target=lambda a=command: said.append(c.tandem(*a)))
            got, _ = stream_through(c, longest, thread.start)
            thread.join(120)
            assert said and got == longest["ids"], (command, got, longest["ids"])
            if command[0] == "drain":
                c.tandem("undrain", "worker")
                wait_for("ready again", 20, c.ready)
        assert rank_health(c, 1)["state"] == "ready"
        texts_equal(c, greedy_cases()[:2])
        c.ledger_settles()
        c.pool_settles()


def test_a_rank_that_lost_its_group_is_not_ready():
    with Cluster(worker__ranks=2, worker__threads=1) as c:
        assert rank_health(c, 1)["state"] == "ready"
        pid = c.kill("worker", signal.SIGSTOP)
        try:
            wait_for("rank 1 not ready", 5, lambda: rank_health(c, 1)["state"] != "ready")
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for("rank 1 ready", 15, lambda: rank_health(c, 1)["state"] == "ready")
        texts_equal(c, greedy_cases()[:1])


def xxh3(data):
    """The first 8 bytes of the 128-bit hash in its canonical form, as the fabric sums messages."""
    class Hash(ctypes.Structure):
        _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]
    library = ctypes.CDLL("libxxhash.so.0")
    library.XXH3_128bits.restype = Hash
    library.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return struct.unpack("<Q", struct.pack(">Q", library.XXH3_128bits(data, len(data)).high))[0]


HEAD = struct.Struct("<IBBHIIQQQQ")  # worker/wk_link.h: struct wk_head


def plan_altered(memory, ranks=2):
    """Looks for a plan on its way from rank 0 to rank 1 and makes another, sound one of it."""
    _, _, message, _ = struct.unpack_from("<IIII", memory, 0)
    slot = 64 + message
    ring = 64 + ranks * 256 + 1 * (128 + 2 * slot)  # worker/wk_link_local.c: struct rank_area
    written, = struct.unpack_from("<Q", memory, ring)
    taken, = struct.unpack_from("<Q", memory, ring + 64)
    for number in range(taken, written):
        at = ring + 128 + number % 2 * slot
        head = list(HEAD.unpack_from(memory, at))
        size = head[5]
        body = bytearray(memory[at + 64:at + 64 + size])
        order, kind, rows = (struct.unpack_from("<I", body, i)[0] if size >= i + 4 else 0
                             for i in (0, 8 + 12, 8 + 28))
        if head[1] != 6 or order != 2 or kind not in (1, 2) or rows == 0:
            continue
        # Behind the head one sequence of 17 words; its first row's id is the next but finals.
        finals, = struct.unpack_from("<I", body, 8 + 44 + 13 * 4)
        body[8 + 44 + (17 + finals) * 4] ^= 1
        head[9] = (xxh3(HEAD.pack(*head)[:40]) * 3 + xxh3(bytes(body))) % (1 << 64)
        memory[at + 64:at + 64 + size] = bytes(body)
        HEAD.pack_into(memory, at, *head)
        return True
    return False


def dump_of(c, rank):
    path = os.path.join(c.run_dir, f"worker-{rank}.plans")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    return lines


def test_ranks_that_hold_different_plans():
    """One id of one plan becomes another on its way: nobody computes, both say so in the same
    words and write down what they had, and the answer goes on."""
    longest = max(greedy_cases(), key=lambda case: len(case["ids"]))
    with Cluster(worker__ranks=2, worker__threads=1, worker__fabric_silence_ms=20000) as c:
        pid, altered = rank_pid(c, 1), []

        def plant():
            with open(os.path.join(c.run_dir, "fabric"), "r+b") as f, \
                    mmap.mmap(f.fileno(), 0) as memory:
                end = time.monotonic() + 10
                while not altered and time.monotonic() < end:
                    os.kill(pid, signal.SIGSTOP)
                    try:
                        time.sleep(0.02)
                        if plan_altered(memory):
                            altered.append(True)
                    finally:
                        os.kill(pid, signal.SIGCONT)
                    time.sleep(0.003)
        got, _ = stream_through(c, longest, plant)
        assert altered, "no plan was caught on its way"
        assert got == longest["ids"], (got, longest["ids"])
        dumps = [wait_for(f"dump of rank {rank}", 5, lambda r=rank: dump_of(c, r))
                 for rank in (0, 1)]
        reasons = {dump[0]["reason"] for dump in dumps}
        assert len(reasons) == 1 and "plans differ" in reasons.pop(), [d[0] for d in dumps]
        assert [dump[0]["rank"] for dump in dumps] == [0, 1]
        mine, theirs = (dump[1] for dump in dumps)  # the newest: what each of them had
        assert mine["step"] == theirs["step"] and mine["hash"] != theirs["hash"], (mine, theirs)
        assert sum(x != y for x, y in zip(mine["encoding"], theirs["encoding"])) == 1
        assert mine["step_us"] is None and theirs["step_us"] is None
        assert dumps[0][2]["hash"] == dumps[1][2]["hash"]
        texts_equal(c, greedy_cases()[:1])
        c.ledger_settles()
        c.pool_settles()


def test_a_slow_fabric_is_refused():
    """Rank 1 cannot know whether the cable will be mended: it tries on, and `up` says what is wrong."""
    c = Cluster(worker__ranks=2, worker__threads=1)
    c.sets["worker-1.fabric_bandwidth_mb_min"] = "1000000"
    c.up_seconds = 6
    start = time.monotonic()
    try:
        c.up()
        raise AssertionError("taken: a fabric below its floor")
    except AssertionError as error:
        said = str(error).split("\n---")[0]       # without the logs' ends
        assert "not yet: " in said and "not ready after" in said, error
        assert "the floor is 1000000 MB/s; likely cause:" in said, error
        assert "rank 1 refuses the group: fabric local is too slow" in c.log("worker"), error
        for rank in (0, 1):
            log = log_count(c, f"worker-{rank}", '"group refused"')
            assert 1 <= log <= 2 + (time.monotonic() - start) / 10, log     # not with each try
            with open(os.path.join(c.run_dir, f"worker-{rank}.restarts"), encoding="ascii") as f:
                assert f.read().strip() == "0"
    finally:
        c.__exit__()


def test_addresses_that_only_look_local_are_refused():
    for node, why in (("127.0.0.1.example:7000", ": want A.B.C.D:PORT"), ("127.evil:7000", ": want"),
                      ("127.0.0.1", ": want"), ("127.0.0.1:0", ": want"), ("127.0.0.1:70000", ": want"),
                      ("0.0.0.0:7000", ": want"), ("127.1:7000", ": want"),
                      ("128.0.0.1:7000", " is beyond loopback")):
        run = subprocess.run(
            [os.path.join(cluster.BUILD, "worker", "tandem-worker"), "--ranks=2", "--fabric=tcp",
             f"--fabric_nodes=127.0.0.1:7001,{node}"], capture_output=True, text=True, timeout=20,
            check=False, cwd=cluster.ROOT)
        assert run.returncode == 2 and f"address 2{why}" in run.stderr, (node, run)


def test_groups_over_tcp_are_refused():
    """One fabric_nodes cannot be the addresses of two groups."""
    for groups, text in ((2, "fabric: tcp with groups (2)"), (1, "rank: 2 of ranks 2")):
        run = subprocess.run(
            [os.path.join(cluster.BUILD, "worker", "tandem-worker"), "--ranks=2", "--rank=2", "--fabric=tcp",
             f"--groups={groups}", "--fabric_nodes=127.0.0.1:7001,127.0.0.1:7002"],
            capture_output=True, text=True, timeout=20, check=False, cwd=cluster.ROOT)
        assert run.returncode == 2 and text in run.stderr, run
        assert (groups == 2) == ("tcp with groups" in run.stderr), run


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


def test_two_nodes_of_one_host():
    """A role list per node, one key: worker-1 in folders of its own, at an address of its own."""
    a, b = Cluster(worker__threads=1), Cluster(worker__threads=1)
    keys = os.path.join(a.dir, "fabric.keys")
    a.tandem("keygen", keys)
    nodes = os.path.join(a.dir, "nodes")
    with open(nodes, "w", encoding="ascii") as f:
        f.write("left  127.0.0.1 redis kvmgr drafter router worker-0 gateway\nright 127.0.0.2 kvmgr-1 worker-1\n")
    for c, node in ((a, "left"), (b, "right")):
        c.sets["worker.fabric_keys"] = keys
        c.up_options = ["--nodes", nodes, "--node", node]
    try:
        b.tandem("up", *b.up_options, *(x for key, value in b.sets.items() for x in ("--set", f"{key}={value}")))
        wait_for("rank 1 waits", 20, lambda: rank_health(b, 1)["state"] != "ready")
        a.up()
        assert '"state":"ready"' in b.tandem("status", "--json").stdout
        assert os.listdir(b.run_dir).count("gateway-0.args") == 0
        texts_equal(a, greedy_cases()[:2])
        old = rank_pid(b, 1)
        longest = max(greedy_cases(), key=lambda case: len(case["ids"]))
        got, _ = stream_through(a, longest, lambda: os.kill(old, signal.SIGKILL))
        assert got == longest["ids"], (got, longest["ids"])
    finally:
        a.__exit__()
        b.__exit__()


if __name__ == "__main__":
    cluster.main(globals())
