"""The harness on 64-bit Arm, under qemu (`make test-arm64` sets the variables): the same rows and tokens."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from harness import generate, ids_file

from meki_edge.device.pack import PackConfig, pack

RUNNER = os.environ.get("MEKI_RUNNER_ARM64")
pytestmark = [
    pytest.mark.skipif(RUNNER is None, reason="run `make test-arm64`"),
    pytest.mark.usefixtures("binary"),
]
GOLDEN = Path(__file__).parents[1] / "golden"


def command(*arguments: object) -> list[str]:
    emulator = ["qemu-aarch64", "-cpu", "cortex-a76", "-L", os.environ["MEKI_ARM64_SYSROOT"]]
    return [*emulator, str(RUNNER), *map(str, arguments)]


@pytest.mark.parametrize("rom", sorted(GOLDEN.glob("*.safetensors")), ids=lambda path: path.stem)
def test_rows(binary: Path, rom: Path, tmp_path: Path) -> None:
    arguments = ["fetch", "--rom", rom, "--ids-file", ids_file(tmp_path, [5, 0, 3, 3, 1])]
    native = subprocess.run([binary, *arguments], capture_output=True, check=True).stdout
    assert subprocess.run(command(*arguments), capture_output=True, check=True).stdout == native


@pytest.mark.parametrize("name", ["meki", "mixed"])
def test_tokens(name: str, bundles: dict[str, Path], mixed: tuple[Path, Path, Path], tmp_path: Path) -> None:
    bundle = bundles["meki"]
    if name == "mixed":
        bundle = tmp_path / "mixed"
        pack(mixed[2], mixed[1], bundle, PackConfig())
    prompt = list(range(20, 41))
    expected = generate(bundle, tmp_path, prompt, 8)["generated_tokens"]
    output = tmp_path / "report.json"
    arguments = ["generate", "--bundle", bundle, "--ort-library", os.environ["MEKI_ORT_ARM64"], "--output", output]
    arguments += ["--prompt-file", ids_file(tmp_path, prompt), "--max-new-tokens", 8, "--threads", 1]
    done = subprocess.run(command(*arguments), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(output.read_text())["generated_tokens"] == expected
