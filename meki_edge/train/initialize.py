"""What a model starts from: its memories' addresses, and perhaps another model's backbone.

The backbone may come from a checkpoint of ours, or from Hugging Face's Qwen3 as it is.

Memories start fresh, except that each may initialise itself from the dense layer it joins
(:meth:`MemoryLayer.upcycle`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from meki_edge import console, manifest
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.model import config as model_config
from meki_edge.model.checkpoint import EMBEDDING, HEAD, Checkpoint, weight_files
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


@torch.no_grad()
def initialize_backbone(model: CausalLM, directory: Path) -> None:
    """Copy the backbone of ``directory`` into ``model``, then let the memories upcycle.

    Raises:
        UserError: a tensor is missing or has another shape, or a field of ``config.json`` that
            changes the mathematics differs.
    """
    with Checkpoint(directory) as checkpoint:
        _check_config(model, checkpoint)
        for name, target in model.state_dict().items():
            if ".memories." in name or (name == HEAD and model.config.tie_word_embeddings):
                continue
            if name not in checkpoint.names:
                raise UserError(
                    f"the tensor {name!r} is missing", where=directory, fix="give a checkpoint of the same shape"
                )
            if checkpoint.shape(name) != tuple(target.shape):
                raise UserError(
                    f"the tensor {name!r} has shape {checkpoint.shape(name)}, the model asks for {tuple(target.shape)}",
                    where=directory,
                    fix="give a checkpoint of the same shape, or take the model's shape from it",
                )
            target.copy_(checkpoint.read(name))
        embeddings = checkpoint.read(EMBEDDING)
        for index, layer in enumerate(model.model.layers):
            prefix = f"model.layers.{index}."
            names = [name for name in checkpoint.names if name.startswith(prefix) and ".memories." not in name]
            if layer.memories:
                donor = {name.removeprefix(prefix): checkpoint.read(name) for name in names}
                for memory in layer.memories:
                    memory.upcycle(donor, embeddings)
        if checkpoint.config.memories:
            console.info("the checkpoint's memories are left out: memories start fresh")


def _check_config(model: CausalLM, checkpoint: Checkpoint) -> None:
    for name in _SAME:
        theirs, ours = getattr(checkpoint.config, name), getattr(model.config, name)
        if theirs != ours:
            raise UserError(
                f"{name} is {theirs} in the checkpoint and {ours} in the model",
                where=checkpoint.directory / model_config.FILE_NAME,
                fix="take the model's shape from the checkpoint",
            )
