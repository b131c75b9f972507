#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a follow-up on a long conversation against the cold one, on the demo model.

bench_followup.py [TOKENS [ROUNDS]]: default 8192, 5.  Starts a cluster of its own on loopback."""
import os
import random
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from cluster import Cluster  # noqa: E402  pylint: disable=wrong-import-position


def first_token(c, ids, salt):
    """Seconds to the first token, cached tokens, all ids."""
    begun = time.monotonic()
    got = c.stream(ids, path="/v1/completions", return_token_ids=True, temperature=0, max_tokens=32,
                   ignore_eos=True, cache_salt=salt, session_id=salt, timeout=600)
    assert got.done and got.error is None, got.error
    return got.times[0] - begun, got.usage["prompt_tokens_details"]["cached_tokens"], got.ids


def main():
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    rng = random.Random(7)
    cold, warm = [], []
    with Cluster(kvmgr__block_tokens=64, worker__numerics="fast") as c:
        first_token(c, [rng.randrange(900) for _ in range(256)], "warm-up")
        for i in range(rounds):
            ids = [rng.randrange(900) for _ in range(tokens)]
            seconds, cached, answer = first_token(c, ids, f"talk {i}")
            assert cached == 0
            cold.append(seconds)
            ids += answer + [rng.randrange(900) for _ in range(24)]
            seconds, cached, answer = first_token(c, ids, f"talk {i}")
            assert cached >= tokens - 64, cached
            warm.append(seconds)
            print(f"round {i}: cold {cold[-1] * 1e3:.0f} ms, follow-up {warm[-1] * 1e3:.1f} ms, "
                  f"{cached} of {len(ids) - len(answer)} tokens cached", flush=True)
    a, b = statistics.median(cold), statistics.median(warm)
    print(f"median: cold {a * 1e3:.0f} ms, follow-up {b * 1e3:.1f} ms, ratio {100 * b / a:.2f} %")
    return 0 if b <= 0.05 * a else 1


if __name__ == "__main__":
    sys.exit(main())
