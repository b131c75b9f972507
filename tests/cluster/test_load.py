# SPDX-License-Identifier: Apache-2.0
"""200 concurrent streams: all admitted, each with a token at least every 5 s, memory flat.
The bounds of the router's queue, and what the refused are told."""
import asyncio
import json
import math
import random
import threading
import time

import cluster
from cluster import Cluster, wait_for

STREAMS = 200
SECONDS = 60


async def one_stream(port, index, end, results):
    """Opens streams one after another until `end`; notes the longest silence of each."""
    rng = random.Random(index)
    while time.monotonic() < end:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        body = json.dumps({"messages": [{"role": "user", "content": f"Repeat: {rng.random()} apple"}],
                           "stream": True, "ignore_eos": True, "temperature": 1.0, "seed": index,
                           "max_tokens": rng.randrange(200, 800)}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                     b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: "
                     + str(len(body)).encode() + b"\r\n\r\n" + body)
        last, longest, status, tokens, finished = time.monotonic(), 0.0, None, 0, False
        while True:
            try:
                line = await asyncio.wait_for(reader.readline(), 20)
            except asyncio.TimeoutError:
                results["errors"].append(f"stream {index}: silent for 20 s")
                writer.close()
                return
            if not line:
                break
            if status is None:
                status = int(line.split()[1])
                if status != 200:
                    results["errors"].append(f"stream {index}: status {status}")
            if line.startswith(b'data: {"error"'):
                results["errors"].append(line.decode()[:200])
            if b'"delta":{"' in line and b'"role"' not in line:
                now = time.monotonic()
                longest, last, tokens = max(longest, now - last), now, tokens + 1
            if line.startswith(b"data: [DONE]"):
                finished = True
            if time.monotonic() > end:
                break               # the hour is over: hang up
        if not finished and time.monotonic() <= end:
            results["errors"].append(f"stream {index}: cut after {tokens} events")
        results["longest"].append(max(longest, time.monotonic() - last if not finished else 0))
        results["tokens"] += tokens
        results["streams"] += 1
        writer.close()


async def load(c, results):
    start = time.monotonic()
    end = start + SECONDS
    tasks = [asyncio.create_task(one_stream(c.port, i, end, results)) for i in range(STREAMS)]
    await asyncio.sleep(SECONDS / 3)
    results["live"] = c.health("worker")["ledger"]["live"]
    results["early"] = {role: c.rss_kib(role) for role in ("gateway", "router")}
    await asyncio.sleep(max(0.0, end - 0.5 - time.monotonic()))
    results["late"] = {role: c.rss_kib(role) for role in ("gateway", "router")}
    await asyncio.gather(*tasks)


def test_two_hundred_streams():
    results = {"errors": [], "longest": [], "tokens": 0, "streams": 0}
    with Cluster(worker__seqs_max=STREAMS, kvmgr__arena_bytes=1 << 30, worker__numerics="fast") as c:
        asyncio.run(load(c, results))
        c.ledger_settles(20)
        c.pool_settles(20)
        restarts = [role["restarts"] for role in json.loads(
            c.tandem("status", "--json").stdout)["roles"]]
    print(f"measured: {STREAMS} streams for {SECONDS} s | `tests/cluster/test_load.py` | "
          f"{results['streams']} streams, {results['tokens']} events, {len(results['errors'])} errors, "
          f"longest silence {max(results['longest']):.2f} s, live {results['live']}, resident KiB "
          f"{results['early']} -> {results['late']}")
    assert not results["errors"], results["errors"][:5]
    assert not any(restarts), restarts
    assert results["live"] >= STREAMS - 4, results["live"]
    assert max(results["longest"]) <= 5.0, max(results["longest"])
    for role in ("gateway", "router"):
        assert results["late"][role] <= 1.02 * results["early"][role], results


OUTPUT = 40             # tokens of every finished answer: the router's mean output
QUEUE_TOKENS = 3000


def ask(c, prompt, tokens, **fields):
    return c.post("/v1/completions", {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
                                      "temperature": 0, **fields}, timeout=120)


def test_queue_is_bounded_by_tokens():
    """429 beyond queue_tokens_max, with a Retry-After that is the backlog over the measured rate."""
    prompt = " ".join(["apple forest letter window"] * 150)
    with Cluster(worker__seqs_max=1, router__queue_tokens_max=QUEUE_TOKENS) as c:
        count = len(c.post("/tokenize", {"prompt": prompt}).json()["tokens"])
        assert 300 < count < QUEUE_TOKENS / 3, count
        for _ in range(3):
            assert ask(c, "one two", OUTPUT).status == 200
        rates = []
        stop = threading.Event()

        def watch():
            while not stop.wait(0.3):
                rates.append(c.metric("router", "tandem_router_tokens_per_second"))
        threads = [threading.Thread(target=watch, daemon=True)]
        threads[0].start()
        # One runs for long, so that the rate is measured and nothing else moves.
        streams = [threading.Thread(target=lambda: ask(c, "go", 100000), daemon=True)]
        streams[0].start()
        wait_for("running", 10, lambda: c.health("router")["running"] == 1)
        time.sleep(6)
        fit = QUEUE_TOKENS // count
        for n in range(fit):
            streams.append(threading.Thread(target=lambda: ask(c, prompt, 5), daemon=True))
            streams[-1].start()
            wait_for("waiting", 10, lambda n=n: c.health("router")["queue"] == n + 1)
        waiting = c.metric("router", "tandem_router_waiting_tokens")
        assert waiting == fit * count, (waiting, fit, count)
        del rates[:-3]
        refused = ask(c, prompt, 5)
        time.sleep(0.7)
        stop.set()
        assert refused.status == 429, (refused.status, refused.body)
        told = int(refused.headers["retry-after"])
        backlog = waiting + fit * OUTPUT    # the running one is beyond the mean output already
        low, high = backlog / max(rates), backlog / min(rates)
        print(f"measured: Retry-After | `tests/cluster/test_load.py` | {told} s for {backlog:.0f} "
              f"tokens at {min(rates):.0f} to {max(rates):.0f} tokens/s")
        assert math.floor(low * 0.8) <= told <= math.ceil(high * 1.2) + max(
            1, math.ceil(high * 1.2)) * 0.25 + 2, (told, low, high, rates)
        # A short prompt still fits beside the long ones that do not.
        short = threading.Thread(target=lambda: ask(c, "one", 1), daemon=True)
        short.start()
        wait_for("the short one waits", 10, lambda: c.health("router")["queue"] == fit + 1)
        assert c.metric("router", 'tandem_router_refused_total{reason="busy"') == 1


def test_what_never_fits_is_said_at_once():
    prompt = " ".join(["apple forest letter window"] * 150)
    with Cluster(worker__seqs_max=2, router__queue_tokens_max=QUEUE_TOKENS,
                 router__queue_requests_max=4) as c:
        count = len(c.post("/tokenize", {"prompt": prompt}).json()["tokens"])
        longer = ask(c, " ".join([prompt] * (QUEUE_TOKENS // count + 1)), 5)
        assert longer.status == 400 and b"queue_tokens_max" in longer.body, longer.body
        # 2 run and 4 may wait: 6 choices fit although 4 are the bound of the queue, 7 never do.
        many = ask(c, "one", 3, n=6)
        assert many.status == 200 and len(many.json()["choices"]) == 6, many.body
        many = ask(c, "one", 3, n=7)
        assert many.status == 400 and b"queue_requests_max" in many.body, many.body
    with Cluster(worker__seqs_max=2, router__queue_tokens_max=QUEUE_TOKENS) as c:
        fit = 2 + QUEUE_TOKENS // count
        many = ask(c, prompt, 3, n=fit)
        assert many.status == 200 and len(many.json()["choices"]) == fit, many.body
        many = ask(c, prompt, 3, n=fit + 1)
        assert many.status == 400 and b"queue_tokens_max" in many.body, many.body


def test_time_limit_of_a_request():
    with Cluster(gateway__request_ms=1500, worker__seqs_max=1) as c:
        start = time.monotonic()
        running = []
        thread = threading.Thread(daemon=True, target=lambda: running.append(c.stream(
            "Repeat: apple", ignore_eos=True, max_tokens=100000, timeout=30)))
        thread.start()
        wait_for("running", 10, lambda: c.health("router")["running"] == 1)
        waiting = ask(c, "one", 100000)     # has a sequence for an instant at most
        assert waiting.status == 503 and b"deadline" in waiting.body, (waiting.status, waiting.body)
        thread.join(10)
        assert running and running[0].error and "deadline" in running[0].error["message"], running
        assert 1.4 < time.monotonic() - start < 4
        wait_for("idle", 5, lambda: c.health("worker")["seqs_live"] <= 1)
        assert ask(c, "one", 3).status == 200
        c.ledger_settles()
        c.pool_settles()


cluster.main(globals())
