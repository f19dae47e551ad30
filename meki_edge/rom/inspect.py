"""What a ROM file holds, and whether every row of it is sound: ``meki-edge inspect`` and ``verify``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.rom.codec import DAMAGED, faults, padding
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import CODECS, VERSION

BLOCK_BYTES = 1 << 25
SHOWN = 20
"""Damaged rows of a file that are told of; the others are counted."""


def describe(path: Path) -> dict[str, Any]:
    """The facts of the header, as JSON: sizes in bytes, and how many segments share dim and codec.

    Raises:
        UserError: not a ROM file that this version knows.
    """
    with RomReader(path) as reader:
        spec = reader.spec
        file_bytes = path.stat().st_size
    kinds = Counter((segment.dim, segment.codec) for segment in spec.segments)
    return {
        "version": VERSION,
        "addressing": spec.addressing.kind,
        "rows_per_token": spec.addressing.rows_per_token,
        "num_tokens": spec.num_tokens,
        "file_bytes": file_bytes,
        "num_rows": spec.num_rows,
        "row_dim": spec.row_dim,
        "row_bytes": spec.row_bytes,
        "row_stride": spec.row_stride,
        "layers": sorted({segment.layer for segment in spec.segments}),
        "segments": [
            {"count": count, "dim": dim, "codec": codec, "bytes": CODECS[codec].num_bytes(dim)}
            for (dim, codec), count in kinds.items()
        ],
        **({"quantization": to_dict(spec.quantization)} if spec.quantization else {}),
        "checksums": spec.checksums,
        "tokenizer_sha256": spec.tokenizer_sha256,
        "source_sha256": spec.source_sha256,
    }


def has_checksums(path: Path) -> bool:
    """Whether the ROM file has a checksum of every row."""
    with RomReader(path) as reader:
        return reader.spec.checksums


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What walking all rows of a file found."""

    rows: int
    damaged: int
    """How many of them are not sound."""
    first: tuple[str, ...]
    """Of the first damaged ones, which row it is and what is wrong with it; at most ``SHOWN``."""


def scan(path: Path, advance: Callable[[int], None] | None = None) -> Scan:
    """Walk all rows in bounded memory, past those that are damaged.

    A row is damaged if its checksum does not match (if the file has them), if a scale or an element
    is not finite, or if a padding bit is set; it is told of once, by the first of these.

    Args:
        advance: told the number of rows after each block.

    Raises:
        UserError: the header is wrong, or a tensor of the addressing is not as it was written.
    """
    damaged, first = 0, []
    with RomReader(path, verify_rows=has_checksums(path)) as reader:
        spec = reader.spec
        unused = padding(spec)
        step = max(1, BLOCK_BYTES // spec.row_stride)
        for start in range(0, spec.num_rows, step):
            raw, wrong = reader.compared_range(start, min(start + step, spec.num_rows))
            bad, told = _damaged(len(raw), _checks(raw, wrong, spec, unused))
            damaged += int(bad.sum())
            first += [f"row {start + row}{told[row]}" for row in sorted(told)][: SHOWN - len(first)]
            if advance is not None:
                advance(len(raw))
    return Scan(rows=spec.num_rows, damaged=damaged, first=tuple(first))


def verify(path: Path, sha256: str | None = None, advance: Callable[[int], None] | None = None) -> int:
    """As :func:`scan`, but a damaged row is an error; return how many rows there are.

    Args:
        sha256: what the file's digest must be (a manifest knows it).
        advance: as :func:`scan`.

    Raises:
        UserError: as :func:`scan`; the digest is wrong, or a row is damaged.
    """
    if sha256 is not None and (found := sha256_file(path)) != sha256:
        raise UserError(f"the file's SHA-256 is {found[:12]}…, not {sha256[:12]}…", where=path, fix=DAMAGED)
    walked = scan(path, advance)
    if walked.damaged:
        raise UserError(walked.first[0], where=path, fix=DAMAGED)
    return walked.rows


def _checks(
    raw: np.ndarray, wrong: np.ndarray, spec: RomSpec, unused: np.ndarray
) -> Iterator[tuple[np.ndarray, str]]:
    """Each check of rows, uint8 ``[n, row_stride]``: which fail it (bool ``[n]``), and what is said of them."""
    yield wrong, ": the checksum does not match"
    yield from faults(raw, spec)
    yield (raw & unused).any(axis=1), ": the padding is not zero"


def _damaged(count: int, checks: Iterable[tuple[np.ndarray, str]]) -> tuple[np.ndarray, dict[int, str]]:
    """Which of ``count`` rows fail a check, and what is said of the first ``SHOWN`` and perhaps some more."""
    bad, told = np.zeros(count, bool), {}
    for failed, what in checks:
        told |= dict.fromkeys(np.flatnonzero(failed & ~bad)[:SHOWN].tolist(), what)
        bad |= failed
    return bad, told
