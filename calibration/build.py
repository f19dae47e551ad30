"""Write the graphs of one precision: graphs, weights, and the spec that says what the host exchanges with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from calibration import encodings
from calibration.affine import UNIT, Range
from calibration.graphs import FloatGraphs
from calibration.half import to_half
from calibration.precision import Scheme
from calibration.qdq import QUANTIZED, Quantizer, used_matrices
from calibration.ranges import UNIT_OPERATORS, Ranges
from calibration.structure import Structure, is_weight
from calibration.weights import WeightFile
from meki_edge import console
from meki_edge.graph_spec import Graph, GraphSpec, Part, Quantization, TensorSpec

CACHE_ROLES = frozenset({"past_key", "past_value", "present_key", "present_value"})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is stored how: the scheme of every unit, and the dtypes of what the host exchanges.

    ``kv_dtype`` and ``rows_dtype`` are ``uint8``, ``uint16`` or (where the graph computes in
    floating point, or nothing is to be typed) ``float16`` or ``float32``.
    """

    schemes: Mapping[int, Scheme]
    kv_dtype: str
    rows_dtype: str

    def cache(self, part: Part) -> dict[str, str]:
        """The dtype of keys and values by name, where they are stored as integers."""
        if not self.kv_dtype.startswith("uint"):
            return {}
        return {t.name: self.kv_dtype for t in (*part.inputs, *part.outputs) if t.role in CACHE_ROLES}


def fix_ranges(ranges: Ranges, graphs: FloatGraphs) -> None:
    """Add what is known without running anything: the mask, the angles, softmax and sigmoid."""
    mask = Range(low=graphs.spec.mask_value, high=0.0)
    known = {"attention_mask": mask, "memory_mask": mask}
    known |= dict.fromkeys(("position_cos", "position_sin"), Range(low=-1.0, high=1.0))
    for part in graphs.parts():
        model, structure = graphs.load(part)
        for tensor in part.inputs:
            if tensor.role in known:
                ranges.fix(structure.keys[tensor.name], known[tensor.role])
        for node in model.graph:
            if node.op_type in UNIT_OPERATORS:
                ranges.fix(structure.keys[node.outputs[0].name], UNIT)


def write_graphs(directory: Path, graphs: FloatGraphs, plan: Plan, ranges: Ranges | None) -> GraphSpec:
    """Write all graphs, part by part, and their encodings, into ``directory``; returns their spec.

    Args:
        ranges: of the activations; None where the graph computes in floating point.
    """
    spec = graphs.spec
    typed: dict[str, str] = {}
    quantizations: dict[str, Quantization] = {}
    total = sum(_weight_bytes(graphs, part) for part in spec.prefill.parts)
    with console.byte_progress("quantize weights", total) as advance:
        for twins in zip(*(graph.parts for graph in spec.graphs.values()), strict=True):
            path = directory / _weights_name(graphs, twins[0])
            with WeightFile(path, advance) as weights:
                for part in twins:
                    _write_part(directory, graphs, part, plan, ranges, weights, typed, quantizations)
    return spec.map_graphs(lambda graph: _typed(graph, typed, quantizations))


def _write_part(
    directory: Path,
    graphs: FloatGraphs,
    part: Part,
    plan: Plan,
    ranges: Ranges | None,
    weights: WeightFile,
    typed: dict[str, str],
    quantizations: dict[str, Quantization],
) -> None:
    model, structure = graphs.load(part)
    found = _dtypes(model, structure, part, plan, typed)
    typed |= found
    if ranges is None:
        matrices = to_half(model, structure, schemes=plan.schemes, typed=found, weights=weights)
        activations, constants = {}, {}
    else:
        cache = plan.cache(part)
        quantizer = Quantizer(
            model, structure, ranges=ranges, schemes=plan.schemes, typed=found, cache=cache, weights=weights
        )
        quantizer.run()
        quantizations |= {name: quantizer.quantization(name, dtype) for name, dtype in found.items()}
        activations, constants, matrices = quantizer.activations, quantizer.constants, quantizer.matrices
    ir.save(model, directory / part.file)
    encodings.write(directory / encodings.file_name(part.file), activations, constants, matrices)


def _dtypes(model: ir.Model, structure: Structure, part: Part, plan: Plan, known: Mapping[str, str]) -> dict[str, str]:
    """The dtypes of a part's typed inputs and outputs; ``known`` are those of earlier parts."""
    producers = {value.name: value.producer() for value in model.graph.outputs}
    found = {}
    for tensor in (*part.inputs, *part.outputs):
        if tensor.role in CACHE_ROLES and plan.kv_dtype != "float32":
            found[tensor.name] = plan.kv_dtype
        elif tensor.role == "memory_rows" and plan.rows_dtype != "float32":
            found[tensor.name] = plan.rows_dtype
        elif tensor.role == "hidden" and tensor.name in known:
            found[tensor.name] = known[tensor.name]
        elif tensor.role == "hidden" and (node := producers.get(tensor.name)) is not None:
            scheme = plan.schemes[structure.unit(node)]
            if scheme.is_float or node.op_type in QUANTIZED:
                found[tensor.name] = scheme.activations
    return found


def _typed(graph: Graph, typed: Mapping[str, str], quantizations: Mapping[str, Quantization]) -> Graph:
    def tensor(spec: TensorSpec) -> TensorSpec:
        if spec.name not in typed:
            return replace(spec, dtype="float32")
        return replace(spec, dtype=typed[spec.name], quantization=quantizations.get(spec.name))

    def part(spec: Part) -> Part:
        return replace(spec, inputs=tuple(map(tensor, spec.inputs)), outputs=tuple(map(tensor, spec.outputs)))

    return replace(graph, parts=tuple(map(part, graph.parts)))


def weight_sizes(graphs: FloatGraphs) -> dict[int, list[tuple[int, int]]]:
    """The shapes ``[K, N]`` of each unit's matrices."""
    found: dict[int, list[tuple[int, int]]] = {}
    for part in graphs.spec.decode.parts:
        model, structure = graphs.load(part)
        for value in used_matrices(model):
            (use,) = list(value.uses())[:1]
            found.setdefault(structure.unit(use.node), []).append(tuple(value.shape.numpy()))
    return found


def unit_bytes(shapes: list[tuple[int, int]], scheme: Scheme) -> int:
    """Bytes of one unit's matrices."""
    return sum(scheme.weight_bytes(*shape) for shape in shapes)


def _weight_bytes(graphs: FloatGraphs, part: Part) -> int:
    model, _ = graphs.load(part)
    return sum(value.const_value.nbytes for value in used_matrices(model))


def _weights_name(graphs: FloatGraphs, part: Part) -> str:
    """What the part's weights file is called: as in the export."""
    model, _ = graphs.load(part)
    weights = (value.const_value for value in model.graph.initializers.values() if is_weight(value))
    return Path(next(weights).location).name
