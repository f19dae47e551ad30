"""What AI Hub's profiles say of each model on each device, side by side.

Times are µs and memory bytes, as in the service's profiles. A model's parts run one after another,
so their times add up; they are in memory together, so their peaks add up too. What the host adds
(rows from flash, the sampler) is not in a profile of the NPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from export.hub_published import PUBLISHED
from export.hub_service import HubDevice
from export.hub_source import Arm, shapes
from meki_edge.config import to_dict
from meki_edge.graph_spec import GraphSpec, context_suffix

SCHEMA = 1
SLOWEST = 8  # operators listed a graph
UNITS = ("NPU", "GPU", "CPU")
MISSING = "–"
LOOPBACK_NOTE = "The service was a server on this machine, not Qualcomm AI Hub: these are no phone's times."
DEVICE_NOTE = "Times of the graphs on the service's own devices; reading rows from flash and sampling are not in them."
FIRST_TOKEN_NOTE = (
    "Time to first token: what a prompt of that length needs of a loaded model: chunks of prefill, decode for a last "
    "single token, and a head of its own once."
)
CONTEXTS_NOTE = (
    "Figures that name no context are of the longest one. A text runs in the shortest that holds it, and so does each "
    "chunk of a prompt; spreading the cache over the next one's slots is the host's work and not in the times."
)
AGREEMENT_NOTE = (
    "Agreement: outputs of the device against ONNX Runtime on the CPU for the same inputs, taken from real text; "
    "each part and step is fed ONNX Runtime's own inputs, so errors do not add up."
)


def build(
    arms: Sequence[Arm],
    devices: Sequence[HubDevice],
    profiles: Mapping[tuple[str, str, str], dict[str, Any]],
    agreements: Mapping[tuple[str, str, str], dict[str, Any]],
    *,
    service: str,
    config: dict[str, Any],
    jobs: list[dict[str, Any]],
) -> dict[str, Any]:
    """The contents of ``hub.json``; ``profiles`` and ``agreements`` are by (device, arm, graph)."""
    measured: dict[str, dict[str, Any]] = {}
    for device in devices:
        found = {arm.name: _arm(arm, device, profiles, agreements, config["prompt_lengths"]) for arm in arms}
        measured[device.name] = {name: figures for name, figures in found.items() if figures["graphs"]}
    socs = {device.chip.soc for device in devices if device.chip is not None}
    result = {
        "schema": SCHEMA,
        "service": service,
        "baseline": arms[0].name,
        "config": config,
        "devices": {device.name: _device(device) for device in devices},
        "arms": {arm.name: {**shapes(arm), **_quality(arm)} for arm in arms},
        "measured": measured,
        "published": [to_dict(peer) for peer in PUBLISHED if peer.soc in socs],
        "jobs": jobs,
    }
    _compare(result)
    result["notes"] = _notes(arms, bool(profiles), bool(agreements), service)
    return {"headline": _headline(result), **result}


def cells(result: dict[str, Any], device: str) -> list[tuple[str, list[str]]]:
    """(label, one text an arm) of a device's table; rows without a value are left out."""
    figures = result["measured"][device]
    rows: list[tuple[str, list[str]]] = []

    def row(name: str, key: str, write: Any) -> None:
        values = [arm.get(key) for arm in figures.values()]
        if any(value is not None for value in values):
            rows.append((name, [MISSING if value is None else write(value) for value in values]))

    row("Decode, tokens/s (1 / time of a token)", "tokens_per_s", "{:,.2f}".format)
    row(f"Decode, ratio to {result['baseline']}", "decode_ratio", "{:.3f}".format)
    row("Decode, a token", "decode_us", _time)
    row("Decode, fastest … slowest", "decode_spread", lambda spread: f"{_time(spread[0])} … {_time(spread[1])}")
    row("Prefill, tokens/s", "prefill_tokens_per_s", "{:,.1f}".format)
    row("Prefill, a chunk", "prefill_us", _time)
    for context in shorter_contexts(result):
        suffix = context_suffix(context)
        row(f"Decode, context {context:,}: tokens/s", f"tokens_per_s{suffix}", "{:,.2f}".format)
        row(f"Decode, context {context:,}: a token", f"decode_us{suffix}", _time)
        row(f"Prefill, context {context:,}: a chunk", f"prefill_us{suffix}", _time)
    for length in result["config"]["prompt_lengths"]:
        row(f"Time to first token, prompt of {length:,}", f"first_token_us_{length}", _time)
    row("Load, first", "first_load_us", _time)
    row("Load, again", "warm_load_us", _time)
    row("Peak memory", "peak_memory_bytes", lambda value: f"{value / 1e6:,.1f} MB")
    row("Decode operators on NPU / GPU / CPU", "units", lambda units: " / ".join(str(units[unit]) for unit in UNITS))
    row("Parts", "parts", str)
    row("Logits against ONNX Runtime: cosine ≥", "min_cosine", "{:.5f}".format)
    row("Logits: largest error", "max_abs_error", "{:.4g}".format)
    row("Likeliest token agrees", "argmax_agreement", "{:.1%}".format)
    arms = [result["arms"][name] for name in figures]
    rows.append(("Precision of the graphs", [arm["precision"] for arm in arms]))
    quality = [arm.get("validation_loss") for arm in arms]
    if any(value is not None for value in quality):
        texts = [MISSING if value is None else f"{value:.4f}" for value in quality]
        rows.append(("Validation loss, nats a token", texts))
    return rows


def shorter_contexts(result: dict[str, Any]) -> list[int]:
    """Those of any arm, ascending."""
    return sorted({context for arm in result["arms"].values() for context in arm.get("shorter_contexts", ())})


def published_rows(result: dict[str, Any]) -> list[list[str]]:
    """Model, precision, runtime, context, tokens/s: of the published table."""
    return [
        [
            f"{peer['model']} ({peer['precision']})",
            peer["device"],
            peer["runtime"],
            f"{peer['context_length']:,}",
            f"{peer['tokens_per_s']:g}",
        ]
        for peer in result["published"]
    ]


def _arm(
    arm: Arm,
    device: HubDevice,
    profiles: Mapping[tuple[str, str, str], dict[str, Any]],
    agreements: Mapping[tuple[str, str, str], dict[str, Any]],
    prompt_lengths: Iterable[int],
) -> dict[str, Any]:
    graphs: dict[str, Any] = {}
    for unit in arm.units:
        key = (device.name, arm.name, unit.name)
        if key in profiles or key in agreements:
            graphs[unit.name] = {"graph": unit.graph, "part": unit.part}
            graphs[unit.name] |= _graph(profiles[key]) if key in profiles else {}
            graphs[unit.name] |= {"agreement": agreements[key]} if key in agreements else {}
    figures: dict[str, Any] = {"parts": arm.num_parts, "graphs": graphs}
    apart = arm.spec is not None and arm.spec.head_is_apart
    for suffix in ("", *map(context_suffix, arm.shorter_contexts)):
        for name in ("decode", "prefill"):
            if parts := _profiled(arm, graphs, name + suffix):
                run = parts[:-1] if apart and name == "prefill" else parts  # the harness runs decode's head instead
                figures[f"{name}_us{suffix}"] = sum(graph["inference_us"] for graph in run)
        if decode_us := figures.get(f"decode_us{suffix}"):
            figures[f"tokens_per_s{suffix}"] = 1e6 / decode_us
    if decode := _profiled(arm, graphs, "decode"):
        figures["decode_spread"] = [sum(pick(graph["all_inference_us"]) for graph in decode) for pick in (min, max)]
        figures["first_load_us"] = _sum(graph["first_load_us"] for graph in decode)
        figures["warm_load_us"] = _sum(graph["warm_load_us"] for graph in decode)
        figures["units"] = {unit: sum(graph["units"].get(unit, 0) for graph in decode) for unit in UNITS}
    if arm.spec is not None and "prefill_us" in figures:
        figures["prefill_tokens_per_s"] = arm.spec.prefill.num_tokens * 1e6 / figures["prefill_us"]
    if arm.spec is not None and {"prefill_us", "decode_us"} <= figures.keys():
        head_us = decode[-1]["inference_us"] if apart else 0
        for length in prompt_lengths:
            if length < arm.spec.context_length:
                figures[f"first_token_us_{length}"] = _first_token(arm.spec, figures, length, head_us)
    figures["peak_memory_bytes"] = _peak(arm, graphs)
    logits = [graph["agreement"]["logits"] for graph in graphs.values() if "logits" in graph.get("agreement", {})]
    if logits:
        figures["min_cosine"] = min(found["min_cosine"] for found in logits)
        figures["max_abs_error"] = max(found["max_abs_error"] for found in logits)
        figures["argmax_agreement"] = float(
            np.average([found["argmax_agreement"] for found in logits], weights=[found["tokens"] for found in logits])
        )
    return figures


def _profiled(arm: Arm, graphs: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """All parts of a graph, in order; nothing if one was not profiled."""
    parts = [graphs.get(unit.name, {}) for unit in arm.of(name)]
    return parts if len(parts) == arm.num_parts and all("inference_us" in part for part in parts) else []


def _first_token(spec: GraphSpec, figures: dict[str, Any], length: int, head_us: float) -> float:
    """What the harness runs for a prompt, each step in the shortest context that holds it, of those that were profiled.

    Those are chunks of prefill, and decode for a last single token. A head that is apart takes ``head_us``: it runs
    once, for the last token.
    """
    chunk = spec.prefill.num_tokens
    contexts = sorted(
        (one.context_length, suffix)
        for suffix, one in spec.contexts.items()
        if {f"prefill_us{suffix}", f"decode_us{suffix}"} <= figures.keys()
    )
    total = head_us
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        suffix = next(suffix for context, suffix in contexts if end <= context)
        single = end - start == 1
        total += figures[f"decode_us{suffix}"] - head_us if single else figures[f"prefill_us{suffix}"]
    return total


def _graph(profile: dict[str, Any]) -> dict[str, Any]:
    """What is used of one profile; fields that the service left out are None."""
    summary, detail = profile["execution_summary"], profile["execution_detail"]
    timed = [layer for layer in detail if layer.get("execution_time")]
    slowest = sorted(timed, key=lambda layer: -layer["execution_time"])[:SLOWEST]
    return {
        "inference_us": max(summary["estimated_inference_time"], 1),
        "all_inference_us": summary.get("all_inference_times") or [summary["estimated_inference_time"]],
        "first_load_us": summary.get("first_load_time"),
        "warm_load_us": summary.get("warm_load_time"),
        "peak_memory_bytes": summary.get("estimated_inference_peak_memory"),
        "units": dict(Counter(layer["compute_unit"] for layer in detail)),
        "slowest": [
            {
                "name": layer["name"],
                "type": layer["type"],
                "compute_unit": layer["compute_unit"],
                "us": layer["execution_time"],
            }
            for layer in slowest
        ],
    }


def _peak(arm: Arm, graphs: dict[str, Any]) -> int | None:
    """Parts are loaded together: of each the larger of its graphs, summed."""
    peaks: dict[int, int] = {}
    for graph in graphs.values():
        if graph.get("peak_memory_bytes"):
            peaks[graph["part"]] = max(peaks.get(graph["part"], 0), graph["peak_memory_bytes"])
    return sum(peaks.values()) if len(peaks) == arm.num_parts else None


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if any(value is None for value in known) else sum(known)


def _device(device: HubDevice) -> dict[str, Any]:
    chip = device.chip
    return {
        "os": device.os,
        "chip": chip.name if chip else "+".join(device.values("chipset")) or None,
        "soc": chip.soc if chip else None,
        "hexagon": chip.arch if chip else "+".join(device.values("hexagon")) or None,
    }


def _quality(arm: Arm) -> dict[str, Any]:
    metrics = arm.manifest.metrics
    return {key: metrics[key] for key in ("validation_loss", "rom_bytes") if key in metrics}


def _compare(result: dict[str, Any]) -> None:
    for figures in result["measured"].values():
        baseline = figures.get(result["baseline"], {}).get("decode_us")
        for name, arm in figures.items():
            if name != result["baseline"] and baseline and arm.get("decode_us"):
                arm["decode_ratio"] = baseline / arm["decode_us"]


def _notes(arms: Sequence[Arm], profiled: bool, compared: bool, service: str) -> list[str]:
    notes = [DEVICE_NOTE, FIRST_TOKEN_NOTE] if profiled else []
    notes += [CONTEXTS_NOTE] if profiled and any(arm.shorter_contexts for arm in arms) else []
    notes += [AGREEMENT_NOTE] if compared else []
    if "127.0.0.1" in service or "localhost" in service:
        notes.insert(0, LOOPBACK_NOTE)
    first = shapes(arms[0])
    for arm in arms[1:]:
        different = [name for name, value in shapes(arm).items() if first.get(name) != value]
        if different:
            pairs = ", ".join(f"{name} {first.get(name)} and {shapes(arm)[name]}" for name in different)
            names = f"{arms[0].name} and {arm.name}"
            notes.append(f"The shapes of {names} differ ({pairs}): their times are not comparable.")
    return notes


def _headline(result: dict[str, Any]) -> str:
    sentences = []
    for device, figures in result["measured"].items():
        told = []
        for name, arm in figures.items():
            if "tokens_per_s" in arm:
                ratio = f" ({arm['decode_ratio']:.3f} of {result['baseline']})" if "decode_ratio" in arm else ""
                told.append(f"{name} {arm['tokens_per_s']:,.1f}{ratio}")
        if told:
            sentences.append(f"{device}, decoded tokens/s: {', '.join(told)}.")
    return " ".join(sentences) or "Nothing was profiled."


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:,.2f} s"
    return f"{us / 1e3:,.2f} ms" if us >= 1e3 else f"{us:,.0f} µs"
