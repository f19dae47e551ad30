"""The weights of the quantized graphs, in one file that prefill and decode share.

Each weight is read from the float export, quantized, and appended, one at a time: what is in memory
is one weight and its codes, however large the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from calibration.affine import pack_int4, quantize_weight
from calibration.precision import FLOAT16, WEIGHT_BITS, Scheme

ALIGNMENT = 4096  # a page, so that the runtime can map each weight on its own
INLINE_BYTES = 1024  # smaller tensors lie in the graph itself
DTYPES = {
    "int4": ir.DataType.INT4,
    "int8": ir.DataType.INT8,
    "int16": ir.DataType.INT16,
    "uint8": ir.DataType.UINT8,
    "uint16": ir.DataType.UINT16,
    FLOAT16: ir.DataType.FLOAT16,
}


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A weight in the file: ``codes`` and their ``scales``, with the scheme that was used in the end.

    ``zero_points`` are all zero; without them the NPU compiler misreads 4-bit codes, silently.
    """

    codes: ir.TensorProtocol
    scales: ir.TensorProtocol
    zero_points: ir.TensorProtocol | None
    channel_axis: int
    """The axis of ``scales`` that runs over output channels; the other, if any, over blocks."""
    scheme: Scheme


class WeightFile:
    """Append-only; use as a context manager. What was added under a name is not added again.

    Args:
        path: written as the weights come.
        advance: told the float32 bytes of each weight that is done.
    """

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        self._path, self._advance = path, advance
        self._added: dict[tuple[str, str], Quantized | ir.TensorProtocol] = {}
        self._file: BinaryIO

    def __enter__(self) -> WeightFile:
        self._file = open(self._path, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def quantized(self, value: ir.Value, scheme: Scheme) -> Quantized:
        """The matrix ``value`` ``[K, N]`` in integers of ``scheme``: codes as they are, scales float32."""
        return self._once(value, f"codes {scheme}", lambda weight: self._quantize(value.name, weight, scheme))

    def blocks(self, value: ir.Value, scheme: Scheme) -> Quantized:
        """The matrix as MatMulNBits takes it: unsigned codes ``[N, K/B, bytes of a block]`` whose zero lies in the
        middle, scales float16 ``[N, K/B]``."""
        return self._once(value, f"blocks {scheme}", lambda weight: self._pack_blocks(value.name, weight, scheme))

    def float16(self, value: ir.Value) -> ir.TensorProtocol:
        """Any weight in float16."""

        def convert(weight: np.ndarray) -> ir.TensorProtocol:
            return self._append(value.name, weight.astype(np.float16), FLOAT16)

        return self._once(value, FLOAT16, convert)

    def float32(self, value: ir.Value) -> ir.TensorProtocol:
        """Any weight as it is."""
        return self._once(value, "float32", lambda weight: self._append(value.name, weight, "float32"))

    def _once(self, value: ir.Value, form: str, make: Callable[[np.ndarray], object]) -> object:
        key = value.name, form
        if key not in self._added:
            weight = value.const_value.numpy()
            self._added[key] = make(weight)
            self._advance(weight.nbytes)
        return self._added[key]

    def _quantize(self, name: str, weight: np.ndarray, scheme: Scheme) -> Quantized:
        own = scheme.of_matrix(len(weight))
        codes, scales = quantize_weight(weight, own.weights, block_size=own.block_size)
        return Quantized(
            codes=self._append(f"{name}_codes", codes, own.weights),
            scales=self._append(f"{name}_scales", scales, "float32"),
            zero_points=self._append(f"{name}_zero_points", np.zeros(scales.shape, codes.dtype), own.weights),
            channel_axis=scales.ndim - 1,
            scheme=own,
        )

    def _pack_blocks(self, name: str, weight: np.ndarray, scheme: Scheme) -> Quantized:
        size, bits = scheme.block_size, WEIGHT_BITS[scheme.weights]
        codes, scales = quantize_weight(weight, scheme.weights, block_size=size)
        unsigned = (codes.view(np.uint8) + np.uint8(1 << (bits - 1))) & np.uint8((1 << bits) - 1)
        packed = np.ascontiguousarray(unsigned.T).reshape(weight.shape[1], -1, size)
        if bits == 4:
            packed = packed[..., 0::2] | (packed[..., 1::2] << 4)
        halves = np.ascontiguousarray(scales.T).astype(np.float16)
        return Quantized(
            codes=self._append(f"{name}_codes", packed, "uint8"),
            scales=self._append(f"{name}_scales", halves, FLOAT16),
            zero_points=None,
            channel_axis=0,
            scheme=scheme,
        )

    def _append(self, name: str, array: np.ndarray, dtype: str) -> ir.TensorProtocol:
        kind = DTYPES.get(dtype, ir.DataType.FLOAT)
        data = pack_int4(array) if dtype == "int4" else np.ascontiguousarray(array)
        if data.nbytes < INLINE_BYTES:
            if dtype == "int4":
                return ir.PackedTensor(data, kind, shape=array.shape, name=name)
            return ir.Tensor(data, kind, name=name)
        start = -(-self._file.tell() // ALIGNMENT) * ALIGNMENT
        self._file.write(bytes(start - self._file.tell()))
        self._file.write(memoryview(data).cast("B"))
        self._file.flush()
        return ir.ExternalTensor(
            self._path.name,
            start,
            data.nbytes,
            kind,
            shape=ir.Shape(array.shape),
            name=name,
            base_dir=self._path.parent,
        )
