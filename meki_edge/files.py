"""Files that are either whole or absent: atomic writes, digests, free space."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meki_edge.errors import UserError

BLOCK_BYTES = 1 << 22
STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
FREE_SPACE = "free some space or choose another --output-dir, then run the command again"


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn what a full or failing disk raises while ``path`` is written into a :class:`UserError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        fix = "choose another --output-dir" if error.errno == errno.EROFS else FREE_SPACE
        raise UserError(f"cannot write the file: {error.strerror}", where=path, fix=fix) from None


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it over ``path`` if the body succeeds.

    The data is on the disk before the rename, so a reader (or a power cut) sees the old file or
    the new one, never a half. Where ``path`` is a link, the file that it leads to is replaced. If the
    body raises, the temporary file is removed; a full or failing disk, or a ``path`` that is a
    directory or a device, is a :class:`UserError`.
    """
    try:
        path = path.resolve()
        regular = path.is_file() or not path.exists()
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"no file can be here: {reason}", where=path, fix="name another file") from None
    if not regular:
        raise UserError("this is not a regular file", where=path, fix="name a file, or a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with storage_errors(path):
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 ``text`` to ``path`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` atomically, as indented JSON with a final newline."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Parse the JSON file ``path``; a missing or broken file is a :class:`UserError`."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError("the file does not exist", where=path, fix="check the path") from None
    except IsADirectoryError:
        raise UserError("this is a directory, not a JSON file", where=path, fix="name a file") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path, fix="check the path") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}", where=path, fix="repair or regenerate the file") from None


def parse_json(text: str, *, strict: bool = False) -> Any:
    """Parse JSON; ValueError (or RecursionError) if it is not valid, or holds what no UTF-8 text can.

    ``strict``: take neither NaN and Infinity, which Python writes and the standard does not know, nor -0
    for an integer, which is one for some readers only.
    """
    value = json.loads(text, parse_constant=_refuse, parse_int=_strict_int) if strict else json.loads(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # Python reads lone surrogates, and then cannot print them
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _strict_int(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no integer")
    return int(text)


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a file's bytes; ``advance`` is told the number of bytes after each block."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            if advance is not None:
                advance(len(block))
    return digest.hexdigest()


def require_free_space(directory: Path, num_bytes: int, purpose: str, option: str = "--output-dir") -> None:
    """Raise :class:`UserError` unless ``num_bytes`` fit on the file system of ``directory``, which ``option`` names."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise UserError(
            f"{purpose} needs {num_bytes / 1e6:,.1f} MB but only {free / 1e6:,.1f} MB are free",
            where=directory,
            fix=f"free some space or choose another {option}",
        )
