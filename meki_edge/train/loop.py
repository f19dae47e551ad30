"""`meki-edge train`: a decoder with memories, or its dense twin, from token shards.

Two runs that differ only in the memories start from the same backbone (same seed), see the same
batches in the same order and stop after the same number of tokens. A run that is killed at any
moment resumes from its newest checkpoint to the same losses, bit for bit on the same machine.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from meki_edge import config as config_module
from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import storage_errors
from meki_edge.manifest import Manifest, StageOutput
from meki_edge.model import config as model_config
from meki_edge.model.checkpoint import WEIGHTS, save_model
from meki_edge.model.config import ModelConfig
from meki_edge.tokens import TOKENIZER, TokenShards, open_shards
from meki_edge.train import initialize, log as metrics_log
from meki_edge.train.config import TrainConfig, check
from meki_edge.train.plot import loss_plot
from meki_edge.train.run import RUNNING_LOG, Run

METRICS = "metrics.jsonl"
PLOT = "loss.svg"


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
        init_from: a checkpoint directory (ours, or Hugging Face's Qwen3) whose weights are the
            starting point. Its memories are too if ``model`` has the very same; others start fresh.
            The optimizer starts anew.
        force: replace an earlier result, or an unfinished run of another configuration.

    Raises:
        UserError: bad options, a tokenizer larger than the model's vocabulary, too little text,
            a checkpoint that does not fit, or a loss that is no longer finite.
        KeyboardInterrupt, SystemExit: on SIGINT and SIGTERM, after a checkpoint was written.
    """
    config = check(config)
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
            where="--window-length",
            fix="shorten the windows, or take a model with a larger max_position_embeddings",
        )
    if model.eos_token_id is None:
        return dataclasses.replace(model, eos_token_id=shards.eos_token_id)
    return model
