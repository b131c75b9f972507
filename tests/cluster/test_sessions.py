# SPDX-License-Identifier: Apache-2.0
"""What Redis holds: heartbeats, metrics, session maps by the schema, and no word of a prompt."""
import struct

import cluster
from cluster import Cluster, wait_for

P = "tandem:{tandem}:"


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_session_map():
    with Cluster(kvmgr__block_tokens=16) as c:
        text = "The code of the green owl is 6825. What is the code of the green owl?"
        c.chat(text, temperature=0, session_id="a very secret session name", max_tokens=200)
        keys = wait_for("session map", 10, lambda: [
            k for k in c.redis("keys", P + "sess:*").splitlines() if ":b:" not in k])
        assert len(keys) == 1, keys
        fields = c.redis("hgetall", keys[0]).splitlines()
        session = dict(zip(fields[::2], fields[1::2]))
        for name in ("epoch", "incarnation", "layout_fp", "model_fp", "salt", "n_tokens", "n_blocks",
                     "tail_hash", "kda_snap_pos", "drafter_pos", "tier", "pin_until", "gen",
                     "last_request", "updated_ms"):
            assert name in session, (name, session)
        blocks = int(session["n_blocks"])
        assert blocks == int(session["n_tokens"]) // 16 > 0, session
        assert 0 < int(c.redis("ttl", keys[0])) <= 7200
        import subprocess
        import os
        raw = subprocess.run(["redis-cli", "-s", os.path.join(c.run_dir, "redis.sock"), "get",
                              keys[0] + ":b:0"], capture_output=True, check=True,
                             timeout=10).stdout[:-1]
        epoch, gen, crc = struct.unpack("<QQI", raw[:20])
        assert epoch == int(session["epoch"]) and gen == int(session["gen"]), (epoch, gen, session)
        entries = raw[20:]
        assert len(entries) == 22 * min(blocks, 256), (len(entries), blocks)
        assert crc == crc32c(raw[:16] + entries), hex(crc)
        assert len({entries[i:i + 16] for i in range(0, len(entries), 22)}) == blocks
        dump = c.redis("--no-raw", "keys", "*")
        everything = dump + "".join(c.redis("--no-raw", "hgetall", k) for k in
                                    c.redis("keys", "*").splitlines() if ":b:" not in k)
        everything += raw.decode("latin-1")
        for secret in ("secret session", "green owl", "owl is 6825"):  # not by chance in a hash
            assert secret not in everything, secret


def test_heartbeats_and_metrics():
    with Cluster() as c:
        c.chat("Hi", temperature=0)
        wait_for("all heartbeats", 10, lambda: all(P + key in c.redis("keys", "*") for key in (
            "pool:0", "worker:0", "proc:gateway:0", "proc:router:0", "proc:drafter:0", "epoch:0",
            "metrics:worker:0", "metrics:kvmgr:0", "metrics:router:0", "metrics:gateway:0")))
        assert 0 < int(c.redis("ttl", P + "worker:0")) <= 6
        wait_for("the drafter's name", 10, lambda: c.redis(
            "hget", P + "worker:0", "drafter_fp") == "dflash")
        worker = dict(zip(*[iter(c.redis("hgetall", P + "worker:0").splitlines())] * 2))
        assert worker["state"] == "ready" and len(worker["model_fp"]) == 32, worker
        assert "bf16" in worker["quantization"]
        assert len(worker["weights_sha"]) == 32 and worker["weights_sha"] != worker["model_fp"]
        assert int(worker["step_age_ms"]) < 60000
        with open(f"/proc/{c.pid('worker')}/stat", encoding="ascii") as f:
            assert worker["pid_start"] == f.read().rsplit(")", 1)[1].split()[19], worker
        page = c.request("GET", "/metrics").body.decode()
        for name in ("vllm:num_requests_running", "vllm:generation_tokens_total",
                     "vllm:time_to_first_token_seconds_bucket", "tandem_", "vllm:kv_cache_usage_perc",
                     "vllm:spec_decode_num_accepted_tokens_total"):
            assert name in page, name
        for role in cluster.ROLES:
            assert c.health(role)["state"] == "ready"


if __name__ == "__main__":
    cluster.main(globals())
