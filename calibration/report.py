"""What calibration found, as JSON, as a page, and as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from calibration.gate import Accuracy, Limit
from calibration.sensitivity import Loss
from meki_edge import console, report_page, report_plots
from meki_edge.files import write_json, write_text
from meki_edge.report_plots import Plot

JSON_FILE, PAGE_FILE = "calibration_report.json", "calibration_report.html"
MEASURED = "Computed by ONNX Runtime on this host: what the quantized graph means, not what a phone measured."
UNIT_HEADINGS = ["unit", "stored as", "MB", "measured in", "divergence (nats)", "relative MSE", "top-1 changed"]
"""A unit is measured in the precision's own scheme. One that is kept finer for what it lost is stored in another."""


def build(
    precision: str,
    accuracy: Accuracy,
    limits: Sequence[Limit],
    units: Sequence[dict[str, Any]],
    losses: Sequence[Loss],
    notes: Sequence[str],
    details: dict[str, Any],
) -> dict[str, Any]:
    """The report as JSON.

    Args:
        notes: what a reader must know beside the figures.
        units: each unit's ``unit`` (its name), ``scheme`` and ``bytes``.
        losses: of the units in the precision's own scheme, in the same order; none if not measured.
        details: what else is recorded: dtypes, method, samples.
    """
    headline = (
        f"Perplexity {accuracy.perplexity:.3f} against {accuracy.float_perplexity:.3f} in float "
        f"({accuracy.perplexity_increase:+.2%}); the likeliest token is float's for {accuracy.top1_agreement:.2%}."
    )
    measured = [asdict(loss) for loss in losses] or [{}] * len(units)
    return {
        "schema": 1,
        "precision": precision,
        "headline": headline,
        "notes": [MEASURED, *notes],
        "accuracy": {**asdict(accuracy), "perplexity_increase": accuracy.perplexity_increase},
        "limits": [{**asdict(limit), "is_clear": limit.is_clear} for limit in limits],
        "units": [{**unit, "sensitivity": loss} for unit, loss in zip(units, measured, strict=True)],
        **details,
    }


def write(directory: Path, report: dict[str, Any]) -> None:
    """Write the JSON and the page into ``directory``."""
    write_json(directory / JSON_FILE, report)
    page = report_page.render(
        "calibration.html.j2",
        report=report,
        limits=limit_rows(report),
        units=[UNIT_HEADINGS, *unit_rows(report)],
        plots=[_plot(report)] if _is_measured(report) else [],
    )
    write_text(directory / PAGE_FILE, page)


def show(report: dict[str, Any]) -> None:
    """The tables, on stderr: with ``--json``, JSON is all that stdout holds."""
    if _is_measured(report):
        title = "sensitivity: one unit quantized at a time"
        console.show_table(title, UNIT_HEADINGS, unit_rows(report), where=console.stderr)
    title, headings = f"accuracy gate, {report['precision']}", ["", "found", "limit", "met"]
    console.show_table(title, headings, limit_rows(report), where=console.stderr)


def limit_rows(report: dict[str, Any]) -> list[list[str]]:
    """The gate's figures, those with a limit and those without."""
    accuracy = report["accuracy"]
    rows = [
        ["perplexity, float", f"{accuracy['float_perplexity']:.4f}", "", ""],
        ["perplexity", f"{accuracy['perplexity']:.4f}", "", ""],
    ]
    for limit in report["limits"]:
        bound = "≤" if limit["what"].endswith("increase") else "≥"
        met = "NO" if not limit["met"] else "yes" if limit["is_clear"] else "unclear"
        rows.append([limit["what"], f"{limit['found']:.2%}", f"{bound} {limit['limit']:.2%}", met])
    return [*rows, ["top-1 agreement, decode steps", f"{accuracy['decode_top1_agreement']:.2%}", "", ""]]


def unit_rows(report: dict[str, Any]) -> list[list[str]]:
    """A row a unit."""

    def texts(unit: dict[str, Any]) -> list[str]:
        loss = unit["sensitivity"]
        measured = ["–"] * 4
        if loss:
            figures = f"{loss['divergence']:.2e}", f"{loss['relative_mse']:.2e}", f"{loss['top1_changed']:.1%}"
            measured = [loss["scheme"], *figures]
        return [unit["unit"], unit["scheme"], f"{unit['bytes'] / 1e6:.2f}", *measured]

    return [texts(unit) for unit in report["units"]]


def _is_measured(report: dict[str, Any]) -> bool:
    return any(unit["sensitivity"] for unit in report["units"])


def _plot(report: dict[str, Any]) -> Plot:
    units = report["units"]
    divergences = [max(unit["sensitivity"]["divergence"], 1e-12) for unit in units]
    own, head = (unit["sensitivity"]["scheme"] for unit in (units[0], units[-1]))
    raised = [unit["scheme"] != unit["sensitivity"]["scheme"] for unit in units]

    def paint(ax: Axes) -> None:
        colors = [report_plots.arm_color(1 if finer else 0) for finer in raised]
        ax.bar(range(len(units)), divergences, color=colors, width=0.7)
        ax.set_yscale("log")
        ax.set_xticks(range(len(units)), [unit["unit"].removeprefix("layer ") for unit in units])
        ax.grid(visible=False, axis="x")
        ax.set_xlabel("decoder layer")
        ax.set_ylabel("divergence, nats")

    worst = max(range(len(units)), key=divergences.__getitem__)
    return Plot(
        title="Sensitivity",
        caption="Mean divergence of the next-token distribution from float's when this unit alone is quantized, "
        f"measured in {own}{'' if head == own else f' (the head in {head})'}. Units in the second colour are stored "
        "finer than they were measured. The axis is logarithmic.",
        alt=f"Bars of divergence per unit; the largest is {units[worst]['unit']} with {divergences[worst]:.2e} nats, "
        f"measured in {units[worst]['sensitivity']['scheme']}.",
        svg=report_plots.draw(1, (8.4, 3.2), 1, 1, paint),
    )
