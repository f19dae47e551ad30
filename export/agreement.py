"""How well what a device or a simulator computed follows ONNX Runtime on the CPU."""

from __future__ import annotations

import numpy as np


def agreement(found: np.ndarray, expected: np.ndarray) -> dict[str, float | int]:
    """Figures for rows ``[N, W]``, in float64; of two equal rows, also of zeros, the cosine is 1."""
    wide, reference = found.astype(np.float64), expected.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=-1) * np.linalg.norm(reference, axis=-1)
    cosine = (wide * reference).sum(axis=-1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    same = (wide == reference).all(axis=-1)
    return {
        "tokens": len(found),
        "min_cosine": float(np.where(same, 1.0, cosine).min()),
        "max_abs_error": float(np.abs(wide - reference).max()),
        "argmax_agreement": float((wide.argmax(axis=-1) == reference.argmax(axis=-1)).mean()),
    }
