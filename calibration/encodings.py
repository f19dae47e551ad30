"""Encodings in AIMET's JSON form, version 1.0.0, which AI Hub and Qualcomm's converters read.

``activation_encodings`` and ``param_encodings`` list a tensor each: ``bw`` bits, ``scale`` and
``offset`` lists with ``real = (q + offset) · scale`` for unsigned q, so a symmetric tensor's offset is
-2^(bw-1). Scales of a weight are by output channel, and by block of input channels within one.
Names are those of the float graph. (``Docs/techniques/encoding_spec.rst`` of qualcomm/aimet.)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from calibration.affine import BITS
from calibration.weights import Quantized
from meki_edge.files import atomic_path
from meki_edge.graph_spec import Quantization

VERSION = "1.0.0"

Stored = tuple[str, Quantization]
"""The dtype of a tensor's integers, and what they mean."""


def file_name(graph: str) -> str:
    """The encodings of the graph file ``graph``."""
    return f"{Path(graph).stem}.encodings"


def write(
    path: Path,
    activations: Mapping[str, Stored],
    constants: Mapping[str, Stored],
    matrices: Mapping[str, Quantized],
) -> None:
    """Write one graph's encodings, a tensor a line; a weight at a time is in memory."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(f'{{"version": "{VERSION}",\n"activation_encodings": [\n')
        _write_lines(file, (per_tensor(name, *how) for name, how in activations.items()))
        file.write('],\n"param_encodings": [\n')
        tensors = (per_tensor(name, *how) for name, how in constants.items())
        _write_lines(file, itertools.chain(tensors, (matrix(name, found) for name, found in matrices.items())))
        file.write("]}\n")


def per_tensor(name: str, dtype: str, how: Quantization) -> dict[str, Any]:
    """The encoding of a tensor with one scale."""
    symmetric = how.zero_point == 2 ** (BITS[dtype] - 1)
    return {
        "name": name,
        "enc_type": "PER_TENSOR",
        "dtype": "INT",
        "bw": BITS[dtype],
        "is_sym": symmetric,
        "scale": [how.scale],
        "offset": [-how.zero_point],
    }


def matrix(name: str, found: Quantized) -> dict[str, Any]:
    """The encoding of a weight."""
    bits, size = BITS[found.scheme.weights], found.scheme.block_size
    scales = np.moveaxis(found.scales.numpy().astype(np.float32), found.channel_axis, 0)
    flat = [float(f"{scale:.9g}") for scale in np.ravel(scales)]
    return {
        "name": name,
        "enc_type": "PER_BLOCK" if size else "PER_CHANNEL",
        "dtype": "INT",
        "bw": bits,
        "is_sym": True,
        **({"block_size": size} if size else {}),
        "scale": flat,
        "offset": [-(2 ** (bits - 1))] * len(flat),
    }


def _write_lines(file: TextIO, entries: Iterable[dict[str, Any]]) -> None:
    for number, entry in enumerate(entries):
        file.write((",\n" if number else "") + json.dumps(entry))
    file.write("\n")
