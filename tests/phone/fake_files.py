"""Files made for the tests: bundles with few bytes, and ELF files that hold nothing but their header."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any


ARM64, HEXAGON, X86_64 = 183, 164, 62


def write_elf(path: Path, machine: int = ARM64, *, alignment: int = 0x4000, flags: int = 0, text: bytes = b"") -> Path:
    """A little-endian ELF file (32 bit for a Hexagon) with one segment to load; ``text`` follows its headers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ident = b"\x7fELF" + bytes([1 if machine == HEXAGON else 2, 1, 1]) + bytes(9)
    if machine == HEXAGON:
        header = struct.pack("<HHIIIIIHHHHHH", 3, machine, 1, 0, 52, 0, flags, 52, 32, 1, 0, 0, 0)
        segment = struct.pack("<8I", 1, 0, 0, 0, 84, 84, 5, alignment)
    else:
        header = struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, flags, 64, 56, 1, 0, 0, 0)
        segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 120, 120, alignment)
    path.write_bytes(ident + header + segment + text)
    path.chmod(0o755)
    return path


def qnn_library(path: Path, machine: int = ARM64, *, version: str = "2.51.0", flags: int = 0) -> Path:
    return write_elf(path, machine, flags=flags, text=f"\0v{version}.260929181845\0".encode())


def qnn_sdk(directory: Path, arch: str = "79", **changes: Any) -> Path:
    """QNN's libraries where Qualcomm's SDK has them."""
    flags = int(changes.pop("skeleton", arch), 16)
    arm = directory / "lib/aarch64-android"
    for name in ("libQnnHtp.so", "libQnnSystem.so", f"libQnnHtpV{arch}Stub.so"):
        qnn_library(arm / name, **changes)
    qnn_library(directory / f"lib/hexagon-v{arch}/unsigned/libQnnHtpV{arch}Skel.so", HEXAGON, flags=flags, **changes)
    return directory
