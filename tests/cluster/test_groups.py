# SPDX-License-Identifier: Apache-2.0
"""Two groups behind one router: conversations stay where their blocks are, and go on elsewhere with
the same text when their group is lost, drained or restarted, whatever Redis holds or does."""
import contextlib
import hashlib
import os
import random
import signal
import struct
import threading
import time

import cluster
from cluster import Cluster, Load, greedy_cases, parallel, wait_for
from test_kv import BLOCK, Talk
from test_sessions import P, crc32c

LONGEST = max(greedy_cases(), key=lambda case: len(case["ids"]))


def two_groups(**sets):
    return Cluster(**{"worker__groups": 2, "kvmgr__block_tokens": BLOCK, **sets})


def both_ready(c):
    def ready():
        with contextlib.suppress(OSError):       # a router that was just killed
            return c.health("router")["groups_ready"] == 2
        return False
    wait_for("both groups ready", 20, ready)


def placed(c, result):
    return c.metric("router", f'tandem_router_affinity_total{{result="{result}"}}')


def maps(c, result):
    return c.metric("router", f'tandem_router_session_maps_total{{result="{result}"}}')


def home_of(c, talk):
    """The group that a first turn went to: its kvmgr keeps more blocks than before."""
    def cached():
        return [c.health(name)["blocks_cached"] for name in ("kvmgr", "kvmgr-1")]
    before = cached()
    talk.turn(hit=False)
    after = wait_for("blocks kept", 5, lambda: (lambda now: now != before and now)(cached()))
    return 0 if after[0] > before[0] else 1


def sid_of(c, session):
    with open(os.path.join(c.state_dir, "cluster.key"), "rb") as f:
        return hashlib.blake2b(session.encode(), digest_size=16, key=f.read()).hexdigest()


def group_kill(c, group):
    """All of a group at once and for good."""
    kill_for_good(c, [f"{role}-{group}" for role in ("worker", "drafter", "kvmgr")])


def kill_for_good(c, names):
    """Supervisors die first."""
    for kind in ("super", "pid"):
        for name in names:
            with open(c.path(name, kind), encoding="ascii") as f:
                os.kill(int(f.read()), signal.SIGKILL)


def test_turns_go_to_their_group():
    with two_groups() as c:
        both_ready(c)
        talks = [Talk(c, f"guest {i}", compare=i < 2) for i in range(6)]
        parallel([lambda t=t: t.turn(hit=False) for t in talks])
        for _ in range(2):
            for talk in talks:
                assert talk.turn() > 0
        health = c.health("router")
        assert health["groups"] == 2 and placed(c, "hit_session") >= 12, health
        assert sorted(w["group"] for w in health["workers"]) == [0, 1], health
        for name in ("kvmgr", "kvmgr-1"):    # both serve, and both have been resumed from
            kv = c.health(name)
            assert kv["blocks_cached"] > 0 and kv["tokens_reused"] > 0, (name, kv)
        # without a session key: by the first tokens of the prompt
        before = placed(c, "hit_prefix")
        nameless = Talk(c, "nobody", words=200, compare=False)
        nameless.ask = lambda salt, ask=nameless.ask: ask(salt, session=False)
        nameless.turn(hit=False)
        assert nameless.turn() > 0 and placed(c, "hit_prefix") > before
        c.ledger_settles()
        c.pool_settles()


def test_a_new_router_reads_session_maps():
    with two_groups() as c:
        both_ready(c)
        talks = [Talk(c, f"resident {i}", compare=False) for i in range(6)]
        parallel([lambda t=t: t.turn(hit=False) for t in talks])
        keys = [P + "sess:" + sid_of(c, talk.name) for talk in talks]
        wait_for("maps written", 10, lambda: all(
            c.redis("exists", key) == "1" for key in keys))
        incarnations = {c.redis("hget", key, "incarnation") for key in keys}
        assert len(incarnations) == 2, incarnations
        c.wait_restart("router", c.kill("router"))
        wait_for("ready", 20, c.ready)
        both_ready(c)
        for talk in talks:
            assert talk.turn() > 0
        assert maps(c, "used") == 6 and placed(c, "hit_map") == 6, c.role_metrics("router")
        # the maps of a kvmgr that is gone are no more than paper
        c.wait_restart("kvmgr-1", c.kill("kvmgr-1"))
        c.wait_restart("router", c.kill("router"))
        wait_for("ready", 20, c.ready)
        both_ready(c)
        for talk in talks:
            talk.turn(hit=None)
        assert maps(c, "stale") >= 1, c.role_metrics("router")
        # other tenants may use the same names
        other = Talk(c, "resident 0", salt="another tenant")
        other.turn(hit=False)
        c.ledger_settles()
        c.pool_settles()


def test_group_lost():
    """The other group computes again what was there; streams that ran there go on."""
    with two_groups() as c:
        both_ready(c)
        talks = {}
        while len(talks) < 2:
            talk = Talk(c, f"mover {random.random()}", compare=False)
            talks[home_of(c, talk)] = talk
        with Load(c, 4) as load:
            load.wait_more(4)
            group_kill(c, 1)
            load.wait_more(8)
        # before it counts as lost it is only one that takes nothing (`miss_full`)
        wait_for("the loss is known", 10,
                 lambda: c.metric("router", "tandem_router_workers_lost_total") >= 1)
        assert c.ready()
        assert talks[0].turn() > 0
        talks[1].compare = True          # the same text as one that nobody had begun elsewhere
        talks[1].turn(hit=False)
        assert talks[1].turn() > 0       # and now it lives here
        assert placed(c, "miss_gone") >= 1, c.role_metrics("router")
        ledger = c.health("router")["ledger"]
        assert ledger["failed"] == 0, ledger


def test_groups_restarted_one_after_the_other():
    """No stream that has begun breaks, and every text is right."""
    with two_groups() as c, Load(c, 4) as load:
        both_ready(c)
        load.wait_more(4)
        load.refusals_allowed = True     # by the gateway, while it is drained
        longs = []
        threads = [threading.Thread(target=lambda: longs.append(c.stream(
            LONGEST["prompt"], path="/v1/completions", return_token_ids=True, max_tokens=2000,
            temperature=0, ignore_eos=True, timeout=300)), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        old = {name: c.pid(name) for name in c.names()}
        start = time.monotonic()
        refused = {}

        def watch():     # while groups are renewed there is always one that takes what comes
            while "router" not in refused:
                time.sleep(0.05)
                with contextlib.suppress(OSError, ValueError):
                    if c.pid("router") != old["router"]:
                        refused["router"] = True
                        return
                    refused["groups"] = load.refused
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        said = c.tandem("restart", "--rolling").stdout
        watcher.join(10)
        assert refused == {"groups": 0, "router": True}, refused
        print(f"measured: rolling restart of two groups, 6 streams | `tests/cluster/test_groups.py` | "
              f"{time.monotonic() - start:.1f} s, {load.done} streams whole, {load.refused} "
              f"attempts told to come again")
        assert "all roles restarted" in said, said
        assert all(c.pid(name) != pid for name, pid in old.items()), (old, said)
        for thread in threads:
            thread.join(120)
        assert len(longs) == 2 and longs[0].ids == longs[1].ids and len(longs[0].ids) == 2000
        load.wait_more(4)
        load.pause()
        c.ledger_settles(20)
        c.pool_settles(20)
        load.go_on()


def test_drain_hands_over_and_writes_down():
    with two_groups() as c:
        c.sets["kvmgr.kv_store_dir"] = os.path.join(c.dir, "tier")
        c.sets["kvmgr.kv_store_bytes"] = 1 << 30
        c.tandem("down")
        c.up()
        both_ready(c)
        talk = Talk(c, "leaving", compare=False)
        while home_of(c, talk) != 1:
            talk = Talk(c, f"leaving {random.random()}", compare=False)
        assert c.health("kvmgr-1")["unwritten"] > 0
        assert "is drained" in c.tandem("drain", "worker-1", "--deadline", "4").stdout
        told = c.redis("hgetall", P + "drain:1").splitlines()
        told = dict(zip(told[::2], told[1::2]))
        assert told["by"] == "operator" and told["sessions_left"] == "0", told
        assert int(told["deadline"]) - int(told["since"]) == 4000, told
        kv = c.health("kvmgr-1")
        assert kv["unwritten"] == 0 and kv["tier_blocks"] > 0 and kv["maps_waiting"] == 0, kv
        assert c.redis("exists", P + "sess:" + sid_of(c, talk.name)) == "1"
        assert c.health("worker-1")["state"] == "draining" and c.ready()
        moved = c.health("worker-1")["ledger"]["accepted"]
        talk.compare = True
        talk.turn(hit=False)             # elsewhere, and the text is right
        assert c.health("worker-1")["ledger"]["accepted"] == moved
        assert placed(c, "miss_gone") >= 1
        c.tandem("undrain", "worker-1")
        wait_for("not told any more", 5, lambda: c.redis("exists", P + "drain:1") == "0")
        both_ready(c)
        assert talk.turn() > 0
        c.ledger_settles()


def test_groups_of_two_sizes():
    """What only the larger one can hold goes there; a full one lets the other serve."""
    with two_groups(**{"worker-1__seqs_max": 1, "worker-1__context_max": 256}) as c:
        both_ready(c)
        sizes = {w["group"]: w["context_max"] for w in c.health("router")["workers"]}
        assert sizes[1] == 256 < sizes[0], sizes
        wait_for("the larger one counts", 2, lambda: c.request("GET", "/v1/models").json()["data"][0][
            "max_model_len"] == sizes[0])
        big = Talk(c, "big", words=300, compare=False)
        assert home_of(c, big) == 0
        assert big.turn() > 0
        case = LONGEST
        got = parallel([lambda: c.stream(case["prompt"], path="/v1/completions", temperature=0,
                                         return_token_ids=True, max_tokens=200) for _ in range(8)])
        assert all(stream.ids == case["ids"] for stream in got)


def hostile_maps(c, model):
    """Values under the names of session maps: what no kvmgr writes, and what one wrote for others."""
    good = dict(zip(*[iter(c.redis("hgetall", model).splitlines())] * 2))
    epoch, gen = int(good["epoch"]), int(good["gen"])
    blocks = os.urandom(22 * 8)

    def chunk(body=blocks, epoch=epoch, gen=gen, damage=0):
        head = struct.pack("<QQ", epoch, gen)
        return head + struct.pack("<I", crc32c(head + body) ^ damage) + body
    fields = {**good, "n_blocks": "8", "n_tokens": str(8 * BLOCK)}
    for name, values, body in [
            ("a string", "not a hash", None), ("no fields", {"x": "y"}, None),
            ("epoch only", {"epoch": "1"}, None), ("no chunk", fields, None),
            ("blocks that nobody has", fields, chunk()), ("crc", fields, chunk(damage=1)),
            ("another gen", fields, chunk(gen=gen + 1)), ("another epoch", fields, chunk(epoch=epoch + 1)),
            ("short chunk", fields, chunk()[:-1]), ("empty chunk", fields, b""),
            ("chunk of a megabyte", fields, os.urandom(1 << 20)),
            ("megabyte in a field", {**fields, "salt": "a" * (1 << 20)}, chunk()),
            *[(f"n_blocks {n}", {**fields, "n_blocks": n}, chunk()) for n in (
                "0", "-1", "1e300", "nan", "inf", "8.5", "4294967295", "18446744073709551616", "")],
            *[(f"{field} {value!r}", {**fields, field: value}, chunk()) for field, value in [
                ("incarnation", "0" * 16), ("incarnation", "zz"), ("incarnation", ""),
                ("layout_fp", "0" * 32), ("model_fp", "0" * 32), ("salt", "f" * 32),
                ("salt", "'; return 1"), ("epoch", str(epoch + 7)), ("epoch", "-5"),
                ("n_tokens", "1" * 60), ("gen", "x")]]]:
        yield name, values, body


def redis_raw(c, *arguments):
    """A command whose arguments may be any bytes."""
    import socket  # pylint: disable=import-outside-toplevel
    parts = [a if isinstance(a, bytes) else str(a).encode() for a in arguments]
    data = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(5)
        s.connect(os.path.join(c.run_dir, "redis.sock"))
        s.sendall(data)
        answer = s.recv(4096)
    assert answer[:1] in b"+:", answer


def test_hostile_session_maps():
    """Whatever Redis says of a conversation, it is served with its own text."""
    with two_groups() as c:
        both_ready(c)
        owner = Talk(c, "owner", compare=False)
        owner.turn(hit=False)
        model = P + "sess:" + sid_of(c, "owner")
        wait_for("map", 10, lambda: c.redis("exists", model) == "1")
        pid = c.pid("router")
        names = []
        for number, (name, values, body) in enumerate(hostile_maps(c, model)):
            victim = Talk(c, f"victim {number}", salt="tenant", words=40, answer=8, compare=True)
            key = P + "sess:" + sid_of(c, victim.name)
            if isinstance(values, str):
                redis_raw(c, "set", key, values)
            else:
                redis_raw(c, "hset", key, *[x for pair in values.items() for x in pair])
            if body is not None:
                redis_raw(c, "set", key + ":b:0", body)
            victim.turn(hit=False)
            names.append(name)
        # a list where a chunk should be, and another's own map under a new name
        victim = Talk(c, "victim of a list", compare=True)
        key = P + "sess:" + sid_of(c, victim.name)
        redis_raw(c, "copy", model, key)
        redis_raw(c, "rpush", key + ":b:0", "x")
        victim.turn(hit=False)
        thief = Talk(c, "thief", compare=True)
        key = P + "sess:" + sid_of(c, thief.name)
        redis_raw(c, "copy", model, key)
        redis_raw(c, "copy", model + ":b:0", key + ":b:0")
        used = maps(c, "used")
        thief.turn(hit=False)
        assert maps(c, "used") == used + 1      # sent to the owner's group, and nothing taken
        assert c.pid("router") == pid and c.ready()
        # a busy machine may miss Redis' own deadline now and then
        read = {result: maps(c, result) for result in ("corrupt", "stale", "absent", "failed", "used")}
        assert read["corrupt"] > 15 and read["stale"] >= 1, (read, names)
        assert owner.turn() > 0
        c.ledger_settles()
        c.pool_settles()


def test_redis_away_costs_nothing():
    """Stopped, killed, emptied, slow: new conversations wait no longer than the deadline."""
    with two_groups() as c:
        both_ready(c)

        def timed(name):
            start = time.monotonic()
            got = c.stream(LONGEST["prompt"], path="/v1/completions", return_token_ids=True,
                           max_tokens=200, temperature=0, session_id=name)
            assert got.ids == LONGEST["ids"]
            return time.monotonic() - start
        fresh = iter(range(10000))

        def median():
            return sorted(timed(f"new {next(fresh)}") for _ in range(7))[3]
        base = median()
        talk = Talk(c, "stays", compare=False)
        talk.turn(hit=False)
        pid = c.kill("redis", signal.SIGSTOP)
        first = timed(f"new {next(fresh)}")
        stopped = median()
        # 20 ms of an operation, once, then the breaker is open; the rest is this machine's noise
        assert first - base < 0.5 and stopped - base < 0.25, (base, first, stopped)
        wait_for("router degraded", 10, lambda: c.health("router")["state"] == "degraded")
        assert c.ready() and talk.turn() > 0     # what the router remembers needs no Redis
        os.kill(pid, signal.SIGCONT)
        wait_for("router well", 10, lambda: c.health("router")["state"] == "ready")
        asked = maps(c, "absent")
        timed(f"new {next(fresh)}")
        wait_for("maps are read again", 10, lambda: timed(f"new {next(fresh)}") and
                 maps(c, "absent") > asked)
        c.redis("flushall")
        assert talk.turn() > 0
        with Load(c, 3) as load:
            for _ in range(3):
                c.redis("debug", "sleep", "0.3")
                load.wait_more(2)
            c.wait_restart("redis", c.kill("redis"))
            load.wait_more(2)
        print(f"measured: first answer of a new conversation with Redis stopped | "
              f"`tests/cluster/test_groups.py` | {1000 * (stopped - base):.0f} ms added")
        c.ledger_settles()


def test_groups_of_two_ranks():
    """Two replicas, each over two ranks with the cache by position.  What one has is asked of it
    again; a rank killed in the middle of an answer comes back, or the other group goes on with it: the
    same text either way; the group heals and takes its part again."""
    sets = {"worker__ranks": 2, "worker__threads": 1, "worker__dcp": 2, "worker__interleave": 4}
    with two_groups(**sets) as c:
        both_ready(c)
        talks = {}
        while len(talks) < 2:
            talk = Talk(c, f"pair {random.random()}", compare=False)
            talks[home_of(c, talk)] = talk
        for talk in talks.values():
            assert talk.turn() > 0
        assert placed(c, "hit_session") >= 2

        for victim in ("worker-3", "worker-1"):     # rank 1 of group 1, then of group 0
            home, state = int(victim[-1]) // 2, {"hurt": False}
            mover = Talk(c, f"mover {random.random()}", compare=False)
            while home_of(c, mover) != home:
                mover = Talk(c, f"mover {random.random()}", compare=False)
            alone = mover.ask("nobody else", session=False)
            old = c.pid(victim)

            def hurt(result, state=state, old=old):
                if len(result.ids) >= 4 and not state["hurt"]:
                    state["hurt"] = True
                    os.kill(old, signal.SIGKILL)
            with Load(c, 3) as load:
                load.wait_more(3)
                got = c.stream(mover.ids, path="/v1/completions", return_token_ids=True, temperature=0.7,
                               top_p=0.9, seed=mover.seed, max_tokens=mover.answer, cache_salt=mover.salt,
                               ignore_eos=True, session_id=mover.name, on_event=hurt, timeout=90)
                assert state["hurt"] and got.done and got.error is None, got.error
                assert got.ids == alone.ids, (victim, got.text, alone.text)
                load.wait_more(3)
                c.wait_restart(victim, old)
                both_ready(c)
                load.wait_more(3)
            wait_for("a new group", 10, lambda home=home: c.log(f"worker-{2 * home}").count('"group formed"') > 1)
        for group in (0, 1):        # healed: what its conversation had is there or computed again
            talks[group].compare = True
            talks[group].turn(hit=None)
            assert talks[group].turn() > 0
        ledger = c.ledger_settles(20)[0]
        assert ledger["failed"] == 0, ledger
        pools = [c.health(name) for name in ("kvmgr", "kvmgr-1")]
        assert all(kv["tokens_reused"] > 0 for kv in pools), pools
        c.pool_settles(20)


def test_a_rank_that_stays_away():
    """Half a group serves nobody: what ran there and what comes back goes on with the other group,
    computed again, while the half waits for its peer."""
    sets = {"worker__ranks": 2, "worker__threads": 1, "worker__dcp": 2, "worker__interleave": 4}
    with two_groups(**sets) as c:
        both_ready(c)
        talk = Talk(c, f"left {random.random()}", compare=False)
        while home_of(c, talk) != 0:
            talk = Talk(c, f"left {random.random()}", compare=False)
        with Load(c, 4) as load:        # its texts are compared
            load.wait_more(4)
            kill_for_good(c, ["worker-1"])
            wait_for("one group left", 10, lambda: c.health("router")["groups_ready"] == 1)
            load.wait_more(8)
        assert c.ready() and c.pid("worker-0")
        talk.compare = True
        talk.turn(hit=False)
        assert talk.turn() > 0          # and now it lives there
        assert c.health("router")["groups_ready"] == 1
        ledger = c.health("router")["ledger"]
        assert ledger["failed"] == 0, ledger


if __name__ == "__main__":
    cluster.main(globals())
