r"""STEM: token-indexed up projections (arXiv 2601.10639; Infini-AI-Lab/STEM).

::

    y = W2( SiLU(W1 h) ⊙ U[t] )          U ∈ V×f replaces the up projection W3

U[t] is already the ROM row; nothing folds. 2df FLOPs and df parameters fewer a layer.

Initialisation: Xavier-normal over (V, f), that is std √(2/(V+f)); upcycled from a dense layer,
``U = E·W3ᵀ`` (the repository's history). The paper trains U with the backbone's learning rate but
an optimizer and a gradient clip of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meki_edge.memory.base import MemoryLayer, Site, Slot, TableRecipe
from meki_edge.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class StemConfig:
    """STEM has no options: the row is as wide as the FFN."""


class StemLayer(MemoryLayer):
    """One STEM table; see the module's docstring."""

    kind = "stem"
    table_recipe = TableRecipe(separate_clip=True)

    def __init__(self, config: StemConfig, shape: ModelShape, slot: Slot, *, folded: bool) -> None:
        super().__init__()
        self.site = Site.FFN_UP
        self.row_dim = self.table_dim = shape.intermediate_size
        self.num_rows, self.stored_dim = shape.vocab_size, self.row_dim
        if not folded:
            self.table = nn.Parameter(torch.empty(shape.vocab_size, shape.intermediate_size))

    @property
    def flops_per_token(self) -> int:
        return 0

    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        return table_rows

    def fuse(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return rows

    def reset_parameters(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.table, std=math.sqrt(2 / sum(self.table.shape)), generator=generator)

    def upcycle(self, donor: Mapping[str, Tensor], embeddings: Tensor) -> None:
        self.table.copy_(embeddings @ donor["mlp.up_proj.weight"].T)
