"""The harness's decoding beside that of other runtimes: the same weights, precision and threads.

    pip install onnxruntime-genai                # wheels
    pip install llama-cpp-python gguf            # compiles llama.cpp: 20 minutes on 2 cores
    python benchmarks/peers.py                   # 23 GB of scratch space, 20 minutes
    python benchmarks/peers.py --small           # a quick trial

(In an environment that has meki-edge; a peer that is not installed is left out with a line.)

Two dense models with random weights, in the Qwen3 architecture: the shape of Qwen3-0.6B, and that of
SmolLM2-135M. Each is exported and packed for the harness, turned into a model of onnxruntime-genai
by its own builder (`-p fp32 -e cpu`: com.microsoft GroupQueryAttention), and written as GGUF for
llama.cpp (f32 weights and KV cache; f16 of both beside it, for what it is worth). A prompt's
continuation tells how many tokens each has in common with the harness. Then the arms take turns, the
order reversed every second round, and what counts is the median of the rounds' paired ratios.

The harness's graphs have static shapes, as an NPU needs them: they attend to every slot of the KV
cache, the peers' only to those in use. So the harness is measured twice: with shorter contexts, in the
first of which these texts stay, and with all slots of the longest one from the first token on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decode import CONTEXT_LENGTH, bench
from peer_runtimes import Genai, LlamaCpp, Peer, build_genai, build_gguf
from reparam import qwen3_06b, write_checkpoint, write_tokens
from rich.table import Table

from export.graph import ExportConfig, export
from meki_edge import console, tokens
from meki_edge.device import host, runner, stats
from meki_edge.device.bundle import open_bundle
from meki_edge.device.pack import PackConfig, pack
from meki_edge.files import write_json
from meki_edge.manifest import FILE_NAME
from meki_edge.model.config import ModelConfig

HARNESS, ONE_CONTEXT = "harness", "harness, one context"
SHORTER_CONTEXTS = (256, 512)
OURS = (HARNESS, ONE_CONTEXT)
TARGETS = {("Qwen3-0.6B", HARNESS, "genai"): 1.0}
PROMPT_TOKENS, CHECKED_TOKENS = 4, 8
PACKAGES = ("onnxruntime", "onnxruntime-genai", "llama-cpp-python")
INSTALL = {
    "onnxruntime_genai": "pip install onnxruntime-genai",
    "llama_cpp": "pip install llama-cpp-python",
    "gguf": "pip install gguf",
}


def shapes(*, small: bool) -> dict[str, ModelConfig]:
    """The models, without their weights; ``small``: 4 layers and a tenth of the vocabulary."""
    qwen = replace(qwen3_06b(small=small), memories=())
    smollm = replace(
        qwen,
        vocab_size=4_096 if small else 49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4 if small else 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=1e5,
    )
    return {"Qwen3-0.6B": qwen, "SmolLM2-135M": smollm}


class Harness:
    """The harness, a process a measurement."""

    def __init__(self, bundle: Path, scratch: Path, trace: np.ndarray, threads: int) -> None:
        self._bundle, self._threads = bundle, threads
        self._trace, self._prompt = scratch / "trace.txt", scratch / "prompt.txt"
        self._trace.write_text("\n".join(map(str, trace)))

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        self._prompt.write_text("\n".join(map(str, prompt)))
        arguments = ["generate", "--bundle", str(self._bundle), "--prompt-file", str(self._prompt)]
        arguments += ["--max-new-tokens", str(count), "--threads", str(self._threads)]
        return runner.run_json(arguments)["generated_tokens"]

    def tokens_per_s(self, count: int) -> float:
        test = bench(self._bundle, self._trace, count, self._threads)
        return 1e6 * test["num_tokens"] / test["elapsed_us"]


def build_bundle(scratch: Path, checkpoint: Callable[[], Path], tokens_dir: Path, shorter: tuple[int, ...]) -> Path:
    """The bundle for the harness; without shorter contexts the one of benchmarks/decode.py serves as well."""
    suffix = "-contexts" if shorter else ""
    bundle = scratch / f"bundle-dense{suffix}"
    if not (bundle / FILE_NAME).is_file():
        graphs = scratch / f"export-dense{suffix}"
        shape = ExportConfig(context_length=CONTEXT_LENGTH, shorter_contexts=shorter, verify_tokens=130)
        export(checkpoint(), tokens_dir, graphs, shape)
        pack(graphs, checkpoint(), bundle, PackConfig(name="dense"))
        shutil.rmtree(graphs)
    return bundle


def open_arms(name: str, config: ModelConfig, arguments: argparse.Namespace) -> dict[str, Peer]:
    """Every runtime that is installed, with this model in it."""
    scratch = arguments.scratch / (f"{name}-small" if arguments.small else f"{name}-fp16")
    tokens_dir = scratch / "tokens"
    if not (tokens_dir / FILE_NAME).is_file():
        write_tokens(tokens_dir, config.vocab_size)

    def checkpoint() -> Path:
        """The weights; what is packed needs them no more, so they are written only when asked for."""
        directory = scratch / "checkpoint-peers"
        if not (directory / FILE_NAME).is_file():
            console.info(f"{name}: writing random weights")
            write_checkpoint(directory, config, tokens_dir)
        return directory

    trace = np.array(tokens.open_shards(tokens_dir).validation[: arguments.tokens])
    arms: dict[str, Peer] = {}
    for arm, shorter in ((HARNESS, SHORTER_CONTEXTS), (ONE_CONTEXT, ())):
        bundle = build_bundle(scratch, checkpoint, tokens_dir, shorter)
        open_bundle(bundle)
        arms[arm] = Harness(bundle, scratch, trace, arguments.threads)
    if _installed("onnxruntime_genai"):
        arms["genai"] = Genai(build_genai(scratch, checkpoint), arguments.threads, CONTEXT_LENGTH)
    if _installed("llama_cpp") and _installed("gguf"):
        for half in (False, True):
            path = build_gguf(scratch, checkpoint, half=half)
            peer = LlamaCpp(path, arguments.threads, CONTEXT_LENGTH, half=half)
            arms[f"llama.cpp {'f16' if half else 'f32'}"] = peer
    shutil.rmtree(scratch / "checkpoint-peers", ignore_errors=True)
    return arms


def _installed(module: str) -> bool:
    if importlib.util.find_spec(module) is None:
        console.info(f"{module} is left out, it is not installed: {INSTALL[module]}")
        return False
    return True


def measure(name: str, arms: dict[str, Peer], config: ModelConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Agreement, then ``rounds`` interleaved measurements of every arm."""
    prompt = np.random.default_rng(1).integers(config.vocab_size, size=PROMPT_TOKENS).tolist()
    wanted = arms[HARNESS].generate(prompt, CHECKED_TOKENS)
    same = {arm: _agreement(wanted, peer.generate(prompt, CHECKED_TOKENS)) for arm, peer in arms.items()}
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    with console.progress("{task.fields[arm]}") as bar:
        task = bar.add_task(name, total=arguments.rounds * len(arms), arm="")
        for index in range(arguments.rounds):
            for arm in list(arms) if index % 2 == 0 else list(arms)[::-1]:
                bar.update(task, arm=arm)
                speeds[arm].append(arms[arm].tokens_per_s(arguments.tokens))
                bar.advance(task)
    return {
        "same_tokens": same,
        "tokens_per_s": {arm: stats.samples(values) for arm, values in speeds.items()},
        "ratios": {
            ours: {
                arm: {**stats.paired_ratio(speeds[ours], values), "target": TARGETS.get((name, ours, arm))}
                for arm, values in speeds.items()
                if arm not in OURS
            }
            for ours in OURS
        },
    }


def _agreement(wanted: list[int], found: list[int]) -> int:
    """How many tokens are the same before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b), len(wanted))


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    config = result["config"]
    title = f"decoding, dense, {config['threads']} threads, {config['tokens']} tokens a round"
    table = Table(title=f"{title}, context {config['context_length']}")
    ratios = [f"{ours} / it, median of pairs" for ours in OURS]
    for heading in ("shape", "runtime", "same tokens", "tokens/s", *ratios):
        table.add_column(heading, justify="left" if heading in ("shape", "runtime") else "right")
    for name, found in result["shapes"].items():
        for arm, speed in found["tokens_per_s"].items():
            table.add_row(
                name,
                arm,
                f"{found['same_tokens'][arm]} of {CHECKED_TOKENS}",
                f"{speed['mean']:.2f} ± {speed['sd'] or 0:.2f}",
                *(_cell(found["ratios"][ours].get(arm)) for ours in OURS),
            )
    console.show_wide(table)


def _cell(ratio: dict[str, Any] | None) -> str:
    """A paired ratio with its interval and target."""
    if ratio is None:
        return ""
    target = "" if ratio["target"] is None else f", target ≥ {ratio['target']}"
    return f"{stats.ratio_text(ratio)}{target}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick trial: 4 layers, a tenth of the vocabulary")
    parser.add_argument("--shape", choices=list(shapes(small=True)), help="this shape only")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path("build/benchmarks/decode"), help="as for decode.py")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/peers.json"))
    arguments = parser.parse_args()
    chosen = {k: v for k, v in shapes(small=arguments.small).items() if arguments.shape in (None, k)}
    measured = {}
    for name, config in chosen.items():
        arms = open_arms(name, config, arguments)
        measured[name] = measure(name, arms, config, arguments)
    installed = {package.metadata["Name"] for package in importlib.metadata.distributions()}
    result = {
        "config": {
            **{key: getattr(arguments, key) for key in ("small", "tokens", "threads")},
            "context_length": CONTEXT_LENGTH,
            "shorter_contexts": SHORTER_CONTEXTS,
        },
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES if name in installed},
        "host": host.facts(),
        "shapes": measured,
    }
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
