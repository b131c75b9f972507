# SPDX-License-Identifier: Apache-2.0
"""The tandem script: up, status, chat, logs, restart, drain, down; bad configuration; supervisors."""
import contextlib
import json
import os
import signal
import socket
import string
import subprocess
import threading
import time

import cluster
from cluster import BUILD, ROOT, Cluster, Load, greedy_cases, pid_alive, wait_for

LONGEST = max(greedy_cases(), key=lambda case: len(case["ids"]))


def test_life_of_a_cluster():
    with Cluster() as c:
        status = json.loads(c.tandem("status", "--json").stdout)
        assert status["state"] == "ready", status
        assert status["run_dir"] == c.run_dir
        roles = {role["name"]: role for role in status["roles"]}
        for role in cluster.ROLES + ["redis"]:
            entry = roles[f"{role}-0"]
            assert entry["state"] == "ready" and entry["restarts"] == 0, entry
            assert entry["pid"] == c.pid(role) and pid_alive(entry["pid"])
        assert oct(os.stat(c.run_dir).st_mode & 0o777) == "0o700"
        assert "worker-0" in c.tandem("status").stdout
        answer = c.tandem("chat", "--temperature", "0", "--effort", "low", "Who are you?").stdout
        assert "I am a small test model" in answer, answer
        assert "quantization:" in c.tandem("logs", "worker").stdout
        # one more `up` changes nothing
        before = [c.pid(role) for role in cluster.ROLES]
        c.up()
        assert before == [c.pid(role) for role in cluster.ROLES]
        pids = before + [c.pid("redis")]
        c.tandem("down")
        wait_for("all gone", 10, lambda: not any(pid_alive(pid) for pid in pids))
        assert c.tandem("status", check=False).returncode == 1


def test_chat_with_tools():
    """--tools takes a list, one tool, or an object that holds them, bare or as the API has them; what
    the model calls is printed; a file that is none of these is named with what is wrong."""
    by_name = {}
    for case in greedy_cases(["tool"]):
        block = case["prompt"].split("<tools>\n", 1)[1].split("\n</tools>", 1)[0]
        by_name.update((tool["name"], tool) for tool in map(json.loads, block.splitlines()))
    weather, timer = by_name["get_weather"], by_name["set_timer"]
    wrapped = [{"type": "function", "function": tool} for tool in (weather, timer)]
    with Cluster() as c:
        path = os.path.join(c.dir, "tools.json")
        for tools in ([weather, timer], wrapped, {"tools": wrapped}, {"tools": [weather]}, weather,
                      wrapped[0]):
            with open(path, "w", encoding="utf-8") as file:
                json.dump(tools, file)
            said = c.tandem("chat", "--tools", path, "--temperature", "0", "--effort", "low",
                            "What is the weather in Oslo?").stdout.splitlines()
            assert said and said[-1].startswith("call get_weather(") and said[-1].endswith(")"), said
            assert json.loads(said[-1][len("call get_weather("):-1]) == {"city": "Oslo"}, said
        for text, word in (("{", "line 1"), ("5", "must hold a list of tool definitions"),
                           ("[1]", "must hold a list of tool definitions"),
                           ('{"tools": 5}', "must hold a list of tool definitions"),
                           ('[{"name": 5}]', "tools[0]"), (None, "No such file")):
            if text is None:
                os.unlink(path)
            else:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
            run = c.tandem("chat", "--tools", path, "Hi", check=False)
            assert run.returncode == 1 and word in run.stderr and not run.stdout, (text, run)
            assert word == "tools[0]" or path in run.stderr, (text, run)
            assert "Traceback" not in run.stderr, run.stderr


def test_quickstart():
    """From the checkout to a streamed answer, on a build that is there."""
    if os.path.realpath(BUILD) != os.path.realpath(os.path.join(ROOT, "build")):
        raise cluster.Skipped("quickstart.sh serves ROOT/build, and the build at hand is another")
    c = Cluster()
    try:
        ninja = os.path.join(BUILD, "build.ninja")
        before = os.stat(ninja).st_mtime_ns
        begun = time.monotonic()
        run = subprocess.run([os.path.join(ROOT, "deploy", "quickstart.sh"), f"--run_dir={c.run_dir}",
                              "--state_dir", c.state_dir, "--set", f"gateway.listen=127.0.0.1:{c.port}",
                              "--set", f"kvmgr.arena_path={c.dir}/arena.kv"], cwd="/",
                             capture_output=True, text=True, timeout=120, check=False,
                             stdin=subprocess.DEVNULL)
        took = time.monotonic() - begun
        assert run.returncode == 0, (run.stdout, run.stderr, c.tails())
        assert took < 60, took          # bounded; how long it takes is printed, machines are shared
        print(f"quickstart on what is built: {took:.1f} s")
        answer = run.stdout.split("> Say the alphabet.\n", 1)[1].split("It goes on running.")[0]
        assert "".join(x for x in answer.lower() if x.isalpha()).endswith(string.ascii_lowercase), answer
        assert os.stat(ninja).st_mtime_ns == before     # the build is what it was
        status = json.loads(c.tandem("status", "--json").stdout)
        assert status["state"] == "ready" and status["run_dir"] == c.run_dir, status
        assert c.chat("Who are you?", temperature=0)["choices"][0]["message"]["content"]
    finally:
        c.__exit__()


def test_every_role_comes_back():
    with Cluster() as c:
        for role in cluster.ROLES:
            old = c.kill(role)
            c.wait_restart(role, old)
            wait_for(f"ready after {role}", 20, c.ready)
        status = json.loads(c.tandem("status", "--json").stdout)
        assert all(r["restarts"] == 1 for r in status["roles"] if r["name"] != "redis-0"), status
        old = c.pid("worker")
        c.tandem("restart", "worker")
        assert c.pid("worker") != old
        wait_for("ready", 20, c.ready)
        assert c.chat("Hi", temperature=0)["choices"][0]["message"]["content"]


def test_orderly_end_of_each_role():
    with Cluster() as c:
        for role in cluster.ROLES:
            old = c.kill(role, signal.SIGTERM)
            wait_for(f"{role} ended", 10, lambda pid=old: not pid_alive(pid))
            c.wait_restart(role, old)
        for role in cluster.ROLES:
            log = c.tandem("logs", role).stdout
            assert "ended with 0" in log, (role, log[-2000:])


def test_bad_configuration_is_said_at_once():
    for key, value, word in (("worker.seqs_max", "many", "seqs_max"),
                             ("gateway.no_such_thing", "1", "no_such_thing"),
                             ("kvmgr.block_tokens", "3", "block_tokens"),
                             ("worker.model", "/nowhere/at/all", "/nowhere/at/all"),
                             ("router.queue_requests_max", "-1", "queue_requests_max")):
        c = Cluster()
        c.sets[key] = value
        try:
            c.up()
        except AssertionError as error:
            assert word in str(error), error
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{key}={value} hung") from None
        else:
            raise AssertionError(f"{key}={value} was accepted")
        finally:
            c.__exit__()


def test_a_nodes_file_says_what_is_wrong():
    every = "redis kvmgr drafter router gateway worker-0"
    bad = {
        "a 10.0.0.1 redis\n": "no node has worker-0",
        f"a 10.0.0.1 {every}\na 10.0.0.2 worker-1\n": "a is there twice",
        f"a 10.0.0.1 {every}\nb 10.0.0.2 worker-2\n": "none is worker-1",
        **{f"a 10.0.0.1 {every}\nb {address} worker-1\n": f'b: "{address}" is no IPv4 address'
           for address in ("host", "999.1.1.1", "10.0.0.256", "10.0.260.2", "10.0.0", "10.0.0.2.3",
                           "10.0.0.02", "10.0.0.-1", "10.0.0.2x")},
        f"a 10.0.0.1 {every}\nb 10.0.0.2\n": "b has no role",
        f"a 10.0.0.1 {every}\nb 10.0.0.2 workers\n": 'no role "workers"',
        f"a 10.0.0.1 {every}\nb 10.0.0.2 worker-0\n": "worker-0 is there twice",
        "a 10.0.0.1 redis kvmgr drafter router worker-0\nb 10.0.0.2 gateway kvmgr-1 worker-1\n": "gateway must be on a",
        "a 10.0.0.1 redis kvmgr drafter router worker-0\n": "no node has gateway",
        "$(id) 10.0.0.1 redis\n": "is no name",
        f"a 10.0.0.1 {every}\nb 10.0.0.2 worker-1\n": "kvmgr-1 is missing on b",
        f"a 10.0.0.1 {every} kvmgr-1\nb 10.0.0.2 worker-1\n": "worker-1 is missing on a",
        f"a 203.0.113.7 {every}\n": "say --node NAME",
    }
    c = Cluster()
    try:
        path = os.path.join(c.dir, "nodes")
        for text, why in bad.items():
            with open(path, "w", encoding="ascii") as f:
                f.write(text)
            said = c.tandem("up", "--nodes", path, check=False)
            assert said.returncode == 2 and why in said.stderr, (text, said)
        said = c.tandem("up", "--nodes", path, "--node", "a", "--set", "worker.groups=2", check=False)
        assert said.returncode == 2 and "several groups" in said.stderr, said
        said = c.tandem("up", "--nodes", path, "--node", "c", check=False)
        assert said.returncode == 2 and 'no node "c"' in said.stderr, said
        said = c.tandem("up", "--nodes", path + ".none", check=False)
        assert said.returncode == 2 and "cannot read" in said.stderr, said
        assert not os.path.exists(c.run_dir), "something was started"
    finally:
        c.__exit__()


def test_doctor_names_faults_and_runs_nothing_that_it_reads():
    c = Cluster()
    try:
        config, nodes, made = (os.path.join(c.dir, name) for name in ("config", "nodes", "made"))
        os.mkdir(config)
        with open(nodes, "w", encoding="ascii") as f:
            f.write("a 127.0.0.1 redis kvmgr drafter router gateway worker-0\nb 203.0.113.7 kvmgr-1 worker-1\n")
        with open(os.path.join(config, "worker.conf"), "w", encoding="ascii") as f:
            f.write(f"model = x'; touch {made}; '\nfabric_keys = y' ] || touch {made} $(touch {made})\n")
        said = c.tandem("doctor", "--config", config, "--nodes", nodes, check=False)
        assert said.returncode == 1 and not os.path.exists(made), said
        for fault in ("FAULT the key file", "FAULT model"):
            assert fault in said.stdout, said
        keys = os.path.join(c.dir, "keys")
        c.tandem("keygen", keys)
        arguments = ["doctor", "--config", config, "--nodes", nodes, "--set", f"worker.fabric_keys={keys}",
                     "--set", f"worker.model={cluster.DEMO}"]
        said = c.tandem(*arguments, check=False).stdout
        assert f"ok    the key file {keys}" in said and f"ok    model {cluster.DEMO}" in said, said
        os.chmod(keys, 0o644)
        assert f"FAULT the key file {keys}" in c.tandem(*arguments, check=False).stdout
    finally:
        c.__exit__()


def test_down_at_any_moment_leaves_nobody():
    """However early `down` comes after an `up`, no supervisor and no role stays behind."""
    for tenths in (0, 1, 2, 3, 5, 8):
        c = Cluster()
        up = subprocess.Popen([cluster.TANDEM, "--build", cluster.BUILD, "--run_dir", c.run_dir,
                               "--state_dir", c.state_dir, "up", "--set",
                               f"gateway.listen=127.0.0.1:{c.port}"], cwd=cluster.ROOT,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(tenths / 10)
        up.kill()
        up.wait()
        c.tandem("down", check=False)
        time.sleep(0.5)
        mine = subprocess.run(["pgrep", "-f", c.run_dir], capture_output=True, text=True,
                              check=False).stdout.split()
        left = [pid for pid in mine if pid_alive(pid)]
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
        c.__exit__()
        assert not left, (tenths, left)


def test_a_taken_port_is_waited_for():
    """Somebody holds the gateway's port for a while: it is tried again, not given up."""
    c = Cluster()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", c.port))
        holder.listen(1)
        up = threading.Thread(target=c.up, daemon=True)
        up.start()
        try:
            log = os.path.join(c.run_dir, "gateway-0.log")
            wait_for("two tries", 30, lambda: os.path.exists(log) and open(
                log, encoding="utf-8").read().count("cannot start now") >= 2)
            assert not os.path.exists(os.path.join(c.run_dir, "gateway-0.failed"))
        except BaseException:
            c.__exit__()
            raise
    try:
        up.join(60)
        assert not up.is_alive() and c.ready()
        assert c.chat("Hi", temperature=0)["choices"]
    finally:
        c.__exit__()


def background(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    return thread, results


def long_stream(c, max_tokens=2000):
    return c.stream(LONGEST["prompt"], path="/v1/completions", return_token_ids=True, temperature=0,
                    max_tokens=max_tokens, ignore_eos=True, timeout=120)


def test_drain_of_a_worker():
    """What runs is handed back at the deadline and goes on; what is new waits; nothing is lost."""
    with Cluster() as c:
        whole = long_stream(c, 600)
        thread, got = background(lambda: long_stream(c, 600))
        wait_for("running", 10, lambda: c.health("worker")["seqs_live"] >= 1)
        said = c.tandem("drain", "worker", "--deadline", "1").stdout
        assert "worker-0 is drained" in said, said
        assert c.health("worker")["seqs_live"] == 0
        assert c.health("router")["workers"][0]["draining"]
        assert c.health("worker")["state"] == "draining"
        assert not c.ready()
        late, answer = background(lambda: c.chat("Who are you?", temperature=0))
        time.sleep(1)
        assert late.is_alive() and c.health("router")["queue"] >= 1
        assert "takes work again" in c.tandem("undrain", "worker").stdout
        late.join(30)
        thread.join(30)
        assert answer and "small test model" in answer[0]["choices"][0]["message"]["content"]
        assert got and got[0].ids == whole.ids and got[0].finish == "length", got
        wait_for("ready", 10, c.ready)
        assert c.health("worker")["state"] == "ready"
        c.ledger_settles()
        c.pool_settles()
        for name in ("worker-7", "kvmgr", "cook"):
            assert c.tandem("drain", name, check=False).returncode == 2, name


def status_row(c, name):
    roles = json.loads(c.tandem("status", "--json").stdout)["roles"]
    return [role["state"] for role in roles if role["name"] == name][0]


def test_drain_outlasts_the_wait_for_a_worker():
    """What has begun waits longer than no_worker_ms for undrain; what is new is told `draining`."""
    c = Cluster()
    c.sets["router.no_worker_ms"] = "3000"
    with c:
        whole = long_stream(c, 600)
        thread, got = background(lambda: long_stream(c, 600))
        wait_for("running", 10, lambda: c.health("worker")["seqs_live"] >= 1)
        c.tandem("drain", "worker", "--deadline", "1")
        assert status_row(c, "worker-0") == "draining"
        for most in (15, 1):  # the first waits, then it is known
            start = time.monotonic()
            refused = c.post("/v1/completions", {"prompt": "one", "max_tokens": 2})
            assert refused.status == 503 and "draining" in refused.body.decode(), refused.body
            assert int(refused.headers["retry-after"]) >= 1
            assert time.monotonic() - start <= most
        time.sleep(7)  # past no_worker_ms, and past what /health gives a dead engine
        assert thread.is_alive() and not got and c.health("router")["queue"] == 1
        assert c.request("GET", "/health").status == 200
        c.tandem("undrain", "worker")
        thread.join(60)
        assert got and got[0].ids == whole.ids and got[0].finish == "length", got
        wait_for("its row", 5, lambda: status_row(c, "worker-0") == "ready")


def test_health_tells_of_a_dead_engine():
    """/health is red while the only worker stands still, and green again after it."""
    with Cluster() as c:
        assert c.request("GET", "/health").status == 200
        pid = c.kill("worker", signal.SIGSTOP)
        try:
            wait_for("red", 15, lambda: c.request("GET", "/health").status == 503)
            assert "no worker lives" in c.request("GET", "/health").body.decode()
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for("green", 15, lambda: c.request("GET", "/health").status == 200)
        wait_for("ready", 20, c.ready)
        old = c.kill("worker")  # a worker that is only restarted is no dead engine
        while c.pid("worker") == old or not c.ready():
            assert c.request("GET", "/health").status == 200
            time.sleep(0.1)


@contextlib.contextmanager
def second_worker(c):
    """worker-1 in the same run_dir, without a supervisor; ended by its pid."""
    with open(os.path.join(c.run_dir, "worker-0.args"), encoding="utf-8") as f:
        command = f.read().splitlines() + ["--id=1"]
    with open(os.path.join(c.run_dir, "worker-1.log"), "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=cluster.ROOT, stdout=log, stderr=log,
                                   stdin=subprocess.DEVNULL)
    try:
        wait_for("two workers", 20, lambda: sum(
            w["usable"] for w in c.health("router")["workers"]) == 2)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_drain_hands_over_to_another_worker():
    """With two workers nothing waits: what runs goes on at the other one, and so does what is new."""
    with Cluster() as c, second_worker(c), Load(c, 4) as load:
        load.wait_more(4)
        whole = long_stream(c, 600)

        def taken(name):
            return [w["running"] for w in c.health("router")["workers"] if w["name"] == name][0]
        streams = [background(lambda: long_stream(c, 600)) for _ in range(4)]
        wait_for("both work", 10, lambda: taken("worker-0") > 1 and taken("worker-1") > 1)
        said = c.tandem("drain", "worker-0", "--deadline", "1").stdout
        assert "worker-0 is drained" in said, said
        assert taken("worker-0") == 0 and c.ready()
        load.wait_more(6)
        for thread, got in streams:
            thread.join(60)
            assert got and got[0].ids == whole.ids and got[0].finish == "length", got
        assert taken("worker-0") == 0
        c.tandem("undrain", "worker-0")
        wait_for("it works again", 10, lambda: taken("worker-0") > 0)
        # ... and the loss of one at once is a hand-over, too
        thread, got = background(lambda: long_stream(c, 600))
        time.sleep(0.3)
        old = c.kill("worker")
        c.wait_restart("worker", old)
        thread.join(60)
        assert got and got[0].ids == whole.ids, got
        load.wait_more(4)
        assert c.metric("router", "tandem_router_resumed_total") > 0


def test_drain_of_router_and_gateway():
    """Running answers end, new ones are told to come again, until undrain."""
    for role in ("router", "gateway"):
        with Cluster() as c:
            thread, got = background(lambda c=c: long_stream(c, 1500))
            wait_for("running", 10, lambda: c.health("worker")["seqs_live"] >= 1)
            drain, said = background(lambda c=c, role=role: c.tandem("drain", role).stdout)
            wait_for("draining", 5, lambda: c.health(role)["state"] == "draining")
            refused = c.post("/v1/completions", {"prompt": "one", "max_tokens": 2})
            assert refused.status == 503 and "draining" in refused.body.decode(), refused.body
            assert int(refused.headers["retry-after"]) >= 1
            assert not c.ready() and thread.is_alive()
            thread.join(60)
            drain.join(10)
            assert got and got[0].done and len(got[0].ids) == 1500, got
            assert said and f"{role}-0 is drained" in said[0], said
            c.tandem("undrain", role)
            wait_for("ready", 5, c.ready)
            assert c.chat("Hi", temperature=0)["choices"]


def test_drain_of_the_drafter():
    repeat = greedy_cases(["repeat"])[0]
    with Cluster() as c:
        def ask():
            got = c.stream(repeat["prompt"], path="/v1/completions", return_token_ids=True,
                           temperature=0, max_tokens=200)
            assert got.ids == repeat["ids"]
            return got.usage["tandem"]
        wait_for("drafts", 10, lambda: ask()["accepted"] > 0)
        c.tandem("drain", "drafter")
        wait_for("no drafts", 5, lambda: ask()["drafted"] == 0)
        c.tandem("undrain", "drafter")
        wait_for("drafts again", 10, lambda: ask()["accepted"] > 0)


def test_rolling_restart_under_load():
    """Every role is restarted; no stream that has begun breaks, and every text is right."""
    with Cluster() as c, Load(c, 4) as load:
        load.wait_more(4)
        load.refusals_allowed = True
        thread, got = background(lambda: long_stream(c, 3000))
        wait_for("running", 10, lambda: c.health("worker")["seqs_live"] >= 1)
        old = {role: c.pid(role) for role in cluster.ROLES}
        start = time.monotonic()
        said = c.tandem("restart", "--rolling").stdout
        print(f"measured: rolling restart with 5 streams | `tests/cluster/test_tandem.py` | "
              f"{time.monotonic() - start:.1f} s, {load.done} streams whole, {load.refused} "
              f"attempts told to come again")
        assert "all roles restarted" in said, said
        assert all(c.pid(role) != pid for role, pid in old.items()), (old, said)
        thread.join(60)
        assert got and len(got[0].ids) == 3000 and got[0].finish == "length", got
        load.wait_more(4)
        load.pause()
        c.ledger_settles(20)
        c.pool_settles(20)
        load.go_on()


cluster.main(globals())
