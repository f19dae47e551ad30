"""One ROM file, written slice by slice from a training-form checkpoint whose tables stay on disk.

The fold evaluates the training form's own code (``MemoryLayer.fold``) in float32. Rows addressed by
token id fold their table rows and the ids' embeddings; any other row is a row of the table alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from meki_edge.errors import UserError
from meki_edge.memory import MemoryLayer
from meki_edge.model.checkpoint import EMBEDDING, Checkpoint
from meki_edge.model.row_spaces import Member, RowSpace
from meki_edge.rom import addressing as rom_addressing
from meki_edge.rom import spec as rom_spec
from meki_edge.rom.addressing import Addressing, Identity
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import RomSpec
from meki_edge.rom.writer import RomWriter

KEPT = "proof_{}"  # beside the ROM file, until the proof is done
FOLD_BYTES = 1 << 28  # bounds a slice of rows, decoded and encoded


class Folder:
    """The rows of one row space.

    Only what all rows share is kept in memory: each memory's training-only tensors, without its table.

    Raises:
        UserError: addresses that are not valid, or that differ between memories of the row space.
    """

    def __init__(self, checkpoint: Checkpoint, space: RowSpace) -> None:
        self.space = space
        self._checkpoint = checkpoint
        self._memories = [_without_table(checkpoint, member) for member in space.members]
        self.addressing = self._common_addressing()

    def rom_spec(
        self, precision: str, *, tokenizer_sha256: str, source_sha256: str, checksums: bool = False
    ) -> RomSpec:
        """The layout of the ROM file, at table ``precision``."""
        return rom_spec.build(
            [(member.layer, member.number, member.dim) for member in self.space.members],
            precision,
            num_rows=self.space.num_rows,
            addressing=self.addressing,
            tokenizer_sha256=tokenizer_sha256,
            source_sha256=source_sha256,
            checksums=checksums,
        )

    @torch.no_grad()
    def fold(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` … ``stop - 1``: float32 ``[stop - start, row_dim]``."""
        some = slice(start, stop)
        by_token = self.space.addressing == Identity.kind
        embeddings = self._checkpoint.read(EMBEDDING, some) if by_token else torch.empty(stop - start, 0)
        values = torch.empty(stop - start, self.space.row_dim)
        columns = values.split([member.dim for member in self.space.members], dim=1)
        for column, member, memory in zip(columns, self.space.members, self._memories, strict=True):
            rows = self._checkpoint.read(table_name(member), some) if memory.table_dim else embeddings[:, :0]
            column.copy_(memory.fold(rows, embeddings))
        return values.numpy()

    def _common_addressing(self) -> Addressing:
        first, *others = (memory.addressing for memory in self._memories)
        where = self._checkpoint.directory
        try:
            rom_addressing.parse(first.kind, first.parameters(), first.tensors(), self.space.num_rows, where)
        except UserError as error:
            raise UserError(
                f"{_name(self.space.members[0])}: {error.what}", where=where, fix="train the model again"
            ) from None
        for member, other in zip(self.space.members[1:], others, strict=True):
            if not same_addressing(first, other):
                raise UserError(
                    f"{_name(self.space.members[0])} and {_name(member)} have different addresses but share a ROM file",
                    where=where,
                    fix="train the model again",
                )
        return first


class RomFile:
    """The ROM file of one row space, and the rows that a proof will read, as they are before their codec.

    The latter lie in a second file (``kept_path``), itself a ROM file of float32 rows, so that a
    resumed run need not fold them again.

    Args:
        directory: where both files go.
        kept_ids: the rows to keep, ascending.
        precision: the codec's name.
        digests: ``tokenizer_sha256`` and ``source_sha256``.
        checksums: whether the ROM file has them.
    """

    def __init__(
        self,
        folder: Folder,
        directory: Path,
        kept_ids: np.ndarray,
        precision: str,
        digests: dict[str, str],
        *,
        checksums: bool = False,
    ) -> None:
        self.folder = folder
        self.spec = folder.rom_spec(precision, **digests, checksums=checksums)
        self.path = directory / folder.space.file
        self.kept_path = directory / KEPT.format(folder.space.file)
        self._kept_ids = kept_ids
        dims = [(segment.layer, segment.memory, segment.dim) for segment in self.spec.segments]
        self._kept_spec = rom_spec.build(dims, "fp32", num_rows=len(kept_ids), addressing=Identity(), **digests)

    def write(self, chunk_rows: int, advance: Callable[[int], None]) -> None:
        """Write both files, or the rest of them; ``advance`` is told how many rows are done."""
        if not self.path.is_file():  # it is put in place last, so the kept rows would be there too
            self._write(chunk_rows, advance)
        advance(self.spec.num_rows)

    def kept_segment(self, kept: RomReader, index: int, row_ids: np.ndarray) -> np.ndarray:
        """Segment ``index`` of rows ``row_ids`` ``[n]``, before its codec: float32 ``[n, dim]``."""
        return kept.segment(index, np.searchsorted(self._kept_ids, row_ids))

    def _write(self, chunk_rows: int, advance: Callable[[int], None]) -> None:
        spec, ids = self.spec, self._kept_ids
        step = max(1, min(chunk_rows, FOLD_BYTES // (4 * spec.row_dim + spec.row_stride)))
        with RomWriter(self.path, spec, resume=True) as rom, RomWriter(
            self.kept_path, self._kept_spec, resume=True
        ) as kept:
            while rom.rows_written < spec.num_rows or kept.rows_written < len(ids):
                # After an interruption one file may hold rows that the other lacks.
                start = int(min(rom.rows_written, *ids[kept.rows_written :][:1], spec.num_rows))
                stop = min(start + step, spec.num_rows)
                values = self.folder.fold(start, stop)
                rom.write(values[rom.rows_written - start :])
                kept.write(values[ids[kept.rows_written : np.searchsorted(ids, stop)] - start])
                advance(stop)


def table_name(member: Member) -> str:
    """The checkpoint's name of a memory's table."""
    return _prefix(member) + "table"


def _without_table(checkpoint: Checkpoint, member: Member) -> MemoryLayer:
    """A memory with what folds, its table aside: the rest of it stays on the meta device."""
    with torch.device("meta"):
        memory = checkpoint.config.build_memories(member.layer)[member.number]
    names = [n for n in memory.state_dict() if n.split(".")[0] in memory.training_only and n != "table"]
    tensors = {name: checkpoint.read(_prefix(member) + name) for name in names}
    memory.load_state_dict(tensors, strict=False, assign=True)
    return memory


def same_addressing(one: Addressing, other: Addressing) -> bool:
    """Whether both give every token the same rows."""
    tensors = other.tensors()
    return one.parameters() == other.parameters() and all(
        np.array_equal(array, tensors[name]) for name, array in one.tensors().items()
    )


def _prefix(member: Member) -> str:
    return f"model.layers.{member.layer}.memories.{member.number}."


def _name(member: Member) -> str:
    return f"layer {member.layer} memory {member.number}"
