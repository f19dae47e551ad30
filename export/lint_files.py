"""Rules on a graph's weights: where their bytes lie, how many they become, and whether they are numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from export.findings import AI_HUB, COMPILER, DEVICE, ERROR, NUMERICS, Finding
from export.graph_view import ITEM_BITS, GraphView, dtype_of

LIMIT_BYTES = 2_000_000_000
FLOAT16_MAX = 65_504.0
BLOCK_ELEMENTS = 1 << 22
COMPILED_BITS = {"float32": 16, "float64": 16}  # the NPU computes in float16
SUFFIX = ".data"
MAX_DIGITS = 19  # of a size in bytes


def compiled_bytes(view: GraphView) -> int:
    """What the graph's file and weights take in their compiled precision: float32 weights become float16.

    The file counts as it is, less the weights that it holds itself.
    """
    internal = sum(_stored_bytes(tensor) for tensor in view.graph.initializer if not _is_external(tensor))
    weights = 0
    for tensor in view.graph.initializer:
        dtype = dtype_of(tensor)
        weights += (prod(tensor.dims) * COMPILED_BITS.get(dtype, ITEM_BITS.get(dtype, 0)) + 7) // 8
    return max(view.path.stat().st_size - internal, 0) + weights


def weight_bytes(view: GraphView) -> int:
    """Bytes of all weights of a graph."""
    return sum(_stored_bytes(tensor) for tensor in view.graph.initializer)


def file_findings(
    view: GraphView, looked_at: set[tuple[str, ...]], advance: Callable[[int], None] = lambda count: None
) -> Iterator[Finding]:
    """All findings on the weights of one graph.

    Args:
        looked_at: external weights whose values another graph's lint has seen; they are added here.
        advance: is told the bytes of each weight.
    """

    def found(rule: str, what: str, fix: str, source: str = COMPILER, tensor: str | None = None) -> Finding:
        layer = None if tensor is None else view.layer_of_tensor(tensor)
        where = str(view.path)
        return Finding(
            rule=rule, severity=ERROR, source=source, where=where, tensor=tensor, layer=layer, what=what, fix=fix
        )

    size = compiled_bytes(view)
    if size > LIMIT_BYTES:
        what = f"the graph and its compiled weights take {size / 1e9:.2f} GB; devices are said to take 2 GB"
        yield found("part-over-2gb", what, "export in more parts (--parts), or quantize further", DEVICE)
    locations = set()
    for tensor in view.graph.initializer:
        problem = None
        if _is_external(tensor):
            location = _place(tensor).get("location", "")
            if location not in locations:
                locations.add(location)
                yield from _location(view.path.parent, location, found)
            problem = _extent(view.path.parent, tensor)
            if problem is not None:
                yield found("external-data-truncated", problem, "copy the file again", tensor=tensor.name)
        place = (str(view.path.parent), str(tensor.data_type), *sorted(_place(tensor).values()))
        known = _is_external(tensor) and place in looked_at
        looked_at.add(place)
        if problem is None and not known and _readable(view.path.parent, tensor):
            for rule, what, fix in _values(view.path.parent, tensor):
                yield found(rule, what, fix, NUMERICS, tensor.name)
        advance(_stored_bytes(tensor))
    if len(locations) > 1:
        what = f"weights in {len(locations)} files: {', '.join(sorted(locations))}"
        yield found("external-data-name", what, "keep them in one .data file beside the graph", AI_HUB)


def _is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL


def _stored_bytes(tensor: TensorProto) -> int:
    return (prod(tensor.dims) * ITEM_BITS.get(dtype_of(tensor), 0) + 7) // 8


def _location(directory: Path, location: str, found: Callable[..., Finding]) -> Iterator[Finding]:
    outside = PurePosixPath(location).is_absolute() or ".." in PurePosixPath(location).parts
    path = directory / location
    if outside or (path.is_symlink() and directory.resolve() not in path.resolve().parents):
        what = f"the weights {location!r} lie outside the graph's directory"
        yield found("external-data-outside", what, "export again")
    elif not path.is_file():
        yield found("external-data-missing", f"the weights {location!r} are missing", "copy the file beside the graph")
    if not location.endswith(SUFFIX):
        what = f"the weights are called {location!r}, not *{SUFFIX}"
        yield found("external-data-name", what, f"save the model with its weights in a file called *{SUFFIX}", AI_HUB)


def _place(tensor: TensorProto) -> dict[str, str]:
    """Where an external tensor's bytes are: ``location``, ``offset``, ``length``."""
    return {entry.key: entry.value for entry in tensor.external_data}


def _extent(directory: Path, tensor: TensorProto) -> str | None:
    """What is wrong with the place that an external tensor names, if its file is there."""
    place = _place(tensor)
    offset, length = place.get("offset", "0"), place.get("length", str(_stored_bytes(tensor)))
    if not all(text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS for text in (offset, length)):
        return "the weight's offset or length is no number"
    if int(length) != _stored_bytes(tensor):
        return f"the weight has {length} bytes in its file, {_stored_bytes(tensor)} by its shape and type"
    path = directory / place.get("location", "")
    if path.is_file() and int(offset) + int(length) > path.stat().st_size:
        return f"the weights file {path.name!r} ends before the weight does"
    return None


def _readable(directory: Path, tensor: TensorProto) -> bool:
    if dtype_of(tensor) not in ("float32", "float16", "float64") or 0 in tensor.dims:
        return False
    return not _is_external(tensor) or (directory / _place(tensor).get("location", "")).is_file()


def _values(directory: Path, tensor: TensorProto) -> Iterator[tuple[str, str, str]]:
    finite, largest = True, 0.0
    for block in _blocks(directory, tensor):
        finite = finite and bool(np.isfinite(block).all())
        if finite:
            largest = max(largest, float(np.abs(block).max(initial=0)))
    if not finite:
        yield "nonfinite-weight", "a weight holds NaN or infinity", "train or convert the model again"
    elif largest > FLOAT16_MAX and dtype_of(tensor) != "float16":
        what = "a weight is larger than float16 can hold (65504): the NPU would compute with infinity"
        yield "float16-overflow", what, "scale the weight down, or quantize it"


def _blocks(directory: Path, tensor: TensorProto) -> Iterator[np.ndarray]:
    if not _is_external(tensor):
        yield numpy_helper.to_array(tensor)
        return
    place = _place(tensor)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).newbyteorder("<")
    values = np.memmap(directory / place["location"], dtype, "r", int(place.get("offset", 0)), (prod(tensor.dims),))
    for first in range(0, len(values), BLOCK_ELEMENTS):
        yield values[first : first + BLOCK_ELEMENTS]
