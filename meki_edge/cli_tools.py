"""Commands beside the pipeline: generate text, look into files, list the memories."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.options import Json, Threads


def generate(
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
    io: Annotated[str, typer.Option(help="How rows are read: pread, direct or mmap.")] = "pread",
    as_json: Json = False,
) -> None:
    """Continue a prompt with the C++ harness, streaming the text."""
    from meki_edge.generate import GenerateConfig
    from meki_edge.generate import generate as continue_text

    config = GenerateConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        threads=threads,
        io=io,
    )
    if as_json:
        console.show_json(continue_text(bundle, prompt, config, lambda piece: None))
        return
    started = False

    def show(piece: str) -> None:
        nonlocal started
        if not started:  # the prompt comes with the first piece, so that an error stands alone
            console.stream(prompt)
            started = True
        console.stream(piece)

    result = continue_text(bundle, prompt, config, show)
    console.stream("\n")
    console.show_metrics(result, title=None, skip=("text",))


def memories(
    preset: Annotated[str, typer.Option(help="demo, qwen3-0.6b, qwen3-1.7b or qwen3-4b.")] = "qwen3-0.6b",
    vocab_size: Annotated[int, typer.Option(min=1, max=2**22, help="Rows of the vocabulary.")] = 151_936,
    as_json: Json = False,
) -> None:
    """List the memory kinds with what each costs at a model's shape."""
    from meki_edge.memory import chosen_options
    from meki_edge.memory_costs import survey
    from meki_edge.train.presets import build

    found = survey(build(preset, vocab_size))
    if as_json:
        console.show_json([dataclasses.asdict(entry) for entry in found])
        return
    rows = [
        [
            entry.kind,
            ", ".join(f"{name}={value}" for name, value in chosen_options(entry.kind, entry.options).items()),
            str(len(entry.layers)),
            f"{entry.ram_parameters / 1e6:+.1f} M",
            f"{entry.rom_bytes / 1e9:.2f} GB",
            f"{entry.bytes_per_token / 1024:,.1f} KiB",
            f"{entry.flops_per_token / 1e6:+,.1f} M",
        ]
        for entry in found
    ]
    headings = ["memory", "options", "layers", "RAM parameters", "ROM (fp16)", "read a token", "FLOPs a token"]
    console.show_table(f"beside dense {preset}, vocabulary {vocab_size:,}", headings, rows)


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
    path: Annotated[Path, typer.Argument(help="A stage's directory, or a ROM file.")],
    as_json: Json = False,
) -> None:
    """Check a directory against its manifest, and every row of its ROM file."""
    from meki_edge import manifest
    from meki_edge.rom.inspect import describe
    from meki_edge.rom.inspect import verify as verify_rom

    if path.is_dir():
        made = manifest.load(path)
        with console.byte_progress("digests", sum(entry.bytes for entry in made.files.values())) as advance:
            manifest.verify(path, made, advance)
        console.info(f"{len(made.files)} files are as `meki-edge {made.stage}` wrote them")
        roms = [path / name for name, entry in made.files.items() if entry.role == "embedding" or entry.role.startswith("rom")]
    else:
        roms = [path]
    rows: dict[str, int] = {}
    for rom in roms:
        with console.progress() as bar:
            task = bar.add_task(rom.name, total=describe(rom)["num_rows"])
            rows[rom.name] = verify_rom(rom, advance=lambda count, task=task: bar.advance(task, count))
    if as_json:
        console.show_json({"well_formed_rows": rows})
        return
    for name, count in rows.items():
        console.stdout.print(f"{name}: {count} rows are well-formed", markup=False)
