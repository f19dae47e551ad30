"""Training batches: windows of real tokens in an order that depends on seed and step alone.

The training split is cut into windows of ``window_length + 1`` tokens that do not overlap (the
last token of a window is only ever a target). Each epoch visits all of them once, in its own
permutation. Windows cross documents; EOS is what the model sees of the border. Batches need no
state, so a resumed run, and both arms of a comparison, see the same data.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from meki_edge.errors import UserError


class TrainingWindows:
    """The windows of ``tokens`` ``[N]`` (memory-mapped or not).

    Raises:
        UserError: there are fewer tokens than one window needs.
    """

    def __init__(self, tokens: np.ndarray, window_length: int, seed: int, *, where: Path) -> None:
        span = window_length + 1
        self.num_windows = len(tokens) // span
        if self.num_windows == 0:
            raise UserError(
                f"the training split has {len(tokens)} tokens, a window needs {span}",
                where=where,
                fix="tokenize more text or shorten the windows with --window-length",
            )
        self._windows = tokens[: self.num_windows * span].reshape(self.num_windows, span)
        self._seed = seed
        self._permutation = lru_cache(maxsize=2)(self._draw_permutation)

    def batch(self, step: int, batch_size: int) -> np.ndarray:
        """Windows of 0-based ``step``: int64 ``[batch_size, window_length + 1]``."""
        positions = step * batch_size + np.arange(batch_size)
        epochs, offsets = np.divmod(positions, self.num_windows)
        chosen = [self._permutation(int(epoch))[offset] for epoch, offset in zip(epochs, offsets, strict=True)]
        return self._windows[chosen].astype(np.int64)

    def _draw_permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_windows)
