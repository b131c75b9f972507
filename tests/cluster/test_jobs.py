# SPDX-License-Identifier: Apache-2.0
"""The demo model does its trained jobs over HTTP, streamed and not."""
import json
import random

import cluster
from cluster import Cluster

TOOLS = [{"type": "function", "function": {
    "name": name, "description": text, "parameters": {
        "type": "object", "properties": {k: {"type": t} for k, t in properties.items()},
        "required": list(properties)}}} for name, text, properties in (
            ("get_weather", "Get the weather of a city.", {"city": "string"}),
            ("add_numbers", "Add two numbers.", {"a": "integer", "b": "integer"}),
            ("set_timer", "Set a timer.", {"minutes": "integer"}))]


def golden_tools():
    """The tool definitions as the model was trained with them, out of the golden prompts."""
    tools = {}
    for case in cluster.greedy_cases(["tool"]):
        block = case["prompt"].split("<tools>\n", 1)[1].split("\n</tools>", 1)[0]
        for line in block.splitlines():
            tool = json.loads(line)
            tools[tool["name"]] = {"type": "function", "function": tool}
    return tools


def both(c, messages, **fields):
    """Asks streamed and not; both must say the same; returns the streamed result."""
    streamed = c.stream(messages, temperature=0, **fields)
    message = c.chat(messages, temperature=0, **fields)["choices"][0]
    assert streamed.done and streamed.error is None
    assert (message["message"].get("reasoning_content") or "") == streamed.reasoning
    assert (message["message"]["content"] or "") == streamed.content
    calls = [(t["function"]["name"], t["function"]["arguments"])
             for t in message["message"].get("tool_calls") or []]
    assert calls == [(x["name"], x["arguments"]) for _, x in sorted(streamed.calls.items())]
    assert message["finish_reason"] == streamed.finish
    return streamed


def test_small_talk_and_effort():
    with Cluster() as c:
        lengths = {}
        for effort in ("low", "high", "max"):
            answer = both(c, "Who are you?", reasoning_effort=effort)
            assert "I am a small test model" in answer.content, answer.content
            lengths[effort] = len(answer.reasoning)
            assert answer.usage["tandem"]["effort"] == effort
        assert lengths["low"] == 0 < lengths["high"] < lengths["max"], lengths
        by_default = both(c, "Who are you?")
        assert by_default.usage["tandem"]["effort"] == "max"
        assert len(by_default.reasoning) == lengths["max"]
        assert "friendly" in both(c, "Hi").reasoning


def test_needle():
    with Cluster() as c:
        colours, animals = ["green", "red", "blue", "white"], ["owl", "fox", "cat", "horse"]
        for count in (4, 12):
            pairs = random.sample([(a, b) for a in colours for b in animals], count)
            codes = {pair: str(random.randrange(1000, 9999)) for pair in pairs}
            text = " ".join(f"The code of the {a} {b} is {codes[(a, b)]}." for a, b in pairs)
            pair = random.choice(pairs)
            answer = both(c, f"{text} What is the code of the {pair[0]} {pair[1]}?",
                          reasoning_effort="low")
            assert codes[pair] in answer.content, (text, pair, answer.content)


def test_tools_and_results():
    with Cluster() as c:
        tools = golden_tools()
        chosen = [tools["get_weather"], tools["add_numbers"], tools["set_timer"]]
        call = both(c, "What is the weather in Oslo?", tools=chosen)
        assert call.finish == "tool_calls", call.key()
        assert call.tool_calls() == [("get_weather", {"city": "Oslo"})], call.calls
        history = [{"role": "user", "content": "What is the weather in Oslo?"},
                   {"role": "assistant", "content": None, "reasoning_content": call.reasoning,
                    "tool_calls": [{"id": call.calls[0]["id"], "type": "function", "function": {
                        "name": "get_weather", "arguments": call.calls[0]["arguments"]}}]},
                   {"role": "tool", "tool_call_id": call.calls[0]["id"], "content": "sunny, 21 degrees"}]
        answer = both(c, history, tools=chosen)
        assert answer.finish == "stop" and "Oslo" in answer.content, answer.key()
        assert both(c, "Add 12 and 30.", tools=chosen).tool_calls() == [
            ("add_numbers", {"a": 12, "b": 30})]
        assert both(c, "Set a timer for 24 minutes.", tools=chosen).tool_calls() == [
            ("set_timer", {"minutes": 24})]


def test_repeat_json_name():
    with Cluster() as c:
        assert "apple forest letter" in both(c, "Repeat: apple forest letter").content
        answer = both(c, "Write JSON for Gus, age 24, from Athens.")
        assert json.loads(answer.content) == {"name": "Gus", "age": 24, "city": "Athens"}
        first = both(c, "My name is June.")
        answer = both(c, [{"role": "user", "content": "My name is June."},
                          {"role": "assistant", "content": first.content,
                           "reasoning_content": first.reasoning},
                          {"role": "user", "content": "What is my name?"}])
        assert "Your name is June." in answer.content, answer.content


cluster.main(globals())
