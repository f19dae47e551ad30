"""One training run: steps, validation, checkpoints and the log, from wherever it stands to its end."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import require_free_space
from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import CausalAttention, CausalLM
from meki_edge.model.validation import validation_loss
from meki_edge.tokens import TRAIN, TokenShards
from meki_edge.train import checkpointing, initialize
from meki_edge.train.attention import MAX_TOKENS, MatmulAttention
from meki_edge.train.config import TrainConfig, resolve_device, resolve_precision
from meki_edge.train.cross_entropy import head_cross_entropy
from meki_edge.train.data import TrainingWindows
from meki_edge.train.interrupt import Interrupt
from meki_edge.train.log import MetricsLog
from meki_edge.train.optimizer import Norms, Optimizer

CHECKPOINTS = "checkpoints"
RUNNING_LOG = "running.jsonl"  # the metrics while the run lasts: a resume finds them even if finishing was cut short


class Run:
    """One training run: its model, optimizer and position, restored from the newest checkpoint."""

    def __init__(
        self, model: ModelConfig, config: TrainConfig, shards: TokenShards, directory: Path, init_from: Path | None
    ) -> None:
        self._config = config
        self._checkpoints = directory / CHECKPOINTS
        self._log_path = directory / RUNNING_LOG
        self._device = resolve_device(config)
        self._precision = resolve_precision(config, self._device)
        self._windows = TrainingWindows(
            shards.train, config.window_length, config.seed, where=shards.directory / TRAIN
        )
        self._validation = shards.validation_windows(config.validation_windows, config.window_length + 1)
        self._done = 0
        self._seconds = 0.0  # spent in training steps, over all resumes
        self.model = CausalLM(model)
        # Weights, gradient and two moments; three checkpoints lie on the disk while one is written.
        num_bytes = 4 * sum(parameter.numel() for parameter in self.model.parameters())
        require_free_space(directory, (3 * 3 + 1) * num_bytes, "training with checkpoints")
        state = checkpointing.load_newest(self._checkpoints)
        if state is None:
            self.model.reset_parameters(config.seed)
            if init_from is None or not initialize.start_from(self.model, init_from):
                initialize.prepare_memories(self.model, shards)
        self.model.to(self._device)
        self._optimizer = Optimizer(self.model, config)
        if state is not None:
            state.restore(self.model, self._optimizer)
            self._done, self._seconds = state.step, state.seconds
            console.info(f"resuming after step {self._done} of {config.steps}")
        self._attention = self._choose_attention(model)

    def finish_training(self) -> None:
        """Train from the current step to the last, and leave the model as it then is."""
        if self._done < self._config.steps:
            self._train()
        self._optimizer.settle()

    def _train(self) -> None:
        log = MetricsLog(self._log_path, self._done)
        columns = ("loss {task.fields[loss]}", "{task.fields[speed]}")
        try:
            with Interrupt() as interrupt, console.progress(*columns) as bar, warnings.catch_warnings():
                # Under autocast q/k norms get bfloat16 inputs and float32 gains, as is intended.
                warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
                task = bar.add_task("train", total=self._config.steps, completed=self._done, loss="", speed="")

                def report(line: dict[str, Any]) -> None:
                    log.append(line)
                    if "loss" in line:
                        bar.update(
                            task,
                            completed=line["step"],
                            loss=f"{line['loss']:.4f}",
                            speed=f"{line['tokens_per_s']:,.0f} tokens/s",
                        )
                    else:
                        console.info(f"step {line['step']}: validation loss {line['validation_loss']:.4f}")

                while self._done < self._config.steps and interrupt.received is None:
                    self._advance(report)
                    last = self._done == self._config.steps or interrupt.received is not None
                    if last or self._done % self._config.checkpoint_every == 0:
                        log.flush()
                        checkpointing.save(
                            self._checkpoints, self.model, self._optimizer, step=self._done, seconds=self._seconds
                        )
        finally:
            log.close()
        if self._done < self._config.steps:
            console.info(f"interrupted; step {self._done} is saved, and the same command resumes there")
            interrupt.reraise()

    def summary(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """The manifest's metrics, from the run's log."""
        config = self._config
        train_tokens = config.steps * config.batch_size * config.window_length
        return {
            "validation_loss": [line["validation_loss"] for line in lines if "validation_loss" in line][-1],
            "validation_tokens": len(self._validation) * config.window_length,
            "validation_windows": len(self._validation),
            "window_length": config.window_length,
            "train_tokens": train_tokens,
            "epochs": round(config.steps * config.batch_size / self._windows.num_windows, 3),
            "train_seconds": round(self._seconds, 3),
            "tokens_per_s": round(train_tokens / self._seconds, 1),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "ram_parameters": ram_parameters(self.model),
            "device": self._device.type,
            "precision": self._precision,
        }

    def _advance(self, report: Callable[[dict[str, Any]], None]) -> None:
        """One optimizer step and, when it is due, a validation."""
        config, started = self._config, time.perf_counter()
        loss, norms = self._step()
        rate = float(self._optimizer.rates[self._done])
        self._done += 1
        seconds = time.perf_counter() - started
        self._seconds += seconds
        step_tokens = config.batch_size * config.window_length
        report(
            {
                "step": self._done,
                "loss": loss,
                "learning_rate": rate,
                "grad_norm": norms.total.item(),
                **({} if norms.tables is None else {"table_grad_norm": norms.tables.item()}),
                "tokens": self._done * step_tokens,
                "tokens_per_s": round(step_tokens / seconds, 1),
            }
        )
        if self._done % config.validate_every == 0 or self._done == config.steps:
            report({"step": self._done, "validation_loss": validation_loss(self.model, self._validation)})

    def _step(self) -> tuple[float, Norms]:
        """Gradients of one batch, clipped and applied; the batch's loss and gradient norms."""
        config = self._config
        batch = torch.from_numpy(self._windows.batch(self._done, config.batch_size)).to(self._device)
        self._optimizer.begin(self._done, batch[:, :-1])
        parts = batch.chunk(config.gradient_accumulation_steps)
        total = torch.zeros((), device=self._device)
        for part in parts:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
                hidden = self.model.final_hidden(part[:, :-1], self._attention)
                loss = head_cross_entropy(hidden.flatten(0, 1), self.model.lm_head.weight, part[:, 1:].flatten())
            ((loss + self.model.auxiliary_loss()) / len(parts)).backward()
            total += loss.detach() / len(parts)
        norms = self._optimizer.clip()
        value = total.item()
        found = [norm.item() for norm in norms if norm is not None]
        if not all(map(math.isfinite, (value, *found))):
            raise UserError(
                f"training diverged at step {self._done + 1}: loss {value}, "
                f"gradient norm {' and '.join(map(str, found))}",
                where=self._log_path,
                fix="lower --learning-rate, raise --warmup-steps or use --precision fp32, and start over with --force",
            )
        self._optimizer.step()
        return value, norms

    def _choose_attention(self, model: ModelConfig) -> CausalAttention:
        length = self._config.window_length
        if self._device.type == "cpu" and self._precision == "bf16" and length <= MAX_TOKENS:
            return MatmulAttention(model, length)
        return CausalAttention(model, length, self._device)


def ram_parameters(model: CausalLM) -> int:
    """Parameters that stay in memory at inference: all but those that fold into the ROM."""
    folded = 0
    for layer in model.model.layers:
        for memory in layer.memories:
            kept = sum(parameter.numel() for _, parameter in memory.ram_parameters())
            folded += sum(parameter.numel() for parameter in memory.parameters()) - kept
    return sum(parameter.numel() for parameter in model.parameters()) - folded
