"""Uploads: nothing twice, and an interrupted one goes on where it stopped.

What was uploaded is found again in the ledger by its contents, whatever run, arm or directory it
came from. While a model is under way, its archive and the storage's answers lie in the ledger's
directory, so that also another process can go on; they go when it is done.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from export.hub_jobs import Jobs, now
from export.hub_ledger import DONE, INTENDED, SENT, Entry, Ledger, request_key
from export.hub_service import NotFound
from export.hub_source import Unit, write_archive
from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import read_json, write_json


class Storage(Protocol):
    """What uploading needs of the service; :class:`export.aihub.AiHub` has it."""

    service: str

    def create_model(self, name: str) -> str: ...
    def send_model(self, model_id: str, archive: Path, resume: Any, save: Any, progress: Any) -> None: ...
    def create_dataset(self, name: str, entries: Mapping[str, list[np.ndarray]]) -> str: ...
    def dataset_usable(self, dataset_id: str) -> bool: ...


class Uploads:
    """Models and datasets at the service, by their contents."""

    def __init__(self, hub: Storage, ledger: Ledger, jobs: Jobs) -> None:
        self._hub, self._ledger, self._jobs = hub, ledger, jobs

    def model(self, unit: Unit, label: str) -> str:
        """The service's id of a unit, uploaded now unless it is there already."""
        key = request_key("model", self._hub.service, digest=unit.digest)
        with self._ledger.lock(key, lambda: console.info(f"another run is uploading {label}: waiting for it")):
            entry = self._ledger.get(key)
            if entry is not None and entry.state == DONE:
                return entry.id or ""
            if entry is None or entry.id is None:
                entry = self._ledger.put(self._entry("model", key, label))
                model_id = self._jobs.patiently(lambda: self._hub.create_model(entry.name))
                entry = self._ledger.update(entry, id=model_id, state=SENT, updated=now())
            try:
                self._send(unit, entry)
            except NotFound:  # announced long ago, and removed since
                self.forget_model(unit)
                raise UserError(
                    f"the service no longer knows the unfinished upload of {label}",
                    where=self._hub.service,
                    fix="run the same command again: it is uploaded anew",
                ) from None
            self._ledger.update(entry, state=DONE, updated=now())
            return entry.id or ""

    def forget_model(self, unit: Unit) -> None:
        """The service does not have it any more."""
        key = request_key("model", self._hub.service, digest=unit.digest)
        entry = self._ledger.get(key)
        if entry is not None:
            self._ledger.update(entry, state=INTENDED, id=None, updated=now())
        self._clean(key)

    def dataset(self, entries: Mapping[str, list[np.ndarray]], label: str) -> str:
        """The service's id of a dataset, uploaded now unless it is there already and not expired."""
        key = request_key("dataset", self._hub.service, digest=dataset_digest(entries))
        with self._ledger.lock(key, lambda: console.info(f"another run is uploading {label}: waiting for it")):
            entry = self._ledger.get(key)
            if entry is not None and entry.state == DONE:
                if self._jobs.patiently(lambda: self._hub.dataset_usable(entry.id or "")):
                    return entry.id or ""
            entry = self._ledger.put(self._entry("dataset", key, label))
            with console.progress() as bar:
                task = bar.add_task(f"uploading {label}", total=1)
                dataset_id = self._jobs.patiently(lambda: self._hub.create_dataset(entry.name, entries))
                bar.advance(task)
            self._ledger.update(entry, id=dataset_id, state=DONE, updated=now())
            return dataset_id

    def _send(self, unit: Unit, entry: Entry) -> None:
        archive = self._ledger.uploads(entry.key, ".zip")
        if not archive.is_file():
            for stale in archive.parent.glob(f".{archive.name}.*"):  # of a run that was killed; we hold the lock
                stale.unlink()
            with console.byte_progress(f"packing {entry.label}", unit.num_bytes) as advance:
                write_archive(unit, archive, advance)
        position = 0
        with console.byte_progress(f"uploading {entry.label}", archive.stat().st_size) as advance:

            def progress(at: int) -> None:
                nonlocal position
                advance(at - position)
                position = at

            def send() -> None:
                saved = self._resume(entry.key)
                save = functools.partial(self._save, entry.key)
                self._hub.send_model(entry.id or "", archive, saved, save, progress)

            self._jobs.patiently(send)
        self._clean(entry.key)

    def _resume(self, key: str) -> dict[str, Any] | None:
        path = self._ledger.uploads(key, ".json")
        return read_json(path) if path.is_file() else None

    def _save(self, key: str, state: dict[str, Any]) -> None:
        """The state holds links that let their holder write: for the user's eyes alone."""
        path = self._ledger.uploads(key, ".json")
        previous = os.umask(0o077)
        try:
            write_json(path, state)
        finally:
            os.umask(previous)

    def _clean(self, key: str) -> None:
        for suffix in (".zip", ".json"):
            self._ledger.uploads(key, suffix).unlink(missing_ok=True)

    def _entry(self, kind: str, key: str, label: str) -> Entry:
        return Entry(
            kind=kind,
            key=key,
            label=label,
            service=self._hub.service,
            state=INTENDED,
            name=f"{label} {key}",
            created=now(),
            updated=now(),
        )


def dataset_digest(entries: Mapping[str, list[np.ndarray]]) -> str:
    """A digest of names, shapes, dtypes and values."""
    digest = hashlib.sha256()
    for name, arrays in entries.items():
        digest.update(json.dumps([name, len(arrays)]).encode())
        for array in arrays:
            digest.update(json.dumps([str(array.dtype), list(array.shape)]).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
