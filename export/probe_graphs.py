"""One-operator graphs and their variations: how :mod:`export.probe_operators` asks the NPU compiler.

A case is an operator as graphs use it: its inputs as shapes, weights or constants, and its
attributes. Its variations change one thing each: the dtype, the rank, a constant that becomes an
input, an attribute. They are what the lint can tell from a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from ml_dtypes import bfloat16
from onnx import TensorProto, helper, numpy_helper

OPSET = 23
DTYPES: dict[str, tuple[int, Any]] = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, bfloat16),
    "float64": (TensorProto.DOUBLE, np.float64),
    "int8": (TensorProto.INT8, np.int8),
    "uint8": (TensorProto.UINT8, np.uint8),
    "int16": (TensorProto.INT16, np.int16),
    "uint16": (TensorProto.UINT16, np.uint16),
    "int32": (TensorProto.INT32, np.int32),
    "uint32": (TensorProto.UINT32, np.uint32),
    "int64": (TensorProto.INT64, np.int64),
    "uint64": (TensorProto.UINT64, np.uint64),
    "bool": (TensorProto.BOOL, np.bool_),
}
MAX_RANK = 6


@dataclass(frozen=True)
class Input:
    """An input of the case's operator.

    A graph input of ``shape``, or a constant: ``values``, or with ``weight`` random numbers.
    ``dtype`` None follows the case's.
    """

    shape: tuple[int, ...] = (1, 4, 8)
    dtype: str | None = None
    weight: bool = False
    values: Any = None

    @property
    def constant(self) -> bool:
        """Whether the case gives it as an initializer."""
        return self.weight or self.values is not None


@dataclass(frozen=True)
class Case:
    """An operator; see the module's docstring.

    ``any_rank`` says that the shapes may be given more or fewer axes in front; ``variations`` are
    the values to try of attributes.
    """

    op: str
    inputs: tuple[Input | None, ...] = (Input(),)
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    domain: str = ""
    dtype: str = "float32"
    any_rank: bool = True
    variations: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def allowed_dtypes(case: Case, numbers: list[int]) -> tuple[str, ...]:
    """The dtypes that ONNX allows the inputs ``numbers`` of the case to have."""
    if case.domain:
        return ()
    schema = onnx.defs.get_schema(case.op, OPSET)
    formal = [schema.inputs[min(number, len(schema.inputs) - 1)].types for number in numbers]
    allowed = set.intersection(*map(set, formal)) if formal else set()
    onnx_names = {"float32": "float", "float64": "double"}
    return tuple(name for name in DTYPES if f"tensor({onnx_names.get(name, name)})" in allowed)


def dtypes_of(case: Case) -> tuple[str, ...]:
    """The dtypes that the inputs which follow the case's may have."""
    if case.domain:
        return ("float32", "float16")
    return allowed_dtypes(case, [n for n, given in enumerate(case.inputs) if given is not None and given.dtype is None])


def model_of(
    case: Case,
    *,
    dtype: str | None = None,
    rank: int | None = None,
    free: int | None = None,
    dtypes: dict[int, str] | None = None,
    outputs: int | None = None,
    **attributes: Any,
) -> onnx.ModelProto | None:
    """The case's graph with one thing changed: None where there is no such graph.

    Args:
        dtype: of the inputs that follow the case's.
        rank: of the inputs that are not constants.
        free: number of the constant input that becomes a graph input.
        dtypes: of inputs that have a dtype of their own, by number.
        outputs: how many of the operator's outputs are asked for.
        attributes: replace the case's.
    """
    kind = dtype or case.dtype
    names, graph_inputs, constants = [], [], []
    for number, given in enumerate(case.inputs):
        if given is None:
            names.append("")
            continue
        names.append(f"x{number}")
        element, numpy_type = DTYPES[(dtypes or {}).get(number) or given.dtype or kind]
        shape = given.shape
        if rank is not None and not given.constant and given.dtype is None:
            shape = (2,) * (rank - len(shape)) + shape[max(len(shape) - rank, 0) :]
        if given.constant and number != free:
            values = np.ones(shape) if given.weight else np.array(given.values)
            constants.append(numpy_helper.from_array(values.astype(numpy_type).reshape(shape), names[-1]))
        else:
            graph_inputs.append(helper.make_tensor_value_info(names[-1], element, shape))
    results = [f"y{number}" for number in range(outputs or case.outputs)]
    node = helper.make_node(case.op, names, results, domain=case.domain, **{**case.attributes, **attributes})
    return finish([node], graph_inputs, constants, results)


def quantized_model_of(case: Case, activations: str, weights: str) -> onnx.ModelProto | None:
    """The case between QuantizeLinear and DequantizeLinear, as a quantizer leaves it: None if it has no floats.

    A bias of a Conv or Gemm is int32, as the compiler expects.
    """
    plain = model_of(case)
    if plain is None or case.dtype != "float32" or case.domain:
        return None
    nodes, constants, outputs = [], [], []
    floats = {value.name for value in plain.graph.input if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    weighted = {f"x{number}" for number, given in enumerate(case.inputs) if given is not None and given.weight}

    def pair(name: str, source: str, dtype: str, quantize: bool, scale: float = 0.02) -> str:
        zero = 0 if dtype.startswith("int") else np.iinfo(DTYPES[dtype][1]).max // 2 + 1
        constants.append(numpy_helper.from_array(np.float32(scale), f"{name}_scale"))
        constants.append(numpy_helper.from_array(DTYPES[dtype][1](zero), f"{name}_zero"))
        parameters = [f"{name}_scale", f"{name}_zero"]
        if quantize:
            nodes.append(helper.make_node("QuantizeLinear", [source, *parameters], [f"{name}_q"]))
        else:
            values = np.full([max(size, 1) for size in shapes[source]], zero + 1).astype(DTYPES[dtype][1])
            constants.append(numpy_helper.from_array(values.reshape(shapes[source]), f"{name}_q"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", *parameters], [f"{name}_d"]))
        return f"{name}_d"

    shapes = {tensor.name: tuple(tensor.dims) for tensor in plain.graph.initializer}
    (node,) = plain.graph.node
    names = list(node.input)
    for number, name in enumerate(names):
        if name in floats:
            names[number] = pair(name, name, activations, quantize=True)
        elif name in weighted and case.inputs[number].dtype is None:
            bias = case.op in ("Conv", "ConvTranspose", "Gemm") and number == 2
            dtype, scale = ("int32", 0.0004) if bias else (weights, 0.02)
            names[number] = pair(name, name, dtype, quantize=False, scale=scale)
    constants += [tensor for tensor in plain.graph.initializer if tensor.name in names]
    operator = onnx.NodeProto()
    operator.CopyFrom(node)
    del operator.input[:]
    operator.input.extend(names)
    nodes.append(operator)
    for value in plain.graph.output:
        is_float = value.type.tensor_type.elem_type == TensorProto.FLOAT
        outputs.append(pair(value.name, value.name, activations, quantize=True) if is_float else value.name)
    if not floats or outputs == [value.name for value in plain.graph.output]:
        return None
    return finish(nodes, list(plain.graph.input), constants, outputs)


def finish(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    constants: list[onnx.TensorProto],
    outputs: list[str],
    *,
    opset: int = OPSET,
) -> onnx.ModelProto | None:
    """A model whose outputs' types are inferred; None if ONNX refuses it."""
    graph = helper.make_graph(nodes, "case", inputs, [], constants)
    domains = {node.domain for node in nodes} - {""}
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset), *(helper.make_opsetid(name, 1) for name in sorted(domains))],
        ir_version=10,
    )
    if domains:  # ONNX cannot infer these; such operators keep the shape of their first input here
        first = inputs[0].type.tensor_type
        shape = [axis.dim_value for axis in first.shape.dim]
        graph_outputs = [helper.make_tensor_value_info(name, first.elem_type, shape) for name in outputs]
    else:
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        try:
            inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        except onnx.shape_inference.InferenceError:
            return None
        graph_outputs = list(inferred.graph.output)
    del model.graph.output[:]
    model.graph.output.extend(graph_outputs)
    return model


def _freed(case: Case, dtype: str, number: int) -> onnx.ModelProto | None:
    """The case with a computed input, its outputs still of the shapes that the constant gave."""
    freed, fixed = model_of(case, dtype=dtype, free=number), model_of(case, dtype=dtype)
    if freed is not None and fixed is not None:
        del freed.graph.output[:]
        freed.graph.output.extend(fixed.graph.output)
    return freed


def _max_outputs(case: Case) -> int:
    if case.domain:
        return case.outputs
    schema = onnx.defs.get_schema(case.op, OPSET)
    return case.outputs if schema.max_output > 8 else schema.max_output  # a variadic output takes any number


Build = Callable[[], onnx.ModelProto | None]


def by_dtype(case: Case) -> dict[str, Build]:
    """The case in every dtype that ONNX allows, its own first."""
    kinds = dict.fromkeys((case.dtype, *dtypes_of(case)))
    return {kind: lambda kind=kind: model_of(case, dtype=kind) for kind in kinds}


def variations(case: Case, dtype: str) -> dict[tuple[str, str, Any], Build]:
    """The case in ``dtype`` with one thing changed, by ``(what, which, value)``.

    ``("rank", "", 4)``; ``("free", "1", True)``: input 1 is no constant; ``("dtype", "1", "int64")``:
    of an input with a dtype of its own; ``("outputs", "", 3)``; ``("attribute", "axis", 0)``.
    """
    found: dict[tuple[str, str, Any], Build] = {}
    if case.any_rank:
        for rank in range(1, MAX_RANK + 1):
            found["rank", "", rank] = lambda rank=rank: model_of(case, dtype=dtype, rank=rank)
    for number, given in enumerate(case.inputs):
        if given is not None and given.constant:
            found["free", str(number), True] = lambda number=number: _freed(case, dtype, number)
        if given is not None and given.dtype is not None:
            for kind in allowed_dtypes(case, [number]):
                changed = {number: kind}
                found["dtype", str(number), kind] = lambda changed=changed: model_of(case, dtype=dtype, dtypes=changed)
    for count in range(case.outputs + 1, _max_outputs(case) + 1):
        found["outputs", "", count] = lambda count=count: model_of(case, dtype=dtype, outputs=count)
    for name, values in case.variations.items():
        for value in values:
            changed = {name: value}
            found["attribute", name, str(value)] = lambda changed=changed: model_of(case, dtype=dtype, **changed)
    return found
