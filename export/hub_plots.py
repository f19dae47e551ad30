"""The page's drawings: how long each run took, what a shorter context saves, and which unit took which layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from export.hub_report import UNITS, shorter_contexts
from meki_edge.graph_spec import context_suffix
from meki_edge.report_plots import Plot, arm_color, draw

BINS = 30
HATCHES = {"NPU": "", "GPU": "//", "CPU": "xx"}


def plots(result: dict[str, Any]) -> list[Plot]:
    """All drawings of ``hub.json``."""
    drawn = []
    for device, figures in result["measured"].items():
        for graph in ("decode", "prefill"):
            times = {name: _times(arm, graph) for name, arm in figures.items()}
            if any(times.values()):
                drawn.append(_distribution(len(drawn) + 1, device, graph, {k: v for k, v in times.items() if v}))
        keys = {f"{context:,}": f"decode_us{context_suffix(context)}" for context in shorter_contexts(result)}
        if any(key in arm for arm in figures.values() for key in keys.values()):
            drawn.append(_contexts(len(drawn) + 1, device, {**keys, "longest": "decode_us"}, figures))
    if any("units" in arm for figures in result["measured"].values() for arm in figures.values()):
        drawn.append(_units(len(drawn) + 1, result))
    return drawn


def _times(arm: dict[str, Any], graph: str) -> list[float]:
    """Times of a call, ms; parts run one after another, so their i-th slowest runs are summed."""
    measured = [found for found in arm["graphs"].values() if found["graph"] == graph and "all_inference_us" in found]
    parts = [sorted(found["all_inference_us"]) for found in measured]
    shortest = min(map(len, parts), default=0)
    return [sum(run) / 1e3 for run in zip(*(part[:shortest] for part in parts), strict=True)]


def _distribution(number: int, device: str, graph: str, times: dict[str, list[float]]) -> Plot:
    low, high = min(map(min, times.values())), max(map(max, times.values()))
    edges = np.linspace(low, high if high > low else low + 1e-3, BINS + 1)

    def paint(ax: Axes) -> None:
        for index, (name, values) in enumerate(times.items()):
            ax.hist(values, bins=edges, color=arm_color(index), alpha=0.55, label=name)
            ax.axvline(float(np.median(values)), color=arm_color(index), lw=1.4)
        ax.set_xlabel("ms a call")
        ax.set_ylabel("runs")
        ax.legend()

    what = "a token decoded" if graph == "decode" else "a prefill chunk"
    spoken = "; ".join(f"{name}: {len(v)} runs, median {np.median(v):.3f} milliseconds" for name, v in times.items())
    return Plot(
        title=f"{device}: time of {what}",
        caption="Every run that the service timed; the lines are medians. "
        "Of several parts, runs of equal rank are summed.",
        alt=f"Histogram of inference times: {spoken}.",
        svg=draw(number, (8.4, 2.6), 1, 1, paint),
    )


def _contexts(number: int, device: str, keys: dict[str, str], figures: dict[str, dict[str, Any]]) -> Plot:
    """``keys``: a context's name → the figure to draw, in µs; of arms without such a context, nothing."""
    times = {
        name: {context: arm[key] / 1e3 for context, key in keys.items() if key in arm} for name, arm in figures.items()
    }
    height = 0.8 / len(times)

    def paint(ax: Axes) -> None:
        places = {context: place for place, context in enumerate(keys)}
        for index, (name, found) in enumerate(times.items()):
            shift = (index - (len(times) - 1) / 2) * height
            rows = [places[context] + shift for context in found]
            ax.barh(rows, list(found.values()), height=0.9 * height, color=arm_color(index), label=name)
        ax.set_yticks(range(len(keys)), list(keys))
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.set_xlabel("ms a token")
        ax.set_ylabel("context")
        ax.legend()

    spoken = "; ".join(
        f"{name}: " + ", ".join(f"context {context} {ms:.3f} milliseconds" for context, ms in found.items())
        for name, found in times.items()
    )
    return Plot(
        title=f"{device}: time of a token decoded, by context",
        caption="A graph attends to all slots of its context, used or not: a text is decoded in the shortest "
        "context that holds it.",
        alt=f"Bars of decoding times: {spoken}.",
        svg=draw(number, (8.4, 0.9 + 0.3 * len(keys) * len(times)), 1, 1, paint),
    )


def _units(number: int, result: dict[str, Any]) -> Plot:
    bars = [
        (f"{name}\n{device}", arm["units"])
        for device, figures in result["measured"].items()
        for name, arm in figures.items()
        if "units" in arm
    ]

    def paint(ax: Axes) -> None:
        left = np.zeros(len(bars))
        for index, unit in enumerate(UNITS):
            counts = np.array([units[unit] for _, units in bars])
            style = {"color": arm_color(index + 1), "hatch": HATCHES[unit], "label": unit}
            ax.barh(range(len(bars)), counts, left=left, height=0.55, **style)
            left += counts
        ax.set_yticks(range(len(bars)), [name for name, _ in bars])
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.set_xlabel("operators of the decode graphs")
        ax.legend(ncols=3, loc="lower right")

    spoken = "; ".join(f"{name}: " + ", ".join(f"{units[unit]} on {unit}" for unit in UNITS) for name, units in bars)
    return Plot(
        title="Layers by unit",
        caption="Where the device ran the operators of decoding. "
        "Whatever is not on the NPU costs a trip to the CPU and back.",
        alt=f"Bars of operators by unit: {spoken}.".replace("\n", " on "),
        svg=draw(number, (8.4, 0.9 + 0.55 * len(bars)), 1, 1, paint),
    )
