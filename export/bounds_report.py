"""Bounds as data, tables and a plot; every one of them says that it is a bound."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.cost_bounds import KV_READ, PARTS, ROWS, Step, bound, step_of_model
from export.targets import Chip, chip
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import write_text
from meki_edge.train import presets

LABEL = "Lower bounds on time (upper bounds on tokens/s), not predictions."
PRECISIONS_OF_SPEEDS = ("fp16", "w8a16", "w4a16")


@dataclass(frozen=True, kw_only=True)
class PublishedSpeed:
    """What the MeKi paper measured on a Snapdragon 8 Elite with a cache of 10K tokens, in tokens/s."""

    preset: str
    dense: float
    meki: float


PUBLISHED_SPEEDS = (
    PublishedSpeed(preset="qwen3-0.6b", dense=20.1, meki=19.9),
    PublishedSpeed(preset="qwen3-1.7b", dense=13.8, meki=13.7),
    PublishedSpeed(preset="qwen3-4b", dense=6.1, meki=6.1),
)
PUBLISHED_CHIP, PUBLISHED_CONTEXT = "sm8750", 10_240


def report(
    steps: Sequence[Step],
    target: Chip,
    context_lengths: Sequence[int],
    measured: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The bounds of every step at every context length, as JSON; the first step is what others are compared with.

    Args:
        measured: what :func:`published` gives, to be shown beside the bounds.
    """
    arms = []
    for step in steps:
        bounds = [bound(step, target, length) for length in context_lengths]
        found = [to_dict(limit) for limit in bounds]
        arms.append({"name": step.name, "parameters": dict(step.parameters), "bounds": found})
    return {
        "what": LABEL,
        "chip": target.name,
        "soc": target.soc,
        "peak_bandwidth_bytes_per_s": target.peak_bandwidth,
        "bandwidth_source": target.memory_source,
        "arms": arms,
        "published": list(measured),
    }


def published(preset: str, vocab_size: int, kv_dtype: str) -> list[dict[str, Any]]:
    """How far the paper's speeds of this shape lie from the bound, for each precision it may have used.

    The paper's precision is not known here; where its speed is above a bound, it was not that one.
    """
    found = []
    for speed in (speed for speed in PUBLISHED_SPEEDS if speed.preset == preset):
        for precision in PRECISIONS_OF_SPEEDS:
            for arm, measured in (("dense", speed.dense), ("meki", speed.meki)):
                memory = None if arm == "dense" else arm
                step = step_of_model(arm, presets.build(preset, vocab_size, memory=memory), precision, kv_dtype)
                limit = bound(step, chip(PUBLISHED_CHIP), PUBLISHED_CONTEXT).tokens_per_s
                found.append(
                    {
                        "arm": arm,
                        "weights": precision,
                        "published_tokens_per_s": measured,
                        "bound_tokens_per_s": limit,
                        "share_of_bound": measured / limit,
                    }
                )
    return found


def part_table(result: dict[str, Any], index: int) -> tuple[str, list[str], list[list[str]]]:
    """Title, headings and rows: megabytes by part at the context length number ``index``."""
    arms = result["arms"]
    bounds = [arm["bounds"][index] for arm in arms]
    rows = []
    for part in PARTS:
        sizes = [found["dram_bytes"].get(part, 0) for found in bounds]
        if any(sizes):
            rows.append([part, *(f"{size / 1e6:,.2f}" for size in sizes)])
    rows.append(["all from DRAM", *(f"{found['total_dram_bytes'] / 1e6:,.2f}" for found in bounds)])
    rows.append(["read from storage", *(f"{found['storage_bytes'] / 1e6:,.3f}" for found in bounds)])
    title = f"MB a decoded token moves, context {bounds[0]['context_length']:,}"
    return title, ["part", *(arm["name"] for arm in arms)], rows


def bound_table(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Title, headings and rows: the bounds over context length."""
    arms = result["arms"]
    headings = ["context", "KV cache, MB"]
    for arm in arms:
        headings += [f"{arm['name']}: ms ≥", "tokens/s ≤"]
    headings += [f"{arm['name']} / {arms[0]['name']}" for arm in arms[1:]]
    rows = []
    for found in zip(*(arm["bounds"] for arm in arms), strict=True):
        row = [f"{found[0]['context_length']:,}", f"{found[0]['dram_bytes'][KV_READ] / 1e6:,.1f}"]
        for one in found:
            row += [f"{one['seconds'] * 1e3:,.2f}", f"{one['tokens_per_s']:,.1f}"]
        rows.append(row + [f"{one['tokens_per_s'] / found[0]['tokens_per_s']:.4f}" for one in found[1:]])
    source = f"{result['peak_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s: {result['bandwidth_source']}"
    return f"{result['chip']}, {source}. {LABEL}", headings, rows


def published_table(rows: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, headings and rows: the paper's speeds against the bounds."""
    title = (
        f"The MeKi paper's tokens/s on {chip(PUBLISHED_CHIP).name} at 10K tokens of context, beside bounds at "
        f"{PUBLISHED_CONTEXT:,}; its weights' precision is not known here"
    )
    headings = ["arm", "if its weights were", "bound, tokens/s ≤", "paper, tokens/s", "share of the bound"]
    return title, headings, [
        [
            row["arm"],
            row["weights"],
            f"{row['bound_tokens_per_s']:.1f}",
            f"{row['published_tokens_per_s']:.1f}",
            f"{row['share_of_bound']:.0%}",
        ]
        for row in rows
    ]


def explain(result: dict[str, Any]) -> list[str]:
    """One sentence a memory: why its bound lies where it does beside the first arm's."""
    base = result["arms"][0]
    sentences = []
    for arm in result["arms"][1:]:
        more = sum(arm["parameters"].values()) / sum(base["parameters"].values()) - 1
        last, first = arm["bounds"][-1], base["bounds"][-1]
        grown = last["total_dram_bytes"] / first["total_dram_bytes"] - 1
        rows = last["dram_bytes"].get(ROWS, 0)
        sentences.append(
            f"{arm['name']}: RAM parameters {more:+.2%}; a token's rows move {rows / 1024:,.1f} KiB through DRAM, "
            f"{rows / last['total_dram_bytes']:.4%} of the step's bytes; at context {last['context_length']:,} all "
            f"bytes grow by {grown:+.2%}, and the bound on the time with them."
        )
    return sentences


def check_plot(path: Path) -> None:
    """Raise :class:`UserError` unless ``path`` is a name for :func:`plot`, in a folder that is there."""
    if path.suffix not in (".svg", ".html"):
        raise UserError(f"{path.name} is neither .svg nor .html", where="--plot", fix="name a file *.svg or *.html")
    if not path.parent.is_dir():
        what = f"the folder {str(path.parent)!r} does not exist"
        raise UserError(what, where="--plot", fix="make it first, or name a file in one that is there")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the bounds to ``path``: ``.svg``, or ``.html`` with the tables and sentences.

    Raises:
        UserError: another suffix, no such folder, or a file that cannot be written.
    """
    check_plot(path)
    svg = _svg(result)
    try:
        write_text(path, svg if path.suffix == ".svg" else _page(result, svg))
    except OSError as error:
        fix = "name a file in a folder that takes files"
        raise UserError(f"{path} cannot be written: {error.strerror}", where="--plot", fix=fix) from None


def _page(result: dict[str, Any], svg: str) -> str:
    body = "".join(_html_table(*table) for table in (bound_table(result), part_table(result, -1)))
    sentences = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in explain(result))
    title = html.escape(f"Decode bounds, {result['chip']}")
    return _PAGE.format(title=title, drawing=svg[svg.index("<svg") :], body=sentences + body)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }}
svg {{ width: 100%; height: auto }} table {{ border-collapse: collapse; margin: 1rem 0 }}
caption {{ text-align: left; font-weight: 600 }} th, td {{ padding: .15rem .6rem; text-align: right }}
th:first-child, td:first-child {{ text-align: left }} tr:nth-child(even) td {{ background: #f3f3f3 }}
</style>
<h1>{title}</h1>
{drawing}
{body}
</html>
"""


def _html_table(title: str, headings: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    head = line(headings, "th")
    return f"<table><caption>{html.escape(title)}</caption>{head}{''.join(line(row, 'td') for row in rows)}</table>"


def _svg(result: dict[str, Any]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    arms = result["arms"]
    lengths = [f"{found['context_length']:,}" for found in arms[0]["bounds"]]
    with matplotlib.rc_context({"svg.hashsalt": "meki-edge", "svg.fonttype": "none", "axes.titlelocation": "left"}):
        figure = Figure(figsize=(10, 4.8), layout="constrained")
        bandwidth = result["peak_bandwidth_bytes_per_s"] / 1e9
        figure.suptitle(f"{result['chip']}, {bandwidth:.1f} GB/s. {LABEL}", fontsize=10)
        moved, speed = figure.subplots(1, 2)
        width, same_chip = 0.8 / len(arms), result["soc"] == PUBLISHED_CHIP
        for index, arm in enumerate(arms):
            places = [place + (index - (len(arms) - 1) / 2) * width for place in range(len(lengths))]
            base = [0.0] * len(lengths)
            for number, part in enumerate(PARTS):
                sizes = [found["dram_bytes"].get(part, 0) / 1e6 for found in arm["bounds"]]
                if any(sizes):
                    color, label = f"C{number}", part if index == len(arms) - 1 else None
                    moved.bar(places, sizes, width * 0.9, bottom=base, color=color, label=label)
                    base = [low + size for low, size in zip(base, sizes, strict=True)]
            speed.bar(places, [found["tokens_per_s"] for found in arm["bounds"]], width * 0.9, label=arm["name"])
            for found, place in zip(arm["bounds"], places, strict=True):
                speeds = {row["arm"]: row["published_tokens_per_s"] for row in result["published"]}
                if found["context_length"] == PUBLISHED_CONTEXT and arm["name"] in speeds and same_chip:
                    label = "measured in the paper" if index == 0 else None
                    speed.plot([place], [speeds[arm["name"]]], "kD", markersize=4, label=label)
        names = " | ".join(arm["name"] for arm in arms)
        moved.set(title=f"MB a decoded token moves ({names})", xlabel="context length", ylabel="MB from DRAM")
        speed.set(title="tokens/s, at the most", xlabel="context length", ylabel="tokens/s ≤")
        for axes in (moved, speed):
            axes.set_xticks(range(len(lengths)), lengths)
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
