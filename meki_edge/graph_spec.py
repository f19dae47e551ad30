"""``graph_spec.json``: what every input and output of the exported graphs is.

Export writes it; calibration, compile, pack and the C++ harness read it. Roles say what a tensor
is for, so nobody parses tensor names.

Roles of inputs: ``input_embeds`` ``[1, T, hidden_size]``, ``attention_mask`` ``[1, 1, T, C + T]``
(additive: 0 or ``mask_value``; the C cache slots first, then the T new tokens), ``position_cos``
and ``position_sin`` ``[1, T, head_dim / 2]``, ``past_key`` ``[1, num_key_value_heads, head_dim, C]``
(transposed) and ``past_value`` ``[1, num_key_value_heads, C, head_dim]`` (one a layer, ``index`` is
the layer). For ROM file ``roms[index]``, with K rows a token: ``memory_rows`` ``[1, T, row_dim]``
where the addressing is identity, ``[1, T, K · row_dim]`` where it is ngram_hash, and
``[1, T, K, row_dim]`` where it is ragged; then ``memory_mask`` ``[1, T, K]`` is 0 for a token's own
rows and ``mask_value`` for the others. ``memory_state`` ``[1, length, dim]`` are the last inputs
that a memory keeps, oldest first, zeros before the text begins.

Roles of outputs: ``logits`` ``[1, T, vocab_size]``, ``present_key``
``[1, num_key_value_heads, head_dim, T]``, ``present_value`` ``[1, num_key_value_heads, T, head_dim]``
and ``present_memory_state`` ``[1, T, dim]``: the new tokens only. The caller writes keys and values
into the cache, and shifts the states along by the tokens that were real. T is ``num_tokens``, C is
``context_length``.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

from meki_edge import config

SCHEMA = 1
FILE_NAME = "graph_spec.json"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One graph input or output. ``dtype`` is ``float32`` or ``float16``; ``index`` as in the roles."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One ONNX file, by name relative to the spec: ``num_tokens`` tokens a call."""

    file: str
    num_tokens: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def by_role(self, role: str) -> tuple[TensorSpec, ...]:
        """The inputs and outputs that play ``role``, by ``index``."""
        found = [tensor for tensor in (*self.inputs, *self.outputs) if tensor.role == role]
        return tuple(sorted(found, key=lambda tensor: tensor.index))


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """A ROM file (``docs/rom-format.md``) that feeds a graph input by token id.

    ``row_dim`` is the elements of one decoded row, ``rows_per_token`` the K of the input's shape (a
    ragged file may need fewer), ``addressing`` as in the file's header.
    """

    file: str
    row_dim: int
    addressing: str = "identity"
    rows_per_token: int = 1


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """The exported model as its callers see it.

    ``embedding`` feeds ``input_embeds``; ``roms[i]`` feeds the ``memory_rows`` input with index i.
    ``rope_theta`` and ``head_dim`` give the rotary angles: ``position · rope_theta^(-2j/head_dim)``.
    """

    schema: int
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    context_length: int
    mask_value: float
    eos_token_id: int | None
    prefill: Graph
    decode: Graph
    embedding: RowFile
    roms: tuple[RowFile, ...]

    @classmethod
    def from_json(cls, values: Any, where: str | PathLike[str]) -> GraphSpec:
        """Parse strictly; see :func:`meki_edge.config.from_dict`."""
        return config.from_dict(cls, values, where)
