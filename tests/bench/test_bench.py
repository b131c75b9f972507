#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tandem-bench against a fake server whose every delay and token is known: test_bench.py BINARY [TEST]..."""
import asyncio
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

BINARY = sys.argv[1]
COLD_WORDS = 3000           # a prompt with more words takes PREFILL seconds
PREFILL = 0.6
BESIDE = 4.0                # how much slower decoding is while such a prefill runs


class FakeServer:
    """Chat completions over SSE.  The model's name says how it misbehaves."""

    def __init__(self, step=0.004, tokens_per_event=3):
        self.step, self.per_event = step, tokens_per_event
        self.bodies, self.heads, self.gaps = [], [], []
        self.prefills = self.live = self.live_max = 0
        self.ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *exception):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    def run(self):
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(
            asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=4096))
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        self.loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def serve(self, reader, writer):
        self.live += 1
        self.live_max = max(self.live_max, self.live)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line.split(":")[1]) for line in head.split("\r\n")
                          if line.lower().startswith("content-length:"))
            body = json.loads(await reader.readexactly(length))
            self.heads.append(head)
            self.bodies.append(body)
            await self.answer(writer, body)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.live -= 1
            writer.close()

    async def answer(self, writer, body):
        model = body.get("model", "good")
        if model.startswith("http"):
            text = json.dumps({"error": {"message": "no room", "type": "rate_limit_error",
                                         "param": None, "code": "queue_full"}})
            writer.write(f"HTTP/1.1 {model[4:]} X\r\nContent-Length: {len(text)}\r\n\r\n{text}"
                         .encode())
        elif model == "rubbish":
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        elif model == "json":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                         b"Content-Length: 2\r\n\r\n{}")
        elif model == "hang_up":
            pass
        else:
            await self.stream(Stream(writer, body, chunked=model != "until_close"), model)
        await writer.drain()

    async def stream(self, out, model):
        body = out.body
        words = sum(len(m["content"].split()) for m in body["messages"])
        out.head()
        await out.raw(b": ping\n\n")
        if model == "silent":
            await asyncio.sleep(30)
        if words > COLD_WORDS:
            self.prefills += 1
            await asyncio.sleep(PREFILL)
            self.prefills -= 1
        await out.event({"role": "assistant", "content": ""})
        rng = random.Random(body["seed"])
        left, steps = body["max_tokens"], 0
        slow = float(body["spec"].split(":")[1]) if "spec" in body else 1.0
        while left > 0:
            await asyncio.sleep(self.step * slow * (BESIDE if self.prefills else 1))
            ids = [rng.randrange(1000) for _ in range(min(self.per_event, left))]
            left -= len(ids)
            steps += 1
            await out.event({"content": "".join(chr(97 + i % 26) for i in ids)}, ids)
            if steps > 1:
                self.gaps.append(time.monotonic() - written)
            written = time.monotonic()
            if steps == 2 and model == "cut":
                return
            if steps == 2 and model == "error_event":
                await out.data(json.dumps({"error": {"message": "worker lost", "code": None,
                                                     "type": "server_error", "param": None}}))
                break
            if steps == 2 and model == "bad_chunk":
                await out.data('{"choices":')
        else:
            await out.event({}, [], finish="length")
            made = body["max_tokens"]
            await out.data(json.dumps({"object": "chat.completion.chunk", "choices": [], "usage": {
                "prompt_tokens": 2 * words, "completion_tokens": made, "total_tokens": made,
                "prompt_tokens_details": {"cached_tokens": 1},
                "tandem": {"spec": body.get("spec", "fixed:7"), "drafted": 7 * steps,
                           "accepted": made - steps, "steps": steps, "queue_ms": 0.5,
                           "prefill_ms": 2, "decode_ms": 10.25, "concurrency": self.live}}}))
        if model != "no_done":
            await out.data("[DONE]")
        await out.end()


class Stream:
    """Writes events, in random pieces of chunked transfer coding."""

    def __init__(self, writer, body, chunked):
        self.writer, self.body, self.chunked = writer, body, chunked
        self.rng = random.Random(body["seed"] + 1)
        self.ids = body.get("model") != "no_ids"

    def head(self):
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n" +
                          (b"Transfer-Encoding: chunked\r\n" if self.chunked else b"") + b"\r\n")

    async def raw(self, data):
        if not self.chunked:
            self.writer.write(data)
        elif len(data) > 20 and self.rng.random() < 0.3:
            cut = self.rng.randrange(1, len(data))
            self.writer.write(b"%x\r\n%b\r\n%x\r\n%b\r\n" % (cut, data[:cut], len(data) - cut,
                                                            data[cut:]))
        else:
            self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def data(self, text):
        await self.raw(b"data: " + text.encode() + b"\n\n")

    async def event(self, delta, ids=None, finish=None):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        if ids is not None and self.ids:
            choice["token_ids"] = ids
        await self.data(json.dumps({"id": "chatcmpl-1", "object": "chat.completion.chunk",
                                    "choices": [choice]}))

    async def end(self):
        if self.chunked:
            self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()


def bench(port, *arguments, status=0, environment=None):
    run = subprocess.run([BINARY, "--url", f"http://127.0.0.1:{port}", *map(str, arguments)],
                         capture_output=True, text=True, timeout=100, check=False,
                         env={**os.environ, **(environment or {})})
    assert run.returncode == status, (arguments, run.returncode, run.stdout[-2000:],
                                      run.stderr[-2000:])
    return run


def near(value, wanted, share):
    """Both ends look at one clock, so that a busy machine moves both."""
    assert abs(value - wanted) <= share * wanted, (value, wanted)


def measured(port, *arguments, status=0):
    report = json.loads(bench(port, *arguments, "--json", status=status).stdout)
    return report["run"]


def test_numbers_are_what_the_server_did():
    with FakeServer(step=0.01, tokens_per_event=3) as server:
        run = measured(server.port, "--streams", 4, "--requests", 12, "--max-tokens", 32)
    assert (run["started"], run["finished"], run["failed"], run["stopped"]) == (12, 12, 0, 0)
    assert run["tokens"] == 12 * 32 and run["errors"] == {}
    events = 11                                     # 10 of 3 tokens, one of 2
    assert run["gap_ms"]["count"] == 12 * (events - 1)
    assert run["token_gap_ms"]["count"] == 12 * (32 - 3)
    gaps = [1000 * gap for gap in server.gaps[5:]]  # the warm-up had 16 tokens
    assert len(gaps) == 12 * (events - 1)
    near(run["gap_ms"]["mean"], sum(gaps) / len(gaps), 0.25)
    near(run["token_gap_ms"]["mean"] * 29, run["gap_ms"]["mean"] * 10, 0.01)
    assert 10 <= run["ttft_ms"]["min"] <= run["ttft_ms"]["p50"] <= run["ttft_ms"]["max"]
    near(run["stream_tokens_per_s"]["mean"], 29 / (sum(gaps) / 12 / 1000), 0.35)
    with FakeServer(step=0.01, tokens_per_event=3) as server:
        run = measured(server.port, "--requests", 1, "--max-tokens", 6)
    # The first event's tokens are no decoding: one gap, three tokens.
    near(run["stream_tokens_per_s"]["p50"] * run["gap_ms"]["p50"] / 1000, 3, 0.01)


def test_receipts_are_summed():
    events = 11
    with FakeServer() as server:
        run = measured(server.port, "--streams", 4, "--requests", 12, "--max-tokens", 32)
    assert run["ttft_ms"]["count"] == run["stream_tokens_per_s"]["count"] == 12
    receipts = run["receipts"]
    assert receipts["count"] == 12 and receipts["steps"] == 12 * events
    assert receipts["drafted"] == 7 * 12 * events and receipts["accepted"] == 12 * (32 - events)
    assert abs(receipts["acceptance"] - (32 - events) / (7 * events)) < 1e-9
    assert abs(receipts["tokens_per_step"] - 32 / events) < 1e-9
    assert receipts["specs"] == {"fixed:7": 12} and run["finish"] == {"length": 12}
    assert run["cached_tokens"] == 12 and 10 <= run["decode_ms"]["p50"] < 10.4
    assert run["count_mismatch"] == run["no_usage"] == run["no_token_ids"] == 0


def test_the_request_is_the_documented_one():
    with FakeServer() as server:
        bench(server.port, "--requests", 2, "--warmup", 0, "--max-tokens", 5, "--temperature", 0.5,
              "--seed", 100, "--spec", "fixed:1", "--model", "good", "--ignore-eos",
              "--set", 'top_k=40,stop=["a,b"],user=me', environment={"TANDEM_API_KEY": "sesame"})
        bodies, head = sorted(server.bodies, key=lambda b: b["seed"]), server.heads[0]
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer sesame\r\n" in head and f"Host: 127.0.0.1:{server.port}" in head
    assert bodies[0]["messages"] != bodies[1]["messages"]
    for index, body in enumerate(bodies):
        message, = body.pop("messages")
        assert message["role"] == "user" and len(message["content"]) > 100
        assert body == {"model": "good", "stream": True, "stream_options": {"include_usage": True},
                        "return_token_ids": True, "max_tokens": 5, "temperature": 0.5,
                        "seed": 100 + index, "spec": "fixed:1", "ignore_eos": True, "top_k": 40,
                        "stop": ["a,b"], "user": "me"}


def test_prompts_of_a_file():
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file, FakeServer() as server:
        file.write('plain "text"\n\n{"messages":[{"role":"system","content":"s"},'
                   '{"role":"user","content":"u"}],"max_tokens":7,"stream":false}\n'
                   '{"prompt":"p","top_p":0.5}\r\n')
        file.flush()
        run = measured(server.port, "--prompts", file.name, "--requests", 6, "--warmup", 0)
        assert run["tokens"] == 2 * (128 + 7 + 128)
        bodies = server.bodies[:3]
        assert [b["messages"][-1]["content"] for b in bodies] == ['plain "text"', "u", "p"]
        assert bodies[1]["max_tokens"] == 7 and bodies[1]["stream"] and bodies[2]["top_p"] == 0.5
        assert "prompt" not in bodies[2]
        file.write('{"message": 1}\n')
        file.flush()
        run = bench(server.port, "--prompts", file.name, status=2)
        assert ":5: neither" in run.stderr, run.stderr


def test_errors_by_kind():
    expected = {"http429": ("http", "status 429: queue_full: no room"),
                "http503": ("http", "status 503"), "error_event": ("error_event", "worker lost"),
                "cut": ("cut", "closed in the middle"), "no_done": ("cut", "without [DONE]"),
                "bad_chunk": ("protocol", "no JSON"), "rubbish": ("protocol", "no HTTP"),
                "json": ("protocol", "no text/event-stream"), "hang_up": ("cut", "without an answer"),
                "silent": ("silent", "not a byte")}
    with FakeServer() as server:
        for model, (kind, text) in expected.items():
            run = measured(server.port, "--model", model, "--requests", 3, "--streams", 3,
                           "--warmup", 0, "--max-tokens", 20, "--timeout", 0.5, status=1)
            assert run["errors"] == {kind: 3} and run["failed"] == 3, (model, run)
            assert text in run["error_samples"][0], (model, run["error_samples"])
            if kind == "http":
                assert run["http_statuses"] == {model[4:]: 3}
            table = bench(server.port, "--model", model, "--requests", 1, "--warmup", 0,
                          "--timeout", 0.5, status=1).stdout
            assert f"{kind} 1" in table, table
        run = bench(server.port, "--model", "http500", status=1)     # already in the warm-up
        assert "warm-up: status 500" in run.stderr and run.stdout == ""
        run = measured(server.port, "--model", "until_close", "--requests", 2, "--max-tokens", 9)
        assert run["tokens"] == 18 and run["failed"] == 0
        run = measured(server.port, "--model", "no_ids", "--requests", 2, "--max-tokens", 9)
        assert run["tokens"] == 18 and run["no_token_ids"] == 2
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        run = measured(closed.getsockname()[1], "--requests", 2, "--warmup", 0, status=1)
        assert run["errors"] == {"connect": 2}, run


def test_bad_command_lines():
    for arguments, text in ((["--strems", 1], "--strems is no option"),
                            (["--streams", 0], "--streams"), (["--streams", "2x"], "--streams"),
                            (["--requests", 1, "--seconds", 1], "exclude"), (["--ab", "a=1"], "two"),
                            (["--url", "https://127.0.0.1"], "http://"), (["--seed"], "no value"),
                            (["--ab", "a", "b=1"], '"a" is not name=value'), (["x"], "no option"),
                            (["--prompts", "/nonexistent"], "/nonexistent"),
                            (["--url", "http://127.0.0.1:99999"], "port")):
        run = bench(1, *arguments, status=2)
        assert text in run.stderr and run.stdout == "", (arguments, run.stderr)


def test_time_ends_a_run():
    with FakeServer() as server:
        start = time.monotonic()
        run = measured(server.port, "--seconds", 0.7, "--streams", 3, "--max-tokens", 100000)
        assert 0.7 <= time.monotonic() - start < 5
        assert run["stopped"] == 3 and run["failed"] == 0 and run["tokens"] > 3 * 20, run
        run = measured(server.port, "--requests", 2, "--streams", 2, "--max-tokens", 100000,
                       "--time-limit", 1, status=1)
        assert run["errors"] == {"time_limit": 2}, run


def test_a_signal_ends_a_run_with_its_report():
    with FakeServer() as server:
        child = subprocess.Popen([BINARY, "--url", f"http://127.0.0.1:{server.port}/v1/", "--json",
                                  "--max-tokens", "1000000", "--progress"], text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(1.5)
        child.send_signal(signal.SIGINT)
        out, error = child.communicate(timeout=20)
    assert child.returncode == 0 and json.loads(out)["run"]["stopped"] == 1, (out, error)
    assert "1 running" in error and "tok/s" in error, error


def test_arrivals_count_from_when_they_were_due():
    with FakeServer(step=0.01) as server:       # a stream takes about 0.12 s: one slot does 8 a second
        run = measured(server.port, "--rate", 40, "--requests", 20, "--max-tokens", 33)
    assert run["finished"] == 20 and run["late_starts"] >= 10
    assert run["ttft_ms"]["max"] > 600, run["ttft_ms"]
    with FakeServer(step=0.01) as server:
        run = measured(server.port, "--rate", 40, "--requests", 20, "--max-tokens", 33,
                       "--streams", 50)
        assert run["finished"] == 20 and server.live_max > 1 and run["late_starts"] < 5, run


def test_ab_finds_the_faster_one():
    with FakeServer(step=0.01) as server:
        report = json.loads(bench(server.port, "--ab", "spec=ema:3", "spec=fixed:1", "--streams", 2,
                                  "--requests", 4, "--rounds", 3, "--max-tokens", 31,
                                  "--json").stdout)
        measured_bodies = server.bodies[1:]
        table = bench(server.port, "--ab", "spec=ema:1", "spec=ema:1,seed=5", "--rounds", 2,
                      "--requests", 2, "--max-tokens", 9).stdout
    ratio = report["ratios"]["stream_tokens_per_s"]
    assert ratio["pairs"] == 12 and ratio["low"] <= ratio["median"] <= ratio["high"]
    assert 1.2 < ratio["low"] and ratio["high"] < 6, report["ratios"]
    seconds = [report[arm]["run"]["seconds"] for arm in "ab"]
    assert seconds[0] > 1.2 * seconds[1], f"an arm's time holds the other's: {seconds}"
    assert report["ratios"]["ttft"]["median"] < 1 and report["ratios"]["run_tokens_per_s"]["pairs"] == 3
    assert report["texts_compared"] == report["texts_equal"] == 12
    assert report["a"]["settings"] == {"spec": "ema:3"} and report["b"]["run"]["finished"] == 12
    runs = [measured_bodies[i:i + 4] for i in range(0, 24, 4)]
    assert [r[0]["spec"][0] for r in runs] == list("effeef"), "rounds alternate"
    seeds = [sorted((b["seed"], b["messages"][0]["content"]) for b in r) for r in runs]
    assert seeds[0] == seeds[1] and seeds[2] == seeds[3] and seeds[0] != seeds[2]
    salts = [{b["cache_salt"] for b in r} for r in runs]
    assert all(len(s) == 1 for s in salts) and len(set.union(*salts)) == 6
    assert "B / A" in table and "0 of 4 pairs" in table, table


def test_solo_ratio_sees_a_prefill_beside():
    with FakeServer(step=0.01, tokens_per_event=1) as server:
        arguments = ["--solo-ratio", "--rounds", 2, "--max-tokens", 150, "--cold-tokens", 12000]
        report = json.loads(bench(server.port, *arguments, "--json").stdout)
        run = bench(server.port, *arguments, "--contract", status=1)
        both = json.loads(bench(server.port, *arguments, "--cold-first", "--streams", 3, "--rounds",
                                1, "--json").stdout)
        bench(server.port, *arguments, "--contract", "--ratio-min", 0.01, "--gap-p99-max", 5, "--gap-max",
              5, "--rounds", 1)
    assert 0.1 < report["ratio"]["median"] < 0.58, report["ratio"]
    near(report["ratio"]["median"], report["beside_tokens_per_s"]["median"] /
         report["alone_tokens_per_s"]["median"], 0.35)
    assert 0.9 < report["prefill_covered"]["median"] <= 1, report["prefill_covered"]
    assert report["gap_alone_ms"]["p50"] < report["gap_beside_ms"]["p50"]
    assert report["gap_beside_ms"]["p50"] >= 35 and 8 <= report["gap_beside_ms"]["count"] <= 2 * 20
    assert report["cold_ttft_alone_ms"]["count"] == report["cold_ttft_beside_ms"]["count"] == 2
    assert report["cold_ttft_alone_ms"]["min"] >= 1000 * PREFILL
    assert report["contract"]["ratio"] is False and report["cold_ttft_factor"]["median"] < 2
    assert 9000 < report["cold_prompt_tokens"] < 15000     # the warm-up taught two tokens a word
    assert report["run"]["failed"] == 0 and "ratio at least 0.60: missed" in run.stdout
    assert 0.1 < both["ratio"]["median"] < 0.7 and both["decoder_ttft_beside_ms"]["count"] == 3
    assert 0.2 < both["prefill_covered"]["median"] < 0.75, both["prefill_covered"]


def test_two_thousand_streams():
    wanted = 2000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted + 200:
        wanted = hard - 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with FakeServer(step=2.0) as server:
        run = measured(server.port, "--streams", wanted, "--requests", wanted, "--max-tokens", 6,
                       "--prompt-tokens", 8, "--ramp", 2.5)
        assert run["finished"] == wanted and run["tokens"] == 6 * wanted, run
        assert server.live_max >= wanted * 0.7, server.live_max
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"{server.live_max} streams at once, {most} KiB")
    assert most < 1 << 20, most     # sanitizers included
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main():
    names = sys.argv[2:] or [n for n in globals() if n.startswith("test_")]
    for name in names:
        start = time.monotonic()
        globals()[name]()
        print(f"ok {name} {time.monotonic() - start:.1f} s", flush=True)


main()
