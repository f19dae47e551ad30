"""One manifest for every stage: what was made, from what, with what.

A stage's output directory holds ``manifest.json``, written last, so its presence means that the
stage is complete. Until then the work lies in ``.partial/`` beside it, where a long stage keeps
its checkpoints. The fingerprint — stage, configuration, digests of the inputs, tool versions —
decides what a second run does: the same fingerprint is skipped (or, half-way, resumed), another
one is refused with the first field that differs, unless ``force`` is given.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from meki_edge import config as config_module
from meki_edge.errors import UserError
from meki_edge.files import read_json, sha256_file, write_json

SCHEMA = 1
FILE_NAME = "manifest.json"
PARTIAL = ".partial"
FINGERPRINT = "fingerprint.json"
LOCK = "lock"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a stage's output, by name relative to its directory."""

    role: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class InputEntry:
    """One input: the path as given, and the digest of its manifest (or of the file itself)."""

    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``; see the module's docstring."""

    schema: int
    stage: str
    config: dict[str, Any]
    inputs: dict[str, InputEntry]
    files: dict[str, FileEntry]
    metrics: dict[str, Any]
    versions: dict[str, str]

    def file(self, directory: Path, role: str) -> Path:
        """The path of the one file that plays ``role``.

        Raises:
            UserError: no file, or more than one, has that role.
        """
        names = [name for name, entry in self.files.items() if entry.role == role]
        if len(names) != 1:
            raise UserError(
                f"{len(names)} files have the role {role!r}",
                where=directory / FILE_NAME,
                fix=f"give a directory that `meki-edge {self.stage}` or the right earlier stage wrote",
            )
        return directory / names[0]


def load(directory: Path, *, stages: Iterable[str] = ()) -> Manifest:
    """Read the manifest of ``directory``; with ``stages``, it must come from one of them.

    Raises:
        UserError: no manifest (the stage never finished), a broken one, or another stage's.
    """
    path = directory / FILE_NAME
    expected = " or ".join(f"`meki-edge {stage}`" for stage in stages) or "a finished stage"
    if not path.is_file():
        unfinished = (directory / PARTIAL).is_dir()
        raise UserError(
            "the stage that fills this directory has not finished" if unfinished else "no manifest.json is here",
            where=directory,
            fix="run the same command again: it resumes, or says why not"
            if unfinished
            else f"give the output directory of {expected}",
        )
    manifest = config_module.from_dict(Manifest, read_json(path), path)
    if manifest.schema != SCHEMA:
        raise UserError(
            f"manifest schema {manifest.schema}, this version reads {SCHEMA}",
            where=path,
            fix="regenerate the directory with this version of meki-edge",
        )
    for name in manifest.files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"the file {name!r} lies outside the directory", where=path, fix="do not use this manifest")
    if stages and manifest.stage not in stages:
        raise UserError(
            f"this is the output of `meki-edge {manifest.stage}`", where=directory, fix=f"give that of {expected}"
        )
    return manifest


def verify(directory: Path, manifest: Manifest, advance: Callable[[int], None] | None = None) -> None:
    """Compare every file of ``manifest`` with its recorded size and SHA-256.

    Raises:
        UserError: a file is missing, has another size, or other contents.
    """
    change = first_change(directory, manifest, advance)
    if change is not None:
        raise change


def first_change(
    directory: Path, manifest: Manifest, advance: Callable[[int], None] | None = None
) -> UserError | None:
    """What :func:`verify` raises, for who looks at the files all the same; None if they are as recorded."""
    fix = f"copy the directory again or rerun `meki-edge {manifest.stage}` with --force"
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            return UserError(f"the file {name!r} is missing", where=directory, fix=fix)
        size = path.stat().st_size
        if size != entry.bytes:
            return UserError(f"the file has {size} bytes, the manifest says {entry.bytes}", where=path, fix=fix)
        if sha256_file(path, advance) != entry.sha256:
            return UserError("the contents changed since the manifest was written (SHA-256)", where=path, fix=fix)
    return None


def digest(path: Path) -> str:
    """What identifies an input: its manifest's SHA-256, or the file's own."""
    return sha256_file(path / FILE_NAME if path.is_dir() else path)


def tool_versions(*distributions: str) -> dict[str, str]:
    """Installed versions of meki-edge and the named distributions."""
    return {name: importlib.metadata.version(name) for name in ("meki-edge", *distributions)}


class StageOutput:
    """The output directory of one run of a stage.

    Use::

        output = StageOutput(out, stage="pack", config={…}, inputs={"export": path}, tools=("onnx",))
        if output.complete is not None:
            return output.complete
        write(output.partial / "graph.onnx")
        return output.finish(roles={"graph.onnx": "decode_graph"}, metrics={…})

    ``partial`` persists when the stage is interrupted; a run with the same fingerprint finds it
    again and may resume from what it holds. ``finish`` moves the files that have a role into
    place, removes the rest, and writes the manifest.

    Raises:
        UserError: the directory holds other files, or the result (whole or partial) of another
            fingerprint, and ``force`` is not given.
    """

    def __init__(
        self,
        directory: Path,
        *,
        stage: str,
        config: Mapping[str, Any],
        inputs: Mapping[str, Path],
        tools: tuple[str, ...] = (),
        force: bool = False,
    ) -> None:
        for role, path in inputs.items():
            if directory.resolve() in (path.resolve(), path.resolve().parent):
                raise UserError(
                    f"the output directory is, or holds, the input {role!r}",
                    where=directory,
                    fix="choose another --output-dir",
                )
        self.directory = directory
        self.partial = directory / PARTIAL
        self._lock: IO[str] | None = None
        self.complete: Manifest | None = None
        self._stage = stage
        self._config = json.loads(json.dumps(config))
        self._inputs = {role: InputEntry(path=os.fspath(path), sha256=digest(path)) for role, path in inputs.items()}
        self._versions = tool_versions(*tools)
        self._open(force)

    def finish(self, *, roles: Mapping[str, str], metrics: Mapping[str, Any]) -> Manifest:
        """Move the files of ``roles`` (name → role) from ``partial`` into place; write the manifest."""
        files = {}
        for name, role in roles.items():
            source = self.partial / name
            with open(source, "rb") as file:
                os.fsync(file.fileno())
            files[name] = FileEntry(role=role, bytes=source.stat().st_size, sha256=sha256_file(source))
        for name in roles:
            target = self.directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.partial / name, target)
        manifest = Manifest(
            schema=SCHEMA,
            stage=self._stage,
            config=self._config,
            inputs=self._inputs,
            files=files,
            metrics=dict(metrics),
            versions=self._versions,
        )
        write_json(self.directory / FILE_NAME, config_module.to_dict(manifest))
        shutil.rmtree(self.partial)
        return manifest

    def _identity(self) -> dict[str, Any]:
        return {
            "stage": self._stage,
            "config": self._config,
            "inputs": {role: entry.sha256 for role, entry in self._inputs.items()},
            "versions": self._versions,
        }

    def _open(self, force: bool) -> None:
        if self.directory.exists() and not self.directory.is_dir():
            raise UserError("the output is a file", where=self.directory, fix="name a directory with --output-dir")
        finished = load(self.directory) if (self.directory / FILE_NAME).is_file() else None
        self._refuse_foreign(finished)
        if self.partial.is_dir():
            self._take_lock()
        if force:
            self._clear(finished)
        elif finished is not None:
            existing = {
                "stage": finished.stage,
                "config": finished.config,
                "inputs": {role: entry.sha256 for role, entry in finished.inputs.items()},
                "versions": finished.versions,
            }
            self._refuse_if_different(existing, "result")
            self.complete = finished
            return
        elif (self.partial / FINGERPRINT).is_file():
            self._refuse_if_different(read_json(self.partial / FINGERPRINT), "unfinished work")
            return
        self._make_partial()
        self._take_lock()
        write_json(self.partial / FINGERPRINT, self._identity())

    def _refuse_foreign(self, finished: Manifest | None) -> None:
        """Never mix with, or replace, what this stage did not write: not even with force."""
        if finished is not None and finished.stage != self._stage:
            raise UserError(
                f"the directory holds the result of `meki-edge {finished.stage}`",
                where=self.directory,
                fix="choose another --output-dir; --force replaces only results of the same stage",
            )
        # A stop while finished files were moved into place leaves them beside ``partial``.
        if finished is None and self.directory.is_dir() and not (self.partial / FINGERPRINT).is_file():
            if any(entry.name != PARTIAL for entry in self.directory.iterdir()):
                raise UserError(
                    "the output directory holds files that no stage of meki-edge recorded",
                    where=self.directory,
                    fix="choose a new or empty directory with --output-dir",
                )

    def _make_partial(self) -> None:
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:  # a file is in the way
            what = f"the output directory cannot be made: {error.strerror}"
            raise UserError(what, where=self.directory, fix="choose another --output-dir") from None

    def _take_lock(self) -> None:
        """One process at a time works in ``partial``; the lock ends with the process."""
        lock = open(self.partial / LOCK, "w", encoding="utf-8")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UserError(
                "another process is working in this directory",
                where=self.directory,
                fix="wait for it to finish, or choose another --output-dir",
            ) from None
        self._lock = lock

    def _clear(self, finished: Manifest | None) -> None:
        """Remove an earlier run's own files, and nothing that is not its own."""
        if finished is not None:
            (self.directory / FILE_NAME).unlink()
            for name in finished.files:
                (self.directory / name).unlink(missing_ok=True)
        if self.partial.is_dir():
            shutil.rmtree(self.partial)

    def _refuse_if_different(self, existing: dict[str, Any], noun: str) -> None:
        difference = _first_difference(existing, self._identity(), "")
        if difference is not None:
            for role, entry in self._inputs.items():
                if difference.startswith(f"inputs.{role} was"):
                    difference += f": {entry.path} has changed"
            raise UserError(
                f"the directory holds the {noun} of another run: {difference}",
                where=self.directory,
                fix="choose another --output-dir, or replace it with --force",
            )


def _first_difference(old: Any, new: Any, field: str) -> str | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            name = f"{field}.{key}" if field else key
            found = _first_difference(old.get(key, "absent"), new.get(key, "absent"), name)
            if found is not None:
                return found
        return None
    return None if old == new else f"{field} was {old!r} and is now {new!r}"
