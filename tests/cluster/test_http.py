# SPDX-License-Identifier: Apache-2.0
"""The HTTP contract against the real gateway: fields, bodies, framing, shapes, errors."""
import json
import re
import socket
import threading
import time

import cluster
import prometheus
from cluster import Cluster, pid_alive

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
REPEAT = "Repeat: apple forest letter silver garden horse fox golden river blue"
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
    # types inside messages and tools
    ("messages", HI + [{"role": "assistant", "reasoning_content": 5}], "messages[1].reasoning_content"),
    ("messages", HI + [{"role": "assistant", "reasoning": {"a": 1}}], "messages[1].reasoning"),
    ("messages", HI + [{"role": "assistant", "refusal": True}], "messages[1].refusal"),
    ("messages", HI + [{"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
    ("messages", HI + [{"role": "assistant", "tool_calls": [5]}], "messages[1].tool_calls[0]"),
    ("messages", HI + [{"role": "assistant", "tool_calls": [{"id": {}, "function": {"name": "f"}}]}],
     "messages[1].tool_calls[0].id"),
    ("messages", HI + [{"role": "assistant", "tool_calls": [{"type": 1, "function": {"name": "f"}}]}],
     "messages[1].tool_calls[0].type"),
    ("messages", HI + [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}],
     "messages[1].tool_calls[0].function.name"),
    ("messages", [{"role": "user", "name": 5, "content": "x"}], "messages[0].name"),
    ("messages", HI + [{"role": "tool", "tool_call_id": [1], "content": "x"}], "messages[1].tool_call_id"),
    ("messages", HI + [{"role": "tool", "tool_call_id": "a", "content": 5}], "messages[1].content"),
    ("messages", [{"role": 5, "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
    ("tools", "x", "tools"), ("tools", [{"type": 5, "function": {"name": "f"}}], "tools[0].type"),
    ("tools", [{"type": "web_search", "function": {"name": "f"}}], "tools[0].type"),
    ("tools", [{"type": "function", "function": 5}], "tools[0]"),
    ("tools", [{"type": "function", "function": {"name": 5}}], "tools[0].function"),
    ("tools", [{"type": "function", "function": {"name": ""}}], "tools[0].function"),
    ("tools", [TOOL, {"type": "function", "function": {"name": "a b"}}], "tools[1].function.name"),
    ("tools", [{"type": "function", "function": {"name": "a<b"}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
     "tools[0].function.parameters"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}],
     "tools[0].function.parameters"),
    ("tools", [{"type": "function", "function": {"name": "f", "description": 1}}],
     "tools[0].function.description"),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": "yes"}}],
     "tools[0].function.strict"),
    ("tool_choice", 5, "tool_choice"), ("tool_choice", [], "tool_choice"),
    ("parallel_tool_calls", "no", "parallel_tool_calls"),
    ("chat_template_kwargs", {"reasoning_effort": 5}, "chat_template_kwargs.reasoning_effort"),
    ("include_reasoning", "no", "include_reasoning"), ("add_generation_prompt", 1, "add_generation_prompt"),
    ("continue_final_message", True, "continue_final_message"),
    ("functions", [{"name": "f"}], "functions"), ("function_call", "auto", "function_call"),
    ("documents", [{"text": "x"}], "documents"),
]

# of both end points
BAD_BOTH = [
    ("metadata", 5, "metadata"), ("store", "yes", "store"), ("service_tier", 1, "service_tier"),
    ("prediction", "x", "prediction"), ("verbosity", 5, "verbosity"), ("modalities", "text", "modalities"),
    ("modalities", [1], "modalities"), ("audio", "x", "audio"), ("safety_identifier", 5, "safety_identifier"),
    ("web_search_options", [], "web_search_options"), ("user", 5, "user"),
    ("prompt_cache_key", {}, "prompt_cache_key"), ("session_id", "", "session_id"),
    ("session_id", "x" * 300, "session_id"), ("cache_salt", "x" * 300, "cache_salt"),
    ("request_id", "a b", "request_id"), ("request_id", 5, "request_id"), ("request_id", "", "request_id"),
    ("temperature", 2.5, "temperature"), ("temperature", True, "temperature"), ("top_k", "x", "top_k"),
    ("n", 1.5, "n"), ("n", 129, "n"), ("n", True, "n"), ("seed", 1 << 64, "seed"), ("seed", True, "seed"),
    ("stop", ["x"] * 17, "stop"), ("stop", {"a": 1}, "stop"), ("stop", "", "stop"),
    ("stop_token_ids", 5, "stop_token_ids"), ("stop_token_ids", [-1], "stop_token_ids"),
    ("include_stop_str_in_output", "x", "include_stop_str_in_output"),
    ("min_tokens", 3, "min_tokens"), ("min_tokens", 0.5, "min_tokens"),
    ("max_tokens", True, "max_tokens"), ("max_completion_tokens", "1", "max_completion_tokens"),
    ("max_completion_tokens", -1, "max_completion_tokens"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("stream_options", {"continuous_usage_stats": "x"}, "stream_options.continuous_usage_stats"),
    ("logit_bias", {"1": "x"}, "logit_bias"), ("logit_bias", {"1": None}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"), ("priority", 1.5, "priority"), ("priority", 1 << 40, "priority"),
    ("skip_special_tokens", 1, "skip_special_tokens"),
    ("spaces_between_special_tokens", 1, "spaces_between_special_tokens"),
    ("add_special_tokens", "x", "add_special_tokens"), ("ignore_eos", "x", "ignore_eos"),
    ("return_tokens_as_token_ids", 1, "return_tokens_as_token_ids"), ("best_of", 2, "best_of"),
    ("spec", "", "spec"), ("spec", "fixed:", "spec"), ("spec", "fixed:8", "spec"), ("spec", "ngram:x", "spec"),
    ("bad_words", ["x"], "bad_words"), ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", [1], "allowed_token_ids"), ("thinking_token_budget", 0, "thinking_token_budget"),
    ("repetition_detection", {"a": 1}, "repetition_detection"), ("prompt_logprobs", 0, "prompt_logprobs"),
    ("truncate_prompt_tokens", 5, "truncate_prompt_tokens"), ("kv_transfer_params", {"a": 1}, "kv_transfer_params"),
    ("vllm_xargs", {"a": 1}, "vllm_xargs"), ("use_beam_search", True, "use_beam_search"),
    ("guided_regex", "a+", "guided_regex"), ("model", [], "model"), ("model", "", "model"),
    ("response_format", {"type": 5}, "response_format"), ("repetition_penalty", -1, "repetition_penalty"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "response_format"),
]

# accepted: in the order of the contract's tables
GOOD_BOTH = [
    ("model", None), ("temperature", None), ("temperature", 2), ("temperature", 0), ("top_p", 1), ("top_k", -1),
    ("top_k", 0), ("top_k", 1), ("min_p", 0), ("n", 2), ("n", None), ("seed", -5), ("seed", (1 << 64) - 1),
    ("stop", None), ("stop", []), ("stop", "zzz"), ("stop", ["a", "b", "c", "d", "e"]), ("stop_token_ids", []),
    ("max_tokens", 10 ** 12), ("max_completion_tokens", 1), ("min_tokens", 0), ("logit_bias", {}),
    ("logit_bias", {"5": -100}), ("presence_penalty", -2), ("frequency_penalty", 2), ("repetition_penalty", 1.1),
    ("stream_options", {"include_usage": True}), ("stream_options", None), ("user", "me"), ("user", None),
    ("metadata", {"a": "b"}), ("store", False), ("service_tier", "auto"), ("prediction", {"type": "content"}),
    ("verbosity", "low"), ("prompt_cache_key", "k"), ("safety_identifier", "s"), ("modalities", ["text"]),
    ("audio", {}), ("web_search_options", {}), ("response_format", {"type": "text"}), ("best_of", 1),
    ("ignore_eos", False), ("skip_special_tokens", False), ("spaces_between_special_tokens", True),
    ("add_special_tokens", True), ("priority", 0), ("priority", -3), ("cache_salt", "s"), ("session_id", "s"),
    ("request_id", "r-1"), ("spec", "off"), ("spec", "fixed:0"), ("spec", "ngram:7"), ("spec", "ema"),
    ("spec", "goodput"), ("return_token_ids", True), ("return_tokens_as_token_ids", True), ("bad_words", []),
    ("structured_outputs", None), ("use_beam_search", False), ("include_stop_str_in_output", True),
]
GOOD_CHAT = [
    ("tools", None), ("tools", []), ("tools", [TOOL]), ("tools", [{"type": "function", "function": {"name": "a.b-ü"}}]),
    ("tool_choice", None), ("tool_choice", "none"), ("tool_choice", "auto"), ("parallel_tool_calls", True),
    ("logprobs", False), ("logprobs", None), ("top_logprobs", 0), ("reasoning_effort", "medium"),
    ("reasoning_effort", None), ("chat_template_kwargs", None), ("chat_template_kwargs", {"enable_thinking": False}),
    ("chat_template_kwargs", {"clear_thinking": True, "reasoning_effort": "high"}), ("include_reasoning", False),
    ("functions", []), ("documents", []), ("messages", [{"role": "developer", "content": "x"}] + HI),
    ("messages", [{"role": "user", "content": None}]), ("messages", [{"role": "user", "content": ""}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
    ("messages", HI + [{"role": "assistant", "content": None, "reasoning_content": None, "refusal": None,
                        "tool_calls": [{"id": "c", "type": "function",
                                        "function": {"name": "f", "arguments": '{"a": '}}]},
                       {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]}]),
    ("messages", HI + [{"role": "assistant", "content": "x", "tool_calls": []}, HI[0]]),
]
GOOD_COMPLETIONS = [
    ("prompt", ["a", "b"]), ("prompt", [5, 6]), ("prompt", [[5], [6, 7]]), ("logprobs", 0), ("logprobs", None),
    ("echo", True), ("suffix", None), ("suffix", ""),
]

# (path, body, param); None = accepted
TOKENIZERS = [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"prompt": None}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"), ("/tokenize", {"messages": "x"}, "messages"),
    ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
    ("/tokenize", {"messages": HI, "tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    ("/tokenize", {"messages": HI, "prompt": "x"}, "prompt"),
    ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
    ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"messages": HI, "chat_template_kwargs": 5}, "chat_template_kwargs"),
    ("/tokenize", {"prompt": "x", "model": 5}, "model"),
    ("/tokenize", {"prompt": ""}, None), ("/tokenize", {"prompt": "x", "add_special_tokens": False}, None),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}, None),
    ("/tokenize", {"messages": HI, "tools": [TOOL], "add_generation_prompt": False}, None),
    ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": 5}, "tokens"), ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": ["x"]}, "tokens"), ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
    ("/detokenize", {"tokens": None}, "tokens"), ("/detokenize", {"tokens": [], "model": {}}, "model"),
    ("/detokenize", {"tokens": []}, None), ("/detokenize", {"tokens": [5, 6]}, None),
]

BAD_COMPLETIONS = [
    ("prompt", None, "prompt"), ("prompt", 5, "prompt"), ("prompt", [], "prompt"),
    ("prompt", [99999999], "prompt"), ("prompt", [[1, 2], ["x"]], "prompt"), ("prompt", [-1], "prompt"),
    ("suffix", "x", "suffix"), ("logprobs", 99, "logprobs"), ("logprobs", "x", "logprobs"),
    ("echo", "x", "echo"), ("best_of", 0, "best_of"), ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 0, "max_tokens"), ("logprobs", True, "logprobs"), ("logprobs", -1, "logprobs"),
    ("prompt", "", "prompt"), ("prompt", [""], "prompt"), ("prompt", [[]], "prompt"), ("prompt", [1.5], "prompt"),
    ("prompt", {"a": 1}, "prompt"), ("prompt", ["a", 5], "prompt"), ("prompt", [5, "a"], "prompt"),
    ("prompt", [None], "prompt"), ("prompt", [True], "prompt"), ("prompt", ["x"] * 33, "prompt"),
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
        chat, plain = {"messages": HI, "max_tokens": 2}, {"prompt": "Hi", "max_tokens": 2}
        for path, base, cases in ((CHAT, chat, BAD_CHAT + BAD_BOTH),
                                  (COMPLETIONS, plain, BAD_COMPLETIONS + BAD_BOTH)):
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
        for path, base, cases in ((CHAT, chat, GOOD_CHAT + GOOD_BOTH),
                                  (COMPLETIONS, plain, GOOD_COMPLETIONS + GOOD_BOTH)):
            for field, value in cases:
                reply = c.post(path, {**base, field: value})
                if reply.status != 200:
                    wrong.append((path, field, value, reply.status, reply.body[:200]))
        for path, body, param in TOKENIZERS:
            reply = c.post(path, body)
            if param is None and reply.status != 200 or param and (
                    reply.status != 400 or not (error_of(reply)["param"] or "").startswith(param)):
                wrong.append((path, body, reply.status, reply.body[:200]))
        reply = c.post(CHAT, chat, headers={"X-Session-Id": "x" * 300})
        assert reply.status == 400 and error_of(reply)["param"] == "X-Session-Id", reply.body
        assert c.post(CHAT, chat, headers={"X-Session-Id": "x" * 255}).status == 200
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
                                "decode_ms", "draft_ms", "verify_ms", "model_fp", "config_hash", "seed"}, receipt
        assert receipt["seed"] == "5" and receipt["effort"] == "low" and receipt["concurrency"] == 1
        model = answer["model"]
        models = c.request("GET", "/v1/models").json()
        entry = models["data"][0]
        assert models["object"] == "list" and entry["id"] == model and entry["object"] == "model"
        # the pool of a test holds less than the model's window
        window = entry["max_model_len"]
        assert 1024 <= window < 1048576 and "max_tokens" not in entry
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
                                      "temperature": 0}).json()
        lists = answer["choices"][0]["logprobs"]
        assert answer["object"] == "text_completion"
        assert "".join(lists["tokens"]) == answer["choices"][0]["text"] and lists["text_offset"][0] == 0
        for token, value, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"]):
            assert len(top) == 2 and top[token] == value == max(top.values()), lists
        # the sampled token is always among them, also beyond what was asked for
        for asked in (0, 1):
            lists = c.post(COMPLETIONS, {"prompt": "x", "max_tokens": 20, "logprobs": asked, "temperature": 2,
                                         "seed": 1, "top_p": 1}).json()["choices"][0]["logprobs"]
            assert all(asked <= len(top) <= asked + 1 and top[token] == value for token, value, top in zip(
                lists["tokens"], lists["token_logprobs"], lists["top_logprobs"])), lists
        # echo: before an answer, and alone; a prompt's own logprobs cannot be had
        echoed = c.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "echo": True}).json()
        assert echoed["choices"][0]["text"] == "Hello" + answer["choices"][0]["text"]
        alone = {"prompt": ["Hello", [5, 6]], "max_tokens": 0, "echo": True, "n": 2}
        reply = c.post(COMPLETIONS, alone).json()
        assert [x["text"] for x in reply["choices"]][:2] == ["Hello"] * 2 and len(reply["choices"]) == 4
        assert {x["finish_reason"] for x in reply["choices"]} == {"length"}
        assert reply["usage"]["completion_tokens"] == 0
        stream = c.stream("Hello", path=COMPLETIONS, max_tokens=0, echo=True)
        assert stream.text == "Hello" and stream.done
        reply = c.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 4, "logprobs": 2, "echo": True})
        assert reply.status == 400 and error_of(reply)["param"] == "logprobs" and b"echo" in reply.body
        assert len(c.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 2}).json()[
            "choices"]) == 4

        # tokenize and back
        tokens = c.post("/tokenize", {"prompt": "Hello <think> wörld"}).json()
        assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == window
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
        # clients that stop within a head hold nobody up
        idle = [socket.create_connection(("127.0.0.1", c.port), timeout=10) for _ in range(20)]
        for s in idle:
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
        answers = cluster.parallel([lambda: c.chat("Hi", temperature=0) for _ in range(4)])
        assert len({json.dumps(a["choices"]) for a in answers}) == 1
        for s in idle:
            s.close()
        c.ledger_settles()
        c.pool_settles()


def test_a_client_that_never_reads():
    """A stream that nobody takes: cut at the output bound, its choices cancelled everywhere, its
    blocks freed, others served; and answers that nobody takes hold up the requests behind them."""
    with Cluster(gateway__output_bytes_max=65536) as c:
        before = [ledger["cancelled"] for ledger in c.ledger_settles()]
        def cut():
            page = c.request("GET", "/metrics").body.decode()
            return sum(float(x) for x in re.findall(
                r'^tandem_gateway_gone_total\{.*why="slow".*\} (\S+)$', page, re.M))
        assert cut() == 0
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.settimeout(20)
        s.connect(("127.0.0.1", c.port))
        body = {"messages": HI, "stream": True, "ignore_eos": True, "max_tokens": 100000, "n": 2,
                "logprobs": True, "top_logprobs": 20}
        s.sendall(request_bytes(body).replace(b"Connection: close\r\n", b""))
        cluster.wait_for("live", 10, lambda: c.health("worker")["seqs_live"] >= 2)
        blocks = c.health("kvmgr")["blocks_leased"]
        assert blocks >= 2, blocks
        cluster.wait_for("cut", 120, lambda: cut() == 1)
        cluster.wait_for("cancelled", 5, lambda: [
            c.health(role)["ledger"]["cancelled"] for role in ("router", "worker")] == [
                n + 2 for n in before])
        c.ledger_settles()
        c.pool_settles()
        data = b""
        try:
            while chunk := s.recv(1 << 20):
                data += chunk
        except ConnectionResetError:
            pass
        s.close()
        assert data.startswith(b"HTTP/1.1 200") and b"[DONE]" not in data, data[-300:]
        # short answers that nobody takes hold up the requests behind them: no memory, others served
        rss = c.rss_kib("gateway")
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.settimeout(2)
        s.connect(("127.0.0.1", c.port))
        try:
            for _ in range(10):
                s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        except TimeoutError:
            pass
        assert "small test model" in c.stream("Who are you?", temperature=0).content
        page = len(c.request("GET", "/metrics").body) >> 10
        assert 5000 * page > 100 << 10 and c.rss_kib("gateway") < rss + (32 << 10), (
            page, rss, c.rss_kib("gateway"))
        s.close()


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


def chunks_of(c, path, body):
    data = raw(c, request_bytes({**body, "stream": True}, path))
    lines = [line[6:] for line in data.decode().replace("\r\n", "\n").split("\n")
             if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-3:]
    return [json.loads(line) for line in lines[:-1]]


def test_usage_and_ids_of_streams():
    with Cluster() as c:
        for path, body in ((CHAT, {"messages": HI, "max_tokens": 12, "temperature": 0, "n": 2, "ignore_eos": True}),
                           (COMPLETIONS, {"prompt": "Hello", "max_tokens": 12, "temperature": 0, "n": 2,
                                          "ignore_eos": True})):
            for options in ({}, {"include_usage": True}, {"continuous_usage_stats": True},
                            {"include_usage": True, "continuous_usage_stats": True}):
                chunks = chunks_of(c, path, {**body, "stream_options": options})
                last = [x for x in chunks if not x["choices"]]
                assert len(last) == (1 if options.get("include_usage") else 0), (path, options)
                rest = [x for x in chunks if x["choices"]]
                if options.get("continuous_usage_stats"):
                    counts = [x["usage"]["completion_tokens"] for x in rest]
                    assert counts == sorted(counts) and counts[-1] == 24, (path, counts)
                    assert {x["usage"]["prompt_tokens"] for x in rest} == {rest[0]["usage"]["prompt_tokens"]}
                    assert all(x["usage"]["total_tokens"] == x["usage"]["prompt_tokens"] +
                               x["usage"]["completion_tokens"] for x in rest)
                elif options.get("include_usage"):
                    assert all("usage" in x and x["usage"] is None for x in rest)
                else:
                    assert all("usage" not in x for x in rest)
                if last:
                    assert last[0]["usage"]["completion_tokens"] == 24
            # ids: of the prompt in the first chunk of a choice, of the answer in every one
            whole = c.post(path, {**body, "return_token_ids": True}).json()
            chunks = chunks_of(c, path, {**body, "return_token_ids": True})
            for index in (0, 1):
                mine = [x for x in chunks if x["choices"][0]["index"] == index]
                ids = sum((x["choices"][0].get("token_ids") or [] for x in mine), [])
                assert ids == whole["choices"][index]["token_ids"] and len(ids) == 12
                where = [x if path == CHAT else x["choices"][0] for x in mine]
                told = [x["prompt_token_ids"] for x in where if "prompt_token_ids" in x]
                prompt = whole["prompt_token_ids"] if path == CHAT else whole["choices"][index]["prompt_token_ids"]
                assert told == [prompt] and "prompt_token_ids" in where[0], (path, told)


def test_receipt_of_cut_answers():
    """A stop string, or the one call that is allowed, ends the answer before the engine does."""
    with Cluster() as c:
        ask = {"temperature": 0, "reasoning_effort": "low"}
        full = c.chat(REPEAT, **ask)
        text = full["choices"][0]["message"]["content"]
        stop = text.split()[-1]
        assert len(text.split()) > 4, text
        accepted = 0
        for spec in ("fixed:7", "ema", "off"):
            whole = c.chat(REPEAT, stop=stop, spec=spec, **ask)
            assert whole["choices"][0]["message"]["content"] == text[:text.index(stop)]
            stream = c.stream(REPEAT, stop=stop, spec=spec, **ask)
            for usage in (whole["usage"], stream.usage):
                receipt = usage["tandem"]
                accepted += receipt["accepted"]
                assert receipt["steps"] > 0 and receipt["decode_ms"] > 0 and receipt["prefill_ms"] > 0, receipt
                assert receipt["queue_ms"] > 0 and receipt["model_fp"] == full["usage"]["tandem"]["model_fp"]
                assert receipt["accepted"] <= receipt["drafted"] <= 7 * receipt["steps"], receipt
                # the first token comes with the prompt, every step then gives one and what it accepted
                made = 1 + receipt["steps"] + receipt["accepted"]
                assert usage["completion_tokens"] <= made <= usage["completion_tokens"] + 7, usage
                assert (receipt["spec"], receipt["drafted"] > 0) == (spec, spec != "off"), receipt
        assert accepted > 0
        c.ledger_settles()
        c.pool_settles()


def test_window_is_what_is_served():
    """A pool that holds less than the model's window: every page says the same smaller number."""
    with Cluster(kvmgr__arena_bytes=24 << 20) as c:
        window = c.request("GET", "/v1/models").json()["data"][0]["max_model_len"]
        assert 1024 <= window < 1 << 20, window
        assert c.post("/tokenize", {"prompt": "a"}).json()["max_model_len"] == window
        reply = c.post(COMPLETIONS, {"prompt": [5] * window, "max_tokens": 1})
        assert reply.status == 400 and str(window) in reply.json()["error"]["message"], reply.body
        for charset, status in (("utf-8", 200), ("UTF-8", 200), ("latin1", 415)):
            reply = c.post("/tokenize", {"prompt": "a"},
                           headers={"Content-Type": f"application/json; charset={charset}"})
            assert reply.status == status, (charset, reply.status)


def test_request_ids():
    with Cluster(gateway__header_bytes_max=4096) as c:
        good = json.dumps({"messages": HI, "max_tokens": 1})
        cases = [("GET", p, None, s) for p, s in (
            ("/health", 200), ("/ping", 200), ("/ready", 200), ("/version", 200), ("/load", 200),
            ("/metrics", 200), ("/v1/models", 200), ("/v1/models/nope", 404), ("/nope", 404), (CHAT, 405))]
        cases += [("POST", p, b, s) for p, b, s in (
            (CHAT, good, 200), (CHAT, "{", 400), (CHAT, "{}", 400), (COMPLETIONS, '{"prompt": 5}', 400),
            ("/tokenize", '{"prompt": "x"}', 200), ("/tokenize", "{}", 400), ("/detokenize", '{"tokens": [5]}', 200),
            ("/detokenize", "5", 400), ("/health", "", 405))] + [("OPTIONS", CHAT, None, 204), ("HEAD", "/version", None, 200)]
        for method, path, body, status in cases:
            for given in ("abc-123", None, "with space", "x" * 129):
                reply = c.request(method, path, body, {"X-Request-Id": given} if given else {})
                got = reply.headers.get("x-request-id")
                assert reply.status == status and got, (method, path, reply.status, reply.headers)
                assert got == given if given == "abc-123" else len(got) == 32 and got != given, (path, got)
        assert c.request("POST", CHAT, good, {"Content-Type": "text/plain", "X-Request-Id": "t"}
                         ).headers["x-request-id"] == "t"
        # the body's own wins, in the header and as id of the answer, good or bad
        for more, status in (("", 200), (', "n": 0', 400)):
            reply = c.post(CHAT, good[:-1] + ', "request_id": "mine"' + more + "}", headers={"X-Request-Id": "h"})
            assert reply.status == status and reply.headers["x-request-id"] == "mine", reply.headers
        assert c.post(CHAT, good[:-1] + ', "request_id": "mine"}').json()["id"] == "chatcmpl-mine"
        # framing that no handler sees
        for data, status in (
                (b"GET /health HTTP/1.1\r\nX-Request-Id: f-1\r\n\r\n", 400),
                (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: f-1\r\n folded\r\n\r\n", 400),
                (b"GET /health HTTP/1.1\r\nHost: x\r\nx-request-id:  f-1 \r\nX: " + b"y" * 5000, 431),
                (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Request-ID: f-1\r\nContent-Length: 99999999999\r\n\r\n", 413),
                (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Request-Id: f-1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
                (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Request-Id: f-1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501)):
            out = raw(c, data, 5, half_close=True)
            assert out.startswith(b"HTTP/1.1 %d" % status) and out.lower().count(b"x-request-id: f-1\r\n") == 1, out
        # two requests of one connection keep their own
        out = raw(c, b"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: one\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n"
                     b"Connection: close\r\n\r\n")
        assert out.count(b"x-request-id: ") == 2 and out.count(b"x-request-id: one") == 1, out


VLLM = """num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc engine_sleep_state
 lora_requests_info cache_config_info prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total
 prefix_cache_queries_total prefix_cache_hits_total external_prefix_cache_queries_total external_prefix_cache_hits_total
 mm_cache_queries_total mm_cache_hits_total prompt_tokens_by_source_total prompt_tokens_cached_total corrupted_requests_total
 spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
 spec_decode_num_accepted_tokens_per_pos_total time_to_first_token_seconds inter_token_latency_seconds
 request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds
 request_decode_time_seconds request_inference_time_seconds request_prompt_tokens request_generation_tokens
 request_max_num_generation_tokens request_params_n request_params_max_tokens request_prefill_kv_computed_tokens
 iteration_tokens_total gpu_cache_usage_perc gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total
 time_per_output_token_seconds""".split()


def test_metrics():
    with Cluster() as c:
        ask = {"temperature": 0, "max_tokens": 40, "reasoning_effort": "low"}
        stream = c.stream(REPEAT, **ask)
        cut = c.chat(REPEAT, stop="golden", **ask)
        c.chat("Hi", n=2, **ask)

        def page():
            reply = c.request("GET", "/metrics")
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            return prometheus.parse(reply.body.decode())

        def complete():
            families = page()
            return families if "vllm:iteration_tokens_total" in families and \
                families["vllm:iteration_tokens_total"].value("vllm:iteration_tokens_total_sum") > 0 and \
                "tandem_kvmgr_arena_blocks" in families and "tandem_drafter_opens_total" in families else None
        families = cluster.wait_for("metrics of all processes", 15, complete)
        missing = ["vllm:" + name for name in VLLM if "vllm:" + name not in families]
        assert not missing, missing
        for name, family in families.items():
            if name.startswith("vllm:"):
                assert all({"model_name", "engine"} <= set(labels) for _, labels, _ in family.samples), name
        for role in ("router", "worker", "kvmgr", "drafter"):
            mine = [f for f in families.values() if f.name.startswith(f"tandem_{role}_")]
            assert mine and all(labels["process"] == f"{role}-0" for f in mine for _, labels, _ in f.samples)
        spec = {what: families[f"vllm:spec_decode_num_{what}_total"].value()
                for what in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")}
        assert spec["drafts"] > 0 and spec["draft_tokens"] >= spec["accepted_tokens"] > 0, spec
        assert spec["accepted_tokens_per_pos"] == spec["accepted_tokens"], spec
        assert spec["accepted_tokens"] >= stream.usage["tandem"]["accepted"] + cut["usage"]["tandem"]["accepted"]
        positions = [families["vllm:spec_decode_num_accepted_tokens_per_pos_total"].value(position=str(i))
                     for i in range(7)]
        assert positions == sorted(positions, reverse=True), positions
        assert families["vllm:request_success_total"].value() == 4
        assert families["vllm:request_params_n"].value("vllm:request_params_n_count") == 3
        info = families["vllm:cache_config_info"].samples
        health = c.health("kvmgr")
        assert len(info) == 1 and info[0][2] == 1
        assert int(info[0][1]["num_gpu_blocks"]) == health["blocks_total"] and int(info[0][1]["block_size"]) == 256
        # the same page stays valid while work goes on, and without Redis
        for _ in range(20):
            c.chat("Hi", max_tokens=3)
            page()
        c.kill("redis")
        assert "vllm:num_requests_running" in page()


cluster.main(globals())
