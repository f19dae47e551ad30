"""Read rows of a ROM file by id, with ``pread``: the reference for the C++ reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meki_edge.errors import UserError
from meki_edge.rom import spec as rom_spec
from meki_edge.rom.codec import decode_rows
from meki_edge.rom.spec import PAGE_BYTES, TENSOR
from meki_edge.safetensors_io import SafetensorsFile


class RomReader:
    """Random access to the rows of a ROM file; nothing but what is asked for is kept in memory.

    Raises:
        UserError: the file is missing, truncated, or not a ROM file that this version knows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SafetensorsFile(path)
        try:
            self.spec = self._check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> RomReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Dequantized rows of token ``ids`` ``[n]``: float32 ``[n, row_dim]``. Each distinct row is read once.

        Raises:
            UserError: an id out of range, a damaged row, or a file that shrank.
        """
        unique, inverse = np.unique(self._checked(ids), return_inverse=True)
        raw = self._file.read_rows(TENSOR, unique)
        return decode_rows(raw, self.spec, unique, self.path)[inverse]

    def raw(self, ids: np.ndarray) -> np.ndarray:
        """The stored bytes of rows ``ids`` ``[n]``: uint8 ``[n, row_stride]``."""
        return self._file.read_rows(TENSOR, self._checked(ids))

    def raw_range(self, start: int, stop: int) -> np.ndarray:
        """The stored bytes of rows ``start`` … ``stop - 1`` in one read: uint8 ``[stop - start, row_stride]``."""
        return self._file.read(TENSOR, slice(start, stop))

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(ids)
        assert ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size), "ids are a list of integers"
        outside = (ids < 0) | (ids >= self.spec.num_rows)
        if outside.any():
            raise UserError(
                f"token id {ids[outside][0]} has no row: the file has {self.spec.num_rows}",
                where=self.path,
                fix="use the tokenizer and the ROM of one model",
            )
        return ids.astype(np.int64)

    def _check(self) -> rom_spec.RomSpec:
        def broken(what: str) -> UserError:
            return UserError(what, where=self.path, fix="regenerate the file with `meki-edge reparam`")

        entry = self._file.tensors.get(TENSOR)
        spec = rom_spec.from_metadata(self._file.metadata, entry.shape if entry else (), self.path)
        assert entry is not None
        if set(self._file.tensors) != {TENSOR}:
            raise broken(f"the file holds other tensors than {TENSOR!r}: {', '.join(sorted(self._file.tensors))}")
        if entry.dtype != "U8":
            raise broken(f"the tensor {TENSOR!r} is {entry.dtype}, not U8")
        if entry.start % PAGE_BYTES:
            raise broken(f"the rows start at byte {entry.start}, which is not a multiple of {PAGE_BYTES}")
        if entry.stop != self._file.size:
            raise broken(f"the rows end at byte {entry.stop} but the file has {self._file.size}")
        return spec
