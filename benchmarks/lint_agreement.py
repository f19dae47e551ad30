"""How often the lint and the NPU compiler agree on graphs that nobody here wrote.

Compiles ONNX's own operator conformance graphs (about 1,800, of every operator and many variations;
a quarter of an hour on two cores) and lints each.

    python benchmarks/lint_agreement.py [--every N]
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnx
from onnx.backend.test.case.node import collect_testcases

from export.findings import COMPILER
from export.lint import errors, lint
from export.npu_trial import try_compile
from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import write_json

RESULT = Path(__file__).parent / "results" / "lint_agreement.json"
MAX_OPSET, MAX_IR_VERSION = 23, 10  # what `meki-edge export` writes; newer operators are left as they are


def graphs(directory: Path, every: int) -> dict[str, Path]:
    """The conformance graphs by name, written to ``directory``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = [case for case in collect_testcases(None) if case.model is not None]
    found = {}
    for case in cases[::every]:
        for entry in case.model.opset_import:
            if entry.domain == "":
                entry.version = min(entry.version, MAX_OPSET)
        case.model.ir_version = min(case.model.ir_version, MAX_IR_VERSION)
        found[case.name] = directory / f"{case.name}.onnx"
        onnx.save(case.model, found[case.name])
    return found


def verdict(path: Path) -> list[str]:
    """Why the lint expects the compiler to refuse a graph; empty if it does not."""
    try:
        return [finding.what for finding in errors(lint(path)) if finding.source == COMPILER]
    except UserError as error:
        return [error.what]


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="Take every Nth graph.")
    every = parser.parse_args().every
    with tempfile.TemporaryDirectory() as directory, console.progress() as bar:
        files = graphs(Path(directory), every)
        task = bar.add_task("compiling", total=len(files))
        compiled = try_compile(files.values(), advance=lambda: bar.advance(task))
        found = {name: verdict(path) for name, path in files.items()}
        fails = {name: compiled[path] for name, path in files.items()}
    result: dict[str, Any] = {
        "graphs": len(files),
        "both_take": sum(not found[name] and fails[name] is None for name in files),
        "both_refuse": sum(bool(found[name]) and fails[name] is not None for name in files),
        "false_alarms": {name: found[name] for name in files if found[name] and fails[name] is None},
        "missed": {name: fails[name] for name in files if not found[name] and fails[name] is not None},
    }
    agree = result["both_take"] + result["both_refuse"]
    rows = [
        ["both take it", f"{result['both_take']:,}"],
        ["both refuse it", f"{result['both_refuse']:,}"],
        ["the lint alone refuses it", f"{len(result['false_alarms']):,}"],
        ["the compiler alone refuses it", f"{len(result['missed']):,}"],
        ["they agree", f"{agree / len(files):.1%}"],
    ]
    console.show_table(f"{len(files):,} conformance graphs", ["verdict", "graphs"], rows)
    write_json(RESULT, result)
    console.info(f"written to {RESULT}")


if __name__ == "__main__":
    main()
