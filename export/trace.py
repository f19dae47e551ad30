"""Tracing: the decoder as an ONNX graph whose inputs and outputs are those of the spec.

The graph runs the very :class:`~meki_edge.model.decoder.DecoderLayer` that was trained; only the
attention strategy differs, and of each memory only ``fuse`` is traced. Tracing happens on the meta
device, so it needs the model's shape and none of its data.

Shapes: T num_tokens, C context_length, H num_attention_heads, KV num_key_value_heads, D head_dim.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor, nn

from meki_edge.graph_spec import SCHEMA, Graph, GraphSpec, RowFile, TensorSpec
from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import CausalLM

PREFILL, DECODE = "prefill", "decode"
EMBEDDING_FILE = "embedding.safetensors"
ROM_FILE = "rom.safetensors"
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
        num_groups: query heads a key/value head.

    ``keys`` ``[1, KV, D, T]`` and ``values`` ``[1, KV, T, D]`` collect what each layer adds.
    """

    def __init__(
        self,
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
        past_keys: list[Tensor],
        past_values: list[Tensor],
        num_groups: int,
    ) -> None:
        self._mask = torch.cat([mask] * num_groups, dim=2) if mask.shape[2] > 1 else mask
        self._cos, self._sin = cos, sin
        self._past_keys, self._past_values = past_keys, past_values
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

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

    def _rotate(self, x: Tensor) -> Tensor:
        """``[1, T, heads, D]`` → ``[1, heads, T, D]``, rotated by the native RotaryEmbedding operator."""
        return torch.onnx.ops.rotary_embedding(x.transpose(1, 2), self._cos, self._sin)


class _Traced(nn.Module):
    """The model as a function of the graph's inputs, in the order of the spec."""

    def __init__(self, lm: CausalLM, graph: Graph) -> None:
        super().__init__()
        self.model, self.lm_head = lm.model, lm.lm_head
        self._split_rows = lm.split_rows
        self._num_groups = lm.config.num_attention_heads // lm.config.num_key_value_heads
        self._graph = graph

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = {spec.name: tensor for spec, tensor in zip(self._graph.inputs, inputs, strict=True)}

        def of(role: str) -> list[Tensor]:
            return [given[spec.name] for spec in self._graph.by_role(role)]

        (embeds,), (mask,), (cos,), (sin,) = map(of, ("input_embeds", "attention_mask", "position_cos", "position_sin"))
        attention = GraphAttention(mask, cos, sin, of("past_key"), of("past_value"), self._num_groups)
        rows = of("memory_rows")
        split = self._split_rows(rows[0]) if rows else [[] for _ in self.model.layers]
        hidden = self.model(embeds, attention, split)
        return self.lm_head(hidden), *attention.keys, *attention.values


def graph_spec(
    model: ModelConfig, *, context_length: int, prefill_tokens: int, eos_token_id: int | None
) -> GraphSpec:
    """The contract of both graphs of ``model``."""
    row_dim = sum(dim for _, _, dim in rom_dims(model))
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
        prefill=_graph(PREFILL, model, context_length, prefill_tokens, row_dim),
        decode=_graph(DECODE, model, context_length, 1, row_dim),
        embedding=RowFile(file=EMBEDDING_FILE, row_dim=model.hidden_size),
        roms=(RowFile(file=ROM_FILE, row_dim=row_dim),) if row_dim else (),
    )


def rom_dims(model: ModelConfig) -> list[tuple[int, int, int]]:
    """(layer, memory, row_dim) of every memory, in the order of the ROM's segments."""
    with torch.device("meta"):
        return [
            (layer, index, memory.row_dim)
            for layer in range(model.num_hidden_layers)
            for index, memory in enumerate(model.build_memories(layer))
        ]


def _graph(name: str, model: ModelConfig, context: int, num_tokens: int, row_dim: int) -> Graph:
    heads, dim = model.num_key_value_heads, model.head_dim
    layers = range(model.num_hidden_layers)

    def tensor(role: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=role, role=role, dtype="float32", shape=shape)

    def each_layer(role: str, *shape: int) -> list[TensorSpec]:
        return [
            TensorSpec(name=f"{role}_{layer}", role=role, dtype="float32", shape=shape, index=layer) for layer in layers
        ]

    return Graph(
        file=f"{name}.onnx",
        num_tokens=num_tokens,
        inputs=(
            tensor("input_embeds", 1, num_tokens, model.hidden_size),
            tensor("attention_mask", 1, 1, num_tokens, context + num_tokens),
            tensor("position_cos", 1, num_tokens, dim // 2),
            tensor("position_sin", 1, num_tokens, dim // 2),
            *([tensor("memory_rows", 1, num_tokens, row_dim)] if row_dim else []),
            *each_layer("past_key", 1, heads, dim, context),
            *each_layer("past_value", 1, heads, context, dim),
        ),
        outputs=(
            tensor("logits", 1, num_tokens, model.vocab_size),
            *each_layer("present_key", 1, heads, dim, num_tokens),
            *each_layer("present_value", 1, heads, num_tokens, dim),
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
