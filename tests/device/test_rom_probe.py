"""The storage probe: every method of reading, in both formats; its errors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from harness import write_rom

GOLDEN = Path(__file__).parents[1] / "golden"
METHODS = [
    "pread", "direct", "mmap", "faults", "random faults", "layers", "fetch pread", "fetch direct", "fetch mmap"
]  # fmt: skip


@pytest.fixture(scope="module")
def probe(binary: Path) -> Path:
    subprocess.run(["cmake", "--build", binary.parent, "--target", "meki-rom-probe", "-j2"], check=True)
    return binary.parent / "meki-rom-probe"


def run(probe: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([probe, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("identity_int4", 0, 4096), ("ragged_int8", 13, 65), ("ngram_hash_fp16", 36, 36)]
)
def test_a_report(probe: Path, name: str, least: float, most: float) -> None:
    rom = GOLDEN / f"{name}.safetensors"
    options = ("--tokens", 40, "--cadence-us", 100, "--format", "json", "--threads", 5, "--batch", 7)
    done = run(probe, "--rom", rom, *options)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert [method["method"] for method in report["methods"]] in (METHODS, [m for m in METHODS if "direct" not in m])
    assert report["file_bytes"] == rom.stat().st_size
    assert name.startswith(report["addressing"])
    assert least <= report["bytes_per_token"] <= most
    assert (report["num_tokens"], report["cadence_us"], report["batch"], report["seed"]) == (40, 100, 7, 0)
    assert [entry["io"] for entry in report["prefill"]] in (["pread", "direct", "mmap"], ["pread", "mmap"])
    assert all(0 < entry["batch_us"]["p50"] <= entry["batch_us"]["max"] for entry in report["prefill"])
    for method in report["methods"]:
        latency = method["latency_us"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
        assert latency["mean"] <= latency["max"]
        assert [entry["threads"] for entry in method["throughput"]] == [1, 2, 4]
        for entry in method["throughput"]:
            ratio = entry["bytes_per_s"] / entry["tokens_per_s"]
            assert ratio == pytest.approx(report["bytes_per_token"])


def test_bytes_a_token_are_counted_not_timed(probe: Path) -> None:
    """Over many runs: a quotient of two rates would miss a whole number by a rounding in some of them."""
    options = ("--rom", GOLDEN / "ngram_hash_fp16.safetensors", "--tokens", 7, "--format", "json", "--threads", 1)
    assert {json.loads(run(probe, *options, "--seed", seed).stdout)["bytes_per_token"] for seed in range(20)} == {36}


def test_a_table(probe: Path, tmp_path: Path) -> None:
    write_rom(tmp_path / "rom.safetensors", [(1000, "fp16")], 300)
    done = run(probe, "--rom", tmp_path / "rom.safetensors", "--tokens", 50, "--threads", 2, "--batch", 9)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("prefill of 9 tokens by ")]
    assert len(done.stdout.splitlines()) - len(lines) in (2, 3)
    assert "identity, 2000 bytes a token; 50 random tokens" in lines[0]
    table = [line.split("|")[1:-1] for line in lines[2:] if line]
    assert {len(row) for row in table} == {9}
    assert [row[0].strip() for row in table[2:]] == METHODS


def test_errors(probe: Path, tmp_path: Path) -> None:
    path = tmp_path / "rom.safetensors"
    path.write_text("nothing")
    done = run(probe, "--rom", path)
    assert done.returncode == 1 and "too short for a header" in done.stderr and done.stderr.count("\n") == 1
    assert run(probe).returncode == 2
    assert "--tokens takes an integer from 1" in run(probe, "--rom", path, "--tokens", 0).stderr
    assert "--format takes md or json" in run(probe, "--rom", path, "--format", "csv").stderr
    write_rom(path, [(10, "int8")], 5)
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 80)
    assert "a scale is negative, NaN or infinite" in run(probe, "--rom", path, "--tokens", 3).stderr
    assert "meki-rom-probe" in run(probe, "--help").stdout


def test_it_needs_no_library(probe: Path) -> None:
    """Static, so that it runs on any phone of its architecture: no program interpreter in its headers."""
    assert b"/ld-linux" not in probe.read_bytes()[:4096]
