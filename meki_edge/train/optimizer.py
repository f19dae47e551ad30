"""AdamW with MeKi's recipe: which parameters decay, and what tables have of their own.

MeKi's official code trains with Megatron, whose rule exempts 1-D tensors (norm gains) and biases
from weight decay. Matrices and memory tables decay, and so do MeKi's scalars α and β: they are
0-D, which the rule does not exempt. Where a paper trains its table at another rate or decay, the
memory says so (:class:`TableRecipe`).

Tables are dense here: a row whose token is absent from a batch has a zero gradient, yet its
moments fade and it decays, as in plain AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from meki_edge.memory.base import TableRecipe
from meki_edge.model.decoder import CausalLM

RATE_SCALE = "learning_rate_scale"
"""A parameter group's key: its learning rate relative to the schedule's."""


def build_optimizer(
    model: CausalLM, *, weight_decay: float, betas: tuple[float, float], epsilon: float
) -> torch.optim.AdamW:
    """AdamW over all parameters of ``model``, grouped by weight decay and ``RATE_SCALE``.

    The learning rate is set before each step by :func:`set_learning_rate`.
    """
    recipes = {
        memory.table: memory.table_recipe
        for layer in model.model.layers
        for memory in layer.memories
        if memory.table_dim > 0
    }
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        recipe = recipes.get(parameter, TableRecipe())
        decay = weight_decay if recipe.weight_decay is None else recipe.weight_decay
        key = (decay if parameter.dim() != 1 else 0.0, recipe.learning_rate_scale)
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, RATE_SCALE: scale}
            for (decay, scale), parameters in groups.items()
        ],
        betas=betas,
        eps=epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every group's learning rate to ``rate`` times its scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE_SCALE]


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; the norm before, 0-D."""
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)
