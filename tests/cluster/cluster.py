# SPDX-License-Identifier: Apache-2.0
"""Real clusters on loopback for the cluster tests: start, ask, hurt, look, stop.

A test file defines functions named test_*, and ends with `cluster.main(globals())`.  Each test gets
its own run and state folder; every process is ended by pid at the end, whatever happened."""
import contextlib
import glob
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = os.environ.get("TANDEM_SOURCE_ROOT") or os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("TANDEM_BUILD_ROOT") or os.path.join(ROOT, "build")
GOLDEN = os.path.join(ROOT, "tests", "golden")
# The golden texts and logits are of these weights; deploy/demo holds them quantised.
DEMO = os.path.join(GOLDEN, "tiny-glm")
TANDEM = os.path.join(ROOT, "deploy", "tandem")
ROLES = ["gateway", "router", "worker", "drafter", "kvmgr"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what, seconds, condition, step=0.05):
    """Waits until condition() is true and returns its value; fails naming `what`."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(step)


def pid_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body)


class Stream:
    """One streamed answer: pieces joined, times of arrival, usage."""

    def __init__(self):
        self.reasoning, self.content, self.text = "", "", ""
        self.calls, self.finish, self.usage, self.error = {}, None, None, None
        self.ids, self.times, self.done, self.chunks = [], [], False, 0

    def add(self, event):
        self.chunks += 1
        if "error" in event:
            self.error = event["error"]
            return
        if event.get("usage"):
            self.usage = event["usage"]
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            self.text += choice.get("text") or ""
            if delta.get("reasoning_content"):
                self.reasoning += delta["reasoning_content"]
            if delta.get("content"):
                self.content += delta["content"]
            if delta.get("content") or delta.get("reasoning_content") or choice.get("text") \
                    or delta.get("tool_calls") or choice.get("token_ids"):
                self.times.append(time.monotonic())
            for piece in delta.get("tool_calls") or []:
                call = self.calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] = piece.get("id") or call["id"]
                call["name"] += piece["function"].get("name") or ""
                call["arguments"] += piece["function"].get("arguments") or ""
            self.ids += choice.get("token_ids") or []
            if choice.get("finish_reason"):
                self.finish = choice["finish_reason"]

    def key(self):
        return (self.reasoning, self.content, self.text, json.dumps(self.calls and [
            (c["name"], c["arguments"]) for _, c in sorted(self.calls.items())]), self.finish)

    def tool_calls(self):
        return [(c["name"], json.loads(c["arguments"])) for _, c in sorted(self.calls.items())]


class Cluster:
    def __init__(self, **sets):
        """sets: role__name=value, e.g. worker__spec="fixed:3"."""
        self.dir = tempfile.mkdtemp(prefix="tandem-test-")
        self.run_dir = os.path.join(self.dir, "run")
        self.state_dir = os.path.join(self.dir, "state")
        self.port = free_port()
        self.prefix = []      # of every command: another namespace
        self.up_options = []
        self.up_seconds = 60
        self.sets = {"gateway.listen": f"127.0.0.1:{self.port}", "worker.numerics": "exact",
                     "worker.model": DEMO, "gateway.model": DEMO, "drafter.target": DEMO,
                     "kvmgr.kv_dtype": "f32",  # as the golden texts were made
                     "kvmgr.arena_bytes": str(256 << 20),
                     "kvmgr.arena_path": os.path.join(self.dir, "arena.kv")}  # rank 1: arena.kv-1
        for key, value in sets.items():
            self.sets[key.replace("__", ".", 1)] = str(value)
        self.groups = int(self.sets.get("worker.groups", 1))
        self.ranks = int(self.sets.get("worker.ranks", 1))

    def tandem(self, *arguments, timeout=120, check=True):
        run = subprocess.run([*self.prefix, TANDEM, "--build", BUILD, "--run_dir", self.run_dir, "--state_dir",
                              self.state_dir, *arguments], cwd=ROOT, capture_output=True, text=True,
                             timeout=timeout, check=False, stdin=subprocess.DEVNULL)
        if check and run.returncode:
            raise AssertionError(f"tandem {' '.join(arguments)}: {run.returncode}\n{run.stdout}"
                                 f"{run.stderr}\n{self.tails()}")
        return run

    def up(self):
        arguments = ["up", *self.up_options]
        for key, value in self.sets.items():
            arguments += ["--set", f"{key}={value}"]
        env_limit = os.environ.copy()
        env_limit["TANDEM_UP_TENTHS"] = str(10 * self.up_seconds)
        run = subprocess.run([*self.prefix, TANDEM, "--build", BUILD, "--run_dir", self.run_dir, "--state_dir",
                              self.state_dir, *arguments], cwd=ROOT, capture_output=True, text=True,
                             timeout=120, check=False, env=env_limit, stdin=subprocess.DEVNULL)
        if run.returncode:
            raise AssertionError(f"tandem up: {run.stdout}{run.stderr}\n{self.tails()}")
        return self

    def __enter__(self):
        try:
            return self.up()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, kind=None, *_):
        for name in self.names() + ["redis"]:       # a stopped process cannot end in order
            with contextlib.suppress(Exception):
                os.kill(self.pid(name), signal.SIGCONT)
        if kind is not None:        # the folder goes; what its processes said last does not
            with contextlib.suppress(Exception):
                print(self.tails(40))
        with contextlib.suppress(Exception):
            self.tandem("down", check=False)
        touched = self.guards_touched()
        shutil.rmtree(self.dir, ignore_errors=True)
        assert kind is not None or not touched, touched

    def guards_touched(self):
        """What the audit says of arenas where somebody wrote between the blocks; "" = nobody did."""
        said = ""
        for path in glob.glob(os.path.join(self.dir, "*.kv")):
            run = subprocess.run([os.path.join(BUILD, "kvmgr", "tandem-kvmgr"), "--audit", f"--arena_path={path}",
                                  f"--run_dir={self.run_dir}", f"--state_dir={self.state_dir}"],
                                 capture_output=True, text=True, timeout=60, check=False)
            row = re.search(r"guards overwritten: (\d+).*", run.stdout)
            if row and row[1] != "0":
                said += f"{path}: {row[0]}\n"
        return said

    def tails(self, lines=15):
        out = []
        for role in self.names() + ["redis"]:
            path = self.path(role, "log")
            if os.path.exists(path):
                with open(path, encoding="utf-8", errors="replace") as f:
                    out += [f"--- {role}"] + f.read().splitlines()[-lines:]
        return "\n".join(out)

    def names(self):
        """All roles, those of further groups and ranks with their number: worker, …, worker-1."""
        return ROLES + [f"worker-{i}" for i in range(1, self.groups * self.ranks)] + [
            f"{role}-{group}" for group in range(1, self.groups) for role in ("drafter", "kvmgr")]

    def leaders(self):
        """The workers that requests run on: rank 0 of each group."""
        return ["worker"] + [f"worker-{group * self.ranks}" for group in range(1, self.groups)]

    def path(self, role, kind):
        name = role if role.rsplit("-", 1)[-1].isdigit() else f"{role}-0"
        return os.path.join(self.run_dir, f"{name}.{kind}")

    def log(self, role):
        with open(self.path(role, "log"), encoding="utf-8", errors="replace") as f:
            return f.read()

    # processes
    def pid(self, role):
        with open(self.path(role, "pid"), encoding="ascii") as f:
            return int(f.read())

    def kill(self, role, signo=signal.SIGKILL):
        pid = self.pid(role)
        os.kill(pid, signo)
        return pid

    def wait_restart(self, role, old_pid, seconds=15):
        def back():
            with contextlib.suppress(Exception):
                return self.pid(role) != old_pid and pid_alive(self.pid(role))
        wait_for(f"{role} restarted", seconds, back)

    def rss_kib(self, role):
        with open(f"/proc/{self.pid(role)}/status", encoding="ascii") as f:
            for line in f:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1])
        return 0

    def role_page(self, role, path, method="GET", rank=0):
        """A page of the role itself, over its unix socket."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(3)
            s.connect(self.path(role, "http") if rank == 0 else os.path.join(self.run_dir, f"{role}-{rank}.http"))
            s.sendall(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
            data = b""
            while True:
                piece = s.recv(65536)
                if not piece:
                    break
                data += piece
        return data.split(b"\r\n\r\n", 1)[1].decode()

    def health(self, role):
        return json.loads(self.role_page(role, "/health"))

    def role_metrics(self, role):
        return self.role_page(role, "/metrics")

    def metric(self, role, name):
        """The value of the first line of its metrics that begins with this."""
        for line in self.role_metrics(role).splitlines():
            if line.startswith(name):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"{role} has no metric {name}")

    # HTTP
    def request(self, method, path, body=None, headers=None, timeout=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
        connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()},
                      response.read())
        connection.close()
        return reply

    def post(self, path, body, **more):
        return self.request("POST", path, body, **more)

    def chat(self, content, **fields):
        timeout = fields.pop("timeout", 60)
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        reply = self.post("/v1/chat/completions", {"messages": messages, **fields}, timeout=timeout)
        assert reply.status == 200, (reply.status, reply.body[:500], self.tails())
        return reply.json()

    def stream(self, content, path="/v1/chat/completions", on_event=None, timeout=60, **fields):
        body = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        if path.endswith("chat/completions"):
            body["messages"] = content if isinstance(content, list) else [
                {"role": "user", "content": content}]
        else:
            body["prompt"] = content
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        result = Stream()
        if response.status != 200:
            raise AssertionError(f"{response.status}: {response.read()[:500]}")
        for raw in response:
            line = raw.decode("utf-8").rstrip("\r\n")
            if line == "data: [DONE]":
                result.done = True
                continue
            if line.startswith("data: "):
                result.add(json.loads(line[6:]))
                if on_event:
                    on_event(result)
        connection.close()
        return result

    def ready(self):
        with contextlib.suppress(OSError):
            return self.request("GET", "/ready", timeout=3).status == 200
        return False

    def ledger_settles(self, seconds=10):
        """Waits until router and workers have nothing live and their ledgers balance; returns them."""
        def settled():
            ledgers = [self.health(role)["ledger"] for role in ["router"] + self.leaders()]
            for ledger in ledgers:
                assert ledger["accepted"] == ledger["finished"] + ledger["failed"] \
                    + ledger["cancelled"] + ledger["live"], ledgers
            return ledgers if all(ledger["live"] <= 1 for ledger in ledgers) else None
        return wait_for("ledger at rest", seconds, settled)

    def pool_settles(self, seconds=10):
        """Waits until no block is leased (but the canary's, for an instant); returns the page of the
        first kvmgr, after a look at all."""
        def settled(name):
            kv = self.health(name)
            return kv if kv["blocks_leased"] == 0 else None
        pools = [wait_for(f"no block leased of {name}", seconds, lambda name=name: settled(name))
                 for name in self.names() if name.startswith("kvmgr")]
        for kv in pools:
            assert kv["blocks_free"] + kv["blocks_cached"] == kv["blocks_total"], kv
        return pools[0]

    def redis(self, *arguments):
        run = subprocess.run(["redis-cli", "-s", os.path.join(self.run_dir, "redis.sock"), *arguments],
                             capture_output=True, timeout=10, check=False)
        return run.stdout.decode("utf-8", "replace").strip()


def parallel(functions, timeout=120):
    """Runs the functions at once; returns their results, or raises the first exception."""
    results, errors = [None] * len(functions), []

    def run(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:  # pylint: disable=broad-except
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.1, end - time.monotonic()))
        if thread.is_alive():
            raise AssertionError(f"a request did not end within {timeout} s")
    if errors:
        raise errors[0]
    return results


class Load:
    """Greedy streams of known text in `threads` threads until the end of the block.  Every text is
    compared; a fault is raised by whatever is called next.  While cuts are allowed (a gateway is
    being killed) a broken connection is counted instead, wrong tokens never."""

    def __init__(self, c, threads=4, cases=None):
        self.c, self.count = c, threads
        self.cases = cases or random.sample(greedy_cases(), 8) + greedy_cases(["repeat"])
        self.stop, self.running = threading.Event(), threading.Event()
        self.errors, self.done, self.cut, self.busy = [], 0, 0, 0
        self.cuts_allowed, self.cut_epoch = False, 0
        self.refusals_allowed, self.refused = False, 0  # before the first token, to be tried again
        self.lock, self.threads = threading.Lock(), []
        self.seed = random.randrange(1 << 30)

    def __enter__(self):
        self.running.set()
        self.threads = [threading.Thread(target=self.work, args=(self.seed + i,), daemon=True)
                        for i in range(self.count)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind, *_):
        self.stop.set()
        self.running.set()
        for thread in self.threads:
            thread.join(60)
            assert kind or not thread.is_alive(), "a stream hangs"
        if not kind:
            self.check()

    def check(self):
        if self.errors:
            raise self.errors[0]

    def work(self, seed):
        rng = random.Random(seed)
        while not self.stop.is_set():
            self.running.wait()
            with self.lock:
                if not self.running.is_set() or self.stop.is_set():
                    continue
                self.busy += 1
                epoch, cuttable = self.cut_epoch, self.cuts_allowed
            case, ids = rng.choice(self.cases), []
            try:
                got = self.c.stream(case["prompt"], path="/v1/completions", return_token_ids=True,
                                    max_tokens=200, temperature=0,
                                    on_event=lambda stream, ids=ids: ids.__setitem__(
                                        slice(None), stream.ids))
                assert got.done and got.error is None, (case["name"], got.done, got.error)
                assert got.ids == case["ids"], (case["name"], got.ids, case["ids"])
                with self.lock:
                    self.done += 1
            except BaseException as error:  # pylint: disable=broad-except
                with self.lock:
                    cut = cuttable or self.cuts_allowed or self.cut_epoch != epoch
                    if cut and ids == case["ids"][:len(ids)]:
                        self.cut += 1
                    elif self.refusals_allowed and not ids and (
                            isinstance(error, OSError) or str(error).startswith("503")):
                        self.refused += 1
                    else:
                        self.errors.append(error)
                        return
                time.sleep(0.1)
            finally:
                with self.lock:
                    self.busy -= 1

    def may_cut(self, allowed):
        with self.lock:
            self.cuts_allowed = allowed
            self.cut_epoch += 1

    def wait_more(self, streams, seconds=60):
        """Waits until so many further streams have ended well."""
        goal = self.done + streams

        def more():
            self.check()
            return self.done >= goal
        wait_for("streams go on", seconds, more)

    def pause(self, seconds=60):
        """Lets what runs end, and begins nothing."""
        with self.lock:
            self.running.clear()

        def idle():
            self.check()
            return self.busy == 0
        wait_for("streams end", seconds, idle)

    def go_on(self):
        self.running.set()


def greedy_cases(kinds=None):
    with open(os.path.join(GOLDEN, "model-trained", "greedy.jsonl"), encoding="utf-8") as f:
        cases = [json.loads(line) for line in f]
    return [c for c in cases if not kinds or c["kind"] in kinds]


def generate(prompt, **flags):
    """tandem-model generate on the demo model: {"ids", "text", "finish_reason"}."""
    command = [os.path.join(BUILD, "lib", "model", "tool", "tandem-model"), "generate", DEMO,
               "--prompt", prompt, "--json", "--numerics", "exact"]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(run.stdout)


def seed():
    """What decides all that is random in this run; printed, and taken from TANDEM_SEED."""
    if not int(os.environ.get("TANDEM_SEED") or 0):
        os.environ["TANDEM_SEED"] = str(random.randrange(1, 1 << 30))
    return int(os.environ["TANDEM_SEED"])


class Skipped(Exception):
    """What a test needs is not there: why.  It did not pass."""


def main(names):
    """Runs the test_* functions of a test file (or those named on the command line)."""
    # Ended from outside: with-blocks take their clusters down on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start_value = seed()
    print(f"TANDEM_SEED={start_value}")
    wanted = sys.argv[1:]
    failed = passed = skipped = 0
    for name, function in list(names.items()):
        if not name.startswith("test_") or not callable(function) or (wanted and name not in wanted):
            continue
        random.seed(start_value)
        start = time.monotonic()
        try:
            function()
            passed += 1
            print(f"ok {name} ({time.monotonic() - start:.1f} s)")
        except Skipped as reason:
            skipped += 1
            print(f"skipped {name}: {reason}")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # pylint: disable=broad-except
            failed += 1
            traceback.print_exc(file=sys.stdout)
            print(f"FAILED {name}")
        sys.stdout.flush()
    if skipped:
        print(f"{skipped} skipped")
    sys.exit(1 if failed else 77 if skipped and not passed else 0)  # 77: skipped, to meson
