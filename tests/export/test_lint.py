"""The lint of graphs: what we export is clean, each defect is named, and the compiler's silence is no approval."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from lint_cases import X, Y, graph, rewrite, rules
from onnx import TensorProto, helper, numpy_helper

from export.findings import AI_HUB, COMPILER, ERROR, NUMERICS, WARNING
from export.lint import errors, grouped, lint
from export.qnn_local import qnn_available
from export.targets import chip

Exported = dict[str, tuple[Path, Path]]


@pytest.mark.parametrize("arm", ["dense", "meki"])
def test_what_we_export_is_clean(exported: Exported, arm: str) -> None:
    assert lint(exported[arm][1]) == []
    assert lint(exported[arm][1], target=chip("sm8650")) == []


def test_every_addressing_is_clean(mixed: tuple[Path, Path, Path]) -> None:
    assert errors(lint(mixed[2])) == []


def test_a_bundle_is_clean(bundles: dict[str, Path]) -> None:
    assert errors(lint(bundles["meki"])) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (("int64[1,4] x", "int64[1,4] y", "y = Add(x, x)"), ("int64-io", ERROR, AI_HUB)),
        (("float[1,4] x, bool[1,4] c", "float[1,4] y", "y = Where(c, x, x)"), ("bool-tensor", ERROR, AI_HUB)),
        ((X, Y, "c = Greater(x, z) y = Where(c, x, z)", "float z = {0}"), ("bool-tensor", WARNING, AI_HUB)),
        (("float[N,4] x", "float[N,4] y", "y = Relu(x)"), ("dynamic-shape", ERROR, COMPILER)),
        ((X, Y, "e = Erf(x) y = Add(e, x)"), ("unsupported-op", ERROR, COMPILER)),
        (("double[4] x", "double[4] y", "y = Relu(x)"), ("float64", ERROR, COMPILER)),
        ((X, Y, "d = Cast<to=11>(x) e = Mul(d, d) y = Cast<to=1>(e)"), ("float64", WARNING, COMPILER)),
        (("float[1,0,8] x, float[1,4,8] z", Y, "y = Concat<axis=1>(x, z)"), ("zero-size", ERROR, AI_HUB)),
        (('float[4] "a.b", float[4] a_b', "float[4] y", 'y = Add("a.b", a_b)'), ("name-collision", ERROR, AI_HUB)),
        (("float[4] x, float[4] z", "float[4] y", "y = Relu(x)"), ("unused-input", WARNING, COMPILER)),
        (("float[4] x", "float[4] y, float[4] x", "y = Relu(x)"), ("constant-output", WARNING, COMPILER)),
        (
            ("float[1,2,3,4] x", "float[1,2,3,4] y", "y = RMSNormalization(x, g)", "float[4] g = {1,1,1,1}"),
            ("miscompiled-shape", ERROR, NUMERICS),
        ),
        (
            (X, Y, "m = MatMul(x, w) y = Relu(m)", "float[8,8] w = {" + "0, " * 63 + "70000}"),
            ("float16-overflow", ERROR, NUMERICS),
        ),
    ],
)
def test_graph_rules(tmp_path: Path, text: tuple[str, ...], expected: tuple[str, str, str]) -> None:
    assert expected in rules(graph(tmp_path, *text))


def test_operators_of_other_domains(tmp_path: Path) -> None:
    contrib = ', "com.microsoft" : 1'
    norm, gain = "y = com.microsoft.SkipSimplifiedLayerNormalization(x, x, g)", "float[8] g = {1,1,1,1,1,1,1,1}"
    path = graph(tmp_path, X, Y, norm, gain, contrib)
    assert ("com-microsoft-op", ERROR, COMPILER) in rules(path)
    path = graph(tmp_path, X, Y, "y = com.microsoft.Gelu(x)", "", contrib)
    assert rules(path) == {("com-microsoft-op", ERROR, AI_HUB)}, "the local compiler takes this one"
    path = graph(tmp_path, X, Y, "y = my.domain.Thing(x)", "", ', "my.domain" : 1')
    assert ("custom-op", ERROR, COMPILER) in rules(path)


def test_what_onnx_refuses(tmp_path: Path) -> None:
    path = graph(tmp_path, X, Y, "y = Relu(x)")
    rewrite(path, lambda model: model.graph.node[0].input.append("nothing"))
    (finding,) = lint(path)
    assert finding.rule == "invalid-graph" and finding.severity == ERROR
    path = graph(tmp_path, X, Y, "y = Relu(x)")
    rewrite(path, lambda model: setattr(model.opset_import[0], "version", 5))
    assert "opset" in {finding.rule for finding in lint(path)}


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    path = graph(tmp_path, X, Y, "y = MatMul(x, w)", "float[8,8] w = {" + ",".join(["1"] * 64) + "}")

    def spoil(model: onnx.ModelProto) -> None:
        values = numpy_helper.to_array(model.graph.initializer[0]).copy()
        values[3, 3] = np.nan
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(values, "w"))

    rewrite(path, spoil)
    (finding,) = lint(path)
    assert (finding.rule, finding.tensor, finding.source) == ("nonfinite-weight", "w", NUMERICS)


def test_a_finding_names_tensor_and_layer(directory: Path) -> None:
    def replace(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "Sigmoid":
                node.op_type = "Softsign"

    rewrite(directory / "decode.onnx", replace)
    found = [finding for finding in lint(directory) if finding.rule == "unsupported-op"]
    assert [finding.layer for finding in found] == [f"layer {layer}" for layer in (0, 0, 1, 1, 2, 2)]
    model = onnx.load(directory / "decode.onnx", load_external_data=False)
    replaced = [node.output[0] for node in model.graph.node if node.op_type == "Softsign"]
    assert [finding.tensor for finding in found] == replaced
    assert {finding.what for finding in found} == {"Softsign does not run on the NPU"}
    (group,) = grouped(found)
    assert group["count"] == 6 and group["layers"] == ["layer 0", "layer 1", "layer 2"]


@pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")
def test_rank_4_norms_are_miscompiled(tmp_path: Path) -> None:
    """Why `miscompiled-shape` is a rule: the simulator computes nonsense from what the compiler took."""
    gain = "float[32] g = {" + ",".join(["1"] * 32) + "}"
    path = graph(tmp_path, "float[1,16,6,32] x", "float[1,16,6,32] y", "y = RMSNormalization(x, g)", gain)
    error = simulator_error(path, "x = numpy.random.default_rng(0).standard_normal((1, 16, 6, 32)).astype('f4')")
    assert error > 1, "the compiler learnt it: remove the rule"
    assert ("miscompiled-shape", ERROR, NUMERICS) in rules(path)


@pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")
@pytest.mark.parametrize("zero_points", [False, True])
def test_4_bit_channels_without_zero_points_are_miscompiled(tmp_path: Path, zero_points: bool) -> None:
    """Why `miscompiled-weights` is a rule; with zero points the same graph is sound."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-7, 8, (64, 32))
    initializers = [
        helper.make_tensor("codes", TensorProto.INT4, codes.shape, codes.ravel()),
        helper.make_tensor("scales", TensorProto.FLOAT, [32], rng.uniform(0.01, 0.02, 32)),
        helper.make_tensor("zeros", TensorProto.INT4, [32], [0] * 32),
        helper.make_tensor("scale", TensorProto.FLOAT, [], [1e-4]),
        helper.make_tensor("middle", TensorProto.UINT16, [], [32768]),
    ]
    weights = ["codes", "scales", "zeros"][: 3 if zero_points else 2]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "middle"], ["x_codes"]),
        helper.make_node("DequantizeLinear", ["x_codes", "scale", "middle"], ["x_reals"]),
        helper.make_node("DequantizeLinear", weights, ["w"], axis=1),
        helper.make_node("MatMul", ["x_reals", "w"], ["y_float"]),
        helper.make_node("QuantizeLinear", ["y_float", "scale", "middle"], ["y_codes"]),
        helper.make_node("DequantizeLinear", ["y_codes", "scale", "middle"], ["y"]),
    ]
    boundary = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, n]) for name, n in (("x", 64), ("y", 32))]
    made = helper.make_graph(nodes, "linear", boundary[:1], boundary[1:], initializers)
    path = tmp_path / "linear.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    error = simulator_error(path, "x = numpy.random.default_rng(1).uniform(-1, 1, (1, 4, 64)).astype('f4')")
    assert (error < 0.01) is zero_points, error
    assert (("miscompiled-weights", ERROR, NUMERICS) in rules(path)) is not zero_points


def simulator_error(path: Path, make_x: str) -> float:
    """The largest error of the graph in the NPU simulator, in a process of its own, for the input that ``make_x`` makes."""
    script = (
        "import sys, numpy, onnxruntime, onnxruntime_qnn\n"
        "from pathlib import Path\n"
        "from export.onnx_decoder import cpu_session\n"
        "from export.qnn_worker import PROVIDER, session\n"
        "onnxruntime.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())\n"
        f"{make_x}\n"
        "path = Path(sys.argv[1])\n"
        "found, expected = (made.run(None, {'x': x})[0] for made in (session(path, 69, 1), cpu_session(path)))\n"
        "print('error', abs(found - expected).max())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    return float(done.stdout.rsplit("error ", 1)[1])
