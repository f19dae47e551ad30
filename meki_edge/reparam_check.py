"""Is a ROM file the fold of this checkpoint? ``meki-edge verify --checkpoint`` folds rows again and compares.

The fold is float32, and processors round its sums differently. So a stored element is right if it lies
within half a step of its codec of the recomputed value, plus a little of the row's largest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import Progress

from meki_edge import console, manifest
from meki_edge.errors import UserError
from meki_edge.manifest import Manifest
from meki_edge.model.checkpoint import Checkpoint
from meki_edge.model.row_spaces import RowSpace, row_spaces
from meki_edge.reparam_fold import FOLD_BYTES, Folder, same_addressing
from meki_edge.rom.codec import decode_rows, half_steps, name_of
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import CODECS, RomSpec

STRETCHES, STRETCH_ROWS = 64, 16
"""A sample: so many runs of so many rows, evenly spread, the first and the last row among them."""
CHUNK_ROWS = 1024
ROUNDING = 1e-4  # of a segment's largest value: what float32 sums may differ by from machine to machine


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A segment of a row that is not what the checkpoint folds to."""

    row: int
    name: str
    """The token and the layer, for people."""
    difference: float
    """The largest, between a stored and a recomputed element."""


@dataclass(frozen=True, kw_only=True)
class FoldCheck:
    """What comparing found."""

    rows: int
    """How many rows were folded again."""
    mismatches: tuple[Mismatch, ...]


def check_folds(roms: Sequence[Path], checkpoint: Path, *, all_rows: bool) -> dict[str, FoldCheck]:
    """Fold rows of ``checkpoint`` (training form) again and compare them with the files ``roms``; by file name.

    Raises:
        UserError: the checkpoint is not a trained one or has changed; the digests of weights or
            tokenizer, the layout or the addresses are another model's; a damaged file.
    """
    source = manifest.load(checkpoint, stages=("train", "reparam"))
    with console.byte_progress("digests", sum(entry.bytes for entry in source.files.values())) as advance:
        manifest.verify(checkpoint, source, advance)
    with Checkpoint(checkpoint) as opened, console.progress() as bar:
        return {rom.name: _check(rom, opened, source, all_rows, bar) for rom in roms}


def _check(rom: Path, opened: Checkpoint, source: Manifest, all_rows: bool, bar: Progress) -> FoldCheck:
    with RomReader(rom) as reader:
        _require_origin(reader, source, opened)
        folder = Folder(opened, _space_of(reader, opened))
        if not same_addressing(folder.addressing, reader.spec.addressing):
            raise _another("the addresses of its rows are not the checkpoint's", rom)
        stretches = _stretches(reader.spec, all_rows)
        total = sum(stop - start for start, stop in stretches)
        task = bar.add_task(f"fold {rom.name} again (rows)", total=total)
        mismatches: list[Mismatch] = []
        for start, stop in stretches:
            mismatches += _compare(folder.fold(start, stop), reader.raw_range(start, stop), start, reader)
            bar.advance(task, stop - start)
    return FoldCheck(rows=total, mismatches=tuple(mismatches))


def _require_origin(reader: RomReader, source: Manifest, opened: Checkpoint) -> None:
    directory = opened.directory
    if opened.config.folded or not opened.config.memories:
        raise UserError(
            "the checkpoint has no tables to fold",
            where=directory,
            fix="give the trained checkpoint that `meki-edge reparam` read",
        )
    if reader.spec.quantization is not None:
        raise UserError(
            "the rows were quantized again after they were folded",
            where=reader.path,
            fix="compare the ROM file that `meki-edge reparam` wrote; the manifests tell which one was quantized",
        )
    for role, found in (("weights", reader.spec.source_sha256), ("tokenizer", reader.spec.tokenizer_sha256)):
        expected = source.files[source.file(directory, role).name].sha256
        if found != expected:
            raise _another(f"it was made from another {role} file: SHA-256 {found[:12]}…, not {expected[:12]}…", reader.path)


def _space_of(reader: RomReader, opened: Checkpoint) -> RowSpace:
    """The checkpoint's row space with the file's segments."""
    listed = [(segment.layer, segment.memory, segment.dim) for segment in reader.spec.segments]
    for space in row_spaces(opened.config):
        members = [(member.layer, member.number, member.dim) for member in space.members]
        if members == listed and (space.addressing, space.num_rows) == (reader.spec.addressing.kind, reader.spec.num_rows):
            return space
    raise _another("no memories of the checkpoint have its rows and segments", reader.path)


def _another(what: str, rom: Path) -> UserError:
    return UserError(what, where=rom, fix="give the checkpoint that the file was folded from, or fold it again")


def _stretches(spec: RomSpec, all_rows: bool) -> list[tuple[int, int]]:
    count = spec.num_rows
    if all_rows or count <= STRETCHES * STRETCH_ROWS:
        step = max(1, min(CHUNK_ROWS, FOLD_BYTES // (4 * spec.row_dim + spec.row_stride)))
        return [(start, min(start + step, count)) for start in range(0, count, step)]
    starts = np.linspace(0, count - STRETCH_ROWS, STRETCHES).astype(int).tolist()
    return [(start, start + STRETCH_ROWS) for start in starts]


def _compare(values: np.ndarray, raw: np.ndarray, start: int, reader: RomReader) -> list[Mismatch]:
    spec = reader.spec
    stored = decode_rows(raw, spec, np.arange(start, start + len(raw)), reader.path)
    found, column = [], 0
    for segment in spec.segments:
        columns = slice(column, column + segment.dim)
        column += segment.dim
        folded = values[:, columns]
        difference = np.abs(stored[:, columns] - folded)
        slack = ROUNDING * np.abs(folded).max(axis=1, keepdims=True)
        # Written so that NaN, too, is a mismatch.
        wrong = ~(difference <= half_steps(raw, stored[:, columns], segment, CODECS[segment.codec]) + slack)
        for index in np.flatnonzero(wrong.any(axis=1)).tolist():
            row = start + index
            name = f"{spec.addressing.name_of(row)}, {name_of(segment)}"
            found.append(Mismatch(row=row, name=name, difference=float(difference[index].max())))
    return sorted(found, key=lambda mismatch: mismatch.row)
