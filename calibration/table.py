"""The rows that the host reads: their range is that of the whole file, and one quantization serves both ends.

A row's integers in ``rom*.safetensors`` are the very integers that the graph takes: the file is
written anew in the codec ``static8`` or ``static16`` with the scale and zero point of the graph's
input. Nothing is dequantized and quantized again on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from calibration.ranges import Observations
from meki_edge import console
from meki_edge.graph_spec import Quantization
from meki_edge.rom.codec import decode_rows
from meki_edge.rom.reader import RomReader
from meki_edge.rom.transcode import transcode

BLOCK_BYTES = 1 << 25  # of decoded rows
STATIC = {"uint8": "static8", "uint16": "static16"}


def observe_rows(reader: RomReader, key: str, observations: Observations) -> None:
    """Count every row of a file as values of the tensor ``key``: no token is left out, however rare."""
    spec = reader.spec
    step = max(1, BLOCK_BYTES // (4 * spec.row_dim))
    with console.byte_progress(f"range of {reader.path.name}", spec.num_rows * spec.row_stride) as advance:
        for start in range(0, spec.num_rows, step):
            stop = min(start + step, spec.num_rows)
            rows = decode_rows(reader.raw_range(start, stop), spec, np.arange(start, stop), reader.path)
            observations.add_extremes(key, float(rows.min()), float(rows.max()), name=reader.path.name)
            if observations.histogram:
                observations.add_sample(key, rows)
            advance((stop - start) * spec.row_stride)


def write_static(source: Path, out: Path, dtype: str, quantization: Quantization) -> None:
    """Write the rows of ``source`` to ``out`` as the integers that the graph takes."""
    with RomReader(source) as reader:
        total = reader.spec.num_rows
    with console.progress() as bar:
        task = bar.add_task(f"quantize {out.name} (rows)", total=total)
        advance: Callable[[int], None] = lambda rows: bar.advance(task, rows)
        transcode(source, out, STATIC[dtype], quantization, advance=advance)
