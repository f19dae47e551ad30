"""A memory layer is Address → Rows → Fuse.

*Address*: which rows a token needs is a pure function of token ids, so it can be computed on the
host the moment a token is sampled. *Rows*: everything that depends on ids alone, projections
included; it folds into the ROM. *Fuse*: what is left at inference, the only part traced into the
NPU graph. The training forward **is** ``fuse(hidden, rom_rows(ids))``, so folding evaluates the
same code over all ids and equivalence holds by construction.

Shapes: N ids, B batch, T tokens, d hidden_size.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meki_edge.rom.addressing import Addressing, Identity
from meki_edge.tokenizer import TextTokenizer


class Site(enum.StrEnum):
    """Where a memory is spliced into a decoder layer; the decoder knows sites, never kinds.

    At the *sequential* sites ``fuse`` takes the residual stream and returns the new one; at the
    others it takes the sub-block's input and returns what is added to the sub-block's output.
    """

    BEFORE_ATTENTION = "before_attention"
    """``x ← fuse(x)``, then attention."""
    PARALLEL_ATTENTION = "parallel_attention"
    """``x ← x + Attention(h) + fuse(h)`` with ``h`` the attention's normalised input."""
    AFTER_ATTENTION = "after_attention"
    """``x ← fuse(x)`` between attention and FFN."""
    PARALLEL_FFN = "parallel_ffn"
    """``x ← x + FFN(h) + fuse(h)`` with ``h`` the FFN's normalised input."""
    FFN_UP = "ffn_up"
    """Inside the FFN: ``fuse(h)`` stands in place of the up projection, which is not built."""
    FFN_UP_RESIDUAL = "ffn_up_residual"
    """Inside the FFN: ``fuse(h)`` is added to the up projection's output."""
    AFTER_FFN = "after_ffn"
    """``x ← fuse(x)`` at the end of the layer."""

    @property
    def sequential(self) -> bool:
        """Whether ``fuse`` maps the residual stream to the residual stream."""
        return self in (Site.BEFORE_ATTENTION, Site.AFTER_ATTENTION, Site.AFTER_FFN)


class PaddedRows(NamedTuple):
    """Rows of an address that gives each token another number of them.

    ``values`` ``[B, T, K, row_dim]`` and an additive ``mask`` ``[B, T, K]``: 0, or a large negative
    number where a token has fewer than K rows.
    """

    values: Tensor
    mask: Tensor


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A batch of whole sequences in training form: what a memory computes its rows from.

    ``unique`` ``[N]`` are the distinct ids of ``ids`` ``[B, T]``, ``inverse`` ``[B, T]`` their
    positions in it, and ``embeddings`` ``[N, d]`` their token embeddings: what depends on an id
    alone is computed once an id, not once a token.
    """

    ids: Tensor
    unique: Tensor
    inverse: Tensor
    embeddings: Tensor


RowSource = Tensor | PaddedRows | TokenBatch


class Past(Protocol):
    """How a memory with a decode state sees its own earlier inputs."""

    def extend(self, x: Tensor, length: int) -> Tensor:
        """``x`` ``[B, T, c]`` with its ``length`` predecessors before it: ``[B, length + T, c]`` (zeros at the start)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Which decoder layer a memory layer serves (0-based), among all ``layers`` of its memory."""

    layer: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class TableRecipe:
    """How the paper trains a table, relative to the backbone."""

    learning_rate_scale: float = 1.0
    weight_decay: float | None = None
    """The table's own weight decay; None: as the backbone's matrices."""
    separate_clip: bool = False
    """Whether tables have a gradient norm of their own to be clipped by."""


class MemoryLayer(nn.Module, ABC):
    """One memory of one decoder layer.

    In the *training* form it owns ``table`` ``[num_rows, table_dim]`` (unless ``table_dim`` is 0;
    with identity addressing num_rows is vocab_size) and what ``training_only`` names; in the *ROM*
    form it has neither and its rows come from outside.
    """

    kind: ClassVar[str]
    training_only: ClassVar[frozenset[str]] = frozenset({"table"})
    """First components of parameter names that vanish when folded."""
    addressing_kind: ClassVar[str] = Identity.kind
    table_recipe: ClassVar[TableRecipe] = TableRecipe()

    site: Site
    row_dim: int
    """Elements that a token's rows bring to ``fuse`` (of one entry, where the addressing is ragged)."""
    table_dim: int
    """Elements of a row of ``table``; 0: there is no table."""
    num_rows: int
    """Rows of the ROM (with identity addressing, vocab_size)."""
    rows_per_token: int = 1
    """The most ROM rows that a token reads."""
    stored_dim: int
    """Elements of a ROM row: ``row_dim``, or a hash head's part of it."""
    state_length: int = 0
    """How many earlier inputs a decoder keeps for this memory, and how wide they are."""
    state_dim: int = 0
    table: nn.Parameter
    table_reader: Callable[[Tensor], Tensor] | None = None
    """What :meth:`read_table` asks instead of ``table``: an optimizer sets it whose rows lie elsewhere for a while."""

    def forward(self, hidden: Tensor, source: RowSource, past: Past) -> Tensor:
        """:meth:`fuse` of rows, or of the rows that a batch in training form gives."""
        if isinstance(source, TokenBatch):
            return self.fuse_batch(hidden, source)
        return self.fuse(hidden, source)

    def fuse_batch(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """The training forward: ``fuse(hidden, rom_rows(ids))``."""
        # F.embedding, because its backward sums in a fixed order on the CPU, which index_put does
        # not: a resumed run must see the same losses.
        return self.fuse(hidden, F.embedding(batch.inverse, self.rom_rows(batch.unique, batch.embeddings)))

    @abstractmethod
    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        """Rows from the table's own rows ``[N, table_dim]`` and the ids' embeddings ``[N, d]``.

        Returns ``[N, row_dim]``. Training form only; differentiable, no side effects.
        """

    @abstractmethod
    def fuse(self, hidden: Tensor, rows: Tensor | PaddedRows) -> Tensor:
        """What the site adds (or, at a sequential site, the new stream).

        ``hidden`` is ``[B, T, d]`` and ``rows`` ``[B, T, row_dim]``, or :class:`PaddedRows` where
        the addressing is ragged. The result is ``[B, T, d]``, at the two ``FFN_UP`` sites
        ``[B, T, intermediate_size]``.
        """

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the initial parameters."""

    @property
    @abstractmethod
    def flops_per_token(self) -> int:
        """Floating-point operations of ``fuse`` for one token (a multiply and an add are two)."""

    @property
    def addressing(self) -> Addressing:
        """Which rows a token needs (training form)."""
        return Identity()

    @property
    def row_space(self) -> Hashable:
        """Equal for memories of a model whose rows lie in one ROM file, known without the addresses themselves."""
        return Identity.kind

    @classmethod
    def prepare(cls, layers: list[MemoryLayer], corpus: np.ndarray, tokenizer: TextTokenizer) -> None:
        """Set up what the addressing needs, before training: nothing for most kinds.

        Args:
            layers: all layers of one memory, in order.
            corpus: the training text's token ids ``[N]``.
            tokenizer: the model's tokenizer.
        """

    def upcycle(self, donor: Mapping[str, Tensor], embeddings: Tensor) -> None:
        """Initialise from a pretrained dense layer.

        Args:
            donor: the layer's tensors by local name (``mlp.up_proj.weight`` …).
            embeddings: the pretrained token embedding ``[vocab_size, d]``.
        """

    def rom_rows(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """Rows ``[N, row_dim]`` of token ``ids`` ``[N]`` whose embeddings are ``[N, d]``."""
        if self.table_dim == 0:
            return self.fold(embeddings.new_empty(len(ids), 0), embeddings)
        return self.fold(self.read_table(ids), embeddings)

    def read_table(self, row_ids: Tensor) -> Tensor:
        """Rows ``[…, table_dim]`` of the table; the only way in which a forward pass reads it."""
        return F.embedding(row_ids, self.table) if self.table_reader is None else self.table_reader(row_ids)

    def touched_rows(self, ids: Tensor, unique: Tensor) -> Tensor:
        """The distinct table rows ``[N]``, ascending, that ``ids`` ``[B, T]`` (distinct: ``unique``) read."""
        return unique

    def ram_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The named parameters that stay in memory at inference."""
        for name, parameter in self.named_parameters():
            if name.split(".")[0] not in self.training_only:
                yield name, parameter
