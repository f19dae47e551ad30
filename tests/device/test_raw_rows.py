"""A static codec's integers through the harness: those that the golden files list, by every way to read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("io", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("name", ["identity_static8", "ragged_static16_checksums"])
def test_integers_are_the_golden_ones(binary: Path, name: str, io: str, tmp_path: Path) -> None:
    codes = np.array(json.loads((GOLDEN / f"{name}.json").read_text())["codes"], "u1" if "static8" in name else "<u2")
    ids = [3, 0, len(codes) - 1, 3]
    (tmp_path / "ids.txt").write_text(" ".join(map(str, ids)))
    rom = GOLDEN / f"{name}.safetensors"
    options = ["--rom", rom, "--ids-file", tmp_path / "ids.txt", "--io", io]
    done = subprocess.run([binary, "rows", "--raw", *options], capture_output=True, check=True)
    assert done.stdout == codes[ids].tobytes()
    if "checksums" in name:
        checked = subprocess.run([binary, "rows", "--raw", "--verify-rows", *options], capture_output=True)
        assert checked.stdout == done.stdout
