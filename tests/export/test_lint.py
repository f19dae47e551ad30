"""Every rule of the lint: exported directories are clean, and each defect put into one is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from tokenizers import Tokenizer
from typer.testing import CliRunner

from export.findings import AI_HUB, COMPILER, DEVICE, DIRECTORY, ERROR, NUMERICS, WARNING, Finding
from export.lint import errors, grouped, lint
from export.qnn_local import qnn_available
from export.targets import chip
from meki_edge import manifest
from meki_edge.cli import app
from meki_edge.errors import UserError
from meki_edge.rom.addressing import Identity
from meki_edge.rom.spec import build
from meki_edge.rom.writer import RomWriter

Exported = dict[str, tuple[Path, Path]]
X, Y = "float[1,4,8] x", "float[1,4,8] y"


@pytest.fixture
def directory(tmp_path: Path, exported: Exported) -> Path:
    """A copy of the MeKi model's export, to be spoiled."""
    return shutil.copytree(exported["meki"][1], tmp_path / "export")


def rules(path: Path) -> set[tuple[str, str, str]]:
    """(rule, severity, source) of all findings."""
    return {(finding.rule, finding.severity, finding.source) for finding in lint(path)}


def graph(tmp_path: Path, inputs: str, outputs: str, body: str, constants: str = "", head: str = "") -> Path:
    text = f'<ir_version: 10, opset_import: ["" : 23{head}]> g ({inputs}) => ({outputs})'
    model = parser.parse_model(f"{text} {f'<{constants}>' if constants else ''} {{ {body} }}")
    onnx.save(model, tmp_path / "graph.onnx")
    return tmp_path / "graph.onnx"


def rewrite(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model)
    onnx.save(model, path)


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("arm", ["dense", "meki"])
def test_what_we_export_is_clean(exported: Exported, arm: str) -> None:
    assert lint(exported[arm][1]) == []
    assert lint(exported[arm][1], target=chip("sm8650")) == []


def test_every_addressing_is_clean(mixed: tuple[Path, Path, Path]) -> None:
    assert errors(lint(mixed[2])) == []


def test_a_bundle_is_clean(bundles: dict[str, Path]) -> None:
    assert errors(lint(bundles["meki"])) == []


# One graph


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


# Weights


def test_shared_weights_are_looked_at_once(directory: Path) -> None:
    """A value that is no number is told of the first graph that refers to it, not of both."""
    model = onnx.load(directory / "decode.onnx", load_external_data=False)
    (weight,) = [tensor for tensor in model.graph.initializer if tensor.name.endswith("layers.1.mlp.down_proj.weight")]
    (offset,) = [int(entry.value) for entry in weight.external_data if entry.key == "offset"]
    with open(directory / "weights.data", "r+b") as file:
        file.seek(offset)
        file.write(np.float32(np.inf).tobytes())
    (finding,) = lint(directory)
    assert (finding.rule, finding.layer) == ("nonfinite-weight", "model.layers.1.mlp.down_proj")


def test_external_data(directory: Path) -> None:
    weights = directory / "weights.data"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert rules(directory) == {("external-data-truncated", ERROR, COMPILER)}
    weights.unlink()
    assert rules(directory) == {("external-data-missing", ERROR, COMPILER)}
    weights.write_bytes(content)

    def relocate(location: str) -> Callable[[onnx.ModelProto], None]:
        def change(model: onnx.ModelProto) -> None:
            for tensor in model.graph.initializer:
                for entry in tensor.external_data:
                    if entry.key == "location":
                        entry.value = location

        return change

    shutil.copyfile(weights, directory / "weights.onnx_data")
    rewrite(directory / "decode.onnx", relocate("weights.onnx_data"))
    assert rules(directory) == {("external-data-name", ERROR, AI_HUB)}
    shutil.copyfile(weights, directory.parent / "weights.data")
    rewrite(directory / "decode.onnx", relocate("../weights.data"))
    assert rules(directory) == {("external-data-outside", ERROR, COMPILER)}


def test_two_weight_files(directory: Path) -> None:
    shutil.copyfile(directory / "weights.data", directory / "more.data")

    def move_one(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
        next(entry for entry in tensor.external_data if entry.key == "location").value = "more.data"

    rewrite(directory / "prefill.onnx", move_one)
    (finding,) = lint(directory)
    assert finding.rule == "external-data-name" and "2 files: more.data, weights.data" in finding.what


@pytest.mark.parametrize(
    ("key", "value"), [("offset", "-1"), ("offset", "x"), ("offset", "٣"), ("offset", "9" * 5000), ("length", "3")]
)
def test_a_place_that_cannot_be(directory: Path, key: str, value: str) -> None:
    def spoil(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
        next(entry for entry in tensor.external_data if entry.key == key).value = value

    rewrite(directory / "decode.onnx", spoil)
    assert ("external-data-truncated", ERROR, COMPILER) in rules(directory)


def test_a_part_over_2_gb(tmp_path: Path) -> None:
    """2.1 GB of int8 weights (a sparse file), of which the lint reads nothing; float32 would count half."""
    rows, columns = 70_000, 30_000
    body = "d = DequantizeLinear(w, s) y = MatMul(x, d)"
    path = graph(tmp_path, "float[1,70000] x", "float[1,30000] y", body, "float s = {0.1}")

    def add(dtype: int) -> Callable[[onnx.ModelProto], None]:
        def change(model: onnx.ModelProto) -> None:
            kept = [tensor for tensor in model.graph.initializer if tensor.name != "w"]
            weight = TensorProto(name="w", data_type=dtype, dims=[rows, columns], data_location=TensorProto.EXTERNAL)
            weight.external_data.add(key="location", value="big.data")
            del model.graph.initializer[:]
            model.graph.initializer.extend([*kept, weight])

        return change

    (tmp_path / "big.data").touch()
    with open(tmp_path / "big.data", "r+b") as file:
        file.truncate(rows * columns)
    rewrite(path, add(TensorProto.INT8))
    (finding,) = lint(path)
    assert (finding.rule, finding.source) == ("part-over-2gb", DEVICE) and "2.10 GB" in finding.what
    rewrite(path, add(TensorProto.INT4))
    with open(tmp_path / "big.data", "r+b") as file:
        file.truncate(rows * columns // 2)
    assert "part-over-2gb" not in {finding.rule for finding in lint(path)}


# A directory


def spec_finding(directory: Path, change: Callable[[dict], None]) -> list[Finding]:
    edit_json(directory / "graph_spec.json", change)
    found = lint(directory)
    assert all(finding.source == DIRECTORY and finding.severity == ERROR for finding in found)
    return found


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tensor: tensor.update(name="embeds"), "does not name"),
        (lambda tensor: tensor.update(dtype="float16"), "input is float32, float16 in graph_spec.json"),
        (lambda tensor: tensor.update(shape=[1, 1, 31]), "input has shape [1, 1, 32], [1, 1, 31] in graph_spec.json"),
    ],
)
def test_spec_against_graph(directory: Path, change: Callable[[dict], None], what: str) -> None:
    found = spec_finding(directory, lambda spec: change(spec["decode"]["parts"][0]["inputs"][0]))
    assert {finding.rule for finding in found} == {"spec-mismatch"}
    assert any(what in finding.what for finding in found), [finding.what for finding in found]


def test_another_vocabulary(directory: Path) -> None:
    found = spec_finding(directory, lambda spec: spec.update(vocab_size=300))
    said = " ".join(finding.what for finding in found)
    assert {finding.rule for finding in found} == {"vocabulary-mismatch"}
    for words in ("logits for 384 tokens", "ids up to 383", "rows for 384 tokens, the vocabulary 300"):
        assert words in said


def test_another_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    found = lint(directory)
    assert {finding.rule for finding in found} == {"vocabulary-mismatch", "tokenizer-mismatch"}
    files = {Path(finding.where).name for finding in found if finding.rule == "tokenizer-mismatch"}
    assert files == {"embedding.safetensors", "rom.safetensors"}, "the ROM is found in the exported checkpoint"


def test_rows_of_another_width(directory: Path) -> None:
    digests = {"tokenizer_sha256": "0" * 64, "source_sha256": "0" * 64}
    spec = build([(0, 0, 35)], "fp16", num_rows=384, addressing=Identity(), **digests)
    with RomWriter(directory / "rom.safetensors", spec) as writer:
        writer.write(np.zeros((384, 35), np.float32))
    found = lint(directory)
    assert {finding.rule for finding in found} == {"tokenizer-mismatch", "spec-mismatch"}
    expected = "identity rows of 35 elements, graph_spec.json says identity rows of 36"
    assert any(expected in finding.what for finding in found)


@pytest.mark.parametrize("name", ["decode.onnx", "embedding.safetensors", "tokenizer.json"])
def test_a_missing_file(directory: Path, name: str) -> None:
    (directory / name).unlink()
    found = [finding for finding in lint(directory) if finding.rule == "missing-file"]
    assert [Path(finding.where).name for finding in found] == [name]


def test_quantization_of_the_boundary(tmp_path: Path, directory: Path) -> None:
    """The spec and the graph must say the same of an integer input: one quantization, not two."""

    def quantize(model: onnx.ModelProto) -> None:
        (value,) = [value for value in model.graph.input if value.name == "memory_rows"]
        value.type.tensor_type.elem_type = TensorProto.UINT16
        scale, zero = np.float32(0.01), np.uint16(32768)
        model.graph.initializer.extend([numpy_helper.from_array(scale, "s"), numpy_helper.from_array(zero, "z")])
        for node in model.graph.node:
            node.input[:] = ["rows_float" if name == "memory_rows" else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["memory_rows", "s", "z"], ["rows_float"]))

    rewrite(directory / "decode.onnx", quantize)

    def state(scale: float) -> Callable[[dict], None]:
        def change(spec: dict) -> None:
            (rows,) = [tensor for tensor in spec["decode"]["parts"][0]["inputs"] if tensor["role"] == "memory_rows"]
            rows.update(dtype="uint16", quantization={"scale": scale, "zero_point": 32768})

        return change

    edit_json(directory / "graph_spec.json", state(0.01))
    assert lint(directory) == []
    (finding,) = spec_finding(directory, state(0.02))
    assert finding.tensor == "memory_rows" and "(0.02, 32768)" in finding.what


# The compiler's silence, and the command


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


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["lint", *map(str, arguments)], env={"COLUMNS": "160"})
    if isinstance(result.exception, Exception):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())  # lines break where the terminal ends


def test_the_command(exported: Exported, tmp_path: Path) -> None:
    status, text = run(exported["meki"][1], "--chipset", "8 elite")
    assert status == 0 and "nothing that is known to fail" in text
    path = graph(tmp_path, "float[N,4] x", "float[N,4] y", "a = Erf(x) b = Erf(a) y = Add(b, x)")
    status, text = run(path)
    assert status == 1 and "errors: 4, warnings: 0" in text and "unsupported-op" in text and "tensor a, b" in text
    status, text = run(path, "--json")
    result = json.loads(text)
    assert status == 1 and result["errors"] == 4
    assert set(result["findings"][0]) == {field.name for field in dataclasses.fields(Finding)}
    path = graph(tmp_path, "float[4] x, float[4] z", "float[4] y", "y = Relu(x)")
    status, text = run(path)
    assert status == 0 and "errors: 0, warnings: 1" in text


def test_a_stages_directory_must_be_whole(directory: Path) -> None:
    """Before its graphs are looked at; a graph alone, or a directory that no stage wrote, is taken as it is."""
    weights = directory / "weights.data"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="the contents changed since the manifest was written") as caught:
        run(directory)
    assert Path(caught.value.where) == weights
    assert run(directory / "decode.onnx")[0] == 0
    recorded = (directory / manifest.FILE_NAME).read_bytes()
    (directory / manifest.FILE_NAME).unlink()
    assert run(directory)[0] == 0
    (directory / manifest.PARTIAL).mkdir()
    with pytest.raises(UserError, match="the stage that fills this directory has not finished"):
        run(directory)
    (directory / manifest.FILE_NAME).write_bytes(recorded)
    weights.unlink()
    with pytest.raises(UserError, match="the file 'weights.data' is missing"):
        run(directory)


def test_damaged_files_give_no_traceback(directory: Path) -> None:
    """Cut or altered anywhere, a graph gives findings or a user's error."""
    path, generator = directory / "decode.onnx", np.random.default_rng(0)
    content = np.frombuffer(path.read_bytes(), np.uint8)
    for round_number in range(40):
        damaged = content.copy()
        places = generator.integers(len(content), size=int(generator.choice([1, 3, 20])))
        damaged[places] = generator.integers(256, size=len(places))
        path.write_bytes(damaged[: generator.integers(len(content))] if round_number % 3 == 0 else damaged)
        try:
            lint(path)
        except UserError as error:
            assert error.what == "this is not an ONNX model"


@pytest.mark.parametrize("name", ["tokenizer.json", "a.onnxtxt", "a.textproto", "a.onnxjson", "a.pb", "a"])
def test_a_name_says_nothing_of_a_files_format(tmp_path: Path, directory: Path, name: str) -> None:
    """Whatever a file is called, it is an ONNX model or it is not."""
    model = graph(tmp_path, X, Y, "y = Relu(x)").rename(tmp_path / name)
    assert lint(model) == []
    for content in (b"{}", b"", (directory / "tokenizer.json").read_bytes()):
        model.write_bytes(content)
        with pytest.raises(UserError, match="this is not an ONNX model"):
            lint(model)


def test_what_cannot_be_read_is_a_finding_among_others(directory: Path, tmp_path: Path) -> None:
    (directory / "tokenizer.json").write_text("{")
    (directory / "decode.onnx").write_bytes(b"not a model")
    inputs = lambda spec: spec["prefill"]["parts"][0]["inputs"]
    edit_json(directory / "graph_spec.json", lambda spec: inputs(spec)[0].update(name="embeds"))
    found = lint(directory)
    told = {(Path(finding.where).name, finding.rule) for finding in found}
    assert told >= {
        ("tokenizer.json", "vocabulary-mismatch"),
        ("decode.onnx", "invalid-graph"),
        ("prefill.onnx", "spec-mismatch"),
        ("embedding.safetensors", "tokenizer-mismatch"),
    }
    assert not any("--tokenizer" in finding.fix for finding in found)
    (directory / "manifest.json").write_text("{")
    (lost,) = [finding for finding in lint(directory) if finding.rule == "row-file"]
    assert Path(lost.where).name == "manifest.json" and "rom.safetensors" in lost.what
    loose = tmp_path / "loose"
    (loose / "a.onnx").mkdir(parents=True)
    (loose / "b.onnx").write_bytes(b"not a model")
    graph(loose, "int64[1,4] x", "int64[1,4] y", "y = Add(x, x)")
    told = [(Path(finding.where).name, finding.rule) for finding in lint(loose)]
    assert told[:2] == [("a.onnx", "invalid-graph"), ("b.onnx", "invalid-graph")] and ("graph.onnx", "int64-io") in told


def test_nothing_to_lint(tmp_path: Path, exported: Exported) -> None:
    with pytest.raises(UserError, match="there is no graph here"):
        lint(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        lint(tmp_path / "none.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    with pytest.raises(UserError, match="not an ONNX model"):
        lint(tmp_path / "broken.onnx")
    with pytest.raises(UserError, match="unknown chip"):
        run(exported["dense"][1], "--chipset", "sm1")
