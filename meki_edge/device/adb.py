"""Phones, through Google's `adb` program: the one file that runs it.

A command's exit status and its separate stderr need the shell protocol v2, which every phone since
Android 7 has. Progress of a push is what `adb` itself prints on a terminal, so a pseudo-terminal reads
it. Whatever ends the connection half-way is a :class:`UserError` that says so; :class:`Device` starts
nothing that survives its caller.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meki_edge.errors import UserError

BINARY_VARIABLE = "ADB"
SERIAL_VARIABLE = "ANDROID_SERIAL"
EXIT_CODES = "shell_v2"  # the feature of a daemon that has them
NO_EXIT_STATUS = 255  # the client's own, when the phone sent none
STALL_SECONDS = 120.0  # a push that moves nothing for so long has lost its phone
CLIENT_SECONDS = 60.0
RECONNECT = "check the cable and the phone's screen, then run the same command again: it resumes"

_PERCENT = re.compile(rb"\[ *(\d+)%\]")
_FULL = re.compile(r"no space left|disk quota", re.IGNORECASE)
_LOST = re.compile(
    r"device (offline|unauthorized|'[^']*' not found)|no devices|closed|connection reset|protocol fault|"
    r"couldn't read|failed to (read|write)|EOF|broken pipe|transport",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command on the phone left: its exit status (128 + n: signal n) and its output."""

    status: int
    stdout: str
    stderr: str


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A line of `adb devices`: ``state`` is "device" for a phone that is ready."""

    serial: str
    state: str


class Adb:
    """The `adb` program of this machine."""

    def __init__(self, binary: Path) -> None:
        self.binary = binary

    def version(self) -> str:
        """Such as "36.0.0"."""
        text = self._output(["version"])
        found = re.search(r"^Version (\S+)", text, re.MULTILINE) or re.search(r"version (\S+)", text)
        return found[1] if found else "unknown"

    def devices(self) -> list[Listed]:
        """All phones that adb sees, ready or not."""
        lines = self._output(["devices"]).splitlines()
        pairs = (line.partition("\t")[::2] for line in lines if "\t" in line)  # other lines are about adb's server
        return [Listed(serial=serial, state=state.strip()) for serial, state in pairs]

    def device(self, serial: str | None) -> Device:
        """The phone called ``serial``, or by default the only one (or ``$ANDROID_SERIAL``).

        Raises:
            UserError: there is none, several, it is not ready (unauthorized, offline …), or its daemon tells
                no exit codes, without which nothing that runs on it could be believed.
        """
        serial = serial or os.environ.get(SERIAL_VARIABLE)
        listed = self.devices()
        ready = [entry.serial for entry in listed if entry.state == "device"]
        if serial is not None:
            chosen = next((entry for entry in listed if entry.serial == serial), None)
            if chosen is None:
                seen = f"adb sees {', '.join(entry.serial for entry in listed)}" if listed else "adb sees no phone"
                fix = "connect it, see `adb devices`"
                raise UserError(f"there is no phone {serial!r}: {seen}", where="--serial", fix=fix)
        elif len(ready) == 1:
            chosen = Listed(serial=ready[0], state="device")
        elif len(ready) > 1:
            what = f"{len(ready)} phones are connected: {', '.join(ready)}"
            raise UserError(what, where="adb devices", fix="choose one with --serial/-s")
        elif listed:
            chosen = listed[0]
        else:
            fix = "connect one by USB with USB debugging on, or by `adb connect ADDRESS`; see `meki-edge doctor`"
            raise UserError("no phone is connected", where="adb devices", fix=fix)
        if chosen.state != "device":
            raise not_ready(chosen)
        found = Device(self, chosen.serial)
        if EXIT_CODES not in found.features():
            fix = "use a phone with Android 10 or later"
            what = f"the phone's adb daemon gives no exit codes (no {EXIT_CODES})"
            raise UserError(what, where=found.serial, fix=fix)
        return found

    def command(self, *arguments: str) -> list[str]:
        return [str(self.binary), *arguments]

    def run(self, arguments: list[str]) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of a command that answers at once."""
        try:
            done = subprocess.run(
                self.command(*arguments), stdin=subprocess.DEVNULL, capture_output=True, timeout=CLIENT_SECONDS
            )
        except subprocess.TimeoutExpired:
            fix = "end it with `adb kill-server`, then run the command again"
            raise UserError("adb's server does not answer", where=self.binary, fix=fix) from None
        except OSError as error:
            raise UserError(f"adb cannot be run: {error.strerror}", where=self.binary, fix="install it again") from None
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def _output(self, arguments: list[str]) -> str:
        status, stdout, said = self.run(arguments)
        if status != 0:
            fix = "try `adb kill-server`; another program may hold its port"
            what = f"`adb {arguments[0]}` failed: {said.strip() or 'it said nothing'}"
            raise UserError(what, where=self.binary, fix=fix)
        return stdout


def find() -> Adb:
    """The `adb` program: ``$ADB``, else on the PATH, else in the Android SDK.

    Raises:
        UserError: there is none.
    """
    named = os.environ.get(BINARY_VARIABLE)
    sdks = [os.environ[name] for name in ("ANDROID_HOME", "ANDROID_SDK_ROOT") if name in os.environ]
    candidates = [named] if named else ["adb", *(os.path.join(sdk, "platform-tools/adb") for sdk in sdks)]
    for candidate in candidates:
        if path := shutil.which(candidate):
            return Adb(Path(path))
    fix = "correct $ADB" if named else "install Android's platform-tools (Debian: apt-get install adb), or set $ADB"
    raise UserError("the adb program was not found", where=named or "PATH", fix=fix)


def not_ready(listed: Listed) -> UserError:
    """Why a phone that adb sees cannot be used, and what helps."""
    state = listed.state.split()[0]
    fixes = {
        "unauthorized": "unlock the phone and allow USB debugging for this computer in the dialog that it shows",
        "authorizing": "wait a moment, or allow USB debugging in the dialog that the phone shows",
        "offline": "reconnect the cable, or `adb reconnect`; for a network phone, `adb connect` it again",
        "no": "give this user access to USB devices (Debian: apt-get install android-sdk-platform-tools-common)",
        "recovery": "start the phone normally: it is in recovery mode",
        "bootloader": "start the phone normally: it is in its bootloader",
    }
    shown = "no permissions" if state == "no" else state
    return UserError(
        f"the phone is not ready: {shown}", where=listed.serial, fix=fixes.get(state, "see `adb devices -l`")
    )


class Device:
    """One phone that adb can talk to."""

    def __init__(self, client: Adb, serial: str) -> None:
        self._client = client
        self.serial = serial

    def features(self) -> set[str]:
        """What the phone's adb daemon can do, such as "shell_v2"."""
        status, stdout, said = self._client.run(["-s", self.serial, "features"])
        if status == 0:
            return set(stdout.split())
        if self.state() != "device":
            raise self._lost(said)
        fix = "install Android's platform-tools of version 28 or later, or name them with $ADB"
        what = f"this adb cannot ask what the phone can do: {said.strip()}"
        raise UserError(what, where=self._client.binary, fix=fix)

    def getprop(self, name: str) -> str:
        """A system property; empty if it is not set."""
        return self.run(command("getprop", name)).stdout.strip()

    def run(self, script: str, *, timeout: float = CLIENT_SECONDS) -> Result:
        """Run a shell script on the phone (see :func:`command`); a failing script is no exception.

        Raises:
            UserError: the phone is lost, or does not answer within ``timeout`` seconds.
        """
        try:
            done = subprocess.run(
                self.shell_command(script), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"the phone did not answer in {timeout:.0f} s", where=self.serial, fix=RECONNECT) from None
        stderr = done.stderr.decode(errors="replace")
        self.require_connection(done.returncode, stderr)
        return Result(status=done.returncode, stdout=done.stdout.decode(errors="replace"), stderr=stderr)

    def shell_command(self, script: str) -> list[str]:
        """The local command that runs ``script`` on the phone, for a caller that reads it as it runs."""
        return self._client.command("-s", self.serial, "shell", script)

    def require_connection(self, status: int, stderr: str) -> None:
        """Raise if a client's exit status is adb's own (the phone is gone), not that of a script."""
        own = status == NO_EXIT_STATUS or (status == 1 and stderr.startswith(("error: ", "adb: ")))
        if own and (status == NO_EXIT_STATUS or self.state() != "device"):
            raise self._lost(stderr)

    def state(self) -> str:
        """ "device" if the phone is ready; else what adb calls it, or an empty string."""
        return next((entry.state for entry in self._client.devices() if entry.serial == self.serial), "")

    def push(self, local: Path, remote: str, advance: Callable[[int], None] | None = None) -> None:
        """Copy a file to the path ``remote``; ``advance`` is told the bytes as they go, all of them at the end.

        Raises:
            UserError: the phone is lost half-way, or its storage is full or not writable.
        """
        size = local.stat().st_size
        sent = 0
        arguments = self._client.command("-s", self.serial, "push", str(local), remote)
        with contextlib.closing(_on_terminal(arguments)) as output:
            text = b""
            for text in output:
                if advance is not None and (percents := _PERCENT.findall(text)):
                    now = size * min(int(percents[-1]), 100) // 100
                    advance(max(0, now - sent))
                    sent = max(now, sent)
                if text.startswith(b"\0"):  # the last item: its exit status, then all it said
                    break
        status, said = int(text[1:4]), text[4:].decode(errors="replace")
        if status != 0:
            raise self._transfer_failed(said, f"{self.serial}:{remote}")
        if advance is not None:
            advance(size - sent)

    def pull(self, remote: str, local: Path) -> None:
        """Copy a file of the phone to the path ``local``.

        Raises:
            UserError: the file is not there, or the phone is lost.
        """
        arguments = self._client.command("-s", self.serial, "pull", remote, str(local))
        try:
            done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=10 * CLIENT_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._lost("it did not answer") from None
        if done.returncode != 0:
            local.unlink(missing_ok=True)
            raise self._transfer_failed((done.stdout + done.stderr).decode(errors="replace"), f"{self.serial}:{remote}")

    def _transfer_failed(self, said: str, where: str) -> UserError:
        lines = [line.strip() for line in said.replace("\r", "\n").splitlines() if "error" in line or "adb:" in line]
        text = lines[-1].removeprefix("adb: ").removeprefix("error: ") if lines else said.strip() or "it said nothing"
        if _FULL.search(said):
            fix = "free some space on the phone (`meki-edge unload`), then run the same command again: it resumes"
            return UserError("the phone's storage is full", where=where, fix=fix)
        if self.state() != "device" or _LOST.search(text):
            return self._lost(text)
        fix = "check the folder on the phone, or choose --target"
        return UserError(f"the transfer failed: {text}", where=where, fix=fix)

    def _lost(self, said: str) -> UserError:
        text = said.strip().splitlines()[-1].removeprefix("error: ") if said.strip() else "it stopped answering"
        return UserError(f"the connection to the phone was lost ({text})", where=self.serial, fix=RECONNECT)


def command(*words: str) -> str:
    """A command line for the phone's shell, each word quoted."""
    return " ".join(map(shlex.quote, words))


def commands(parts: Iterable[str]) -> str:
    """Commands that run one after another until one fails."""
    return " && ".join(parts)


def _on_terminal(arguments: list[str]) -> Iterator[bytes]:
    """Run a program on a pseudo-terminal: yields its output in pieces, then NUL, its status, and all output.

    The program is ended if the caller goes away, or if it says nothing for :data:`STALL_SECONDS`.
    """
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    said = b""
    try:
        last = time.monotonic()
        while True:
            if select.select([controller], [], [], 1.0)[0]:
                try:
                    piece = os.read(controller, 1 << 16)
                except OSError:  # how a terminal says that its last program is gone
                    break
                if not piece:
                    break
                last = time.monotonic()
                said = (said + piece)[-(1 << 16) :]
                yield piece
            elif time.monotonic() - last > STALL_SECONDS:
                process.kill()
                said += b"\nadb: error: nothing was transferred for too long: transport lost"
                break
        status = process.wait(CLIENT_SECONDS)
        yield b"\0%3d" % min(abs(status), 255) + said
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(controller)
