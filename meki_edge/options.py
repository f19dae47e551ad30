"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from meki_edge.errors import UserError

MAX_LENGTH = 2**24
MAX_LAYER = 9_999
MAX_EXPERTS = 2**20

OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="Directory to write, with a manifest.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what another configuration left in the output directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Tokens = Annotated[Path, typer.Argument(help="Output of `meki-edge tokenize`.")]
Checkpoint = Annotated[Path, typer.Argument(help="Output of `meki-edge train` or `meki-edge reparam`.")]
Threads = Annotated[int, typer.Option("--threads", "-t", min=1, max=1024, help="Threads of the graph.")]
Serial = Annotated[str | None, typer.Option("--serial", "-s", help="The phone, as `adb devices` calls it (default: the only one).")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", "-p", min=0, help="Tokens of the prefill test.")]
GenerateTokens = Annotated[int, typer.Option("--generate-tokens", "-n", min=0, help="Tokens of the decode test.")]
Repetitions = Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Rounds; each measures every bundle.")]
RowIo = Annotated[str, typer.Option("--io", help="How rows are read: pread, direct or mmap.")]
Cold = Annotated[bool, typer.Option("--cold/--warm", help="Row files out of the page cache first, or read into it.")]
RowCacheBytes = Annotated[
    int, typer.Option("--row-cache-bytes", min=0, help="Memory in which the harness keeps rows; 0: none.")
]
VerifyRows = Annotated[bool, typer.Option("--verify-rows", help="Compare every row with its checksum.")]
Target = Annotated[str, typer.Option("--target", help="The folder on the phone.")]
MemoryOption = Annotated[
    list[str] | None, typer.Option("--memory-option", help="name=value, such as memory_dim=128; may be repeated.")
]


class Place(StrEnum):
    """Where the harness runs."""

    host = "host"
    adb = "adb"


class Compute(StrEnum):
    """What computes the graphs on a phone."""

    cpu = "cpu"
    npu = "npu"


class NpuMemory(StrEnum):
    """How a graph's inputs and outputs come to the NPU."""

    auto = "auto"
    shared = "shared"
    copied = "copied"


NpuMemoryOption = Annotated[
    NpuMemory,
    typer.Option("--npu-memory", help="Inputs and outputs: shared with the NPU, or copied; auto: shared where the phone has libcdsprpc.so."),
]


class OutputFormat(StrEnum):
    """What `run` prints."""

    table = "table"
    md = "md"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


def parse_number(text: str, most: int) -> int | None:
    """A whole number from 0 to ``most`` in the digits 0 to 9 alone; None if ``text`` is none."""
    plain = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    return int(text) if plain and int(text) <= most else None


def parse_layers(text: str, option: str = "--memory-layers", example: str = "0,2-5") -> tuple[int, ...]:
    """``"0,2-5"`` → (0, 2, 3, 4, 5); ascending, however they are written.

    Args:
        example: a list that ``option`` may well take, for the error.

    Raises:
        UserError: not a list of layers and ranges.
    """
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        start, stop = parse_number(first, MAX_LAYER), parse_number(last if dash else first, MAX_LAYER)
        if start is None or stop is None or start > stop:
            raise UserError(f"{text!r} is not a list of layers", where=option, fix=f"write it as {example}")
        layers.extend(range(start, stop + 1))
    return tuple(sorted(layers))


def parse_lengths(text: str, option: str, example: str) -> tuple[int, ...]:
    """``"256,1024"`` → (256, 1024), of numbers of tokens.

    Args:
        example: a list that ``option`` may well take, for the error.

    Raises:
        UserError: not a list of positive numbers.
    """
    lengths = []
    for part in map(str.strip, text.split(",")):
        if not (length := parse_number(part, MAX_LENGTH)):
            wrong = f"{part!r} is no number of tokens from 1 to {MAX_LENGTH}" if part else "a number is missing"
            fix = f"write it as {example}"
            raise UserError(f"{text!r} is not a list of lengths: {wrong}", where=option, fix=fix)
        lengths.append(length)
    return tuple(lengths)


def parse_memory_options(pairs: list[str] | None) -> dict[str, Any]:
    """``["memory_dim=128", "position=after_ffn"]`` → a dict; a value is JSON, or else a string."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, text = _pair(pair, "--memory-option")
        if name in options:
            raise UserError(f"{name!r} is given twice", where="--memory-option", fix="give each option once")
        options[name] = _value(text)
    return options


def parse_moe(text: str) -> tuple[int, int]:
    """``"8/2"`` → (8, 2): experts, and how many of them a token uses.

    Raises:
        UserError: not two positive numbers.
    """
    experts, active = (parse_number(number, MAX_EXPERTS) for number in text.partition("/")[::2])
    if experts is None or not active or active > experts:
        raise UserError(f"{text!r} is not EXPERTS/ACTIVE", where="--moe", fix="write it as 8/2")
    return experts, active


def parse_curves(pairs: list[str] | None) -> dict[str, Path]:
    """``["meki=build/train"]`` → arm → directory."""
    return {name: Path(text) for name, text in (_pair(pair, "--curve") for pair in pairs or [])}


def refuse(context: typer.Context, options: Iterable[str], what: str, fix: str) -> None:
    """Raise a :class:`UserError` if one of ``options`` (parameters by name) was given, which would change nothing."""
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for option in options:
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(what, where=names[option], fix=fix)


def _pair(pair: str, option: str) -> tuple[str, str]:
    name, equals, text = pair.partition("=")
    if not name or not equals:
        raise UserError(f"{pair!r} is not name=value", where=option, fix="write it as name=value")
    return name, text


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a ValueError also for numbers of thousands of digits
        return text
