# SPDX-License-Identifier: Apache-2.0
"""Two ranks, each with the arena of its own kvmgr: what was kept outlives every process of both, and
what is not as it was committed is never served."""
import contextlib
import os
import struct
import subprocess

import cluster
from cluster import Cluster, wait_for
from test_kv import BLOCK, Talk
from test_rank_faults import kill

SETS = {"worker__ranks": 2, "worker__threads": 1, "worker__dcp": 2, "worker__interleave": BLOCK // 4,
        "kvmgr__block_tokens": BLOCK}


def arena_of(c):
    return os.path.join(c.dir, "arena.kv-1")


def audit(path):
    run = subprocess.run([os.path.join(cluster.BUILD, "kvmgr", "tandem-kvmgr"), "--audit", f"--arena_path={path}"],
                         capture_output=True, text=True, timeout=60, check=False)
    return run.returncode, run.stdout + run.stderr


def kill_and_wait(c, name):
    kill(c, name)
    wait_for(f"ready after {name}", 30, c.ready)


def arena_epoch(c):
    return c.health("kvmgr-1")["epoch"]


def kill_and_wait_anew(c):
    """Until rank 1 has other memory: a turn that begins before counts what it had found in the old."""
    epoch = arena_epoch(c)

    def another():
        with contextlib.suppress(OSError):
            return arena_epoch(c) > epoch
        return False

    kill_and_wait(c, "kvmgr-1")
    wait_for("another memory", 30, another)
    wait_for("ready with it", 30, c.ready)


def test_every_death_leaves_it_warm():
    with Cluster(**SETS) as c:
        talk = Talk(c, "arenas")
        talk.turn()
        talk.turn()
        epoch = arena_epoch(c)
        for name in ("kvmgr-1", "worker-1", "kvmgr-0", "worker-0", "drafter-0"):
            kill_and_wait(c, name)
            assert talk.turn() > 0, name       # compared with the same turn cold
            assert arena_epoch(c) == epoch, name
        c.ledger_settles()
        c.pool_settles()
        for path in (arena_of(c), c.sets["kvmgr.arena_path"]):
            code, said = audit(path)
            assert code == 0, (path, said)
        assert "role: arena" in audit(arena_of(c))[1]


def committed(path):
    """Where the data of the committed blocks begin, and how long they are."""
    with open(path, "rb") as f:
        head = f.read(4096)
        arena_bytes, blocks, slots = struct.unpack_from("<QII", head, 56)
        state_bytes, = struct.unpack_from("<Q", head, 112)
        headers = f.read(64 * blocks)
    pages = [(64 * count + 4095) // 4096 * 4096 for count in (blocks, slots)]
    begin = 4096 + sum(pages)
    block_bytes = (arena_bytes - slots * ((state_bytes + 64 + 4095) // 4096 * 4096) - begin) // blocks
    return [begin + i * block_bytes for i in range(blocks)
            if struct.unpack_from("<I", headers, 64 * i + 32)[0] == 2], block_bytes


def test_damage_is_never_served():
    """A bit of a row, and a file of somebody else's in its place: found when kvmgr comes back, nothing
    kept counts any more, the text is that of a cold start; and the turn after that is warm."""
    with Cluster(**SETS) as c:
        talk = Talk(c, "damage")
        talk.turn()
        talk.turn()
        path = arena_of(c)
        places, block_bytes = committed(path)
        assert places, audit(path)
        with open(path, "r+b") as f:
            f.seek(places[0] + 5)
            byte = f.read(1)[0]
            f.seek(places[0] + 5)
            f.write(bytes([byte ^ 4]))
        code, said = audit(path)
        assert code == 1 and "data other than committed: 1" in said, said
        kill_and_wait_anew(c)
        talk.turn(hit=False)
        assert c.health("kvmgr-1")["damaged"] == 1, c.health("kvmgr-1")
        talk.turn()

        other = path + ".other"
        with open(other, "wb") as f:
            f.write(b"\x55" * 70000)
        os.replace(other, path)
        kill_and_wait_anew(c)
        talk.turn(hit=False)
        talk.turn()

        places, block_bytes = committed(path)
        with open(path, "rb") as f, open(other, "wb") as short:
            short.write(f.read(places[0] + block_bytes // 2))
        os.chmod(other, 0o600)
        os.replace(other, path)
        kill_and_wait_anew(c)
        talk.turn(hit=False)
        talk.turn()
        assert audit(path)[0] == 0, audit(path)
        c.ledger_settles()
        c.pool_settles()


if __name__ == "__main__":
    cluster.main(globals())
