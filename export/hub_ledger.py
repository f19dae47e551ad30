"""What was sent to AI Hub, on disk before anything is waited for: a stop at any point loses no job.

One JSON file an upload or a job, in a directory that all runs share. Its name is a digest of what
was asked for (contents of the files, device, options, service), so the same request finds its
entry again, in this run or in another: it is polled, not sent a second time. An entry is written
twice: as *intended* under a name that no other entry has, just before the request leaves, and with
the service's id just after. A stop between the two leaves an intention, and the next run looks the
name up at the service (:mod:`export.hub_jobs`).

Files are replaced atomically and reach the disk before the call returns. A lock a key keeps two
processes from sending the same thing; it ends with its process.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meki_edge import config
from meki_edge.errors import UserError
from meki_edge.files import read_json, write_json

DIRECTORY_VARIABLE = "MEKI_EDGE_HUB"
KEY_DIGITS = 20
INTENDED, SENT, DONE, FAILED, ABANDONED = "intended", "sent", "done", "failed", "abandoned"
STATES = (INTENDED, SENT, DONE, FAILED, ABANDONED)
UPLOADS = ("model", "dataset")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One upload (``kind`` model or dataset) or job (compile, link, profile, inference).

    ``name`` is what the service calls it, unique to this attempt. ``id`` is the service's, absent while
    it is only intended. ``reason`` is the service's own word on a failure. Times are ISO 8601, UTC.
    """

    kind: str
    key: str
    label: str
    service: str
    state: str
    name: str
    id: str | None = None
    device: str | None = None
    options: str = ""
    reason: str | None = None
    attempt: int = 1
    created: str = ""
    updated: str = ""


def default_directory() -> Path:
    """Where the ledger lies unless it is named: ``$MEKI_EDGE_HUB``, or ``~/.meki-edge/hub``."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named) if named else Path.home() / ".meki-edge" / "hub"


def request_key(kind: str, service: str, **identity: Any) -> str:
    """The key of a request: a digest of everything that makes it this one and no other."""
    text = json.dumps({"kind": kind, "service": service, **identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


class Ledger:
    """The entries under ``directory``; see the module's docstring."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("entries", "locks", "uploads"):
            try:
                (directory / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                fix = f"name a folder that can be written, with --ledger or ${DIRECTORY_VARIABLE}"
                raise UserError(f"no ledger can be kept here: {error.strerror}", where=directory, fix=fix) from None

    def get(self, key: str) -> Entry | None:
        """The entry of a key, or None if nothing like it was ever sent."""
        path = self._path(key)
        return _read(path) if path.is_file() else None

    def put(self, entry: Entry) -> Entry:
        """Write an entry; when this returns it is on the disk."""
        assert entry.state in STATES
        path = self._path(entry.key)
        write_json(path, config.to_dict(entry))
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the rename itself, not only the data
        finally:
            os.close(descriptor)
        return entry

    def update(self, entry: Entry, **changes: Any) -> Entry:
        """``put`` of an entry with some fields changed."""
        return self.put(dataclasses.replace(entry, **changes))

    def entries(self) -> list[Entry]:
        """Every entry, oldest first."""
        found = [_read(path) for path in (self.directory / "entries").glob("*.json")]
        return sorted(found, key=lambda entry: (entry.created, entry.key))

    def job(self, job_id: str) -> Entry:
        """The entry of a job, by the service's id.

        Raises:
            UserError: no job of that id was sent from here.
        """
        jobs = [entry for entry in self.entries() if entry.kind not in UPLOADS and entry.id]
        for entry in jobs:
            if entry.id == job_id:
                return entry
        known = ", ".join(str(entry.id) for entry in jobs[-5:]) or "none"
        raise UserError(
            f"no job {job_id!r} was submitted from here", where=self.directory, fix=f"the latest jobs: {known}"
        )

    def uploads(self, key: str, suffix: str) -> Path:
        """A file that belongs to the unfinished upload ``key``."""
        return self.directory / "uploads" / f"{key}{suffix}"

    @contextmanager
    def lock(self, key: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold a key against other processes and threads; ``waiting`` is called once if it is taken."""
        with open(self.directory / "locks" / key, "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if waiting is not None:
                    waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, key: str) -> Path:
        return self.directory / "entries" / f"{key}.json"


def _read(path: Path) -> Entry:
    fix = "repair the file, or remove it to forget that this was sent (its job may then be sent again)"
    try:
        entry = config.from_dict(Entry, read_json(path), path)
    except UserError as error:
        raise UserError(f"a broken entry of the ledger: {error.what}", where=path, fix=fix) from None
    if entry.state not in STATES:
        raise UserError(f"unknown state {entry.state!r}", where=path, fix=f"one of {', '.join(STATES)}")
    if entry.key != path.stem or (entry.id is None) != (entry.state == INTENDED):
        raise UserError(f"a broken entry of the ledger: key {entry.key!r}, id {entry.id!r}", where=path, fix=fix)
    return entry
