"""The float graph in 16 bits, its weights in 16, or in 4 and 8 (weight-only quantization).

Activations, weights and constants become float16; the host's tensors stay float32 behind a Cast, or
are float16 where they are typed so. With integer weights each product is a MatMulNBits, which is how
the NPU compiler takes weights in blocks beside floating-point activations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from calibration.precision import FLOAT16, WEIGHT_BITS, Scheme
from calibration.structure import Structure, is_weight
from calibration.weights import Quantized, WeightFile

CONTRIB = "com.microsoft"


def to_half(
    model: ir.Model,
    structure: Structure,
    *,
    schemes: Mapping[int, Scheme],
    typed: Collection[str],
    weights: WeightFile,
) -> dict[str, Quantized]:
    """Rewrite ``model`` in place; returns its quantized weights by name.

    Args:
        schemes: of every unit.
        typed: the names of inputs and outputs that are float16 for the host.
    """
    graph = model.graph
    matrices = _pack_matrices(model, structure, schemes, weights)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
        elif value.dtype == ir.DataType.FLOAT:
            value.const_value = weights.float16(value) if is_weight(value) else _small(value)
            value.dtype = ir.DataType.FLOAT16
    for node in list(graph):
        for value in node.outputs:
            if value.dtype == ir.DataType.FLOAT:
                value.dtype = ir.DataType.FLOAT16
    first = graph[0]
    for value in graph.inputs:
        _enter(graph, first, value, typed)
    for index, value in enumerate(list(graph.outputs)):
        _leave(graph, index, value, typed)
    return matrices


def _pack_matrices(
    model: ir.Model, structure: Structure, schemes: Mapping[int, Scheme], weights: WeightFile
) -> dict[str, Quantized]:
    graph, matrices = model.graph, {}
    for node in list(graph):
        value = node.inputs[1] if node.op_type == "MatMul" else None
        if value is None or not is_weight(value):
            continue
        scheme = schemes[structure.unit(node)].of_matrix(value.shape[0])
        if scheme.weights == FLOAT16:
            continue
        found = matrices[value.name] = weights.blocks(value, scheme)
        inputs = [node.inputs[0]]
        for tensor in (found.codes, found.scales):
            new = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype))
            new.shape = ir.Shape(tensor.shape)
            graph.initializers.add(new)
            inputs.append(new)
        attributes = {"K": value.shape[0], "N": value.shape[1], "bits": WEIGHT_BITS[scheme.weights]}
        attributes["block_size"] = scheme.block_size
        packed = ir.node("MatMulNBits", inputs, attributes, domain=CONTRIB, name=node.name)
        _replace(graph, node, packed)
    if matrices:
        model.opset_imports[CONTRIB] = 1
    return matrices


def _replace(graph: ir.Graph, node: ir.Node, other: ir.Node) -> None:
    """Let ``other`` compute the one output of ``node``, which is removed."""
    (old,), (new,) = node.outputs, other.outputs
    new.name, new.dtype, new.shape = old.name, old.dtype, old.shape
    graph.insert_before(node, other)
    old.name = f"{old.name}_replaced"
    for index, value in enumerate(graph.outputs):
        if value is old:
            graph.outputs[index] = new
    old.replace_all_uses_with(new)
    graph.remove(node, safe=True)


def _small(value: ir.Value) -> ir.TensorProtocol:
    return ir.tensor(np.asarray(value.const_value.numpy(), np.float16), name=value.name)


def _enter(graph: ir.Graph, first: ir.Node, value: ir.Value, typed: Collection[str]) -> None:
    if value.name in typed:
        value.dtype = ir.DataType.FLOAT16
        return
    uses = list(value.uses())
    if not uses:
        return
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT16}, name=f"Cast_{value.name}")
    cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = (
        f"{value.name}_{FLOAT16}",
        ir.DataType.FLOAT16,
        value.shape,
    )
    for use in uses:
        use.node.replace_input_with(use.idx, cast.outputs[0])
    graph.insert_before(first, cast)


def _leave(graph: ir.Graph, index: int, value: ir.Value, typed: Collection[str]) -> None:
    if value.name in typed:
        return
    name = value.name
    value.name = f"{name}_{FLOAT16}"
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name=f"Cast_{name}")
    cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = name, ir.DataType.FLOAT, value.shape
    graph.append(cast)
    graph.outputs[index] = cast.outputs[0]
