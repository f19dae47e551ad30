"""What a model starts from: its memories' addresses, and perhaps a checkpoint.

The checkpoint may be one of ours, or Hugging Face's Qwen3 as it is. A model with the very memories
of the checkpoint takes them over. All others start fresh, except that each may initialise itself
from the dense layer it joins (:meth:`MemoryLayer.upcycle`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from meki_edge import console, manifest
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.model import config as model_config
from meki_edge.model.checkpoint import EMBEDDING, HEAD, Checkpoint, weight_files
from meki_edge.model.config import MemoryPlacement, ModelConfig
from meki_edge.model.decoder import CausalLM
from meki_edge.tokenizer import load, read_tokenizer
from meki_edge.tokens import TOKENIZER, TokenShards

# Fields that change the mathematics without changing a tensor's shape.
_SAME = (
    "rope_theta",
    "rms_norm_eps",
    "tie_word_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts_per_tok",
    "norm_topk_prob",
)


def input_files(directory: Path) -> dict[str, Path]:
    """What a manifest records of the checkpoint: its directory, or its files if it has no manifest."""
    if (directory / manifest.FILE_NAME).is_file():
        manifest.verify(directory, manifest.load(directory, stages=("train", "reparam")))
        return {"init_from": directory}
    names = [model_config.FILE_NAME, *weight_files(directory)]
    for name in names:
        if not (directory / name).is_file():
            raise UserError(
                f"{name} is missing",
                where=directory,
                fix="give a checkpoint directory with config.json and model.safetensors",
            )
    return {f"init_from/{name}": directory / name for name in names}


def check_tokenizer(directory: Path, shards: TokenShards) -> None:
    """Refuse a checkpoint whose ``tokenizer.json`` has another vocabulary than the token shards'."""
    path = directory / TOKENIZER
    if not path.is_file():
        console.info(f"{directory} has no tokenizer.json: whether its ids mean the same tokens is not checked")
        return
    if sha256_file(path) == shards.tokenizer_sha256:
        return
    if read_tokenizer(path).get_vocab() != read_tokenizer(shards.directory / TOKENIZER).get_vocab():
        raise UserError(
            "the checkpoint's tokenizer has another vocabulary than the one the text was tokenized with",
            where=path,
            fix=f"tokenize again with --tokenizer {path}",
        )


def prepare_memories(model: CausalLM, shards: TokenShards) -> None:
    """Let each memory set up its addressing from the training text and the tokenizer."""
    placements = model.config.memories
    if not placements:
        return
    tokenizer = load(shards.directory / TOKENIZER, eos_token=shards.eos_token_id)
    for index, placement in enumerate(placements):
        layers = []
        for layer in placement.layers:
            number = sum(layer in earlier.layers for earlier in placements[:index])
            layers.append(model.model.layers[layer].memories[number])
        type(layers[0]).prepare(layers, shards.train, tokenizer)


def require_training_form(model: ModelConfig, path: Path) -> None:
    """Raise :class:`UserError` if ``model``, of the checkpoint's ``config.json`` ``path``, is in ROM form."""
    if model.folded:
        raise UserError(
            "the checkpoint is in ROM form: its memories are folded and cannot be trained further",
            where=path,
            fix="start from the checkpoint that `meki-edge reparam` read (its manifest.json names it)",
        )


@torch.no_grad()
def start_from(model: CausalLM, directory: Path) -> bool:
    """Copy what ``directory`` was trained to into ``model``, and say whether its memories came along.

    They do, addresses included, if both have the very same ones. If not, those of the checkpoint are
    left out, and the model's start fresh or upcycle.

    Raises:
        UserError: the checkpoint is in ROM form, a tensor is missing or has another shape, or a
            field of ``config.json`` that changes the mathematics differs.
    """
    with Checkpoint(directory) as checkpoint:
        require_training_form(checkpoint.config, directory / model_config.FILE_NAME)
        _check_config(model, checkpoint)
        theirs, ours = checkpoint.config.memories, model.config.memories
        kept = bool(theirs) and theirs == ours
        for name, target in model.state_dict().items():
            if (".memories." in name and not kept) or (name == HEAD and model.config.tie_word_embeddings):
                continue
            _copy(checkpoint, name, target)
        if kept:
            console.info(f"training goes on with the checkpoint's memories ({_named(theirs)})")
            return True
        _upcycle(model, checkpoint)
        if theirs:
            rest = f"the model's ({_named(ours)}) start fresh" if ours else "the model has none"
            console.info(f"the checkpoint's memories ({_named(theirs)}) are left out: {rest}")
    return False


def _copy(checkpoint: Checkpoint, name: str, target: Tensor) -> None:
    if name not in checkpoint.names:
        keep = ", or keep its memories, which may stand in place of the tensor" if checkpoint.config.memories else ""
        raise UserError(
            f"the tensor {name!r} is missing",
            where=checkpoint.directory,
            fix=f"give a checkpoint of the same shape{keep}",
        )
    if checkpoint.shape(name) != tuple(target.shape):
        raise UserError(
            f"the tensor {name!r} has shape {checkpoint.shape(name)}, the model asks for {tuple(target.shape)}",
            where=checkpoint.directory,
            fix="give a checkpoint of the same shape, or take the model's shape from it",
        )
    target.copy_(checkpoint.read(name))


def _upcycle(model: CausalLM, checkpoint: Checkpoint) -> None:
    """Let each memory initialise itself from the backbone's tensors of its layer."""
    embeddings = checkpoint.read(EMBEDDING)
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        names = [name for name in checkpoint.names if name.startswith(prefix) and ".memories." not in name]
        donor = {name.removeprefix(prefix): checkpoint.read(name) for name in names} if layer.memories else {}
        for memory in layer.memories:
            try:
                memory.upcycle(donor, embeddings)
            except KeyError as missing:  # another memory stood in its place
                name = prefix + missing.args[0]
                raise UserError(
                    f"{memory.kind} starts from the tensor {name!r}, which the checkpoint does not have",
                    where=checkpoint.directory,
                    fix="start from a dense checkpoint, or keep the checkpoint's memories as they are",
                ) from None


def _named(memories: tuple[MemoryPlacement, ...]) -> str:
    return ", ".join(f"{memory.kind} in layers {', '.join(map(str, memory.layers))}" for memory in memories)


def _check_config(model: CausalLM, checkpoint: Checkpoint) -> None:
    for name in _SAME:
        theirs, ours = getattr(checkpoint.config, name), getattr(model.config, name)
        if theirs != ours:
            raise UserError(
                f"{name} is {theirs} in the checkpoint and {ours} in the model",
                where=checkpoint.directory / model_config.FILE_NAME,
                fix="take the model's shape from the checkpoint",
            )
