"""A sound ROM file to spoil."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meki_edge.rom.addressing import Identity
from meki_edge.rom.spec import build
from meki_edge.rom.writer import RomWriter

NUM_ROWS = 20
DIMS = [(0, 0, 12), (1, 0, 33), (1, 1, 5), (2, 0, 64)]


def written(path: Path, dims: list[tuple[int, int, int]], codec: str, num_rows: int) -> Path:
    """A sound file of random rows."""
    digests = {"tokenizer_sha256": "t" * 64, "source_sha256": "s" * 64}
    spec = build(dims, codec, num_rows=num_rows, addressing=Identity(), **digests)
    with RomWriter(path, spec) as writer:
        writer.write(np.random.default_rng(0).standard_normal((num_rows, spec.row_dim), dtype=np.float32))
    return path
