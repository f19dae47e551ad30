"""How long the way to NPU binaries takes, and how much memory: export, calibrate, quantize, compile.

    python benchmarks/npu.py                       # Qwen3-0.6B shape: about 20 GB of scratch space, 12 minutes
    python benchmarks/npu.py --shape Qwen3-1.7B    # in parts: about 45 GB of scratch space, half an hour
    python benchmarks/npu.py --small               # a quick trial

Random weights with MeKi in every layer, folded. Of Qwen3-0.6B (MeKi of width 128) are timed: the
export, the calibration on 64 windows of 512 tokens with w8a16 quantized from it, w4a16 quantized from
the same ranges, and the compilation of prefill and decode of both for SM8750. The decode graph is then
compiled once more on its own: what prefill adds to a binary that they share is the price of having both.
Qwen3-1.7B (MeKi of width 256) is cut into two parts and its head, so that no binary passes the 2 GB that
a device loads, and compiled in fp16 and, after a calibration on 16 windows, in w8a16.

Each stage runs in a process of its own. Its peak resident memory is that process's and that of the largest
that it starts, added: never less than what was in memory at once. Of a model with random weights the
accuracy means nothing, so the gate is measured and lets everything pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime
from reparam import qwen3_06b, qwen3_17b, write_checkpoint, write_tokens
from rich.table import Table

from calibration.config import CalibrateConfig
from calibration.stage import calibrate
from export.graph import ExportConfig, export
from export.qnn_local import CompileConfig, compile_local
from meki_edge import console
from meki_edge.device import host
from meki_edge.files import write_json
from meki_edge.manifest import FILE_NAME
from meki_edge.model.config import ModelConfig
from meki_edge.reparam import ReparamConfig, reparam

CONTEXT_LENGTH = 1024
WINDOW_LENGTH, GATE_WINDOWS = 512, 4
CHIPSET = "sm8750"
ALONE = "apart"  # without shared weights, to compare


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done with one shape. ``stages`` are named by command and precision; fp16 is the export itself."""

    model: Callable[..., ModelConfig]
    stages: tuple[str, ...]
    samples: int
    cuts: dict[str, Any] = field(default_factory=dict)
    max_seconds: int | None = None
    max_peak_bytes: float


PLANS = {
    "Qwen3-0.6B": Plan(
        model=qwen3_06b,
        stages=("export", "calibrate w8a16", "calibrate w4a16", "compile w8a16", "compile w4a16", f"{ALONE} w8a16"),
        samples=64,
        max_seconds=25 * 60,
        max_peak_bytes=12e9,
    ),
    "Qwen3-1.7B": Plan(
        model=qwen3_17b,
        stages=("export", "compile fp16", "calibrate w8a16", "compile w8a16"),
        samples=16,
        cuts={"parts": 2, "head_part": True},
        max_peak_bytes=24e9,
    ),
}


def prepare(scratch: Path, plan: Plan, *, small: bool) -> tuple[Path, Path]:
    """(folded checkpoint, tokens), made unless they are there; untimed."""
    config = plan.model(small=small)
    tokens_dir, training, folded = (scratch / name for name in ("tokens", "training", "folded"))
    if not (tokens_dir / FILE_NAME).is_file():
        write_tokens(tokens_dir, config.vocab_size, plan.samples * WINDOW_LENGTH)
    if not (folded / FILE_NAME).is_file():
        if not (training / FILE_NAME).is_file():
            write_checkpoint(training, config, tokens_dir)
        reparam(training, tokens_dir, folded, ReparamConfig(proof_windows=1, window_length=64))
        shutil.rmtree(training)
    return folded, tokens_dir


def run(stage: str, plan: Plan, scratch: Path, folded: Path, tokens_dir: Path, samples: int) -> dict[str, Any]:
    """One stage; what it took and what it measured."""
    kind, _, precision = stage.partition(" ")
    exported, out = scratch / "export", scratch / stage.replace(" ", "-")
    started = time.perf_counter()
    if kind == "export":
        config = ExportConfig(context_length=CONTEXT_LENGTH, verify_tokens=130, **plan.cuts)
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
        first = scratch / next(name for name in plan.stages if name.startswith("calibrate")).replace(" ", "-")
        ranges_from = None if out == first else first
        made = calibrate(exported, folded, tokens_dir, out, config, ranges_from=ranges_from, force=True)
    else:
        config = CompileConfig(chipset=CHIPSET, verify_steps=0, share_weights=kind != ALONE)
        graphs = exported if precision == "fp16" else scratch / f"calibrate-{precision}"
        made = compile_local(graphs, folded, tokens_dir, out, config, force=True)
    seconds = time.perf_counter() - started
    peaks = [resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"stage": stage, "seconds": seconds, "peak_rss_bytes": sum(peaks), "metrics": made.metrics}


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """``work`` in a fresh process, so that peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(work, *arguments).result()


def sharing(stages: list[dict[str, Any]]) -> float | None:
    """Size of the binary that prefill and decode share, by that of decode alone."""
    metrics = {stage["stage"]: stage["metrics"] for stage in stages}
    for name, found in metrics.items():
        if name.startswith(ALONE):
            return metrics[name.replace(ALONE, "compile")]["model_binary_bytes"] / found["decode_binary_bytes"]
    return None


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    config = result["config"]
    table = Table(title=f"to NPU binaries, {config['shape']}, {config['samples']} windows of {WINDOW_LENGTH}")
    for heading in ("stage", "seconds", "peak RSS, GB", "MB made", "largest binary, MB"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage in result["stages"]:
        metrics, peak = stage["metrics"], stage["peak_rss_bytes"]
        binaries = [value for name, value in metrics.items() if name.endswith("binary_bytes")]
        size = sum(binaries) or metrics["weights_bytes"]
        largest = f"{max(binaries) / 1e6:,.0f}" if binaries else ""
        table.add_row(stage["stage"], f"{stage['seconds']:.1f}", f"{peak / 1e9:.2f}", f"{size / 1e6:,.0f}", largest)
    limits = result["limits"]
    seconds = f"{result['seconds']:.1f}" + (f" (≤ {limits['seconds']})" if limits["seconds"] else "")
    peak = f"{result['peak_rss_bytes'] / 1e9:.2f} (≤ {limits['peak_bytes'] / 1e9:.0f})"
    table.add_row("all", seconds, peak, "", "")
    console.stdout.print(table)
    if result["shared_by_alone"]:
        ratio = f"{result['shared_by_alone']:.3f} of decode alone (≤ 1.02)"
        console.stdout.print(f"prefill and decode in one binary: {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(PLANS), default="Qwen3-0.6B")
    parser.add_argument("--small", action="store_true", help="a quick trial: 4 layers, 8 windows")
    parser.add_argument("--scratch", type=Path, default=Path("build/benchmarks/npu"))
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/npu-SHAPE.json")
    arguments = parser.parse_args()
    plan, shape = PLANS[arguments.shape], arguments.shape
    samples = 8 if arguments.small else plan.samples
    scratch = arguments.scratch / (f"{shape}-small" if arguments.small else shape)
    folded, tokens_dir = prepare(scratch, plan, small=arguments.small)
    stages = []
    for name in plan.stages:
        console.info(f"== {name}")
        stages.append(in_process(run, name, plan, scratch, folded, tokens_dir, samples))
    timed = [stage for stage in stages if not stage["stage"].startswith(ALONE)]
    result = {
        "config": {
            "shape": shape,
            "small": arguments.small,
            "samples": samples,
            "window_length": WINDOW_LENGTH,
            "context_length": CONTEXT_LENGTH,
            "chipset": CHIPSET,
            "onnxruntime": onnxruntime.__version__,
        },
        "host": host.facts(),
        "limits": {"seconds": plan.max_seconds, "peak_bytes": plan.max_peak_bytes},
        "stages": stages,
        "seconds": sum(stage["seconds"] for stage in timed),
        "peak_rss_bytes": max(stage["peak_rss_bytes"] for stage in timed),
        "shared_by_alone": sharing(stages),
    }
    show(result)
    output = arguments.output or Path(f"benchmarks/results/npu-{shape}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, result)


if __name__ == "__main__":
    main()
