# SPDX-License-Identifier: Apache-2.0
"""Two nodes: network namespaces joined by a cable of veth, one rank on each, CURVE between them.

The test process itself lives on node a.  Needs root; without it the file is skipped."""
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

import cluster
from cluster import Cluster, greedy_cases, wait_for
from cable import Wire

A, B, DETOUR = "10.87.0.1", "10.87.0.2", "10.87.0.3"
CLONE_NEWNET = 0x40000000
PORT = 7400  # of rank 0; deploy/tandem


def run(*command):
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def enter(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", encoding="ascii") as f:
        if libc.setns(f.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


class Cable:
    """Two namespaces, held by a process each, and veth between them."""
    def __enter__(self):
        self.ends = [subprocess.Popen(["unshare", "-n", "sleep", "3600"]) for _ in range(2)]
        self.pids = [p.pid for p in self.ends]
        home = os.readlink("/proc/self/ns/net")
        for pid in self.pids:
            wait_for("namespace", 5, lambda pid=pid: os.readlink(f"/proc/{pid}/ns/net") != home)
        try:
            self.on(0, "ip", "link", "add", "fast0", "type", "veth", "peer", "name", "fast0", "netns",
                    str(self.pids[1]))
            for end, addresses in ((0, (A, DETOUR)), (1, (B,))):
                for address in addresses:
                    self.on(end, "ip", "addr", "add", f"{address}/24", "dev", "fast0")
                self.on(end, "ip", "link", "set", "lo", "up")
                self.on(end, "ip", "link", "set", "fast0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for p in self.ends:
            p.kill()
            p.wait()

    def on(self, end, *command):
        run("nsenter", f"--net=/proc/{self.pids[end]}/ns/net", *command)

    def prefix(self, end):
        return ["nsenter", f"--net=/proc/{self.pids[end]}/ns/net"]

    def lose(self, percent):
        for end in (0, 1):
            self.on(end, "nft", "add table inet loss")
            self.on(end, "nft", "add chain inet loss out { type filter hook output priority 0; }")
            self.on(end, "nft", f"add rule inet loss out oifname fast0 numgen random mod 100 < {percent} counter drop")

    def lost(self):
        lists = [subprocess.run([*self.prefix(end), "nft", "list", "table", "inet", "loss"], check=True,
                                capture_output=True, text=True).stdout for end in (0, 1)]
        return [int(said.split("counter packets ")[1].split()[0]) for said in lists]


class Nodes:
    """Node a with all roles and rank 0 (self.a), node b with rank 1 (self.b)."""
    def __init__(self, cable, via=A, **sets):
        self.a, self.b = Cluster(**sets), Cluster(**sets)
        keys = os.path.join(self.a.dir, "fabric.keys")
        self.a.tandem("keygen", keys)
        for c, end, seen in ((self.a, 0, A), (self.b, 1, via)):
            path = os.path.join(c.dir, "nodes")
            with open(path, "w", encoding="ascii") as f:
                f.write(f"# who runs what\na {seen} redis kvmgr drafter router gateway worker-0\nb {B} kvmgr-1 worker-1\n")
            c.prefix = cable.prefix(end)
            c.up_options = ["--nodes", path, "--node", "ab"[end]]
            c.sets["worker.fabric_keys"] = keys
            c.sets["worker.threads"] = "1"

    def __enter__(self):
        try:
            said = self.b.tandem(*self.up(self.b)).stdout
            assert "the group forms when" in said, said
            self.a.up()
        except BaseException:
            self.__exit__()
            raise
        return self

    @staticmethod
    def up(c):
        return ["up", *c.up_options, *(word for key, value in c.sets.items() for word in ("--set", f"{key}={value}"))]

    def __exit__(self, *_):
        for c in (self.a, self.b):
            c.__exit__()

    def count(self, text):
        return self.a.log("worker").count(text)

    def states(self):
        return [c.tandem("status", check=False).stdout for c in (self.a, self.b)]


def ids(c, case, on_event=None, **fields):
    got = c.stream(case["prompt"], path="/v1/completions", return_token_ids=True, temperature=0,
                   max_tokens=len(case["ids"]) + 8, timeout=90, on_event=on_event, **fields)
    assert got.done and got.error is None, got.error
    return got.ids


def texts_equal(c, cases):
    for case in cases:
        got = ids(c, case)
        assert got == case["ids"], (case["name"], got, case["ids"])


def test_a_cut_cable():
    cases = greedy_cases()
    longest = max(cases, key=lambda case: len(case["ids"]))
    with Cable() as cable:
        enter(cable.pids[0])
        with Nodes(cable, worker__dcp=2) as n:
            texts_equal(n.a, cases[:3])
            for said in n.states():
                assert ": ready" in said.splitlines()[0], said
            for c in (n.a, n.b):
                said = c.tandem("doctor", *n.up(c)[1:]).stdout
                assert "ok    the route to" in said and "mode 600" in said, said
            cut = []

            def pull(result):
                if len(result.ids) < 5 or cut:
                    return
                cut.append(time.monotonic())
                cable.on(1, "ip", "link", "set", "fast0", "down")
                wait_for("group lost", 5, lambda: n.count('"group lost"') > 0)
                cut.append(time.monotonic())
                cable.on(1, "ip", "link", "set", "fast0", "up")
            got = ids(n.a, longest, on_event=pull, spec="off")
            healed = time.monotonic() - cut[1]
            assert got == longest["ids"], (got, longest["ids"])
            assert cut[1] - cut[0] <= 4, f"seen after {cut[1] - cut[0]:.1f} s"
            assert healed <= 20, f"served again {healed:.1f} s after the cable was back"
            assert n.count('"group formed"') >= 2
            texts_equal(n.a, cases[:2])
            n.a.ledger_settles()
            n.a.pool_settles()


def test_a_bad_and_long_cable():
    """1 % of the packets lost both ways, and 1 ms each way: slower, right, and nobody is given up."""
    with Cable() as cable:
        enter(cable.pids[0])
        cable.lose(1)
        slow = Wire(DETOUR, PORT, (A, PORT), 0.001)  # what a longer way would do
        try:
            with Nodes(cable, via=DETOUR) as n:
                texts_equal(n.a, greedy_cases()[:4])
                assert n.count('"group lost"') == 0, n.a.log("worker")
                assert n.count('"group formed"') == 1
            assert all(cable.lost()), cable.lost()
            assert min(slow.carried) > 1 << 20, slow.carried
        finally:
            slow.close()


def test_other_keys_stay_outside():
    with Cable() as cable:
        enter(cable.pids[0])
        n = Nodes(cable)
        try:
            other = os.path.join(n.b.dir, "other.keys")
            n.b.tandem("keygen", other)
            n.b.sets["worker.fabric_keys"] = other
            n.b.tandem(*n.up(n.b))
            end = time.monotonic() + 20
            up = subprocess.Popen([*n.a.prefix, cluster.TANDEM, "--build", cluster.BUILD, "--run_dir", n.a.run_dir,
                                   "--state_dir", n.a.state_dir, *n.up(n.a)], cwd=cluster.ROOT,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                wait_for("worker-0 loaded", 15, lambda: os.path.exists(os.path.join(n.a.run_dir, "worker-0.http")))
                time.sleep(min(4, max(0, end - time.monotonic())))
                assert n.count('"group formed"') == 0
            finally:
                up.send_signal(signal.SIGTERM)
                up.wait(timeout=10)
        finally:
            n.__exit__()


if __name__ == "__main__":
    tools = ["ip", "nft", "unshare", "nsenter"]
    if os.geteuid() != 0 or any(shutil.which(t) is None for t in tools) or \
            subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        print("needs root, namespaces and " + ", ".join(tools))
        sys.exit(77)
    cluster.main(globals())
