"""Read rows of a ROM file by id, with ``pread``: the reference for the C++ reader."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from meki_edge.errors import UserError
from meki_edge.rom import spec as rom_spec
from meki_edge.rom.addressing import NOTHING, TENSORS
from meki_edge.rom.codec import decode_rows
from meki_edge.rom.spec import CODECS, PAGE_BYTES, TENSOR
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

    def fetch(self, token_ids: np.ndarray, before: np.ndarray = NOTHING) -> tuple[np.ndarray, np.ndarray]:
        """All rows of ``token_ids`` ``[T]``, given the ids ``before`` them (oldest first).

        Returns float32 ``[T, K, row_dim]`` (zeros where a token has fewer than K rows) and the
        counts int64 ``[T]``.

        Raises:
            UserError: a token id that has no rows, a damaged row, or a file that shrank.
        """
        row_ids, counts = self.row_ids(token_ids, before)
        values = np.zeros((*row_ids.shape, self.spec.row_dim), np.float32)
        meant = np.arange(row_ids.shape[1]) < counts[:, None]
        values[meant] = self.rows(row_ids[meant])
        return values, counts

    def row_ids(self, token_ids: np.ndarray, before: np.ndarray = NOTHING) -> tuple[np.ndarray, np.ndarray]:
        """The file's :meth:`Addressing.row_ids`; a token id that has no rows is a :class:`UserError`."""
        for ids in (token_ids, before):
            self._checked(ids, self.spec.num_tokens, "token id")
        return self.spec.addressing.row_ids(token_ids, before)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Dequantized rows ``ids`` ``[n]``: float32 ``[n, row_dim]``. Each distinct row is read once.

        Raises:
            UserError: an id out of range, a damaged row, or a file that shrank.
        """
        unique, inverse = np.unique(self._checked(ids, self.spec.num_rows, "row"), return_inverse=True)
        raw = self._file.read_rows(TENSOR, unique)
        return decode_rows(raw, self.spec, unique, self.path)[inverse]

    def segment(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Segment ``index`` of rows ``ids`` ``[n]``, dequantized: float32 ``[n, dim]``. Nothing else is read.

        Raises:
            UserError: as :meth:`rows`.
        """
        segment = self.spec.segments[index]
        stop = segment.offset + CODECS[segment.codec].num_bytes(segment.dim)
        raw = self._file.read_rows(
            TENSOR, self._checked(ids, self.spec.num_rows, "row"), slice(segment.offset, stop)
        )
        alone = dataclasses.replace(
            self.spec,
            row_stride=stop - segment.offset,
            segments=(dataclasses.replace(segment, offset=0),),
        )
        return decode_rows(raw, alone, ids, self.path)

    def raw(self, ids: np.ndarray) -> np.ndarray:
        """The stored bytes of rows ``ids`` ``[n]``: uint8 ``[n, row_stride]``."""
        return self._file.read_rows(TENSOR, self._checked(ids, self.spec.num_rows, "row"))

    def raw_range(self, start: int, stop: int) -> np.ndarray:
        """The stored bytes of rows ``start`` … ``stop - 1`` in one read: uint8 ``[stop - start, row_stride]``."""
        return self._file.read(TENSOR, slice(start, stop))

    def _checked(self, ids: np.ndarray, count: int, noun: str) -> np.ndarray:
        ids = np.asarray(ids)
        assert ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size), "ids are a list of integers"
        outside = (ids < 0) | (ids >= count)
        if outside.any():
            raise UserError(
                f"{noun} {ids[outside][0]} is not in the file, which has {count}",
                where=self.path,
                fix="use the tokenizer and the ROM of one model",
            )
        return ids.astype(np.int64)

    def _check(self) -> rom_spec.RomSpec:
        def broken(what: str) -> UserError:
            return UserError(what, where=self.path, fix="regenerate the file with `meki-edge reparam`")

        entry = self._file.tensors.get(TENSOR)
        extra = TENSORS.get(self._file.metadata.get("addressing", ""), {})
        tensors = {name: self._extra(name, dtype) for name, dtype in extra.items()}
        spec = rom_spec.from_metadata(self._file.metadata, entry.shape if entry else (), tensors, self.path)
        assert entry is not None
        unknown = set(self._file.tensors) - {TENSOR, *extra}
        if unknown:
            raise broken(f"the file holds tensors that its addressing has no use for: {', '.join(sorted(unknown))}")
        if entry.dtype != "U8":
            raise broken(f"the tensor {TENSOR!r} is {entry.dtype}, not U8")
        if entry.start % PAGE_BYTES:
            raise broken(f"the rows start at byte {entry.start}, which is not a multiple of {PAGE_BYTES}")
        if any(self._file.tensors[name].start < entry.stop for name in extra):
            raise broken("the rows are not the first tensor")
        end = max(found.stop for found in self._file.tensors.values())
        if end != self._file.size:
            raise broken(f"the tensors end at byte {end} but the file has {self._file.size}")
        return spec

    def _extra(self, name: str, dtype: str) -> np.ndarray:
        entry = self._file.entry(name)
        if entry.dtype != dtype or len(entry.shape) != 1:
            raise UserError(
                f"the tensor {name!r} is {entry.dtype} of shape {entry.shape}, not {dtype} of one axis",
                where=self.path,
                fix="regenerate the file with `meki-edge reparam`",
            )
        return self._file.read(name)
