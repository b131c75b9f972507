# SPDX-License-Identifier: Apache-2.0
"""The wire by hand: ZMTP 3.0 (NULL mechanism), frame headers and protobuf from the schema files.

Nothing here is shared with the code under test, so that anything at all can be sent, as either side."""
import contextlib
import os
import re
import select
import signal
import socket
import struct
import time

import cluster

MAGIC = 0x314D4454
HUGE, RANDOM = 0xFFFFFFFF, 2 ** 64 - 1
GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"NULL" + b"\0" * 16 + b"\0" * 32


class Zmtp:
    """A DEALER on a unix socket, or with `accepted` the ROUTER's end of one connection."""

    def __init__(self, path, identity=b"", accepted=None):
        self.s = accepted or socket.socket(socket.AF_UNIX)
        self.s.settimeout(5)
        if not accepted:
            self.s.connect(path)
        self.s.sendall(GREETING)
        self.read(64)
        kind = b"ROUTER" if accepted else b"DEALER"
        body = b"\x05READY" + self.prop(b"Socket-Type", kind)
        if not accepted:
            body += self.prop(b"Identity", identity)
        self.s.sendall(b"\x04" + bytes([len(body)]) + body)
        _, size = self.read(2)
        ready = self.read(size)
        at = ready.find(b"\x08Identity")
        self.identity = b""
        if at >= 0:
            size = struct.unpack(">I", ready[at + 9:at + 13])[0]
            self.identity = ready[at + 13:at + 13 + size]

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

    def receive(self):
        """The frames of the next message."""
        frames, more = [], True
        while more:
            flags = self.read(1)[0]
            size = struct.unpack(">Q", self.read(8))[0] if flags & 2 else self.read(1)[0]
            frame = self.read(size)
            if flags & 4:       # a command
                continue
            more = flags & 1
            frames.append(frame)
        return frames

    def close(self):
        self.s.close()


class Fake:
    """Stands in for a role that binds a socket: the role is ended, its supervisor sleeps, its peers
    connect here.  At the end the real one comes back."""

    def __init__(self, c, role):
        self.c, self.role = c, role
        self.path = os.path.join(c.run_dir, f"{role}.sock")
        self.peers = {}

    def __enter__(self):
        with open(os.path.join(self.c.run_dir, f"{self.role}-0.super"), encoding="ascii") as f:
            self.supervisor = int(f.read())
        os.kill(self.supervisor, signal.SIGSTOP)
        try:
            pid = self.c.kill(self.role)
            cluster.wait_for(f"{self.role} is dead", 5, lambda: not cluster.pid_alive(pid))
        except BaseException:           # it was not there: its supervisor must not sleep for ever
            os.kill(self.supervisor, signal.SIGCONT)
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(16)
        return self

    def wait_peer(self, name, seconds=10):
        """Until a peer of this name has connected; returns its connection."""
        end = time.monotonic() + seconds
        while name not in self.peers:
            assert time.monotonic() < end, f"{name} does not connect to a fake {self.role}"
            if select.select([self.listener], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):
                    peer = Zmtp(None, accepted=self.listener.accept()[0])
                    self.peers[peer.identity] = peer
        return self.peers[name]

    def __exit__(self, *_):
        for peer in self.peers.values():
            peer.close()
        self.listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.kill(self.supervisor, signal.SIGCONT)


def header(magic=MAGIC, version=1, kind=1, flags=0, epoch=0, body=0, ident=bytes(16)):
    return struct.pack("<IBBHII16s", magic, version, kind, flags, epoch, body, ident)


# --- protobuf, from the schema files

def schema():
    """message name -> field name -> (number, type, repeated)"""
    messages = {}
    for file in ("route.proto", "kv.proto", "draft.proto"):
        with open(os.path.join(cluster.ROOT, "proto", file), encoding="utf-8") as f:
            text = re.sub(r"//.*", "", f.read())
        for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.S):
            messages[name] = {field: (int(number), kind, bool(repeated)) for repeated, kind, field,
                              number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+)", body)}
    return messages


SCHEMA = schema()


def varint(value):
    value &= (1 << 64) - 1
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def scalar(kind, value):
    if kind in ("double", "float", "fixed64"):
        return struct.pack({"double": "<d", "float": "<f", "fixed64": "<Q"}[kind], value)
    if kind == "sint32":
        return varint(value << 1 ^ value >> 31)
    return varint(int(value))


def encode(message, **fields):
    out = b""
    for name, value in fields.items():
        number, kind, repeated = SCHEMA[message][name]
        if repeated:
            value = b"".join(scalar(kind, item) for item in value)
        elif kind in SCHEMA:
            value = encode(kind, **value)
        elif kind == "string":
            value = value.encode() if isinstance(value, str) else value
        elif kind != "bytes":
            wire = {"double": 1, "fixed64": 1, "float": 5}.get(kind, 0)
            out += varint(number << 3 | wire) + scalar(kind, value)
            continue
        out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def kinds():
    """message type name -> wire value, from proto/msg.h"""
    with open(os.path.join(cluster.ROOT, "proto", "msg.h"), encoding="utf-8") as f:
        return {name: int(value) for name, value in re.findall(r"MSG_([A-Z_]+) = (\d+)", f.read())}


KINDS = kinds()


def message(name, ident=bytes(16), epoch=0, payload=None, **fields):
    """Frames of one message; name as in the schema, e.g. message("KvOpen", blocks_wanted=1)."""
    kind = KINDS[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()]
    body = encode(name, **fields)
    frames = [header(kind=kind, epoch=epoch, body=len(body), ident=ident), body]
    return frames if payload is None else frames + [payload]


def words(values):
    return struct.pack(f"<{len(values)}I", *values)


def lying_drafts(rng, asked):
    """Answers to a DraftPropose, the last of them plausible."""
    ident = asked[0][16:32]
    fields, at = {}, 0
    while at < len(asked[1]):           # varint fields and one text
        number, kind = asked[1][at] >> 3, asked[1][at] & 7
        value, shift = 0, 0
        at += 1
        while True:
            byte = asked[1][at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        fields[number] = value
        if kind == 2:
            at += value
    numbers = {name: fields.get(row[0], 0) for name, row in SCHEMA["DraftPropose"].items()}
    length = numbers["base_length"] + numbers["ids_count"]
    good = {"epoch": numbers["epoch"], "base_length": length, "step": numbers["step"],
            "ids": [rng.randrange(200) for _ in range(max(1, numbers["draft_count"]))]}
    lies = [{"epoch": good["epoch"] + 1}, {"base_length": length + 5}, {"base_length": HUGE},
            {"step": RANDOM}, {"ids": [HUGE] * 3}, {"ids": [1] * 17}, {"code": 4000}]
    yield message("DraftReply", rng.randbytes(16), **good)
    yield message("DraftReply", ident, **{**good, **rng.choice(lies)})
    yield message("DraftReply", ident, **good)
