"""Safetensors files larger than memory: read a range of rows, write tensor by tensor.

The `safetensors` library maps the whole file or wants the whole tensor; folding a table of many
gigabytes needs neither. Reads go through ``pread`` so that resident memory stays at what was
asked for (mapped pages count towards RSS). Format: an 8-byte little-endian header length, a JSON
header, then the tensors' bytes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meki_edge.errors import UserError
from meki_edge.files import parse_json

MAX_INTEGER = 2**63 - 1
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # NumPy has no bfloat16: the raw bits
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a header: safetensors ``dtype`` name, ``shape``, and absolute byte range."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """Random access to a safetensors file by ``pread``.

    Raises:
        UserError: the file is missing, truncated, or its header does not describe it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK does nothing to regular files; to open a pipe would wait for its writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(f"cannot open the file: {error.strerror}", where=path, fix="check the path") from None
        status = os.fstat(self._fd)
        self.size = status.st_size
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            if not stat.S_ISREG(status.st_mode):
                raise UserError("not a regular file", where=path, fix="name a safetensors file")
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Tensor ``name``, or its ``rows`` along the first axis (step 1), as a fresh array.

        BF16 comes back as float32, exactly.
        """
        entry = self.entry(name)
        row_bytes, count = 0, 0
        shape, start, stop = entry.shape, entry.start, entry.stop
        if rows is not None:
            count = entry.shape[0]
            row_bytes = (entry.stop - entry.start) // max(count, 1)
            first, last, _ = rows.indices(count)
            shape = (max(last - first, 0), *entry.shape[1:])
            start, stop = entry.start + first * row_bytes, entry.start + last * row_bytes
        array = self._empty(shape, DTYPES[entry.dtype], name)
        self._pread_into(array, start, name)
        assert array.nbytes == max(stop - start, 0)
        return _bf16_to_f32(array) if entry.dtype == "BF16" else array

    def read_rows(self, name: str, ids: np.ndarray, columns: slice = slice(None)) -> np.ndarray:
        """Rows ``ids`` (int64 ``[N]``) of a 2-D tensor ``name``, one ``pread`` a row: ``[N, dim]``.

        ``columns`` (step 1) are what is read of each row.
        """
        entry = self.entry(name)
        dtype = DTYPES[entry.dtype]
        num_columns = entry.shape[1]
        first, last, _ = columns.indices(num_columns)
        array = self._empty((len(ids), max(last - first, 0)), dtype, name)
        for index, row in enumerate(ids):
            self._pread_into(array[index], entry.start + (int(row) * num_columns + first) * dtype.itemsize, name)
        return _bf16_to_f32(array) if entry.dtype == "BF16" else array

    def entry(self, name: str) -> TensorEntry:
        """The header entry of ``name``; a missing tensor is a :class:`UserError`."""
        if name not in self.tensors:
            raise UserError(f"the tensor {name!r} is missing", where=self.path, fix="regenerate the checkpoint")
        return self.tensors[name]

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype, name: str) -> np.ndarray:
        try:
            return np.empty(shape, dtype)
        except MemoryError:
            raise UserError(
                f"{math.prod(shape) * dtype.itemsize} bytes of the tensor {name!r} do not fit the memory",
                where=self.path,
                fix="free some memory, or check that this is the right file",
            ) from None

    def _pread_into(self, array: np.ndarray, offset: int, name: str) -> None:
        view = memoryview(array).cast("B") if array.nbytes else memoryview(b"")
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise UserError(
                    f"reading tensor {name!r} failed: {error.strerror}", where=self.path, fix="check the disk"
                ) from None
            if count == 0:
                raise UserError(
                    f"the file ends inside tensor {name!r}", where=self.path, fix="copy or regenerate the file"
                )
            done += count

    def _pread(self, count: int, offset: int) -> bytes:
        """As much of the header as the file has."""
        data = b""
        try:
            while len(data) < count and (piece := os.pread(self._fd, count - len(data), offset + len(data))):
                data += piece
        except OSError as error:
            raise UserError(
                f"reading the header failed: {error.strerror}", where=self.path, fix="check the disk"
            ) from None
        return data

    def _read_header(self) -> None:
        def broken(what: str) -> UserError:
            return UserError(what, where=self.path, fix="copy or regenerate the file")

        prefix = self._pread(8, 0)
        if len(prefix) < 8:
            raise broken(f"not a safetensors file: {self.size} bytes is too short for a header")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(MAX_HEADER_BYTES, self.size - 8):
            raise broken(f"the header claims {header_bytes} bytes but the file has {self.size}")
        try:
            text = self._pread(header_bytes, 8).decode()
            if not text.startswith("{"):
                raise ValueError("it does not begin with '{'")
            header = parse_json(text, strict=True)
            self.metadata = dict(header.pop("__metadata__", {}))
            if not all(isinstance(value, str) for value in self.metadata.values()):
                raise TypeError("__metadata__ maps strings to strings")
            data_start = 8 + header_bytes
            for name, fields in header.items():
                begin, end = fields["data_offsets"]
                shape = tuple(fields["shape"])
                if not all(type(number) is int and abs(number) <= MAX_INTEGER for number in (begin, end, *shape)):
                    raise TypeError(f"the shape and offsets of {name!r} are not all integers of 63 bits")
                self.tensors[name] = TensorEntry(
                    dtype=str(fields["dtype"]), shape=shape, start=data_start + begin, stop=data_start + end
                )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise broken(f"the safetensors header is not valid: {error!r}") from None
        for name, entry in self.tensors.items():
            if entry.dtype not in DTYPES:
                raise broken(f"tensor {name!r} has the unsupported dtype {entry.dtype!r}")
            expected = _num_bytes(entry.shape, DTYPES[entry.dtype].itemsize, self.size)
            if min(entry.shape, default=0) < 0 or entry.start < data_start or entry.stop - entry.start != expected:
                raise broken(f"tensor {name!r} of shape {entry.shape} does not fit its byte range")
            if entry.stop > self.size:
                raise broken(f"tensor {name!r} ends at byte {entry.stop} but the file has {self.size}")


def _num_bytes(shape: tuple[int, ...], itemsize: int, limit: int) -> int:
    """Bytes of a tensor, or some number beyond ``limit``: a product of all that a header may hold takes hours."""
    if min(shape, default=1) <= 0:
        return 0
    num_bytes = itemsize
    for size in shape:
        num_bytes *= size
        if num_bytes > limit:
            break
    return num_bytes


class SafetensorsWriter:
    """Write a safetensors file whose tensors are declared first and streamed afterwards, in order.

    Args:
        file: an open binary file at position 0.
        declared: name → (safetensors dtype, shape), in the order in which the bytes will come.
        metadata: the ``__metadata__`` strings.
        alignment: the data section starts at a multiple of this many bytes (the header is padded
            with spaces, as the format allows).
    """

    def __init__(
        self,
        file: BinaryIO,
        declared: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str],
        alignment: int = 8,
    ) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, (dtype, shape) in declared.items():
            num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
            offset += num_bytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-(8 + len(encoded)) % alignment)
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        self._file = file
        self._remaining = offset

    def write(self, data: Any) -> None:
        """Append the next bytes (anything with the buffer protocol, C-contiguous)."""
        view = memoryview(data).cast("B")
        assert len(view) <= self._remaining, "more bytes than were declared"
        self._file.write(view)
        self._remaining -= len(view)

    def finish(self) -> None:
        """Check that every declared byte was written."""
        assert self._remaining == 0, f"{self._remaining} declared bytes were not written"


def _bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
