"""Tracing: the decoder as ONNX graphs whose inputs and outputs are those of the spec.

The graph runs the very :class:`~meki_edge.model.decoder.DecoderLayer` that was trained; only the
attention strategy differs, and of each memory only ``fuse`` is traced: its rows, and the earlier
inputs that some memories keep, come from the host. Each part of a graph is traced on its own. Tracing
happens on the meta device, so it needs the model's shape and none of its data.

Shapes: T num_tokens, C context_length, KV num_key_value_heads, D head_dim.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor, nn

from export.layout import memory_states
from meki_edge.graph_spec import HIDDEN, Part
from meki_edge.memory import PaddedRows
from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import CausalLM, Rows
from meki_edge.model.row_spaces import distribute, row_spaces

OPSET = 23  # the first with RMSNormalization and RotaryEmbedding


class GraphAttention:
    """Attention as the NPU likes it (an ``AttentionStrategy``), batch of one.

    Query heads that share a key/value head are stacked along the token axis instead of repeating
    keys and values. Scores over the cache and over the new tokens are separate products, so the
    cache is only read, never copied into a longer tensor.

    Args:
        mask: additive, ``[1, 1, T, C + T]``.
        cos, sin: ``[1, T, D/2]``.
        past_keys: ``[1, KV, D, C]`` by layer, transposed and already rotated, in float32 or float16.
        past_values: ``[1, KV, C, D]`` by layer, of the same type.
        states: the earlier inputs ``[1, length, dim]`` of memory (layer, number), where it keeps any.
        num_groups: query heads a key/value head.

    ``keys`` ``[1, KV, D, T]``, ``values`` ``[1, KV, T, D]`` (in the past's type) and ``state_inputs``
    ``[1, T, dim]`` collect what each layer and memory adds.
    """

    def __init__(
        self,
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
        past_keys: Mapping[int, Tensor],
        past_values: Mapping[int, Tensor],
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
        past_key, past_value = self._past_keys[layer], self._past_values[layer]
        self.keys.append(key.to(past_key.dtype))
        self.values.append(value.to(past_value.dtype))
        past_key, past_value = past_key.to(key.dtype), past_value.to(value.dtype)
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


class _TracedPart(nn.Module):
    """A part as a function of its inputs, in the order of the spec, which also says what belongs to it."""

    def __init__(self, lm: CausalLM, part: Part) -> None:
        super().__init__()
        self._config, self._part = lm.config, part
        self._layers = [tensor.index for tensor in part.by_role("past_key")]
        # Under the checkpoint's names, and nothing else: what is here ends up in the graph's weights.
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(layer): lm.model.layers[layer] for layer in self._layers})
        if part.by_role("logits"):
            self.model.norm, self.lm_head = lm.model.norm, lm.lm_head

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        def of(role: str) -> dict[int, Tensor]:
            """The inputs of that role, by index."""
            return {spec.index: x for spec, x in zip(self._part.inputs, inputs, strict=True) if spec.role == role}

        (x,) = (of("input_embeds") or of(HIDDEN)).values()
        kept: list[Tensor] = []
        if self._layers:
            attention = self._attention(of)
            for layer, rows in zip(self._layers, self._rows(of), strict=True):
                x = self.model.layers[str(layer)](x, attention, rows)
            kept = [*attention.keys, *attention.values, *attention.state_inputs.values()]
        return (self.lm_head(self.model.norm(x)) if self._part.by_role("logits") else x), *kept

    def _attention(self, of: Callable[[str], dict[int, Tensor]]) -> GraphAttention:
        known = memory_states(self._config)
        states = {(known[index].layer, known[index].number): x for index, x in of("memory_state").items()}
        (mask,), (cos,), (sin,) = (of(role).values() for role in ("attention_mask", "position_cos", "position_sin"))
        num_groups = self._config.num_attention_heads // self._config.num_key_value_heads
        return GraphAttention(mask, cos, sin, of("past_key"), of("past_value"), states, num_groups)

    def _rows(self, of: Callable[[str], dict[int, Tensor]]) -> Rows:
        """What each memory of each layer gets of the inputs' rows."""
        spaces, masks = row_spaces(self._config), of("memory_mask")
        fetched = {
            index: PaddedRows(rows, masks[index]) if index in masks else rows
            for index, rows in of("memory_rows").items()
        }
        return distribute(self._config, [spaces[i] for i in fetched], [*fetched.values()], self._layers)


def trace(model: ModelConfig, part: Part) -> ir.Model:
    """Trace ``part`` on the meta device: structure and parameter names, no data."""
    with torch.device("meta"):
        module = _TracedPart(CausalLM(model), part).eval().requires_grad_(False)
        inputs = tuple(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in part.inputs)
    with _quiet_exporter():
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,  # it would read the weights, which are not here
            verbose=False,
            input_names=[spec.name for spec in part.inputs],
            output_names=[spec.name for spec in part.outputs],
        )
    assert program is not None
    program.model.graph.name = Path(part.file).stem
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
