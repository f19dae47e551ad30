r"""MoLE: a mixture of lookup experts (arXiv 2503.15798; JieShibo/MoLE).

::

    x ← x + FFN(h) + Σ_j softmax(W_r h)_j · FFN_j( RMSNorm(E[t]) )       j = 1…num_experts

Every routed expert sees only the token's embedding, so its output folds: the ROM row is the
``num_experts × d`` outputs, and the router W_r is all that stays. The norm follows the official
code; equation 6 of the paper omits it. There is no table: training reads the embedding.
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
class MoleConfig:
    """Options of MoLE."""

    num_experts: int = 4
    """Routed experts a layer."""
    expert_size: int | None = None
    """Inner width of an expert; as wide as the FFN by default."""


class MoleLayer(MemoryLayer):
    """One layer's lookup experts; see the module's docstring."""

    kind = "mole"
    training_only = frozenset({"expert_norm", "gate_proj", "up_proj", "down_proj"})

    def __init__(self, config: MoleConfig, shape: ModelShape, slot: Slot, *, folded: bool) -> None:
        super().__init__()
        inner = config.expert_size or shape.intermediate_size
        if config.num_experts < 1 or inner < 1:
            raise UserError(
                f"num_experts is {config.num_experts}, expert_size {inner}",
                where="memories: mole",
                fix="give positive numbers",
            )
        self.site = Site.PARALLEL_FFN
        self.row_dim, self.table_dim = config.num_experts * shape.hidden_size, 0
        self.num_rows, self.stored_dim = shape.vocab_size, self.row_dim
        self._num_experts, self._num_layers = config.num_experts, shape.num_hidden_layers
        self.router = nn.Linear(shape.hidden_size, config.num_experts, bias=False)
        if not folded:
            self.expert_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
            self.gate_proj = nn.Parameter(torch.empty(config.num_experts, inner, shape.hidden_size))
            self.up_proj = nn.Parameter(torch.empty(config.num_experts, inner, shape.hidden_size))
            self.down_proj = nn.Parameter(torch.empty(config.num_experts, shape.hidden_size, inner))

    @property
    def flops_per_token(self) -> int:
        return 2 * self._num_experts * self.router.in_features + 2 * self.row_dim

    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        normed = self.expert_norm(embeddings)
        gate = torch.einsum("nd,efd->nef", normed, self.gate_proj)
        up = torch.einsum("nd,efd->nef", normed, self.up_proj)
        return torch.einsum("nef,edf->ned", F.silu(gate) * up, self.down_proj).flatten(1)

    def fuse(self, hidden: Tensor, rows: Tensor) -> Tensor:
        weights = torch.softmax(self.router(hidden), dim=-1)
        experts = rows.unflatten(-1, (self._num_experts, -1))
        return (weights.unsqueeze(-2) @ experts).squeeze(-2)

    def reset_parameters(self, generator: torch.Generator) -> None:
        for weight in (self.router.weight, self.gate_proj, self.up_proj):
            nn.init.normal_(weight, std=INIT_STD, generator=generator)
        nn.init.normal_(self.down_proj, std=INIT_STD / math.sqrt(2 * self._num_layers), generator=generator)
        nn.init.ones_(self.expert_norm.weight)
