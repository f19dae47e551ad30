"""What the tests of exported directories share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def directory(tmp_path: Path, exported: dict[str, tuple[Path, Path]]) -> Path:
    """A copy of the MeKi model's export, to be spoiled."""
    return shutil.copytree(exported["meki"][1], tmp_path / "export")
