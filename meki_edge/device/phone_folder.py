"""Copies of folders on a phone that are either whole or recognisably unfinished.

Files are compared by size and SHA-256, so what is there already is not sent again: an interrupted copy
goes on with the file that it was at. A file is sent beside its place, verified there, and renamed into
it. The folder's ``manifest.json`` is removed before anything changes and comes back last: where it is,
everything is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meki_edge.device.adb import Device, command, commands
from meki_edge.errors import UserError

MANIFEST = "manifest.json"
PARTIAL = ".part"
DIGEST_BYTES_PER_S = 20e6  # no phone is slower
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file to copy."""

    path: Path
    bytes: int
    sha256: str
    executable: bool = False


@dataclass(frozen=True, kw_only=True)
class Folder:
    """What a folder on the phone is to hold: files by relative name, and the manifest apart."""

    remote: str
    files: dict[str, LocalFile]
    manifest: LocalFile
    keep: frozenset[str] = frozenset()
    """Files that may stay on the phone although they are not among ``files``."""

    def place(self, name: str) -> str:
        return f"{self.remote}/{name}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is left to do for a folder."""

    folder: Folder
    push: tuple[str, ...]
    """Files to send, the manifest (last) included."""
    remove: tuple[str, ...]
    """Files on the phone that are outdated, left over from an interruption, or not of this folder."""
    freed_bytes: int
    kept_bytes: int

    @property
    def push_bytes(self) -> int:
        return sum(_file(self.folder, name).bytes for name in self.push)


def plan(device: Device, folder: Folder, advance: Callable[[int], None] | None = None) -> Plan:
    """Compare a folder with what the phone has of it; changes nothing.

    Args:
        advance: told the bytes of each file that was compared.
    """
    there = listing(device, folder.remote)
    wanted = {**folder.files, MANIFEST: folder.manifest}
    same = set()
    for name, file in wanted.items():
        if there.get(name) == file.bytes and digest(device, folder.place(name), file.bytes) == file.sha256:
            same.add(name)
        if advance is not None:
            advance(file.bytes)
    changes = [name for name in folder.files if name not in same]
    remove = [name for name in there if name not in same and name not in folder.keep]
    if changes or remove or MANIFEST not in same:
        changes.append(MANIFEST)
    return Plan(
        folder=folder,
        push=tuple(changes),
        remove=tuple(remove),
        freed_bytes=sum(there[name] for name in remove),
        kept_bytes=sum(wanted[name].bytes for name in same),
    )


def apply(device: Device, todo: Plan, advance: Callable[[int], None]) -> None:
    """Carry out a plan; ``advance`` is told the bytes sent.

    Raises:
        UserError: the phone is lost or full, a file arrived damaged, or the folder is not writable.
    """
    if not todo.push:
        return
    folder = todo.folder
    parents = sorted({folder.place(name).rpartition("/")[0] for name in [*folder.files, MANIFEST]})
    # The manifest first: from here on the folder counts as unfinished.
    # What is sent is removed too: a file cannot take the place of a folder.
    outdated = [folder.place(name) for name in dict.fromkeys((MANIFEST, *todo.remove, *todo.push))]
    _must(device, commands([command("mkdir", "-p", *parents), command("rm", "-rf", *outdated)]), folder.remote)
    for name in todo.push:
        _send(device, _file(folder, name), folder.place(name), advance)


def listing(device: Device, remote: str) -> dict[str, int]:
    """The files below a folder of the phone: relative name → bytes. Empty if there is no such folder."""
    script = f"cd {command(remote)} 2>/dev/null && find . -type f -exec stat -c '%s %n' {{}} +"
    sizes = (line.partition(" ") for line in device.run(script).stdout.splitlines())
    return {name.removeprefix("./"): int(size) for size, _, name in sizes if size.isdecimal()}


def digest(device: Device, remote: str, num_bytes: int) -> str:
    """The SHA-256 of a file as the phone reads it; empty if it cannot."""
    found = device.run(f"sha256sum <{command(remote)}", timeout=60 + num_bytes / DIGEST_BYTES_PER_S).stdout
    match = _SHA256.match(found)
    return match[0] if match else ""


def _file(folder: Folder, name: str) -> LocalFile:
    return folder.manifest if name == MANIFEST else folder.files[name]


def _send(device: Device, file: LocalFile, place: str, advance: Callable[[int], None]) -> None:
    partial = place + PARTIAL
    try:
        device.push(file.path, partial, advance)
        if digest(device, partial, file.bytes) != file.sha256:
            fix = "run the same command again; if it happens again, check the cable and the phone's storage"
            raise UserError("the file arrived damaged (SHA-256)", where=f"{device.serial}:{place}", fix=fix)
    except BaseException:
        _forget(device, partial)
        raise
    mode = "755" if file.executable else "644"
    _must(device, commands([command("chmod", mode, partial), command("mv", "-f", partial, place)]), place)


def _forget(device: Device, remote: str) -> None:
    """Remove a half-sent file, if the phone is still there; the next run would as well."""
    try:
        device.run(command("rm", "-f", remote), timeout=5)
    except UserError:
        pass


def _must(device: Device, script: str, where: str) -> None:
    done = device.run(script)
    if done.status != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(
            f"the phone refused to change a folder: {said[-1] if said else f'status {done.status}'}",
            where=f"{device.serial}:{where}",
            fix="choose a folder below /data/local/tmp with --target",
        )
