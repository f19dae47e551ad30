"""``loss.svg``: training loss, its moving average, and validation loss over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meki_edge.files import atomic_path

SMOOTHING = 0.98


def loss_plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the lines of a ``metrics.jsonl`` to ``path``; the same lines give the same bytes."""
    import matplotlib  # not needed by a run that has only just begun, and slow to import
    from matplotlib.figure import Figure

    training = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    validation = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    with matplotlib.rc_context({"svg.hashsalt": "meki-edge"}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(*zip(*training, strict=True), color="0.8", linewidth=0.6, label="training, each step")
        axes.plot(*zip(*_smoothed(training), strict=True), color="tab:blue", label="training, moving average")
        axes.plot(*zip(*validation, strict=True), color="tab:red", marker="o", markersize=3, label="validation")
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})


def _smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Exponential moving average with bias correction, so that it does not start at zero."""
    smooth, weight, result = 0.0, 0.0, []
    for step, loss in points:
        smooth = SMOOTHING * smooth + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append((step, smooth / weight))
    return result
