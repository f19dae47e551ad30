"""The C API from a C11 program: the tokens of the harness, and what its codes promise."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_phone_runner import arguments

from meki_edge.device import runner

PROMPT = ["20", "21", "22", "23", "24", "25"]

@pytest.fixture(scope="session")
def c_program(binary: Path) -> Path:
    """The C test, built beside the harness."""
    build = binary.parent
    subprocess.run(["cmake", "--build", build, "--target", "test_c_api", "-j2"], check=True)
    return build / "tests/test_c_api"

@pytest.mark.parametrize("name", ["dense", "meki"])
def test_tokens_are_those_of_the_harness(
    name: str, c_program: Path, bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEKI_RUNNER", str(c_program.parents[1] / "meki-runner"))
    expected = runner.run_json([*arguments(bundles[name], tmp_path)])["generated_tokens"]
    command = [c_program, bundles[name], runner.find_ort_library(), str(len(expected)), *PROMPT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(map(int, done.stdout.split())) == expected

def test_nothing_but_the_api_is_exported(c_program: Path) -> None:
    header = (Path(__file__).parents[2] / "android_runner/include/meki_runner.h").read_text()
    command = ["nm", "-D", "--defined-only", c_program.parents[1] / "libmeki_runner.so"]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in symbols.splitlines() if " T " in line}

    assert all(f"{name}(" in header for name in exported) and exported >= {"meki_open", "meki_step", "meki_close"}
