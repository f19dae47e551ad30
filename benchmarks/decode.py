"""What the memory costs in decoding, and what the harness costs beside ONNX Runtime from Python.

    python benchmarks/decode.py            # Qwen3-0.6B shape: about 15 GB of scratch space, 20 minutes
    python benchmarks/decode.py --small    # a quick trial

Packs a dense model and its twin with MeKi (width 128 in every layer) from random weights by the
real stages; a bundle that is there already is used again. Then three arms decode the same
uniformly random ids, so that rows come from everywhere in a ROM file that was dropped from the
page cache: the harness with each bundle, and the dense graph driven from Python. The arms take
turns, and the order is reversed every second round. What counts is the median of the rounds'
paired ratios: MeKi over dense (at least 0.97), the harness over Python (at least 1.0), and the
time the graph waited for rows (under 1 % of a step).
"""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from reparam import qwen3_06b, write_checkpoint, write_tokens
from rich.table import Table

from export.graph import ExportConfig, export
from meki_edge import console, tokens
from meki_edge.device import host, runner, stats
from meki_edge.device.bundle import Bundle, open_bundle
from meki_edge.device.pack import PackConfig, pack
from meki_edge.files import write_json
from meki_edge.manifest import FILE_NAME
from meki_edge.model.config import ModelConfig
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.rom.reader import RomReader

CONTEXT_LENGTH = 1024
ARMS = ("dense", "meki", "python")
TARGETS = {"meki / dense": 0.97, "dense / python": 1.0}
MAX_STALL_SHARE = 0.01


def build(
    scratch: Path, name: str, config: ModelConfig, *, precision: str, context_length: int = CONTEXT_LENGTH
) -> Path:
    """The bundle ``name`` in ``scratch``, beside its ``tokens``; what leads to it is removed as soon as it has served.

    ``dense`` leaves the memories of ``config`` out.
    """
    tokens_dir = scratch / "tokens"
    if not (tokens_dir / FILE_NAME).is_file():
        write_tokens(tokens_dir, config.vocab_size)
    bundle = scratch / f"bundle-{name}"
    if (bundle / FILE_NAME).is_file():
        console.info(f"using {bundle} again")
        return bundle
    checkpoint = scratch / f"checkpoint-{name}"
    if name == "dense":
        config = replace(config, memories=())
    else:
        training = scratch / "training"
        if not (checkpoint / FILE_NAME).is_file():
            if not (training / FILE_NAME).is_file():
                write_checkpoint(training, config, tokens_dir)
            folding = ReparamConfig(table_precision=precision, proof_windows=1, window_length=64)
            reparam(training, tokens_dir, checkpoint, folding)
        shutil.rmtree(training, ignore_errors=True)
    if not (checkpoint / FILE_NAME).is_file():
        write_checkpoint(checkpoint, config, tokens_dir)
    graphs = scratch / f"export-{name}"
    export(checkpoint, tokens_dir, graphs, ExportConfig(context_length=context_length, verify_tokens=130))
    pack(graphs, checkpoint, bundle, PackConfig(name=name))
    shutil.rmtree(graphs)
    shutil.rmtree(checkpoint)
    return bundle


class PythonDecoder:
    """The decode graph of a bundle, driven from Python as one would: NumPy in, NumPy out."""

    def __init__(self, bundle: Bundle, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        graph = bundle.spec.decode
        (part,) = graph.parts
        self._session = onnxruntime.InferenceSession(str(bundle.directory / part.file), options)
        self._spec = bundle.spec
        self._graph = graph
        self._embedding = RomReader(bundle.directory / bundle.spec.embedding.file)
        self._feeds = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in graph.inputs}
        self._caches = [
            (self._feeds[past.name], 2 if role == "key" else 1)
            for role in ("key", "value")
            for past in graph.by_role(f"past_{role}")
        ]
        self._outputs = ["logits"] + [t.name for role in ("key", "value") for t in graph.by_role(f"present_{role}")]
        (self._outputs[0],) = (tensor.name for tensor in graph.by_role("logits"))

    def tokens_per_s(self, ids: np.ndarray) -> float:
        """Speed over ``ids``, fed one a step from an empty cache, after one untimed step."""
        self._mask[...] = self._spec.mask_value
        self._mask[..., -1] = 0
        self._step(0, int(ids[0]))
        self._mask[..., 0] = self._spec.mask_value
        start = time.perf_counter()
        for position, token in enumerate(ids):
            self._step(position, int(token))
        return len(ids) / (time.perf_counter() - start)

    @property
    def _mask(self) -> np.ndarray:
        (tensor,) = self._graph.by_role("attention_mask")
        return self._feeds[tensor.name]

    def _step(self, position: int, token: int) -> int:
        """One token in, the likeliest next one out; its key and value go into the cache."""
        self._feed("input_embeds", self._embedding.rows(np.array([token])))
        exponents = np.arange(0, self._spec.head_dim, 2) / self._spec.head_dim
        angles = position * self._spec.rope_theta**-exponents
        self._feed("position_cos", np.cos(angles))
        self._feed("position_sin", np.sin(angles))
        logits, *present = self._session.run(self._outputs, self._feeds)
        for (cache, axis), new in zip(self._caches, present, strict=True):
            slots = [slice(None)] * cache.ndim
            slots[axis + 1] = slice(position, position + 1)
            cache[tuple(slots)] = new
        self._mask[..., position] = 0
        return int(logits.argmax())

    def _feed(self, role: str, values: np.ndarray) -> None:
        (tensor,) = self._graph.by_role(role)
        self._feeds[tensor.name][...] = values.reshape(tensor.shape)


def measure(bundles: dict[str, Bundle], ids: np.ndarray, scratch: Path, threads: int, rounds: int) -> dict[str, Any]:
    """``rounds`` interleaved measurements of every arm."""
    trace = scratch / "trace.txt"
    trace.write_text("\n".join(map(str, ids)))
    decoder = PythonDecoder(bundles["dense"], threads)
    speeds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in bundles}
    with console.progress("{task.fields[arm]}") as bar:
        task = bar.add_task("decode", total=rounds * len(ARMS), arm="")
        for index in range(rounds):
            for arm in ARMS if index % 2 == 0 else ARMS[::-1]:
                bar.update(task, arm=arm)
                if arm == "python":
                    speeds[arm].append(decoder.tokens_per_s(ids))
                else:
                    report = bench(bundles[arm].directory, trace, len(ids), threads)
                    reports[arm].append(report)
                    speeds[arm].append(1e6 * report["num_tokens"] / report["elapsed_us"])
                bar.advance(task)
    return {"speeds": speeds, "reports": reports}


def bench(bundle: Path, trace: Path, num_tokens: int, threads: int) -> dict[str, Any]:
    """The decode test of one run of the harness, rows cold."""
    arguments = ["bench", "--bundle", str(bundle), "--trace-file", str(trace), "--prompt-tokens", "0"]
    arguments += ["--generate-tokens", str(num_tokens), "--threads", str(threads), "--drop-page-cache"]
    (test,) = runner.run_json(arguments)["tests"]
    return test


def summarize(measured: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The result as JSON."""
    speeds = measured["speeds"]
    ratios = {
        name: {**stats.paired_ratio(*(speeds[arm] for arm in name.split(" / "))), "target": target}
        for name, target in TARGETS.items()
    }
    tests = measured["reports"]["meki"]
    steps = [step for test in tests for step in test["steps"]]
    waited = sum(step["stall_us"] for step in steps) / sum(test["elapsed_us"] for test in tests)
    return {
        "config": config,
        "host": host.facts(),
        "tokens_per_s": {arm: stats.samples(values) for arm, values in speeds.items()},
        "ratios": ratios,
        "stall_share": {"value": waited, "target": MAX_STALL_SHARE},
        "stall_us": stats.distribution([step["stall_us"] for step in steps]),
        "io_us": stats.distribution([step["io_us"] for step in steps]),
    }


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    table = Table(title=f"decode, {result['config']['shape']}, {result['config']['tokens']} tokens")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    for arm, speed in result["tokens_per_s"].items():
        label = "dense graph from Python" if arm == "python" else f"harness, {arm}"
        table.add_row(f"{label}, tokens/s", f"{speed['mean']:.2f} ± {speed['sd'] or 0:.2f}", "")
    for name, ratio in result["ratios"].items():
        table.add_row(f"{name}, median of pairs", stats.ratio_text(ratio), f"≥ {ratio['target']}")
    share = result["stall_share"]
    table.add_row("stall, share of a MeKi step", f"{share['value']:.3%}", f"< {share['target']:.0%}")
    for key in ("stall_us", "io_us"):
        label = f"{key.removesuffix('_us')} a token, p50 / p99"
        table.add_row(label, f"{result[key]['p50']:.0f} / {result[key]['p99']:.0f} µs", "")
    console.stdout.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick trial: 4 layers, a tenth of the vocabulary")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table-precision", default="fp16")
    parser.add_argument("--scratch", type=Path, default=Path("build/benchmarks/decode"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/decode.json"))
    arguments = parser.parse_args()
    shape = "small" if arguments.small else "Qwen3-0.6B"
    scratch = arguments.scratch / f"{shape}-{arguments.table_precision}"
    config = qwen3_06b(small=arguments.small)
    bundles = {
        name: open_bundle(build(scratch, name, config, precision=arguments.table_precision))
        for name in ("dense", "meki")
    }
    ids = np.array(tokens.open_shards(scratch / "tokens").validation[: arguments.tokens])
    measured = measure(bundles, ids, scratch, arguments.threads, arguments.rounds)
    setup = {
        "shape": shape,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "table_precision": arguments.table_precision,
        "context_length": CONTEXT_LENGTH,
        "onnxruntime": onnxruntime.__version__,
    }
    result = summarize(measured, setup)
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
