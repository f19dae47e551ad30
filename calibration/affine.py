"""Uniform quantization, as ONNX defines it: ``real = (q - zero_point) * scale``.

Pure NumPy on arrays. Activations have one scale and zero point a tensor; weights are symmetric,
with a scale an output channel, or a scale a block of input channels of each output channel.

Shapes: K input channels, N output channels, B elements of a block.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from meki_edge.graph_spec import Quantization

BITS = {"uint8": 8, "uint16": 16, "int4": 4, "int8": 8, "int16": 16}
MIN_SPAN = 1e-6
"""Narrowest range of an activation: a tensor that is always zero still gets a scale."""
SHRINKS = np.linspace(1.0, 0.5, 11, dtype=np.float32)
"""Scales tried by the search, relative to the one that clips nothing."""
BLOCK_ELEMENTS = 1 << 18  # elements of a weight that a thread works on at a time, so that they stay in its cache


@dataclass(frozen=True, kw_only=True)
class Range:
    """The reals that a tensor is allowed to take."""

    low: float
    high: float

    def __or__(self, other: Range) -> Range:
        return Range(low=min(self.low, other.low), high=max(self.high, other.high))


UNIT = Range(low=0.0, high=1.0)
"""What softmax and sigmoid give; the NPU's kernels have a scale of 2^-bits for it, and no zero point."""


def limits(dtype: str) -> tuple[int, int]:
    """The smallest and the largest integer of ``dtype``."""
    bits = BITS[dtype]
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def quantization(found: Range, dtype: str, *, symmetric: bool = False) -> Quantization:
    """The scale and zero point with which unsigned ``dtype`` covers ``found`` and zero.

    ``symmetric`` puts the zero point in the middle, so that the integers suit a signed kernel.
    """
    least, most = limits(dtype)
    if symmetric:
        middle = (most + 1) // 2
        reach = max(abs(found.low), abs(found.high), MIN_SPAN / 2)
        return Quantization(scale=_stored(reach / (most - middle)), zero_point=middle)
    if found == UNIT:
        return Quantization(scale=2.0 ** -BITS[dtype], zero_point=0)
    low, high = min(found.low, 0.0), max(found.high, 0.0)
    scale = _stored(max(high - low, MIN_SPAN) / (most - least))
    return Quantization(scale=scale, zero_point=int(np.clip(np.rint(-low / scale), least, most)))


def quantize(values: np.ndarray, how: Quantization, dtype: str) -> np.ndarray:
    """``QuantizeLinear``: round half to even, saturate."""
    rounded = np.rint(values.astype(np.float32) / np.float32(how.scale)) + how.zero_point
    return np.clip(rounded, *limits(dtype)).astype(dtype)


def quantize_weight(
    weight: np.ndarray, dtype: str, *, block_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric codes ``[K, N]`` (int8, or int16) of ``weight`` ``[K, N]``, and their scales.

    Scales are float32 ``[N]``, or ``[K / B, N]`` with ``block_size``. Codes lie within ``dtype``'s
    limits. With 8 bits and more a scale clips nothing. With 4, where rounding costs most, smaller
    scales are tried too: they clip the largest weights and round all others finer, and the one with
    the least squared error is kept.
    """
    num_rows, num_columns = weight.shape
    assert block_size is None or num_rows % block_size == 0, "blocks must fill the input channels"
    group = block_size or num_rows
    codes = np.empty(weight.shape, np.int16 if BITS[dtype] > 8 else np.int8)
    scales = np.empty((num_rows // group, num_columns), np.float32)

    def fill(first: int) -> None:
        columns = slice(first, first + step)
        grouped = np.ascontiguousarray(weight[:, columns]).reshape(num_rows // group, group, -1)
        found = _scales(grouped, dtype)
        scales[:, columns] = found
        codes[:, columns] = _codes(grouped, found[:, None, :], dtype).reshape(num_rows, -1)

    step = max(BLOCK_ELEMENTS // num_rows, 1)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy lets other threads run
        list(pool.map(fill, range(0, num_columns, step)))
    return codes, scales if block_size else scales[0]


def pack_int4(codes: np.ndarray) -> np.ndarray:
    """int8 codes as ONNX stores int4: uint8, two to a byte in row-major order, the first in the low nibble."""
    flat = np.ravel(codes).view(np.uint8) & 0x0F
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return flat[0::2] | (flat[1::2] << 4)


def _scales(grouped: np.ndarray, dtype: str) -> np.ndarray:
    """A scale float32 ``[G, N]`` for each group of ``grouped`` ``[G, B, N]``."""
    largest = np.maximum(grouped.max(axis=1), -grouped.min(axis=1))
    full = np.where(largest > 0, largest / np.float32(limits(dtype)[1]), np.float32(1))
    full = np.maximum(full, np.finfo(np.float32).tiny)
    if BITS[dtype] > 4:
        return full
    best, least = full, np.full(full.shape, np.inf, np.float32)
    for shrink in SHRINKS:
        scales = full * shrink
        difference = _codes(grouped, scales[:, None, :], dtype)
        difference *= scales[:, None, :]
        difference -= grouped
        errors = np.einsum("gbn,gbn->gn", difference, difference)
        better = errors < least
        best, least = np.where(better, scales, best), np.where(better, errors, least)
    return best


def _codes(grouped: np.ndarray, scales: np.ndarray, dtype: str) -> np.ndarray:
    quotient = grouped / scales
    np.rint(quotient, out=quotient)
    return np.clip(quotient, *limits(dtype), out=quotient)


def _stored(scale: float) -> float:
    """The float32 that a graph and a ROM file keep, as a Python float."""
    return float(np.float32(scale))
