# SPDX-License-Identifier: Apache-2.0
"""Malformed and lying frames to every process: dropped and counted, the process lives and serves,
and no client's text changes."""
import hashlib
import os
import random
import re
import socket
import struct
import threading

import cluster
import wire
from cluster import Cluster, Load, greedy_cases, pid_alive, wait_for
from wire import HUGE, RANDOM, Fake, Zmtp, header, lying_drafts, message, words


def bad_messages(rng):
    """Frames of every kind of fault in design of the header and beyond."""
    yield [b""]
    yield [b"x"]
    yield [header()[:31]]
    yield [header() + b"x", b""]
    yield [header(magic=0), b""]
    yield [header(version=0), b""]
    yield [header(version=2), b""]
    yield [header(kind=0), b""]
    yield [header(kind=255), b""]
    yield [header(flags=0xFFFF), b""]
    yield [header(body=5), b"1234"]
    yield [header(body=0xFFFFFFFF), b""]
    yield [header(body=4), b"12345"]
    yield [header()]
    yield [header(), b"", b"", b"", b""]
    yield [header()] + [b""] * 30
    yield [header(body=2 << 20), b"\0" * (2 << 20)]
    for kind in range(0, 60):
        yield [header(kind=kind), b""]
        yield [header(kind=kind), b"", b""]
        yield [header(kind=kind), b"", b"abc"]
        junk = rng.randbytes(rng.randrange(1, 200))
        yield [header(kind=kind, body=len(junk), ident=rng.randbytes(16)), junk]
        yield [header(kind=kind, body=len(junk), ident=rng.randbytes(16)), junk, rng.randbytes(40)]
        # plausible protobuf: fields with huge lengths and numbers
        field = bytes([(rng.randrange(1, 15) << 3) | 2]) + b"\xff\xff\xff\xff\x07"
        yield [header(kind=kind, body=len(field)), field]
        field = b"".join(bytes([(n << 3) | 0]) + b"\xff" * 9 + b"\x01" for n in range(1, 15))
        yield [header(kind=kind, body=len(field)), field]
        yield [header(kind=kind, body=len(field)), field, struct.pack("<8I", *range(8))]
    for _ in range(300):
        yield [rng.randbytes(rng.randrange(0, 80)) for _ in range(rng.randrange(1, 6))]


def test_garbage_on_every_socket():
    rng = random.Random(random.random())
    with Cluster() as c:
        pids = {role: c.pid(role) for role in cluster.ROLES}
        for role in ("router", "kvmgr", "drafter"):
            path = os.path.join(c.run_dir, f"{role}.sock")
            for identity in (b"evil", b"", b"gateway-7", b"worker-9", b"x" * 200):
                try:
                    peer = Zmtp(path, identity)
                    for message in bad_messages(rng):
                        peer.send(message)
                    peer.close()
                except OSError:
                    pass        # the socket may hang up on us: that is its right
            # bytes that are no ZMTP at all
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(path)
            try:
                raw.sendall(rng.randbytes(5000))
            except OSError:
                pass
            raw.close()
        answer = c.stream("Who are you?", temperature=0)
        assert "small test model" in answer.content
        assert pids == {role: c.pid(role) for role in cluster.ROLES}
        assert all(pid_alive(pid) for pid in pids.values())
        wait_for("ready", 10, c.ready)
        c.ledger_settles()
        c.pool_settles()


def test_peer_that_takes_a_name():
    """A second connection under a living peer's routing id takes over; the peer recovers."""
    with Cluster() as c:
        for name in (b"worker-0", b"gateway-0"):
            peer = Zmtp(os.path.join(c.run_dir, "router.sock"), name)
            peer.send([header(kind=10), b""])
            peer.close()
            wait_for(f"served again after {name}", 20, lambda: c.ready() and c.stream(
                "Who are you?", temperature=0).finish == "stop")


def refused(c, role):
    """Everything that the role has refused, by its own count."""
    counters = r"^tandem_\w+_(?:refused|bad_messages|malformed|unexpected|strays)_total(?:\{.*\})? (\S+)$"
    attaches = r'^tandem_kvmgr_attaches_total\{.*result="refused".*\} (\S+)$'
    page = c.role_metrics(role)
    return sum(float(value) for pattern in (counters, attaches)
               for value in re.findall(pattern, page, re.M))


def request(**more):
    return {"prompt_count": 3, "ids_count": 3, "sampling": {"top_p": 1.0, "repetition_penalty": 1.0},
            "limits": {"output_tokens_max": 5}, **more}


def lies_to_router(rng):
    ident = rng.randbytes(16)
    yield message("RouterSubmit", ident, payload=words([1, 2, 3]), request=request(ids_count=4))
    yield message("RouterSubmit", ident, payload=words([1, 2, 3]), request=request(prompt_count=HUGE))
    yield message("RouterSubmit", ident, payload=words([1, 2]), request=request())
    yield message("RouterSubmit", ident, payload=words([1, 2, 3]), request=request(
        limits={"output_tokens_max": 0}))
    yield message("RouterSubmit", ident, payload=words([1, 2, 3]), request=request(
        group_index=5, group_count=2))
    yield message("RouterSubmit", ident, payload=words([1, 2, 3]), request=request(
        limits={"output_tokens_max": 5, "stop_ids": list(range(100))}))
    yield message("RouterCancel", ident)
    yield message("RouterAnnounce", kind="gateway", live_count=1000, payload=ident)
    yield message("RouterAnnounce", kind="king", payload=b"")
    for seq, ids in ((0, [1]), (9, [1, 2]), (3, [7]), (HUGE, [1]), (0, [HUGE] * 1025)):
        yield message("TokensEmitted", ident, epoch=rng.randrange(1 << 32), seq=seq, ids=ids)
    yield message("TokensEmitted", ident, seq=0, ids=[1, 2], logprobs=1, logprob=[0.0])
    yield message("TokensEmitted", ident, seq=0, ids=[1], finish=77)
    yield message("TokensEmitted", ident, seq=0, finish=4, code=4000)
    yield message("AssignReply", ident, code=1)
    yield message("WorkerState", worker_id=9, state=2, seqs_max=HUGE, context_max=2097152,
                  incarnation=RANDOM, blocks_free=2, blocks_total=1)
    yield message("WorkerState", worker_id=9, state=2, seqs_max=HUGE, context_max=HUGE)
    yield message("WorkerState", worker_id=9, state=2, seqs_max=HUGE, context_max=2097152,
                  incarnation=RANDOM, canary_ids=[1] * 64, canary_output_count=8, kv_state=1,
                  decode_tokens_per_s=1e300, ledger={"accepted": 1, "live": RANDOM})
    yield message("WorkerState", worker_id=9, state=2, canary_ids=[1] * 65)
    yield message("WorkerDrain", struct.pack("<QQ", 77, 0), deadline_unix_us=RANDOM)
    yield message("WorkerAssign", ident, payload=words([1, 2, 3]), request=request(), canary=1)


def lies_to_kvmgr(rng):
    for epoch in (0, 1, 2, HUGE):
        ident = rng.randbytes(16)
        yield message("KvAttach", epoch=epoch, worker_id=9, incarnation=5, dsa_layers=HUGE,
                      latent_dim=HUGE, index_dim=HUGE, index_kpool=4, state_bytes=1 << 60,
                      seqs_max=16, ranks=1, model_fp=bytes(16))
        yield message("KvAttach", epoch=epoch, worker_id=9, incarnation=5, seqs_max=HUGE, ranks=1)
        yield message("KvAttach", epoch=epoch, worker_id=9, rank=3, ranks=2)
        yield message("KvOpen", ident, epoch=epoch, prompt_count=10, blocks_wanted=1, payload=b"")
        yield message("KvOpen", ident, epoch=epoch, blocks_wanted=HUGE, payload=b"")
        yield message("KvOpen", ident, epoch=epoch, blocks_wanted=1, hash_count=900, payload=ident)
        for lease in [0, RANDOM] + [(epoch & 0xFFFFFF) << 40 | n for n in range(8)] + list(range(40)):
            yield message("KvRelease", ident, epoch=epoch, lease=lease)
            yield message("KvExtend", ident, epoch=epoch, lease=lease, blocks_have=0,
                          blocks_wanted=262144)
            yield message("KvCommit", ident, epoch=epoch, lease=lease, first_block=0, token_count=9,
                          hash_count=1, payload=ident)
            yield message("KvSnapshot", ident, epoch=epoch, lease=lease, token_count=16, hash=ident)
        yield message("KvPing", epoch=epoch, incarnation=5, lease_count=3, payload=bytes(24))
        yield message("KvPing", epoch=epoch, incarnation=5, lease_count=HUGE, payload=bytes(24))
        yield message("KvAdopt", epoch=epoch, session_key="x", count=2, payload=bytes(40))
        yield message("KvAdopt", epoch=epoch, session_key="x" * 300, count=2, payload=bytes(40))


def tokenizer_fp(model):
    with open(os.path.join(model, "tokenizer.json"), "rb") as f:
        return hashlib.blake2b(f.read(), digest_size=16).digest()


def lies_to_drafter(rng):
    ident = rng.randbytes(16)
    yield message("DraftPropose", ident, base_length=3, anchor=1, draft_count=7, step=1, ids_count=1,
                  payload=words([1]))
    yield message("DraftOpen", ident, epoch=7, ids_count=9, payload=words([1, 2]))
    yield message("DraftOpen", ident, ids_count=4, payload=words([1, 2, HUGE, 1]))
    for base in (4, 3, 1, 0, HUGE, 1000):
        yield message("DraftContext", ident, base_length=base, ids_count=1, payload=words([9]))
        yield message("DraftPropose", ident, base_length=base, anchor=HUGE, draft_count=16, step=9,
                      ids_count=0, payload=b"")
    yield message("DraftPropose", ident, base_length=4, draft_count=HUGE, ids_count=0, payload=b"")
    yield message("DraftPropose", ident, epoch=3, base_length=4, draft_count=7, source="oracle",
                  ids_count=0, payload=b"")
    yield message("DraftClose", rng.randbytes(16))
    yield message("DraftHello", incarnation=RANDOM, epoch=HUGE, model_fp=bytes(16))
    yield message("DraftHello", incarnation=1, model_fp=bytes(3))
    for ring in ("/dev/null", "/etc/passwd", "/dev/shm", "/nonexistent", "x" * 300, ""):
        yield message("DraftHello", incarnation=2, hidden=128, layers=8, vocab_size=1024,
                      tokenizer_fp=tokenizer_fp(cluster.DEMO),
                      tap_ring=ring, tap_ring_incarnation=RANDOM)


def test_well_formed_lies_to_bound_sockets():
    """From strangers, beside running streams: refused and counted, nobody's text or lease touched."""
    rng = random.Random(random.random())
    lies = {"router": lies_to_router, "kvmgr": lies_to_kvmgr, "drafter": lies_to_drafter}
    with Cluster() as c, Load(c, 3) as load:
        load.wait_more(3)
        pids = {role: c.pid(role) for role in cluster.ROLES}
        for role, make in lies.items():
            before = refused(c, role)
            for identity in (b"worker-9", b"gateway-9", b"stranger"):
                with_peer(os.path.join(c.run_dir, f"{role}.sock"), identity, make(rng))
                load.wait_more(1)
            wait_for(f"{role} counts them", 5, lambda role=role, before=before: refused(
                c, role) >= before + 10)
        load.wait_more(6)
        load.pause()
        c.ledger_settles(20)
        pool = c.pool_settles(20)
        assert pool["blocks_free"] + pool["blocks_cached"] == pool["blocks_total"], pool
        assert pids == {role: c.pid(role) for role in cluster.ROLES}
        load.go_on()
        wait_for("ready", 10, c.ready)


def with_peer(path, identity, messages):
    peer = Zmtp(path, identity)
    for frames in messages:
        peer.send(frames)
    peer.close()


def test_lies_of_a_fake_router():
    """Gateway and worker get lies in the router's name, about real and made-up requests."""
    rng = random.Random(random.random())
    case = max(greedy_cases(), key=lambda x: len(x["ids"]))
    with Cluster() as c:
        pids = {role: c.pid(role) for role in ("gateway", "worker")}
        before = {role: refused(c, role) for role in pids}
        got = []
        client = threading.Thread(daemon=True, target=lambda: got.append(c.stream(
            case["prompt"], path="/v1/completions", return_token_ids=True, temperature=0,
            max_tokens=len(case["ids"]) + 8)))
        with Fake(c, "router") as fake:
            gateway, worker = fake.wait_peer(b"gateway-0"), fake.wait_peer(b"worker-0")
            client.start()
            for frames in lies_of_router_to_worker(rng):
                worker.send(frames)
            gateway.send(message("RouterState", incarnation=7, ready=1, workers_ready=1,
                                 context_max=HUGE, blocks_total=1, blocks_free=1))
            gateway.send(message("RouterState", incarnation=7, ready=1, blocks_free=9))
            ident = None
            while ident is None:        # what the client asks for comes here
                frames = gateway.receive()
                if frames[0][5] == wire.KINDS["ROUTER_SUBMIT"]:
                    ident = frames[0][16:32]
            for one in (ident, rng.randbytes(16)):
                for seq, ids in ((7, [1, 2, 3]), (3, [4]), (HUGE, [5]), (2, list(range(1000)))):
                    gateway.send(message("TokensEmitted", one, seq=seq, ids=ids))
                gateway.send(message("TokensEmitted", one, seq=0, ids=[1, 2], logprobs=1))
                gateway.send(message("TokensEmitted", one, seq=0, ids=[1], finish=9))
            gateway.send(message("SubmitReply", rng.randbytes(16), code=0))
            gateway.send(message("WorkerAssign", ident, payload=words([1]), request=request()))
            replies = []
            while len(replies) < 5:
                frames = worker.receive()
                if frames[0][5] == wire.KINDS["ASSIGN_REPLY"]:
                    replies.append(frames[1])
            assert all(reply[:1] == b"\x08" and reply[1] != 0 for reply in replies), replies
        client.join(60)
        assert got and got[0].ids == case["ids"], got and got[0].ids
        assert pids == {role: c.pid(role) for role in pids}
        for role in pids:
            assert refused(c, role) >= before[role] + 4, (role, before, refused(c, role))
        wait_for("ready", 15, c.ready)
        c.ledger_settles()
        c.pool_settles()


def lies_of_router_to_worker(rng):
    """Five are well-formed and must be answered with a refusal; the others are dropped."""
    for spec in ("\u00e9" * 100, "fixed:x" + "\u20ac" * 40):   # a character stands across every cut
        yield message("WorkerAssign", rng.randbytes(16), payload=words([1, 2, 3]),
                      request=request(spec=spec))
    yield message("WorkerAssign", rng.randbytes(16), payload=words([1, 2, HUGE]), request=request())
    yield message("WorkerAssign", rng.randbytes(16), payload=words([1] * 300000), request=request(
        prompt_count=300000, ids_count=300000))
    yield message("WorkerAssign", rng.randbytes(16), payload=words([1, 2, 3, HUGE - 1]),
                  request=request(ids_count=4))
    yield message("WorkerAssign", rng.randbytes(16), payload=words([1, 2]), request=request())
    yield message("WorkerAssign", rng.randbytes(16), payload=words([1, 2, 3]), request=request(
        sampling={"top_p": 7.0, "repetition_penalty": -1.0}))
    yield message("WorkerCancel", rng.randbytes(16))
    yield message("RouterSubmit", rng.randbytes(16), payload=words([1, 2, 3]), request=request())
    yield message("RouterState", incarnation=7, blocks_free=9)
    yield message("TokensEmitted", rng.randbytes(16), seq=0, ids=[1])


def test_lies_of_a_fake_drafter():
    """Drafts of another length, epoch, step, number and vocabulary; and plausible ones that are wrong."""
    rng = random.Random(random.random())
    with Cluster() as c, Load(c, 3) as load:
        load.wait_more(2)
        pid, before = c.pid("worker"), refused(c, "worker")
        with Fake(c, "drafter") as fake:
            worker = fake.wait_peer(b"worker-0")
            for layers, hidden, kind in (([1, 200], 128, 1), ([1, 4], HUGE, 1), ([1, 4], 128, 9),
                                         (list(range(17)), 128, 1)):
                worker.send(message("DraftHelloReply", incarnation=98 + hidden % 7 + kind,
                                    source="dflash", draft_tokens_max=7, tap_layers=layers,
                                    tap_hidden=hidden, tap_type=kind))
            # Its name is anything at all: the status says it and stays what it is.
            name = '"},\\ \x01\n\x1b[2J"state":"down' + "\u00e9" * 40
            worker.send(message("DraftHelloReply", incarnation=96, source=name, draft_tokens_max=7))
            shown = name.encode()[:31].decode(errors="ignore")
            wait_for("the name", 5, lambda: c.health("worker")["drafter"] == shown)
            assert c.health("worker")["state"] == "ready"
            worker.send(message("DraftHelloReply", incarnation=99, source="ngram",
                                draft_tokens_max=16))
            goal, answered = load.done + 4, 0
            while load.done < goal or answered < 40:
                load.check()
                frames = worker.receive()
                if frames[0][5] != wire.KINDS["DRAFT_PROPOSE"]:
                    if frames[0][5] == wire.KINDS["DRAFT_HELLO"]:
                        worker.send(message("DraftHelloReply", incarnation=99, source="ngram",
                                            draft_tokens_max=16))
                    continue
                answered += 1
                for reply in lying_drafts(rng, frames):
                    worker.send(reply)
        assert pid == c.pid("worker")
        assert "no taps for the drafter" in c.log("worker")
        assert refused(c, "worker") >= before + 10, (before, refused(c, "worker"))
        load.wait_more(4)


def test_lies_of_a_fake_kvmgr():
    """Another arena, foreign blocks, leases nobody has: the worker waits for the real one."""
    rng = random.Random(random.random())
    with Cluster() as c, Load(c, 2) as load:
        load.wait_more(2)
        pid, before = c.pid("worker"), refused(c, "worker")
        with Fake(c, "kvmgr") as fake:
            worker = fake.wait_peer(b"worker-0")
            for epoch in (0, 1, 2, HUGE):
                ident = rng.randbytes(16)
                worker.send(message("KvState", epoch=epoch, incarnation=3, blocks_free=5,
                                    blocks_total=1))
                worker.send(message("KvState", epoch=epoch, incarnation=3, blocks_total=HUGE,
                                    blocks_free=1, slots_total=1))
                worker.send(message("KvOpenReply", ident, epoch=epoch, lease=5, block_count=3,
                                    payload=words([0, 0, HUGE])))
                worker.send(message("KvOpenReply", ident, epoch=epoch, block_count=9,
                                    payload=words([1])))
                worker.send(message("KvExtendReply", ident, epoch=epoch, lease=5, blocks_have=HUGE,
                                    payload=b""))
                worker.send(message("KvReclaim", epoch=epoch, lease=RANDOM))
                worker.send(message("KvPressure", epoch=epoch, blocks_free=2, blocks_total=1))
                worker.send(message("KvOpen", ident, epoch=epoch, blocks_wanted=1, payload=b""))
                for path in ("/etc/hostname", "/nowhere", os.path.join(c.dir, "arena.kv"), ""):
                    worker.send(message(
                        "KvAttachReply", epoch=epoch, code=0, arena_path=path, incarnation=3,
                        arena_bytes=1 << 50, layout_fp=bytes(16), block_tokens=256, block_count=HUGE,
                        slot_count=16, live_slots=8, kv_dtype=1, index_dtype=1,
                        snapshot_dtype=1))
            worker.receive()    # it still speaks
        load.wait_more(4, 90)
        assert refused(c, "worker") >= before + 16, (before, refused(c, "worker"))
        assert pid == c.pid("worker"), "the worker did not survive"
        # Another block size is what an operator may really change: it starts anew for it.
        with Fake(c, "kvmgr") as fake:
            fake.wait_peer(b"worker-0").send(message(
                "KvAttachReply", arena_path=os.path.join(c.dir, "arena.kv"), incarnation=4,
                arena_bytes=1 << 28, layout_fp=bytes(16), block_tokens=64, block_count=5,
                slot_count=16, live_slots=8, kv_dtype=1, index_dtype=1, snapshot_dtype=1))
            c.wait_restart("worker", pid)
        load.wait_more(4, 90)


cluster.main(globals())
