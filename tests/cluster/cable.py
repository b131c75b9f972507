# SPDX-License-Identifier: Apache-2.0
"""A proxy for one TCP port: a longer, a cut, a stalled or a bad cable between two ranks."""
import contextlib
import socket
import threading
import time


class Wire:
    """Forwards (host, port) to `to`, each byte `seconds` later than it came."""
    def __init__(self, host, port, to, seconds=0.0):
        self.to, self.seconds = to, seconds
        self.carried = [0, 0]                    # bytes each way
        self.flip = 0                            # bytes to spoil, one a piece
        self.open = threading.Event()            # cleared: nothing passes
        self.open.set()
        self.joined = True                       # False: nobody is let in
        self.lock, self.pairs = threading.Lock(), []
        self.listener = socket.create_server((host, port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                try:
                    if not self.joined:
                        raise OSError("cut")
                    far = socket.create_connection(self.to, timeout=5)
                except OSError:
                    near.close()
                    continue
                for s in (near, far):
                    s.settimeout(None)
                    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self.lock:
                    self.pairs.append((near, far))
                for way in ((0, near, far), (1, far, near)):
                    threading.Thread(target=self.pump, args=way, daemon=True).start()

    def pump(self, way, source, sink):
        """Reader and writer apart: the delay of a piece must not hold up the next."""
        pieces, come = [], threading.Condition()

        def write():
            while True:
                with come:
                    come.wait_for(lambda: pieces)
                    due, data = pieces.pop(0)
                time.sleep(max(0.0, due - time.monotonic()))
                self.open.wait()
                try:
                    if not data:
                        sink.shutdown(socket.SHUT_RDWR)
                        return
                    sink.sendall(data)
                except OSError:
                    return
        threading.Thread(target=write, daemon=True).start()
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            with self.lock:
                if self.flip > 0 and data:
                    self.flip -= 1
                    at = len(data) * 2 // 3
                    data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1:]
            self.carried[way] += len(data)
            with come:
                pieces.append((time.monotonic() + self.seconds, data))
                come.notify()

    def cut(self):
        """Ends what is connected and lets nobody in until mend()."""
        self.joined = False
        with self.lock:
            pairs, self.pairs = self.pairs, []
        for s in (s for pair in pairs for s in pair):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def mend(self):
        self.joined = True
        self.seconds = 0.0
        self.open.set()

    def close(self):
        self.mend()
        self.cut()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
