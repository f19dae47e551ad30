"""A device-side adb daemon on loopback, for tests: enough of the protocol for the real `adb` client.

It stands in for a phone: shell v2 (stdin, separate stderr, exit codes), exec, and sync (stat v1 and v2, list,
push, pull) work on this machine's own files; arm64 programs run under qemu by `arm64_exec.c`. Properties, free space,
logs and faults come from the JSON file that `--state` names, which is read again for each request, so that a test
can change it meanwhile. Written from Android's public protocol description (adb/protocol.txt, SYNC.TXT).

    python adb_daemon.py --state STATE.json --port-file PORT
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

VERSION = 0x01000001  # from here on, packets need no checksum
MAX_DATA = 1 << 18
AUTH_TOKEN = 1
STDIN, STDOUT, STDERR, EXIT, CLOSE_STDIN = range(5)
STAT_V2 = struct.Struct("<4sIQQIIIIQqqq")


class State:
    """The JSON file; a missing key means that nothing is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sent = 0  # bytes that pushes have written so far

    def __getitem__(self, key: str) -> Any:
        return json.loads(self.path.read_text()).get(key)


class Stream:
    """One service of one client: packets go in by a queue, out with one unacknowledged at a time."""

    def __init__(self, connection: Connection, local: int, remote: int) -> None:
        self.connection, self.local, self.remote = connection, local, remote
        self.incoming: queue.Queue[bytes | None] = queue.Queue()
        self.ready = threading.Semaphore(0)
        self.closed = threading.Event()
        self._buffer = b""

    def read(self, count: int) -> bytes:
        """Exactly ``count`` bytes; EOFError when the client closed."""
        while len(self._buffer) < count:
            data = self.incoming.get()
            if data is None:
                raise EOFError
            self._buffer += data
            self.connection.send(b"OKAY", self.local, self.remote)
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), MAX_DATA):
            self.connection.send(b"WRTE", self.local, self.remote, data[start : start + MAX_DATA])
            self.ready.acquire()
            if self.closed.is_set():
                raise EOFError

    def close(self) -> None:
        self.connection.send(b"CLSE", self.local, self.remote)

    def end(self) -> None:
        """The client, or the connection, is gone."""
        self.closed.set()
        self.incoming.put(None)
        self.ready.release()


class Connection:
    """One transport: reads packets and hands them to the streams."""

    def __init__(self, link: socket.socket, state: State, environment: dict[str, str]) -> None:
        self.link, self.state, self.environment = link, state, environment
        self.lock = threading.Lock()
        self.streams: dict[int, Stream] = {}

    def send(self, command: bytes, first: int, second: int, data: bytes = b"") -> None:
        (number,) = struct.unpack("<I", command)
        header = struct.pack("<6I", number, first, second, len(data), 0, number ^ 0xFFFFFFFF)
        with self.lock:
            try:
                self.link.sendall(header + data)
            except OSError:
                pass  # the reading side ends the streams

    def cut(self) -> None:
        self.link.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        try:
            while True:
                number, first, second, length, _, _ = struct.unpack("<6I", self._exactly(24))
                self._packet(struct.pack("<I", number), first, second, self._exactly(length))
        except (EOFError, OSError):
            pass
        for stream in list(self.streams.values()):
            stream.end()
        self.link.close()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.link.recv(min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return data

    def _packet(self, command: bytes, first: int, second: int, data: bytes) -> None:
        if command == b"CNXN" or command == b"AUTH":
            if self.state["unauthorized"]:
                self.send(b"AUTH", AUTH_TOKEN, 0, os.urandom(20))
            elif command == b"CNXN":
                features = ",".join(self.state["features"] or ["shell_v2", "cmd", "stat_v2", "ls_v2"])
                self.send(b"CNXN", VERSION, MAX_DATA, f"device::ro.product.name=loopback;features={features}".encode())
        elif command == b"OPEN":
            local = len(self.streams) + 1
            stream = self.streams[local] = Stream(self, local, first)
            self.send(b"OKAY", local, first)
            threading.Thread(target=self._service, args=(stream, data.rstrip(b"\0").decode()), daemon=True).start()
        elif command == b"WRTE" and second in self.streams:
            self.streams[second].incoming.put(data)
        elif command == b"OKAY" and second in self.streams:
            self.streams[second].ready.release()
        elif command == b"CLSE" and second in self.streams:
            self.streams[second].end()
            self.send(b"CLSE", second, first)

    def _service(self, stream: Stream, service: str) -> None:
        name, _, command = service.partition(":")
        kind, *flags = name.split(",")
        try:
            if kind in ("shell", "exec"):
                Shell(self, stream, packets="v2" in flags).run(command)
            elif kind == "sync":
                Sync(self, stream).run()
        except EOFError:
            pass
        stream.close()


class Shell:
    """`shell:`, `shell,v2:` and `exec:`: a command under sh, as adbd runs it."""

    def __init__(self, connection: Connection, stream: Stream, *, packets: bool) -> None:
        self.connection, self.stream, self.packets = connection, stream, packets
        self.lock = threading.Lock()

    def run(self, command: str) -> None:
        stderr = subprocess.PIPE if self.packets else subprocess.STDOUT
        process = subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=self.connection.environment,
            cwd="/",
            start_new_session=True,
        )
        outputs = [(STDOUT, process.stdout)] + ([(STDERR, process.stderr)] if self.packets else [])
        pumps = [threading.Thread(target=self._pump, args=output, daemon=True) for output in outputs]
        threads = [*pumps, threading.Thread(target=self._feed, args=(process,), daemon=True)]
        for thread in threads:
            thread.start()
        for pump in pumps:
            pump.join()
        code = process.wait()
        if self.packets:
            self._write(EXIT, bytes([code if code >= 0 else 128 - code]))

    def _write(self, kind: int, data: bytes) -> None:
        with self.lock:  # a packet's bytes stay together
            self.stream.write(struct.pack("<BI", kind, len(data)) + data if self.packets else data)

    def _pump(self, kind: int, pipe: Any) -> None:
        try:
            while data := os.read(pipe.fileno(), 1 << 16):
                self._write(kind, data)
        except EOFError:
            pass

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        try:
            while self.packets:
                kind, length = struct.unpack("<BI", self.stream.read(5))
                data = self.stream.read(length)
                if kind == STDIN:
                    process.stdin.write(data)
                    process.stdin.flush()
                elif kind == CLOSE_STDIN:
                    process.stdin.close()
            while True:
                process.stdin.write(self.stream.read(1))
        except (EOFError, OSError, ValueError):
            if process.poll() is None and not self.connection.state["keeps_orphans"]:
                process.send_signal(signal.SIGHUP)  # what adbd does when a client goes away


class Sync:
    """`sync:`: files, with the faults that a test asks for."""

    def __init__(self, connection: Connection, stream: Stream) -> None:
        self.connection, self.stream, self.state = connection, stream, connection.state

    def run(self) -> None:
        while True:
            request, length = struct.unpack("<4sI", self.stream.read(8))
            if request == b"QUIT":
                return
            path = self.stream.read(length).decode()
            if request in (b"STAT", b"STA2", b"LST2"):
                self._stat(request, path)
            elif request in (b"LIST", b"LIS2"):
                self._list(request, path)
            elif request == b"SEND":
                self._receive(*path.rsplit(",", 1))
            elif request == b"RECV":
                self._send(path)
            else:
                self._fail(f"unknown request {request!r}")
                return

    def _fail(self, message: str) -> None:
        self.stream.write(b"FAIL" + struct.pack("<I", len(message)) + message.encode())

    def _stat(self, request: bytes, path: str) -> None:
        try:
            found = os.stat(path) if request == b"STA2" else os.lstat(path)
        except OSError as error:
            if request == b"STAT":
                self.stream.write(struct.pack("<4s3I", b"STAT", 0, 0, 0))
            else:
                self.stream.write(STAT_V2.pack(request, error.errno, *[0] * 10))
            return
        times = int(found.st_atime), int(found.st_mtime), int(found.st_ctime)
        if request == b"STAT":
            self.stream.write(struct.pack("<4s3I", b"STAT", found.st_mode, found.st_size & 0xFFFFFFFF, times[1]))
        else:
            owner = found.st_mode, found.st_nlink, found.st_uid, found.st_gid
            self.stream.write(STAT_V2.pack(request, 0, found.st_dev, found.st_ino, *owner, found.st_size, *times))

    def _list(self, request: bytes, path: str) -> None:
        empty = struct.pack("<4s4I", b"DONE", 0, 0, 0, 0)
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else []:
            found = os.lstat(os.path.join(path, name))
            mode, size, when, encoded = found.st_mode, found.st_size, int(found.st_mtime), name.encode()
            if request == b"LIS2":
                fields = 0, found.st_dev, found.st_ino, mode, found.st_nlink, found.st_uid, found.st_gid, size
                self.stream.write(STAT_V2.pack(b"DNT2", *fields, when, when, when))
                self.stream.write(struct.pack("<I", len(encoded)) + encoded)
            else:
                self.stream.write(struct.pack("<4s4I", b"DENT", mode, size & 0xFFFFFFFF, when, len(encoded)) + encoded)
        if request == b"LIS2":
            empty = STAT_V2.pack(b"DONE", *[0] * 11) + struct.pack("<I", 0)
        self.stream.write(empty)

    def _receive(self, path: str, mode: str) -> None:
        problem = None
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = open(path, "wb", buffering=0)
        except OSError as error:
            file, problem = open(os.devnull, "wb", buffering=0), error.strerror
        with file:
            while True:
                kind, length = struct.unpack("<4sI", self.stream.read(8))
                if kind == b"DONE":
                    break
                data = self.stream.read(length)
                self.state.sent += length
                time.sleep(self.state["delay_s"] or 0)
                if (limit := self.state["disk_bytes"]) is not None and self.state.sent > limit:
                    problem = "No space left on device"
                if (limit := self.state["cut_after_bytes"]) is not None and self.state.sent > limit:
                    self.connection.cut()
                    raise EOFError
                if problem is None:
                    file.write(data)
                    if self.state["damage"] == os.path.basename(path):
                        file.seek(-1, os.SEEK_CUR)
                        file.write(b"\0")
        if problem is not None:
            self._fail(problem)
            return
        os.chmod(path, stat.S_IMODE(int(mode)) & 0o777 | 0o600)
        self.stream.write(struct.pack("<4sI", b"OKAY", 0))

    def _send(self, path: str) -> None:
        try:
            file = open(path, "rb")
        except OSError as error:
            self._fail(str(error.strerror))
            return
        with file:
            while data := file.read(1 << 16):
                self.stream.write(b"DATA" + struct.pack("<I", len(data)) + data)
        self.stream.write(struct.pack("<4sI", b"DONE", 0))


def end_with(parent: int) -> None:
    """End when the process that started this one is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--port-file", type=Path, required=True)
    options = parser.parse_args()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    state = State(options.state)
    environment = {**os.environ, **state["environment"]}
    with socket.create_server(("127.0.0.1", 0)) as server:
        partial = options.port_file.with_suffix(".tmp")
        partial.write_text(str(server.getsockname()[1]))
        partial.replace(options.port_file)
        while True:
            link, _ = server.accept()
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=Connection(link, state, environment).serve, daemon=True).start()


if __name__ == "__main__":
    main()
