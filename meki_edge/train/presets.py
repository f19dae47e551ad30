"""Named model shapes, and memories placed in them.

The Qwen3 shapes are those of Hugging Face's ``config.json`` files (RoPE base 1e6), so published
weights initialise them; the memory widths are MeKi's (m = 128, 256, 512). MeKi's own models were
trained from scratch with a RoPE base of 5e5.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from meki_edge import memory as memory_kinds
from meki_edge.errors import UserError, nearest
from meki_edge.files import read_json
from meki_edge.model import config as model_config
from meki_edge.model.config import MemoryPlacement, ModelConfig
from meki_edge.model.placement import paper_placement
from meki_edge.train.initialize import require_training_form


def _qwen3(hidden_size: int, intermediate_size: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
}
NO_MEMORY = "none"
"""In the place of a memory's kind: none, whatever the checkpoint has."""
MEMORY_DIMS = {"demo": 64, "qwen3-0.6b": 128, "qwen3-1.7b": 256, "qwen3-4b": 512}


def build(
    preset: str,
    vocab_size: int,
    *,
    memory: str | None = None,
    layers: tuple[int, ...] | None = None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> ModelConfig:
    """The model of ``preset`` for a vocabulary, with a memory or dense.

    Args:
        preset: a key of ``SHAPES``.
        vocab_size: rows of the embedding; the tokenizer's size, or more.
        memory: a memory kind, or None for the dense twin.
        layers: the 0-based layers that get the memory; default: as its paper places it.
        options: the memory's options; ``memory_dim`` defaults to the preset's.
        changes: other fields of :class:`ModelConfig`, such as ``max_position_embeddings``.

    Raises:
        UserError: an unknown preset, field, memory or option, or sizes that do not fit.
    """
    if preset not in SHAPES:
        raise UserError(
            f"unknown preset {preset!r}{nearest(preset, SHAPES)}", where="--preset", fix=f"use {', '.join(SHAPES)}"
        )
    dense = model_config.parse({**SHAPES[preset], "vocab_size": vocab_size, **changes}, f"preset {preset}")
    return _placed(dense, memory, layers=layers, options=options, preset=preset)


def from_config(
    path: Path,
    *,
    memory: str | None = None,
    layers: tuple[int, ...] | None = None,
    options: dict[str, Any] | None = None,
) -> ModelConfig:
    """The model of a ``config.json``, with one more memory if ``memory`` names one."""
    parsed = model_config.parse(read_json(path), path)
    return _placed(parsed, memory, layers=layers, options=options)


def from_checkpoint(
    directory: Path,
    *,
    memory: str | None = None,
    layers: tuple[int, ...] | None = None,
    options: dict[str, Any] | None = None,
) -> ModelConfig:
    """The model that goes on from a checkpoint directory (``init_from``), with its memories or with ``memory`` instead.

    If ``memory`` is the kind that the checkpoint has, layers and options that are not given are the checkpoint's, so
    that naming the kind alone changes nothing. :data:`NO_MEMORY` leaves them out.

    Raises:
        UserError: the checkpoint is in ROM form, or the memory does not fit it.
    """
    path = directory / model_config.FILE_NAME
    parsed = from_config(path)
    require_training_form(parsed, path)
    if memory is None:
        return parsed
    if [placement.kind for placement in parsed.memories] == [memory]:
        (placement,) = parsed.memories
        layers = placement.layers if layers is None else layers
        options = {**placement.options, **(options or {})}
    return _placed(dataclasses.replace(parsed, memories=()), memory, layers=layers, options=options)


def _placed(model: ModelConfig, memory: str | None, **placement: Any) -> ModelConfig:
    return model if memory in (None, NO_MEMORY) else with_memory(model, memory, **placement)


def with_memory(
    model: ModelConfig,
    memory: str,
    *,
    layers: tuple[int, ...] | None = None,
    options: dict[str, Any] | None = None,
    preset: str | None = None,
) -> ModelConfig:
    """``model`` with one more memory; layers and options that are not given are its paper's."""
    paper_layers, paper_options = paper_placement(memory, model)
    options = dict(options or {})
    if preset is not None and memory in memory_kinds.KINDS:
        fields = {field.name for field in dataclasses.fields(memory_kinds.KINDS[memory][0])}
        if "memory_dim" in fields:
            options.setdefault("memory_dim", MEMORY_DIMS[preset])
    chosen = paper_layers if layers is None else layers
    placement = MemoryPlacement(kind=memory, layers=chosen, options={**paper_options, **options})
    return model_config.check(dataclasses.replace(model, memories=(*model.memories, placement)), f"--memory {memory}")


def check_experts(model: ModelConfig, num_experts: int, num_experts_per_tok: int) -> None:
    """Raise :class:`UserError` unless ``model``, a checkpoint's, has these experts: they cannot be added to one."""
    if model.num_experts is None:
        raise UserError(
            "a mixture of experts cannot start from a dense checkpoint",
            where="--moe, --init-from",
            fix="leave out --moe, or leave out --init-from and give the shape with --preset or --config",
        )
    if (model.num_experts, model.num_experts_per_tok) != (num_experts, num_experts_per_tok):
        raise UserError(
            f"the checkpoint has {model.num_experts} experts of which a token uses {model.num_experts_per_tok}, "
            f"not {num_experts} and {num_experts_per_tok}",
            where="--moe, --init-from",
            fix="leave out --moe: the checkpoint says how many there are",
        )


def with_moe(model: ModelConfig, num_experts: int, num_experts_per_tok: int) -> ModelConfig:
    """``model`` with ``num_experts`` experts a layer in place of its FFN, as large together as that FFN when active.

    So a token goes through as many parameters as in the dense model, and the router's. Routing is
    Qwen3-MoE's: the chosen experts' weights sum to one.

    Raises:
        UserError: the FFN's width does not divide among the chosen experts, or a count that cannot be.
    """
    if num_experts_per_tok < 1 or model.intermediate_size % num_experts_per_tok:
        raise UserError(
            f"the FFN's {model.intermediate_size} neurons (intermediate_size) do not divide "
            f"among {num_experts_per_tok} active experts",
            where="--moe",
            fix="choose a number that divides them, so that active parameters equal the dense model's",
        )
    changes = {
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "moe_intermediate_size": model.intermediate_size // num_experts_per_tok,
        "norm_topk_prob": True,
    }
    return model_config.check(dataclasses.replace(model, **changes), "--moe")
