"""What each layer loses alone, and which ones are kept finer for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from calibration_outputs import LENIENT
from tiny import QUICK_CALIBRATION as QUICK

from calibration import report
from calibration.config import CalibrateConfig
from calibration.sensitivity import choose
from calibration.stage import calibrate
from meki_edge import manifest
from meki_edge.files import read_json

Exported = dict[str, tuple[Path, Path]]


def bars_of(directory: Path) -> str:
    """The plot on the report's page."""
    (found,) = re.findall(r"<svg.*?</svg>", (directory / report.PAGE_FILE).read_text(encoding="utf-8"), re.DOTALL)
    return found


def test_sensitive_layers_are_kept_finer(
    tmp_path: Path, base: Path, exported: Exported, tokens_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, directory = exported["meki"]

    def run(out: str, **options: object) -> tuple[manifest.Manifest, list[dict]]:
        config = CalibrateConfig(precision="w4a16", **QUICK, **LENIENT, **options)
        made = calibrate(directory, checkpoint, tokens_dir, tmp_path / out, config, ranges_from=base)
        return made, read_json(tmp_path / out / "calibration_report.json")["units"]

    plain, units = run("plain")
    assert [unit["scheme"] for unit in units] == ["w4a16"] * 3 + ["w8a16"]
    losses = [unit["sensitivity"]["divergence"] for unit in units]
    assert all(loss > 0 for loss in losses) and losses[3] < min(losses[:3]), "8 bits lose less than 4"
    worst = losses.index(max(losses))
    before = sum(unit["bytes"] for unit in units)
    extra = units[worst]["bytes"]
    made, units = run("budget", budget_bytes=extra)
    assert before < sum(unit["bytes"] for unit in units) <= before + extra
    assert [unit["scheme"] == "w8a16" for unit in units] == [index in (worst, 3) for index in range(4)]
    assert plain.metrics["weights_bytes"] < made.metrics["weights_bytes"]
    assert "divergence_left" not in plain.metrics
    assert min(losses) < made.metrics["divergence_left"] < sum(losses)
    assert "var(--arm-1)" not in bars_of(tmp_path / "plain"), "the head is stored as it was measured"
    assert "var(--arm-1)" in bars_of(tmp_path / "budget")
    capsys.readouterr()
    made, units = run("target", max_divergence=0.0)
    assert all(unit["scheme"] == "w8a16" for unit in units) and made.metrics["units_raised"] == 3
    assert made.metrics["top1_agreement"] >= plain.metrics["top1_agreement"]
    rows = report.unit_rows(read_json(tmp_path / "target/calibration_report.json"))
    assert [(row[1], row[3]) for row in rows] == [("w8a16", "w4a16")] * 3 + [("w8a16", "w8a16")]
    shown, page = capsys.readouterr().err, (tmp_path / "target/calibration_report.html").read_text(encoding="utf-8")
    assert "w4a16" in next(line for line in shown.splitlines() if "layer 1" in line)
    assert '<th scope="col">measured in</th>' in page and "measured in w4a16 (the head in w8a16)" in page
    left = f"still sum to {made.metrics['divergence_left']:.3g} nats, wanted 0 (all that gains by it is raised already)"
    assert left in " ".join(shown.split()) and left in page
    made, _ = run("both", max_divergence=0.0, budget_bytes=extra)
    left = f"{made.metrics['divergence_left']:.3g} nats, wanted 0 (the budget is spent)"
    assert left in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("budget", "target", "expected", "left"),
    [
        (None, 0.0, {0, 1, 2}, 2.5),
        (None, 7.5, {2}, 7.5),
        (None, 4.5, {2, 1}, 4.5),
        (10, None, {2}, 7.5),
        (45, None, {2, 0}, 5.5),
        (0, None, set(), 11.5),
        (50, 4.0, {2, 0}, 5.5),
        (1000, 100.0, set(), 11.5),
    ],
)
def test_what_saves_most_a_byte_is_raised_first(
    budget: int | None, target: float | None, expected: set[int], left: float
) -> None:
    """Saved: 2 nats for 35 bytes, 3 for 50, 4 for 10, and nothing (unit 3)."""
    losses, finer = {0: 2.5, 1: 3.5, 2: 4.5, 3: 1.0}, {0: 0.5, 1: 0.5, 2: 0.5, 3: 1.0}
    extra = {0: 35, 1: 50, 2: 10, 3: 0}
    found = choose(losses, finer, extra, budget_bytes=budget, max_divergence=target)
    assert (found.raised, found.divergence, found.is_best) == (expected, left, expected == {0, 1, 2})
