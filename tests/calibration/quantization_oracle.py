"""What the integers of a quantization mean, by definition."""

from __future__ import annotations

import numpy as np

from meki_edge.graph_spec import Quantization


def dequantize(codes: np.ndarray, how: Quantization) -> np.ndarray:
    """``(q - zero_point) * scale`` in float32, as ``DequantizeLinear``."""
    return (codes.astype(np.int32) - how.zero_point).astype(np.float32) * np.float32(how.scale)


def dequantize_weight(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 ``[K, N]`` that ``codes`` and ``scales`` stand for."""
    repeated = scales if scales.ndim == 1 else np.repeat(scales, len(codes) // len(scales), axis=0)
    return codes.astype(np.float32) * repeated
