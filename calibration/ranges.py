"""Which values each activation takes: extremes of all, and a histogram of a sample of them.

The float graph gets its activations' extremes as extra outputs (:func:`observe`), so one forward
pass measures every tensor and ships a few numbers; only where a method needs the distribution is
a strided sample of each tensor shipped too. A histogram's bins are the float's own sign, exponent
and leading mantissa bits, so no range need be known before the text has been read, and a collection
can stop and go on anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import onnx_ir as ir

from calibration import affine
from calibration.affine import Range
from calibration.structure import MOVES, Groups, Structure, is_float
from meki_edge.errors import UserError
from meki_edge.files import atomic_path

METHODS = ("minmax", "percentile", "mse")
UNIT_OPERATORS = frozenset({"Sigmoid", "Softmax"})
SOFTMAX_DEPTH = 16.0
"""Scores this far under a row's largest weigh e⁻¹⁶ = 1e-7 after softmax: what lies lower (the mask) may clip."""
SAMPLE_ELEMENTS = 1 << 14  # of a tensor in each call
SHIFT = 19  # float32 bits below a bin: sign, exponent and 4 bits of mantissa are the bin
NUM_BINS = 1 << (32 - SHIFT)
MSE_SHRINKS = np.linspace(1.0, 0.0, 41)[:-1]
"""Ends that are tried, relative to the extremes."""
LOW, HIGH, PEAK = 0, 1, 2


@dataclass(frozen=True)
class Watched:
    """One activation of a graph with extra outputs: their names end in ``/low``, ``/high``, ``/peak``, ``/sample``."""

    name: str
    key: str
    has_peak: bool


def observe(model: ir.Model, structure: Structure, skip: frozenset[str], *, sample: bool) -> list[Watched]:
    """Add the extremes (and a ``sample``) of each activation of ``model`` as outputs, in place.

    Left out are values with a name in ``skip``, what only moves another value, and what softmax
    and sigmoid give.
    """
    watched = []
    inputs = [(value, None) for value in model.graph.inputs]
    for value, node in inputs + [(value, node) for node in list(model.graph) for value in node.outputs]:
        if not is_float(value) or value.name in skip:
            continue
        if node is not None and (node.op_type in MOVES or node.op_type in UNIT_OPERATORS):
            continue
        peak = any(use.node.op_type == "Softmax" for use in value.uses())
        _reduce(model, value, "ReduceMin", "low")
        _reduce(model, value, "ReduceMax", "high")
        if peak:
            rows = _append(model, "ReduceMax", [value, _axes(model, "last", [-1])], f"{value.name}/rows", keepdims=0)
            _output(model, _append(model, "ReduceMin", [rows], f"{value.name}/peak", keepdims=0))
        if sample:
            _sample(model, value)
        watched.append(Watched(value.name, structure.keys[value.name], peak))
    return watched


class Observations:
    """What was seen of every activation, by its key; merges calls of any graph of the model."""

    def __init__(self, *, histogram: bool) -> None:
        self.histogram = histogram
        self._extremes: dict[str, np.ndarray] = {}
        self._counts: dict[str, np.ndarray] = {}

    def add(self, watched: Iterable[Watched], results: Mapping[str, np.ndarray]) -> None:
        """Count one call: ``results`` by output name.

        Raises:
            UserError: an activation is NaN or infinite.
        """
        for tensor in watched:
            low, high = float(results[f"{tensor.name}/low"]), float(results[f"{tensor.name}/high"])
            peak = float(results[f"{tensor.name}/peak"]) if tensor.has_peak else np.inf
            self.add_extremes(tensor.key, low, high, peak, name=tensor.name)
            if self.histogram:
                self.add_sample(tensor.key, results[f"{tensor.name}/sample"])

    def add_extremes(self, key: str, low: float, high: float, peak: float = np.inf, *, name: str = "") -> None:
        """Count the smallest and largest value of a tensor, and the smallest of its rows' largest."""
        if not (np.isfinite(low) and np.isfinite(high)):
            raise UserError(
                "an activation of the float graph is NaN or infinite",
                where=f"tensor {name or key}",
                fix="check the checkpoint: its training may have diverged",
            )
        seen = self._extremes.setdefault(key, np.array([np.inf, -np.inf, np.inf]))
        seen[:] = min(seen[LOW], low), max(seen[HIGH], high), min(seen[PEAK], peak)

    def add_sample(self, key: str, values: np.ndarray) -> None:
        """Count values into the histogram."""
        bins = np.ascontiguousarray(values, np.float32).view(np.uint32).ravel() >> SHIFT
        counts = np.bincount(bins, minlength=NUM_BINS)
        if key in self._counts:
            self._counts[key] += counts
        else:
            self._counts[key] = counts

    def save(self, path: Path, **progress: int) -> None:
        """Write all of it to ``path`` (``.npz``), with named numbers that say how far it is."""
        keys = sorted(self._extremes)
        arrays = {
            "keys": np.array(keys),
            "extremes": np.array([self._extremes[key] for key in keys]).reshape(-1, 3),
            "counted": np.array(sorted(self._counts)),
            "counts": np.array([self._counts[key] for key in sorted(self._counts)]).reshape(-1, NUM_BINS),
            **{f"progress {name}": np.array(value) for name, value in progress.items()},
        }
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> tuple[Observations, dict[str, int]]:
        """What :meth:`save` wrote, and the numbers.

        Raises:
            UserError: not such a file.
        """
        try:
            with np.load(path) as arrays:
                found = cls(histogram=bool(len(arrays["counted"])))
                found._extremes = dict(zip(arrays["keys"].tolist(), arrays["extremes"].copy(), strict=True))
                found._counts = dict(zip(arrays["counted"].tolist(), arrays["counts"].copy(), strict=True))
                names = [name for name in arrays.files if name.startswith("progress ")]
                return found, {name.removeprefix("progress "): int(arrays[name]) for name in names}
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise UserError(
                f"not a file of collected ranges: {error}", where=path, fix="collect them again with --force"
            ) from None

    def ranges(self, groups: Groups, method: str, percentile: float) -> Ranges:
        """The ranges of groups of tensors that share one quantization."""
        extremes: dict[str, np.ndarray] = {}
        counts: dict[str, np.ndarray] = {}
        for key, seen in self._extremes.items():
            group = groups.of(key)
            before = extremes.get(group, np.array([np.inf, -np.inf, np.inf]))
            low, high, peak = np.stack((before, seen)).T
            extremes[group] = np.array([low.min(), high.max(), peak.min()])
        for key, counted in self._counts.items():
            group = groups.of(key)
            counts[group] = counts[group] + counted if group in counts else counted
        return Ranges(groups, method, percentile, extremes, counts)


class Ranges:
    """The range that each group's quantization covers; see :meth:`Observations.ranges`."""

    def __init__(
        self,
        groups: Groups,
        method: str,
        percentile: float,
        extremes: dict[str, np.ndarray],
        counts: dict[str, np.ndarray],
    ) -> None:
        assert method == "minmax" or counts, f"{method} needs histograms"
        self._groups, self._method, self._percentile = groups, method, percentile
        self._extremes, self._counts = extremes, counts
        self._fixed: dict[str, Range] = {}

    def fix(self, key: str, found: Range) -> None:
        """Let the group of ``key`` cover at least ``found``, whatever was observed."""
        group = self._groups.of(key)
        self._fixed[group] = found | self._fixed[group] if group in self._fixed else found

    def of(self, key: str, dtype: str) -> Range:
        """The range of the group of ``key``, when stored as ``dtype``."""
        group = self._groups.of(key)
        seen = self._extremes.get(group)
        if seen is None:
            return self._fixed[group]
        found = self._observed(group, seen, dtype)
        return found | self._fixed[group] if group in self._fixed else found

    def _observed(self, group: str, seen: np.ndarray, dtype: str) -> Range:
        low, high, peak = map(float, seen)
        full = Range(low=max(low, peak - SOFTMAX_DEPTH) if np.isfinite(peak) else low, high=high)
        if self._method == "minmax" or np.isfinite(peak) or group not in self._counts:
            return full
        if self._method == "percentile":
            return percentile_range(self._counts[group], full, self._percentile)
        return mse_range(self._counts[group], full, dtype)


def percentile_range(counts: np.ndarray, full: Range, percentile: float) -> Range:
    """``full`` without the (100 - ``percentile``) % of the values on either side."""
    if percentile >= 100:
        return full
    values, weights = _histogram(counts)
    shares = np.cumsum(weights) / weights.sum()
    outside = (100 - percentile) / 100
    low = values[min(np.searchsorted(shares, outside, side="right"), len(values) - 1)]
    high = values[min(np.searchsorted(shares, 1 - outside), len(values) - 1)]
    return Range(low=max(full.low, min(float(low), 0.0)), high=min(full.high, max(float(high), 0.0)))


def mse_range(counts: np.ndarray, full: Range, dtype: str) -> Range:
    """The part of ``full`` with the smallest mean squared error of rounding and clipping together."""
    values, weights = _histogram(counts)
    lows, highs = min(full.low, 0.0) * MSE_SHRINKS, max(full.high, 0.0) * MSE_SHRINKS
    below = np.maximum(lows[:, None] - values, 0)
    above = np.maximum(values - highs[:, None], 0)
    clipped = (below**2 @ weights)[:, None] + above**2 @ weights
    outside = ((below > 0) @ weights)[:, None] + (above > 0) @ weights
    least, most = affine.limits(dtype)
    steps = np.maximum(highs - lows[:, None], affine.MIN_SPAN) / (most - least)
    errors = clipped + (weights.sum() - outside) * steps**2 / 12
    low, high = np.unravel_index(errors.argmin(), errors.shape)
    return Range(low=float(lows[low]), high=float(highs[high]))


def _histogram(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The middles of the bins that were hit, ascending, and how often they were."""
    (hit,) = np.nonzero(counts)
    edges = (hit.astype(np.uint32) << np.uint32(SHIFT)) | np.uint32(1 << (SHIFT - 1))
    values = edges.view(np.float32).astype(np.float64)
    order = np.argsort(values)
    return values[order], counts[hit][order].astype(np.float64)


def _reduce(model: ir.Model, value: ir.Value, operator: str, suffix: str) -> None:
    _output(model, _append(model, operator, [value], f"{value.name}/{suffix}", keepdims=0))


def _sample(model: ir.Model, value: ir.Value) -> None:
    """Every n-th element, n odd so that it does not fall on the same channels again and again."""
    count = int(np.prod(value.shape.numpy()))
    stride = max(count // SAMPLE_ELEMENTS, 1) | 1
    flat = _append(model, "Reshape", [value, _axes(model, "flat", [-1])], f"{value.name}/flat")
    bounds = [_axes(model, str(number), [number]) for number in (0, count, 0, stride)]
    _output(model, _append(model, "Slice", [flat, *bounds], f"{value.name}/sample"))


def _append(model: ir.Model, operator: str, inputs: list[ir.Value], name: str, **attributes: int) -> ir.Value:
    node = ir.node(operator, inputs, attributes)
    node.outputs[0].name, node.outputs[0].dtype = name, ir.DataType.FLOAT
    model.graph.append(node)
    return node.outputs[0]


def _axes(model: ir.Model, name: str, numbers: list[int]) -> ir.Value:
    """An initializer of integers, one for all its uses."""
    name = f"/{name}"
    if name not in model.graph.initializers:
        tensor = ir.tensor(np.array(numbers, np.int64), name=name)
        value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        model.graph.initializers.add(value)
    return model.graph.initializers[name]


def _output(model: ir.Model, value: ir.Value) -> None:
    model.graph.outputs.append(value)
