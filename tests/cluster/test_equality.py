# SPDX-License-Identifier: Apache-2.0
"""`exact` mode: the same text alone and in batches, for any slices, K, seed, path."""
import random

import cluster
from cluster import Cluster, generate, greedy_cases, parallel

REPEAT = [c for c in greedy_cases(["repeat"])]
SPECS = ["off"] + [f"fixed:{k}" for k in range(8)] + ["ngram:4", "ema", "goodput"]


def complete(c, prompt, **fields):
    """A completion of a rendered prompt: token ids, text, usage."""
    result = c.stream(prompt, path="/v1/completions", return_token_ids=True,
                      **{"max_tokens": 64, "temperature": 0, **fields})
    assert result.done and result.error is None, result.error
    return result


def drafts_of(results):
    """Drafts that were right and drafts that were not, together."""
    receipts = [r.usage["tandem"] for r in results]
    accepted = sum(r["accepted"] for r in receipts)
    return accepted, sum(r["drafted"] for r in receipts) - accepted


def test_http_gives_the_golden_ids():
    with Cluster() as c:
        for case in greedy_cases():
            got = complete(c, case["prompt"], max_tokens=len(case["ids"]) + 8)
            assert got.ids == case["ids"], (case["name"], got.ids, case["ids"])
            assert got.usage["prompt_tokens"] == case["prompt_tokens"]
            assert got.usage["completion_tokens"] == len(case["ids"])


def test_stored_rows_change_no_text():
    """fp8 and bf16 rows: the same text alone, beside others and with drafts; the canary agrees."""
    for kv, index in (("fp8", "fp8"), ("bf16", "f32")):
        with Cluster(kvmgr__kv_dtype=kv, kvmgr__index_dtype=index) as c:
            cases = greedy_cases()
            alone = [complete(c, case["prompt"], spec="off").ids for case in cases]
            drafted = parallel([lambda case=case: complete(c, case["prompt"], spec="fixed:5")
                                for case in cases])
            assert min(drafts_of(drafted)) > 0, drafts_of(drafted)
            beside = [r.ids for r in drafted]
            assert beside == alone, [case["name"] for case, a, b in zip(cases, alone, beside)
                                     if a != b]
            same = sum(ids == case["ids"] for ids, case in zip(alone, cases))
            assert same >= 0.9 * len(cases), (kv, same, len(cases))


def test_every_policy_gives_one_text():
    cases = random.sample(greedy_cases(), 4) + REPEAT[:3]
    by_spec = {spec: [] for spec in SPECS}
    with Cluster() as c:
        for case in cases:
            for temperature, seed in ((0, 1), (0.7, 7), (1.0, 2 ** 63 + 5)):
                want = None
                for spec in SPECS:
                    got = complete(c, case["prompt"], spec=spec, temperature=temperature,
                                   top_p=0.95, seed=seed)
                    by_spec[spec].append(got)
                    key = (got.text, got.ids, got.finish)
                    want = want or key
                    assert key == want, (case["name"], spec, temperature, key, want)
                tool = generate(case["prompt"], temperature=temperature, seed=seed, top_p=0.95,
                                max_tokens=64, spec="fixed:3")
                assert tool["ids"] == want[1], (case["name"], tool["ids"], want[1])
                assert tool["text"] == want[0], (tool["text"], want[0])
                assert tool["finish_reason"] == want[2]
    for spec, results in by_spec.items():
        right, wrong = drafts_of(results)
        if spec in ("off", "fixed:0"):
            assert right == wrong == 0, (spec, right, wrong)
        elif spec == "goodput":     # drafts as long as it pays, on a busy machine seldom
            assert right + wrong > 0, (spec, right, wrong)
        else:
            assert right > 0 and wrong > 0, (spec, right, wrong)


def test_drafts_are_accepted_on_repeat_prompts():
    with Cluster(worker__spec="fixed:7") as c:
        accepted = rejected = 0
        for case in REPEAT:
            receipt = complete(c, case["prompt"]).usage["tandem"]
            accepted += receipt["accepted"]
            rejected += receipt["drafted"] - receipt["accepted"]
            assert receipt["steps"] >= 1
        assert accepted > 0 and rejected > 0, (accepted, rejected)


def test_batches_slices_blocks():
    cases = sorted(greedy_cases(), key=lambda case: case["prompt_tokens"])
    cases = random.sample(cases[:-3], 6) + cases[-2:]
    want = [case["ids"] for case in cases]
    sampled = {}
    for rows, layers, block_tokens, spec in ((512, 0, 256, "fixed:7"), (7, 0, 16, "fixed:3"),
                                             (64, 3, 64, "fixed:1"), (33, 1, 4, "off")):
        with Cluster(worker__slice_rows_max=rows, worker__slice_layers_max=layers, worker__spec=spec,
                     kvmgr__block_tokens=block_tokens) as c:
            alone = [complete(c, case["prompt"]) for case in cases[:2]]
            together = parallel([lambda case=case: complete(c, case["prompt"]) for case in cases])
            assert [r.ids for r in alone] == want[:2], (rows, layers)
            assert [r.ids for r in together] == want, (rows, layers)
            warm = parallel([lambda case=case, i=i: complete(
                c, case["prompt"], temperature=1.0, seed=i, logprobs=2)
                for i, case in enumerate(cases)])
            right, wrong = drafts_of(alone + together + warm)
            assert (right > 0) == (wrong > 0) == (spec != "off"), (spec, right, wrong)
            hot = [r.ids for r in warm]
            assert sampled.setdefault("hot", hot) == hot, (rows, layers, block_tokens)
            c.ledger_settles()
            c.pool_settles()


def test_choices_are_seeded_and_distinct():
    with Cluster() as c:
        body = {"temperature": 1.0, "n": 4, "seed": 11, "max_tokens": 24}
        first, second = c.chat("Hello", **body), c.chat("Hello", **body)
        texts = [[(x["message"]["content"], x["message"].get("reasoning_content"))
                  for x in answer["choices"]] for answer in (first, second)]
        assert texts[0] == texts[1] and len(texts[0]) == 4
        assert [x["index"] for x in first["choices"]] == [0, 1, 2, 3]


cluster.main(globals())
