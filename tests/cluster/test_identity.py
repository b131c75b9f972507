# SPDX-License-Identifier: Apache-2.0
"""What is served says what it is: the bundled model, a misnamed directory, a config that lies."""
import json
import os
import shutil

import cluster
from cluster import ROOT, Cluster

BUNDLED = os.path.join(ROOT, "deploy", "demo")


def model_of(c):
    return c.request("GET", "/v1/models").json()["data"][0]


def test_bundled_model():
    """deploy/demo is EXL3, says so, and answers as its BF16 original does."""
    with Cluster(worker__model=BUNDLED, gateway__model=BUNDLED, drafter__target=BUNDLED,
                 worker__numerics="fast") as c:
        log = c.tandem("logs", "worker").stdout
        title = "exl3-mcg 4.00 bpw (routed experts) + bf16 (rest)"
        assert f"quantization: {title}" in log, log[-2000:]
        model = model_of(c)
        assert title in model["root"] and model["tandem"]["quantization"].startswith(title), model
        assert model["tandem"]["model_fp"][:8] in model["root"], model
        assert model["warnings"] == [], model
        cases = [case for case in cluster.greedy_cases() if case["prompt_tokens"] < 300][::6]
        same = 0
        for case in cases:
            reply = c.post("/v1/completions", {"prompt": case["prompt"], "temperature": 0,
                                               "max_tokens": len(case["ids"]) + 1,
                                               "return_token_ids": True})
            assert reply.status == 200, reply.body
            text = reply.json()["choices"][0]["text"]
            same += case["text"].startswith(text) and len(text) > 0
        assert same >= 0.95 * len(cases), (same, len(cases))


def test_misnamed_directory():
    """A directory whose name claims another format is served as what it is, with a warning."""
    with Cluster() as c:
        assert model_of(c)["warnings"] == []
        place = os.path.join(c.dir, "GLM-5.3-Flash-NVFP4")
        shutil.copytree(cluster.DEMO, place)
        c.tandem("down")
        c.sets["worker.model"] = place
        c.up()
        warning = "the directory's name says nvfp4, but no tensor is so"
        model = model_of(c)
        assert warning in model["warnings"], model
        assert "NVFP4" not in model["root"] and "bf16" in model["root"], model
        log = c.tandem("logs", "worker").stdout
        assert "model is not what is said" in log and warning in log, log[-2000:]
        # It still works.
        assert c.chat("Hi", temperature=0)["choices"][0]["message"]["content"]


def test_config_that_lies():
    with Cluster() as c:
        place = os.path.join(c.dir, "model")
        shutil.copytree(cluster.DEMO, place)
        with open(os.path.join(place, "config.json"), encoding="utf-8") as f:
            config = json.load(f)
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        with open(os.path.join(place, "config.json"), "w", encoding="utf-8") as f:
            json.dump(config, f)
        honest = model_of(c)["tandem"]["model_fp"]
        c.tandem("down")
        c.sets["worker.model"] = place
        c.up()
        model = model_of(c)
        assert any("the config announces fp8_block" in w for w in model["warnings"]), model
        assert model["tandem"]["model_fp"] != honest, "the config is part of the identity"


if __name__ == "__main__":
    cluster.main(globals())
