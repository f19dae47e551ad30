"""Which memories share a ROM file, and how a file's rows reach them.

Memories whose addresses are the same (all identity-addressed ones; L3 layers with one allocation)
lie side by side in the rows of one file, so one read serves them all. A memory with another row
space (each Engram layer) has a file of its own. Export, reparam and the harness meet in this list;
none of them knows a memory's kind.

Shapes: B batch, T tokens, K ``rows_per_token``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meki_edge.memory import MemoryLayer, PaddedRows
from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import Rows
from meki_edge.rom.addressing import Ragged


@dataclass(frozen=True, kw_only=True)
class Member:
    """One memory in a row space: ``memories[number]`` of decoder ``layer``; ``dim`` elements of each row."""

    layer: int
    number: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class RowSpace:
    """The rows of one ROM file.

    ``fetched`` for T tokens is ``[B, T, row_dim]`` with identity addressing, ``[B, T, K·row_dim]``
    with hashed addressing (every token has K rows), and :class:`PaddedRows` of ``[B, T, K, row_dim]``
    with ragged addressing.
    """

    index: int
    addressing: str
    num_rows: int
    rows_per_token: int
    members: tuple[Member, ...]

    @property
    def row_dim(self) -> int:
        """Elements of a row, all members together."""
        return sum(member.dim for member in self.members)

    @property
    def file(self) -> str:
        """The ROM file's name in a checkpoint or bundle."""
        return "rom.safetensors" if self.index == 0 else f"rom_{self.index}.safetensors"

    @property
    def role(self) -> str:
        """Its role in a manifest."""
        return "rom" if self.index == 0 else f"rom_{self.index}"

    def split(self, fetched: Tensor | PaddedRows) -> list[Tensor | PaddedRows]:
        """What each member gets of the rows fetched for some tokens."""
        dims = [member.dim for member in self.members]
        if isinstance(fetched, PaddedRows):
            return [PaddedRows(part, fetched.mask) for part in fetched.values.split(dims, dim=-1)]
        return [fetched] if len(dims) == 1 else list(fetched.split(dims, dim=-1))


def row_spaces(config: ModelConfig) -> list[RowSpace]:
    """The row spaces of a model, in the order in which its layers first need them."""
    found: dict[Hashable, list[tuple[Member, MemoryLayer]]] = {}
    with torch.device("meta"):
        for layer in range(config.num_hidden_layers):
            for number, memory in enumerate(config.build_memories(layer)):
                member = Member(layer=layer, number=number, dim=memory.stored_dim)
                found.setdefault(memory.row_space, []).append((member, memory))
    return [
        RowSpace(
            index=index,
            addressing=entries[0][1].addressing_kind,
            num_rows=entries[0][1].num_rows,
            rows_per_token=entries[0][1].rows_per_token,
            members=tuple(member for member, _ in entries),
        )
        for index, entries in enumerate(found.values())
    ]


def distribute(
    config: ModelConfig,
    spaces: Sequence[RowSpace],
    fetched: Sequence[Tensor | PaddedRows],
    layers: Sequence[int] | None = None,
) -> Rows:
    """``rows[layer][memory]`` from what each row space fetched for the same tokens.

    Args:
        layers: only those, which ``spaces`` must feed; by default all.
    """
    pieces = {
        (member.layer, member.number): piece
        for space, rows in zip(spaces, fetched, strict=True)
        for member, piece in zip(space.members, space.split(rows), strict=True)
    }
    chosen = range(config.num_hidden_layers) if layers is None else layers
    counts = {layer: sum(layer in placement.layers for placement in config.memories) for layer in chosen}
    return [[pieces[layer, number] for number in range(count)] for layer, count in counts.items()]


def fetched_shape(space: RowSpace, num_tokens: int) -> tuple[int, ...]:
    """The shape ``[1, T, …]`` of the graph input that takes a space's rows."""
    if space.addressing == Ragged.kind:
        return (1, num_tokens, space.rows_per_token, space.row_dim)
    return (1, num_tokens, space.rows_per_token * space.row_dim)
