"""A checksum of every row, and of each tensor that the addressing needs: what bit rot changes is found.

CRC-32 as zlib has it, of a row's data without its padding. One a row, so that a reader which fetches
a single row can check it; they lie after all other tensors, so that rows stay where they are.
"""

from __future__ import annotations

import zlib
from os import PathLike

import numpy as np

from meki_edge.errors import UserError
from meki_edge.rom.codec import DAMAGED
from meki_edge.rom.spec import RomSpec


def checksums_of(raw: np.ndarray, row_bytes: int) -> np.ndarray:
    """The checksums of rows uint8 ``[n, ≥row_bytes]``: uint32 ``[n]``."""
    return np.fromiter((zlib.crc32(row[:row_bytes]) for row in raw), np.uint32, len(raw))


def tensor_checksums(spec: RomSpec) -> np.ndarray:
    """The checksums of the addressing's tensors, in the order of the file: uint32."""
    return np.array([zlib.crc32(array) for array in spec.addressing.tensors().values()], np.uint32)


def wrong_rows(raw: np.ndarray, expected: np.ndarray, spec: RomSpec) -> np.ndarray:
    """Which rows, uint8 ``[n, row_stride]``, are not those of the checksums uint32 ``[n]``: bool ``[n]``."""
    return checksums_of(raw, spec.row_bytes) != expected


def check_rows(
    raw: np.ndarray, expected: np.ndarray, spec: RomSpec, ids: np.ndarray, where: str | PathLike[str]
) -> None:
    """Compare rows ``ids`` ``[n]``, uint8 ``[n, row_stride]``, with their checksums uint32 ``[n]``.

    Raises:
        UserError: a row that is not as it was written; it is named.
    """
    wrong = wrong_rows(raw, expected, spec)
    if wrong.any():
        raise UserError(f"row {ids[wrong][0]}: the checksum does not match", where=where, fix=DAMAGED)


def check_tensors(spec: RomSpec, expected: np.ndarray, where: str | PathLike[str]) -> None:
    """Compare the addressing's tensors with their checksums; an unlike one is a :class:`UserError`."""
    wrong = tensor_checksums(spec) != expected
    if wrong.any():
        name = list(spec.addressing.tensors())[int(np.argmax(wrong))]
        raise UserError(f"the tensor {name!r}: the checksum does not match", where=where, fix=DAMAGED)
