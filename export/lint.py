"""Pre-flight lint: everything that would make a compile job fail minutes later, found in seconds.

A directory of `meki-edge export`, `calibrate` or `pack`, or a single ONNX file, is checked without
loading its weights at once. The rules: :mod:`export.lint_graph` (operators, types, shapes, names),
:mod:`export.lint_files` (weights), :mod:`export.lint_spec` (what belongs together).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from export import lint_files, lint_spec
from export.findings import COMPILER, ERROR, Finding
from export.graph_view import GraphView, load
from export.inputs import QUIET_BYTES
from export.lint_graph import graph_findings
from export.targets import Chip
from meki_edge import console, graph_spec
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec, Part

PROTOBUF_LIMIT = 2**31 - 1
__all__ = ["Finding", "errors", "grouped", "lint"]


def lint(path: Path, *, target: Chip | None = None) -> list[Finding]:
    """All findings on ``path``, errors first.

    Args:
        path: a directory with ``graph_spec.json``, one with ONNX files alone, or one ONNX file.
        target: the chip to compile for. No rule depends on it so far: the compiler's verdicts on the
            corpus of the tests are the same for every chip of :mod:`export.targets`.

    A file of a directory that cannot be read is a finding, and the others are looked at all the same.

    Raises:
        UserError: nothing to lint there, no spec in ``graph_spec.json``, or a single file that is no ONNX model.
    """
    looked_at: set[tuple[str, ...]] = set()  # weights that prefill and decode share are read once
    if path.is_dir() and (path / graph_spec.FILE_NAME).is_file():
        spec_path = path / graph_spec.FILE_NAME
        spec = GraphSpec.from_json(read_json(spec_path), spec_path)
        parts = [part for graph in spec.graphs.values() for part in graph.parts]
        findings = [finding for part in parts for finding in _of_directory(path / part.file, part, looked_at)]
        findings += lint_spec.vocabulary(path, spec)
    else:
        files = sorted(path.glob("*.onnx")) if path.is_dir() else [path]
        if not files:
            raise UserError(
                "there is no graph here", where=path, fix="give an .onnx file, or a directory of `meki-edge export`"
            )
        look = _of_directory if path.is_dir() else _part
        findings = [finding for file in files for finding in look(file, None, looked_at)]
    return sorted(findings, key=lambda finding: finding.severity != ERROR)


def errors(findings: list[Finding]) -> list[Finding]:
    """The findings that make a job fail."""
    return [finding for finding in findings if finding.severity == ERROR]


def _of_directory(path: Path, part: Part | None, looked_at: set[tuple[str, ...]]) -> Iterator[Finding]:
    """As :func:`_part`, but a file that is no graph is a finding."""
    try:
        yield from _part(path, part, looked_at)
    except UserError as error:
        yield _whole_file(path, "invalid-graph", error.what, "export the graph again")


def _part(path: Path, part: Part | None, looked_at: set[tuple[str, ...]]) -> Iterator[Finding]:
    if part is not None and not path.is_file():
        yield _whole_file(path, "missing-file", "a graph that graph_spec.json names is missing", "export again")
        return
    if path.is_file() and path.stat().st_size > PROTOBUF_LIMIT:
        what = "the .onnx file is over 2 GiB, more than the format can hold"
        yield _whole_file(path, "part-over-2gb", what, "save its weights in a .data file beside it")
        return
    view = load(path)
    yield from graph_findings(view)
    if view.problem is not None:
        return
    yield from _weights(view, looked_at)
    if part is not None:
        yield from lint_spec.graph_against_spec(view, part)


def _whole_file(path: Path, rule: str, what: str, fix: str) -> Finding:
    return Finding(rule=rule, severity=ERROR, source=COMPILER, where=str(path), what=what, fix=fix)


def _weights(view: GraphView, looked_at: set[tuple[str, ...]]) -> list[Finding]:
    total = lint_files.weight_bytes(view)
    if total < QUIET_BYTES:
        return list(lint_files.file_findings(view, looked_at))
    with console.byte_progress(f"weights of {view.path.name}", total) as advance:
        return list(lint_files.file_findings(view, looked_at, advance))


def grouped(findings: list[Finding]) -> list[dict[str, Any]]:
    """Findings that differ in tensor and layer alone, together: with ``count``, ``tensors`` and ``layers``."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for finding in findings:
        values = asdict(finding)
        tensor, layer = values.pop("tensor"), values.pop("layer")
        group = groups.setdefault(tuple(values.values()), {**values, "count": 0, "tensors": [], "layers": []})
        group["count"] += 1
        group["tensors"] += [tensor] if tensor else []
        group["layers"] += [layer] if layer and layer not in group["layers"] else []
    return list(groups.values())
