"""What a checksum of every row costs: on storage, while writing, in `verify`, and at each row that the harness reads.

    python benchmarks/checksums.py    # less than a minute, 0.5 GB of scratch space

Rows as a Qwen3-0.6B with MeKi of width 128 in 28 layers has them, fp16, in two files that differ in
nothing but their checksums. Each pair of measurements is interleaved, the first alternating, and the
medians of the pairs' differences are told. The harness's rows are read with the file in the page
cache, where nothing hides the cost, and past it with O_DIRECT.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from meki_edge.device.runner import find_binary
from meki_edge.rom import inspect
from meki_edge.rom.addressing import Identity
from meki_edge.rom.spec import RomSpec, build
from meki_edge.rom.writer import RomWriter

LAYERS, WIDTH = 28, 128
BLOCK_ROWS = 1024
PAIRS = 9


def layout(num_rows: int, *, checksums: bool) -> RomSpec:
    """One segment a layer."""
    dims = [(layer, 0, WIDTH) for layer in range(LAYERS)]
    digests = {"tokenizer_sha256": "", "source_sha256": ""}
    return build(dims, "fp16", num_rows=num_rows, addressing=Identity(), checksums=checksums, **digests)


def write(path: Path, spec: RomSpec, block: np.ndarray) -> None:
    """A file of the same block of rows, again and again."""
    with RomWriter(path, spec) as writer:
        for _ in range(0, spec.num_rows, len(block)):
            writer.write(block)


def seconds(work: Callable[[], object]) -> float:
    """Of wall time."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(without: Callable[[], object], with_them: Callable[[], object]) -> dict[str, float]:
    """Medians of seconds without and with, and of the pairs' differences."""
    pairs = []
    for index in range(PAIRS):
        if index % 2:
            second = seconds(with_them)
            pairs.append((seconds(without), second))
        else:
            pairs.append((seconds(without), seconds(with_them)))
    return {
        "without": statistics.median(first for first, _ in pairs),
        "with": statistics.median(second for _, second in pairs),
        "difference": statistics.median(second - first for first, second in pairs),
    }


def harness(binary: Path, rom: Path, ids: Path, *options: str) -> Callable[[], object]:
    """Reads rows and throws them away."""
    command = [binary, "rows", "--rom", rom, "--ids-file", ids, *options]
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(scratch: Path, num_rows: int, num_reads: int) -> dict[str, Any]:
    """All of it, as JSON."""
    rng = np.random.default_rng(0)
    block = rng.standard_normal((BLOCK_ROWS, LAYERS * WIDTH), dtype=np.float32)
    plain, checked = layout(num_rows, checksums=False), layout(num_rows, checksums=True)
    files = {"plain": scratch / "plain.safetensors", "checked": scratch / "checked.safetensors"}
    written = interleaved(lambda: write(files["plain"], plain, block), lambda: write(files["checked"], checked, block))
    verified = interleaved(lambda: inspect.verify(files["plain"]), lambda: inspect.verify(files["checked"]))
    binary = find_binary()
    reads: dict[str, Any] = {}
    for io, count in (("pread", num_reads), ("direct", num_reads // 4)):
        ids = scratch / "ids.txt"
        ids.write_text(" ".join(map(str, rng.integers(0, num_rows, count))))
        options = ("--io", io)
        timed = interleaved(
            harness(binary, files["checked"], ids, *options),
            harness(binary, files["checked"], ids, "--verify-rows", *options),
        )
        reads[io] = {f"{key}_us_per_row": 1e6 * value / count for key, value in timed.items()}
    return {
        "num_rows": num_rows,
        "row_bytes": plain.row_bytes,
        "row_stride": plain.row_stride,
        "file_bytes": files["plain"].stat().st_size,
        "checksum_bytes": files["checked"].stat().st_size - files["plain"].stat().st_size,
        "write_seconds": written,
        "verify_seconds": verified,
        "read": reads,
    }


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    table = Table(title=f"checksums: {result['num_rows']:,} rows of {result['row_bytes']:,} bytes")
    for heading in ("what", "without", "with", "a row more"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    size, extra = result["file_bytes"], result["checksum_bytes"]
    per_row = f"{extra / result['num_rows']:.0f} B ({extra / size:.3%})"
    table.add_row("file", f"{size / 1e6:.2f} MB", f"{(size + extra) / 1e6:.2f} MB", per_row)
    for what, key in (("write", "write_seconds"), ("verify", "verify_seconds")):
        timed = result[key]
        more = f"{1e6 * timed['difference'] / result['num_rows']:.2f} µs"
        table.add_row(what, f"{timed['without']:.3f} s", f"{timed['with']:.3f} s", more)
    for what, io in (("harness, a row in the page cache", "pread"), ("harness, a row by O_DIRECT", "direct")):
        timed = {key.removesuffix("_us_per_row"): value for key, value in result["read"][io].items()}
        table.add_row(what, f"{timed['without']:.2f} µs", f"{timed['with']:.2f} µs", f"{timed['difference']:.2f} µs")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16 * BLOCK_ROWS, help="a multiple of 1024")
    parser.add_argument("--reads", type=int, default=40_000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/checksums.json"))
    parser.add_argument("--scratch", type=Path, help="where the files are written (default: the system's)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        result = measure(Path(scratch), arguments.rows, arguments.reads)
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
