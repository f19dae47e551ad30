"""An ONNX graph as the lint sees it: types and shapes, who makes and takes a tensor, and its layer.

The weights' bytes are never loaded here. Nodes inside the branches of an If count as the graph's
own; what depends on constants alone is left out of :attr:`GraphView.nodes`, as the runtime folds it
before the compiler sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from meki_edge.errors import UserError

Shape = tuple[int | None, ...]
DTYPE_NAMES = {
    value: {"float": "float32", "double": "float64"}.get(name.lower(), name.lower())
    for name, value in TensorProto.DataType.items()
}
ITEM_BITS = {
    "float32": 32, "float16": 16, "bfloat16": 16, "float64": 64, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2,
    "int8": 8, "uint8": 8, "bool": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64,
}  # fmt: skip
NOT_FOLDED = frozenset(
    "RandomNormal RandomUniform RandomNormalLike RandomUniformLike Bernoulli Multinomial NonZero Compress".split()
)
"""Operators that the runtime computes when the graph runs, even of constants."""
MAX_CONSTANT_BYTES = 1 << 16  # what a shape or a scale may take, and no weight worth the name
LAYER = re.compile(r"(?:layers?|blocks?|h)[._/](\d+)")


@dataclass(frozen=True, kw_only=True)
class TensorType:
    """``dtype`` None where it is not known or no tensor; ``shape`` None where not even the rank is known."""

    dtype: str | None = None
    shape: Shape | None = None


@dataclass(kw_only=True)
class GraphView:
    """A loaded graph; see the module's docstring."""

    path: Path
    model: ModelProto
    types: dict[str, TensorType]
    problem: str | None
    """What ONNX's own checker says against the graph, if anything."""
    all_nodes: list[NodeProto] = field(init=False)
    producers: dict[str, NodeProto] = field(init=False)
    consumers: dict[str, list[NodeProto]] = field(init=False)

    def __post_init__(self) -> None:
        self.all_nodes = list(_flattened(self.graph))
        self.producers = {name: node for node in self.all_nodes for name in node.output if name}
        self.consumers = {}
        for node in self.all_nodes:
            for name in dict.fromkeys(names_read(node)):
                self.consumers.setdefault(name, []).append(node)

    @property
    def graph(self) -> GraphProto:
        """The main graph."""
        return self.model.graph

    @cached_property
    def initializers(self) -> dict[str, TensorProto]:
        """The graph's weights by name."""
        return {tensor.name: tensor for tensor in self.graph.initializer}

    @cached_property
    def inputs(self) -> list[ValueInfoProto]:
        """What has to be fed: inputs that no initializer fills."""
        return [value for value in self.graph.input if value.name not in self.initializers]

    @cached_property
    def constants(self) -> set[str]:
        """Tensors that are known before the graph runs, those without elements among them."""
        found = set(self.initializers) | {tensor.values.name for tensor in self.graph.sparse_initializer}
        found.update(value.name for value in self.graph.input if 0 in (self.type_of(value.name).shape or ()))
        for node in self.all_nodes:
            known = all(name in found for name in names_read(node)) and node.op_type not in NOT_FOLDED
            if known or (node.op_type == "Shape" and None not in (self.type_of(node.input[0]).shape or (None,))):
                found.update(name for name in node.output if name)
        return found

    @cached_property
    def nodes(self) -> list[NodeProto]:
        """The nodes that the compiler sees, in order; those that no output needs are still among them."""
        return [node for node in self.all_nodes if not all(name in self.constants for name in node.output if name)]

    def type_of(self, name: str) -> TensorType:
        """What is known of a tensor."""
        return self.types.get(name, TensorType())

    @cached_property
    def _layers(self) -> dict[int, str | None]:
        """By node: the module whose weight it takes, or the last layer that led to it."""
        layers: dict[int, str | None] = {}
        reached: dict[str, int] = {}
        for node in self.all_nodes:
            own = [name for name in (*node.input, node.name) if LAYER.search(name)]
            number = max((int(LAYER.findall(name)[-1]) for name in own), default=None)
            if number is None:
                number = max((reached[name] for name in node.input if name in reached), default=None)
            weight = next((name for name in own if name in self.initializers), None)
            label = weight.rpartition(".")[0] or weight if weight else None
            layers[id(node)] = label or (None if number is None else f"layer {number}")
            if number is not None:
                reached.update(dict.fromkeys(node.output, number))
        return layers

    def layer_of(self, node: NodeProto) -> str | None:
        """The module or layer of the model that ``node`` comes from; None before the first."""
        return self._layers[id(node)]

    def layer_of_tensor(self, name: str) -> str | None:
        """Of a weight, the module it belongs to; else the layer that makes or first takes it."""
        if name in self.initializers and LAYER.search(name):
            return name.rpartition(".")[0] or name
        node = self.producers.get(name) or next(iter(self.consumers.get(name, [])), None)
        return None if node is None else self.layer_of(node)


def _flattened(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "If" and attribute.type == AttributeProto.GRAPH:
                yield from _flattened(attribute.g)
        yield node


def _values(graph: GraphProto) -> Iterator[ValueInfoProto]:
    yield from (*graph.value_info, *graph.input, *graph.output)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _values(attribute.g)


def names_read(node: NodeProto) -> list[str]:
    """The tensors that a node takes, those inside its subgraphs included."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs:
            names += [name for inner in graph.node for name in names_read(inner)]
            names += [value.name for value in graph.output]
    return names


def load(path: Path) -> GraphView:
    """Read a graph without its external data.

    Raises:
        UserError: not an ONNX file.
    """
    model = read_model(path)
    try:
        readable = model.HasField("graph") and _names_are_text(model.graph)
    except ValueError:  # bytes that are no text
        readable = False
    if not readable:
        raise _no_model(path)
    bare = _without_data(model)
    problem = None
    try:
        onnx.checker.check_model(bare)
        inferred = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        problem = " ".join(str(error).split())
        inferred = _lenient(bare)
    types = {tensor.name: _initializer_type(tensor) for tensor in model.graph.initializer}
    for value in _values(inferred.graph):
        types.setdefault(value.name, type_of_value(value))
    return GraphView(path=path, model=model, types=types, problem=problem)


def read_model(path: Path) -> ModelProto:
    """Parse an ONNX file, whatever its name ends with, without its external data.

    Raises:
        UserError: it cannot be read, or is no ONNX file.
    """
    try:
        return onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path, fix="check the path") from None
    except (DecodeError, ValueError):
        raise _no_model(path) from None


def _no_model(path: Path) -> UserError:
    return UserError("this is not an ONNX model", where=path, fix="give an .onnx file, whole as it was written")


def _names_are_text(graph: GraphProto) -> bool:
    """Whether every name is UTF-8: a damaged file may parse, and then has names that are bytes."""
    named = (*graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info)
    names = [thing.name for thing in named] + [node.op_type for node in graph.node] + [node.domain for node in graph.node]
    names += [name for node in graph.node for name in (*node.input, *node.output)]
    return all(isinstance(name, str) for name in names)


def _lenient(model: ModelProto) -> ModelProto:
    """Shapes as far as they can be inferred."""
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return model


def _without_data(model: ModelProto) -> ModelProto:
    """A copy whose large or external initializers are inputs: small, and ONNX looks for no file."""
    bare = ModelProto()
    bare.CopyFrom(model)
    given = {value.name for value in bare.graph.input}
    kept = []
    for tensor in bare.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL and tensor.ByteSize() < MAX_CONSTANT_BYTES:
            kept.append(tensor)
        elif tensor.name not in given:
            bare.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    kept = [TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    return bare


def dtype_of(tensor: TensorProto) -> str:
    """The dtype's name; ``undefined`` for a number that stands for none."""
    return DTYPE_NAMES.get(tensor.data_type, "undefined")


def _initializer_type(tensor: TensorProto) -> TensorType:
    return TensorType(dtype=dtype_of(tensor), shape=tuple(tensor.dims))


def type_of_value(value: ValueInfoProto) -> TensorType:
    """The type that an input, an output or an inferred tensor states."""
    if not value.type.HasField("tensor_type"):
        return TensorType()
    tensor = value.type.tensor_type
    dtype = DTYPE_NAMES.get(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return TensorType(dtype=dtype)
    shape = tuple(axis.dim_value if axis.HasField("dim_value") else None for axis in tensor.shape.dim)
    return TensorType(dtype=dtype, shape=shape)
