"""The learning rate: linear warmup, then a cosine from the peak to a share of it."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, minimum_ratio: float, warmup_steps: int, steps: int) -> float:
    """The rate of 0-based ``step`` of ``steps``.

    Rises to ``peak`` in ``warmup_steps`` steps (the first step is already above zero) and falls to
    ``peak · minimum_ratio`` at the last step. MeKi's recipe: 4e-4 → 2e-4, ratio 0.5.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps + 1) / (steps - warmup_steps)
    share = minimum_ratio + (1 - minimum_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return peak * share
