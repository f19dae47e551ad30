"""AdamW with MeKi's recipe: which parameters decay, what tables have of their own, how gradients are clipped.

MeKi's official code trains with Megatron, whose rule exempts 1-D tensors (norm gains) and biases
from weight decay. Matrices and memory tables decay, and so do MeKi's scalars α and β: they are
0-D, which the rule does not exempt. Where a paper trains its table otherwise (another rate or
decay, a gradient norm of its own), the memory says so (:class:`TableRecipe`), and the run's
options may overrule it.

Tables take AdamW's steps row by row (:mod:`meki_edge.train.table_adamw`): what a step costs grows
with the distinct rows of its batch, not with the table. The token embedding stays dense, as the
output head gives each of its rows a gradient (an untied one could do with less).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from meki_edge.errors import UserError
from meki_edge.memory import MemoryLayer, Site
from meki_edge.model.decoder import CausalLM
from meki_edge.train.config import TrainConfig
from meki_edge.train.schedule import learning_rate
from meki_edge.train.table_adamw import TableAdamW

T = TypeVar("T")


class Norms(NamedTuple):
    """Gradient norms of a batch before clipping, 0-D each."""

    total: Tensor
    """Of all gradients, but for those that ``tables`` covers."""
    tables: Tensor | None
    """Of the tables that are clipped by a norm of their own, if any are."""


class Optimizer:
    """AdamW over a model on its device, for one run: a step is :meth:`begin`, gradients, :meth:`clip`, :meth:`step`.

    Raises:
        UserError: options that do not suit the model's memories.
    """

    def __init__(self, model: CausalLM, config: TrainConfig) -> None:
        assert config.warmup_steps is not None, "the configuration was not checked"
        self._config = config
        self.rates = np.array(
            [
                learning_rate(
                    step,
                    peak=config.learning_rate,
                    minimum_ratio=config.minimum_learning_rate_ratio,
                    warmup_steps=config.warmup_steps,
                    steps=config.steps,
                )
                for step in range(config.steps)
            ]
        )
        memories = [memory for layer in model.model.layers for memory in layer.memories if memory.table_dim > 0]
        self._tables = [self._table_optimizer(memory) for memory in memories]
        self._apart = [_either(config.separate_table_clip, memory.table_recipe.separate_clip) for memory in memories]
        tables = {memory.table for memory in memories}
        self._parameters = [parameter for parameter in model.parameters() if parameter not in tables]
        self._dense = torch.optim.AdamW(
            [
                {"params": [p for p in self._parameters if p.dim() != 1], "weight_decay": config.weight_decay},
                {"params": [p for p in self._parameters if p.dim() == 1], "weight_decay": 0.0},
            ],
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        self._late = _augmented_up_projections(model) if config.freeze_up_steps else []
        self._leaves: list[Tensor] = []

    def begin(self, step: int, ids: Tensor) -> None:
        """Prepare 0-based ``step`` over ``ids`` ``[B, T]``, all micro-batches together."""
        for parameter in self._late:
            parameter.requires_grad_(step >= self._config.freeze_up_steps)
        unique = ids.unique() if self._tables else ids  # once for all tables
        self._leaves = [table.gather(ids, unique) for table in self._tables]
        for group in self._dense.param_groups:
            group["lr"] = float(self.rates[step])

    def clip(self) -> Norms:
        """Scale the gradients to a global norm of at most ``clip_norm``: all together, or some tables apart."""
        together, apart = list(self._parameters), []
        for leaf, own in zip(self._leaves, self._apart, strict=True):
            (apart if own else together).append(leaf)
        norms = [
            nn.utils.clip_grad_norm_(group, self._config.clip_norm, foreach=True) if group else None
            for group in (together, apart)
        ]
        assert norms[0] is not None
        return Norms(norms[0], norms[1])

    def step(self) -> None:
        """Apply the gradients and drop them."""
        self._dense.step()
        self._dense.zero_grad()
        for table in self._tables:
            table.step()
        self._leaves = []

    def settle(self) -> None:
        """Bring every table row up to date, at the end of a run."""
        for table in self._tables:
            table.settle()

    def tensors(self) -> dict[str, Tensor]:
        """The state, by name, as a checkpoint keeps it."""
        state = self._dense.state_dict()["state"]
        named = {f"dense/{index}/{key}": tensor for index, values in state.items() for key, tensor in values.items()}
        for index, table in enumerate(self._tables):
            named |= {f"table/{index}/{key}": tensor for key, tensor in table.tensors().items()}
        return named

    def restore(self, tensors: Mapping[str, Tensor], done: int) -> None:
        """Take over the state that :meth:`tensors` gave after ``done`` steps."""
        parts: dict[str, dict[int, dict[str, Tensor]]] = {"dense": {}, "table": {}}
        for name, tensor in tensors.items():
            part, index, key = name.split("/")
            parts[part].setdefault(int(index), {})[key] = tensor
        self._dense.load_state_dict({"state": parts["dense"], "param_groups": self._dense.state_dict()["param_groups"]})
        for index, table in enumerate(self._tables):
            table.restore(parts["table"][index], done)

    def _table_optimizer(self, memory: MemoryLayer) -> TableAdamW:
        config, recipe = self._config, memory.table_recipe
        return TableAdamW(
            memory,
            self.rates * _either(config.table_learning_rate_scale, recipe.learning_rate_scale),
            weight_decay=_either(config.table_weight_decay, _either(recipe.weight_decay, config.weight_decay)),
            betas=(config.beta1, config.beta2),
            epsilon=config.epsilon,
        )


def _augmented_up_projections(model: CausalLM) -> list[nn.Parameter]:
    """The up projections to whose output a memory adds."""
    augmented = [
        layer.mlp.up_proj.weight
        for layer in model.model.layers
        if any(memory.site is Site.FFN_UP_RESIDUAL for memory in layer.memories)
    ]
    if not augmented:
        raise UserError(
            "--freeze-up-steps is given, but no memory of the model adds to an up projection",
            where="--freeze-up-steps",
            fix="leave it out, or use such a memory (staple)",
        )
    return augmented


def _either(given: T | None, default: T) -> T:
    return default if given is None else given
