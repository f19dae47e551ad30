"""What the tests of calibration share."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibration_outputs import LENIENT
from tiny import QUICK_CALIBRATION as QUICK

from calibration.config import CalibrateConfig
from calibration.stage import calibrate


@pytest.fixture(scope="session")
def base(
    tmp_path_factory: pytest.TempPathFactory, exported: dict[str, tuple[Path, Path]], tokens_dir: Path
) -> Path:
    """A calibration of the MeKi model whose ranges serve others; do not change it."""
    checkpoint, directory = exported["meki"]
    out = tmp_path_factory.mktemp("base") / "out"
    calibrate(directory, checkpoint, tokens_dir, out, CalibrateConfig(**QUICK, **LENIENT))
    return out
