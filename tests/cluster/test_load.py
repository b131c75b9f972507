# SPDX-License-Identifier: Apache-2.0
"""200 concurrent streams: all admitted, each with a token at least every 5 s, memory flat."""
import asyncio
import json
import random
import time

import cluster
from cluster import Cluster

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


cluster.main(globals())
