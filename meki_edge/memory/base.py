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
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class MemoryLayer(nn.Module, ABC):
    """One memory of one decoder layer.

    In the *training* form it owns ``table`` ``[vocab_size, table_dim]`` (unless ``table_dim`` is
    0) and the modules named in ``training_only``; in the *ROM* form it has neither and its rows
    come from outside.
    """

    kind: ClassVar[str]
    training_only: ClassVar[frozenset[str]] = frozenset({"table"})
    """First components of parameter names that vanish when folded."""

    site: Site
    row_dim: int
    table_dim: int
    table: nn.Parameter

    @abstractmethod
    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        """Rows from the table's own rows ``[N, table_dim]`` and the ids' embeddings ``[N, d]``.

        Returns ``[N, row_dim]``. Training form only; differentiable, no side effects.
        """

    @abstractmethod
    def fuse(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """What the site adds (or, at a sequential site, the new stream).

        ``hidden`` is ``[B, T, d]`` and ``rows`` ``[B, T, row_dim]``. The result is ``[B, T, d]``,
        at the two ``FFN_UP`` sites ``[B, T, intermediate_size]``.
        """

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the initial parameters."""

    @property
    @abstractmethod
    def flops_per_token(self) -> int:
        """Floating-point operations of ``fuse`` for one token (a multiply and an add are two)."""

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
        return self.fold(F.embedding(ids, self.table), embeddings)

    def ram_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The named parameters that stay in memory at inference."""
        for name, parameter in self.named_parameters():
            if name.split(".")[0] not in self.training_only:
                yield name, parameter
