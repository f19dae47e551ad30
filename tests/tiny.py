"""Tiny models that tests all over the tree share."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from meki_edge import tokens
from meki_edge.manifest import StageOutput
from meki_edge.model.checkpoint import TOKENIZER, WEIGHTS, save_model
from meki_edge.model.config import FILE_NAME, ModelConfig, parse
from meki_edge.model.decoder import CausalLM, Rows
from meki_edge.train.initialize import prepare_memories

VOCAB_SIZE = 384
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
MEKI = [{"kind": "meki", "layers": [0, 1, 2], "options": {"memory_dim": 12}}]
# Every addressing: rows by identity, a ragged file, and a hashed one for each of two layers.
MIXED = [
    {"kind": "meki", "layers": [0, 2], "options": {"memory_dim": 6}},
    {"kind": "l3", "layers": [1], "options": {"max_entries": 8, "num_entries": 900}},
    {"kind": "engram", "layers": [0, 1], "options": {"table_size": 31, "memory_dim": 16, "num_heads": 2}},
    {"kind": "ple", "layers": [2], "options": {"memory_dim": 4}},
]
QUICK_CALIBRATION = {"samples": 5, "window_length": 40, "gate_windows": 2, "decode_steps": 3}


def tiny_config(memories: list | None = None, **changes: object) -> ModelConfig:
    """A three-layer model; ``memories`` as in ``config.json``."""
    return parse({**TINY, "memories": memories or [], **changes}, "tiny")


def write_checkpoint(directory: Path, config: ModelConfig, tokens_dir: Path, seed: int = 0) -> Path:
    """A checkpoint directory as `meki-edge train` leaves it, with random weights worth testing.

    Every parameter is perturbed, so that no norm gain, α or β is trivially one. Addresses come from
    the training text, as they do in training.
    """
    model = CausalLM(config)
    model.reset_parameters(seed)
    prepare_memories(model, tokens.open_shards(tokens_dir))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    output = StageOutput(directory, stage="train", config={"seed": seed}, inputs={"tokens": tokens_dir})
    save_model(output.partial, model)
    shutil.copyfile(tokens_dir / tokens.TOKENIZER, output.partial / TOKENIZER)
    backbone = sum(parameter.numel() for name, parameter in model.named_parameters() if ".memories." not in name)
    kept = [pair for layer in model.model.layers for memory in layer.memories for pair in memory.ram_parameters()]
    output.finish(
        roles={FILE_NAME: "config", WEIGHTS: "weights", TOKENIZER: "tokenizer"},
        metrics={
            "validation_loss": 6.0,
            "ram_parameters": backbone + sum(parameter.numel() for _, parameter in kept),
        },
    )
    return directory


def split_rows(model: CausalLM, flat: Tensor) -> Rows:
    """Dequantized ROM rows ``[..., row_dim]`` as each layer's memories take them, in ROM order."""
    dims = [[memory.row_dim for memory in layer.memories] for layer in model.model.layers]
    pieces = iter(flat.split([dim for layer in dims for dim in layer], dim=-1) if any(dims) else ())
    return [[next(pieces) for _ in layer] for layer in dims]
