"""Uploads: nothing twice, and an interrupted one goes on where it stopped.

What was uploaded is found again in the ledger by its contents, whatever run, arm or directory it
came from. While a model is under way, its archive and the storage's answers lie in the ledger's
directory, so that also another process can go on; they go when it is done.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from export.hub_jobs import Jobs, now
from export.hub_ledger import DONE, INTENDED, SENT, Entry, Ledger, request_key
from export.hub_service import Expired, NotFound, UploadLinks
from export.hub_source import Unit, write_archive
from meki_edge import config, console
from meki_edge.errors import UserError
from meki_edge.files import read_json, write_json


Progress = Callable[[int], None]  # told how far into the archive we are; a part that is sent again goes back


class Storage(Protocol):
    """What uploading needs of the service; :class:`export.aihub.AiHub` has it."""

    service: str

    def create_model(self, name: str) -> str: ...
    def open_upload(self, model_id: str, archive: Path, progress: Progress) -> UploadLinks | None: ...
    def send_part(self, archive: Path, links: UploadLinks, index: int, progress: Progress) -> str: ...
    def close_upload(self, model_id: str, archive: Path, links: UploadLinks) -> None: ...
    def is_uploaded(self, model_id: str) -> bool: ...
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
                self._clean(key)
                entry = self._ledger.put(self._entry("model", key, label))
                model_id = self._jobs.patiently(lambda: self._hub.create_model(entry.name))
                entry = self._ledger.update(entry, id=model_id, state=SENT, updated=now())
            try:
                self._send(unit, entry)
            except NotFound:  # announced long ago, and removed since
                self._forget(entry)
                raise UserError(
                    f"the service no longer knows the unfinished upload of {label}",
                    where=self._hub.service,
                    fix="run the same command again: it is uploaded anew",
                ) from None
            self._ledger.update(entry, state=DONE, updated=now())
            return entry.id or ""

    def forget_model(self, unit: Unit, model_id: str) -> None:
        """The service does not have it any more (unless another run has uploaded it anew meanwhile)."""
        key = request_key("model", self._hub.service, digest=unit.digest)
        with self._ledger.lock(key):
            entry = self._ledger.get(key)
            if entry is not None and entry.id == model_id:
                self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self._ledger.update(entry, state=INTENDED, id=None, updated=now())
        self._clean(entry.key)

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
        if not zipfile.is_zipfile(archive):
            self._clean(entry.key)
            with console.byte_progress(f"packing {entry.label}", unit.num_bytes) as advance:
                write_archive(unit, archive, advance)
        position = 0
        with console.byte_progress(f"uploading {entry.label}", archive.stat().st_size) as advance:

            def progress(at: int) -> None:
                nonlocal position
                advance(at - position)
                position = at

            self._jobs.patiently(lambda: self._transfer(entry, archive, progress))
        self._clean(entry.key)

    def _transfer(self, entry: Entry, archive: Path, progress: Progress) -> None:
        """Send the parts that the storage does not have; once, its links may have expired."""
        model_id = entry.id or ""
        links = self._saved(entry.key, archive)
        for last_try in (False, True):
            if links is None:
                links = self._hub.open_upload(model_id, archive, progress)
                if links is None:  # all of it is there
                    return
                self._save(entry.key, links)
            try:
                for index in range(len(links.etags), len(links.urls)):
                    etag = self._hub.send_part(archive, links, index, progress)
                    links = dataclasses.replace(links, etags=(*links.etags, etag))
                    self._save(entry.key, links)
                self._hub.close_upload(model_id, archive, links)
                return
            except Expired:
                if self._hub.is_uploaded(model_id):  # the answer to the last request was lost
                    return
                if last_try:
                    raise
                links = None
                progress(0)

    def _saved(self, key: str, archive: Path) -> UploadLinks | None:
        """Where an earlier run stopped; None if it left nothing that can be used."""
        path = self._ledger.uploads(key, ".json")
        if not path.is_file():
            return None
        try:
            links = config.from_dict(UploadLinks, read_json(path), path)
        except UserError as error:
            console.info(f"the notes of an unfinished upload are broken, it starts again ({error.what}: {path})")
            return None
        return links if links.whole and links.bytes == archive.stat().st_size else None

    def _save(self, key: str, links: UploadLinks) -> None:
        """The links let their holder write: they are for the user's eyes alone."""
        previous = os.umask(0o077)
        try:
            write_json(self._ledger.uploads(key, ".json"), config.to_dict(links))
        finally:
            os.umask(previous)

    def _clean(self, key: str) -> None:
        """Remove what belongs to an upload, also what a run that was killed was writing. Needs its lock."""
        for path in self._ledger.uploads(key, "").parent.glob(f"*{key}*"):
            path.unlink(missing_ok=True)

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
