"""How much memory and time folding takes, beside the bare matrix products of the projector.

    python benchmarks/reparam.py            # Qwen3-0.6B shape: about 9 GB of scratch space, some minutes
    python benchmarks/reparam.py --small    # a quick trial

Writes a checkpoint with random weights (streamed; it is never whole in memory), then

1. runs the whole stage, proof included, in a process of its own: seconds and peak resident memory;
2. folds slices of the vocabulary spread over all of it, each timed twice, interleaved: fold, encode
   and write, then only the projector's three products a layer at the same shapes. The ratio's
   median says what everything else costs. On one thread, so that other work on the machine, which
   makes threads wait for each other, does not decide it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from meki_edge import tokens
from meki_edge.files import write_json
from meki_edge.manifest import StageOutput
from meki_edge.model import config as model_config
from meki_edge.model.checkpoint import HEAD, TOKENIZER, WEIGHTS, Checkpoint
from meki_edge.model.config import MemoryPlacement, ModelConfig
from meki_edge.model.decoder import CausalLM
from meki_edge.model.row_spaces import row_spaces
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.reparam_fold import Folder
from meki_edge.rom.writer import RomWriter
from meki_edge.safetensors_io import SafetensorsWriter

WINDOWS, WINDOW_LENGTH = 4, 256
CHUNK_ROWS = ReparamConfig().chunk_rows
BLOCK_ROWS = 8192


def qwen3_06b(*, small: bool) -> ModelConfig:
    """The Qwen3-0.6B shape with MeKi of width 128 in every layer; ``small``: 4 layers, a tenth of the vocabulary."""
    return _qwen3(hidden_size=1024, intermediate_size=3072, memory_dim=128, small=small)


def qwen3_17b(*, small: bool) -> ModelConfig:
    """The Qwen3-1.7B shape with MeKi of width 256 in every layer; ``small`` as above."""
    return _qwen3(hidden_size=2048, intermediate_size=6144, memory_dim=256, small=small)


def _qwen3(*, hidden_size: int, intermediate_size: int, memory_dim: int, small: bool) -> ModelConfig:
    layers = 4 if small else 28
    meki = MemoryPlacement(kind="meki", layers=tuple(range(layers)), options={"memory_dim": memory_dim})
    shape = ModelConfig(
        vocab_size=16_384 if small else 151_936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1e6,
        memories=(meki,),
    )
    return model_config.check(shape, "benchmark")


def write_tokens(directory: Path, vocab_size: int, count: int = WINDOWS * (WINDOW_LENGTH + 1)) -> Path:
    """A tokens directory of ``count`` uniformly random ids a split: rows from everywhere in the table."""
    output = StageOutput(directory, stage=tokens.STAGE, config={}, inputs={})
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(output.partial / TOKENIZER))
    rng = np.random.default_rng(0)
    for name in (tokens.TRAIN, tokens.VALIDATION):
        rng.integers(0, vocab_size, count).astype("<u4").tofile(output.partial / name)
    roles = {TOKENIZER: "tokenizer", tokens.TRAIN: "train_tokens", tokens.VALIDATION: "validation_tokens"}
    output.finish(roles=roles, metrics={"token_bytes": 4, "vocab_size": vocab_size, "eos_token_id": 0})
    return directory


def write_checkpoint(directory: Path, config: ModelConfig, tokens_dir: Path) -> Path:
    """A training-form checkpoint with random float32 weights, written block by block."""
    output = StageOutput(directory, stage="train", config={}, inputs={"tokens": tokens_dir})
    write_json(output.partial / model_config.FILE_NAME, model_config.to_json(config))
    (output.partial / TOKENIZER).write_bytes((tokens_dir / TOKENIZER).read_bytes())
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in CausalLM(config).state_dict().items() if name != HEAD}
    rng = np.random.default_rng(1)
    with open(output.partial / WEIGHTS, "wb") as file:
        writer = SafetensorsWriter(file, {name: ("F32", shape) for name, shape in shapes.items()}, {"format": "pt"})
        for shape in shapes.values():
            if len(shape) < 2:
                writer.write(np.ones(shape, np.float32))
                continue
            for start in range(0, shape[0], BLOCK_ROWS):
                block = (min(BLOCK_ROWS, shape[0] - start), *shape[1:])
                writer.write(rng.standard_normal(block, np.float32) * np.float32(0.02))
        writer.finish()
    roles = {model_config.FILE_NAME: "config", WEIGHTS: "weights", TOKENIZER: "tokenizer"}
    output.finish(roles=roles, metrics={"validation_windows": WINDOWS, "window_length": WINDOW_LENGTH})
    return directory


def run_stage(checkpoint: Path, tokens_dir: Path, out: Path, precision: str) -> dict[str, Any]:
    """The whole stage, as the command line runs it."""
    start = time.perf_counter()
    done = reparam(checkpoint, tokens_dir, out, ReparamConfig(table_precision=precision))
    return {"seconds": time.perf_counter() - start, "peak_rss_bytes": peak_rss_bytes(), "metrics": done.metrics}


def run_slices(checkpoint: Path, scratch: Path, precision: str, samples: int) -> list[tuple[float, float]]:
    """(seconds to fold, encode and write, seconds of the bare products) of ``samples`` slices, interleaved."""
    torch.set_num_threads(1)
    pairs = []
    with Checkpoint(checkpoint) as opened:
        config = opened.config
        folder = Folder(opened, row_spaces(config)[0])
        products = _products(config)
        spec = replace(folder.rom_spec(precision, tokenizer_sha256="", source_sha256=""), num_rows=samples * CHUNK_ROWS)
        starts = np.linspace(0, config.vocab_size - CHUNK_ROWS, samples).astype(int).tolist()
        folder.fold(0, CHUNK_ROWS)
        with RomWriter(scratch / "slices.safetensors", spec) as writer:
            for start in starts:
                fold = _seconds(lambda start=start: writer.write(folder.fold(start, start + CHUNK_ROWS)))
                pairs.append((fold, _seconds(products)))
    return pairs


def peak_rss_bytes() -> int:
    """The high-water mark of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _products(config: ModelConfig) -> Callable[[], None]:
    """G's three matrix products for ``CHUNK_ROWS`` ids in every layer, and nothing else."""
    hidden, inner = config.hidden_size, config.hidden_size // 2
    width = config.memories[0].options["memory_dim"]
    embeddings, middle = torch.randn(CHUNK_ROWS, hidden), torch.randn(CHUNK_ROWS, inner)
    weights = [
        (torch.randn(inner, hidden), torch.randn(inner, hidden), torch.randn(width, inner))
        for _ in range(config.num_hidden_layers)
    ]

    def run() -> None:
        for gate, up, down in weights:
            embeddings @ gate.T
            embeddings @ up.T
            middle @ down.T

    run()
    return run


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(
    config: ModelConfig, precision: str, stage: dict[str, Any], pairs: list[tuple[float, float]]
) -> dict[str, Any]:
    """The result as JSON."""
    slices = math.ceil(config.vocab_size / CHUNK_ROWS)
    fold, products = (statistics.median(column) for column in zip(*pairs, strict=True))
    proof = stage["metrics"]["proof"]
    return {
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "table_precision": precision,
        "cpus": os.cpu_count(),
        "stage_seconds": stage["seconds"],
        "peak_rss_bytes": stage["peak_rss_bytes"],
        "rom_bytes": stage["metrics"]["rom_bytes"],
        "fold_seconds_one_thread": fold * slices,
        "products_seconds_one_thread": products * slices,
        "fold_over_products": statistics.median(a / b for a, b in pairs),
        "fold_over_products_samples": [a / b for a, b in pairs],
        "proof": proof,
    }


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    proof = result["proof"]
    size = f"{result['layers']} layers, {result['vocab_size']} ids, {result['table_precision']} rows"
    table = Table(title=f"reparam: {size}")
    table.add_column("what")
    table.add_column("value", justify="right")
    for what, value in (
        ("peak resident memory", f"{result['peak_rss_bytes'] / 1e9:.2f} GB"),
        ("whole stage (digests, copy, fold, proof)", f"{result['stage_seconds']:.1f} s"),
        ("fold, encode and write all rows, one thread", f"{result['fold_seconds_one_thread']:.1f} s"),
        ("the projector's bare products, one thread", f"{result['products_seconds_one_thread']:.1f} s"),
        ("ratio (median of interleaved slices)", f"{result['fold_over_products']:.3f}"),
        ("ROM file", f"{result['rom_bytes'] / 1e9:.2f} GB"),
        ("largest logit", f"{proof['logit_scale']:.3g}"),
        ("largest difference, float32 rows", f"{proof['difference_float32']:.2e}"),
        ("largest difference, stored rows", f"{proof['difference_coded']:.2e}"),
    ):
        table.add_row(what, value)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick trial")
    parser.add_argument("--table-precision", default="fp16")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/reparam.json"))
    parser.add_argument("--scratch", type=Path, help="where the checkpoint is written (default: the system's)")
    arguments = parser.parse_args()
    config = qwen3_06b(small=arguments.small)
    precision = arguments.table_precision
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as name:
        scratch = Path(name)
        tokens_dir = write_tokens(scratch / "tokens", config.vocab_size)
        checkpoint = write_checkpoint(scratch / "checkpoint", config, tokens_dir)
        # A fresh process for each part, so that peak memory is that part's own.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
            stage = pool.submit(run_stage, checkpoint, tokens_dir, scratch / "rom", precision).result()
            samples = 5 if arguments.small else 21
            pairs = pool.submit(run_slices, checkpoint, scratch, precision, samples).result()
    result = report(config, precision, stage, pairs)
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
