"""The comparison's plots, as SVG to be placed inside an HTML page.

Colours are sentinels that become CSS variables (``--ink``, ``--grid``, ``--arm-0`` …), so one
drawing serves light, dark and print. Text stays text. Ids get a prefix, since several drawings
share a page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

INK = "#a0a0f0"
GRID = "#a0a0f1"
NUM_COLORS = 6
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "meki-edge",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A drawing with its title, its caption, and the text that stands for it where it cannot be seen."""

    title: str
    caption: str
    alt: str
    svg: str


def plots(
    result: dict[str, Any], raw: dict[str, list[dict[str, Any]]], training: dict[str, list[dict[str, Any]]]
) -> list[Plot]:
    """All plots of a comparison.

    Args:
        result: the contents of ``compare.json``.
        raw: the harness's reports by arm and round.
        training: the lines of ``metrics.jsonl`` by arm; arms may be absent.
    """
    names = list(result["arms"])
    decode = {name: [_decode_test(report) for report in raw[name]] for name in names}
    drawn = [_speeds(result)]
    if training:
        drawn.append(_losses(names, training))
    if all(test is not None for tests in decode.values() for test in tests):
        drawn.append(_timeline(result, decode))
        if any(arm["rom_bytes"] for arm in result["arms"].values()):
            drawn.append(_stalls(result, decode))
    drawn.append(_places(result))
    return drawn


def arm_color(index: int) -> str:
    """The colour of an arm, as a sentinel that becomes a CSS variable."""
    return f"#a0a00{index % NUM_COLORS}"


def _decode_test(report: dict[str, Any]) -> dict[str, Any] | None:
    return next((test for test in report["tests"] if test["test"].startswith("tg")), None)


def draw(number: int, size: tuple[float, float], columns: int, rows: int, paint: Callable[..., None]) -> str:
    """Run ``paint(*axes)`` on a fresh figure and return the SVG element."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        paint(*axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(text.getvalue(), f"plot{number}-")


def _inline(document: str, prefix: str) -> str:
    """The ``<svg>`` element of an SVG document, themed, with unique ids, scaled by its container."""
    element = document[document.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, count=1, flags=re.DOTALL)
    element = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'\bid="', f'id="{prefix}', element)
    element = re.sub(r'href="#', f'href="#{prefix}', element)
    element = element.replace("url(#", f"url(#{prefix}")
    element = element.replace("'DejaVu Sans'", "system-ui, sans-serif")
    element = element.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return re.sub(r"#a0a00(\d)", r"var(--arm-\1)", element)


def _speeds(result: dict[str, Any]) -> Plot:
    arms, tests = result["arms"], result["tests"]

    def paint(*axes: Axes) -> None:
        for ax, test in zip(axes, tests, strict=True):
            for index, arm in enumerate(arms.values()):
                speed = arm[f"{test}_tokens_per_s"]
                ax.barh(index, speed["mean"], height=0.55, color=arm_color(index), alpha=0.35)
                ax.errorbar(speed["mean"], index, xerr=speed["sd"] or 0, color=INK, capsize=4, lw=1.4)
                offsets = np.linspace(-0.18, 0.18, len(speed["samples"])) if len(speed["samples"]) > 1 else [0]
                ax.scatter(speed["samples"], index + np.asarray(offsets), s=16, color=arm_color(index), zorder=3)
            ax.set_yticks(range(len(arms)), list(arms))
            ax.invert_yaxis()
            ax.grid(visible=False, axis="y")
            ax.set_xlim(left=0)
            ax.set_title(f"{test}, tokens/s")

    spoken = "; ".join(
        f"{name} {test} {arm[f'{test}_tokens_per_s']['mean']:.2f}" for test in tests for name, arm in arms.items()
    )
    return Plot(
        title="Speed",
        caption="Mean (bar), standard deviation (line) and every sample (dots, by round from top to bottom). "
        "pp is prefill, tg is decoding; axes start at zero.",
        alt=f"Bars of tokens per second: {spoken}.",
        svg=draw(1, (8.4, 0.9 + 0.55 * len(arms)), len(tests), 1, paint),
    )


def _losses(names: list[str], training: dict[str, list[dict[str, Any]]]) -> Plot:
    ends, heights = [], []

    def paint(ax: Axes) -> None:
        for name, lines in training.items():
            color = arm_color(names.index(name))
            train = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
            held_out = [(e["step"], e["validation_loss"]) for e in lines if e.get("validation_loss") is not None]
            if train:
                ax.plot(*zip(*train, strict=True), color=color, lw=0.8, alpha=0.45)
            if held_out:
                ax.plot(*zip(*held_out, strict=True), color=color, lw=1.8, marker="o", ms=4, label=name)
                ends.append(f"{name} ends at a validation loss of {held_out[-1][1]:.4f} after step {held_out[-1][0]}")
            heights.extend(loss for _, loss in train + held_out)
        if heights:  # the first steps would flatten the part in which the arms differ
            low, high = min(heights), float(np.percentile(heights, 90))
            ax.set_ylim(low - 0.05 * (high - low), high + 1e-3)
        ax.set_xlabel("optimizer step")
        ax.set_ylabel("loss, nats a token")
        ax.legend()

    svg = draw(2, (8.4, 3.6), 1, 1, paint)
    return Plot(
        title="Training",
        caption="Thin: training loss of each logged step. Thick: validation loss. The highest tenth is cut off. "
        "The table's loss may be of a longer validation, and after folding and rounding the rows.",
        alt=f"Loss curves: {'; '.join(ends) or 'no validation was logged'}.",
        svg=svg,
    )


def _timeline(result: dict[str, Any], decode: dict[str, list[dict[str, Any]]]) -> Plot:
    """Each arm's round of median speed, token by token."""
    steps = {
        name: sorted(tests, key=lambda test: test["elapsed_us"])[len(tests) // 2]["steps"]
        for name, tests in decode.items()
    }
    names = list(steps)
    with_rom = [name for name in names if result["arms"][name]["rom_bytes"]]

    def paint(top: Axes, bottom: Axes | None = None) -> None:
        for name in names:
            times = [(step["end_us"] - step["start_us"]) / 1e3 for step in steps[name]]
            top.plot(range(1, len(times) + 1), times, color=arm_color(names.index(name)), lw=1.2, label=name)
        top.set_ylim(bottom=0)
        top.set_title("step time, ms")
        top.legend(ncols=len(names), loc="lower right")
        if bottom is not None:
            for name in with_rom:
                color = arm_color(names.index(name))
                tokens = range(1, len(steps[name]) + 1)
                io_times, stalls = ([step[key] for step in steps[name]] for key in ("io_us", "stall_us"))
                bottom.plot(tokens, io_times, color=color, lw=1, ls=":", label=f"{name}: row I/O")
                bottom.plot(tokens, stalls, color=color, lw=1.6, label=f"{name}: stall")
            bottom.set_ylim(0, 1.3 * bottom.dataLim.y1 or 1)  # room for the legend
            bottom.set_title("row I/O and stall, µs")
            bottom.legend(ncols=2 * len(with_rom), loc="upper right")
            bottom.set_xlabel("decoded token")

    spoken = "; ".join(
        f"{name} median step {result['arms'][name]['decode_step_us_p50'] / 1e3:.2f} milliseconds" for name in names
    )
    return Plot(
        title="Decoding, token by token",
        caption="The round of median speed of each arm. I/O is the reader's time to fetch and decode a token's rows, "
        "beside the graph; stall is the part of it that the graph had to wait for.",
        alt=f"Time of each decode step: {spoken}.",
        svg=draw(3, (8.4, 4.4 if with_rom else 2.6), 1, 2 if with_rom else 1, paint),
    )


def _stalls(result: dict[str, Any], decode: dict[str, list[dict[str, Any]]]) -> Plot:
    names = list(decode)
    stalls = {
        name: [step["stall_us"] for test in tests for step in test["steps"]]
        for name, tests in decode.items()
        if result["arms"][name]["rom_bytes"]
    }
    edge = max(1.0, *(max(values) for values in stalls.values()))

    def paint(ax: Axes) -> None:
        for name, values in stalls.items():
            ax.hist(
                values, bins=np.linspace(0, edge, 41), color=arm_color(names.index(name)), alpha=0.6, label=name, log=True
            )
        ax.set_xlabel("stall of a decoded token, µs")
        ax.set_ylabel("tokens")
        ax.legend()

    spoken = "; ".join(
        f"{name}: {len(values)} tokens, median {np.median(values):.1f}, largest {max(values):.1f} microseconds"
        for name, values in stalls.items()
    )
    return Plot(
        title="Stall",
        caption="How long the graph waited for rows, every decoded token of every round; counts on a logarithmic axis.",
        alt=f"Histogram of stall per token: {spoken}.",
        svg=draw(4, (8.4, 2.8), 1, 1, paint),
    )


def _places(result: dict[str, Any]) -> Plot:
    arms = result["arms"]
    panels = [
        ("parameters in RAM", [arm["ram_parameters"] or 0 for arm in arms.values()], ""),
        ("ROM on storage", [arm["rom_bytes"] for arm in arms.values()], "B"),
    ]

    def paint(*axes: Axes) -> None:
        for ax, (title, values, unit) in zip(axes, panels, strict=True):
            ax.barh(range(len(arms)), values, height=0.55, color=[arm_color(index) for index in range(len(arms))])
            ax.set_yticks(range(len(arms)), list(arms))
            ax.invert_yaxis()
            ax.grid(visible=False, axis="y")
            ax.set_xlim(0, max(*values, 1) * 1.05)
            ax.xaxis.set_major_formatter(EngFormatter(unit=unit, sep=" " if unit else ""))
            ax.set_title(title)

    spoken = "; ".join(
        f"{name} {arm['ram_parameters'] or 0:,} parameters and {arm['rom_bytes']:,} bytes of ROM"
        for name, arm in arms.items()
    )
    return Plot(
        title="Where the parameters lie",
        caption="What stays in memory, and what is read from storage a row at a time.",
        alt=f"Parameters in RAM beside bytes on storage: {spoken}.",
        svg=draw(5, (8.4, 0.9 + 0.45 * len(arms)), 2, 1, paint),
    )
