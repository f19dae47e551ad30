"""Stream rows into a ROM file: bounded memory, and the file is whole or absent."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meki_edge.files import require_free_space, storage_errors
from meki_edge.rom.addressing import TENSORS
from meki_edge.rom.checksums import checksums_of, tensor_checksums
from meki_edge.rom.codec import encode_rows
from meki_edge.rom.spec import CHECKSUMS, PAGE_BYTES, TENSOR, RomSpec, row_stride
from meki_edge.safetensors_io import SafetensorsWriter


BLOCK_BYTES = 1 << 25


class RomWriter:
    """Write the rows of ``spec`` in order::

        with RomWriter(path, spec) as writer:
            writer.write(values)  # float32 [n, row_dim], any n at a time

    The rows go to a hidden file beside ``path`` that is renamed when the block ends, all rows
    written. If the block fails the hidden file is removed; with ``resume`` it is kept, and a later
    writer with ``resume`` and the same header continues after its last whole row
    (``rows_written``).

    Checksums, if ``spec`` asks for them, are kept in memory until the last row: four bytes a row.

    Raises:
        UserError: not enough free space, a full disk, or a value that the codec cannot hold.
    """

    def __init__(self, path: Path, spec: RomSpec, *, resume: bool = False) -> None:
        assert spec.row_stride == row_stride(spec.row_bytes, spec.addressing), "the stride is not the format's"
        self.spec = spec
        self.rows_written = 0
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._resume = resume
        self._header = header_bytes(spec)
        self._checksums = np.empty(spec.num_rows if spec.checksums else 0, "<u4")
        self._file: BinaryIO

    def __enter__(self) -> RomWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._kept_bytes() if self._resume else 0
        tail = self._checksums.nbytes + sum(array.nbytes for array in self.spec.addressing.tensors().values())
        total = len(self._header) + self.spec.num_rows * self.spec.row_stride + tail
        require_free_space(self._path.parent, total - kept, self._path.name)
        with storage_errors(self._path):
            self._file = open(self._partial, "r+b" if kept else "wb", buffering=0)
            self._file.truncate(kept)
            self._file.seek(kept)
            if not kept:
                self._append(self._header)
        self.rows_written = max(kept - len(self._header), 0) // self.spec.row_stride
        if self.spec.checksums:
            self._checksum_kept_rows()
        return self

    def write(self, values: np.ndarray) -> None:
        """Append rows: float32 ``[n, row_dim]``."""
        assert values.shape[1] == self.spec.row_dim, f"rows of {values.shape[1]} elements, not {self.spec.row_dim}"
        assert self.rows_written + len(values) <= self.spec.num_rows, "more rows than were declared"
        raw = encode_rows(values, self.spec, self.rows_written, self._path)
        with storage_errors(self._path):
            self._append(raw)
        self._checksum(raw, self.rows_written)
        self.rows_written += len(values)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                assert self.rows_written == self.spec.num_rows, f"{self.rows_written} of {self.spec.num_rows} rows"
                with storage_errors(self._path):
                    for array in self.spec.addressing.tensors().values():
                        self._append(array)
                    if self.spec.checksums:
                        self._append(np.concatenate([self._checksums, tensor_checksums(self.spec)]).astype("<u4"))
                    os.fsync(self._file.fileno())
                os.replace(self._partial, self._path)
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
            if not self._resume:
                self._partial.unlink(missing_ok=True)

    def _kept_bytes(self) -> int:
        """How much of an interrupted writer's file is of use: the header and whole rows, or nothing."""
        if not self._partial.is_file():
            return 0
        with open(self._partial, "rb") as file:
            if file.read(len(self._header)) != self._header:
                return 0
        rows = (self._partial.stat().st_size - len(self._header)) // self.spec.row_stride
        return len(self._header) + min(rows, self.spec.num_rows) * self.spec.row_stride

    def _checksum(self, raw: np.ndarray, first_row: int) -> None:
        if self.spec.checksums:
            self._checksums[first_row : first_row + len(raw)] = checksums_of(raw, self.spec.row_bytes)

    def _checksum_kept_rows(self) -> None:
        """Read an interrupted writer's rows again, in blocks."""
        stride = self.spec.row_stride
        step = max(1, BLOCK_BYTES // stride)
        with open(self._partial, "rb") as file:
            file.seek(len(self._header))
            for start in range(0, self.rows_written, step):
                count = min(step, self.rows_written - start)
                self._checksum(np.frombuffer(file.read(count * stride), np.uint8).reshape(count, stride), start)

    def _append(self, data: bytes | np.ndarray) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while view:
            view = view[self._file.write(view) :]


def header_bytes(spec: RomSpec) -> bytes:
    """Everything before the first row: a multiple of 4096 bytes."""
    file = io.BytesIO()
    dtypes = TENSORS[spec.addressing.kind]
    declared = {TENSOR: ("U8", (spec.num_rows, spec.row_stride))}
    declared |= {name: (dtypes[name], array.shape) for name, array in spec.addressing.tensors().items()}
    if spec.checksums:
        declared[CHECKSUMS] = ("U32", (spec.num_rows + len(dtypes),))
    SafetensorsWriter(file, declared, spec.to_metadata(), alignment=PAGE_BYTES)
    return file.getvalue()
