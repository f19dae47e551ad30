"""From token ids to what the memories' ``fuse`` takes, through ROM files.

Shapes: B sequences, T tokens, K the most rows of a token among them, n distinct rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from meki_edge.errors import UserError
from meki_edge.memory import PaddedRows
from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import Rows
from meki_edge.model.row_spaces import RowSpace, distribute, row_spaces
from meki_edge.rom.addressing import NOTHING, Addressing, Ragged
from meki_edge.rom.reader import RomReader

MASKED = -1e9
"""Added to what a token's missing rows score: their softmax is exactly zero."""

RowIds = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""As :meth:`Addressing.row_ids`, of one sequence."""

ReadRows = Callable[[np.ndarray], np.ndarray]
"""From distinct row ids int64 ``[n]``, ascending, to rows float32 ``[n, dim]``."""


class RomRows:
    """The rows of a model in ROM form, from its ROM files (which stay the caller's).

    Args:
        config: the model's.
        readers: one a row space, in the order of :func:`row_spaces`; none for a dense model.

    Raises:
        UserError: the files are not this model's.
    """

    def __init__(self, config: ModelConfig, readers: Sequence[RomReader]) -> None:
        self._config, self._readers = config, list(readers)
        self._spaces = row_spaces(config)
        if len(self._readers) != len(self._spaces):
            raise UserError(
                f"the model reads {len(self._spaces)} ROM files, {len(self._readers)} were given",
                where=self._readers[0].path if self._readers else "rom",
                fix="give every ROM file of the model's directory, in order",
            )
        for space, reader in zip(self._spaces, self._readers, strict=True):
            _require_fit(space, reader)

    def __call__(self, ids: Tensor, before: np.ndarray | None = None) -> Rows:
        """Rows of token ``ids`` ``[B, T]`` (int64), for each layer's memories.

        Args:
            before: the ids before the first token of every sequence, oldest first, any number:
                hashed addresses read the last of them. None: a text begins here.

        Raises:
            UserError: an id that has no rows, or a damaged file.
        """
        history = NOTHING if before is None else before
        fetched = []
        for reader in self._readers:
            row_ids, counts = addresses(reader.row_ids, ids.cpu().numpy(), history)
            fetched.append(gather(reader.spec.addressing, row_ids, counts, reader.rows, ids.device))
        return distribute(self._config, self._spaces, fetched)


def rom_rows(
    config: ModelConfig, readers: Sequence[RomReader], ids: Tensor, before: np.ndarray | None = None
) -> Rows:
    """:class:`RomRows` for a single call."""
    return RomRows(config, readers)(ids, before)


def addresses(row_ids: RowIds, ids: np.ndarray, before: np.ndarray = NOTHING) -> tuple[np.ndarray, np.ndarray]:
    """Row ids int64 ``[B, T, K]`` and counts ``[B, T]`` of token ``ids`` ``[B, T]``, each sequence after ``before``."""
    found, counts = zip(*(row_ids(sequence, before) for sequence in ids), strict=True)
    return np.stack(found), np.stack(counts)


def gather(
    addressing: Addressing,
    row_ids: np.ndarray,
    counts: np.ndarray,
    read: ReadRows,
    device: torch.device | None = None,
) -> Tensor | PaddedRows:
    """The rows at ``row_ids`` ``[B, T, ≥K]``, of which each token's first ``counts`` ``[B, T]`` are meant.

    Each distinct row is read once. Returns ``[B, T, K·dim]``, or :class:`PaddedRows` of
    ``[B, T, K, dim]`` with ragged addressing.
    """
    slots = int(counts.max())
    row_ids = row_ids[..., :slots]
    meant = np.arange(slots) < counts[..., None]
    unique, inverse = np.unique(row_ids[meant], return_inverse=True)
    rows = torch.from_numpy(read(unique)).to(device)
    places = np.full(row_ids.shape, len(unique))  # of a row of zeros
    places[meant] = inverse
    values = F.embedding(torch.from_numpy(places).to(device), torch.cat((rows, rows.new_zeros(1, rows.shape[1]))))
    if not isinstance(addressing, Ragged):
        return values.flatten(2)
    mask = rows.new_zeros(meant.shape).masked_fill_(torch.from_numpy(~meant).to(device), MASKED)
    return PaddedRows(values, mask)


def _require_fit(space: RowSpace, reader: RomReader) -> None:
    spec = reader.spec
    unfit = [
        f"the {what} is {found}, the model needs {expected}"
        for what, found, expected in (
            ("addressing", spec.addressing.kind, space.addressing),
            ("number of rows", spec.num_rows, space.num_rows),
            ("row's number of elements", spec.row_dim, space.row_dim),
        )
        if found != expected
    ]
    if spec.addressing.rows_per_token > space.rows_per_token:
        unfit.append(f"a token has up to {spec.addressing.rows_per_token} rows, the model takes {space.rows_per_token}")
    if unfit:
        raise UserError(
            unfit[0], where=reader.path, fix="give the ROM files that `meki-edge reparam` wrote with this model"
        )
