r"""MeKi: Memory-based Expert Knowledge Injection (ningding-o/MeKi, @a196d7a).

Training form, per layer, with table :math:`M \in V \times m` and the model's own input embedding E::

    z = M[t] + β · G(E[t])              G(e) = W_down(SiLU(W_gate e) ⊙ W_up e)
    e = α · RMSNorm_m(z)                the ROM row: everything up to here depends on t alone
    v = e + σ(W_g h)                    h: the FFN's normalised input
    y = RMSNorm_d(W_out v)              x ← x + FFN(h) + y

Folding stores e for every id; M, G, α, β and the mix norm vanish. 2dm + d parameters stay in RAM.

Limits: E is not detached, so the embedding also learns through the memory (as in the official
code). The block is not an identity at initialisation: y has rms 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meki_edge.errors import UserError
from meki_edge.memory.base import MemoryLayer, Site
from meki_edge.model_shape import ModelShape

INIT_STD = 0.014  # official code: M, W_g, W_out, and G's gate and up projections


@dataclass(frozen=True, kw_only=True)
class MekiConfig:
    """Options of MeKi."""

    memory_dim: int
    """m, the width of a row (128 at 0.6B, 256 at 1.7B, 512 at 4B in the paper)."""


class Projector(nn.Module):
    """G: a SwiGLU from the token embedding ``[N, d]`` to the memory's width ``[N, m]``, inner width d/2."""

    def __init__(self, hidden_size: int, memory_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, hidden_size // 2, bias=False)
        self.up_proj = nn.Linear(hidden_size, hidden_size // 2, bias=False)
        self.down_proj = nn.Linear(hidden_size // 2, memory_dim, bias=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(embeddings)) * self.up_proj(embeddings))


class MekiLayer(MemoryLayer):
    """One MeKi block; see the module's docstring for the equations."""

    kind = "meki"
    site = Site.PARALLEL_FFN
    training_only = frozenset({"table", "projector", "mix_norm", "alpha", "beta"})

    def __init__(self, config: MekiConfig, shape: ModelShape, *, folded: bool) -> None:
        super().__init__()
        if config.memory_dim < 1:
            raise UserError(
                f"memory_dim is {config.memory_dim}", where="memories: meki", fix="give a positive memory_dim"
            )
        self.row_dim = config.memory_dim
        self._num_layers = shape.num_hidden_layers
        self.gate_proj = nn.Linear(shape.hidden_size, config.memory_dim, bias=False)
        self.out_proj = nn.Linear(config.memory_dim, shape.hidden_size, bias=False)
        self.out_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        if not folded:
            self.table = nn.Parameter(torch.empty(shape.vocab_size, config.memory_dim))
            self.projector = Projector(shape.hidden_size, config.memory_dim)
            self.mix_norm = nn.RMSNorm(config.memory_dim, eps=shape.rms_norm_eps)
            # 0-D, as in the official code, so weight decay reaches them: see train/optimizer.py.
            self.alpha = nn.Parameter(torch.ones(()))
            self.beta = nn.Parameter(torch.ones(()))

    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        return self.alpha * self.mix_norm(table_rows + self.beta * self.projector(embeddings))

    def fuse(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.out_norm(self.out_proj(rows + torch.sigmoid(self.gate_proj(hidden))))

    def reset_parameters(self, generator: torch.Generator) -> None:
        for weight in (
            self.table,
            self.gate_proj.weight,
            self.out_proj.weight,
            self.projector.gate_proj.weight,
            self.projector.up_proj.weight,
        ):
            nn.init.normal_(weight, std=INIT_STD, generator=generator)
        down_std = INIT_STD / math.sqrt(2 * self._num_layers)
        nn.init.normal_(self.projector.down_proj.weight, std=down_std, generator=generator)
        for norm in (self.mix_norm, self.out_norm):
            nn.init.ones_(norm.weight)
        for scalar in (self.alpha, self.beta):
            nn.init.ones_(scalar)
