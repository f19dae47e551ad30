"""Graphs to lint, what is found in them, and changes of what an export wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import parser

from export.lint import lint

X, Y = "float[1,4,8] x", "float[1,4,8] y"


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
