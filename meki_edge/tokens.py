"""Token shards on disk: flat little-endian files, memory-mapped, documents closed by an EOS token.

A tokens directory is the output of ``meki-edge tokenize``: ``tokenizer.json``, ``train.bin`` and
``validation.bin``, and in its manifest's metrics ``token_bytes`` (2 or 4), ``vocab_size`` and
``eos_token_id``. No document lies in both splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meki_edge import manifest
from meki_edge.errors import UserError

STAGE = "tokenize"
TOKENIZER = "tokenizer.json"
TRAIN = "train.bin"
VALIDATION = "validation.bin"


@dataclass(frozen=True, kw_only=True)
class TokenShards:
    """A tokens directory, opened: ``train`` and ``validation`` are read-only maps of token ids ``[N]``."""

    directory: Path
    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    eos_token_id: int
    tokenizer_sha256: str

    def validation_windows(self, num_windows: int, length: int) -> np.ndarray:
        """The first ``num_windows`` non-overlapping windows of validation text: int64 ``[N, length]``.

        Raises:
            UserError: the validation split is too short for a single window.
        """
        available = self.count_validation_windows(num_windows, length)
        return self.validation[: available * length].reshape(available, length).astype(np.int64)

    def count_validation_windows(self, num_windows: int, length: int) -> int:
        """How many windows :meth:`validation_windows` gives.

        Raises:
            UserError: as there.
        """
        available = min(num_windows, len(self.validation) // length)
        if available < 1:
            raise UserError(
                f"the validation split has {len(self.validation)} tokens, a window needs {length}",
                where=self.directory / VALIDATION,
                fix="tokenize more text, raise --validation-fraction, or shorten the windows",
            )
        return available


def open_shards(directory: Path) -> TokenShards:
    """Open a tokens directory; raise :class:`UserError` if it is not one, or its files changed."""
    found = manifest.load(directory, stages=(STAGE,))
    manifest.verify(directory, found)
    dtype = np.dtype("<u2") if found.metrics["token_bytes"] == 2 else np.dtype("<u4")

    def mapped(name: str) -> np.ndarray:
        path = directory / name
        return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)

    return TokenShards(
        directory=directory,
        train=mapped(TRAIN),
        validation=mapped(VALIDATION),
        vocab_size=found.metrics["vocab_size"],
        eos_token_id=found.metrics["eos_token_id"],
        tokenizer_sha256=found.files[TOKENIZER].sha256,
    )
