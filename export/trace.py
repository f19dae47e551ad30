"""Tracing: the decoder as an ONNX graph whose inputs and outputs are those of the spec.

The graph runs the very :class:`~meki_edge.model.decoder.DecoderLayer` that was trained; only the
attention strategy differs, and of each memory only ``fuse`` is traced: its rows, and the earlier
inputs that some memories keep, come from the host. Tracing happens on the meta device, so it needs
the model's shape and none of its data.

Shapes: T num_tokens, C context_length, H num_attention_heads, KV num_key_value_heads, D head_dim.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor, nn

from meki_edge.graph_spec import SCHEMA, Graph, GraphSpec, RowFile, TensorSpec
from meki_edge.memory import PaddedRows
from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import CausalLM
from meki_edge.model.row_spaces import RowSpace, distribute, fetched_shape, row_spaces
from meki_edge.rom.addressing import Identity, Ragged

PREFILL, DECODE = "prefill", "decode"
EMBEDDING_FILE = "embedding.safetensors"
OPSET = 23  # the first with RMSNormalization and RotaryEmbedding
MASK_VALUE = -100.0  # exp of it is zero beside any real score, and float16 and integer ranges survive it


class GraphAttention:
    """Attention as the NPU likes it (an ``AttentionStrategy``), batch of one.

    Query heads that share a key/value head are stacked along the token axis instead of repeating
    keys and values. Scores over the cache and over the new tokens are separate products, so the
    cache is only read, never copied into a longer tensor.

    Args:
        mask: additive, ``[1, 1, T, C + T]``.
        cos, sin: ``[1, T, D/2]``.
        past_keys: ``[1, KV, D, C]`` a layer, transposed and already rotated.
        past_values: ``[1, KV, C, D]`` a layer.
        states: the earlier inputs ``[1, length, dim]`` of memory (layer, number), where it keeps any.
        num_groups: query heads a key/value head.

    ``keys`` ``[1, KV, D, T]``, ``values`` ``[1, KV, T, D]`` and ``state_inputs`` ``[1, T, dim]``
    collect what each layer and memory adds.
    """

    def __init__(
        self,
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
        past_keys: list[Tensor],
        past_values: list[Tensor],
        states: dict[tuple[int, int], Tensor],
        num_groups: int,
    ) -> None:
        self._mask = torch.cat([mask] * num_groups, dim=2) if mask.shape[2] > 1 else mask
        self._cos, self._sin = cos, sin
        self._past_keys, self._past_values, self._states = past_keys, past_values, states
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.state_inputs: dict[tuple[int, int], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape[1:]
        query = self._rotate(query) * head_dim**-0.5
        key = self._rotate(key).transpose(2, 3)
        value = value.transpose(1, 2)
        self.keys.append(key)
        self.values.append(value)
        past_key, past_value = self._past_keys[layer], self._past_values[layer]
        grouped = query.reshape(1, past_key.shape[1], -1, head_dim)  # [1, KV, G·T, D]
        scores = torch.cat((grouped @ past_key, grouped @ key), dim=-1) + self._mask
        past, new = scores.softmax(dim=-1).split((past_key.shape[3], num_tokens), dim=-1)
        out = past @ past_value + new @ value
        return out.reshape(1, num_heads, num_tokens, head_dim).transpose(1, 2).flatten(2)

    def extend(self, layer: int, memory: int, x: Tensor, length: int) -> Tensor:
        if length == 0:
            return x
        self.state_inputs[layer, memory] = x
        return torch.cat((self._states[layer, memory], x), dim=1)

    def _rotate(self, x: Tensor) -> Tensor:
        """``[1, T, heads, D]`` → ``[1, heads, T, D]``, rotated by the native RotaryEmbedding operator."""
        return torch.onnx.ops.rotary_embedding(x.transpose(1, 2), self._cos, self._sin)


class _Traced(nn.Module):
    """The model as a function of the graph's inputs, in the order of the spec."""

    def __init__(self, lm: CausalLM, graph: Graph) -> None:
        super().__init__()
        self.model, self.lm_head = lm.model, lm.lm_head
        self._config, self._graph = lm.config, graph
        self._spaces, self._states = row_spaces(lm.config), _states(lm.config)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = {spec.name: tensor for spec, tensor in zip(self._graph.inputs, inputs, strict=True)}

        def of(role: str) -> list[Tensor]:
            return [given[spec.name] for spec in self._graph.by_role(role)]

        (embeds,), (mask,), (cos,), (sin,) = map(of, ("input_embeds", "attention_mask", "position_cos", "position_sin"))
        states = {(state.layer, state.number): x for state, x in zip(self._states, of("memory_state"), strict=True)}
        num_groups = self._config.num_attention_heads // self._config.num_key_value_heads
        attention = GraphAttention(mask, cos, sin, of("past_key"), of("past_value"), states, num_groups)
        masks = iter(of("memory_mask"))
        fetched = [
            PaddedRows(rows, next(masks)) if space.addressing == Ragged.kind else rows
            for space, rows in zip(self._spaces, of("memory_rows"), strict=True)
        ]
        hidden = self.model(embeds, attention, distribute(self._config, self._spaces, fetched))
        new_states = (attention.state_inputs[place] for place in states)
        return self.lm_head(hidden), *attention.keys, *attention.values, *new_states


def graph_spec(
    model: ModelConfig, *, context_length: int, prefill_tokens: int, eos_token_id: int | None
) -> GraphSpec:
    """The contract of both graphs of ``model``."""
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
        prefill=_graph(PREFILL, model, context_length, prefill_tokens),
        decode=_graph(DECODE, model, context_length, 1),
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
    )


@dataclass(frozen=True, kw_only=True)
class _State:
    """The earlier inputs ``[1, length, dim]`` that ``memories[number]`` of decoder ``layer`` keeps."""

    layer: int
    number: int
    length: int
    dim: int


def _states(model: ModelConfig) -> list[_State]:
    """The states of a model's memories, by layer."""
    with torch.device("meta"):
        return [
            _State(layer=layer, number=number, length=memory.state_length, dim=memory.state_dim)
            for layer in range(model.num_hidden_layers)
            for number, memory in enumerate(model.build_memories(layer))
            if memory.state_length
        ]


def _graph(name: str, model: ModelConfig, context: int, num_tokens: int) -> Graph:
    heads, dim = model.num_key_value_heads, model.head_dim
    spaces, states = row_spaces(model), _states(model)

    def tensor(role: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=role, role=role, dtype="float32", shape=shape)

    def numbered(role: str, index: int, *shape: int) -> TensorSpec:
        return TensorSpec(name=f"{role}_{index}", role=role, dtype="float32", shape=shape, index=index)

    def each_layer(role: str, *shape: int) -> list[TensorSpec]:
        return [numbered(role, layer, *shape) for layer in range(model.num_hidden_layers)]

    def rows(space: RowSpace) -> list[TensorSpec]:
        shape = fetched_shape(space, num_tokens)
        if len(spaces) == 1 and space.addressing == Identity.kind:
            return [tensor("memory_rows", *shape)]
        mask = [numbered("memory_mask", space.index, *shape[:-1])] if space.addressing == Ragged.kind else []
        return [numbered("memory_rows", space.index, *shape), *mask]

    return Graph(
        file=f"{name}.onnx",
        num_tokens=num_tokens,
        inputs=(
            tensor("input_embeds", 1, num_tokens, model.hidden_size),
            tensor("attention_mask", 1, 1, num_tokens, context + num_tokens),
            tensor("position_cos", 1, num_tokens, dim // 2),
            tensor("position_sin", 1, num_tokens, dim // 2),
            *(spec for space in spaces for spec in rows(space)),
            *each_layer("past_key", 1, heads, dim, context),
            *each_layer("past_value", 1, heads, context, dim),
            *(numbered("memory_state", i, 1, state.length, state.dim) for i, state in enumerate(states)),
        ),
        outputs=(
            tensor("logits", 1, num_tokens, model.vocab_size),
            *each_layer("present_key", 1, heads, dim, num_tokens),
            *each_layer("present_value", 1, heads, num_tokens, dim),
            *(numbered("present_memory_state", i, 1, num_tokens, state.dim) for i, state in enumerate(states)),
        ),
    )


def trace(model: ModelConfig, graph: Graph) -> ir.Model:
    """Trace ``graph`` on the meta device: structure and parameter names, no data."""
    with torch.device("meta"):
        module = _Traced(CausalLM(model), graph).eval().requires_grad_(False)
        inputs = tuple(torch.empty(spec.shape) for spec in graph.inputs)
    with _quiet_exporter():
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,  # it would read the weights, which are not here
            verbose=False,
            input_names=[spec.name for spec in graph.inputs],
            output_names=[spec.name for spec in graph.outputs],
        )
    assert program is not None
    program.model.graph.name = Path(graph.file).stem
    return program.model


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep the exporter's chatter (missing torchvision, its own deprecations) off the terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
