"""Validation loss, one definition for training form and ROM form.

Always float32, whatever precision the model trained in: float32 is what is exported, so the
numbers of `train` and `reparam` compare.

Shapes: N windows, B windows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from meki_edge.model.decoder import CausalLM, Rows

RowsSource = Callable[[Tensor], Rows]
"""From token ids ``[B, T]`` to each memory's rows in float32; :class:`meki_edge.model.rom_rows.RomRows` is one."""

BATCH_LOGITS = 1 << 23


@torch.no_grad()
def validation_loss(
    model: CausalLM,
    windows: np.ndarray,
    *,
    rows_source: RowsSource | None = None,
    advance: Callable[[int], object] | None = None,
) -> float:
    """Mean cross-entropy in nats of every token of ``windows`` but the first of each.

    Args:
        model: float32, in training form, or in ROM form with ``rows_source``. Not changed.
        windows: int64 ``[N, T + 1]``, as :meth:`TokenShards.validation_windows` gives.
        rows_source: where the ROM form's rows come from.
        advance: told the number of windows done after each batch.
    """
    device = next(model.parameters()).device
    batch_size = max(1, BATCH_LOGITS // (windows.shape[1] * model.config.vocab_size))
    total = 0.0
    for start in range(0, len(windows), batch_size):
        batch = torch.from_numpy(windows[start : start + batch_size]).to(device)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        rows = None if rows_source is None else rows_source(inputs)
        logits = model(inputs, rows=rows).flatten(0, 1)
        total += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
        if advance is not None:
            advance(len(batch))
    return total / (len(windows) * (windows.shape[1] - 1))
