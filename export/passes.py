"""Passes over a traced graph, and the file that holds the weights of a part of both graphs.

A traced graph names its weights but holds no data: they go from the checkpoint straight into
``weights.data``, a block of rows at a time, so exporting a model takes far less memory than the
model itself. ``nn.Linear`` keeps ``[out, in]`` and traces as ``MatMul(x, Transpose(W))``; the
transposition is done here, once, instead of by the runtime at each load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import Sequential
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants

from meki_edge.files import atomic_path
from meki_edge.model.checkpoint import Checkpoint

ALIGNMENT = 4096  # a page, so that the runtime can map each weight on its own
BLOCK_ELEMENTS = 1 << 23  # elements of a weight held in memory at a time (32 MB)
ITEM_BYTES = 4  # float32


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A graph's initializer: checkpoint tensor ``tensor`` ``[out, in]``, stored as ``shape``."""

    tensor: str
    transposed: bool
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in ``weights.data``, without padding."""
        return prod(self.shape) * ITEM_BYTES


def take_weights(model: ir.Model, tensor_of: Callable[[str], str]) -> dict[str, Weight]:
    """Detach every parameter's data from the graph and fold the transpositions.

    Afterwards the initializers in the returned mapping have a name, a shape and no value.

    Args:
        tensor_of: the checkpoint's name for an initializer's.
    """
    weights = {}
    for name, value in list(model.graph.initializers.items()):
        uses = list(value.uses())
        transposes = [use.node for use in uses if use.node.op_type == "Transpose"]
        assert len(transposes) in (0, len(uses)), f"{name} is used both as stored and transposed"
        if transposes:
            folded = ir.Value(name=name, type=value.type, shape=ir.Shape(tuple(value.shape)[::-1]))
            for node in transposes:
                assert tuple(node.attributes["perm"].as_ints()) == (1, 0), f"{name} is permuted"
                node.outputs[0].replace_all_uses_with(folded)
                model.graph.remove(node, safe=True)
            del model.graph.initializers[name]
            model.graph.initializers.add(folded)
            value = folded
        value.const_value = None
        weights[name] = Weight(tensor=tensor_of(name), transposed=bool(transposes), shape=tuple(value.shape))
    return weights


def flatten_norms(model: ir.Model) -> None:
    """Give every RMSNormalization a tensor of rank 3 at most: ``[1, T, H, D]`` passes as ``[1, T·H, D]``.

    QNN 2.51 compiles the per-head norm of rank 4 without complaint and then computes nonsense for
    some shapes (``[1, 16, 6, 32]``); of rank 3 it was right for every width and count tried.
    """
    for node in list(model.graph):
        if node.op_type != "RMSNormalization" or len(node.inputs[0].shape) < 4:
            continue
        (out,) = node.outputs
        shape = tuple(out.shape)
        flat = (shape[0], prod(shape[1:-1]), shape[-1])
        source = node.inputs[0]
        if source.producer() is not None and source.producer().op_type == "Reshape":
            source = source.producer().inputs[0]
        flattened = _reshape(node, source, flat, f"{out.name}_in")
        norm = ir.node("RMSNormalization", [flattened, *node.inputs[1:]], dict(node.attributes))
        norm.outputs[0].name, norm.outputs[0].type, norm.outputs[0].shape = f"{out.name}_out", out.type, ir.Shape(flat)
        model.graph.insert_before(node, norm)
        out.replace_all_uses_with(_reshape(node, norm.outputs[0], shape, out.name))
        model.graph.remove(node, safe=True)


def _reshape(before: ir.Node, value: ir.Value, shape: tuple[int, ...], name: str) -> ir.Value:
    """``value`` reshaped, by nodes inserted ahead of ``before``."""
    target = ir.node("Constant", [], {"value_ints": shape})
    reshape = ir.node("Reshape", [value, target.outputs[0]])
    reshape.outputs[0].name, reshape.outputs[0].type, reshape.outputs[0].shape = name, value.type, ir.Shape(shape)
    before.graph.insert_before(before, (target, reshape))
    return reshape.outputs[0]


def simplify(model: ir.Model) -> None:
    """Fold constants, merge equal expressions, and drop what is unused or says how it was traced."""
    fold_constants(model)
    Sequential(
        passes.RemoveUnusedNodesPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedFunctionsPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.ClearMetadataAndDocStringPass(),
    )(model)


def place(weights: Iterable[Weight]) -> dict[Weight, int]:
    """The byte offset of each distinct weight in ``weights.data``."""
    offsets: dict[Weight, int] = {}
    end = 0
    for weight in weights:
        if weight not in offsets:
            offsets[weight] = end
            end += -(-weight.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets


def weights_file(suffix: str) -> str:
    """The name of a part's weights file (:func:`meki_edge.graph_spec.part_suffix`)."""
    return f"weights{suffix}.data"


def refer(model: ir.Model, weights: Mapping[str, Weight], offsets: Mapping[Weight, int], file: str) -> None:
    """Point the initializers of ``model`` at their bytes in ``file``, which lies beside it."""
    for name, weight in weights.items():
        value = model.graph.initializers[name]
        value.const_value = ir.ExternalTensor(
            file, offsets[weight], weight.num_bytes, ir.DataType.FLOAT, shape=ir.Shape(weight.shape), name=name
        )


def write_weights(
    path: Path, offsets: Mapping[Weight, int], checkpoint: Checkpoint, advance: Callable[[int], None]
) -> None:
    """Stream every weight from the checkpoint to its place; ``advance`` is told the bytes written."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        os.ftruncate(file.fileno(), max(start + weight.num_bytes for weight, start in offsets.items()))
        for weight, start in offsets.items():
            _write_weight(file.fileno(), start, weight, checkpoint, advance)


def _write_weight(
    fd: int, start: int, weight: Weight, checkpoint: Checkpoint, advance: Callable[[int], None]
) -> None:
    if prod(weight.shape) <= BLOCK_ELEMENTS:
        whole = checkpoint.read(weight.tensor).numpy()
        _pwrite(fd, np.ascontiguousarray(whole.T if weight.transposed else whole), start)
        return advance(weight.num_bytes)
    stored = weight.shape[::-1] if weight.transposed else weight.shape
    num_rows, row_size = stored[0], prod(stored[1:])
    step = max(BLOCK_ELEMENTS // row_size, 1)
    for first in range(0, num_rows, step):
        block = checkpoint.read(weight.tensor, slice(first, min(first + step, num_rows))).numpy()
        if weight.transposed:  # the block is a band of columns
            for row, values in enumerate(np.ascontiguousarray(block.T)):
                _pwrite(fd, values, start + (row * num_rows + first) * ITEM_BYTES)
        else:
            _pwrite(fd, block, start + first * row_size * ITEM_BYTES)
        advance(block.nbytes)


def _pwrite(fd: int, array: np.ndarray, offset: int) -> None:
    view = memoryview(array.astype("<f4", copy=False)).cast("B")
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
