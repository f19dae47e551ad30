r"""PLE: per-layer embeddings (Gemma 3n and 4; `transformers` ``modular_gemma3n.py``).

Per layer, with the scaled embedding ē = √d·E[t] and width p::

    P = ( RMSNorm_p( W ē / √d ) + √p · T[t] ) / √2       the ROM row: the projection W folds too
    u = RMSNorm_d( W_proj( gelu_tanh(W_gate x) ⊙ P ) )
    x ← (x + u) · s                                      Gemma 4; without s, Gemma 3n's form

at the end of the layer. 2dp + d parameters and 4dp FLOPs a layer stay. Gemma shares one gain of
RMSNorm_p between all layers; ours is one a layer, which folds away just the same.

Limit: only text. Gemma's soft image and audio tokens have no id, so their W can not fold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meki_edge.errors import UserError
from meki_edge.memory.base import MemoryLayer, Site, Slot
from meki_edge.model_shape import ModelShape

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class PleConfig:
    """Options of PLE."""

    memory_dim: int = 256
    """p, the width of a row."""
    layer_scalar: bool = True
    """Scale the layer's output by a learned s, as Gemma 4 does."""


class PleLayer(MemoryLayer):
    """One layer's part of the per-layer embedding; see the module's docstring."""

    kind = "ple"
    training_only = frozenset({"table", "projection", "projection_norm"})

    def __init__(self, config: PleConfig, shape: ModelShape, slot: Slot, *, folded: bool) -> None:
        super().__init__()
        if config.memory_dim < 1:
            raise UserError(f"memory_dim is {config.memory_dim}", where="memories: ple", fix="give a positive width")
        self.site = Site.AFTER_FFN
        self.row_dim = self.table_dim = config.memory_dim
        self.num_rows, self.stored_dim = shape.vocab_size, self.row_dim
        self.gate_proj = nn.Linear(shape.hidden_size, config.memory_dim, bias=False)
        self.out_proj = nn.Linear(config.memory_dim, shape.hidden_size, bias=False)
        self.out_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.layer_scalar = nn.Parameter(torch.ones(())) if config.layer_scalar else None
        if not folded:
            self.table = nn.Parameter(torch.empty(shape.vocab_size, config.memory_dim))
            self.projection = nn.Linear(shape.hidden_size, config.memory_dim, bias=False)
            self.projection_norm = nn.RMSNorm(config.memory_dim, eps=shape.rms_norm_eps)

    @property
    def flops_per_token(self) -> int:
        return 4 * self.out_proj.in_features * self.out_proj.out_features

    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        # W(√d·E)/√d = W E: the two scales cancel.
        projected = self.projection_norm(self.projection(embeddings))
        return (projected + math.sqrt(self.row_dim) * table_rows) / math.sqrt(2)

    def fuse(self, hidden: Tensor, rows: Tensor) -> Tensor:
        gated = F.gelu(self.gate_proj(hidden), approximate="tanh") * rows
        stream = hidden + self.out_norm(self.out_proj(gated))
        return stream if self.layer_scalar is None else stream * self.layer_scalar

    def reset_parameters(self, generator: torch.Generator) -> None:
        for weight in (self.table, self.gate_proj.weight, self.out_proj.weight, self.projection.weight):
            nn.init.normal_(weight, std=INIT_STD, generator=generator)
        for gain in (self.out_norm.weight, self.projection_norm.weight):
            nn.init.ones_(gain)
        if self.layer_scalar is not None:
            nn.init.ones_(self.layer_scalar)
