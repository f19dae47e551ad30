"""The float graph with its quantization written into it, as QuantizeLinear/DequantizeLinear pairs.

Every activation is rounded to its integers and back where it is computed, every weight is a constant
in integers; so ONNX Runtime computes what the quantized graph means, and the NPU compiler, which
recognises the pairs, computes with the integers. An activation has the dtype of the node that
computes it; a consumer of another dtype gets a second pair behind the first.

At the graph's ends a tensor may be *typed*: the integers themselves go in or out, because the host
stores them as they are (the key/value cache, the rows of a memory) or hands them on (``hidden``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from calibration import affine
from calibration.affine import Range
from calibration.precision import Scheme
from calibration.ranges import Ranges
from calibration.structure import Structure, is_float, is_weight
from calibration.weights import DTYPES, Quantized, WeightFile
from meki_edge.errors import UserError
from meki_edge.graph_spec import Quantization

QUANTIZED = frozenset(
    "Abs Add Clip Concat Gelu MatMul Mul ReduceSum Reshape RMSNormalization RotaryEmbedding Sigmoid Sign Slice "
    "Softmax Split Sqrt Squeeze Transpose Unsqueeze".split()
)
"""Operators that the NPU computes in integers. All others, such as the convolution over time, stay in
floating point (16 bits there) between them."""


class Quantizer:
    """Rewrite one graph, in place.

    Args:
        structure: of ``model``, as loaded.
        schemes: of every unit.
        typed: the dtype of inputs and outputs, by name, that are integers for the host.
        cache: keys and values by name, where the host stores them in integers: a product takes them so.

    After :meth:`run`, ``activations``, ``constants`` (norms' gains and scalars) and ``matrices`` say
    by name how each value of the float graph is stored.
    """

    def __init__(
        self,
        model: ir.Model,
        structure: Structure,
        *,
        ranges: Ranges,
        schemes: Mapping[int, Scheme],
        typed: Mapping[str, str],
        cache: Mapping[str, str],
        weights: WeightFile,
    ) -> None:
        self._model, self._graph, self._structure = model, model.graph, structure
        self._ranges, self._schemes, self._typed, self._cache = ranges, schemes, typed, cache
        self._weights = weights
        self._own: dict[ir.Value, str | None] = {}
        self._pairs: dict[tuple[ir.Value, str], tuple[ir.Value, ir.Value]] = {}
        self._added: set[str] = set()
        self._symmetric = {structure.groups.of(structure.keys[name]) for name in cache if name in structure.keys}
        self.activations: dict[str, tuple[str, Quantization]] = {}
        self.constants: dict[str, tuple[str, Quantization]] = {}
        self.matrices: dict[str, Quantized] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        nodes, outputs = list(self._graph), list(self._graph.outputs)
        for value in self._graph.inputs:
            self._own[value] = self._typed.get(value.name)
            if self._own[value] is not None:
                value.dtype = DTYPES[self._own[value]]
        for node in nodes:
            self._visit(node)
        for index, value in enumerate(outputs):
            self._leave(index, value)
        for name, value in list(self._graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del self._graph.initializers[name]
            elif is_weight(value) and value.dtype == ir.DataType.FLOAT and name not in self._added:
                value.const_value = self._weights.float32(value)

    def quantization(self, name: str, dtype: str) -> Quantization:
        """How the value ``name`` of the float graph is stored as ``dtype``."""
        key = self._structure.keys[name]
        symmetric = self._structure.groups.of(key) in self._symmetric
        return affine.quantization(self._ranges.of(key, dtype), dtype, symmetric=symmetric)

    def _visit(self, node: ir.Node) -> None:
        scheme = self._schemes[self._structure.unit(node)]
        dtype = scheme.activations if node.op_type in QUANTIZED else None
        for index, value in enumerate(node.inputs):
            if value is None or not self._is_activation(value) and not is_float(value):
                continue
            if value.is_initializer():
                node.replace_input_with(index, self._constant(node, index, value, scheme, dtype))
            elif node.op_type == "MatMul" and value.name in self._cache:
                node.replace_input_with(index, self._view(value, self._cache[value.name], node))
            else:
                node.replace_input_with(index, self._view(value, dtype, node))
        self._own |= {value: dtype for value in node.outputs if self._is_activation(value)}

    def _leave(self, index: int, value: ir.Value) -> None:
        """Let the graph output ``value`` be what the host gets, under its name."""
        name, dtype = value.name, self._typed.get(value.name)
        if dtype is None and self._own[value] is None:
            return
        given = self._pair(value, dtype or self._own[value], None)[1 if dtype is None else 0]
        value.name = f"{name}_float"
        given.name = name
        self._graph.outputs[index] = given

    def _view(self, value: ir.Value, dtype: str | None, node: ir.Node) -> ir.Value:
        """The reals that ``value`` stands for once it was stored, for a consumer that computes in ``dtype``."""
        dtype = dtype or self._own[value]
        return value if dtype is None else self._pair(value, dtype, node)[1]

    def _pair(self, value: ir.Value, dtype: str, node: ir.Node | None) -> tuple[ir.Value, ir.Value]:
        """The integers of ``value`` in ``dtype``, and the reals that they stand for; made ahead of ``node``."""
        if (value, dtype) not in self._pairs:
            own = self._own[value]
            how = self.quantization(value.name, dtype)
            if own is None or own == dtype:
                self.activations[value.name] = (dtype, how)
            constants = self._parameters(f"{value.name}_{dtype}", how, dtype)
            if own == dtype and value.is_graph_input():
                integers = value
            else:
                source = value if own in (None, dtype) else self._pair(value, own, node)[1]
                integers = self._emit(
                    node, "QuantizeLinear", [source, *constants], DTYPES[dtype], value.shape, f"{value.name}_{dtype}"
                )
            name = f"{value.name}_{dtype}_reals"
            inputs = [integers, *constants]
            reals = self._emit(node, "DequantizeLinear", inputs, ir.DataType.FLOAT, value.shape, name)
            self._pairs[value, dtype] = integers, reals
        return self._pairs[value, dtype]

    def _constant(self, node: ir.Node, index: int, value: ir.Value, scheme: Scheme, dtype: str | None) -> ir.Value:
        """What stands for the float initializer ``value`` as input ``index`` of ``node``."""
        if dtype is None or node.op_type == "Clip":
            return value
        if node.op_type == "MatMul" and index == 1 and is_weight(value):
            return self._matrix(node, value, scheme)
        return self._small(node, value, dtype)

    def _matrix(self, node: ir.Node, value: ir.Value, scheme: Scheme) -> ir.Value:
        found = self._weights.quantized(value, scheme)
        self.matrices[value.name] = found
        tensors = [self._initializer(tensor) for tensor in (found.codes, found.scales, found.zero_points)]
        size = found.scheme.block_size
        attributes = {"axis": 0, "block_size": size} if size else {"axis": 1}
        name = f"{value.name}_{found.scheme.weights}_reals"
        return self._emit(node, "DequantizeLinear", tensors, ir.DataType.FLOAT, value.shape, name, attributes)

    def _small(self, node: ir.Node, value: ir.Value, dtype: str) -> ir.Value:
        """A norm's gains or a scalar: integers as an activation's, one scale for all."""
        if is_weight(value) and len(value.shape) > 1:
            raise UserError(
                f"{node.op_type} uses {value.name} in a way that has no quantization (a mixture of experts does)",
                where=f"node {node.name}",
                fix="use --precision fp16 for this model",
            )
        array = value.const_value.numpy()
        name = f"{value.name}_{dtype}"
        if f"{name}_codes" not in self._graph.initializers:
            how = affine.quantization(Range(low=float(array.min()), high=float(array.max())), dtype)
            codes = affine.quantize(array, how, dtype)
            constants = self._parameters(name, how, dtype)
            inputs = [self._initializer(ir.tensor(codes, name=f"{name}_codes")), *constants]
            self.constants[value.name] = (dtype, how)
        else:
            inputs = [self._graph.initializers[f"{name}_{part}"] for part in ("codes", "scale", "zero_point")]
        used = f"{name}_reals_{node.outputs[0].name}"
        return self._emit(node, "DequantizeLinear", inputs, ir.DataType.FLOAT, value.shape, used)

    def _parameters(self, name: str, how: Quantization, dtype: str) -> list[ir.Value]:
        scale = ir.tensor(np.array(how.scale, np.float32), name=f"{name}_scale")
        zero_point = ir.tensor(np.array(how.zero_point, dtype), name=f"{name}_zero_point")
        return [self._initializer(scale), self._initializer(zero_point)]

    def _initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        if tensor.name not in self._graph.initializers:
            self._added.add(tensor.name)
            value = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype))
            value.shape = ir.Shape(tensor.shape)
            self._graph.initializers.add(value)
        return self._graph.initializers[tensor.name]

    def _emit(
        self,
        node: ir.Node | None,
        operator: str,
        inputs: list[ir.Value],
        dtype: ir.DataType,
        shape: ir.Shape | None,
        name: str,
        attributes: Mapping[str, int] | None = None,
    ) -> ir.Value:
        """A node ahead of ``node`` (None: at the end)."""
        made = ir.node(operator, inputs, attributes or {}, name=f"{operator}_{name}")
        made.outputs[0].name, made.outputs[0].dtype, made.outputs[0].shape = name, dtype, shape
        if node is None:
            self._graph.append(made)
        else:
            self._graph.insert_before(node, made)
        return made.outputs[0]

    def _is_activation(self, value: ir.Value) -> bool:
        return value in self._own or value.name in self._structure.keys


def used_matrices(model: ir.Model) -> Iterator[ir.Value]:
    """The weights of ``model`` that are multiplied with activations."""
    for node in model.graph:
        if node.op_type == "MatMul" and node.inputs[1] is not None and is_weight(node.inputs[1]):
            yield node.inputs[1]
