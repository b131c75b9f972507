#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What tests/run.sh counts one by one: the fuzzers, and the seeds of the long run.

rounds.py fuzz BUILD SECONDS [STATE]    every fuzzer of BUILD for SECONDS, two at a time
rounds.py seeds BUILD STATE             the full counts of the fault and equality suites, two seeds at a time

Prints `ok NAME`, `FAILED NAME` and `measured: WHAT | COMMAND | FIGURE` lines.  STATE is a text file: what
has passed is added to it at once and is not run again, so an interrupted run goes on where it was.
A failure leaves no mark and prints the line that repeats it."""
import concurrent.futures
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# name, file, tests of it, seeds, environment: one process and one seed per line of the state file
SEEDS = [
    ("kill -9 rounds", "test_faults.py", ["test_kill_rounds"], 10, {"TANDEM_ROUNDS": "20"}),
    ("cancels", "test_faults.py", ["test_random_cancels_leave_nothing"], 10,
     {"TANDEM_CANCELS": "100"}),
    ("drafter kills", "test_faults.py", ["test_drafter_killed_at_any_moment"], 1,
     {"TANDEM_ROUNDS": "30"}),
    ("equality", "test_equality.py", ["test_every_policy_gives_one_text",
                                      "test_batches_slices_blocks"], 3, {}),
    # 5 seeds of 2 rounds of 24 requests
    ("drafter hurt", "test_draft.py", ["test_one_text_whatever_happens_to_the_drafter"], 5,
     {"TANDEM_ROUNDS": "2"}),
    ("faults of two ranks, shared memory", "test_rank_faults.py",
     ["test_rounds_over_shared_memory"], 10, {"TANDEM_ROUNDS": "25"}),
    ("faults of two ranks, bad cable", "test_rank_faults.py",
     ["test_rounds_over_a_bad_cable"], 10, {"TANDEM_ROUNDS": "25"}),
]
AT_ONCE = 2  # much of a round is waiting
TIMEOUT_S = 1200


class State:
    """Lines `NAME<tab>FIGURES`; append only, so that a kill loses at most the item that runs."""

    def __init__(self, path):
        self.path, self.lock, self.known = path, threading.Lock(), {}
        if path and os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                for line in f:
                    name, tab, figures = line.rstrip("\n").partition("\t")
                    if tab:
                        self.known[name] = figures

    def add(self, name, figures=""):
        with self.lock:
            self.known[name] = figures
            if self.path:
                with open(self.path, "a", encoding="utf-8") as f:
                    f.write(f"{name}\t{figures}\n")

    def base_seed(self):
        if "seed" not in self.known:
            self.add("seed", str(int(os.environ.get("TANDEM_SEED", "0")) or
                                 random.randrange(1, 1 << 29)))
        return int(self.known["seed"])


def say(text):
    print(text, flush=True)


def run_seed(build, item, seed):
    """One process of a cluster test; returns (passed, output, seconds)."""
    _, file, tests, _, env = item
    command = [sys.executable, os.path.join(ROOT, "tests", "cluster", file), *tests]
    start = time.monotonic()
    try:
        run = subprocess.run(command, env={**os.environ, **env, "TANDEM_SEED": str(seed),
                                           "TANDEM_SOURCE_ROOT": ROOT, "TANDEM_BUILD_ROOT": build},
                             capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        passed, output = run.returncode == 0, run.stdout + run.stderr
    except subprocess.TimeoutExpired as error:
        passed, output = False, f"{error.stdout or ''}\nnot ended after {TIMEOUT_S} s"
    return passed, output, time.monotonic() - start


def replay(item, seed):
    _, file, tests, _, env = item
    words = [f"{name}={value}" for name, value in {**env, "TANDEM_SEED": seed}.items()]
    return " ".join([*words, "TANDEM_SOURCE_ROOT=$PWD", "TANDEM_BUILD_ROOT=$PWD/build",
                     f"python3 tests/cluster/{file}", *tests])


def key_of(item, seed):
    return f"{item[0]}: seed {seed}"


def seed_once(build, state, item, seed):
    """False when it failed."""
    key = key_of(item, seed)
    if key in state.known:
        return True
    passed, output, seconds = run_seed(build, item, seed)
    if not passed:
        say(f"{output[-6000:]}\nFAILED {key}\nrepeat it with: {replay(item, seed)}")
        return False
    rounds = re.findall(r"round of ([0-9.]+) s", output)
    state.add(key, " ".join([f"{seconds:.1f}", *rounds]))
    say(f"ok {key} ({seconds:.1f} s)")
    return True


def measured(state, item, base):
    name, _, _, count, env = item
    done = [state.known[key_of(item, s)].split() for s in range(base, base + count)
            if key_of(item, s) in state.known]
    each = int(env.get("TANDEM_ROUNDS", env.get("TANDEM_CANCELS", 1)))
    figure = f"{len(done) * each} of {count * each}, {sum(float(d[0]) for d in done):.0f} s"
    rounds = [float(x) for d in done for x in d[1:]]
    if rounds:
        figure += f"; a round {statistics.median(rounds):.1f} s in the middle, " \
                  f"{max(rounds):.1f} s at most"
    say(f"measured: {name} | `tests/run.sh --long`, seeds {base} to {base + count - 1} | {figure}")


def seeds(build, state):
    base = state.base_seed()
    jobs = [(item, seed) for item in SEEDS for seed in range(base, base + item[3])]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        passed = list(pool.map(lambda job: seed_once(build, state, *job), jobs))
    for item in SEEDS:
        measured(state, item, base)
    return passed.count(False)


def fuzz_one(build, name, run_s, work):
    corpus = [os.path.join(work, name)]
    os.makedirs(corpus[0])
    kept = os.path.join(ROOT, "tests", "fuzz", "corpus", name)
    if os.path.isdir(kept):
        corpus.append(kept)
    run = subprocess.run([os.path.join(build, "tests", "fuzz", name), f"-max_total_time={run_s}",
                          "-timeout=10", "-rss_limit_mb=2048", f"-artifact_prefix={work}/{name}-",
                          "-verbosity=1", "-print_final_stats=1", *corpus], capture_output=True,
                         text=True, errors="replace", check=False)
    for artifact in os.listdir(work):
        if artifact.startswith(name + "-"):
            shutil.copy(os.path.join(work, artifact), build)
    runs = re.search(r"number_of_executed_units:\s*(\d+)", run.stderr)
    return run.returncode == 0, run.stderr, int(runs.group(1)) if runs else 0


def fuzz(build, run_s, state):
    with open(os.path.join(ROOT, "tests", "fuzz", "list.txt"), encoding="utf-8") as f:
        names = [line.split("|")[0].strip() for line in f if line.strip()]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="tandem-fuzz-") as work:
        def one(name):
            key = f"fuzz {name} {run_s} s"
            if key in state.known:
                return 0
            passed, output, runs = fuzz_one(build, name, run_s, work)
            if passed:
                state.add(key, str(runs))
                say(f"ok {name} ({runs} inputs)")
            else:
                say(f"{output[-4000:]}\nFAILED {name}\nits input lies in {build}")
            return 0 if passed else 1
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            failed = sum(pool.map(one, names))
    total = sum(int(state.known.get(f"fuzz {name} {run_s} s") or 0) for name in names)
    say(f"measured: {len(names)} fuzzers | `tests/run.sh`, {run_s} s each, two at a time | {total} "
        f"inputs, {failed} failed")
    return failed


def main():
    what, build = sys.argv[1], os.path.abspath(sys.argv[2])
    if what == "fuzz":
        state = State(sys.argv[4] if len(sys.argv) > 4 else "")
        sys.exit(1 if fuzz(build, int(sys.argv[3]), state) else 0)
    sys.exit(1 if seeds(build, State(sys.argv[3])) else 0)


if __name__ == "__main__":
    main()
