"""Statistics of repeated measurements: summaries and paired ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
MIN_PAIRS = 3  # an interval from fewer rounds would only look like knowledge


def samples(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (None for a single value) and the values themselves."""
    array = np.asarray(values, np.float64)
    sd = float(array.std(ddof=1)) if len(array) > 1 else None
    return {"mean": float(array.mean()), "sd": sd, "samples": array.tolist()}


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, median (p50) and 99th percentile (p99, linear interpolation)."""
    array = np.asarray(values, np.float64)
    p50, p99 = np.percentile(array, (50, 99))
    return {"mean": float(array.mean()), "p50": float(p50), "p99": float(p99)}


def share(part: float, rest: float) -> float | None:
    """``part`` of the whole that it makes with ``rest``; None where there is nothing."""
    return part / (part + rest) if part + rest else None


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, Any]:
    """Ratios of two arms round by round, their median, and its bootstrap 95 % interval.

    Pairing cancels what drifts between rounds (clocks, heat, neighbours). Percentile bootstrap over
    rounds (Efron, 1979) from a fixed seed, so the same samples give the same interval; ``low`` and
    ``high`` are None for fewer than three rounds.
    """
    ratios = np.asarray(numerator, np.float64) / np.asarray(denominator, np.float64)
    low = high = None
    if len(ratios) >= MIN_PAIRS:
        draws = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
        low, high = (float(bound) for bound in np.percentile(np.median(ratios[draws], axis=1), (2.5, 97.5)))
    return {"median": float(np.median(ratios)), "low": low, "high": high, "samples": ratios.tolist()}


def ratio_text(ratio: dict[str, Any]) -> str:
    """A :func:`paired_ratio` as a table shows it: the median, and the interval if there is one."""
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.3f} … {ratio['high']:.3f})"
    return f"{ratio['median']:.3f}{interval}"
