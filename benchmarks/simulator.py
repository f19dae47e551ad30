"""What the NPU's binaries compute, of a trained model: the simulator's logits against the float graphs'.

    make demo
    python benchmarks/simulator.py             # the demo's MeKi model: about 10 minutes

The float graphs of a trained model are compiled in fp16, calibrated and compiled in w8a16 and w4a16 by
32-blocks, each binary with one graph (the simulator cannot load shared ones). A prefill chunk of
validation text and then 64 decode steps run in the simulator of the NPU, each side with its own cache,
and the logits are compared with those of the float graphs on ONNX Runtime's CPU: not with the quantized
graphs', so what is measured is all that is lost on the way. The simulator says nothing of speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from npu import in_process
from rich.table import Table

from calibration.config import CalibrateConfig
from calibration.inputs import read_spec
from calibration.stage import calibrate
from export import qnn_worker
from export.agreement import agreement
from export.onnx_decoder import OnnxDecoder, Sessions, cpu_sessions
from export.qnn_local import CompileConfig, compile_local
from export.targets import chip
from meki_edge import console, manifest, tokens
from meki_edge.device import host
from meki_edge.files import write_json
from meki_edge.graph_spec import Graph
from meki_edge.rom.reader import RomReader

FLOAT = "fp16"
PRECISIONS = (FLOAT, "w8a16", "w4a16-block32")
TARGETS = {(FLOAT, "min_cosine"): 0.9999, ("w8a16", "argmax_agreement"): 0.97}
CHIPSET, LEVEL = "sm8750", 3


def compiled(exported: Path, checkpoint: Path, tokens_dir: Path, scratch: Path, precision: str) -> tuple[Path, Path]:
    """(graphs, binaries) of one precision, made unless they are there."""
    graphs = exported
    if precision != FLOAT:
        graphs = scratch / precision
        lenient = {"max_perplexity_increase": 1.0, "min_top1_agreement": 0.0}
        config = CalibrateConfig(precision=precision, sensitivity=False, **lenient)
        calibrate(exported, checkpoint, tokens_dir, graphs, config)
    binaries = scratch / f"{precision}-npu"
    config = CompileConfig(chipset=CHIPSET, optimization_level=LEVEL, verify_steps=0, share_weights=False)
    compile_local(graphs, checkpoint, tokens_dir, binaries, config)
    return graphs, binaries


def logits(graphs: Path, roms: Sequence[Path], ids: np.ndarray, steps: int, binaries: Path | None) -> tuple[Any, Any]:
    """Logits ``[N, V]`` of prefill and of the last ``steps`` tokens' decoding: of binaries in the simulator, or
    of the graphs on the CPU. In a process of its own: native code keeps gigabytes."""
    spec = read_spec(graphs)
    load: Callable[[Graph], Sessions] = lambda graph: cpu_sessions(graphs, graph)
    if binaries is not None:
        qnn_worker.register()
        load = lambda graph: qnn_worker.npu_sessions(binaries, graph, chip(CHIPSET).soc_model, LEVEL)
    with ExitStack() as stack:
        opened = [stack.enter_context(RomReader(path)) for path in (graphs / spec.embedding.file, *roms)]
        decoder = OnnxDecoder(spec, opened[0], opened[1:])
        prefill = decoder.prefill(load(spec.prefill), ids[:-steps])
        sessions = load(spec.decode)
        return prefill, np.stack([decoder.decode(sessions, token) for token in ids[-steps:]])


def roms_of(graphs: Path, checkpoint: Path) -> list[Path]:
    """The ROM files that these graphs take: calibration may have written its own."""
    return [(graphs if (graphs / rom.file).is_file() else checkpoint) / rom.file for rom in read_spec(graphs).roms]


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    table = Table(title=f"NPU simulator against the float graphs, {result['config']['model']}, {CHIPSET}")
    for heading in ("precision", "graph", "tokens", "cosine ≥", "largest error", "top-1 agreement", "target"):
        table.add_column(heading, justify="left" if heading in ("precision", "graph") else "right")
    for precision, graphs in result["precisions"].items():
        for name, found in graphs.items():
            wanted = [str(least) for (of, _), least in TARGETS.items() if of == precision]
            table.add_row(
                precision,
                name,
                str(found["tokens"]),
                f"{found['min_cosine']:.5f}",
                f"{found['max_abs_error']:.3f}",
                f"{found['argmax_agreement']:.1%}",
                f"≥ {wanted[0]}" if wanted else "",
            )
    console.show_wide(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("build/demo"), help="what `make demo` left")
    parser.add_argument("--model", default="meki", choices=("dense", "meki"))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--scratch", type=Path, default=Path("build/benchmarks/simulator"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/simulator.json"))
    arguments = parser.parse_args()
    exported = arguments.demo / "export" / arguments.model
    checkpoint = arguments.demo / ("train" if arguments.model == "dense" else "rom") / arguments.model
    tokens_dir, scratch = arguments.demo / "tokens", arguments.scratch / arguments.model
    manifest.load(exported, stages=("export",))
    length = read_spec(exported).prefill.num_tokens + arguments.steps
    ids = tokens.open_shards(tokens_dir).validation_windows(1, length)[0]
    expected = in_process(logits, exported, roms_of(exported, checkpoint), ids, arguments.steps, None)
    precisions = {}
    for precision in PRECISIONS:
        console.info(f"== {precision}")
        graphs, binaries = compiled(exported, checkpoint, tokens_dir, scratch, precision)
        found = in_process(logits, graphs, roms_of(graphs, checkpoint), ids, arguments.steps, binaries)
        pairs = zip(("prefill", "decode"), found, expected, strict=True)
        precisions[precision] = {name: agreement(ours, theirs) for name, ours, theirs in pairs}
    result = {
        "config": {"model": arguments.model, "steps": arguments.steps, "chipset": CHIPSET},
        "versions": {"onnxruntime": onnxruntime.__version__},
        "host": host.facts(),
        "precisions": precisions,
    }
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
