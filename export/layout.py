"""Layout: what the exported graphs take and give, and which layers each part holds.

Names, roles and shapes are those that :mod:`meki_edge.graph_spec` describes. Tracing follows this, so
nothing here depends on torch's exporter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from meki_edge.graph_spec import (
    HIDDEN,
    SCHEMA,
    Context,
    Graph,
    GraphSpec,
    Part,
    RowFile,
    TensorSpec,
    context_suffix,
    part_suffix,
)
from meki_edge.model.config import ModelConfig
from meki_edge.model.row_spaces import RowSpace, fetched_shape, row_spaces
from meki_edge.rom.addressing import Identity, Ragged

PREFILL, DECODE = "prefill", "decode"
EMBEDDING_FILE = "embedding.safetensors"
MASK_VALUE = -100.0  # exp of it is zero beside any real score, and float16 and integer ranges survive it


@dataclass(frozen=True, kw_only=True)
class PartLayers:
    """What a part computes: decoder layers ``first`` to ``stop - 1``, then the final norm and head if ``head``."""

    first: int
    stop: int
    head: bool


def cut(num_layers: int, boundaries: Sequence[int], *, head_part: bool) -> list[PartLayers]:
    """The parts of a model that is cut before each of the layers ``boundaries``, ascending.

    ``head_part`` puts the final norm and the head into a part of their own.
    """
    edges = [0, *boundaries, num_layers]
    parts = [
        PartLayers(first=first, stop=stop, head=stop == num_layers and not head_part)
        for first, stop in itertools.pairwise(edges)
    ]
    return [*parts, PartLayers(first=num_layers, stop=num_layers, head=True)] if head_part else parts


def graph_spec(
    model: ModelConfig,
    *,
    context_length: int,
    prefill_tokens: int,
    eos_token_id: int | None,
    parts: Sequence[PartLayers] | None = None,
    kv_dtype: str = "float32",
    shorter_contexts: Sequence[int] = (),
) -> GraphSpec:
    """The contract of all graphs of ``model``, in one part unless ``parts`` (of :func:`cut`) are given."""
    parts = cut(model.num_hidden_layers, (), head_part=False) if parts is None else parts
    graph = partial(_graph, model=model, parts=parts, kv_dtype=kv_dtype)
    return GraphSpec(
        schema=SCHEMA,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_hidden_layers,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        rope_theta=model.rope_theta,
        context_length=context_length,
        mask_value=MASK_VALUE,
        eos_token_id=eos_token_id,
        prefill=graph(PREFILL, context=context_length, num_tokens=prefill_tokens),
        decode=graph(DECODE, context=context_length, num_tokens=1),
        embedding=RowFile(file=EMBEDDING_FILE, row_dim=model.hidden_size),
        roms=tuple(
            RowFile(
                file=space.file,
                row_dim=space.row_dim,
                addressing=space.addressing,
                rows_per_token=space.rows_per_token,
            )
            for space in row_spaces(model)
        ),
        shorter=tuple(
            Context(
                context_length=context,
                prefill=graph(PREFILL + context_suffix(context), context=context, num_tokens=prefill_tokens),
                decode=graph(DECODE + context_suffix(context), context=context, num_tokens=1),
            )
            for context in shorter_contexts
        ),
    )


def _graph(
    name: str, *, model: ModelConfig, parts: Sequence[PartLayers], context: int, num_tokens: int, kv_dtype: str
) -> Graph:
    """The contract of one graph."""
    heads, dim = model.num_key_value_heads, model.head_dim
    spaces, states = row_spaces(model), memory_states(model)

    def tensor(role: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=role, role=role, dtype="float32", shape=shape)

    def numbered(role: str, index: int, *shape: int, dtype: str = "float32") -> TensorSpec:
        return TensorSpec(name=f"{role}_{index}", role=role, dtype=dtype, shape=shape, index=index)

    def rows(space: RowSpace) -> list[TensorSpec]:
        shape = fetched_shape(space, num_tokens)
        if len(spaces) == 1 and space.addressing == Identity.kind:
            return [tensor("memory_rows", *shape)]
        mask = [numbered("memory_mask", space.index, *shape[:-1])] if space.addressing == Ragged.kind else []
        return [numbered("memory_rows", space.index, *shape), *mask]

    def part(index: int, own: PartLayers) -> Part:
        layers = range(own.first, own.stop)
        used = [space for space in spaces if any(member.layer in layers for member in space.members)]
        kept = [(i, state) for i, state in enumerate(states) if state.layer in layers]
        hidden = (1, num_tokens, model.hidden_size)

        def each_layer(role: str, *shape: int) -> list[TensorSpec]:
            return [numbered(role, layer, *shape, dtype=kv_dtype) for layer in layers]

        shared = (
            tensor("attention_mask", 1, 1, num_tokens, context + num_tokens),
            tensor("position_cos", 1, num_tokens, dim // 2),
            tensor("position_sin", 1, num_tokens, dim // 2),
        )
        return Part(
            file=f"{name}{part_suffix(index, len(parts))}.onnx",
            inputs=(
                numbered(HIDDEN, index - 1, *hidden) if index else tensor("input_embeds", *hidden),
                *(shared if layers else ()),
                *(spec for space in used for spec in rows(space)),
                *each_layer("past_key", 1, heads, dim, context),
                *each_layer("past_value", 1, heads, context, dim),
                *(numbered("memory_state", i, 1, state.length, state.dim) for i, state in kept),
            ),
            outputs=(
                tensor("logits", 1, num_tokens, model.vocab_size) if own.head else numbered(HIDDEN, index, *hidden),
                *each_layer("present_key", 1, heads, dim, num_tokens),
                *each_layer("present_value", 1, heads, num_tokens, dim),
                *(numbered("present_memory_state", i, 1, num_tokens, state.dim) for i, state in kept),
            ),
        )

    return Graph(num_tokens=num_tokens, parts=tuple(itertools.starmap(part, enumerate(parts))))


@dataclass(frozen=True, kw_only=True)
class State:
    """The earlier inputs ``[1, length, dim]`` that ``memories[number]`` of decoder ``layer`` keeps."""

    layer: int
    number: int
    length: int
    dim: int


def memory_states(model: ModelConfig) -> list[State]:
    """The states of a model's memories, by layer."""
    with torch.device("meta"):
        return [
            State(layer=layer, number=number, length=memory.state_length, dim=memory.state_dim)
            for layer in range(model.num_hidden_layers)
            for number, memory in enumerate(model.build_memories(layer))
            if memory.state_length
        ]
