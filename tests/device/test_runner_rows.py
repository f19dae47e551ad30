"""Rows of the C++ harness against NumPy, and the ROM files that it refuses."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import IO_MODES, write_rom

from meki_edge.rom.reader import RomReader

SEGMENTS = [  # (dim, codec) a layer
    pytest.param([(7, "fp32"), (3, "fp32")], id="fp32"),
    pytest.param([(129, "fp16"), (64, "fp16")], id="fp16"),
    pytest.param([(100, "int8"), (1, "int8"), (33, "int8")], id="int8"),
    pytest.param([(64, "int4"), (33, "int4"), (1, "int4"), (31, "int4")], id="int4"),
    pytest.param([(5, "int4"), (3, "int8"), (9, "fp16"), (2, "fp32")], id="mixed"),
    pytest.param([(1024, "fp16")] * 7, id="fp16-14336-bytes"),
    pytest.param([(1000, "int4")] * 12, id="int4-two-pages"),
]


def rows_command(binary: Path, rom: Path, ids: str, io: str = "pread") -> subprocess.CompletedProcess[bytes]:
    ids_file = rom.with_suffix(".ids")
    ids_file.write_text(ids)
    return subprocess.run([binary, "rows", "--rom", rom, "--ids-file", ids_file, "--io", io], capture_output=True)


@pytest.mark.parametrize("io", IO_MODES)
@pytest.mark.parametrize("layers", SEGMENTS)
def test_rows_are_numpys_bit_for_bit(binary: Path, tmp_path: Path, layers: list[tuple[int, str]], io: str) -> None:
    expected = write_rom(tmp_path / "rom.safetensors", layers, 37)
    ids = [*range(37), 36, 0, 5, 5]
    done = rows_command(binary, tmp_path / "rom.safetensors", "\n".join(map(str, ids)), io)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == expected[ids].astype("<f4").tobytes()


def test_rows_of_the_real_writer_are_those_of_the_python_reader(binary: Path, bundles: dict[str, Path]) -> None:
    for name in ("rom.safetensors", "embedding.safetensors"):
        copy = bundles["meki"] / name
        with RomReader(copy) as reader:
            expected = reader.rows(np.arange(reader.spec.num_rows))
        ids_file = copy.parent.parent / f"{name}.ids"
        ids_file.write_text(" ".join(map(str, range(len(expected)))))
        done = subprocess.run([binary, "rows", "--rom", copy, "--ids-file", ids_file], capture_output=True, check=True)
        assert done.stdout == expected.tobytes()


def edited_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    contents = path.read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header = json.loads(contents[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    path.write_bytes(struct.pack("<Q", len(text)) + text + contents[8 + length :])


def edited_bytes(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


HOSTILE: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty", lambda p: p.write_bytes(b""), "too short for a header"),
    ("header length", lambda p: edited_bytes(p, 0, b"\xff" * 8), "the header claims 18446744073709551615 bytes"),
    ("header text", lambda p: edited_bytes(p, 8, b"{{{"), "not valid JSON"),
    ("truncated", lambda p: os.truncate(p, p.stat().st_size - 1), "'rows' ends at byte"),
    ("longer", lambda p: os.truncate(p, p.stat().st_size + 1), "the tensors end at byte"),
    ("format", lambda p: edited_header(p, lambda h: h["__metadata__"].update(format="gguf")), "not a ROM file"),
    ("version", lambda p: edited_header(p, lambda h: h["__metadata__"].update(version="9")), "ROM version '9'"),
    ("addressing", lambda p: edited_header(p, lambda h: h["__metadata__"].update(addressing="x")), "addressing"),
    ("segments", lambda p: edited_header(p, lambda h: h["__metadata__"].update(segments="[]")), "'segments' is not"),
    ("shape", lambda p: edited_header(p, lambda h: h["rows"].update(shape=[9, 64])), "does not fit its byte range"),
    ("scale", lambda p: edited_bytes(p, 4096 + 64, b"\x00\x7e"), "row 1, layer 0 memory 0: a scale is negative, NaN"),
]


@pytest.mark.parametrize(("spoil", "what"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_file_is_a_named_error(
    binary: Path, tmp_path: Path, spoil: Callable[[Path], object], what: str
) -> None:
    path = tmp_path / "rom.safetensors"
    write_rom(path, [(50, "int8")], 8)
    spoil(path)
    done = rows_command(binary, path, "0 1 2")
    assert done.returncode == 1
    line = done.stderr.decode()
    assert line.startswith("error: ") and line.count("\n") == 1
    assert what in line and str(path) in line


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ("8", "row 8 is not in the file, which has 8"),
        ("", "holds no token ids"),
        ("1 -2", "'-2' is not a token id"),
        ("1\0\x1b[2J", "'1  [2J' is not a token id"),
    ],
)
def test_bad_ids(binary: Path, tmp_path: Path, ids: str, what: str) -> None:
    write_rom(tmp_path / "rom.safetensors", [(50, "int8")], 8)
    done = rows_command(binary, tmp_path / "rom.safetensors", ids)
    error = done.stderr.decode()
    assert done.returncode == 1 and what in error and error.endswith(" white space\n" if "'" in what else "\n")
