r"""STAPLE: zero-initialised residual rows in the up projection (arXiv 2610.12599).

::

    y = W2( SiLU(W1 h) ⊙ (W3 h + U[t]) )     U ∈ V×f, zero at the start: step 0 is the seed model
    low rank:  U[t] = B·a[t]                 a ∈ V×r in the ROM (zero), B ∈ f×r in RAM (random)

The formula follows the paper and ``alpha_mode="sum"`` of the STEM repository's history. Both
factors zero would give no gradient, so B is drawn N(0, 0.02) (ours: the paper's choice is not
published). The recipe keeps W3 of the augmented layers frozen during a warmup, and trains tables
at 4 times the learning rate with a weight decay of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meki_edge.errors import UserError
from meki_edge.memory.base import MemoryLayer, Site, Slot, TableRecipe
from meki_edge.model_shape import ModelShape

EXPAND_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class StapleConfig:
    """Options of STAPLE."""

    rank: int | None = None
    """r of the low-rank form (512 in the paper); without it the row is as wide as the FFN."""


class StapleLayer(MemoryLayer):
    """One STAPLE table; see the module's docstring."""

    kind = "staple"
    table_recipe = TableRecipe(learning_rate_scale=4.0, weight_decay=1e-4)

    def __init__(self, config: StapleConfig, shape: ModelShape, slot: Slot, *, folded: bool) -> None:
        super().__init__()
        if config.rank is not None and config.rank < 1:
            raise UserError(f"rank is {config.rank}", where="memories: staple", fix="give a positive rank or none")
        self.site = Site.FFN_UP_RESIDUAL
        self.row_dim = self.table_dim = config.rank or shape.intermediate_size
        self.num_rows, self.stored_dim = shape.vocab_size, self.row_dim
        self.expand = None if config.rank is None else nn.Linear(config.rank, shape.intermediate_size, bias=False)
        if not folded:
            self.table = nn.Parameter(torch.empty(shape.vocab_size, self.table_dim))

    @property
    def flops_per_token(self) -> int:
        return 0 if self.expand is None else 2 * self.expand.in_features * self.expand.out_features

    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        return table_rows

    def fuse(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return rows if self.expand is None else self.expand(rows)

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.table)
        if self.expand is not None:
            nn.init.normal_(self.expand.weight, std=EXPAND_STD, generator=generator)
