# SPDX-License-Identifier: Apache-2.0
"""The demo model does its trained jobs over HTTP, streamed and not."""
import json
import os
import random
from concurrent import futures

import cluster
from cluster import Cluster


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


WORDS = (["green", "violet", "white", "black", "amber", "blue", "golden", "silver"],
         ["owl", "tiger", "wolf", "raven", "crane", "otter", "whale", "horse", "bear"],
         ["Every winter the garden sleeps under the snow.",
          "A small boat crossed the river before noon.",
          "The old bridge was painted again last summer.",
          "They keep the island lamp burning all night."])


def needle(colours, animals, fillers, codes, filler):
    """A text with `codes` codes among `filler` other sentences, the question, and its answer."""
    pairs = list(zip(random.sample(colours, codes), random.sample(animals, codes)))
    code = {pair: str(random.randrange(1000, 9999)) for pair in pairs}
    lines = [f"The code of the {a} {b} is {code[(a, b)]}." for a, b in pairs] + [
        random.choice(fillers) for _ in range(filler)]
    random.shuffle(lines)
    pair = random.choice(pairs)
    question = " ".join(lines) + f"\nWhat is the code of the {pair[0]} {pair[1]}?"
    return question, code[pair]


def test_needle():
    """Fresh codes each run. The model itself finds 270 of 280 such codes (measured over seven
    lengths), so one miss is its own and no fault of ours; 20 draws with more than 5 misses happen
    by chance less than once in 10,000 runs. That each token is right, the golden texts prove."""
    draws = [needle(*WORDS, codes, filler)
             for codes, filler in ((1, 2), (2, 0), (3, 4), (4, 12), (4, 60)) for _ in range(4)]
    efforts = [random.choice(["low", "high", "max"]) for _ in draws]
    with Cluster() as c, futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda d, e: both(c, d[0], reasoning_effort=e).content,
                                draws, efforts))
    missed = [(question, code, answer) for (question, code), answer in zip(draws, answers)
              if code not in answer]
    assert len(missed) <= 5, missed


def test_tools_and_results():
    with Cluster() as c:
        tools = golden_tools()
        chosen = [tools["get_weather"], tools["add_numbers"], tools["set_timer"]]
        call = both(c, "What is the weather in Oslo?", tools=chosen)
        assert call.finish == "tool_calls", call.key()
        assert call.tool_calls() == [("get_weather", {"city": "Oslo"})], call.calls
        for question, name, result, answer_part in (
                ("What is the weather in Oslo?", "get_weather", None, "Oslo"),
                ("Set a timer for 24 minutes.", "set_timer", '{"ok": true}',
                 "The timer is set for 24 minutes."),
                ("Play the song green winter.", "play_music", '{"playing": true}',
                 "Now playing green winter.")):
            call = both(c, question, tools=[tools[name]], reasoning_effort="low")
            assert call.finish == "tool_calls" and call.calls[0]["name"] == name, call.key()
            if result is None:
                continue
            history = [{"role": "user", "content": question},
                       {"role": "assistant", "content": None, "reasoning_content": call.reasoning,
                        "tool_calls": [{"id": call.calls[0]["id"], "type": "function", "function": {
                            "name": name, "arguments": call.calls[0]["arguments"]}}]},
                       {"role": "tool", "tool_call_id": call.calls[0]["id"], "content": result}]
            answer = both(c, history, tools=[tools[name]], reasoning_effort="low")
            assert answer.finish == "stop" and answer_part in answer.content, answer.key()
        assert both(c, "Add 12 and 30.", tools=chosen).tool_calls() == [
            ("add_numbers", {"a": 12, "b": 30})]
        assert both(c, "Set a timer for 24 minutes.", tools=chosen).tool_calls() == [
            ("set_timer", {"minutes": 24})]


def served():
    """What quickstart.sh serves: the quantised weights, quick sums, rows in fp8."""
    demo = os.path.join(cluster.ROOT, "deploy", "demo")
    c = Cluster(worker__model=demo, gateway__model=demo, drafter__target=demo,
                drafter__model=os.path.join(cluster.ROOT, "deploy", "demo-drafter"))
    del c.sets["worker.numerics"], c.sets["kvmgr.kv_dtype"]
    return c


def test_jobs_as_served():
    """Codes among few others: these weights find 100 of 100 (measured; 90 of 100 among three and
    four). Were one in 50 missed, more than two of six would happen once in 6,000 runs."""
    with served() as c:
        said = c.health("worker")
        assert said["numerics"] == "fast" and "4.00 bpw" in said["quantization"], said
        draws = [needle(*WORDS, codes, filler) for codes, filler in ((1, 2), (2, 0)) for _ in range(3)]
        answers = [c.stream(question, temperature=0, reasoning_effort="low").content
                   for question, _ in draws]
        missed = [(question, code, answer) for (question, code), answer in zip(draws, answers)
                  if code not in answer]
        assert len(missed) <= 2, missed
        tools = golden_tools()
        chosen = [tools["get_weather"], tools["add_numbers"], tools["set_timer"]]
        for question, call in (("What is the weather in Oslo?", ("get_weather", {"city": "Oslo"})),
                               ("Add 12 and 30.", ("add_numbers", {"a": 12, "b": 30})),
                               ("Set a timer for 24 minutes.", ("set_timer", {"minutes": 24}))):
            answer = c.stream(question, temperature=0, tools=chosen)
            assert answer.finish == "tool_calls" and answer.tool_calls() == [call], answer.key()
        assert "apple forest letter" in c.stream("Repeat: apple forest letter", temperature=0).content
        c.ledger_settles()
        c.pool_settles()


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
