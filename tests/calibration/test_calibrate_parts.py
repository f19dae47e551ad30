"""A model in parts is the model in one: what is observed, what each unit loses, and which ones are kept finer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibration_outputs import LENIENT
from tiny import QUICK_CALIBRATION as QUICK

from calibration.config import CalibrateConfig
from calibration.stage import calibrate
from export.graph import ExportConfig, export
from meki_edge.files import read_json

CUTS = {
    "two parts": {"split_layers": (2,)},  # a stream within each, and tracing gives both one name
    "head apart": {"head_part": True},
}
FIGURES = ("divergence", "relative_mse", "top1_changed")
Exported = dict[str, tuple[Path, Path]]


def calibrated(
    out: Path, model: tuple[Path, Path], tokens_dir: Path, *, ranges_from: Path | None = None, **options: Any
) -> Path:
    """A calibration of ``model``, a checkpoint and its export, with ranges that need histograms."""
    checkpoint, directory = model
    config = CalibrateConfig(precision="w4a16", method="percentile", **QUICK, **LENIENT, **options)
    calibrate(directory, checkpoint, tokens_dir, out, config, ranges_from=ranges_from)
    return out


def units_of(directory: Path) -> list[dict[str, Any]]:
    return read_json(directory / "calibration_report.json")["units"]


@pytest.fixture(scope="module")
def whole(exported: Exported, tokens_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The model in one part, and what its units may lose in all, so that some are raised and some are not."""
    directory = tmp_path_factory.mktemp("whole")
    plain = calibrated(directory / "plain", exported["meki"], tokens_dir)
    losses = [unit["sensitivity"]["divergence"] for unit in units_of(plain)]
    target = sum(losses) - max(losses) / 2
    out = directory / "out"
    return calibrated(out, exported["meki"], tokens_dir, ranges_from=plain, max_divergence=target), target


@pytest.mark.parametrize("cut", CUTS)
def test_a_model_in_parts_is_measured_as_in_one(
    cut: str, whole: tuple[Path, float], exported: Exported, tokens_dir: Path, tmp_path: Path
) -> None:
    one_part, target = whole
    model = exported["meki"][0], tmp_path / "export"
    config = ExportConfig(context_length=160, prefill_tokens=16, verify_tokens=20, **CUTS[cut])
    export(model[0], tokens_dir, model[1], config)
    parts = calibrated(tmp_path / "out", model, tokens_dir, max_divergence=target)

    expected, found = units_of(one_part), units_of(parts)
    for one, other in zip(expected, found, strict=True):
        losses = [[unit["sensitivity"][figure] for figure in FIGURES] for unit in (one, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3), one["unit"]
    assert len({unit["scheme"] for unit in expected[:3]}) == 2, "some layers are raised and some are not"
    assert [(unit["scheme"], unit["bytes"]) for unit in found] == [
        (unit["scheme"], unit["bytes"]) for unit in expected
    ]
    reports = [read_json(directory / "calibration_report.json") for directory in (one_part, parts)]
    assert reports[1]["divergence_left"] == pytest.approx(reports[0]["divergence_left"], rel=1e-3)
    assert reports[1]["accuracy"] == pytest.approx(reports[0]["accuracy"], rel=1e-6)
    with np.load(one_part / "ranges.npz") as one, np.load(parts / "ranges.npz") as other:
        assert one.files == other.files
        for name in one.files:
            assert np.array_equal(one[name], other[name]), f"{name} of what was observed"
