"""Golden ROM files with something changed: headers that lie, bytes that rotted."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
NESTED = ("segments", "addressing_parameters", "quantization", "checksums")
"""Metadata that is JSON within JSON."""

Header = dict[str, Any]
Change = Callable[[Header], object]


def parts_of(name: str) -> tuple[Header, bytes]:
    """The header of a golden file, all its JSON parsed, and its data."""
    contents = (GOLDEN / f"{name}.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header = json.loads(contents[8 : 8 + length])
    metadata = header["__metadata__"]
    metadata.update({key: json.loads(metadata[key]) for key in NESTED if key in metadata})
    return header, contents[8 + length :]


def whole(header: Header, data: bytes) -> bytes:
    """The file of a header (JSON within JSON where a value is not a string) and its data."""
    metadata = header["__metadata__"]
    if isinstance(metadata, dict):
        texts = {key: v if isinstance(v, str) or key not in NESTED else json.dumps(v) for key, v in metadata.items()}
        header = header | {"__metadata__": texts}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text + data


def lying(path: Path, name: str, change: Change, tail: int | None = None) -> Path:
    """Golden file ``name`` with another header, its data cut by or filled up with ``tail`` bytes."""
    header, data = parts_of(name)
    change(header)
    data = data[:tail] if tail is not None and tail < 0 else data + b"\0" * (tail or 0)
    path.write_bytes(whole(header, data))
    return path


def rotten(path: Path, name: str, tensor: str, offset: int, data: bytes) -> Path:
    """Golden file ``name`` with other bytes in a tensor."""
    contents = bytearray((GOLDEN / f"{name}.safetensors").read_bytes())
    header, found = parts_of(name)
    start = len(contents) - len(found) + header[tensor]["data_offsets"][0] + offset
    contents[start : start + len(data)] = data
    path.write_bytes(contents)
    return path


def metadata(**changes: Any) -> Change:
    """Other metadata; None takes a key away."""

    def change(header: Header) -> None:
        merged = header["__metadata__"] | changes
        header["__metadata__"] = {key: value for key, value in merged.items() if value is not None}

    return change


def nested(key: str, **changes: Any) -> Change:
    """Other values of a nested object; None takes one away."""

    def change(header: Header) -> None:
        merged = header["__metadata__"][key] | changes
        header["__metadata__"][key] = {name: value for name, value in merged.items() if value is not None}

    return change


def segment(index: int, **changes: Any) -> Change:
    """Other values of a segment."""
    return lambda header: header["__metadata__"]["segments"][index].update(changes)


def tensor(name: str, **changes: Any) -> Change:
    """Another entry of a tensor."""
    return lambda header: header[name].update(changes)


def ids_file(directory: Path, ids: list[int]) -> Path:
    """A file of ids, as the harness takes it."""
    path = directory / "ids.txt"
    path.write_text(" ".join(map(str, ids)))
    return path
