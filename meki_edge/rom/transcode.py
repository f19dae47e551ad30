"""The rows of a ROM file in another codec: streamed, in bounded memory, whole or absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from meki_edge.errors import UserError
from meki_edge.graph_spec import Quantization
from meki_edge.rom import spec as rom_spec
from meki_edge.rom.codec import decode_rows
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import RomSpec
from meki_edge.rom.writer import RomWriter

BLOCK_BYTES = 1 << 26  # of rows, encoded and decoded


def transcode(
    source: Path,
    out: Path,
    codec: str,
    quantization: Quantization | None = None,
    *,
    checksums: bool | None = None,
    advance: Callable[[int], None] = lambda rows: None,
) -> RomSpec:
    """Write the rows of ``source`` to ``out`` in ``codec``; addresses and digests stay as they are.

    Args:
        quantization: of a static codec; None for all others.
        checksums: whether ``out`` has them; by default as ``source``. Those of ``source`` are checked.
        advance: told the number of rows after each block.

    Raises:
        UserError: an unknown codec, a codec without its quantization or with one that it cannot have,
            a damaged ``source``, a value that the codec cannot hold, no space, or ``out`` is ``source``.
    """
    chosen = rom_spec.codec(codec, "codec")
    if chosen.is_static != (quantization is not None):
        raise UserError(
            f"{codec} {'needs' if chosen.is_static else 'has no'} quantization of the whole file",
            where=out,
            fix="give a quantization with static8 and static16, and with no other codec",
        )
    if out.exists() and out.samefile(source):
        raise UserError("the output is the input", where=out, fix="write to another path")
    with RomReader(source) as plain:
        found = plain.spec
    with RomReader(source, verify_rows=found.checksums) as reader:
        spec = rom_spec.build(
            [(segment.layer, segment.memory, segment.dim) for segment in found.segments],
            codec,
            num_rows=found.num_rows,
            addressing=found.addressing,
            tokenizer_sha256=found.tokenizer_sha256,
            source_sha256=found.source_sha256,
            quantization=quantization,
            checksums=found.checksums if checksums is None else checksums,
        )
        step = max(1, BLOCK_BYTES // (found.row_stride + 4 * found.row_dim + spec.row_stride))
        with RomWriter(out, spec) as writer:
            for start in range(0, found.num_rows, step):
                stop = min(start + step, found.num_rows)
                raw = reader.raw_range(start, stop)
                writer.write(decode_rows(raw, found, np.arange(start, stop), source))
                advance(stop - start)
    return spec
