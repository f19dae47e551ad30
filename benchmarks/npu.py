"""How long the way to NPU binaries takes, and how much memory: export, calibrate, quantize, compile.

    python benchmarks/npu.py            # Qwen3-0.6B shape: about 20 GB of scratch space, half an hour
    python benchmarks/npu.py --small    # a quick trial

Random weights with MeKi of width 128 in every layer, folded. Timed are: the export, the calibration
on 64 windows of 512 tokens with w8a16 quantized from it, w4a16 quantized from the same ranges, and
the compilation of prefill and decode of both for SM8750. Each stage runs in a process of its own;
its peak resident memory is the largest of that process and of those that it starts. Of a model with
random weights the accuracy means nothing, so the gate is measured and lets everything pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import onnxruntime
from reparam import qwen3_06b, write_checkpoint, write_tokens
from rich.table import Table

from calibration.config import CalibrateConfig
from calibration.stage import calibrate
from export.graph import ExportConfig, export
from export.qnn_local import CompileConfig, compile_local
from meki_edge import console
from meki_edge.device import host
from meki_edge.files import write_json
from meki_edge.manifest import FILE_NAME
from meki_edge.reparam import ReparamConfig, reparam

CONTEXT_LENGTH = 1024
SAMPLES, WINDOW_LENGTH, GATE_WINDOWS = 64, 512, 4
PRECISIONS = ("w8a16", "w4a16")
CHIPSET = "sm8750"
MAX_SECONDS, MAX_PEAK_BYTES = 25 * 60, 12e9


def prepare(scratch: Path, *, small: bool) -> tuple[Path, Path]:
    """(folded checkpoint, tokens), made unless they are there; untimed."""
    config = qwen3_06b(small=small)
    tokens_dir, training, folded = (scratch / name for name in ("tokens", "training", "folded"))
    if not (tokens_dir / FILE_NAME).is_file():
        write_tokens(tokens_dir, config.vocab_size, SAMPLES * WINDOW_LENGTH)
    if not (folded / FILE_NAME).is_file():
        if not (training / FILE_NAME).is_file():
            write_checkpoint(training, config, tokens_dir)
        reparam(training, tokens_dir, folded, ReparamConfig(proof_windows=1, window_length=64))
        shutil.rmtree(training)
    return folded, tokens_dir


def run(stage: str, scratch: Path, folded: Path, tokens_dir: Path, samples: int) -> dict[str, Any]:
    """One stage; what it took and what it measured."""
    kind, _, precision = stage.partition(" ")
    exported, out = scratch / "export", scratch / stage.replace(" ", "-")
    started = time.perf_counter()
    if kind == "export":
        config = ExportConfig(context_length=CONTEXT_LENGTH, verify_tokens=130)
        made = export(folded, tokens_dir, exported, config, force=True)
    elif kind == "calibrate":
        config = CalibrateConfig(
            precision=precision,
            samples=samples,
            window_length=WINDOW_LENGTH,
            gate_windows=GATE_WINDOWS,
            sensitivity=False,
            max_perplexity_increase=1e6,
            min_top1_agreement=0.0,
        )
        first = scratch / f"calibrate-{PRECISIONS[0]}"
        ranges_from = None if out == first else first
        made = calibrate(exported, folded, tokens_dir, out, config, ranges_from=ranges_from, force=True)
    else:
        config = CompileConfig(chipset=CHIPSET, verify_steps=0)
        made = compile_local(scratch / f"calibrate-{precision}", folded, tokens_dir, out, config, force=True)
    seconds = time.perf_counter() - started
    peaks = [resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"stage": stage, "seconds": seconds, "peak_rss_bytes": max(peaks), "metrics": made.metrics}


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """``work`` in a fresh process, so that peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(work, *arguments).result()


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    config = result["config"]
    table = Table(title=f"to NPU binaries, {config['shape']}, {config['samples']} windows of {WINDOW_LENGTH}")
    for heading in ("stage", "seconds", "peak RSS, GB", "bytes made"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage in result["stages"]:
        metrics, peak = stage["metrics"], stage["peak_rss_bytes"]
        size = sum(value for name, value in metrics.items() if name == "weights_bytes" or name.endswith("binary_bytes"))
        table.add_row(stage["stage"], f"{stage['seconds']:.1f}", f"{peak / 1e9:.2f}", f"{size / 1e6:,.0f} MB")
    total, peak = result["seconds"], result["peak_rss_bytes"]
    table.add_row("all", f"{total:.1f} (≤ {MAX_SECONDS})", f"{peak / 1e9:.2f} (≤ {MAX_PEAK_BYTES / 1e9:.0f})", "")
    console.stdout.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick trial: 4 layers, 8 windows")
    parser.add_argument("--scratch", type=Path, default=Path("build/benchmarks/npu"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/npu.json"))
    arguments = parser.parse_args()
    shape = "small" if arguments.small else "Qwen3-0.6B"
    samples = 8 if arguments.small else SAMPLES
    scratch = arguments.scratch / shape
    folded, tokens_dir = prepare(scratch, small=arguments.small)
    names = ["export", *(f"calibrate {name}" for name in PRECISIONS), *(f"compile {name}" for name in PRECISIONS)]
    stages = []
    for name in names:
        console.info(f"== {name}")
        stages.append(in_process(run, name, scratch, folded, tokens_dir, samples))
    result = {
        "config": {
            "shape": shape,
            "samples": samples,
            "window_length": WINDOW_LENGTH,
            "context_length": CONTEXT_LENGTH,
            "chipset": CHIPSET,
            "onnxruntime": onnxruntime.__version__,
        },
        "host": host.facts(),
        "stages": stages,
        "seconds": sum(stage["seconds"] for stage in stages),
        "peak_rss_bytes": max(stage["peak_rss_bytes"] for stage in stages),
    }
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
