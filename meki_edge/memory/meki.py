r"""MeKi: Memory-based Expert Knowledge Injection (ningding-o/MeKi, @a196d7a).

Training form, per layer, with table :math:`M \in V \times m` and the model's own input embedding E::

    z = M[t] + β · G(E[t])              G(e) = W_down(SiLU(W_gate e) ⊙ W_up e)
    e = α · RMSNorm_m(z)                the ROM row: everything up to here depends on t alone
    v = e + σ(W_g h)                    h: the FFN's normalised input
    y = RMSNorm_d(W_out v)              x ← x + FFN(h) + y

Folding stores e for every id; M, G, α, β and the mix norm vanish. 2dm + d parameters stay in RAM.
The paper's ablations are options: static-only (z = M[t]), dynamic-only (z = β·G(E[t])), a linear
G, the fusion of v, and four positions. The input norm of the two sequential positions is not
published; ours is an own RMSNorm.

Limits: E is not detached, so the embedding also learns through the memory (as in the official
code). The block is not an identity at initialisation: y has rms 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meki_edge.errors import UserError, nearest
from meki_edge.memory.base import MemoryLayer, Site, Slot
from meki_edge.model_shape import ModelShape

INIT_STD = 0.014  # official code: M, W_g, W_out, and G's gate and up projections

POSITIONS = (Site.PARALLEL_FFN, Site.PARALLEL_ATTENTION, Site.AFTER_ATTENTION, Site.AFTER_FFN)
FUSIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_sigmoid": lambda rows, gate: rows + torch.sigmoid(gate),
    "mul_sigmoid": lambda rows, gate: rows * torch.sigmoid(gate),
    "add_silu": lambda rows, gate: rows + F.silu(gate),
    "mul_silu": lambda rows, gate: rows * F.silu(gate),
}
CONTENTS = ("both", "static", "dynamic")
PROJECTORS = ("swiglu", "linear")


@dataclass(frozen=True, kw_only=True)
class MekiConfig:
    """Options of MeKi; the defaults are the paper's final form."""

    memory_dim: int
    """m, the width of a row (128 at 0.6B, 256 at 1.7B, 512 at 4B in the paper)."""
    position: str = Site.PARALLEL_FFN.value
    """``parallel_ffn``, ``parallel_attention``, ``after_attention`` or ``after_ffn``."""
    fusion: str = "add_sigmoid"
    """How rows e and gate g meet: ``add`` or ``mul``, with ``sigmoid`` or ``silu``."""
    content: str = "both"
    """``both``, ``static`` (the table alone) or ``dynamic`` (the projected embedding alone)."""
    projector: str = "swiglu"
    """G: ``swiglu`` or ``linear`` (one m×d matrix)."""


class SwigluProjector(nn.Module):
    """G: a SwiGLU from the token embedding ``[N, d]`` to the memory's width ``[N, m]``, inner width d/2."""

    def __init__(self, hidden_size: int, memory_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, hidden_size // 2, bias=False)
        self.up_proj = nn.Linear(hidden_size, hidden_size // 2, bias=False)
        self.down_proj = nn.Linear(hidden_size // 2, memory_dim, bias=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(embeddings)) * self.up_proj(embeddings))

    def reset_parameters(self, generator: torch.Generator, num_layers: int) -> None:
        """Normal; the down projection is scaled by 1/√(2L)."""
        nn.init.normal_(self.gate_proj.weight, std=INIT_STD, generator=generator)
        nn.init.normal_(self.up_proj.weight, std=INIT_STD, generator=generator)
        nn.init.normal_(self.down_proj.weight, std=INIT_STD / math.sqrt(2 * num_layers), generator=generator)


class LinearProjector(nn.Linear):
    """G of the ablation: one matrix."""

    def __init__(self, hidden_size: int, memory_dim: int) -> None:
        super().__init__(hidden_size, memory_dim, bias=False)

    def reset_parameters(self, generator: torch.Generator | None = None, num_layers: int = 1) -> None:
        """Normal, scaled by 1/√(2L) as the SwiGLU's down projection."""
        nn.init.normal_(self.weight, std=INIT_STD / math.sqrt(2 * num_layers), generator=generator)


class MekiLayer(MemoryLayer):
    """One MeKi block; see the module's docstring for the equations."""

    kind = "meki"
    training_only = frozenset({"table", "projector", "mix_norm", "alpha", "beta"})

    def __init__(self, config: MekiConfig, shape: ModelShape, slot: Slot, *, folded: bool) -> None:
        super().__init__()
        _check(config)
        self.site = Site(config.position)
        self.row_dim = config.memory_dim
        self.num_rows, self.stored_dim = shape.vocab_size, self.row_dim
        self.table_dim = 0 if config.content == "dynamic" else config.memory_dim
        self._dynamic = config.content != "static"
        self._num_layers = shape.num_hidden_layers
        self._combine = FUSIONS[config.fusion]
        if self.site.sequential:
            self.input_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.gate_proj = nn.Linear(shape.hidden_size, config.memory_dim, bias=False)
        self.out_proj = nn.Linear(config.memory_dim, shape.hidden_size, bias=False)
        self.out_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        if folded:
            return
        if self.table_dim:
            self.table = nn.Parameter(torch.empty(shape.vocab_size, config.memory_dim))
        # α and β are 0-D, as in the official code, so weight decay reaches them.
        self.alpha = nn.Parameter(torch.ones(()))
        if self._dynamic:
            projector_class = SwigluProjector if config.projector == "swiglu" else LinearProjector
            self.projector = projector_class(shape.hidden_size, config.memory_dim)
            self.beta = nn.Parameter(torch.ones(()))
        self.mix_norm = nn.RMSNorm(config.memory_dim, eps=shape.rms_norm_eps)

    @property
    def flops_per_token(self) -> int:
        return 4 * self.out_proj.in_features * self.out_proj.out_features

    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        if not self._dynamic:
            mixed = table_rows
        elif self.table_dim == 0:
            mixed = self.beta * self.projector(embeddings)
        else:
            mixed = table_rows + self.beta * self.projector(embeddings)
        return self.alpha * self.mix_norm(mixed)

    def fuse(self, hidden: Tensor, rows: Tensor) -> Tensor:
        if not self.site.sequential:
            return self._update(hidden, rows)
        return hidden + self._update(self.input_norm(hidden), rows)

    def _update(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.out_norm(self.out_proj(self._combine(rows, self.gate_proj(hidden))))

    def reset_parameters(self, generator: torch.Generator) -> None:
        if self.table_dim:
            nn.init.normal_(self.table, std=INIT_STD, generator=generator)
        nn.init.normal_(self.gate_proj.weight, std=INIT_STD, generator=generator)
        nn.init.normal_(self.out_proj.weight, std=INIT_STD, generator=generator)
        if self._dynamic:
            self.projector.reset_parameters(generator, self._num_layers)
            nn.init.ones_(self.beta)
        nn.init.ones_(self.alpha)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)


def _check(config: MekiConfig) -> None:
    where = "memories: meki"
    if config.memory_dim < 1:
        raise UserError(f"memory_dim is {config.memory_dim}", where=where, fix="give a positive memory_dim")
    for name, known in (
        ("position", [site.value for site in POSITIONS]),
        ("fusion", list(FUSIONS)),
        ("content", list(CONTENTS)),
        ("projector", list(PROJECTORS)),
    ):
        value = getattr(config, name)
        if value not in known:
            raise UserError(f"unknown {name} {value!r}{nearest(value, known)}", where=where, fix=f"use {', '.join(known)}")
