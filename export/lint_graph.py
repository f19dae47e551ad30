"""Rules on one ONNX graph: what it feeds and returns, its tensors' types and shapes, its operators.

Which operators the compiler takes was measured (:mod:`export.operators`); a test compiles a corpus
of sound and broken graphs and holds these rules to the compiler's verdicts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from onnx import AttributeProto, NodeProto, helper

from export.findings import AI_HUB, COMPILER, ERROR, NUMERICS, WARNING, Finding
from export.graph_view import GraphView, TensorType, type_of_value
from export.operators import Operator, table

MIN_OPSET = 7
CONTRIB = "com.microsoft"
ONNX_DOMAINS = ("", "ai.onnx")
MISCOMPILED_NORM_RANK = 4
ANY_OUTPUTS = frozenset({"Split"})
QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
QUANTIZED = ("uint8", "int8", "uint16", "int16")
WIDE = ("float64", "int64")
"""Dtypes that the compiler takes inside a graph, where it computes narrower ones, but not from a Cast to its output."""
MAX_RANK = 5


def graph_findings(view: GraphView) -> list[Finding]:
    """All findings on one graph; of a graph that ONNX itself refuses, only that."""
    if view.problem is not None:
        return [
            Finding(
                rule="invalid-graph",
                severity=ERROR,
                source=COMPILER,
                where=str(view.path),
                what=f"ONNX refuses the graph: {view.problem}",
                fix="export the graph again",
            )
        ]
    rules = (_versions, _inputs_and_outputs, _names, _tensors, _weights, _operators)
    return [finding for rule in rules for finding in rule(view)]


def _finding(view: GraphView, rule: str, what: str, fix: str, **more: str | None) -> Finding:
    usual = {"severity": ERROR, "source": COMPILER, "where": str(view.path)}
    return Finding(**{"rule": rule, "what": what, "fix": fix, **usual, **more})


def _versions(view: GraphView) -> Iterator[Finding]:
    opset = max((entry.version for entry in view.model.opset_import if entry.domain in ONNX_DOMAINS), default=MIN_OPSET)
    if opset < MIN_OPSET:
        what = f"operator set {opset}: the compiler's runtime knows {MIN_OPSET} and later"
        yield _finding(view, "opset", what, "export with operator set 23 (the first with RMSNormalization)")


def _inputs_and_outputs(view: GraphView) -> Iterator[Finding]:
    inputs = {value.name for value in view.inputs}
    for value in (*view.inputs, *view.graph.output):
        side = "input" if value.name in inputs else "output"
        stated = type_of_value(value)
        place = {"tensor": value.name, "layer": view.layer_of_tensor(value.name)}
        if stated.dtype is None:
            what = f"graph {side} that is no tensor"
            yield _finding(view, "non-tensor-io", what, "feed and return plain tensors", **place)
            continue
        shape = view.type_of(value.name).shape
        if shape is None or None in shape:
            what = f"graph {side} of a shape that is not fixed"
            yield _finding(view, "dynamic-shape", what, "export with static shapes: the NPU takes no others", **place)
        if stated.dtype == "float64":
            what = f"float64 graph {side}"
            yield _finding(view, "float64", what, "use float32: the NPU has no doubles", **place)
        if stated.dtype in ("int64", "uint64"):
            fix = "use int32, or submit with --truncate_64bit_io"
            yield _finding(view, "int64-io", f"{stated.dtype} graph {side}", fix, source=AI_HUB, **place)
        if stated.dtype == "bool":
            fix = "use an additive float mask, or int32, at the graph's boundary"
            yield _finding(view, "bool-tensor", f"BOOL graph {side}", fix, source=AI_HUB, **place)
    for value in view.inputs:
        if value.name not in view.consumers:
            what = "graph input that nothing takes: compilers drop it, and then the host feeds one too many"
            yield _finding(view, "unused-input", what, "remove it from the graph", tensor=value.name, severity=WARNING)
    for value in view.graph.output:
        if value.name in inputs or value.name in view.constants:
            what = "graph output that is an input or a constant: there is nothing to compute"
            yield _finding(view, "constant-output", what, "let the host keep it", tensor=value.name, severity=WARNING)
    if not view.nodes:
        yield _finding(view, "nothing-to-compute", "no node is left once constants are folded", "check the export")


def _names(view: GraphView) -> Iterator[Finding]:
    """Tensor names must differ after compilers made them identifiers; node names should."""
    boundary = [value.name for value in (*view.inputs, *view.graph.output)]
    plain = Counter(re.sub(r"\W", "_", name) for name in dict.fromkeys(boundary))
    for name in dict.fromkeys(boundary):
        if plain[re.sub(r"\W", "_", name)] > 1:
            what = "graph inputs or outputs whose names are the same once '.', '/' and ':' are written as '_'"
            yield _finding(view, "name-collision", what, "rename one of them", source=AI_HUB, tensor=name)
    nodes = Counter(node.name for node in view.graph.node if node.name)
    for name, count in nodes.items():
        if count > 1:
            yield _finding(view, "name-collision", f"{count} nodes are called {name!r}", "give every node its own name")


def _tensors(view: GraphView) -> Iterator[Finding]:
    """Types and shapes that no operator's rule needs to name."""
    boundary = {value.name for value in view.inputs}
    for name in dict.fromkeys(name for node in view.nodes for name in (*node.input, *node.output) if name):
        shape = view.type_of(name).shape
        place = {"tensor": name, "layer": view.layer_of_tensor(name)}
        if name not in view.constants and _inside(view, name, ("float64",)):
            what = "float64 tensor: the NPU computes it in float16 all the same"
            yield _finding(view, "float64", what, "compute in float32", severity=WARNING, **place)
        if name not in view.constants and _inside(view, name, ("bool",)):
            what = "BOOL tensor inside the graph: it compiles here, and has failed at AI Hub"
            fix = "compute with numbers where you can"
            yield _finding(view, "bool-tensor", what, fix, severity=WARNING, source=AI_HUB, **place)
        if shape is not None and 0 in shape:
            computed = name not in boundary and name not in view.constants
            what, fix = "tensor without elements", "remove what makes or takes it"
            # The runtime may drop such an input; AI Hub has nothing to feed it with.
            yield _finding(view, "zero-size", what, fix, **place, source=COMPILER if computed else AI_HUB)


def _operators(view: GraphView) -> Iterator[Finding]:
    folded = _known_patterns(view)
    for node in view.nodes:
        place = {"tensor": next(iter(node.output), None), "layer": view.layer_of(node)}
        if node.op_type == "If":
            what = "control flow: the local compiler computes both branches, AI Hub may refuse it"
            yield _finding(view, "control-flow", what, _UNROLL, severity=WARNING, source=AI_HUB, **place)
        elif any(attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for attribute in node.attribute):
            yield _finding(view, "unsupported-op", f"{node.op_type} does not run on the NPU", _UNROLL, **place)
        elif node.domain in ONNX_DOMAINS:
            yield from _operator(view, node, place, folded)
        else:
            yield from _foreign(view, node, place)


def _foreign(view: GraphView, node: NodeProto, place: dict[str, str | None]) -> Iterator[Finding]:
    rule = "com-microsoft-op" if node.domain == CONTRIB else "custom-op"
    name = f"{node.domain}.{node.op_type}"
    if node.op_type == "EPContext":
        what, fix = "the graph is compiled already", "lint the directory that it was compiled from"
        yield _finding(view, rule, what, fix, **place)
    elif _why_not(view, node, table().operators.get(f"{node.domain}::{node.op_type}")) is not None:
        fix = "export plain ONNX operators (no ONNX Runtime transformer optimizations)"
        yield _finding(view, rule, f"{name} does not run on the NPU", fix, **place)
    else:
        what = f"{name} is taken by ONNX Runtime's compiler, not by AI Hub's"
        yield _finding(view, rule, what, "compile on this machine with `meki-edge compile`", source=AI_HUB, **place)


def _operator(
    view: GraphView, node: NodeProto, place: dict[str, str | None], folded: set[int]
) -> Iterator[Finding]:
    why = None if id(node) in folded else _why_not(view, node, table().operators.get(node.op_type))
    if why is not None:
        yield _finding(view, "unsupported-op", why, _FIXES.get(node.op_type, _REWRITE), **place)
    if node.op_type == "RMSNormalization" and len(view.type_of(node.input[0]).shape or ()) >= MISCOMPILED_NORM_RANK:
        what = f"RMSNormalization of rank {MISCOMPILED_NORM_RANK} compiles, and computes nonsense for some shapes"
        fix = "reshape its input to rank 3 first, as `meki-edge export` does"
        yield _finding(view, "miscompiled-shape", what, fix, source=NUMERICS, **place)


def _weights(view: GraphView) -> Iterator[Finding]:
    for node in view.graph.node:  # constants too
        if _lacks_zero_points(view, node):
            what = "4-bit weights with a scale a channel and no zero points compile, and compute nonsense"
            fix = "give the DequantizeLinear its zero points (zeros), as `meki-edge calibrate` does"
            place = {"tensor": node.output[0], "layer": view.layer_of(node)}
            yield _finding(view, "miscompiled-weights", what, fix, source=NUMERICS, **place)


def _lacks_zero_points(view: GraphView, node: NodeProto) -> bool:
    if node.op_type != "DequantizeLinear" or view.type_of(node.input[0]).dtype != "int4":
        return False
    blocks = any(attribute.name == "block_size" and attribute.i for attribute in node.attribute)
    per_channel = len(view.type_of(node.input[1]).shape or ()) == 1 and not blocks
    return per_channel and not (len(node.input) > 2 and node.input[2])


def _known_patterns(view: GraphView) -> set[int]:
    """Nodes (by id) that the runtime removes or takes together, whatever the table says of them alone."""
    found: set[int] = set()
    outputs = {value.name for value in view.graph.output}
    for node in view.nodes:
        chain = [node]
        while len(chain) < 3 and chain[-1].output[0] not in outputs:
            takers = view.consumers.get(chain[-1].output[0], [])
            if len(takers) != 1:
                break
            chain.append(takers[0])
        kinds = [link.op_type for link in chain[:3]]
        if node.op_type == "Erf" and _in_gelu(view, node):
            found.add(id(node))
        elif node.op_type == "Dropout" and node.output[0] not in outputs and sum(map(bool, node.output)) == 1:
            found.add(id(node))
        elif kinds == ["Reshape", "Transpose", "Reshape"] and _is_depth_to_space(chain[1]):
            found.update(map(id, chain[:3]))
    return found


def _why_not(view: GraphView, node: NodeProto, known: Operator | None) -> str | None:
    """Why the compiler will not take the node; None if, as far as was measured, it does."""
    op = node.op_type
    if op in QUANTIZERS:
        return _why_not_quantizer(view, node)
    if known is None:
        return f"{op} is not known to run on the NPU"
    if not known.dtypes:
        return f"{op} does not run on the NPU"
    typed = TensorType()
    if known.typed_input is not None and known.typed_input < len(node.input):
        typed = _single(view, node.input[known.typed_input])
    quantized = _quantized(view, node)
    if quantized is not None:
        if quantized not in known.quantized:
            return f"{op} does not run quantized with {quantized} activations{_those(known.quantized)}"
    elif typed.dtype is not None and typed.dtype not in known.dtypes:
        return f"{op} does not run with {typed.dtype}{_those(known.dtypes)}"
    if typed.shape is not None and known.ranks and len(typed.shape) not in (0, *known.ranks):
        return f"{op} does not run at rank {len(typed.shape)}{_those(known.ranks)}"
    if any(len(view.type_of(name).shape or ()) > MAX_RANK for name in (*node.input, *node.output)):
        return f"{op} takes or makes a tensor of more than {MAX_RANK} axes"
    for number in known.must_be_constant:
        if number < len(node.input) and node.input[number] and node.input[number] not in view.constants:
            return f"{op} needs a constant for its input {number}, which the graph computes"
    for number, dtypes in known.input_dtypes.items():
        if int(number) < len(node.input):
            dtype = view.type_of(node.input[int(number)]).dtype
            if dtype is not None and dtype not in (*dtypes, typed.dtype):
                return f"{op} does not take {dtype} as its input {number}{_those(dtypes)}"
    asked = sum(bool(name) for name in node.output)
    if asked > max(known.outputs, 1) and op not in ANY_OUTPUTS:
        return f"{op} does not run with {asked} outputs ({known.outputs} would)"
    for attribute in node.attribute:
        value = _value(attribute, len(typed.shape or ()))
        tried = known.attributes.get(attribute.name, {})
        if op == "Cast" and attribute.name == "to" and _inside(view, node.output[0], WIDE):
            continue
        if tried and not tried.get(value, list(tried.values())[-1]):  # what was not tried is as the last that was
            return f"{op} does not run with {attribute.name}={value}"
    return None


def _inside(view: GraphView, name: str, dtypes: tuple[str, ...]) -> bool:
    """Whether the graph computes a tensor of one of ``dtypes``, or has it as a constant, for itself alone."""
    fed_or_returned = [value.name for value in (*view.inputs, *view.graph.output)]
    return view.type_of(name).dtype in dtypes and name not in fed_or_returned


def _single(view: GraphView, name: str) -> TensorType:
    """A tensor's type; inside a graph the compiler takes float64 for float32."""
    kind = view.type_of(name)
    return TensorType(dtype="float32", shape=kind.shape) if _inside(view, name, ("float64",)) else kind


def _why_not_quantizer(view: GraphView, node: NodeProto) -> str | None:
    integers = view.type_of(node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]).dtype
    if integers not in QUANTIZED and integers is not None and node.output[0] not in view.constants:
        return f"{node.op_type} does not run with {integers}{_those(QUANTIZED)}"
    alone = "nothing else in the graph runs on the NPU"
    return f"{node.op_type} does not run where {alone}" if len(view.nodes) == 1 else None


def _value(attribute: AttributeProto, rank: int) -> str:
    """An attribute as the table writes it; an axis is counted from the back."""
    value = helper.get_attribute_value(attribute)
    if attribute.name == "axis" and value >= 0 and rank:
        value -= rank
    return value.decode() if isinstance(value, bytes) else str(value)


def _quantized(view: GraphView, node: NodeProto) -> str | None:
    """The activations' integer dtype where the node stands between DequantizeLinear and QuantizeLinear."""
    if node.op_type in QUANTIZERS:
        return None
    made = [view.producers.get(name) for name in node.input if name]
    takers = [taker for name in node.output for taker in view.consumers.get(name, [])]
    sources = [maker for maker in made if maker is not None and maker.op_type == "DequantizeLinear"]
    if not sources or not takers or any(taker.op_type != "QuantizeLinear" for taker in takers):
        return None
    if any(value.name in node.output for value in view.graph.output):
        return None
    activations = [maker for maker in sources if maker.output[0] not in view.constants] or sources
    return view.type_of(activations[0].input[0]).dtype


def _in_gelu(view: GraphView, node: NodeProto) -> bool:
    """Whether Erf is the heart of an exact GELU, x · (1 + erf(x / √2)) / 2, which the compiler knows as one."""
    maker = view.producers.get(node.input[0])
    takers = view.consumers.get(node.output[0], [])
    if maker is None or maker.op_type not in ("Div", "Mul") or [taker.op_type for taker in takers] != ["Add"]:
        return False
    return any(taker.op_type == "Mul" for taker in view.consumers.get(takers[0].output[0], []))


def _is_depth_to_space(transpose: NodeProto) -> bool:
    """Whether a transposition of six axes, between two Reshapes, is that of DepthToSpace, which is taken as one."""
    return any(list(attribute.ints) in ([0, 3, 4, 1, 5, 2], [0, 1, 4, 2, 5, 3]) for attribute in transpose.attribute)


def _those(values: tuple[object, ...]) -> str:
    return f" ({', '.join(map(str, values))} would)" if values else ""


_UNROLL = "unroll it, or decide on the host"
_REWRITE = "rewrite it with operators that run, or compute it on the host"
_FIXES = {
    "Erf": "use Gelu, or the exact form x·(1 + erf(x/√2))/2, which is taken as one operator",
    "NonZero": "its result's shape depends on data: compute it on the host",
    "Attention": "write attention as MatMul, Add and Softmax",
    "Size": "export with static shapes, so that it folds to a constant",
}

