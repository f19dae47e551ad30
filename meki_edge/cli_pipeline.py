"""The pipeline's commands: each reads options, runs one stage, and shows its metrics.

Stages are imported when their command runs, so ``--help`` needs no torch.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from meki_edge import cli_hub, console
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.manifest import Manifest
from meki_edge.options import (
    Checkpoint,
    Cold,
    Force,
    GenerateTokens,
    Json,
    MemoryOption,
    OutputDir,
    OutputFormat,
    PromptTokens,
    Repetitions,
    RowCacheBytes,
    RowIo,
    Threads,
    Tokens,
    VerifyRows,
    parse_curves,
    parse_layers,
    parse_lengths,
    parse_memory_options,
    parse_moe,
    refuse,
)


class Via(StrEnum):
    """Who compiles."""

    local = "local"
    hub = "hub"


LOCAL_OPTIONS = ("chipset", "optimization_level", "share_weights", "optional")
HUB_OPTIONS = ("device", "qairt_version", "hub_profile", "ledger", "timeout", "poll_seconds", "resubmit")
"""Of `compile`, which mean something for one of the two alone."""


def tokenize(
    sources: Annotated[list[Path], typer.Argument(help="Text files, JSONL files, or folders of them.")],
    output_dir: OutputDir,
    tokenizer: Annotated[Path | None, typer.Option(help="A ready tokenizer.json; without it a BPE is trained.")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, max=2**22, help="Size of the BPE to train (default 16384).")] = None,
    validation_fraction: Annotated[float, typer.Option(help="Share of the documents held out.")] = 0.05,
    text_field: Annotated[str, typer.Option(help="JSONL field that holds the text.")] = "text",
    eos_token: Annotated[str | None, typer.Option(help="The token that ends a document.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Another seed makes another split.")] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Turn text into token shards, split by document into train and validation."""
    from meki_edge.train.tokenize import TokenizeConfig
    from meki_edge.train.tokenize import tokenize as stage

    config = TokenizeConfig(
        vocab_size=vocab_size,
        validation_fraction=validation_fraction,
        text_field=text_field,
        eos_token=eos_token,
        seed=seed,
    )
    _show(stage(sources, output_dir, config, tokenizer=tokenizer, force=force), output_dir, as_json)


def train(
    tokens: Tokens,
    output_dir: OutputDir,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")],
    preset: Annotated[str | None, typer.Option(help="demo, qwen3-0.6b, qwen3-1.7b or qwen3-4b.")] = None,
    model_config: Annotated[Path | None, typer.Option("--config", help="A config.json with the model's shape.")] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(help="Start from this checkpoint (ours or a Qwen3 one), with its memories if it has any and no other --memory is given."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory kind (see `meki-edge memories`), or none; without it: dense, or as --init-from has it.")
    ] = None,
    memory_layers: Annotated[str | None, typer.Option(help="Layers with memory, such as 0,2-5 (default: as its paper, or the checkpoint, has it).")] = None,
    memory_option: MemoryOption = None,
    moe: Annotated[str | None, typer.Option(help="EXPERTS/ACTIVE, such as 8/2: a plain mixture of experts.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows a step.")] = 16,
    window_length: Annotated[int, typer.Option(min=1, help="Tokens a window.")] = 512,
    gradient_accumulation_steps: Annotated[int, typer.Option(min=1, help="Parts a batch is computed in.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-4,
    minimum_learning_rate_ratio: Annotated[float, typer.Option(help="The last step's rate as a share of the peak.")] = 0.5,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of linear warmup (default: a tenth of the steps, at most 500).")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="On matrices, tables and 0-D scalars.")] = 0.1,
    table_learning_rate_scale: Annotated[
        float | None, typer.Option(help="Tables' learning rate, relative (default: the memory's recipe).")
    ] = None,
    table_weight_decay: Annotated[
        float | None, typer.Option(help="Tables' weight decay (default: the memory's recipe).")
    ] = None,
    separate_table_clip: Annotated[
        bool | None, typer.Option(help="Clip tables' gradients apart (default: the memory's recipe).")
    ] = None,
    freeze_up_steps: Annotated[int, typer.Option(min=0, help="STAPLE: steps with the augmented up projections frozen.")] = 0,
    precision: Annotated[str, typer.Option(help="auto, bf16 or fp32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the initial weights and the data order.")] = 0,
    validate_every: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = 250,
    validation_windows: Annotated[int, typer.Option(min=1, help="Windows of a validation.")] = 64,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 250,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a decoder with a memory in its layers, or its dense twin."""
    from meki_edge.tokens import open_shards
    from meki_edge.train import presets
    from meki_edge.train.config import TrainConfig
    from meki_edge.train.loop import train as stage

    if memory in (None, presets.NO_MEMORY) and (memory_layers is not None or memory_option):
        raise UserError("options of a memory, but no memory", where="train", fix="name it with --memory")
    placement = {
        "memory": memory,
        "layers": None if memory_layers is None else parse_layers(memory_layers),
        "options": parse_memory_options(memory_option),
    }
    if sum(source is not None for source in (preset, model_config, init_from)) != 1:
        raise UserError(
            "the model's shape must come from one place",
            where="train",
            fix="give exactly one of --preset, --config and --init-from",
        )
    if preset is not None:
        model = presets.build(preset, open_shards(tokens).vocab_size, **placement)
    elif model_config is not None:
        model = presets.from_config(model_config, **placement)
    else:
        model = presets.from_checkpoint(init_from, **placement)
    if moe is not None and init_from is not None:
        presets.check_experts(model, *parse_moe(moe))
    elif moe is not None:
        model = presets.with_moe(model, *parse_moe(moe))
    config = TrainConfig(
        steps=steps,
        batch_size=batch_size,
        window_length=window_length,
        gradient_accumulation_steps=gradient_accumulation_steps,
        learning_rate=learning_rate,
        minimum_learning_rate_ratio=minimum_learning_rate_ratio,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        table_learning_rate_scale=table_learning_rate_scale,
        table_weight_decay=table_weight_decay,
        separate_table_clip=separate_table_clip,
        freeze_up_steps=freeze_up_steps,
        precision=precision,
        device=device,
        seed=seed,
        validate_every=validate_every,
        validation_windows=validation_windows,
        checkpoint_every=checkpoint_every,
    )
    _show(stage(tokens, output_dir, model, config, init_from=init_from, force=force), output_dir, as_json)


def reparam(
    checkpoint: Checkpoint,
    tokens: Tokens,
    output_dir: OutputDir,
    table_precision: Annotated[str, typer.Option(help="fp32, fp16, bf16, int8, int4 or int4_64 (a scale per 32 or 64 elements).")] = "fp16",
    checksums: Annotated[bool, typer.Option("--checksums", help="Store a checksum of every row, four bytes each.")] = False,
    proof_windows: Annotated[int | None, typer.Option(help="Windows of text in the proof (default: as in training).")] = None,
    window_length: Annotated[int | None, typer.Option(min=1, help="Tokens a window (default: as in training).")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fold all that depends on token ids into a ROM file, and prove that nothing changed."""
    from meki_edge.reparam import ReparamConfig
    from meki_edge.reparam import reparam as stage

    config = ReparamConfig(
        table_precision=table_precision,
        checksums=checksums,
        proof_windows=proof_windows,
        window_length=window_length,
    )
    _show(stage(checkpoint, tokens, output_dir, config, force=force), output_dir, as_json)


def export(
    checkpoint: Checkpoint,
    tokens: Tokens,
    output_dir: OutputDir,
    context_length: Annotated[int, typer.Option(min=1, help="Slots of the KV cache.")] = 1024,
    shorter_contexts: Annotated[str | None, typer.Option(help="Also export graphs with fewer slots (more than --prefill-tokens), such as 256,512: a text runs in the shortest that holds it.")] = None,
    prefill_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens a call.")] = 128,
    verify_tokens: Annotated[int, typer.Option(min=1, help="Tokens of real text that ONNX and torch are compared on.")] = 200,
    parts: Annotated[int, typer.Option(min=1, help="Cut each graph into so many parts of about as many layers.")] = 1,
    split_layers: Annotated[str | None, typer.Option(help="Cut it before these layers instead, such as 2,14.")] = None,
    head_part: Annotated[bool, typer.Option("--head-part", help="The final norm and the head are a part of their own, which runs once a prompt.")] = False,
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache: float32 or float16.")] = "float32",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Export prefill and decode graphs to ONNX, and check them against PyTorch."""
    from export.graph import ExportConfig
    from export.graph import export as stage

    config = ExportConfig(
        context_length=context_length,
        shorter_contexts=() if shorter_contexts is None else parse_lengths(shorter_contexts, "--shorter-contexts", "256,512"),
        prefill_tokens=prefill_tokens,
        verify_tokens=verify_tokens,
        parts=parts,
        split_layers=() if split_layers is None else parse_layers(split_layers, "--split-layers", "1,2"),
        head_part=head_part,
        kv_dtype=kv_dtype,
    )
    _show(stage(checkpoint, tokens, output_dir, config, force=force), output_dir, as_json)


def compile_(
    context: typer.Context,
    exported: Annotated[Path, typer.Argument(help="Output of `meki-edge export` or `calibrate`.")],
    checkpoint: Checkpoint,
    tokens: Tokens,
    output_dir: OutputDir,
    chipset: Annotated[str, typer.Option(help="Such as sm8750, or 'Snapdragon 8 Elite'.")] = "sm8750",
    optimization_level: Annotated[int, typer.Option(min=1, max=3, help="HTP graph optimisation, 1 to 3.")] = 3,
    verify_steps: Annotated[int, typer.Option(min=0, max=1000, help="Decode steps run in the NPU simulator, after a prefill chunk; 0: none.")] = 4,
    share_weights: Annotated[bool, typer.Option(help="One binary for prefill and decode of a part, with one copy of their weights.")] = True,
    optional: Annotated[bool, typer.Option("--optional", help="Where the compiler is missing, say so and go on.")] = False,
    via: Annotated[Via, typer.Option(help="The compiler: on this machine, or AI Hub's (which checks on the device).")] = Via.local,
    device: Annotated[str | None, typer.Option("--device", "-d", help="With --via hub: a device of `meki-edge hub devices`.")] = None,
    qairt_version: cli_hub.QairtVersion = None,
    hub_profile: cli_hub.Profile = None,
    ledger: cli_hub.LedgerDir = None,
    timeout: cli_hub.Timeout = None,
    poll_seconds: cli_hub.Poll = 10.0,
    resubmit: cli_hub.Resubmit = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compile the graphs for the Hexagon NPU, offline, and check them in its simulator (or at AI Hub, on a device)."""
    if via is Via.hub:
        from export.hub_compile import HubCompileConfig, compile_hub

        if device is None:
            fix = "name one that `meki-edge hub devices` lists"
            raise UserError("AI Hub compiles for a device, and none is given", where="--device", fix=fix)
        refuse(context, LOCAL_OPTIONS, "AI Hub's compiler does not take this", "leave it out: --device says all")
        hub_config = HubCompileConfig(device=device, verify_steps=verify_steps, qairt_version=qairt_version)
        access = cli_hub.open_access(hub_profile, ledger, timeout, poll_seconds, resubmit)
        made = compile_hub(exported, checkpoint, tokens, output_dir, hub_config, access, force=force)
        _show(made, output_dir, as_json)
        return
    refuse(context, HUB_OPTIONS, "an option of AI Hub is given", "say --via hub, or leave it out (a --chipset is local)")
    from export.qnn_local import CompileConfig, compile_local, qnn_available

    if optional and not qnn_available():
        console.info("compile skipped: onnxruntime-qnn has no wheel for this platform (x86-64 Linux and Windows have one)")
        return
    config = CompileConfig(
        chipset=chipset,
        optimization_level=optimization_level,
        verify_steps=verify_steps,
        share_weights=share_weights,
    )
    _show(compile_local(exported, checkpoint, tokens, output_dir, config, force=force), output_dir, as_json)


def pack(
    exported: Annotated[Path, typer.Argument(help="Output of `meki-edge export` or `calibrate`.")],
    checkpoint: Checkpoint,
    output_dir: OutputDir,
    compiled: Annotated[Path | None, typer.Option(help="Output of `meki-edge compile`, to take along.")] = None,
    name: Annotated[str | None, typer.Option(help="What reports call this bundle (default: its memory, or dense).")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Put all that a device needs into one directory, with digests."""
    from meki_edge.device.pack import PackConfig
    from meki_edge.device.pack import pack as stage

    made = stage(exported, checkpoint, output_dir, PackConfig(name=name), compiled=compiled, force=force)
    _show(made, output_dir, as_json)


def run(
    bundles: Annotated[list[Path], typer.Argument(help="Outputs of `meki-edge pack`; the first is the baseline.")],
    tokens: Annotated[Path, typer.Option(help="Output of `meki-edge tokenize`: the text that is fed.")],
    output_dir: OutputDir,
    prompt_tokens: PromptTokens = 512,
    generate_tokens: GenerateTokens = 128,
    repetitions: Repetitions = 5,
    depth: Annotated[int, typer.Option("--depth", "-d", min=0, help="Tokens in the KV cache before a test.")] = 0,
    threads: Threads = 2,
    io: RowIo = "pread",
    cold: Cold = True,
    row_cache_bytes: RowCacheBytes = 0,
    verify_rows: VerifyRows = False,
    cores: Annotated[str, typer.Option(help="big keeps off the slowest cores of a processor that has several kinds; all.")] = "big",
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="What is printed: a table to read, or one of llama-bench's formats.")
    ] = OutputFormat.table,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure bundles with the C++ harness, interleaved, as llama-bench does: pp512 and tg128."""
    from meki_edge.device import bench_report
    from meki_edge.device.run import RESULTS, RunConfig
    from meki_edge.device.run import run as stage

    config = RunConfig(
        prompt_tokens=prompt_tokens,
        generate_tokens=generate_tokens,
        repetitions=repetitions,
        depth=depth,
        threads=threads,
        io=io,
        cold=cold,
        row_cache_bytes=row_cache_bytes,
        verify_rows=verify_rows,
        cores=cores,
    )
    made = stage(bundles, tokens, output_dir, config, force=force)
    if as_json:
        _show(made, output_dir, as_json)
        return
    results = read_json(output_dir / RESULTS)
    if output_format is OutputFormat.table:
        console.show_wide(bench_report.table(results))
    else:
        console.stream(bench_report.PRINTERS[output_format.value](results))


def compare(
    runs: Annotated[Path, typer.Argument(help="Output of `meki-edge run`.")],
    output_dir: OutputDir,
    curve: Annotated[list[str] | None, typer.Option(help="arm=DIR: the training run whose loss curve is shown.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compare bundles: a table here, and JSON, CSV, Markdown and an HTML page with plots."""
    from meki_edge.compare import compare as stage
    from meki_edge.compare import headline, table

    stage(runs, output_dir, curves=parse_curves(curve), force=force)
    result = json.loads((output_dir / "compare.json").read_text(encoding="utf-8"))
    if as_json:
        console.show_json(result)
        return
    console.stdout.print(table(result))
    if others := result["published"]:
        console.show_table(f"{others['title']}: {others['source']}", others["headings"], others["rows"])
    console.stdout.print(headline(result), markup=False)
    console.info(f"page: {output_dir / 'compare.html'}")


def _show(made: Manifest, directory: Path, as_json: bool) -> None:
    values: dict[str, Any] = {"directory": str(directory), **made.metrics}
    console.show_json(values) if as_json else console.show_metrics(made.metrics, title=f"{made.stage} → {directory}")
