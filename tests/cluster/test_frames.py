# SPDX-License-Identifier: Apache-2.0
"""Malformed frames to every bound socket: dropped and counted, the process lives and serves.

Speaks ZMTP 3.0 (NULL mechanism) by hand, so that anything at all can be sent."""
import os
import random
import socket
import struct

import cluster
from cluster import Cluster, pid_alive, wait_for

MAGIC = 0x314D4454


class Zmtp:
    """A DEALER on a unix socket."""

    def __init__(self, path, identity):
        self.s = socket.socket(socket.AF_UNIX)
        self.s.settimeout(5)
        self.s.connect(path)
        self.s.sendall(b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"NULL" + b"\0" * 16 + b"\0" * 32)
        self.read(64)
        body = b"\x05READY" + self.prop(b"Socket-Type", b"DEALER") + self.prop(b"Identity", identity)
        self.s.sendall(b"\x04" + bytes([len(body)]) + body)
        flags, size = self.read(2)
        self.read(size)

    @staticmethod
    def prop(name, value):
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    def read(self, count):
        data = b""
        while len(data) < count:
            piece = self.s.recv(count - len(data))
            if not piece:
                raise OSError("closed")
            data += piece
        return data

    def send(self, frames):
        out = b""
        for index, frame in enumerate(frames):
            more = 1 if index + 1 < len(frames) else 0
            if len(frame) < 256:
                out += bytes([more, len(frame)]) + frame
            else:
                out += bytes([more | 2]) + struct.pack(">Q", len(frame)) + frame
        self.s.sendall(out)

    def close(self):
        self.s.close()


def header(magic=MAGIC, version=1, kind=1, flags=0, epoch=0, body=0, ident=bytes(16)):
    return struct.pack("<IBBHII16s", magic, version, kind, flags, epoch, body, ident)


def bad_messages(rng):
    """Frames of every kind of fault in design of the header and beyond."""
    yield [b""]
    yield [b"x"]
    yield [header()[:31]]
    yield [header() + b"x", b""]
    yield [header(magic=0), b""]
    yield [header(version=0), b""]
    yield [header(version=2), b""]
    yield [header(kind=0), b""]
    yield [header(kind=255), b""]
    yield [header(flags=0xFFFF), b""]
    yield [header(body=5), b"1234"]
    yield [header(body=0xFFFFFFFF), b""]
    yield [header(body=4), b"12345"]
    yield [header()]
    yield [header(), b"", b"", b"", b""]
    yield [header()] + [b""] * 30
    yield [header(body=2 << 20), b"\0" * (2 << 20)]
    for kind in range(0, 60):
        yield [header(kind=kind), b""]
        yield [header(kind=kind), b"", b""]
        yield [header(kind=kind), b"", b"abc"]
        junk = rng.randbytes(rng.randrange(1, 200))
        yield [header(kind=kind, body=len(junk), ident=rng.randbytes(16)), junk]
        yield [header(kind=kind, body=len(junk), ident=rng.randbytes(16)), junk, rng.randbytes(40)]
        # plausible protobuf: fields with huge lengths and numbers
        field = bytes([(rng.randrange(1, 15) << 3) | 2]) + b"\xff\xff\xff\xff\x07"
        yield [header(kind=kind, body=len(field)), field]
        field = b"".join(bytes([(n << 3) | 0]) + b"\xff" * 9 + b"\x01" for n in range(1, 15))
        yield [header(kind=kind, body=len(field)), field]
        yield [header(kind=kind, body=len(field)), field, struct.pack("<8I", *range(8))]
    for _ in range(300):
        yield [rng.randbytes(rng.randrange(0, 80)) for _ in range(rng.randrange(1, 6))]


def test_garbage_on_every_socket():
    rng = random.Random(random.random())
    with Cluster() as c:
        pids = {role: c.pid(role) for role in cluster.ROLES}
        for role in ("router", "kvmgr", "drafter"):
            path = os.path.join(c.run_dir, f"{role}.sock")
            for identity in (b"evil", b"", b"gateway-7", b"worker-9", b"x" * 200):
                try:
                    peer = Zmtp(path, identity)
                    for message in bad_messages(rng):
                        peer.send(message)
                    peer.close()
                except OSError:
                    pass        # the socket may hang up on us: that is its right
            # bytes that are no ZMTP at all
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(path)
            try:
                raw.sendall(rng.randbytes(5000))
            except OSError:
                pass
            raw.close()
        answer = c.stream("Who are you?", temperature=0)
        assert "small test model" in answer.content
        assert pids == {role: c.pid(role) for role in cluster.ROLES}
        assert all(pid_alive(pid) for pid in pids.values())
        wait_for("ready", 10, c.ready)
        c.ledger_settles()
        c.pool_settles()


def test_peer_that_takes_a_name():
    """A second connection under a living peer's routing id takes over; the peer recovers."""
    with Cluster() as c:
        for name in (b"worker-0", b"gateway-0"):
            peer = Zmtp(os.path.join(c.run_dir, "router.sock"), name)
            peer.send([header(kind=10), b""])
            peer.close()
            wait_for(f"served again after {name}", 20, lambda: c.ready() and c.stream(
                "Who are you?", temperature=0).finish == "stop")


cluster.main(globals())
