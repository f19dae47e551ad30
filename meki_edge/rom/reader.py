"""Read rows of a ROM file by id, with ``pread``: the reference for the C++ reader."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from meki_edge.errors import UserError
from meki_edge.rom import spec as rom_spec
from meki_edge.rom.addressing import NOTHING, TENSORS
from meki_edge.rom.checksums import check_rows, check_tensors, wrong_rows
from meki_edge.rom.codec import codes_of, decode_rows
from meki_edge.rom.spec import CHECKSUMS, CODECS, PAGE_BYTES, TENSOR
from meki_edge.safetensors_io import SafetensorsFile


class RomReader:
    """Random access to the rows of a ROM file; nothing but what is asked for is kept in memory.

    Args:
        verify_rows: compare every row that is read whole with its checksum; all checksums are kept
            in memory, four bytes a row.

    Raises:
        UserError: the file is missing, truncated, or not a ROM file that this version knows; or it
            has no checksums and ``verify_rows`` asks for them.
    """

    def __init__(self, path: Path, *, verify_rows: bool = False) -> None:
        self.path = path
        self._file = SafetensorsFile(path)
        self._checksums: np.ndarray | None = None
        try:
            self.spec = self._check()
            if verify_rows:
                self._checksums = self._read_checksums()
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

    def fetch_raw(self, token_ids: np.ndarray, before: np.ndarray = NOTHING) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`fetch`, the integers of a static codec as they are stored, for a graph that takes them.

        Returns uint8 or uint16 ``[T, K, row_dim]``, ``zero_point`` (a zero) where a token has fewer
        than K rows, and the counts int64 ``[T]``. ``spec.quantization`` says what they mean.

        Raises:
            UserError: as :meth:`fetch`, or the file's codec is not static.
        """
        row_ids, counts = self.row_ids(token_ids, before)
        meant = np.arange(row_ids.shape[1]) < counts[:, None]
        codes = self.raw_rows(row_ids[meant])
        assert self.spec.quantization is not None
        filled = np.full((*row_ids.shape, self.spec.row_dim), self.spec.quantization.zero_point, codes.dtype)
        filled[meant] = codes
        return filled, counts

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
        return decode_rows(self.raw(unique), self.spec, unique, self.path)[inverse]

    def raw_rows(self, ids: np.ndarray) -> np.ndarray:
        """The integers of rows ``ids`` ``[n]`` of a static codec: uint8 or uint16 ``[n, row_dim]``.

        Raises:
            UserError: as :meth:`rows`, or the file's codec is not static.
        """
        if self.spec.quantization is None:
            raise UserError(
                f"the rows are {self.spec.segments[0].codec}, not integers with one quantization",
                where=self.path,
                fix="quantize the rows with the graphs by `meki-edge calibrate`",
            )
        unique, inverse = np.unique(self._checked(ids, self.spec.num_rows, "row"), return_inverse=True)
        return codes_of(self.raw(unique), self.spec)[inverse]

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
        ids = self._checked(ids, self.spec.num_rows, "row")
        raw = self._file.read_rows(TENSOR, ids)
        if self._checksums is not None:
            check_rows(raw, self._checksums[ids], self.spec, ids, self.path)
        return raw

    def raw_range(self, start: int, stop: int) -> np.ndarray:
        """The stored bytes of rows ``start`` … ``stop - 1`` in one read: uint8 ``[stop - start, row_stride]``."""
        raw = self._file.read(TENSOR, slice(start, stop))
        if self._checksums is not None:
            check_rows(raw, self._checksums[start:stop], self.spec, np.arange(start, stop), self.path)
        return raw

    def compared_range(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`raw_range`, but rows that are not as they were written raise nothing: which ones, bool ``[n]``."""
        raw = self._file.read(TENSOR, slice(start, stop))
        if self._checksums is None:
            return raw, np.zeros(len(raw), bool)
        return raw, wrong_rows(raw, self._checksums[start:stop], self.spec)

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
        entry = self._file.tensors.get(TENSOR)
        extra = TENSORS.get(self._file.metadata.get("addressing", ""), {})
        tensors = {name: self._file.read(self._listed(name, dtype)) for name, dtype in extra.items()}
        spec = rom_spec.from_metadata(self._file.metadata, entry.shape if entry else (), tensors, self.path)
        assert entry is not None
        names = [*extra, *([CHECKSUMS] if spec.checksums else [])]
        unknown = set(self._file.tensors) - {TENSOR, *names}
        if unknown:
            raise self._broken(f"the file holds tensors that nothing in its header uses: {', '.join(sorted(unknown))}")
        if entry.dtype != "U8":
            raise self._broken(f"the tensor {TENSOR!r} is {entry.dtype}, not U8")
        if entry.start % PAGE_BYTES:
            raise self._broken(f"the rows start at byte {entry.start}, which is not a multiple of {PAGE_BYTES}")
        if spec.checksums and self._file.entry(self._listed(CHECKSUMS, "U32")).shape != (spec.num_rows + len(extra),):
            raise self._broken(f"the tensor {CHECKSUMS!r} does not have one for each row and tensor")
        for before, after in zip([TENSOR, *names], names, strict=False):
            if self._file.tensors[after].start < self._file.tensors[before].stop:
                raise self._broken(f"the tensors overlap or are out of order: {after!r} begins before {before!r} ends")
        end = self._file.tensors[[TENSOR, *names][-1]].stop
        if end != self._file.size:
            raise self._broken(f"the tensors end at byte {end} but the file has {self._file.size}")
        return spec

    def _read_checksums(self) -> np.ndarray:
        """Of the rows, uint32 ``[num_rows]``; those of the other tensors are checked here and now."""
        if not self.spec.checksums:
            raise UserError(
                "the file has no checksums of its rows",
                where=self.path,
                fix="make it with `meki-edge reparam --checksums`, or read it without checking",
            )
        found = self._file.read(CHECKSUMS)
        check_tensors(self.spec, found[self.spec.num_rows :], self.path)
        return found[: self.spec.num_rows]

    def _listed(self, name: str, dtype: str) -> str:
        """``name``, if that tensor is a list of ``dtype``."""
        entry = self._file.entry(name)
        if entry.dtype != dtype or len(entry.shape) != 1:
            raise self._broken(
                f"the tensor {name!r} is {entry.dtype} of shape {entry.shape}, not {dtype} of one axis"
            )
        return name

    def _broken(self, what: str) -> UserError:
        return UserError(what, where=self.path, fix="regenerate the file with the command that made it")
