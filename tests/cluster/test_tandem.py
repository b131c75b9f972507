# SPDX-License-Identifier: Apache-2.0
"""The tandem script: up, status, chat, logs, restart, down; bad configuration; supervisors."""
import json
import os
import signal
import subprocess

import cluster
from cluster import Cluster, pid_alive, wait_for


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


cluster.main(globals())
