"""What the tests of hostile files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from rom_files import DIMS, NUM_ROWS, written


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound file of int8 rows; do not change it."""
    return written(tmp_path_factory.mktemp("good") / "rom.safetensors", DIMS, "int8", NUM_ROWS)
