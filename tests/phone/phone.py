"""A phone for tests: `adb_daemon.py` with the tools of Android that meki-edge asks for, and adb's own server."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROPERTIES = {
    "ro.product.cpu.abilist": "arm64-v8a,armeabi-v7a",
    "ro.product.manufacturer": "loopback",
    "ro.product.model": "Test Phone",
    "ro.build.version.release": "15",
    "ro.build.version.sdk": "35",
    "ro.soc.model": "SM8750",
    "ro.boot.qemu": "1",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def stop(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    process.wait(10)


class Phone:
    """One phone; ``state`` are the faults and facts that the daemon reads."""

    def __init__(self, directory: Path, *, sysroot: Path | None = None, **state: Any) -> None:
        self.directory = directory
        self.target = str(directory / "data local" / "tmp" / "meki")
        self._state: dict[str, Any] = {}
        directory.mkdir(parents=True)
        tools = directory / "system bin"
        tools.mkdir()
        self.properties = directory / "properties"
        self.set_properties(**{})
        here = shlex.quote(str(directory))
        self.tool("getprop", f'sed -n "s/^$1=//p" {here}/properties')
        self.tool("logcat", f"cat {here}/logcat.txt 2>/dev/null")
        self.tool("dumpsys", f"cat {here}/dumpsys-$1.txt 2>/dev/null")
        environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
        if sysroot is not None:
            environment |= {"LD_PRELOAD": str(arm64_exec(directory)), "MEKI_SYSROOT": str(sysroot)}
        self.set(environment=environment, **state)
        port_file = directory / "port"
        self._daemon = subprocess.Popen(
            [sys.executable, HERE / "adb_daemon.py", "--state", self.directory / "state.json", "--port-file", port_file]
        )
        deadline = time.monotonic() + 30
        while not port_file.is_file() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.serial = f"127.0.0.1:{port_file.read_text()}"

    def set(self, **state: Any) -> None:
        """Change what the daemon does from its next request on."""
        self._state |= state
        partial = self.directory / "state.tmp"
        partial.write_text(json.dumps(self._state))
        partial.replace(self.directory / "state.json")

    def set_properties(self, **properties: str) -> None:
        named = PROPERTIES | {name.replace("__", "."): value for name, value in properties.items()}
        self.properties.write_text("".join(f"{name}={value}\n" for name, value in named.items()))

    def tool(self, name: str, script: str) -> None:
        path = self.directory / "system bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def connect(self) -> Phone:
        subprocess.run(["adb", "connect", self.serial], check=True, capture_output=True, timeout=60)
        return self

    def reconnect(self) -> Phone:
        subprocess.run(["adb", "disconnect", self.serial], check=True, capture_output=True, timeout=60)
        return self.connect()

    def stop(self) -> None:
        subprocess.run(["adb", "disconnect", self.serial], capture_output=True, timeout=60)
        stop(self._daemon)

    def processes(self) -> list[int]:
        """Processes on the phone whose command line names its target folder."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self.target.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                    found.append(int(entry.parent.name))
            except OSError:
                pass
        return found

    def left_behind(self, seconds: float = 10) -> list[int]:
        """Processes that still run on the phone after a while."""
        deadline = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


def arm64_exec(directory: Path) -> Path:
    library = directory / "arm64_exec.so"
    subprocess.run(["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", library, HERE / "arm64_exec.c"], check=True)
    return library


def missing_tools(*names: str) -> list[str]:
    return [name for name in names if shutil.which(name) is None]
