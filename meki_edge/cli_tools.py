"""Commands beside the pipeline: generate text, look into files, list the memories."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meki_edge import console
from meki_edge.device.phone_facts import TARGET
from meki_edge.errors import UserError
from meki_edge.options import (
    Compute,
    Json,
    NpuMemory,
    NpuMemoryOption,
    Place,
    RowIo,
    Serial,
    Target,
    Threads,
    VerifyRows,
    refuse,
)

if TYPE_CHECKING:
    from meki_edge.published_costs import Comparison
    from meki_edge.reparam_check import FoldCheck
    from meki_edge.rom.inspect import Scan

SHOWN = 20
"""Mismatches that `verify` prints of a file."""


def generate(
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="Output of `meki-edge pack`.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Stop after this many (default 128, or what fits).")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token; higher: more varied.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest with this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the sampling.")] = 0,
    threads: Threads = 2,
    io: RowIo = "pread",
    verify_rows: VerifyRows = False,
    on: Annotated[Place, typer.Option("--on", help="host: on this machine; adb: on a phone that has the bundle.")] = Place.host,
    serial: Serial = None,
    target: Target = TARGET,
    compute: Annotated[Compute, typer.Option(help="On a phone: cpu, or npu, the bundle's Hexagon binaries.")] = Compute.cpu,
    npu_memory: NpuMemoryOption = NpuMemory.auto,
    as_json: Json = False,
) -> None:
    """Continue a prompt with the C++ harness, streaming the text."""
    from meki_edge.device import runner
    from meki_edge.generate import GenerateConfig
    from meki_edge.generate import generate as continue_text

    run_json = runner.run_json
    if on is Place.adb:
        from meki_edge.device import adb, sideload
        from meki_edge.device.phone_runner import PhoneRunner

        device, places = adb.find().device(serial), sideload.layout(target)
        npu = compute is Compute.npu
        run_json = PhoneRunner(device, places, npu=npu, npu_memory=npu_memory.value).run_json
    else:
        what = "an option of a phone, but the text is generated on this machine"
        refuse(context, ["serial", "target", "compute", "npu_memory"], what, "add --on adb, or leave it out")

    config = GenerateConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        threads=threads,
        io=io,
        verify_rows=verify_rows,
    )
    if as_json:
        console.show_json(continue_text(bundle, prompt, config, lambda piece: None, run_json=run_json))
        return
    started = False

    def show(piece: str) -> None:
        nonlocal started
        if not started:  # the prompt comes with the first piece, so that an error stands alone
            console.stream(prompt)
            started = True
        console.stream(piece)

    result = continue_text(bundle, prompt, config, show, run_json=run_json)
    console.stream("\n")
    console.show_metrics(result, title=None, skip=("text",))


def memories(
    preset: Annotated[str, typer.Option(help="demo, qwen3-0.6b, qwen3-1.7b or qwen3-4b.")] = "qwen3-0.6b",
    vocab_size: Annotated[int, typer.Option(min=1, max=2**22, help="Rows of the vocabulary.")] = 151_936,
    published: Annotated[bool, typer.Option("--published", help="Show the papers' own numbers beside ours instead.")] = False,
    table_precision: Annotated[str, typer.Option(help="Of the ROM's rows: fp32, fp16, bf16, int8, int4 or int4_64.")] = "fp16",
    as_json: Json = False,
) -> None:
    """List the memory kinds with what each costs at a model's shape, and which published numbers each reproduces."""
    from meki_edge.memory import chosen_options
    from meki_edge.memory_costs import survey
    from meki_edge.published_costs import compare_published
    from meki_edge.train.presets import build

    numbers = compare_published()
    if published and not as_json:
        _show_published(numbers)
        return
    found = survey(build(preset, vocab_size), table_precision)
    if as_json:
        kinds = {entry.kind: [dataclasses.asdict(number) for number in numbers if number.kind == entry.kind] for entry in found}
        console.show_json([{**dataclasses.asdict(entry), "published": kinds[entry.kind]} for entry in found])
        return
    counts = {kind: [number.agrees for number in numbers if number.kind == kind] for kind in {entry.kind for entry in found}}
    rows = [
        [
            entry.kind,
            ", ".join(f"{name}={value}" for name, value in chosen_options(entry.kind, entry.options).items()),
            str(len(entry.layers)),
            f"{entry.ram_parameters / 1e6:+.1f} M",
            f"{entry.rom_bytes / 1e9:.2f} GB",
            f"{entry.bytes_per_token / 1024:,.1f} KiB",
            f"{entry.flops_per_token / 1e6:+,.1f} M",
            f"{sum(counts[entry.kind])} of {len(counts[entry.kind])}",
        ]
        for entry in found
    ]
    headings = ["memory", "options", "layers", "RAM parameters", f"ROM ({table_precision})", "read a token", "FLOPs a token", "papers"]
    console.show_table(f"beside dense {preset}, vocabulary {vocab_size:,}", headings, rows)
    console.info("papers: how many published numbers are reproduced; `meki-edge memories --published` lists them")


def _show_published(numbers: list[Comparison]) -> None:
    rows = [
        [
            f"{number.paper.partition(',')[0]} {number.shape}",
            number.quantity.replace("_", " "),
            f"{_engineering(number.published)}{' *' if number.derived else ''}",
            _engineering(number.ours),
            "yes" if number.agrees else "NO",
        ]
        for number in numbers
    ]
    headings = ["paper and shape", "quantity", "published", "ours", "agrees"]
    console.show_table("published numbers, and ours at the same shape", headings, rows)
    console.info("* not printed in the paper: it follows from sizes that the paper, or its code, gives")


def _engineering(value: float) -> str:
    for factor, unit in ((1e9, " G"), (1e6, " M")):
        if value >= factor:
            return f"{value / factor:,.3f}{unit}"
    return f"{value:,.0f}"


def inspect(
    rom: Annotated[Path, typer.Argument(help="A ROM file, or a directory that holds some.")],
    as_json: Json = False,
) -> None:
    """Show what a ROM file holds: rows, stride, segments, bytes a token."""
    from meki_edge.rom.inspect import describe

    files = sorted(rom.glob("rom*.safetensors")) if rom.is_dir() else [rom]
    if not files:
        raise UserError(
            "no ROM file is here", where=rom, fix="give a ROM file, or a directory of `meki-edge reparam` or `pack`"
        )
    facts = {str(file): describe(file) for file in files}
    if as_json:
        console.show_json(facts)
        return
    for file, values in facts.items():
        console.show_metrics(values, title=file)


def verify(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A stage's directory, or a ROM file.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="The trained checkpoint of the ROM file: fold a sample of rows again and compare.")
    ] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="With --checkpoint: fold every row again.")] = False,
    as_json: Json = False,
) -> None:
    """Check a directory against its manifest, every row of its ROM file, and where the rows come from."""
    from meki_edge import manifest
    from meki_edge.rom.codec import DAMAGED
    from meki_edge.rom.inspect import describe, scan

    if checkpoint is None:
        refuse(context, ["all_rows"], "there is no checkpoint to fold rows of", "add --checkpoint, or leave it out")
    changed: UserError | None = None
    if path.is_dir():
        made = manifest.load(path)
        roms = [path / name for name, entry in made.files.items() if entry.role.startswith("rom")]
        embeddings = [path / name for name, entry in made.files.items() if entry.role == "embedding"]
        if checkpoint is not None and not roms:
            raise UserError(
                f"`meki-edge {made.stage}` wrote no ROM file here: no rows to compare with the checkpoint",
                where=path,
                fix="give a directory with rom.safetensors (of `meki-edge reparam`, or `pack`), or leave out --checkpoint",
            )
        with console.byte_progress("digests", sum(entry.bytes for entry in made.files.values())) as advance:
            changed = manifest.first_change(path, made, advance)
        if changed is None:
            console.info(f"{len(made.files)} files are as `meki-edge {made.stage}` wrote them")
    else:
        roms, embeddings = [path], []
    scans: dict[str, Scan] = {}
    for rom in [*roms, *embeddings]:
        with console.progress() as bar:
            task = bar.add_task(rom.name, total=describe(rom)["num_rows"])
            scans[rom.name] = scan(rom, advance=lambda count, task=task: bar.advance(task, count))
    damaged = {name: found for name, found in scans.items() if found.damaged}
    folds: dict[str, FoldCheck] = {}
    if checkpoint is not None and not damaged and changed is None:
        from meki_edge.reparam_check import check_folds

        folds = check_folds(roms, checkpoint, all_rows=all_rows)
    if as_json:
        folded = {name: dataclasses.asdict(fold) for name, fold in folds.items()}
        console.show_json(
            {
                "well_formed_rows": {name: found.rows - found.damaged for name, found in scans.items()},
                "damaged_rows": {name: {"count": s.damaged, "first": s.first} for name, s in damaged.items()},
                **({"folds": folded} if folded else {}),
            }
        )
    else:
        _show_scans(scans)
        _show_folds(folds)
    if damaged:
        counts = ", ".join(f"{found.damaged} of {found.rows} rows of {name}" for name, found in damaged.items())
        raise UserError(f"damaged: {counts}", where=path, fix=DAMAGED)
    if changed is not None:  # which rows are damaged says more
        raise changed
    if wrong := [name for name, fold in folds.items() if fold.mismatches]:
        raise UserError(
            f"rows of {', '.join(wrong)} are not what the checkpoint folds to",
            where=path,
            fix="fold the checkpoint again with `meki-edge reparam`",
        )


def _show_scans(scans: dict[str, Scan]) -> None:
    """One line a file, after the first damaged rows."""
    for name, found in scans.items():
        lines = [f"{name}: {what}" for what in found.first]
        if found.damaged > len(found.first):
            lines.append(f"{name}: … and {found.damaged - len(found.first)} more damaged rows")
        for line in [*lines, f"{name}: {found.rows - found.damaged} rows are well-formed"]:
            console.stdout.print(line, markup=False)


def _show_folds(folds: dict[str, FoldCheck]) -> None:
    """One line a file that is right; for others the first mismatches."""
    for name, fold in folds.items():
        lines = [f"{name}: {wrong.name} differs by {wrong.difference:.3g}" for wrong in fold.mismatches[:SHOWN]]
        if len(fold.mismatches) > SHOWN:
            lines.append(f"{name}: … and {len(fold.mismatches) - SHOWN} more (--json lists all)")
        for line in lines or [f"{name}: {fold.rows} rows are what the checkpoint folds to"]:
            console.stdout.print(line, markup=False)
