"""Commands around the NPU: quantize, what would make a job fail, and how fast a step can be at the most."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from meki_edge import console
from meki_edge.errors import UserError, nearest
from meki_edge.options import (
    Checkpoint,
    Force,
    Json,
    MemoryOption,
    OutputDir,
    Tokens,
    parse_lengths,
    parse_memory_options,
    refuse,
)

SHOWN_LAYERS = 3


def calibrate(
    context: typer.Context,
    exported: Annotated[Path, typer.Argument(help="Output of `meki-edge export`.")],
    checkpoint: Checkpoint,
    tokens: Tokens,
    output_dir: OutputDir,
    precision: Annotated[
        str, typer.Option(help="fp16, w8a16, w8a8, w4a16, w4a16-block32, w4a16-block64 or w4fp16.")
    ] = "w8a16",
    samples: Annotated[int, typer.Option(min=1, help="Windows of training text that are observed.")] = 64,
    window_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens a window (default: 512, or the context where that is shorter).")
    ] = None,
    decode_steps: Annotated[int, typer.Option(min=0, help="Last tokens of a window, which are decoded one by one.")] = 2,
    method: Annotated[str, typer.Option(help="How ranges follow from what was seen: minmax, percentile or mse.")] = "minmax",
    percentile: Annotated[float, typer.Option(help="With percentile: share of the values kept, in percent.")] = 99.99,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Keys and values: uint8 (default), uint16 or float32; float16 with fp16 and w4fp16.")
    ] = None,
    rows_dtype: Annotated[
        str | None, typer.Option(help="A memory's rows: uint16 (default) or uint8, as the graph takes them; or float32.")
    ] = None,
    sensitivity: Annotated[bool, typer.Option(help="Measure what each layer loses alone.")] = True,
    budget_bytes: Annotated[
        int | None, typer.Option(min=0, help="Keep sensitive layers finer, for at most this many bytes more.")
    ] = None,
    max_divergence: Annotated[
        float | None, typer.Option(help="Keep sensitive layers finer until their losses sum to this (nats).")
    ] = None,
    gate_windows: Annotated[int, typer.Option(min=1, help="Windows of validation text in the accuracy gate.")] = 8,
    max_perplexity_increase: Annotated[float, typer.Option(help="The gate: 0.1 is ten percent over float.")] = 0.1,
    min_top1_agreement: Annotated[float, typer.Option(help="The gate: share of tokens with float's likeliest successor.")] = 0.8,
    ranges_from: Annotated[
        Path | None, typer.Option(help="Another calibration of this export with the same windows and gate, whose observations serve again.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Quantize the graphs on real text, and check their accuracy; exit code 1 if it fails the limits."""
    from calibration.config import CalibrateConfig
    from calibration.stage import calibrate as stage

    if method != "percentile":
        refuse(context, ["percentile"], f"a percentile, but the method is {method}", "add --method percentile")
    config = CalibrateConfig(
        precision=precision,
        samples=samples,
        window_length=window_length,
        decode_steps=decode_steps,
        method=method,
        percentile=percentile,
        kv_dtype=kv_dtype,
        rows_dtype=rows_dtype,
        sensitivity=sensitivity,
        budget_bytes=budget_bytes,
        max_divergence=max_divergence,
        gate_windows=gate_windows,
        max_perplexity_increase=max_perplexity_increase,
        min_top1_agreement=min_top1_agreement,
    )
    made = stage(exported, checkpoint, tokens, output_dir, config, ranges_from=ranges_from, force=force)
    if as_json:
        console.show_json({"directory": str(output_dir), **made.metrics})
    else:
        console.show_metrics(made.metrics, title=f"{made.stage} → {output_dir}")


def lint(
    path: Annotated[Path, typer.Argument(help="Output of `meki-edge export`, `calibrate` or `pack`, or one .onnx file.")],
    chipset: Annotated[str | None, typer.Option(help="The chip that it is for, such as sm8750.")] = None,
    as_json: Json = False,
) -> None:
    """Find in seconds what would make a compile job fail minutes later; exit code 1 if anything would."""
    from export.inputs import check_whole
    from export.lint import errors, grouped
    from export.lint import lint as check
    from export.targets import chip

    target = None if chipset is None else chip(chipset)
    check_whole(path)
    findings = check(path, target=target)
    failing = errors(findings)
    if as_json:
        console.show_json({"errors": len(failing), "findings": [dataclasses.asdict(finding) for finding in findings]})
    elif findings:
        console.show_table(f"{path}: {_counted(findings, failing)}", _HEADINGS, [_row(group) for group in grouped(findings)])
    else:
        console.stdout.print(f"{path}: nothing that is known to fail", markup=False, soft_wrap=True)
    if failing:
        raise typer.Exit(1)


_HEADINGS = ["rule", "what, where, and what to do", "count"]


def _counted(findings: list[Any], failing: list[Any]) -> str:
    return f"errors: {len(failing)}, warnings: {len(findings) - len(failing)}"


def _row(group: dict[str, Any]) -> list[str]:
    """One line of the table: findings that differ in tensor and layer alone."""
    places = [Path(group["where"]).name]
    if group["tensors"]:
        places.append(f"tensor {_few(group['tensors'])}")
    if group["layers"]:
        places.append(_few(group["layers"]))
    text = f"{group['what']}\n{', '.join(places)}\ndo: {group['fix']}"
    return [f"{group['severity']}: {group['rule']}\n({group['source']})", text, str(group["count"])]


def _few(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_LAYERS} more" if len(names) > SHOWN_LAYERS else ""
    return ", ".join(names[:SHOWN_LAYERS]) + more


def bounds(
    context: typer.Context,
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Outputs of `meki-edge export`, the baseline first; or none, with --preset.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A shape by name: demo, qwen3-0.6b, qwen3-1.7b or qwen3-4b.")] = None,
    memory: Annotated[str, typer.Option(help="With --preset: the memory that stands beside the dense model.")] = "meki",
    memory_option: MemoryOption = None,
    vocab_size: Annotated[
        int, typer.Option(min=1, max=2**22, help="With --preset: rows of the vocabulary (the default is Qwen3's, for demo too).")
    ] = 151_936,
    chipset: Annotated[str, typer.Option(help="Such as sm8750, or 'Snapdragon 8 Elite'.")] = "sm8750",
    context_lengths: Annotated[str, typer.Option(help="Slots of the KV cache, such as 1024,4096.")] = "1024,4096,10240",
    precision: Annotated[
        str | None, typer.Option(help="Of the weights, such as w8a16 (default: as exported; fp16 with --preset).")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or int8 (default: as exported; float16 with --preset).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the bounds to this .svg or .html file.")] = None,
    as_json: Json = False,
) -> None:
    """Bound the time of a decode step by the bytes it must move: a bound, never a prediction."""
    from export import bounds_report
    from export.cost_bounds import KV_DTYPES, PRECISIONS, step_of_model, steps_of_directory
    from export.inputs import check_whole
    from export.targets import chip
    from meki_edge.train import presets

    if (preset is None) != bool(directories):
        raise UserError("the model must come from one place", where="bounds", fix="give directories, or --preset")
    if preset is None:
        what = "this goes with --preset: the model of a directory is as it was exported"
        refuse(context, ["memory", "memory_option", "vocab_size"], what, "leave it out, or give --preset instead")
    _choice(precision, tuple(PRECISIONS), "--precision")
    _choice(kv_dtype, KV_DTYPES, "--kv-dtype")
    if plot is not None:
        bounds_report.check_plot(plot)
    target, lengths = chip(chipset), parse_lengths(context_lengths, "--context-lengths", "1024,4096")
    rows: list[dict[str, Any]] = []
    if preset is not None:
        cache = kv_dtype or "float16"
        options = parse_memory_options(memory_option)
        models = {
            "dense": presets.build(preset, vocab_size),
            memory: presets.build(preset, vocab_size, memory=memory, options=options),
        }
        steps = [step_of_model(name, model, precision or "fp16", cache) for name, model in models.items()]
        rows = bounds_report.published(preset, vocab_size, cache) if memory == "meki" else []
    else:
        for directory in directories:
            check_whole(directory)
        found = [steps_of_directory(directory, precision, kv_dtype) for directory in directories]
        steps = found[0] if len(found) == 1 else [arm[-1] for arm in found]
    result = bounds_report.report(steps, target, lengths, rows)
    if plot is not None:
        bounds_report.plot(result, plot)
    if as_json:
        console.show_json(result)
        return
    console.show_table(*bounds_report.part_table(result, -1))
    console.show_table(*bounds_report.bound_table(result))
    if rows:
        console.show_table(*bounds_report.published_table(rows))
    for sentence in bounds_report.explain(result):
        console.stdout.print(sentence, markup=False)


def _choice(value: str | None, known: tuple[str, ...], option: str) -> None:
    if value is not None and value not in known:
        raise UserError(f"unknown value {value!r}{nearest(value, known)}", where=option, fix=f"use {', '.join(known)}")
