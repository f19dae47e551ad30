"""What a ROM file holds, and whether every row of it is sound: ``meki-edge inspect`` and ``verify``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.rom.codec import DAMAGED, decode_rows, padding
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import CODECS, VERSION

BLOCK_BYTES = 1 << 25


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


def verify(path: Path, sha256: str | None = None, advance: Callable[[int], None] | None = None) -> int:
    """Walk all rows in bounded memory; return how many there are.

    Args:
        sha256: what the file's digest must be (a manifest knows it).
        advance: told the number of rows after each block.

    Raises:
        UserError: the header or the digest is wrong, a checksum does not match (if the file has
            them), a scale or an element is not finite, or a padding bit is set.
    """
    if sha256 is not None and (found := sha256_file(path)) != sha256:
        raise UserError(
            f"the file's SHA-256 is {found[:12]}…, not {sha256[:12]}…",
            where=path,
            fix=DAMAGED,
        )
    with RomReader(path, verify_rows=has_checksums(path)) as reader:
        spec = reader.spec
        unused = padding(spec)
        step = max(1, BLOCK_BYTES // spec.row_stride)
        for start in range(0, spec.num_rows, step):
            raw = reader.raw_range(start, min(start + step, spec.num_rows))
            ids = np.arange(start, start + len(raw))
            decode_rows(raw, spec, ids, path)
            dirty = (raw & unused).any(axis=1)
            if dirty.any():
                raise UserError(f"row {ids[dirty][0]}: the padding is not zero", where=path, fix=DAMAGED)
            if advance is not None:
                advance(len(raw))
    return spec.num_rows
