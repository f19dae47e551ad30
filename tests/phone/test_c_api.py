"""The C API from a C11 program: the tokens of the harness, and what its codes promise."""

from __future__ import annotations

import os
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

def options(program: Path, bundle: Path, **environment: str) -> dict[str, str]:
    """What the C test says of `verify_rows`, and of `big_cores`: on how many cores each thread may run."""
    command = [program, bundle, runner.find_ort_library()]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(line.split(":", 1) for line in done.stdout.splitlines())

def test_rows_are_verified_where_they_have_checksums(
    c_program: Path, bundles: dict[str, Path], checked_bundle: Path
) -> None:
    for bundle in (checked_bundle, bundles["dense"]):
        assert options(c_program, bundle)["verify_rows"] == " ok"
    refusal = options(c_program, bundles["meki"])["verify_rows"]
    assert "checksums" in refusal and str(bundles["meki"] / "rom.safetensors") in refusal

def test_threads_keep_to_big_cores(c_program: Path, bundles: dict[str, Path], tmp_path: Path) -> None:
    """The C test itself sees that the thread that calls meki_open is left where it was."""
    allowed = sorted(os.sched_getaffinity(0))
    fake = tmp_path / "fake_cpus.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", fake, Path(__file__).with_name("fake_cpus.c"), "-ldl"], check=True)
    preload = {"LD_PRELOAD": str(fake), "FAKE_CPUS": str(tmp_path)}
    found = options(c_program, bundles["meki"], **preload)  # the kernel says nothing of its cores
    assert set(found["big_cores 0"].split()) == set(found["big_cores 1"].split()) == {str(len(allowed))}
    for core in allowed:
        (tmp_path / f"cpu{core}").mkdir()
        (tmp_path / f"cpu{core}/cpu_capacity").write_text("1024" if core == allowed[0] else "446")
    found = options(c_program, bundles["meki"], **preload)
    assert found["big_cores 0"].split() == [str(len(allowed))] * 2  # ONNX Runtime's second thread, and the ROM file's
    assert found["big_cores 1"].split() == ["1"] * 2

def test_nothing_but_the_api_is_exported(c_program: Path) -> None:
    header = (Path(__file__).parents[2] / "android_runner/include/meki_runner.h").read_text()
    command = ["nm", "-D", "--defined-only", c_program.parents[1] / "libmeki_runner.so"]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in symbols.splitlines() if " T " in line}

    assert all(f"{name}(" in header for name in exported) and exported >= {"meki_open", "meki_step", "meki_close"}
