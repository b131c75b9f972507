# SPDX-License-Identifier: Apache-2.0
"""The KV pool: what a second turn brings along, and what survives deaths, evictions, restarts."""
import contextlib
import glob
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time

import cluster
from cluster import Cluster, Load, Skipped, greedy_cases, parallel, wait_for

BLOCK = 16
LONG = os.environ.get("TANDEM_LONG") == "1"
WORDS = ("owl code green river stone letter garden window yellow seven winter bridge paper orange "
         "station silver morning doctor simple market number forest engine island").split()


def prose(words, seed):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


class Talk:
    """A conversation that grows: every turn sends all of it, and is asked for again cold (under a
    salt that nobody had before) to compare the text and to see that nothing came from elsewhere."""

    def __init__(self, c, name, salt="tenant", words=60, answer=48, compare=True,
                 extra=None):
        self.c, self.name, self.salt, self.answer = c, name, salt, answer
        self.ids = c.post("/tokenize", {"prompt": prose(words, name)}).json()["tokens"]
        self.before = 0          # tokens of the conversation so far, the last answer included
        self.prompt = self.colds = 0
        self.compare, self.extra = compare, extra or {}
        self.seed = sum(name.encode())

    def ask(self, salt, session=True):
        fields = {"session_id": self.name, **self.extra} if session else self.extra
        got = self.c.stream(self.ids, path="/v1/completions", return_token_ids=True,
                            temperature=0.7, top_p=0.9, seed=self.seed, max_tokens=self.answer,
                            cache_salt=salt, ignore_eos=True, **fields)
        assert got.done and got.error is None, (got.error, self.c.tails())
        return got

    def turn(self, hit=True):
        """One turn; hit: it must resume; False: it must not; None: either.  Returns the tokens
        that came from the cache."""
        warm = self.ask(self.salt)
        cached = warm.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == warm.usage["tandem"]["cached_tokens"], warm.usage
        prompt = warm.usage["prompt_tokens"]
        if hit and self.before:
            new = prompt - self.before
            assert new >= 0 and cached >= prompt - BLOCK - new and cached < prompt, \
                (self.name, cached, prompt, new, self.c.health("kvmgr"))
        if hit is False:
            assert cached == 0, (self.name, cached, prompt)
        if self.compare:
            self.colds += 1
            cold = self.ask(f"cold {self.name} {self.colds}", session=False)
            assert cold.usage["prompt_tokens_details"]["cached_tokens"] == 0, cold.usage
            assert cold.ids == warm.ids and cold.text == warm.text, (cold.text, warm.text)
        self.prompt = prompt
        self.before = prompt + warm.usage["completion_tokens"]
        assert len(warm.ids) == warm.usage["completion_tokens"], warm.usage
        rng = random.Random(f"{self.name} {self.before}")
        self.ids += warm.ids + [rng.choice(self.ids) for _ in range(rng.randrange(1, 12))]
        return cached


def test_second_turn_is_warm():
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        talk = Talk(c, "first")
        talk.turn(hit=False)
        for _ in range(4):
            assert talk.turn() > 0
        other = Talk(c, "first", salt="somebody else", compare=False)
        other.turn(hit=False)
        c.ledger_settles()
        c.pool_settles()
        page = c.request("GET", "/metrics").body.decode()
        assert "tandem_worker_cached_tokens_total" in page


def test_penalties_count_what_was_not_computed():
    """Tokens that came from the cache count for penalties as if they had been computed; so does
    everything that a seed decides."""
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        for name, extra in (("repeat", {"repetition_penalty": 1.3}),
                            ("present", {"presence_penalty": 0.8, "frequency_penalty": 0.6}),
                            ("plain", {"spec": "off"})):
            talk = Talk(c, name, extra=extra)
            talk.turn(hit=False)
            for _ in range(2):
                assert talk.turn() > 0


def test_chat_history_is_warm():
    """As a client does it: the same messages, one answer and one question more; the key of the
    session may be prompt_cache_key."""
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        messages = [{"role": "user", "content": prose(60, "chat")}]
        fields = {"temperature": 0, "max_tokens": 60, "prompt_cache_key": "my talk"}
        first = c.chat(messages, **fields)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        answer = first["choices"][0]["message"]
        messages += [{"role": "assistant", "content": answer["content"] or "",
                      "reasoning_content": answer.get("reasoning_content") or ""},
                     {"role": "user", "content": "And what then?"}]
        second = c.chat(messages, **fields)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        # The template may drop reasoning of earlier turns: the first prompt is common to both.
        assert cached >= first["usage"]["prompt_tokens"] - 2 * BLOCK, (first["usage"], second["usage"])
        assert second["usage"]["tandem"]["cached_tokens"] == cached
        cold = c.chat(messages, cache_salt="none had this", **fields)
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cold["choices"][0]["message"] == second["choices"][0]["message"]


def test_snapshots_in_bf16():
    """Half the room for a state; turns resume from it, also under a new kvmgr, and a text found long
    ago is still found.  Equal bits are not promised: `exact` refuses it."""
    cases, slots = greedy_cases(["needle"]), {}
    for dtype in ("f32", "bf16"):
        with Cluster(kvmgr__block_tokens=BLOCK, kvmgr__snapshot_dtype=dtype,
                     worker__numerics="fast") as c:
            def answer(case):
                got = c.stream(case["prompt"], path="/v1/completions", return_token_ids=True,
                               temperature=0, max_tokens=len(case["ids"]) + 8)
                return got.usage["tandem"]["cached_tokens"], got.ids == case["ids"]
            assert all(right for _, right in map(answer, cases)), dtype
            talk = Talk(c, "first", compare=False)
            talk.turn(hit=False)
            assert talk.turn() > 0
            c.kill("kvmgr")
            wait_attached(c)
            assert talk.turn() > 0      # what the file held
            again = [answer(case) for case in cases]
            warm = [right for cached, right in again if cached > 0]
            assert len(warm) >= 0.9 * len(cases) and sum(warm) >= 0.9 * len(warm), (dtype, again)
            slots[dtype] = c.health("kvmgr")["snapshots_total"]
            c.ledger_settles()
            c.pool_settles()
    assert slots["bf16"] >= 1.8 * slots["f32"], slots
    print(f"state snapshots in the same share of the pool: {slots}")
    c = Cluster(kvmgr__snapshot_dtype="bf16")
    try:
        c.up()
    except AssertionError as error:
        assert "snapshot_dtype bf16" in str(error) and "numerics exact" in str(error), error
    else:
        raise AssertionError("states in bf16 were taken by exact")
    finally:
        c.__exit__()


def audit(c, sound=True):
    """What tandem-kvmgr --audit says of the arena: free + cached + leased = total."""
    command = [os.path.join(cluster.BUILD, "kvmgr", "tandem-kvmgr"), "--audit",
               f"--arena_path={c.sets['kvmgr.arena_path']}", f"--run_dir={c.run_dir}",
               f"--state_dir={c.state_dir}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode == 0) == sound, run.stdout + run.stderr
    return run.stdout


def attached(c):
    try:
        return c.health("kvmgr").get("workers", 0) >= 1
    except OSError:     # a new process whose page is not there yet
        return False


def wait_attached(c):
    wait_for("ready again", 20, c.ready)
    wait_for("worker attached", 20, lambda: attached(c))


def test_turns_survive_kills():
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        talk = Talk(c, "survivor")
        talk.turn(hit=False)
        for victims in (["worker"], ["kvmgr"], ["worker", "kvmgr"], ["kvmgr", "router"], ["worker"]):
            olds = [(role, c.kill(role)) for role in victims]
            for role, old in olds:
                c.wait_restart(role, old)
            wait_attached(c)
            assert talk.turn() > 0, victims
            audit(c)
        c.tandem("restart", "--rolling")
        wait_attached(c)
        assert talk.turn() > 0
        audit(c)
        kv = c.pool_settles()
        assert kv["blocks_free"] + kv["blocks_cached"] == kv["blocks_total"], kv


@contextlib.contextmanager
def second_worker(c):
    """One more worker on the cluster's arena; its process."""
    with open(os.path.join(c.run_dir, "worker-0.args"), encoding="utf-8") as f:
        command = f.read().splitlines() + ["--id=1"]
    with open(os.path.join(c.run_dir, "worker-1.log"), "wb") as log:
        process = subprocess.Popen(command, cwd=cluster.ROOT, stdout=log, stderr=log,
                                   stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(30)
        with contextlib.suppress(OSError):   # a killed one leaves its ring of taps
            with open(f"/proc/{c.pid('worker')}/maps", encoding="ascii") as f:
                for ring in set(re.findall(r"/dev/shm/tandem-taps-[0-9a-f]+-", f.read())):
                    for left in glob.glob(ring + "1.*"):
                        os.unlink(left)


def test_a_stopped_worker_corrupts_nobody():
    """Stopped in the middle of its steps beyond every patience, a worker keeps the blocks that it
    may write to when it wakes; others are served meanwhile, and every text is right."""
    cases = sorted(cluster.greedy_cases(), key=lambda case: -len(case["ids"]))[:2]
    talk = {"path": "/v1/completions", "return_token_ids": True, "temperature": 0,
            "ignore_eos": True, "max_tokens": 600}
    with Cluster(kvmgr__block_tokens=BLOCK) as c, second_worker(c) as stopped:
        wait_for("two workers", 30, lambda: c.health("kvmgr")["workers"] == 2)
        wait_for("both ready", 30, lambda: [w["usable"] for w in c.health(
            "router")["workers"]] == [True, True])
        right = [c.stream(case["prompt"], **talk).ids for case in cases]
        for end in (signal.SIGCONT, signal.SIGKILL):
            got, asked = {}, {}

            def ask(n, got=got):
                got[n] = c.stream(cases[n % 2]["prompt"], timeout=120, **talk)
            for n in range(4):
                asked[n] = threading.Thread(target=ask, args=(n,), daemon=True)
                asked[n].start()
            wait_for("both at work", 20, lambda: c.health("kvmgr")["leases"] >= 3)
            wait_for("second at work", 20, lambda: json.loads(worker_page(c, 1))["seqs_live"] >= 1)
            stopped.send_signal(signal.SIGSTOP)
            wait_for("silent", 20, lambda: "worker silent" in c.log("kvmgr").split("worker back")[-1])
            for thread in asked.values():        # the first worker takes over what the other had
                thread.join(90)
            held = [c.health("kvmgr")["leases"] for _ in range(5)]  # the canary's comes and goes
            assert min(held) >= 1, held
            with Load(c, 3) as load:
                time.sleep(1)
                stopped.send_signal(end)
                load.wait_more(6)
            for n in range(4):
                assert got[n].done and got[n].error is None, (n, got[n].error, c.tails())
                assert got[n].ids == right[n % 2], n
            c.pool_settles()
            audit(c)
        c.ledger_settles()


def worker_page(c, number):
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(3)
        s.connect(os.path.join(c.run_dir, f"worker-{number}.http"))
        s.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        data = b""
        while True:
            piece = s.recv(65536)
            if not piece:
                return data.split(b"\r\n\r\n", 1)[1]
            data += piece


def test_kill_while_it_writes():
    """Blocks that a dead worker was writing are free again; what was committed stays."""
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        quiet = Talk(c, "bystander", compare=False)
        quiet.turn(hit=False)
        for round_ in range(10 if LONG else 3):
            talk = Talk(c, f"writer {round_}", answer=300, words=100)
            result = []
            thread = threading.Thread(target=lambda t=talk, r=result: r.append(t.turn(hit=None)))
            thread.start()
            time.sleep(random.uniform(0.05, 0.5))
            role = random.choice(["worker", "kvmgr"])
            c.wait_restart(role, c.kill(role))
            thread.join(60)
            assert result, c.tails()
            wait_attached(c)
            assert talk.turn() > 0
            assert quiet.turn() > 0
        kv = c.pool_settles()
        assert kv["blocks_free"] + kv["blocks_cached"] == kv["blocks_total"], kv
        c.ledger_settles()
        audit(c)


def test_everything_stopped_and_started():
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        c.sets["kvmgr.kv_store_dir"] = os.path.join(c.dir, "tier")
        c.sets["kvmgr.kv_store_bytes"] = 1 << 30
        c.tandem("down")
        c.up()
        talk = Talk(c, "phoenix")
        other = Talk(c, "phoenix", salt="another tenant", compare=False)
        talk.turn(hit=False)
        talk.turn()
        for arena_too in (False, True):
            c.tandem("down")
            if arena_too:  # as after a reboot: only the tier is left
                os.unlink(c.sets["kvmgr.arena_path"])
            c.up()
            wait_attached(c)
            wait_for("tier indexed", 20, lambda: c.health("kvmgr")["tier_blocks"] > 0)
            assert talk.turn() > 0
        assert c.health("kvmgr")["tier"] == "on"
        other.turn(hit=False)
        page = c.request("GET", "/metrics").body.decode()
        assert re.search(r'tandem_kvmgr_lookups_total\{[^}]*"tier"\} [1-9]', page) or wait_for(
            "tier hit shown", 5, lambda: re.search(
                r'tandem_kvmgr_lookups_total\{[^}]*"tier"\} [1-9]',
                c.request("GET", "/metrics").body.decode())), page


def test_a_damaged_tier_costs_only_time():
    """Bits flipped in objects, foreign files, a folder that goes away: the text stays, and a tier
    that cannot be used says so."""
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        store = os.path.join(c.dir, "tier")
        c.sets["kvmgr.kv_store_dir"] = store
        c.sets["kvmgr.kv_store_bytes"] = 1 << 30
        c.tandem("down")
        c.up()
        talk = Talk(c, "scarred")
        talk.turn(hit=False)
        talk.turn()
        c.tandem("down")
        os.unlink(c.sets["kvmgr.arena_path"])
        objects = [os.path.join(d, f) for d, _, files in os.walk(store) for f in files
                   if f.endswith((".b", ".s"))]
        assert len(objects) > 8, objects
        for path in random.sample(objects, len(objects) // 2):
            with open(path, "r+b") as f:
                f.seek(random.randrange(os.path.getsize(path)))
                byte = f.read(1)
                f.seek(-1, os.SEEK_CUR)
                f.write(bytes([byte[0] ^ 0x10]))
        with open(os.path.join(os.path.dirname(objects[0]), "0" * 32 + ".b"), "wb") as f:
            f.write(b"not an object")
        c.up()
        wait_attached(c)
        talk.turn(hit=None)
        assert talk.turn() > 0
        assert c.health("kvmgr")["tier"] == "on"
        shutil.rmtree(store)
        with open(store, "wb"):
            pass
        old = c.kill("worker")       # its leases end; then many others want the blocks
        c.wait_restart("worker", old)
        c.tandem("down")             # the flush at the end has to write
        log = open(os.path.join(c.run_dir, "kvmgr-0.log"), encoding="utf-8").read()
        assert re.search(r" error kvmgr .*(tier|store)", log), log[-2000:]
        os.unlink(store)
        c.up()
        assert talk.turn() > 0


def committed_data(path):
    """Offsets and sizes of the data of committed blocks and snapshots in an arena file."""
    def padded(count):
        return (count + 4095) // 4096 * 4096

    with open(path, "rb") as f:
        head = f.read(136)
        arena_bytes, blocks, slots = struct.unpack_from("<QII", head, 56)
        state_bytes, snapshot_dtype, live = struct.unpack_from("<QII", head, 112)
        live_bytes = padded(state_bytes + 64)
        kept_bytes = padded(state_bytes // snapshot_dtype + 64)    # 1: f32, 2: bf16
        slot_headers_at = 4096 + padded(64 * blocks)
        blocks_at = slot_headers_at + padded(64 * slots)
        kept = slots - live
        block_bytes = (arena_bytes - blocks_at - live * live_bytes - kept * kept_bytes) // blocks
        kept_at = blocks_at + blocks * block_bytes + live * live_bytes
        f.seek(4096)
        for i in range(blocks):
            if struct.unpack_from("<I", f.read(64), 32)[0] == 2:
                yield blocks_at + i * block_bytes, block_bytes
        f.seek(slot_headers_at)
        for i in range(slots):
            if struct.unpack_from("<II", f.read(64), 16) == (2, 2):
                yield kept_at + (i - live) * kept_bytes, kept_bytes


def test_flipped_bits_are_never_served():
    """A bit of every second committed block and state flips while nothing runs: what was taken over
    is read before it is lent, so every text is as before."""
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        talks = [Talk(c, f"flipped {i}", words=100) for i in range(4)]
        for talk in talks:
            talk.turn(hit=False)
        c.tandem("down")
        arena = c.sets["kvmgr.arena_path"]
        data = list(committed_data(arena))
        assert len(data) > 20, data
        with open(arena, "r+b") as f:
            for at, count in random.sample(data, len(data) // 2):
                place = at + random.randrange(count)
                f.seek(place)
                byte = f.read(1)
                f.seek(place)
                f.write(bytes([byte[0] ^ 1 << random.randrange(8)]))
        said = audit(c, sound=False)
        assert int(re.search(r"data other than committed: (\d+)", said)[1]) == len(data) // 2, said
        c.up()
        wait_attached(c)
        for talk in talks:
            talk.turn(hit=None)
        wait_for("all read", 30, lambda: c.health("kvmgr")["unproven"] == 0)
        for talk in talks:
            assert talk.turn() > 0
        rows = re.findall(r"tandem_kvmgr_damaged_total\{[^}]*\} (\d+)", c.role_metrics("kvmgr"))
        assert sum(map(int, rows)) > 0, rows
        audit(c)


def test_a_pinned_conversation_stays():
    """Pinned by its name it outlives those that would push it out; unpinned it does not."""
    with Cluster(kvmgr__block_tokens=BLOCK, kvmgr__arena_bytes=12 << 20, kvmgr__pin_s=0,
                 kvmgr__snapshot_percent=40, worker__seqs_max=4) as c:
        talk = Talk(c, "kept", words=40, answer=16)
        talk.turn(hit=False)
        assert c.tandem("pin", "kept", "600", check=False).returncode != 0      # another salt
        c.tandem("pin", "kept", "600", "tenant")
        assert c.health("kvmgr")["blocks_pinned"] > 0
        others = [Talk(c, f"passer-by {i}", words=100, answer=16, compare=False) for i in range(30)]
        for other in others:
            other.turn(hit=False)
        rows = re.findall(r"tandem_kvmgr_(?:evicted_blocks|snapshots)_total\{[^}]*(?:tier|nowhere|given_up)\"\}"
                          r" (\d+)", c.role_metrics("kvmgr"))   # states go first, blocks with them
        assert sum(map(int, rows)) > 0, rows
        before = talk.ask("tenant").usage["tandem"]["cached_tokens"]
        assert before > 0
        c.tandem("unpin", "kept", "", "tenant")
        for other in others:
            other.turn(hit=None)
        assert talk.ask("tenant").usage["tandem"]["cached_tokens"] == 0
        audit(c)


def test_a_full_file_system():
    """The tier's file system fills up: the tier is off, says so, and the service goes on."""
    if os.geteuid() != 0:
        raise Skipped("not root: no file system of its own")
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        store = os.path.join(c.dir, "small")
        os.mkdir(store)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "small", store],
                                 capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            raise Skipped(f"no file system of its own: {mounted.stderr.strip()}")
        try:
            c.sets["kvmgr.kv_store_dir"] = os.path.join(store, "tier")
            c.sets["kvmgr.kv_store_bytes"] = 1 << 30
            c.tandem("down")
            c.up()
            wait_attached(c)
            talk = Talk(c, "narrow", words=150)
            talk.turn(hit=False)
            c.tandem("drain", "worker-0", check=False)  # what is cached is to be written
            c.tandem("undrain", "worker-0")
            wait_for("tier off", 20, lambda: c.health("kvmgr")["tier"] == "failed")
            health = c.health("kvmgr")
            assert "No space left" in health["tier_text"] and health["state"] == "degraded", health
            assert re.search(r" error kvmgr .*tier is off",
                             open(os.path.join(c.run_dir, "kvmgr-0.log"), encoding="utf-8").read())
            assert talk.turn() > 0
            Talk(c, "another", words=100).turn(hit=False)
            audit(c)
            c.tandem("down")
        finally:
            subprocess.run(["umount", "-l", store], check=True)


def test_sessions_take_turns():
    """Four times as many conversations as the arena holds, in turns: they come from the tier."""
    count = 256 if LONG else 80
    with Cluster(kvmgr__block_tokens=BLOCK, worker__seqs_max=4, worker__numerics="fast",
                 kvmgr__snapshot_percent=40,
                 kvmgr__arena_bytes=(28 if LONG else 12) << 20) as c:
        c.sets["kvmgr.kv_store_dir"] = os.path.join(c.dir, "tier")
        c.sets["kvmgr.kv_store_bytes"] = 4 << 30
        c.tandem("down")
        c.up()
        talks = [Talk(c, f"guest {i}", salt="hotel", words=80, answer=16, compare=False)
                 for i in range(count)]
        stats = {"turns": 0, "resumed": 0}
        lock = threading.Lock()
        queue = []

        def serve():
            while True:
                with lock:
                    if not queue:
                        return
                    talk = queue.pop()
                before = talk.before
                cached = talk.turn(hit=None)
                if before < 8 * BLOCK:
                    continue
                with lock:
                    stats["turns"] += 1
                    stats["resumed"] += cached >= talk.prompt - BLOCK - (talk.prompt - before)

        for _ in range(3):
            queue.extend(random.sample(talks, count))
            parallel([serve] * 4, timeout=600)
        kv = c.pool_settles()
        holds = kv["blocks_total"] // (sum(t.before for t in talks) // count // BLOCK)
        print(f"{count} conversations on an arena for {holds}: {stats}, "
              f"tier {kv['tier_blocks']} blocks {kv['tier_bytes'] >> 20} MiB")
        assert holds <= count // 4 + 6, (holds, kv)
        assert stats["turns"] >= count and stats["resumed"] >= 0.95 * stats["turns"], (stats, kv)
        audit(c)
        c.ledger_settles()


def test_redis_that_refuses():
    """Full, read-only, emptied: no request notices, the state says so, and the maps return."""
    with Cluster(kvmgr__block_tokens=BLOCK) as c:
        talk = Talk(c, "redis", compare=False)
        talk.turn(hit=False)
        maps = "tandem:{tandem}:sess:*"
        key = wait_for("session map", 10, lambda: [
            k for k in c.redis("keys", maps).splitlines() if ":b:" not in k])[0]
        for setting, value, healed in (("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")):
            assert c.redis("config", "set", setting, value) == "OK"
            assert talk.turn() > 0
            wait_for("degraded", 10, lambda: c.health("kvmgr")["state"] == "degraded")
            begun = time.monotonic()
            assert talk.turn() > 0 and c.ready()
            assert time.monotonic() - begun < 10
            assert c.redis("config", "set", setting, healed) == "OK"
            wait_for("ready", 10, lambda: c.health("kvmgr")["state"] == "ready")
            wait_for("map written", 10, lambda: int(c.redis("hget", key, "n_tokens") or 0)
                     >= talk.before - BLOCK)
        assert c.redis("flushall") == "OK"
        assert talk.turn() > 0
        wait_for("map written anew", 10, lambda: c.redis("exists", key) == "1")


if __name__ == "__main__":
    cluster.main(globals())
