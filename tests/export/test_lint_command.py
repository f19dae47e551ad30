"""`meki-edge lint`: what it says and exits with, and what it makes of files that are damaged or are no graphs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from lint_cases import X, Y, edit_json, graph
from typer.testing import CliRunner

from export.findings import Finding
from export.lint import lint
from meki_edge import manifest
from meki_edge.cli import app
from meki_edge.errors import UserError

Exported = dict[str, tuple[Path, Path]]


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
