"""A TCP proxy on loopback that can delay what passes, cut its connections, or stall them like a pulled cable."""

import collections
import socket
import threading
import time

UP, DOWN = "up", "down"  # Towards the server, and back.


class Proxy:
    """Forwards to `target` ("host:port"); `address` is where it listens. Use as a context."""

    def __init__(self, target, delay=0.0):
        self.target = target
        self.delay = delay  # seconds, each way
        self.passed = {UP: 0, DOWN: 0}  # bytes
        self._lock = threading.Lock()
        self._flows = {UP: threading.Event(), DOWN: threading.Event()}
        self._marks = {}  # direction -> bytes
        self.stall()
        self._sockets = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.close()
        self.cut()

    def cut(self):
        """Resets every connection; new ones are served."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            _reset(one)

    def stall(self, *directions):
        """Nothing passes in these directions from now on, not even an end; connections stay up, also new ones. In all
        others, what waits passes."""
        for direction, flow in self._flows.items():
            if direction in directions:
                flow.clear()
            else:
                flow.set()

    def stall_at(self, direction, mark):
        """Nothing passes in this direction from the first bytes on that have `mark` in them."""
        self._marks[direction] = mark

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            host, port = self.target.rsplit(":", 1)
            try:
                far = socket.create_connection((host, int(port)), timeout=10)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets.update((near, far))
            self._start(near, far, UP)
            self._start(far, near, DOWN)

    def _start(self, source, sink, direction):
        pump = _Pump(self, source, sink, direction)
        threading.Thread(target=pump.read, daemon=True).start()
        if self.delay:
            threading.Thread(target=pump.write_late, daemon=True).start()

    def await_flow(self, direction, data):
        if direction in self._marks and self._marks[direction] in data:
            del self._marks[direction]
            self._flows[direction].clear()
        self._flows[direction].wait()

    def forget(self, one):
        with self._lock:
            self._sockets.discard(one)
        _reset(one)


class _Pump:
    """One direction of one connection."""

    def __init__(self, proxy, source, sink, direction):
        self._proxy, self._source, self._sink, self._direction = proxy, source, sink, direction
        self._queue = collections.deque()  # (due, bytes); with a delay only
        self._more = threading.Semaphore(0)

    def read(self):
        while True:
            try:
                data = self._source.recv(1 << 16)
            except OSError:
                data = b""
            self._proxy.await_flow(self._direction, data)
            if self._proxy.delay:
                self._queue.append((time.monotonic() + self._proxy.delay, data))
                self._more.release()
            else:
                self._write(data)
            if not data:
                return

    def write_late(self):
        while True:
            self._more.acquire()
            due, data = self._queue.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            self._write(data)
            if not data:
                return

    def _write(self, data):
        try:
            if data:
                self._sink.sendall(data)
                self._proxy.passed[self._direction] += len(data)
                return
        except OSError:
            pass
        self._proxy.forget(self._source)
        self._proxy.forget(self._sink)


def _reset(one):
    try:
        one.shutdown(socket.SHUT_RDWR)  # Wakes whoever reads it.
    except OSError:
        pass
    one.close()
