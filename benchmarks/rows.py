"""What a row costs: at the pace of decoding, for a whole prompt, and beside the other ways to read it.

    python benchmarks/rows.py              # the ROM file that benchmarks/decode.py builds; some 7 minutes
    python benchmarks/rows.py --rom FILE   # any ROM file; without the harness's stall

Rows are cold: the file is out of the page cache before each read. Measured by `meki-rom-probe`
(ways to read take turns, token by token), `fio` on the same file, and the harness:

- one row every 30 ms, as decoding asks for it, and back to back: the harness's reader (read and
  dequantize) over a bare O_DIRECT pread of the same bytes; a read for each layer, as from a table a
  layer; and a mapped file that is touched in place, as llama.cpp and LiteRT-LM read their tables: with
  the system's read-ahead, and without;
- the rows of a 512-token prompt, over the best that `fio` reaches with any of several queues;
- the stall that is left of a token's I/O in the harness's decoding;
- 100,000 tokens by each way of reading: every row compared with the Python reader's, and the
  resident memory of the process watched;
- 100,000 tokens decoded with a tiny model, text after text, for whether the whole loop grows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from decode import bench, build
from decode_soak import draw
from reparam import qwen3_06b
from rich.table import Table
from soak import SOAKS, soak, soak_decoding, tiny_bundle

from meki_edge import console, tokens
from meki_edge.device import host, runner, stats
from meki_edge.errors import UserError
from meki_edge.files import write_json
from meki_edge.rom.reader import RomReader

CADENCE_US = 30_000
PREFILL_TOKENS = 512
BARE, HARNESS = "direct", "fetch pread"
QUEUES = [(engine, jobs, 1) for engine in ("psync",) for jobs in (8, 16)]  # engine, jobs, depth
QUEUES += [(engine, jobs, 64) for engine in ("libaio", "io_uring") for jobs in (1, 2)]
FIO_SECONDS = 3
METHODS = 9  # of the probe
MAX_GROWTH_BYTES = 1 << 20
TARGETS = {"row": 1.2, "prefill": 0.8, "stall": 0.005}


def probe(rom: Path, *arguments: object) -> dict[str, Any]:
    """The report of `meki-rom-probe`."""
    binary = runner.find_binary().with_name("meki-rom-probe")
    if not binary.is_file():
        fix = f"build it: cmake --build {binary.parent} --target meki-rom-probe"
        raise UserError("meki-rom-probe is not built", where=binary, fix=fix)
    command = [binary, "--rom", rom, "--format", "json", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        what = f"meki-rom-probe failed: {done.stderr.strip()}"
        raise UserError(what, where=rom, fix="check the file and the storage")
    return json.loads(done.stdout)


def measure_fio(rom: Path, block_bytes: int) -> dict[str, float] | None:
    """Random reads a second of ``block_bytes`` past the page cache, by queue; None where there is no `fio`."""
    if shutil.which("fio") is None:
        return None
    speeds = {}
    for engine, jobs, depth in QUEUES:
        command = ["fio", "--name=rows", f"--filename={rom}", "--readonly", "--rw=randread", f"--bs={block_bytes}"]
        command += ["--direct=1", f"--ioengine={engine}", f"--numjobs={jobs}", f"--iodepth={depth}", "--thread"]
        command += ["--time_based", f"--runtime={FIO_SECONDS}", "--group_reporting", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:  # an engine may be missing, or forbidden
            output = done.stdout[done.stdout.index("{") :]
            speeds[f"{engine} × {jobs}, depth {depth}"] = json.loads(output)["jobs"][0]["read"]["iops"]
    return speeds


def measure(rom: Path, bundle: Path | None, trace: np.ndarray | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, as JSON."""
    with RomReader(rom) as reader:
        spec = reader.spec
    seconds = arguments.tokens * METHODS * CADENCE_US / 1e6
    console.info(f"one row at a time, every 30 ms and back to back: {seconds:.0f} s and more")
    paces = {
        "at_cadence": probe(rom, "--tokens", arguments.tokens, "--cadence-us", CADENCE_US, "--threads", 1),
        "back_to_back": probe(rom, "--tokens", arguments.tokens, "--threads", 1, "--batch", PREFILL_TOKENS),
    }
    latencies = {
        pace: {method["method"]: method["latency_us"] for method in report["methods"]} for pace, report in paces.items()
    }
    console.info("prompts, between two measurements by fio")
    before = measure_fio(rom, spec.row_stride)
    prefills = probe(rom, "--tokens", 1, "--threads", 1, "--batch", PREFILL_TOKENS)["prefill"]
    after = measure_fio(rom, spec.row_stride)
    fio = None if before is None or after is None else {queue: max(before[queue], after[queue]) for queue in before}
    prefill = {entry["io"]: entry["batch_us"] for entry in prefills}
    result = {
        "rom": {"bytes": rom.stat().st_size, "row_bytes": spec.row_bytes, "layers": len(spec.segments)},
        "host": host.facts(),
        "read_ahead_bytes": _read_ahead(rom),
        "latency_us": latencies,
        "fio_rows_per_s": fio,
        "prefill_us": prefill,
        "stall": None,
        "soak": {
            name: soak(rom, name.split(",")[0], cache, draw(spec.num_tokens, arguments.soak_tokens))
            for name, cache in SOAKS.items()
        },
        "decode_soak": {},
    }
    if bundle is not None and trace is not None:
        result["stall"] = measure_stall(bundle, trace, arguments.threads, arguments.rounds)
        tiny = tiny_bundle(arguments.scratch / "tiny")
        for name, cache in SOAKS.items():
            console.info(f"{arguments.soak_tokens:,} tokens decoded, {name}")
            found = soak_decoding(tiny, name.split(",")[0], cache, arguments.soak_tokens)
            result["decode_soak"][name] = found
    return result


def measure_stall(bundle: Path, ids: np.ndarray, threads: int, rounds: int) -> dict[str, Any]:
    """What the harness's graph waited for rows in decoding ``ids``, in µs a token, and the I/O behind it."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.txt"
        trace.write_text("\n".join(map(str, ids)))
        steps = [step for _ in range(rounds) for step in bench(bundle, trace, len(ids), threads)["steps"]]
    return {
        "stall_us": stats.distribution([step["stall_us"] for step in steps]),
        "io_us": stats.distribution([step["io_us"] for step in steps]),
        "step_us": stats.distribution([step["end_us"] - step["start_us"] for step in steps]),
    }


def _read_ahead(rom: Path) -> int | None:
    """How far a fault reads ahead on the device that holds ``rom``, or None where that is not shown."""
    device = rom.stat().st_dev
    setting = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/bdi/read_ahead_kb")
    return int(setting.read_text()) * 1024 if setting.is_file() else None


def show(result: dict[str, Any]) -> None:
    """The result as tables."""
    rom, latencies = result["rom"], result["latency_us"]
    table = Table(title=f"a cold row of {rom['row_bytes']:,} bytes, {rom['layers']} layers, µs")
    for heading in ("how", "30 ms apart, p50", "p99", "/ bare", "back to back, p50", "p99", "/ bare"):
        table.add_column(heading, justify="left" if heading == "how" else "right")
    labels = {
        BARE: "bare O_DIRECT pread",
        "pread": "bare pread",
        "mmap": "mapped, asked for in one piece",
        "faults": "mapped, touched in place",
        "random faults": "mapped, touched in place, no read-ahead",
        "layers": "a pread a layer",
    }
    for method in latencies["at_cadence"]:
        cells = []
        for pace in latencies.values():
            ratio = pace[method]["p50"] / pace[BARE]["p50"] if BARE in pace else float("nan")
            cells += [f"{pace[method]['p50']:,.0f}", f"{pace[method]['p99']:,.0f}", f"{ratio:.2f}"]
        table.add_row(labels.get(method, f"harness, {method.removeprefix('fetch ')}"), *cells)
    console.show_wide(table)
    console.show_wide(_verdicts(result))
    if result["fio_rows_per_s"] is None:
        console.info("fio is not installed (Debian: apt-get install fio): a prompt's rows were not compared with it")


def _verdicts(result: dict[str, Any]) -> Table:
    note = "Mapped files grow with mmap: pages that were read count as resident, until the kernel takes them back."
    table = Table(title="against the targets", caption=note)
    for heading in ("what", "value", "target"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for pace, values in result["latency_us"].items():
        if BARE in values:
            ratio = values[HARNESS]["p50"] / values[BARE]["p50"]
            label = f"harness / bare O_DIRECT, p50, {pace.replace('_', ' ')}"
            table.add_row(label, f"{ratio:.2f}", f"≤ {TARGETS['row']}")
    best = max(result["fio_rows_per_s"].values(), default=None) if result["fio_rows_per_s"] else None
    for io, batch in result["prefill_us"].items():
        speed = PREFILL_TOKENS / batch["p50"] * 1e6
        value = f"{speed:,.0f} rows/s" + (f", {speed / best:.2f} of fio's {best:,.0f}" if best else "")
        table.add_row(f"rows of a {PREFILL_TOKENS}-token prompt, {io}", value, f"≥ {TARGETS['prefill']} of fio")
    if result["stall"] is not None:
        stall, step = result["stall"]["stall_us"], result["stall"]["step_us"]
        share = stall["mean"] / CADENCE_US
        spread = f"{stall['mean']:.0f} µs a token, p99 {stall['p99']:.0f}; steps of {step['mean'] / 1e3:.1f} ms"
        table.add_row("exposed stall, of a 30 ms step", f"{share:.3%} ({spread})", f"< {TARGETS['stall']:.1%}")
    most = f"≤ {MAX_GROWTH_BYTES / 1e6:.0f} MB"
    for name, run in result["soak"].items():
        value = f"{run['wrong_rows']} wrong, {_memory(run)}"
        table.add_row(f"{run['tokens']:,} tokens fetched, {name}", value, f"0 wrong, {most}")
    for name, run in result["decode_soak"].items():
        table.add_row(f"{run['tokens']:,} tokens decoded, {name}", _memory(run), most)
    return table


def _memory(run: dict[str, Any]) -> str:
    mapped = f"mapped files {run['file_bytes'] / 1e6:.1f} MB ({run['file_growth_bytes'] / 1e6:+.1f})"
    return f"own memory {run['anonymous_growth_bytes'] / 1e6:+.2f} MB, {mapped}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rom", type=Path, help="measure this file, and no harness")
    parser.add_argument("--small", action="store_true", help="a quick trial: 4 layers, a tenth of the vocabulary")
    parser.add_argument("--tokens", type=int, default=300, help="rows of each latency")
    parser.add_argument("--soak-tokens", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="runs of the harness")
    parser.add_argument("--table-precision", default="fp16")
    parser.add_argument("--scratch", type=Path, default=Path("build/benchmarks/decode"), help="as for decode.py")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/rows.json"))
    arguments = parser.parse_args()
    rom, bundle, trace = arguments.rom, None, None
    if rom is None:
        shape = "small" if arguments.small else "Qwen3-0.6B"
        scratch = arguments.scratch / f"{shape}-{arguments.table_precision}"
        config = qwen3_06b(small=arguments.small)
        bundle = build(scratch, "meki", config, precision=arguments.table_precision)
        trace = np.array(tokens.open_shards(scratch / "tokens").validation[:128])
        rom = bundle / "rom.safetensors"
    result = measure(rom, bundle, trace, arguments)
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
