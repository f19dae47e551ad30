"""Commands that need a phone: put bundles on it, measure them there, see what is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from meki_edge import console
from meki_edge.device.phone_facts import TARGET
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.options import (
    Cold,
    Compute,
    Force,
    GenerateTokens,
    Json,
    NpuMemory,
    NpuMemoryOption,
    OutputDir,
    OutputFormat,
    Place,
    PromptTokens,
    Repetitions,
    RowCacheBytes,
    RowIo,
    Serial,
    Target,
    Threads,
    VerifyRows,
)


def sideload(
    bundles: Annotated[list[Path], typer.Argument(help="Outputs of `meki-edge pack`.")],
    serial: Serial = None,
    target: Target = TARGET,
    runner: Annotated[Path | None, typer.Option(help="The harness for the phone (default: the Android build's).")] = None,
    npu: Annotated[bool, typer.Option("--npu/--no-npu", help="Take NPU binaries along, with QNN's libraries.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and compare, change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Put bundles and what runs them onto a phone by adb; files that are there already are not sent again."""
    from meki_edge.device import adb
    from meki_edge.device.sideload import SideloadConfig
    from meki_edge.device.sideload import sideload as bring

    config = SideloadConfig(target=target, runner=runner, npu=npu, dry_run=dry_run)
    found = bring(bundles, adb.find().device(serial), config)
    if as_json:
        console.show_json(found)
        return
    if dry_run:
        console.show_metrics(found, title=f"would be pushed to {found['phone']}")
    else:
        skip = tuple(f"changes.{name}" for name in found["changes"])
        console.show_metrics(found, title=f"on {found['phone']}", skip=skip)


def unload(
    bundles: Annotated[list[str] | None, typer.Argument(help="Names of bundles; without any, everything goes.")] = None,
    serial: Serial = None,
    target: Target = TARGET,
    as_json: Json = False,
) -> None:
    """Remove bundles, or everything that sideload brought, from a phone."""
    from meki_edge.device import adb
    from meki_edge.device.sideload import unload as remove

    found = remove(adb.find().device(serial), target, bundles or [])
    console.show_json(found) if as_json else console.show_metrics(found, title=None)


def bench(
    bundles: Annotated[list[Path], typer.Argument(help="Sideloaded outputs of `meki-edge pack`; the first is the baseline.")],
    tokens: Annotated[Path, typer.Option(help="Output of `meki-edge tokenize`: the text that is fed.")],
    output_dir: OutputDir,
    on: Annotated[Place, typer.Option("--on", help="adb: on a phone; host: as `meki-edge run`.")] = Place.adb,
    serial: Serial = None,
    target: Target = TARGET,
    compute: Annotated[Compute, typer.Option(help="cpu, or npu: the Hexagon binaries of the bundles.")] = Compute.cpu,
    npu_memory: NpuMemoryOption = NpuMemory.auto,
    prompt_tokens: PromptTokens = 512,
    generate_tokens: GenerateTokens = 128,
    repetitions: Repetitions = 5,
    depth: Annotated[int, typer.Option("--depth", "-d", min=0, help="Tokens in the KV cache before a test (the paper: 10240).")] = 0,
    threads: Threads = 2,
    io: RowIo = "pread",
    cold: Cold = True,
    row_cache_bytes: RowCacheBytes = 0,
    verify_rows: VerifyRows = False,
    cores: Annotated[str, typer.Option(help="big keeps off the slowest cores; all.")] = "big",
    cool_to: Annotated[float, typer.Option(help="°C: wait before each repetition until the processor is no hotter.")] = 45.0,
    cool_wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for that at most; 0: none.")] = 300.0,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="What is printed: a table to read, or one of llama-bench's formats.")
    ] = OutputFormat.table,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure bundles on a phone, interleaved and with its heat noted; `meki-edge compare` reads the result."""
    from meki_edge.device import bench_report
    from meki_edge.device import run as on_host

    settings = {
        "prompt_tokens": prompt_tokens,
        "generate_tokens": generate_tokens,
        "repetitions": repetitions,
        "depth": depth,
        "threads": threads,
        "io": io,
        "cold": cold,
        "row_cache_bytes": row_cache_bytes,
        "verify_rows": verify_rows,
        "cores": cores,
    }
    if on is Place.host:
        if serial is not None or compute is not Compute.cpu or npu_memory is not NpuMemory.auto:
            what = "options of a phone, but --on host measures on this machine"
            raise UserError(what, where="--on", fix="give --on adb")
        made = on_host.run(bundles, tokens, output_dir, on_host.RunConfig(**settings), force=force)
    else:
        from meki_edge.device import adb, phone_bench

        device = adb.find().device(serial)
        config = phone_bench.PhoneRunConfig(
            **settings,
            serial=device.serial,
            target=target,
            npu=compute is Compute.npu,
            npu_memory=npu_memory.value,
            cool_to_celsius=cool_to,
            cool_wait_s=cool_wait,
        )
        made = phone_bench.bench(bundles, tokens, output_dir, config, device, force=force)
    if as_json:
        console.show_json({"directory": str(output_dir), **made.metrics})
        return
    results = read_json(output_dir / on_host.RESULTS)
    if output_format is OutputFormat.table:
        console.stdout.print(bench_report.table(results))
    else:
        console.stream(bench_report.PRINTERS[output_format.value](results))


def doctor(serial: Serial = None, target: Target = TARGET, as_json: Json = False) -> None:
    """Is this machine ready, and the phone? One line a question, with what to do; exit code 1 if something must be."""
    from meki_edge.device import doctor as examiner

    found = examiner.examine(serial, target)
    if as_json:
        console.show_json([{"title": title, "checks": list(map(dataclasses.asdict, checks))} for title, checks in found])
    else:
        console.stdout.print(examiner.table(found))
    if not examiner.ready(found):
        raise typer.Exit(1)
