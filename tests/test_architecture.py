"""The rules of the architecture, held by tools."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = "tokenize train reparam export calibrate lint compile pack run compare generate inspect verify memories bounds".split()
COMMANDS += "sideload bench unload doctor".split()


def test_imports_point_downwards_only() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_of_every_command_imports_no_torch() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from meki_edge.cli import app\n"
        "for command in sys.argv[1:]:\n"
        "    result = CliRunner().invoke(app, [command, '--help'])\n"
        "    assert result.exit_code == 0, result.output\n"
        "assert 'torch' not in sys.modules and 'onnxruntime' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *COMMANDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PRINTERS = {"console", "qnn_worker"}  # the worker's output is a compile's log


def calls_print(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in ast.walk(tree)
    )


SOURCES = [path for pattern in ("meki_edge/**/*.py", "calibration/*.py", "export/*.py") for path in ROOT.glob(pattern)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_only_the_console_prints(path: Path) -> None:
    assert path.stem in PRINTERS or not calls_print(ast.parse(path.read_text(encoding="utf-8")))
