"""The lint of a directory: its weights, and what of it belongs together; each defect put into an export is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from lint_cases import edit_json, graph, rewrite, rules
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from export.findings import AI_HUB, COMPILER, DEVICE, DIRECTORY, ERROR, Finding
from export.lint import lint
from meki_edge.rom.addressing import Identity
from meki_edge.rom.spec import build
from meki_edge.rom.writer import RomWriter


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
