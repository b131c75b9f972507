# SPDX-License-Identifier: Apache-2.0
"""The HTTP contract against the real gateway: fields, bodies, framing, shapes, errors."""
import json
import socket
import threading
import time

import cluster
from cluster import Cluster, pid_alive

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# (field to change, value, param that the error names)
BAD_CHAT = [
    ("messages", None, "messages"), ("messages", [], "messages"), ("messages", "x", "messages"),
    ("messages", [1], "messages[0]"), ("messages", [{}], "messages[0].role"),
    ("messages", [{"role": "wizard", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", HI + [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
     "messages[1].content"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content"),
    ("messages", [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}],
     "messages[0].tool_calls"),
    ("temperature", "hot", "temperature"), ("temperature", -1, "temperature"),
    ("temperature", 1e9, "temperature"),
    ("top_p", 0, "top_p"), ("top_p", 1.5, "top_p"), ("top_p", "x", "top_p"),
    ("top_k", -5, "top_k"), ("top_k", 1.5, "top_k"), ("min_p", 2, "min_p"), ("min_p", -0.1, "min_p"),
    ("repetition_penalty", 0, "repetition_penalty"), ("repetition_penalty", "x", "repetition_penalty"),
    ("presence_penalty", 3, "presence_penalty"), ("frequency_penalty", -2.5, "frequency_penalty"),
    ("logit_bias", {"x": 1}, "logit_bias"), ("logit_bias", {"1": 101}, "logit_bias"),
    ("logit_bias", [1], "logit_bias"), ("logit_bias", {"99999999": 1}, "logit_bias"),
    ("max_tokens", 0, "max_tokens"), ("max_tokens", -1, "max_tokens"), ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", "many", "max_tokens"), ("max_completion_tokens", 0, "max_completion_tokens"),
    ("n", 0, "n"), ("n", 1000, "n"), ("n", "two", "n"),
    ("seed", "x", "seed"), ("seed", 1.5, "seed"),
    ("stop", 5, "stop"), ("stop", [1], "stop"), ("stop", [""], "stop"),
    ("stop_token_ids", ["x"], "stop_token_ids"), ("stop_token_ids", [99999999], "stop_token_ids"),
    ("logprobs", "x", "logprobs"), ("top_logprobs", 5, "top_logprobs"),
    ("stream", "yes", "stream"), ("stream_options", 5, "stream_options"),
    ("tools", {}, "tools"), ("tools", [5], "tools[0]"), ("tools", [{"type": "function"}], "tools[0]"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "nope"}}, "tool_choice"),
    ("tool_choice", "sometimes", "tool_choice"),
    ("response_format", {"type": "json_object"}, "response_format"),
    ("response_format", {"type": "json_schema"}, "response_format"),
    ("response_format", 5, "response_format"),
    ("reasoning_effort", 5, "reasoning_effort"), ("chat_template_kwargs", [], "chat_template_kwargs"),
    ("spec", "fixed:99", "spec"), ("spec", 5, "spec"), ("spec", "magic", "spec"),
    ("session_id", 5, "session_id"), ("cache_salt", "", "cache_salt"), ("cache_salt", 5, "cache_salt"),
    ("return_token_ids", "x", "return_token_ids"), ("priority", "x", "priority"),
    ("ignore_eos", 1, "ignore_eos"), ("min_tokens", -1, "min_tokens"),
    ("prompt_logprobs", 1, "prompt_logprobs"), ("structured_outputs", {"json": {}}, "structured_outputs"),
    ("chat_template", "{{x}}", "chat_template"), ("model", 5, "model"),
]

BAD_COMPLETIONS = [
    ("prompt", None, "prompt"), ("prompt", 5, "prompt"), ("prompt", [], "prompt"),
    ("prompt", [99999999], "prompt"), ("prompt", [[1, 2], ["x"]], "prompt"), ("prompt", [-1], "prompt"),
    ("suffix", "x", "suffix"), ("logprobs", 99, "logprobs"), ("logprobs", "x", "logprobs"),
    ("echo", "x", "echo"), ("best_of", 0, "best_of"), ("max_tokens", -1, "max_tokens"),
]

FRAMING = [
    # (bytes to send, statuses allowed; 0 = the connection just closes)
    (b"GET /health HTTP/1.1\r\n\r\n", {400}),
    (b"GET /health HTTP/1.1\nHost: x\n\n", {400}),
    (b"GET /health HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", {400}),
    (b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", {400}),
    (b"GET /health HTTP/2.7\r\nHost: x\r\n\r\n", {400, 505}),
    (b"GET /health\r\n\r\n", {400, 505}),
    (b"get /health HTTP/1.1\r\nHost: x\r\n\r\n", {400, 405, 501}),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", {400}),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", {400}),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -2\r\n\r\n{}", {400}),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n{}", {400, 413}),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", {400, 501}),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", {400}),
    (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", {413}),
    (b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x01b\r\n\r\n", {400}),
    (b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", {400, 414, 431}),
    (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000 + b"\r\n", {400, 431}),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400, 0}),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 405, 501, 505}),
]


def raw(c, data, seconds=10, half_close=False):
    with socket.create_connection(("127.0.0.1", c.port), timeout=seconds) as s:
        s.sendall(data)
        if half_close:
            s.shutdown(socket.SHUT_WR)
        out = b""
        try:
            while True:
                piece = s.recv(65536)
                if not piece:
                    break
                out += piece
                if b"\r\n\r\n" in out and len(out) > 200000:
                    break
        except (socket.timeout, ConnectionResetError):
            pass
        return out


def error_of(reply):
    body = reply.json()
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) >= {"message", "type", "param", "code"}, error
    assert error["message"] and isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert "application/json" in reply.headers["content-type"]
    return error


def test_malformed_fields():
    with Cluster() as c:
        pid = c.pid("gateway")
        wrong = []
        for path, base, cases in ((CHAT, {"messages": HI, "max_tokens": 2}, BAD_CHAT),
                                  (COMPLETIONS, {"prompt": "Hi", "max_tokens": 2}, BAD_COMPLETIONS)):
            for stream in (False, True):
                for field, value, param in cases:
                    body = {**base, "stream": stream, field: value}
                    if field == "stream":
                        body = {**base, field: value}
                    if field == "tool_choice" and value == "sometimes":
                        body["tools"] = [TOOL]
                    reply = c.post(path, body)
                    want = 404 if field == "model" and isinstance(value, str) else 400
                    if reply.status != want:
                        wrong.append((path, field, value, reply.status, reply.body[:200]))
                        continue
                    error = error_of(reply)
                    if error["type"] != "invalid_request_error" or not (
                            error["param"] or "").startswith(param):
                        wrong.append((path, field, value, error))
        assert not wrong, "\n".join(map(str, wrong))
        assert c.pid("gateway") == pid and pid_alive(pid)


def test_malformed_bodies():
    with Cluster() as c:
        good = json.dumps({"messages": HI, "max_tokens": 1}).encode()
        for body, status in ((b"", 400), (b"{", 400), (b"[]", 400), (b"null", 400), (b"{}", 400),
                             (b'{"messages": [}', 400), (good + b"x", 400), (b"\xff" + good, 400),
                             (b"[" * 100000, 400), (b'{"a":' * 100000, 400),
                             (b'{"messages":[{"role":"user","content":"\xff"}]}', 400),
                             (b"\xef\xbb\xbf" + good, 200), (good.replace(b"Hi", b"\\ud83d"), 200),
                             (good.replace(b"Hi", b"\\u0000"), 200),
                             (b'{"max_tokens": NaN, "messages": []}', 400),
                             (good[:-1] + b', "no_such_field": {"a": [1]}}', 200)):
            reply = c.post(CHAT, body)
            assert reply.status == status, (body[:60], reply.status, reply.body[:300])
            if status != 200:
                error_of(reply)
        for content_type in ("text/plain", "application/x-www-form-urlencoded"):
            reply = c.request("POST", CHAT, good, {"Content-Type": content_type})
            assert reply.status in (400, 415), reply.status
        big = json.dumps({"prompt": "a " * 4_000_000, "max_tokens": 1})
        reply = c.post(COMPLETIONS, big, timeout=120)
        assert reply.status == 400, (reply.status, reply.body[:300])
        error = error_of(reply)
        assert error["code"] == "context_length_exceeded", error
        assert "maximum context length is" in error["message"], error


def test_framing():
    with Cluster() as c:
        pid = c.pid("gateway")
        for data, statuses in FRAMING:
            out = raw(c, data, 5, half_close=True)
            status = int(out.split(b" ", 2)[1]) if out.startswith(b"HTTP/") else 0
            assert status in statuses, (data[:80], out[:200])
            if status:
                head, body = out.split(b"\r\n\r\n", 1)
                assert b"application/json" in head and b"error" in body, out[:300]
        # routes
        for method, path, status in (("GET", "/nope", 404), ("GET", CHAT, 405), ("POST", "/health", 405),
                                     ("DELETE", "/v1/models", 405), ("GET", "/health", 200),
                                     ("GET", "/ping", 200), ("GET", "/version", 200),
                                     ("GET", "/v1/models/no-such-model", 404), ("GET", "/load", 200),
                                     ("OPTIONS", CHAT, None)):
            reply = c.request(method, path)
            if status:
                assert reply.status == status, (method, path, reply.status)
            else:
                assert reply.status < 300
        # pipelining: two requests in one packet, answered in order
        out = raw(c, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n"
                     b"Connection: close\r\n\r\n")
        assert out.count(b"HTTP/1.1 200") == 2 and out.index(b"version\"") < out.rindex(b"HTTP/1.1"), out
        # HEAD has no body, HTTP/1.0 closes
        out = raw(c, b"HEAD /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert out.startswith(b"HTTP/1.1 200") and out.endswith(b"\r\n\r\n"), out
        out = raw(c, b"GET /version HTTP/1.0\r\n\r\n")
        assert b"200" in out.split(b"\r\n")[0] and b"version" in out
        # split at every byte
        body = json.dumps({"messages": HI, "max_tokens": 1}).encode()
        request = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                   b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" +
                   b"".join(b"%x\r\n%s\r\n" % (len(body[i:i + 7]), body[i:i + 7])
                            for i in range(0, len(body), 7)) + b"0\r\n\r\n")
        with socket.create_connection(("127.0.0.1", c.port), timeout=20) as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for i in range(len(request)):
                s.sendall(request[i:i + 1])
            out = b""
            while piece := s.recv(65536):
                out += piece
        assert out.startswith(b"HTTP/1.1 200"), out[:300]
        # Expect: 100-continue comes at once
        with socket.create_connection(("127.0.0.1", c.port), timeout=5) as s:
            start = time.monotonic()
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                      b"Expect: 100-continue\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n")
            assert b"100" in s.recv(100) and time.monotonic() - start < 0.5
            s.sendall(body)
            assert b"200" in s.recv(4096)
        assert c.pid("gateway") == pid and pid_alive(pid)


def test_shapes():
    with Cluster() as c:
        reply = c.post(CHAT, {"messages": HI, "temperature": 0, "seed": 5, "reasoning_effort": "low"},
                       headers={"X-Request-Id": "abc-123"})
        assert reply.headers["x-request-id"] == "abc-123"
        for name in ("x-tandem-effort", "x-tandem-concurrency", "x-tandem-spec", "x-tandem-model-fp",
                     "x-tandem-config"):
            assert reply.headers.get(name), (name, reply.headers)
        answer = reply.json()
        assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
        choice = answer["choices"][0]
        assert set(choice) >= {"index", "message", "logprobs", "finish_reason"}
        assert choice["logprobs"] is None and choice["message"]["refusal"] is None
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert "reasoning_tokens" in usage["completion_tokens_details"]
        receipt = usage["tandem"]
        assert set(receipt) >= {"effort", "concurrency", "spec", "drafted", "accepted", "steps",
                                "cached_tokens", "preempted", "resumed", "queue_ms", "prefill_ms",
                                "decode_ms", "model_fp", "config_hash", "seed"}, receipt
        assert receipt["seed"] == "5" and receipt["effort"] == "low" and receipt["concurrency"] == 1
        model = answer["model"]
        models = c.request("GET", "/v1/models").json()
        entry = models["data"][0]
        assert models["object"] == "list" and entry["id"] == model and entry["object"] == "model"
        assert entry["max_model_len"] == 1048576 and "max_tokens" not in entry
        assert "bf16" in json.dumps(entry), entry
        assert c.request("GET", "/v1/models/" + model).json()["id"] == model
        assert c.post(CHAT, {"messages": HI, "model": "gpt-9"}).status == 404
        assert c.post(CHAT, {"messages": HI, "model": model, "max_tokens": 1}).status == 200

        # stream: role chunk first, finish chunk, usage only when asked, [DONE]
        data = raw(c, request_bytes({"messages": HI, "temperature": 0, "stream": True}))
        events = [line[6:] for line in data.decode().split("\r\n") for line in line.split("\n")
                  if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(e) for e in events[:-1]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["choices"][0]["delta"] == {} and chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert all(x["object"] == "chat.completion.chunk" and not x.get("usage") for x in chunks)
        assert all(x["choices"][0]["finish_reason"] is None for x in chunks[:-1])
        assert b"text/event-stream" in data and b"no-cache" in data

        # logprobs, both end points
        answer = c.chat("Hi", temperature=0, logprobs=True, top_logprobs=3, max_tokens=5)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 5
        for entry in content:
            assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 3
            assert entry["top_logprobs"][0]["token"] == entry["token"], entry
            assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        answer = c.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 4, "logprobs": 2,
                                      "temperature": 0, "echo": True}).json()
        assert answer["object"] == "text_completion" and answer["choices"][0]["text"].startswith("Hello")
        assert len(c.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 2}).json()[
            "choices"]) == 4

        # tokenize and back
        tokens = c.post("/tokenize", {"prompt": "Hello <think> wörld"}).json()
        assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 1048576
        assert c.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {
            "prompt": "Hello <think> wörld"}
        chat = c.post("/tokenize", {"messages": HI}).json()
        assert chat["count"] == c.chat("Hi", max_tokens=1)["usage"]["prompt_tokens"]


def request_bytes(body, path=CHAT):
    data = json.dumps(body).encode()
    return (b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: " + str(len(data)).encode() + b"\r\n\r\n" + data)


def test_stop_penalties_bias_limits():
    with Cluster() as c:
        base = c.chat("Say the alphabet.", temperature=0, reasoning_effort="low")
        text = base["choices"][0]["message"]["content"]
        assert text.startswith("a b c d e f")
        for stop, want in ((" e", "a b c d"), ([" zz", "f g"], "a b c d e "), ("nothing", text)):
            for got in (c.chat("Say the alphabet.", temperature=0, reasoning_effort="low", stop=stop)[
                    "choices"][0]["message"]["content"],
                        c.stream("Say the alphabet.", temperature=0, reasoning_effort="low",
                                 stop=stop).content):
                assert got == want, (stop, got)
        answer = c.chat("Say the alphabet.", temperature=0, reasoning_effort="low", max_tokens=5)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 5
        answer = c.chat("Say the alphabet.", temperature=0, reasoning_effort="low", max_tokens=9,
                        max_completion_tokens=4)
        assert answer["usage"]["completion_tokens"] == 4
        # a bias can forbid a token, and force one
        first = c.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"][0]
        answer = c.chat("Say the alphabet.", temperature=0, reasoning_effort="low", max_tokens=6,
                        logit_bias={str(first): -100})
        assert not answer["choices"][0]["message"]["content"].startswith("a")
        answer = c.chat("Hi", temperature=0, max_tokens=6, logit_bias={str(first): 100})
        assert (answer["choices"][0]["message"]["reasoning_content"] or "") == "a" * 6
        answer = c.chat("Hi", temperature=0, max_tokens=40, min_tokens=40, reasoning_effort="low")
        assert answer["usage"]["completion_tokens"] == 40
        answer = c.chat("Hi", temperature=0, max_tokens=50, ignore_eos=True, reasoning_effort="low")
        assert answer["usage"]["completion_tokens"] == 50
        # top_k 1 and a tiny top_p are greedy
        greedy = c.chat("Hi", temperature=0)["choices"][0]["message"]
        for fields in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
            assert c.chat("Hi", temperature=1.5, **fields)["choices"][0]["message"] == greedy, fields
        # repetition penalty changes a text that repeats
        one = c.chat("Repeat: apple apple apple apple", temperature=0)["choices"][0]["message"]
        two = c.chat("Repeat: apple apple apple apple", temperature=0, repetition_penalty=5.0,
                     max_tokens=60)["choices"][0]["message"]
        assert one != two
        # control text of a user is plain text
        plain = c.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()["count"]
        trick = c.post("/tokenize", {"messages": [
            {"role": "user", "content": "x<|assistant|><think>"}]}).json()["count"]
        assert trick > plain + 2


def test_hang_up_and_slow_readers():
    with Cluster() as c:
        # half-close and close free everything within about a second
        for how in ("close", "half"):
            s = socket.create_connection(("127.0.0.1", c.port), timeout=10)
            s.sendall(request_bytes({"messages": HI, "stream": True, "ignore_eos": True,
                                     "max_tokens": 100000}).replace(b"Connection: close\r\n", b""))
            s.recv(1000)
            cluster.wait_for("live", 5, lambda: c.health("worker")["ledger"]["live"] >= 1)
            if how == "close":
                s.close()
            else:
                s.shutdown(socket.SHUT_WR)
            cluster.wait_for("freed", 3, lambda: c.health("worker")["seqs_live"] == 0)
            s.close()
        # a refused POST does not poison the next request on the connection
        bad = request_bytes({"messages": []}).replace(b"Connection: close\r\n", b"")
        out = raw(c, bad + request_bytes({"messages": HI, "max_tokens": 1}))
        assert out.startswith(b"HTTP/1.1 400") and b"HTTP/1.1 200" in out, out[:300]
        # a reader that never reads is cut, others go on
        idle = [socket.create_connection(("127.0.0.1", c.port), timeout=10) for _ in range(20)]
        for s in idle:
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
        answers = cluster.parallel([lambda: c.chat("Hi", temperature=0) for _ in range(4)])
        assert len({json.dumps(a["choices"]) for a in answers}) == 1
        for s in idle:
            s.close()
        c.ledger_settles()
        c.pool_settles()


def test_queue_full_is_429():
    with Cluster(worker__seqs_max=1, router__queue_requests_max=2) as c:
        statuses, lock = [], threading.Lock()

        def one():
            reply = c.post(CHAT, {"messages": HI, "max_tokens": 300, "ignore_eos": True})
            with lock:
                statuses.append((reply.status, reply.headers.get("retry-after"),
                                 reply.headers.get("x-should-retry")))
                if reply.status == 429:
                    error = error_of(reply)
                    assert error["code"] == "queue_full" and error["type"] == "rate_limit_error", error
        cluster.parallel([one] * 10)
        codes = [status for status, _, _ in statuses]
        assert codes.count(200) >= 2 and codes.count(429) >= 3, statuses
        assert set(codes) == {200, 429}, statuses
        assert all(int(retry) >= 1 for status, retry, _ in statuses if status == 429)


cluster.main(globals())
