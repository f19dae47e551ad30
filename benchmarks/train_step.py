"""What a training step costs as the vocabulary grows, and what the memory adds to it.

    python benchmarks/train_step.py            # about 5 minutes on 2 cores, 8 GB of memory
    python benchmarks/train_step.py --clock cpu    # where other programs run too: processor time of one thread

A batch touches few rows of a memory's table, so a step should cost the same whatever the table's
size. The output head and the token embedding do grow with the vocabulary, in every language model;
they are set apart in the first part: there the embedding is frozen (no gradient, no optimizer step)
and the loss is over the head's first 4096 rows. What is left is the backbone, the memory (MeKi in
every layer) and its optimizer. Beside it the same with tables in plain AdamW, whose gradients are
as large as the tables.

The second part times whole steps, head included: the dense backbone against the same with MeKi.

Every vocabulary sees the same batches: ids are drawn by Zipf's law from 16,384 types, which are
spread over the whole table. The arms take turns, one step each, in reverse order every second
round; what counts is the median of the rounds' paired ratios: step time against that of the
smallest vocabulary (within 10 %), MeKi's tokens/s against dense (at least 0.9).
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meki_edge import console
from meki_edge.device import host, stats
from meki_edge.files import write_json
from meki_edge.model.config import MemoryPlacement, ModelConfig
from meki_edge.model.decoder import CausalLM
from meki_edge.train.attention import MatmulAttention
from meki_edge.train.config import TrainConfig, resolve_precision
from meki_edge.train.cross_entropy import head_cross_entropy
from meki_edge.train.optimizer import Optimizer

VOCABULARIES = (16_384, 65_536, 151_936)
TYPES = VOCABULARIES[0]
HEAD_ROWS = 4096
FLAT_WITHIN, LEAST_SPEED = 0.1, 0.9
WARMUP = 2
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
MEKI = MemoryPlacement(kind="meki", layers=(0, 1, 2, 3), options={"memory_dim": 128})


class PlainAdamW:
    """The optimizer's interface over plain AdamW: what a step would cost with gradients as large as the tables."""

    def __init__(self, model: CausalLM, config: TrainConfig) -> None:
        self._model, self._clip_norm = model, config.clip_norm
        self._inner = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)

    def begin(self, step: int, ids: Tensor) -> None:
        """Nothing to prepare."""

    def tensors(self) -> dict[str, Tensor]:
        """The state that exists before the first step: none."""
        return {}

    def clip(self) -> None:
        """All gradients by one norm."""
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm, foreach=True)

    def step(self) -> None:
        """Every row of every table."""
        self._inner.step()
        self._inner.zero_grad()


class Arm:
    """A model in training whose steps are timed.

    Args:
        head_apart: freeze the embedding, and take the loss over ``HEAD_ROWS`` rows of the head.
    """

    def __init__(
        self,
        vocab_size: int,
        config: TrainConfig,
        optimizer: Callable[[CausalLM, TrainConfig], Any] = Optimizer,
        *,
        memory: bool,
        head_apart: bool,
    ) -> None:
        model_config = ModelConfig(vocab_size=vocab_size, memories=(MEKI,) if memory else (), **SHAPE)
        self._model = CausalLM(model_config)
        self._model.reset_parameters(0)
        self._model.lm_head.weight.requires_grad_(not head_apart)
        self._head_rows = HEAD_ROWS if head_apart else vocab_size
        self._optimizer = optimizer(self._model, config)
        for tensor in self._optimizer.tensors().values():
            tensor.zero_()  # a long run has written to every page; the first write to one is slow
        self._attention = MatmulAttention(model_config, config.window_length)
        self._precision = resolve_precision(config, torch.device("cpu"))
        self._places = torch.from_numpy(np.random.default_rng(1).permutation(vocab_size)[:TYPES])

    def step(self, number: int, types: Tensor, clock: Callable[[], float]) -> float:
        """Seconds of step ``number`` over a batch of ``types`` ``[B, T + 1]``."""
        batch = self._places[types]
        started = clock()
        self._optimizer.begin(number, batch[:, :-1])
        with torch.autocast("cpu", torch.bfloat16, enabled=self._precision == "bf16"):
            hidden = self._model.final_hidden(batch[:, :-1], self._attention)
            targets = batch[:, 1:].flatten() % self._head_rows
            loss = head_cross_entropy(hidden.flatten(0, 1), self._model.lm_head.weight[: self._head_rows], targets)
        loss.backward()
        self._optimizer.clip()
        self._optimizer.step()
        return clock() - started


def measure(description: str, arms: dict[str, Arm], config: TrainConfig, clock: str) -> dict[str, list[float]]:
    """Seconds of each arm's steps, but for the first ``WARMUP``."""
    generator = np.random.default_rng(0)
    chances = 1 / np.arange(1, TYPES + 1)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    with console.progress("{task.fields[arm]}") as bar, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")  # as in training
        task = bar.add_task(description, total=config.steps * len(arms), arm="")
        for number in range(config.steps):
            drawn = generator.choice(TYPES, (config.batch_size, config.window_length + 1), p=chances / chances.sum())
            for name in list(arms) if number % 2 == 0 else reversed(arms):
                bar.update(task, arm=name)
                elapsed = arms[name].step(number, torch.from_numpy(drawn), CLOCKS[clock])
                if number >= WARMUP:
                    seconds[name].append(elapsed)
                bar.advance(task)
    return seconds


def head_apart(config: TrainConfig, clock: str) -> dict[str, Any]:
    """Part one: everything but head and embedding."""
    optimizers = {"by rows": Optimizer, "plain AdamW": PlainAdamW}
    arms = {
        f"{vocab_size:,}, {name}": Arm(vocab_size, config, optimizer, memory=True, head_apart=True)
        for vocab_size in VOCABULARIES
        for name, optimizer in optimizers.items()
    }
    seconds = measure("head apart", arms, config, clock)
    return {
        name: {
            str(vocab_size): {
                "seconds": stats.distribution(seconds[f"{vocab_size:,}, {name}"]),
                "against_smallest": stats.paired_ratio(
                    seconds[f"{vocab_size:,}, {name}"], seconds[f"{VOCABULARIES[0]:,}, {name}"]
                ),
            }
            for vocab_size in VOCABULARIES
        }
        for name in optimizers
    }


def whole_steps(config: TrainConfig, clock: str) -> dict[str, Any]:
    """Part two: dense against MeKi, head included; each vocabulary's two arms alone in memory."""
    return {str(vocab_size): _pair(vocab_size, config, clock) for vocab_size in VOCABULARIES}


def _pair(vocab_size: int, config: TrainConfig, clock: str) -> dict[str, Any]:
    arms = {name: Arm(vocab_size, config, memory=name == "meki", head_apart=False) for name in ("dense", "meki")}
    seconds = measure(f"whole steps, {vocab_size:,}", arms, config, clock)
    return {
        **{name: stats.distribution(found) for name, found in seconds.items()},
        "speed": stats.paired_ratio(seconds["dense"], seconds["meki"]),
    }


def show(result: dict[str, Any]) -> None:
    """Both parts as tables."""
    rows = [
        [
            name,
            f"{int(vocab_size):,}",
            f"{1000 * found['seconds']['p50']:.0f}",
            stats.ratio_text(found["against_smallest"]),
        ]
        for name, by_vocabulary in result["head_apart"].items()
        for vocab_size, found in by_vocabulary.items()
    ]
    title = f"a step with MeKi, head and embedding apart (wanted by rows: {1 - FLAT_WITHIN} to {1 + FLAT_WITHIN})"
    console.show_table(title, ["table steps", "vocabulary", "ms, median", "against the smallest"], rows)
    step_tokens = result["config"]["batch_size"] * result["config"]["window_length"]
    rows = []
    for vocab_size, found in result["whole_steps"].items():
        speeds = (f"{step_tokens / found[name]['p50']:,.0f}" for name in ("dense", "meki"))
        rows.append([f"{int(vocab_size):,}", *speeds, stats.ratio_text(found["speed"])])
    title = f"whole steps (wanted: at least {LEAST_SPEED})"
    console.show_table(title, ["vocabulary", "dense, tokens/s", "MeKi, tokens/s", "MeKi / dense"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--window-length", type=int, default=256)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks/train_step.json"))
    arguments = parser.parse_args()
    if arguments.clock == "cpu":
        torch.set_num_threads(1)
    config = TrainConfig(
        steps=WARMUP + arguments.rounds,
        warmup_steps=0,
        batch_size=arguments.batch_size,
        window_length=arguments.window_length,
        precision=arguments.precision,
        device="cpu",
    )
    result = {
        "config": {**asdict(config), "shape": SHAPE, "memory": asdict(MEKI), "clock": arguments.clock},
        "host": {**host.facts(), "threads": torch.get_num_threads()},
        "head_apart": head_apart(config, arguments.clock),
        "whole_steps": whole_steps(config, arguments.clock),
    }
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
