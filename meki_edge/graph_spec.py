"""``graph_spec.json``: what every input and output of the exported graphs is.

Export and calibration write it; compile, pack and the C++ harness read it. Roles say what a tensor
is for, so nobody parses tensor names.

A graph is one ONNX file or several *parts* that run in order: each takes the ``hidden`` output of the
part before it, and what else its layers need. Prefill and decode are cut at the same layers.

Roles of inputs: ``input_embeds`` ``[1, T, hidden_size]``, ``attention_mask`` ``[1, 1, T, C + T]``
(additive: 0 or ``mask_value``; the C cache slots first, then the T new tokens), ``position_cos``
and ``position_sin`` ``[1, T, head_dim / 2]``, ``past_key`` ``[1, num_key_value_heads, head_dim, C]``
(transposed) and ``past_value`` ``[1, num_key_value_heads, C, head_dim]`` (one a layer, ``index`` is
the layer). For ROM file ``roms[index]``, with K rows a token: ``memory_rows`` ``[1, T, row_dim]``
where the addressing is identity, ``[1, T, K · row_dim]`` where it is ngram_hash, and
``[1, T, K, row_dim]`` where it is ragged; then ``memory_mask`` ``[1, T, K]`` is 0 for a token's own
rows and ``mask_value`` for the others. ``memory_state`` ``[1, length, dim]`` are the last inputs
that a memory keeps, oldest first, zeros before the text begins. An input that several parts take has one
name, shape and type in all of them.

Roles of outputs: ``logits`` ``[1, T, vocab_size]``, ``present_key``
``[1, num_key_value_heads, head_dim, T]``, ``present_value`` ``[1, num_key_value_heads, T, head_dim]``
and ``present_memory_state`` ``[1, T, dim]``: the new tokens only. The caller writes keys and values
into the cache, and shifts the states along by the tokens that were real: a past and its present have
one type and quantization, in both graphs. T is ``num_tokens``, C is ``context_length``.

``hidden`` ``[1, T, hidden_size]`` with index i is an output of part i and an input of part i + 1.

A static graph attends to all C slots, used or not. So there may be *shorter* contexts: the same two
graphs with fewer slots, for as long as a text fits them. When it outgrows one, the host spreads the
cache over the slots of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from meki_edge import config
from meki_edge.errors import UserError

SCHEMA = 3
FILE_NAME = "graph_spec.json"
AGAIN = "run `meki-edge export` again"
LEAST_MASK, LARGEST_MASK = -65504.0, -50.0
"""Of ``mask_value``: e⁻⁵⁰ is nothing beside any real score, and float16 holds the other end."""


HIDDEN = "hidden"
"""The role of what passes from part to part; the host only carries it."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What the integers of a tensor mean: ``real = (q - zero_point) * scale``, one pair for the whole tensor."""

    scale: float
    zero_point: int


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One graph input or output.

    ``dtype`` is ``float32``, ``float16``, ``uint8``, ``int8``, ``uint16`` or ``int16``; the integer ones
    have a ``quantization``. ``index`` as in the roles.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    index: int = 0
    quantization: Quantization | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One ONNX file, by name relative to the spec."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def by_role(self, role: str) -> tuple[TensorSpec, ...]:
        """The inputs and outputs that play ``role``, by ``index``."""
        return _by_role((*self.inputs, *self.outputs), role)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """``num_tokens`` tokens a call, by ``parts`` that run in order."""

    num_tokens: int
    parts: tuple[Part, ...]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the host feeds, each once."""
        return _once(tensor for part in self.parts for tensor in part.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What the host takes."""
        return _once(tensor for part in self.parts for tensor in part.outputs)

    def by_role(self, role: str) -> tuple[TensorSpec, ...]:
        """The host's inputs and outputs that play ``role``, by ``index``."""
        return _by_role((*self.inputs, *self.outputs), role)


def _once(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple({tensor.name: tensor for tensor in tensors if tensor.role != HIDDEN}.values())


def _by_role(tensors: tuple[TensorSpec, ...], role: str) -> tuple[TensorSpec, ...]:
    found = [tensor for tensor in tensors if tensor.role == role]
    return tuple(sorted(found, key=lambda tensor: tensor.index))


def context_suffix(context_length: int) -> str:
    """What the names of a shorter context's graphs end with."""
    return f"_c{context_length}"


def part_suffix(index: int, num_parts: int) -> str:
    """What the names and roles of a part's files end with: nothing where there is one part only."""
    return f"_{index}" if num_parts > 1 else ""


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
class Context:
    """Both graphs with ``context_length`` slots of the cache."""

    context_length: int
    prefill: Graph
    decode: Graph


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """The exported model as its callers see it.

    ``context_length``, ``prefill`` and ``decode`` are the longest context; the ``shorter`` ones ascend.

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
    shorter: tuple[Context, ...] = ()

    @property
    def graphs(self) -> dict[str, Graph]:
        """All graphs by name, as files and roles call them; those of the longest context first."""
        found = {"prefill": self.prefill, "decode": self.decode}
        for context in self.shorter:
            suffix = context_suffix(context.context_length)
            found |= {f"prefill{suffix}": context.prefill, f"decode{suffix}": context.decode}
        return found

    @property
    def contexts(self) -> dict[str, GraphSpec]:
        """Each context as a spec of its own, by the suffix of its graphs' names; the longest first."""
        found = {"": replace(self, shorter=())}
        for context in self.shorter:
            found[context_suffix(context.context_length)] = replace(
                self,
                context_length=context.context_length,
                prefill=context.prefill,
                decode=context.decode,
                shorter=(),
            )
        return found

    @property
    def head_is_apart(self) -> bool:
        """Whether the last part of both graphs is the head alone: then decode's serves the last token of a prompt."""
        last = [graph.parts[-1] for graph in (self.prefill, self.decode) if len(graph.parts) > 1]
        roles = [[tensor.role for tensor in (*part.inputs, *part.outputs)] for part in last]
        takes = {(tensor.dtype, tensor.quantization) for part in last for tensor in part.inputs}
        return roles == [[HIDDEN, "logits"]] * 2 and len(takes) == 1

    def map_graphs(self, change: Callable[[Graph], Graph]) -> GraphSpec:
        """The spec with every graph changed."""

        def both(of: GraphSpec | Context) -> dict[str, Graph]:
            return {"prefill": change(of.prefill), "decode": change(of.decode)}

        shorter = tuple(replace(context, **both(context)) for context in self.shorter)
        return replace(self, **both(self), shorter=shorter)

    @classmethod
    def from_json(cls, values: Any, where: str | PathLike[str]) -> GraphSpec:
        """Parse strictly; see :func:`meki_edge.config.from_dict`.

        Raises:
            UserError: another schema, an unknown or missing key, a value of the wrong type; a mask that hides
                nothing, an end-of-text token outside the vocabulary, or a file that lies elsewhere.
        """
        if isinstance(values, dict) and values.get("schema", SCHEMA) != SCHEMA:
            what = f"{FILE_NAME} is of schema {values['schema']!r}, this version reads {SCHEMA}"
            raise UserError(what, where=where, fix=AGAIN)
        spec = config.from_dict(cls, values, where)
        spec._check(where)
        return spec

    def _check(self, where: str | PathLike[str]) -> None:
        if not LEAST_MASK <= self.mask_value <= LARGEST_MASK:
            what = f"mask_value is {self.mask_value}, not a number from {LEAST_MASK:g} to {LARGEST_MASK:g}"
            raise UserError(what, where=where, fix=AGAIN)
        if self.eos_token_id is not None and not 0 <= self.eos_token_id < self.vocab_size:
            what = f"eos_token_id is {self.eos_token_id}, the vocabulary has {self.vocab_size} tokens"
            raise UserError(what, where=where, fix=AGAIN)
        for part in (part for graph in self.graphs.values() for part in graph.parts):
            names = [tensor.name for tensor in (*part.inputs, *part.outputs)]
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise UserError(f"{part.file} has two tensors called {twice[0]!r}", where=where, fix=AGAIN)
        parts = [part.file for graph in self.graphs.values() for part in graph.parts]
        for name in (*parts, self.embedding.file, *(rom.file for rom in self.roms)):
            if name in ("", ".", "..") or any(letter in name for letter in "/\\\0"):
                raise UserError(f"{name!r} is not the name of a file beside {FILE_NAME}", where=where, fix=AGAIN)
