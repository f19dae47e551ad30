"""The rewritten graphs: what they compute, by definition, and what must hold in every one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from quantization_oracle import dequantize, dequantize_weight

from calibration import affine
from calibration.affine import Range
from calibration.half import to_half
from calibration.precision import Scheme
from calibration.qdq import QUANTIZED, Quantizer
from calibration.ranges import Observations
from calibration.structure import MOVES, Groups, Structure
from calibration.weights import WeightFile
from export.onnx_decoder import cpu_session
from meki_edge import graph_spec
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec

W8A16 = Scheme(weights="int8", activations="uint16")


def real(name: str, width: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, 3, width))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """y = sigmoid(x W / 4 + c) * x2, with an external weight as exports have it."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 6)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "model.layers.0.w.weight"], ["product"]),
        helper.make_node("Mul", ["product", "quarter"], ["scaled"]),
        helper.make_node("Sigmoid", ["scaled"], ["gate"]),
        helper.make_node("Mul", ["gate", "x2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [real("x", 64), real("x2", 6)],
        [real("y", 6)],
        [
            numpy_helper.from_array(weight, "model.layers.0.w.weight"),
            numpy_helper.from_array(np.float32(0.25), "quarter"),
        ],
        value_info=[real(name, 6) for name in ("product", "scaled", "gate")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "small.onnx", save_as_external_data=True, location="weights.data", size_threshold=64)
    return tmp_path / "small.onnx"


def quantized(path: Path, out: Path, scheme: Scheme, ranges: dict[str, Range], typed: dict[str, str]) -> Path:
    model = ir.load(path)
    structure = Structure(model, Groups(), {}, 1)
    observations = Observations(histogram=False)
    for name, found in ranges.items():
        observations.add_extremes(structure.keys[name], found.low, found.high)
    found = observations.ranges(structure.groups, "minmax", 100)
    found.fix(structure.keys["gate"], affine.UNIT)
    out.mkdir()
    with WeightFile(out / "weights.data", lambda _: None) as weights:
        schemes = dict.fromkeys((-1, 0, 1), scheme)
        Quantizer(
            model, structure, ranges=found, schemes=schemes, typed=typed, cache={}, weights=weights
        ).run()
    ir.save(model, out / path.name)
    onnx.checker.check_model(out / path.name)
    return out / path.name


@pytest.mark.parametrize("scheme", [W8A16, Scheme(weights="int4", activations="uint8", block_size=32)], ids=str)
def test_a_graph_computes_what_its_quantization_says(tmp_path: Path, small: Path, scheme: Scheme) -> None:
    """Node by node in NumPy, each result rounded to its own integers."""
    rng = np.random.default_rng(1)
    x, x2 = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 3, 64), (1, 3, 6)))
    weight = numpy_helper.to_array(onnx.load(small).graph.initializer[0])
    matrix = dequantize_weight(*affine.quantize_weight(weight, scheme.weights, block_size=scheme.block_size))
    ranges = {"x": Range(low=-3, high=3), "x2": Range(low=-2, high=2), "product": Range(low=-9, high=14)}
    ranges |= {"scaled": Range(low=-2, high=3), "y": Range(low=-2, high=2)}
    dtype = scheme.activations

    def stored(name: str, values: np.ndarray) -> np.ndarray:
        how = affine.quantization(affine.UNIT if name == "gate" else ranges[name], dtype)
        return dequantize(affine.quantize(values, how, dtype), how)

    rx = stored("x", x)
    scaled = stored("scaled", stored("product", rx @ matrix) * np.float32(0.25))
    gate = stored("gate", 1 / (1 + np.exp(-scaled)))
    expected = stored("y", gate * stored("x2", x2))
    path = quantized(small, tmp_path / "q", scheme, ranges, {"x": dtype})
    how = affine.quantization(ranges["x"], dtype)
    found = cpu_session(path).run(["y"], {"x": affine.quantize(x, how, dtype), "x2": x2})[0]
    step = affine.quantization(ranges["y"], dtype).scale
    assert np.abs(found - expected).max() <= step * 1.01, "a last bit of a sum may round the other way"
    assert (found == expected).mean() > 0.8
    typed = onnx.load(path, load_external_data=False).graph
    assert typed.input[0].type.tensor_type.elem_type == helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def test_weights_beside_a_float16_graph(tmp_path: Path, small: Path) -> None:
    """MatMulNBits with the codes of the block quantization, against NumPy."""
    model = ir.load(small)
    structure = Structure(model, Groups(), {}, 1)
    scheme = Scheme(weights="int4", activations="float16", block_size=32)
    with WeightFile(tmp_path / "w4.data", lambda _: None) as weights:
        to_half(model, structure, schemes=dict.fromkeys((-1, 0, 1), scheme), typed=(), weights=weights)
    ir.save(model, tmp_path / "w4.onnx")
    weight = numpy_helper.to_array(onnx.load(small).graph.initializer[0])
    matrix = dequantize_weight(*affine.quantize_weight(weight, "int4", block_size=32))
    rng = np.random.default_rng(2)
    x, x2 = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 3, 64), (1, 3, 6)))
    found = cpu_session(tmp_path / "w4.onnx").run(["y"], {"x": x, "x2": x2})[0]
    assert np.abs(found - x2 / (1 + np.exp(-(x @ matrix) / 4))).max() < 0.02
    assert {node.op_type for node in model.graph} >= {"MatMulNBits", "Cast"}


Params = tuple[float, int, str]


def pairs(graph: onnx.GraphProto) -> tuple[dict[str, Params], dict[str, onnx.NodeProto]]:
    """How each value that a Q or DQ node touches is stored, and every value's producer."""
    constants = {i.name: i for i in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    found: dict[str, Params] = {}
    for node in graph.node:
        if node.op_type == "QuantizeLinear" or node.op_type == "DequantizeLinear" and node.input[0] not in constants:
            scale, zero = (numpy_helper.to_array(constants[name]) for name in node.input[1:])
            for name in (node.input[0], node.output[0]):
                found[name] = (float(scale), int(zero), zero.dtype.name)
    return found, producers


def graph_files(directory: Path) -> Iterator[tuple[Path, onnx.GraphProto]]:
    for path in sorted(directory.glob("*.onnx")):
        onnx.checker.check_model(path)
        yield path, onnx.load(path, load_external_data=False).graph


def test_every_operator_of_integers_stands_between_pairs(calibrated: Path) -> None:
    for path, graph in graph_files(calibrated):
        stored, producers = pairs(graph)
        constants = {i.name for i in graph.initializer}
        for node in graph.node:
            if node.op_type not in QUANTIZED:
                assert node.op_type in ("QuantizeLinear", "DequantizeLinear", "Conv"), path
                continue
            for name in node.input:
                if name in producers:
                    assert producers[name].op_type == "DequantizeLinear", f"{path}: {node.name} takes {name} as float"
                elif name in constants:
                    kind = next(i for i in graph.initializer if i.name == name).data_type
                    assert kind == onnx.TensorProto.INT64 or node.op_type == "Clip", f"{node.name}: {name}"
            for name in node.output:
                assert name in stored, f"{path}: {name} is not stored"


def test_what_only_moves_keeps_its_quantization(calibrated: Path) -> None:
    for _, graph in graph_files(calibrated):
        stored, producers = pairs(graph)
        for node in graph.node:
            if node.op_type in MOVES:
                sources = {stored[name] for name in node.input if name in producers}
                assert {stored[name] for name in node.output} == sources and len(sources) == 1


def test_the_cache_has_one_quantization_on_its_way_round(calibrated: Path) -> None:
    path = calibrated / graph_spec.FILE_NAME
    spec = GraphSpec.from_json(read_json(path), path)
    seen = defaultdict(set)
    for graph in spec.graphs.values():
        for tensor in (*graph.inputs, *graph.outputs):
            if tensor.role in ("past_key", "present_key", "past_value", "present_value"):
                assert tensor.dtype == "uint8" and tensor.quantization.zero_point == 128
                seen[tensor.role.split("_")[1], tensor.index].add(tensor.quantization)
    assert len(seen) == 6 and all(len(found) == 1 for found in seen.values())
    for file, graph in graph_files(calibrated):
        stored, _ = pairs(graph)
        for tensor in (*(spec.graphs[file.stem]).inputs, *spec.graphs[file.stem].outputs):
            if tensor.quantization is not None:
                how = tensor.quantization
                assert stored[tensor.name] == (how.scale, how.zero_point, tensor.dtype), "the spec is the graph's"


def test_products_take_the_cache_as_it_is_stored(calibrated: Path) -> None:
    """16-bit queries meet 8-bit keys: nothing is converted on the way from the cache."""
    for _, graph in graph_files(calibrated):
        pairs_of = [node for node in graph.node if node.op_type == "DequantizeLinear"]
        consumers = [node for node in pairs_of if node.input[0].startswith("past_")]
        assert len(consumers) == 6
        for node in consumers:
            (user,) = (other for other in graph.node if node.output[0] in other.input)
            assert user.op_type == "MatMul"


def test_four_bit_weights_have_zero_points(tmp_path: Path, small: Path) -> None:
    """Without them the NPU compiler takes the codes for others, and says nothing."""
    ranges = {name: Range(low=-3, high=3) for name in ("x", "x2", "product", "scaled", "y")}
    path = quantized(small, tmp_path / "q", Scheme(weights="int4", activations="uint16"), ranges, {})
    graph = onnx.load(path).graph
    zero_points = [i for i in graph.initializer if i.data_type == onnx.TensorProto.INT4 and "zero" in i.name]
    (node,) = (node for node in graph.node if node.input[0].endswith("_codes") and "layers" in node.input[0])
    assert [i.name for i in zero_points] == [node.input[2]]
    assert not numpy_helper.to_array(zero_points[0]).astype(int).any()
