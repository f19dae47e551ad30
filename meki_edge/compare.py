"""`meki-edge compare`: what the memory costs and what it buys, arm against arm.

Reads the measurements of `meki-edge run` and the quality that each bundle recorded; writes one
result as JSON, CSV, Markdown and a self-contained HTML page. The first arm is the baseline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from meki_edge import manifest, published, report_page, report_plots, report_tables
from meki_edge.errors import UserError
from meki_edge.files import read_json, write_json, write_text
from meki_edge.manifest import Manifest, StageOutput

SCHEMA = 1
RESULTS_SCHEMA = 3
HOST_NOTE = "Measured on this host's CPU, not on a phone."
FLOAT_NOTE = "The losses of {} are those of the models before their graphs were quantized."
SEED_NOTE = "One trained model an arm: a difference in loss between single runs can be chance."


def compare(runs: Path, out: Path, *, curves: Mapping[str, Path] | None = None, force: bool = False) -> Manifest:
    """Compare the arms of ``runs``, the output of `meki-edge run`.

    Args:
        curves: arm → the directory of `meki-edge train` whose loss curve the page shows.

    Raises:
        UserError: ``runs`` is not whole, or a curve names no arm of it.
    """
    curves = dict(curves or {})
    runs_manifest = manifest.load(runs, stages=("run",))
    manifest.verify(runs, runs_manifest)
    measured = read_json(runs_manifest.file(runs, "results"))
    if measured["schema"] != RESULTS_SCHEMA:
        what = f"results of schema {measured['schema']}, this version reads {RESULTS_SCHEMA}"
        raise UserError(what, where=runs, fix="measure again with this version of meki-edge")
    names = [arm["name"] for arm in measured["arms"]]
    for name in curves:
        if name not in names:
            fix = f"use one of {', '.join(names)}"
            raise UserError(f"there is no arm {name!r}", where=f"--curve {name}={curves[name]}", fix=fix)
    training = {name: _trained(directory) for name, directory in curves.items()}
    output = StageOutput(
        out,
        stage="compare",
        config={},
        inputs={"runs": runs, **{f"curve {name}": directory for name, directory in curves.items()}},
        tools=("matplotlib", "jinja2"),
        force=force,
    )
    if output.complete is not None:
        return output.complete
    result = build(measured, {name: trained.metrics.get("train_tokens") for name, (trained, _) in training.items()})
    lines = {name: logged for name, (_, logged) in training.items()}
    raw = {arm["name"]: [read_json(runs / name) for name in arm["raw"]] for arm in measured["arms"]}
    write_json(output.partial / "compare.json", result)
    write_text(output.partial / "compare.csv", report_tables.comma_separated(result))
    write_text(output.partial / "compare.md", report_tables.markdown(result))
    write_text(output.partial / "compare.html", _page(result, raw, lines))
    return output.finish(
        roles={f"compare.{kind}": kind for kind in ("json", "csv", "md", "html")},
        metrics={"headline": result["headline"], "notes": result["notes"]},
    )


def table(result: dict[str, Any]) -> Table:
    """The contents of ``compare.json`` as a table for the terminal."""
    return report_tables.terminal(result)


def build(measured: dict[str, Any], budgets: Mapping[str, int | None] | None = None) -> dict[str, Any]:
    """``compare.json`` from the contents of ``results.json`` and the arms' training ``budgets`` in tokens."""
    arms = {arm["name"]: _arm(arm) for arm in measured["arms"]}
    baseline = measured["arms"][0]["name"]
    phone = measured.get("phone")  # of `meki-edge bench --on adb`, which says in its notes where it measured
    for ratio in measured["ratios"]:
        figures = {key: ratio[key] for key in ("median", "low", "high", "samples")}
        arms[ratio["arm"]][f"{ratio['test']}_ratio"] = figures
    result = {
        "schema": SCHEMA,
        "baseline": baseline,
        "tests": list(measured["arms"][0]["tests"]),
        "arms": arms,
        "ratios": {
            f"{name}/{baseline}": {key.removesuffix("_ratio"): arm[key] for key in arm if key.endswith("_ratio")}
            for name, arm in arms.items()
            if name != baseline
        },
        "host": measured["host"],
        "runner": measured["runner"],
        "config": measured["config"],
        "phone": phone,
        "published": published.table() if phone else None,
        "notes": [*([] if phone else [HOST_NOTE]), *_quality_notes(arms), *_budget_notes(budgets or {}), *measured["notes"]],
    }
    return {"headline": headline(result), **result}


def _arm(arm: dict[str, Any]) -> dict[str, Any]:
    """One arm's figures; stall and I/O are those of decoding, None if it was not measured."""
    metrics = arm["metrics"]
    loss = metrics["validation_loss"]
    decode = next((test for name, test in arm["tests"].items() if name.startswith("tg")), None)
    figures: dict[str, Any] = {
        "val_loss": loss,
        "val_tokens": metrics["validation_tokens"],
        "perplexity": None if loss is None else math.exp(loss),
    }
    for name, test in arm["tests"].items():
        figures[f"{name}_tokens_per_s"] = test["tokens_per_s"]
    for kind in ("stall", "io"):
        spread = decode[f"{kind}_us_per_token"] if decode else dict.fromkeys(("mean", "p50", "p99"))
        figures[f"{kind}_us_per_token"] = spread["mean"]
        figures[f"{kind}_us_p50"] = spread["p50"]
        figures[f"{kind}_us_p99"] = spread["p99"]
    return {
        **figures,
        "stall_share": decode["stall_share"] if decode else None,
        "bytes_read_per_token": decode["bytes_read_per_token"] if decode else None,
        "cache_hit_share": decode["cache_hit_share"] if decode else None,
        "decode_step_us_p50": decode["step_us"]["p50"] if decode else None,
        "rom_bytes": metrics["rom_bytes"],
        "rom_bytes_per_token": metrics["rom_bytes_per_token"],
        "rom_bytes_per_token_expected": metrics["rom_bytes_per_token_expected"],
        "precision": metrics["precision"],
        "perplexity_increase": metrics["perplexity_increase"],
        "table_precision": metrics["table_precision"],
        "context_lengths": metrics["context_lengths"],
        "weight_bytes_per_token": metrics["weight_bytes_per_token"],
        "expert_bytes_per_token": metrics["expert_bytes_per_token"],
        "ram_parameters": metrics["ram_parameters"],
        "active_parameters": metrics["active_parameters"],
        "weights_bytes": metrics["weights_bytes"],
        "bundle_bytes": arm["bundle_bytes"],
        "rss_bytes": arm["rss_bytes"],
        "rss_growth_bytes": arm["rss_growth_bytes"],
        "peak_rss_bytes": arm["peak_rss_bytes"],
        "load_us": arm["load_us"],
        "ttft_us": arm.get("ttft_us"),
        "pss_bytes": arm.get("pss_bytes"),
        **{f"condition_{key}": value for key, value in arm.get("conditions", {}).items()},
        "power_watts": arm.get("power_watts"),
        "energy_joules_per_token": arm.get("energy_joules_per_token"),
    }


def _quality_notes(arms: dict[str, dict[str, Any]]) -> list[str]:
    """What keeps the losses from being compared, if anything; else a word on chance."""
    missing = [name for name, arm in arms.items() if arm["val_loss"] is None]
    if missing:
        return [f"No validation loss was recorded for {', '.join(missing)}."]
    quantized = [name for name, arm in arms.items() if arm["perplexity_increase"] is not None]
    of_float = [FLOAT_NOTE.format(", ".join(quantized))] if quantized else []
    if len({arm["val_tokens"] for arm in arms.values()}) > 1:
        counts = ", ".join(f"{name}: {arm['val_tokens'] or 'unknown'}" for name, arm in arms.items())
        what = f"The losses are not comparable: they were evaluated on different numbers of tokens ({counts})."
        return [what, *of_float]
    return [*([SEED_NOTE] if len(arms) > 1 else []), *of_float]


def _budget_notes(budgets: Mapping[str, int | None]) -> list[str]:
    if len(set(budgets.values())) < 2:
        return []
    counts = ", ".join(f"{name}: {budget or 'unknown'}" for name, budget in budgets.items())
    return [f"The arms were trained on different numbers of tokens ({counts})."]


def headline(result: dict[str, Any]) -> str:
    """What was seen, in a sentence or two an arm, with no claim that the figures do not carry."""
    arms, baseline = result["arms"], result["baseline"]
    sentences = [
        sentence
        for name, arm in arms.items()
        if name != baseline
        for sentence in (_quality(name, baseline, arms), _speed(name, baseline, arms), _stall(name, arm), _experts(arm))
        if sentence
    ]
    return " ".join(sentences) or f"{baseline} was measured alone."


def _quality(name: str, baseline: str, arms: dict[str, dict[str, Any]]) -> str:
    ours, theirs = arms[name], arms[baseline]
    if ours["val_loss"] is None or theirs["val_loss"] is None:
        return f"The quality of {name} and {baseline} cannot be compared: a validation loss is missing."
    figures = f"{ours['val_loss']:.4f} against {theirs['val_loss']:.4f} nats a token"
    if ours["val_tokens"] != theirs["val_tokens"]:
        return f"The validation losses of {name} and {baseline} ({figures}) are of different numbers of tokens."
    difference = ours["val_loss"] - theirs["val_loss"]
    if abs(difference) < 5e-5:
        return f"{name} and {baseline} have the same validation loss ({figures})."
    return f"{name} has the {'lower' if difference < 0 else 'higher'} validation loss ({figures})."


def _speed(name: str, baseline: str, arms: dict[str, dict[str, Any]]) -> str:
    ratio = next((arms[name][key] for key in arms[name] if key.startswith("tg") and key.endswith("_ratio")), None)
    if ratio is None:
        return ""
    start = f"It decodes at {ratio['median']:.3f} times the speed of {baseline}"
    if ratio["low"] is None:
        return f"{start} (too few rounds for an interval)."
    interval = f"95 % interval {ratio['low']:.3f} to {ratio['high']:.3f}"
    if ratio["low"] <= 1 <= ratio["high"]:
        return f"{start} ({interval}: no difference could be told)."
    return f"{start} ({interval}: {'slower' if ratio['high'] < 1 else 'faster'})."


def _stall(name: str, arm: dict[str, Any]) -> str:
    if not arm["rom_bytes"] or arm["stall_us_per_token"] is None:
        return ""
    waited, share = arm["stall_us_per_token"], arm["stall_share"]
    return f"Its graph waited {waited:,.1f} µs a token for rows, {share:.3%} of the time."


def _experts(arm: dict[str, Any]) -> str:
    if arm["expert_bytes_per_token"] is None:
        return ""
    return (
        f"Each decoded token reads {arm['expert_bytes_per_token'] / 1e6:,.2f} MB of experts, which cannot be fetched "
        "ahead: a layer chooses its own when it is reached."
    )


def _trained(directory: Path) -> tuple[Manifest, list[dict[str, Any]]]:
    """A training's manifest and the lines of its ``metrics.jsonl``."""
    found = manifest.load(directory, stages=("train",))
    manifest.verify(directory, found)
    path = found.file(directory, "metrics")
    return found, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _page(
    result: dict[str, Any], raw: dict[str, list[dict[str, Any]]], training: dict[str, list[dict[str, Any]]]
) -> str:
    """The HTML page: no script, no network, plots as inline SVG."""
    return report_page.render(
        "compare.html.j2",
        result=result,
        cells=report_tables.cells(result),
        plots=report_plots.plots(result, raw, training),
    )
