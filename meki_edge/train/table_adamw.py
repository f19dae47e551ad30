r"""AdamW for a memory's table, at a cost that grows with the rows of a batch and not with the table.

The semantics are those of plain (dense) AdamW. There a row that a batch does not touch has a zero
gradient, and yet it changes: its moments fade, its last moments go on moving it, and it decays. All
of that has a closed form, since the learning rates are known in advance. So a row rests, as it was
after its last step s, until a batch touches it again, and is then caught up over the k steps that it
missed. With learning rates η, decay λ, r = β₁/√β₂ and :math:`D_t = \sum_{i \le t} \log(1 - η_i λ)`::

    p ← e^{ΔD} p - S · m / (√v + ε)        ΔD = D_{s+k} - D_s
    S = Σ_{j=1…k} w_{s+j} · r^j · e^{D_{s+k} - D_{s+j}}        w_t = η_t · √(1 - β₂^t) / (1 - β₁^t)
    m ← β₁^k m        v ← β₂^k v

S depends on s and k alone, and is a difference of two tail sums that are computed once for the whole
schedule: ``S = e^{ΔD} A_s - r^k A_{s+k}`` with ``A_s = r·e^{-(D_{s+1} - D_s)} · (w_{s+1} + A_{s+1})``.
The step that follows is AdamW's, its bias correction that of the global step, as every row has (in
effect) taken all steps.

One thing differs from plain AdamW: over missed steps ε fades together with √v. Where √v ≫ ε nothing
changes; where it is far below, a row that hardly moves moves by up to a third more (β 0.9, 0.95).

Shapes: N touched rows, R rows of the table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from meki_edge.errors import UserError
from meki_edge.memory import MemoryLayer

SETTLED_ROWS = 1 << 16


class Factors(NamedTuple):
    """What missed steps do to N rows, float32 ``[N, 1]`` each: see the module's equations."""

    keep: Tensor  # e^ΔD
    drift: Tensor  # S
    fade: Tensor  # β₁^k
    fade_sq: Tensor  # β₂^k


class Absence:
    """What AdamW does to a row in the steps that it misses, for one schedule of learning rates.

    Args:
        rates: the learning rate of every step of the run, ``[steps]``.
        weight_decay: decoupled, as a share of the learning rate.
        betas: of the moments; β₁ < √β₂, or the steps of an absent row would grow.
    """

    def __init__(self, rates: np.ndarray, *, weight_decay: float, betas: tuple[float, float]) -> None:
        self._betas = betas
        self._ratio = betas[0] / betas[1] ** 0.5
        steps = np.arange(1, len(rates) + 1)
        weights = rates * np.sqrt(1 - betas[1] ** steps) / (1 - betas[0] ** steps)
        log_kept = np.log1p(-rates * weight_decay)
        tails = np.zeros(len(rates) + 1)
        for step in reversed(range(len(rates))):
            tails[step] = self._ratio * np.exp(-log_kept[step]) * (weights[step] + tails[step + 1])
        self._tails = torch.from_numpy(tails)
        self._log_kept = torch.from_numpy(np.concatenate(([0.0], np.cumsum(log_kept))))

    def factors(self, last_step: Tensor, step: int) -> Factors:
        """For rows last stepped at ``last_step`` ``[N]`` (1-based, 0: never), after ``step`` steps."""
        device = last_step.device
        if self._tails.device != device:
            self._tails, self._log_kept = self._tails.to(device), self._log_kept.to(device)
        missed = (step - last_step).double()
        keep = torch.exp(self._log_kept[step] - self._log_kept[last_step])
        drift = keep * self._tails[last_step] - self._ratio**missed * self._tails[step]
        fades = (beta**missed for beta in self._betas)
        return Factors(*(factor[:, None] for factor in (keep, drift, *fades)))


class TableAdamW:
    """The table of one memory and its optimizer state.

    A step is :meth:`gather`, any number of forward and backward passes, then :meth:`step`. In
    between the memory reads a compact leaf ``[N, table_dim]``, so no gradient as large as the table
    is ever made.

    Args:
        memory: a memory in training form that has a table; :attr:`MemoryLayer.table_reader` is set.
        rates: the learning rate of every step of the run for this table, ``[steps]``.
        weight_decay, betas, epsilon: AdamW's.

    Raises:
        UserError: options under which an absent row has no bounded closed form.
    """

    def __init__(
        self,
        memory: MemoryLayer,
        rates: np.ndarray,
        *,
        weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        _check(float(rates.max()) * weight_decay, betas)
        self._memory, self._table = memory, memory.table
        self._rates, self._weight_decay, self._betas, self._epsilon = rates, weight_decay, betas, epsilon
        self._absence = Absence(rates, weight_decay=weight_decay, betas=betas)
        # Zeros that were never written take no memory on a CPU.
        self._exp_avg, self._exp_avg_sq = torch.zeros_like(self._table), torch.zeros_like(self._table)
        self._last_step = torch.zeros(len(self._table), dtype=torch.int64, device=self._table.device)
        self._done = 0
        memory.table_reader = self.read

    @torch.no_grad()
    def gather(self, ids: Tensor, unique: Tensor) -> Tensor:
        """Copy the rows that a step's whole batch touches: the leaf ``[N, table_dim]``.

        Args:
            ids: ``[B, T]``.
            unique: its distinct ids, ascending.
        """
        self._rows = self._memory.touched_rows(ids, unique)
        leaf, self._row_avg, self._row_avg_sq = self._caught_up(self._rows)
        self._leaf = leaf.requires_grad_()
        self._memory.table_reader = self._read_leaf
        return self._leaf

    @torch.no_grad()
    def step(self) -> None:
        """Apply AdamW to the gathered rows with the leaf's gradient, and put them back."""
        beta1, beta2 = self._betas
        rate, gradient = self._rates[self._done], self._leaf.grad
        self._done += 1
        row_avg = self._row_avg.lerp_(gradient, 1 - beta1)
        row_avg_sq = self._row_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = row_avg_sq.sqrt().mul_((1 - beta2**self._done) ** -0.5).add_(self._epsilon)
        rows = self._leaf.detach().mul_(1 - rate * self._weight_decay)
        rows.addcdiv_(row_avg, root, value=-rate / (1 - beta1**self._done))
        self._table.index_copy_(0, self._rows, rows)
        self._exp_avg.index_copy_(0, self._rows, row_avg)
        self._exp_avg_sq.index_copy_(0, self._rows, row_avg_sq)
        self._last_step.index_fill_(0, self._rows, self._done)
        del self._leaf, self._rows, self._row_avg, self._row_avg_sq
        self._memory.table_reader = self.read

    @torch.no_grad()
    def read(self, row_ids: Tensor) -> Tensor:
        """Rows ``[…, table_dim]`` as of now; nothing is written, so reading never changes a run."""
        return self._caught_up(row_ids.flatten())[0].unflatten(0, row_ids.shape)

    @torch.no_grad()
    def settle(self) -> None:
        """Catch the whole table up, at the end of a run, and leave it to itself."""
        for start in range(0, len(self._table), SETTLED_ROWS):
            rows = torch.arange(start, min(start + SETTLED_ROWS, len(self._table)), device=self._table.device)
            self._table.index_copy_(0, rows, self._caught_up(rows)[0])
        self._memory.table_reader = None

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint keeps beside the table."""
        return {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq, "last_step": self._last_step}

    def restore(self, tensors: dict[str, Tensor], done: int) -> None:
        """Take over what :meth:`tensors` gave after ``done`` steps."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        self._done = done

    def _read_leaf(self, row_ids: Tensor) -> Tensor:
        return F.embedding(torch.searchsorted(self._rows, row_ids), self._leaf)

    def _caught_up(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of ``rows`` ``[N]`` and of their moments, after the steps done."""
        values, avg, avg_sq = (x.index_select(0, rows) for x in (self._table, self._exp_avg, self._exp_avg_sq))
        factors = self._absence.factors(self._last_step[rows], self._done)
        keep, drift, fade, fade_sq = (factor.to(values.dtype) for factor in factors)
        values.mul_(keep).sub_(avg.div(avg_sq.sqrt().add_(self._epsilon)).mul_(drift))
        return values, avg.mul_(fade), avg_sq.mul_(fade_sq)


def _check(largest_decay: float, betas: tuple[float, float]) -> None:
    if largest_decay >= 1:
        raise UserError(
            f"a table's learning rate times its weight decay is {largest_decay:g}: one step would take all of a row",
            where="--learning-rate, --table-learning-rate-scale, --table-weight-decay",
            fix="keep the product of the three below 1 (those not given are the memory's recipe, or --weight-decay)",
        )
    if betas[0] >= betas[1] ** 0.5:
        raise UserError(
            f"beta1 {betas[0]:g} is not below the square root of beta2, {betas[1] ** 0.5:g}",
            where="training options",
            fix="lower beta1 or raise beta2: otherwise a table's rows move ever further while no batch touches them",
        )
