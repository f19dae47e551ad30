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
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Site(enum.StrEnum):
    """Where a memory's update is spliced into a decoder layer; the decoder knows sites, never kinds."""

    PARALLEL_FFN = "parallel_ffn"
    """``x + FFN(h) + fuse(h, rows)`` with ``h`` the FFN's normalised input."""


class MemoryLayer(nn.Module, ABC):
    """One memory of one decoder layer.

    In the *training* form it owns ``table`` ``[vocab_size, table_dim]`` and the modules named in
    ``training_only``; in the *ROM* form it has neither and its rows come from outside.
    """

    kind: ClassVar[str]
    site: ClassVar[Site]
    training_only: ClassVar[frozenset[str]]
    """First components of parameter names that vanish when folded (``table`` included)."""

    row_dim: int
    table: nn.Parameter

    @abstractmethod
    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        """Rows from the table's own rows ``[N, table_dim]`` and the ids' embeddings ``[N, d]``.

        Returns ``[N, row_dim]``. Training form only; differentiable, no side effects.
        """

    @abstractmethod
    def fuse(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The update ``[B, T, d]`` from the site's hidden state ``[B, T, d]`` and ``rows`` ``[B, T, row_dim]``."""

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the initial parameters."""

    def rom_rows(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """Rows ``[N, row_dim]`` of token ``ids`` ``[N]`` whose embeddings are ``[N, d]``."""
        return self.fold(F.embedding(ids, self.table), embeddings)

    def ram_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The named parameters that stay in memory at inference."""
        for name, parameter in self.named_parameters():
            if name.split(".")[0] not in self.training_only:
                yield name, parameter
