"""`meki-edge train`: a decoder with memories, or its dense twin, from token shards.

Two runs that differ only in the memories start from the same backbone (same seed), see the same
batches in the same order and stop after the same number of tokens. A run that is killed at any
moment resumes from its newest checkpoint to the same losses, bit for bit on the same machine.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meki_edge import config as config_module
from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import require_free_space, storage_errors
from meki_edge.manifest import Manifest, StageOutput
from meki_edge.model import config as model_config
from meki_edge.model.checkpoint import WEIGHTS, save_model
from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import CausalAttention, CausalLM
from meki_edge.model.validation import validation_loss
from meki_edge.tokens import TOKENIZER, TRAIN, TokenShards, open_shards
from meki_edge.train import checkpointing, initialize, log as metrics_log
from meki_edge.train.attention import MAX_TOKENS, MatmulAttention
from meki_edge.train.config import TrainConfig, check, resolve_device, resolve_precision
from meki_edge.train.cross_entropy import head_cross_entropy
from meki_edge.train.data import TrainingWindows
from meki_edge.train.interrupt import Interrupt
from meki_edge.train.log import MetricsLog
from meki_edge.train.optimizer import build_optimizer, clip_gradients, set_learning_rate
from meki_edge.train.plot import loss_plot
from meki_edge.train.schedule import learning_rate

METRICS = "metrics.jsonl"
PLOT = "loss.svg"
CHECKPOINTS = "checkpoints"
RUNNING_LOG = "running.jsonl"  # METRICS while the run lasts: a resume finds it even if finishing was cut short


def train(
    tokens: Path,
    out: Path,
    model: ModelConfig,
    config: TrainConfig,
    *,
    init_from: Path | None = None,
    force: bool = False,
) -> Manifest:
    """Train ``model`` on the token shards ``tokens`` and write a checkpoint directory to ``out``.

    Args:
        tokens: the output of `meki-edge tokenize`.
        out: the output directory: ``config.json``, ``model.safetensors``, ``tokenizer.json``,
            ``metrics.jsonl``, ``loss.svg``.
        model: a dense model, or one with memories in training form.
        config: how to train.
        init_from: a checkpoint directory (ours, or Hugging Face's Qwen3) whose backbone is the
            starting point; memories start fresh.
        force: replace an earlier result, or an unfinished run of another configuration.

    Raises:
        UserError: bad options, a tokenizer larger than the model's vocabulary, too little text,
            a checkpoint that does not fit, or a loss that is no longer finite.
        KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM, after a checkpoint was written.
    """
    check(config)
    shards = open_shards(tokens)
    model = _fitting(model, shards, config)
    inputs = {"tokens": tokens}
    if init_from is not None:
        initialize.check_tokenizer(init_from, shards)
        inputs |= initialize.input_files(init_from)
    output = StageOutput(
        out,
        stage="train",
        config={"model": model_config.to_json(model), **config_module.to_dict(config)},
        inputs=inputs,
        tools=("torch", "numpy"),
        force=force,
    )
    if output.complete is not None:
        return output.complete
    run = Run(model, config, shards, output.partial, init_from)
    run.finish_training()
    save_model(output.partial, run.model)
    with storage_errors(output.partial):
        shutil.copyfile(shards.directory / TOKENIZER, output.partial / TOKENIZER)
        shutil.copyfile(output.partial / RUNNING_LOG, output.partial / METRICS)
    lines = metrics_log.read(output.partial / METRICS)
    loss_plot(lines, output.partial / PLOT)
    return output.finish(
        roles={
            model_config.FILE_NAME: "config",
            WEIGHTS: "weights",
            TOKENIZER: "tokenizer",
            METRICS: "metrics",
            PLOT: "plot",
        },
        metrics=run.summary(lines),
    )


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
            initialize.prepare_memories(self.model, shards)
            if init_from is not None:
                initialize.initialize_backbone(self.model, init_from)
        self.model.to(self._device)
        self._optimizer = build_optimizer(
            self.model,
            weight_decay=config.weight_decay,
            betas=(config.beta1, config.beta2),
            epsilon=config.epsilon,
        )
        if state is not None:
            state.restore(self.model, self._optimizer)
            self._done, self._seconds = state.step, state.seconds
            console.info(f"resuming after step {self._done} of {config.steps}")
        self._attention = self._choose_attention(model)

    def finish_training(self) -> None:
        """Train from the current step to the last."""
        if self._done == self._config.steps:
            return
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
        rate = learning_rate(
            self._done,
            peak=config.learning_rate,
            minimum_ratio=config.minimum_learning_rate_ratio,
            warmup_steps=config.warmup_steps,
            steps=config.steps,
        )
        loss, grad_norm = self._step(rate)
        self._done += 1
        seconds = time.perf_counter() - started
        self._seconds += seconds
        step_tokens = config.batch_size * config.window_length
        report(
            {
                "step": self._done,
                "loss": loss,
                "learning_rate": rate,
                "grad_norm": grad_norm,
                "tokens": self._done * step_tokens,
                "tokens_per_s": round(step_tokens / seconds, 1),
            }
        )
        if self._done % config.validate_every == 0 or self._done == config.steps:
            report({"step": self._done, "validation_loss": validation_loss(self.model, self._validation)})

    def _step(self, rate: float) -> tuple[float, float]:
        """Gradients of one batch, clipped and applied; the batch's loss and gradient norm."""
        config = self._config
        batch = torch.from_numpy(self._windows.batch(self._done, config.batch_size)).to(self._device)
        parts = batch.chunk(config.gradient_accumulation_steps)
        total = torch.zeros((), device=self._device)
        for part in parts:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
                hidden = self.model.final_hidden(part[:, :-1], self._attention)
                loss = head_cross_entropy(hidden.flatten(0, 1), self.model.lm_head.weight, part[:, 1:].flatten())
            (loss / len(parts)).backward()
            total += loss.detach() / len(parts)
        norm = clip_gradients(self.model, config.clip_norm)
        value, norm_value = total.item(), norm.item()
        if not (math.isfinite(value) and math.isfinite(norm_value)):
            raise UserError(
                f"training diverged at step {self._done + 1}: loss {value}, gradient norm {norm_value}",
                where=self._log_path,
                fix="lower --learning-rate, raise --warmup-steps or use --precision fp32, and start over with --force",
            )
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return value, norm_value

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


def _fitting(model: ModelConfig, shards: TokenShards, config: TrainConfig) -> ModelConfig:
    """``model`` with the shards' EOS if it names none; refuse one that does not fit."""
    if model.folded:
        raise UserError(
            "the model is in ROM form; only the training form can be trained",
            where=model_config.FILE_NAME,
            fix="set memory_form to 'training'",
        )
    if shards.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {shards.vocab_size} tokens, the model's vocabulary {model.vocab_size}",
            where=shards.directory / TOKENIZER,
            fix=f"give the model a vocab_size of at least {shards.vocab_size}, or use its own tokenizer",
        )
    if shards.vocab_size < model.vocab_size:
        spare = model.vocab_size - shards.vocab_size
        console.info(f"the model has {spare} ids more than the tokenizer; those rows are never trained")
    if config.window_length > model.max_position_embeddings:
        raise UserError(
            f"windows of {config.window_length} tokens, but max_position_embeddings is {model.max_position_embeddings}",
            where="training options",
            fix="shorten the windows or raise max_position_embeddings",
        )
    if model.eos_token_id is None:
        return dataclasses.replace(model, eos_token_id=shards.eos_token_id)
    return model
