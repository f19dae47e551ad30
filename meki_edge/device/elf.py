"""What a phone asks of a program or library: whom it is made for, how its segments are aligned.

From the ELF-64 specification and the ABI supplements of AArch64 and Hexagon; nothing else of the file is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from meki_edge.errors import UserError

MACHINES = {3: "x86", 40: "arm", 62: "x86-64", 164: "hexagon", 183: "arm64"}
LOAD, INTERPRETER = 1, 3
MAX_PATH = 4096
_WIDE, _NARROW = struct.Struct("<IIQQQQQQ"), struct.Struct("<8I")  # a program header of 64 and of 32 bits
HEXAGON_ARCH = 0xFF  # the flags' low byte: 0x79 for v79


@dataclass(frozen=True, kw_only=True)
class Elf:
    """The facts of one file."""

    machine: str
    """"arm64", "hexagon", …"""
    hexagon_arch: str
    """"v79"; empty unless the machine is a Hexagon."""
    alignment: int
    """Bytes; a phone whose pages are larger cannot load the file."""
    interpreter: str
    """The loader that a program names; empty for a library or a static program."""


def read(path: Path) -> Elf:
    """The facts of ``path``.

    Raises:
        UserError: not an ELF file, or one cut short.
    """
    fix = "give a program or library that was built for 64-bit Android"
    try:
        with open(path, "rb") as file:
            header = file.read(64)
            if len(header) < 52 or header[:4] != b"\x7fELF":
                raise UserError("this is not an ELF program or library", where=path, fix=fix)
            wide = header[4] == 2
            machine, flags, offset, size, count = _header(header, wide)
            file.seek(offset)
            table = file.read(size * count)
            if size != (_WIDE if wide else _NARROW).size and count > 0:
                raise struct.error
            segments = [_segment(table[at * size : (at + 1) * size], wide) for at in range(count)]
            interpreter = ""
            for kind, start, length, _ in segments:
                if kind == INTERPRETER:
                    file.seek(start)
                    interpreter = file.read(min(length, MAX_PATH)).rstrip(b"\0").decode(errors="replace")
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", where=path, fix="check the path") from None
    except (struct.error, ValueError, OverflowError):
        raise UserError("the ELF file is damaged", where=path, fix="copy or build it again") from None
    name = MACHINES.get(machine, f"machine {machine}")
    return Elf(
        machine=name,
        hexagon_arch=f"v{flags & HEXAGON_ARCH:x}" if name == "hexagon" else "",
        alignment=max((align for kind, _, _, align in segments if kind == LOAD), default=0),
        interpreter=interpreter,
    )


def _header(header: bytes, wide: bool) -> tuple[int, int, int, int, int]:
    """Machine, flags, and the program headers' offset, size and number."""
    (machine,) = struct.unpack_from("<H", header, 18)
    if wide:
        (offset,) = struct.unpack_from("<Q", header, 32)
        flags, _, size, count = struct.unpack_from("<IHHH", header, 48)
    else:
        (offset,) = struct.unpack_from("<I", header, 28)
        flags, _, size, count = struct.unpack_from("<IHHH", header, 36)
    return machine, flags, offset, size, count


def _segment(entry: bytes, wide: bool) -> tuple[int, int, int, int]:
    """Kind, offset, size in the file, alignment."""
    if wide:
        kind, _, offset, _, _, length, _, align = _WIDE.unpack(entry)
    else:
        kind, offset, _, _, length, _, _, align = _NARROW.unpack(entry)
    return kind, offset, length, align
