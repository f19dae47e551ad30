"""Documents from text files, JSONL files and folders, in a stable order.

A document is one text file, or one line of a JSONL file. Text is UTF-8; a byte that is not is an
error that names the file and the offset, since a silent replacement would change the corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meki_edge.errors import UserError, nearest

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc"})
SUFFIXES = JSONL_SUFFIXES | TEXT_SUFFIXES


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: its text, and the bytes that it took in its file (for progress bars)."""

    text: str
    source_bytes: int

    def digest(self, seed: int) -> bytes:
        """16 bytes that identify the text, different for each ``seed``."""
        key = seed.to_bytes(8, "little", signed=True)
        return hashlib.blake2b(self.text.encode("utf-8"), digest_size=16, key=key).digest()


def find_files(sources: list[Path]) -> tuple[list[Path], list[Path]]:
    """The files to read, and those in folders that were passed over because of their suffix.

    A file that is named itself is read whatever its suffix (as JSONL if it is ``.jsonl``, else as
    text). A folder is searched recursively, in sorted order, without hidden files.

    Raises:
        UserError: a source does not exist, or no file is left.
    """
    chosen: list[Path] = []
    skipped: list[Path] = []
    for source in sources:
        if source.is_file():
            chosen.append(source)
        elif source.is_dir():
            for path in _walk(source):
                (chosen if path.suffix.lower() in SUFFIXES else skipped).append(path)
        else:
            raise UserError("the source does not exist", where=source, fix="give text files, JSONL files or folders")
    if not chosen:
        raise UserError(
            f"no text was found among {len(skipped)} files",
            where=", ".join(map(str, sources)) or "sources",
            fix=f"give files, or folders that hold {', '.join(sorted(SUFFIXES))}",
        )
    return chosen, skipped


def read_documents(path: Path, text_field: str) -> Iterator[Document]:
    """The documents of one file, in order; blank lines of a JSONL file are none.

    Raises:
        UserError: invalid UTF-8, invalid JSON, or a line without the string ``text_field``.
    """
    try:
        with open(path, "rb") as file:
            if path.suffix.lower() in JSONL_SUFFIXES:
                yield from _read_lines(file, path, text_field)
            else:
                data = file.read()
                yield Document(text=_decode(data, path, 0).removeprefix("\ufeff"), source_bytes=len(data))
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", where=path, fix="check its permissions") from None


def _read_lines(file: BinaryIO, path: Path, text_field: str) -> Iterator[Document]:
    offset = 0
    for number, line in enumerate(file, start=1):
        if line.strip():
            text = _field(_decode(line, path, offset), text_field, f"{path}:{number}")
            yield Document(text=text, source_bytes=len(line))
        offset += len(line)


def _walk(folder: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"invalid UTF-8 at byte offset {offset + error.start} (0x{data[error.start]:02x})",
            where=path,
            fix="convert the file to UTF-8, for example with iconv",
        ) from None


def _field(line: str, name: str, where: str) -> str:
    try:
        values: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}", where=where, fix="write one JSON object a line") from None
    if not isinstance(values, dict):
        raise UserError("the line is not a JSON object", where=where, fix="write one JSON object a line")
    if name not in values:
        raise UserError(
            f"there is no field {name!r}{nearest(name, values)}",
            where=where,
            fix=f"name the field that holds the text with --text-field (here: {', '.join(values) or 'none'})",
        )
    text = values[name]
    if not isinstance(text, str):
        raise UserError(f"the field {name!r} is not a string", where=where, fix="give text as a JSON string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"the field {name!r} holds half of a surrogate pair, which is no Unicode text",
            where=where,
            fix="repair the \\u escapes of the line",
        ) from None
    return text
