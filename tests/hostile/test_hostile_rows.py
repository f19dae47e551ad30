"""Damaged rows: what the reader refuses, and what `meki-edge verify` tells of them."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hostile_files import GOLDEN
from rom_files import NUM_ROWS, written
from typer.testing import CliRunner

from meki_edge import cli
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.rom import inspect
from meki_edge.rom.reader import RomReader


def damaged(good: Path, path: Path, row: int, offset: int, data: bytes) -> Path:
    contents = bytearray(good.read_bytes())
    start = 4096 + row * 128 + offset
    contents[start : start + len(data)] = data
    path.write_bytes(contents)
    return path


SCALES = {"nan": 0x7E00, "inf": 0x7C00, "negative": 0xBC00, "negative zero": 0x8000, "negative nan": 0xFE00}


def test_a_file_that_shrinks_while_verified(good: Path, tmp_path: Path) -> None:
    """Between one block of rows and the next."""
    path = tmp_path / "rom.safetensors"
    path.write_bytes(good.read_bytes())
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the file ends inside tensor 'rows'"):
        patch.setattr(inspect, "BLOCK_BYTES", 500)
        inspect.verify(path, advance=lambda rows: os.truncate(path, 4096 + 700))


@pytest.mark.parametrize("bits", SCALES.values(), ids=SCALES.keys())
def test_bad_scales(good: Path, tmp_path: Path, bits: int) -> None:
    path = damaged(good, tmp_path / "rom.safetensors", 11, 14, struct.pack("<H", bits))
    with RomReader(path) as reader:
        with pytest.raises(UserError, match="row 11, layer 1 memory 0: a scale is negative, NaN or infinite"):
            reader.rows(np.array([3, 11, 3]))
        reader.rows(np.array([10, 12]))
    with pytest.raises(UserError, match="row 11, layer 1 memory 0"):
        inspect.verify(path)


@pytest.mark.parametrize(
    ("codec", "data"), [("fp16", b"\x00\x7c"), ("bf16", b"\x80\x7f"), ("fp32", b"\x00\x00\xc0\x7f")]
)
def test_elements_that_are_not_finite(tmp_path: Path, codec: str, data: bytes) -> None:
    path = written(tmp_path / "rom.safetensors", [(0, 0, 4)], codec, 2)
    with open(path, "r+b") as file:
        file.seek(4096 + 4 * (4 if codec == "fp32" else 2))
        file.write(data)
    with RomReader(path) as reader, pytest.raises(UserError, match="row 1, layer 0 memory 0: an element is NaN"):
        reader.rows(np.array([1]))


@pytest.mark.parametrize("offset", [122, 127])
def test_verify_finds_dirty_padding(good: Path, tmp_path: Path, offset: int) -> None:
    path = damaged(good, tmp_path / "rom.safetensors", 7, offset, b"\x01")
    with pytest.raises(UserError, match="row 7: the padding is not zero"):
        inspect.verify(path)


def test_verify_goes_through_the_whole_file(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of three rows: each damaged row is told of once, the first ones by name and all in number."""
    monkeypatch.setattr(inspect, "BLOCK_BYTES", 3 * 128)
    path, nan = tmp_path / "rom.safetensors", struct.pack("<H", SCALES["nan"])
    damaged(good, path, 2, 127, b"\x01")
    for row in (4, 5, 11):
        damaged(path, path, row, 14, nan)
    damaged(path, path, 5, 122, b"\x01")  # padding too: the scale was told of
    damaged(path, path, NUM_ROWS - 1, 0, nan)
    scale = "a scale is negative, NaN or infinite"
    told = (
        "row 2: the padding is not zero",
        *(f"row {row}, layer 1 memory 0: {scale}" for row in (4, 5, 11)),
        f"row {NUM_ROWS - 1}, layer 0 memory 0: {scale}",
    )
    steps: list[int] = []
    found = inspect.scan(path, steps.append)
    assert (found.rows, found.damaged, found.first, sum(steps)) == (NUM_ROWS, 5, told, NUM_ROWS)
    assert inspect.scan(good).damaged == 0
    monkeypatch.setattr(inspect, "SHOWN", 2)
    assert inspect.scan(path) == inspect.Scan(rows=NUM_ROWS, damaged=5, first=told[:2])
    done = CliRunner().invoke(cli.app, ["verify", str(path)])
    assert isinstance(done.exception, UserError)
    assert done.exception.what == f"damaged: 5 of {NUM_ROWS} rows of {path.name}"
    lines = [*told[:2], "… and 3 more damaged rows", f"{NUM_ROWS - 5} rows are well-formed"]
    assert done.stdout.splitlines() == [f"{path.name}: {line}" for line in lines]
    done = CliRunner().invoke(cli.app, ["verify", str(path), "--json"])
    assert isinstance(done.exception, UserError)
    assert json.loads(done.stdout) == {
        "well_formed_rows": {path.name: NUM_ROWS - 5},
        "damaged_rows": {path.name: {"count": 5, "first": list(told[:2])}},
    }
    done = CliRunner().invoke(cli.app, ["verify", str(good), "--all"])
    assert isinstance(done.exception, UserError) and done.exception.where == "--all"


def test_verify_of_a_directory_names_the_rows_of_a_file_that_changed(
    exported: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    folder = shutil.copytree(exported["meki"][0], tmp_path / "meki")
    rom = folder / "rom.safetensors"
    with RomReader(rom) as reader:
        stride = reader.spec.row_stride
    content = bytearray(rom.read_bytes())
    start = len(content) - reader.spec.num_rows * stride + 7 * stride
    content[start : start + 2] = struct.pack("<H", SCALES["nan"])
    rom.write_bytes(content)
    done = CliRunner().invoke(cli.app, ["verify", str(folder)])
    assert isinstance(done.exception, UserError)
    assert done.exception.what == f"damaged: 1 of {reader.spec.num_rows} rows of {rom.name}"
    assert f"{rom.name}: row 7, layer 0 memory 0: a scale is negative, NaN or infinite" in done.stdout
    shutil.copyfile(exported["meki"][0] / rom.name, rom)
    (folder / "model.safetensors").write_bytes(b"other weights")
    done = CliRunner().invoke(cli.app, ["verify", str(folder)])  # the rows are whole, and a digest is not
    assert isinstance(done.exception, UserError) and "model.safetensors" in str(done.exception)


def test_verify_reads_past_checksums_that_do_not_match(tmp_path: Path) -> None:
    contents = bytearray((GOLDEN / "identity_int8_checksums.safetensors").read_bytes())
    for row in (1, 3):
        contents[4096 + 64 * row + 3] ^= 1
    path = tmp_path / "rom.safetensors"
    path.write_bytes(contents)
    found = inspect.scan(path)
    assert (found.rows, found.damaged) == (6, 2)
    assert found.first == tuple(f"row {row}: the checksum does not match" for row in (1, 3))


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.safetensors")))
def test_what_verify_refuses_is_what_the_reader_does(tmp_path: Path, name: str) -> None:
    """Every row filled with ones: NaN in all floats and scales, and no fault in integers that have none."""
    contents = bytearray((GOLDEN / f"{name}.safetensors").read_bytes())
    path = tmp_path / "rom.safetensors"
    with RomReader(GOLDEN / f"{name}.safetensors") as reader:
        spec = reader.spec
    contents[4096 : 4096 + spec.num_rows * spec.row_stride] = b"\xff" * (spec.num_rows * spec.row_stride)
    path.write_bytes(contents)
    refused = {}
    with RomReader(path) as reader:
        for row in range(spec.num_rows):
            try:
                reader.rows(np.array([row]))
            except UserError as error:
                refused[row] = error.what
    found = inspect.scan(path)
    if spec.checksums or not refused:  # what only `verify` looks at: checksums, and padding
        assert found.damaged == (spec.num_rows if spec.checksums or spec.row_stride > spec.row_bytes else 0)
    else:
        assert found.first == tuple(refused.values())[: inspect.SHOWN] and found.damaged == spec.num_rows


def test_verify_finds_a_dirty_nibble(tmp_path: Path) -> None:
    """An odd int4 segment leaves half a byte unused."""
    path = written(tmp_path / "rom.safetensors", [(0, 0, 3)], "int4", 2)
    inspect.verify(path)
    contents = bytearray(path.read_bytes())
    contents[-1] |= 0x30
    path.write_bytes(contents)
    with pytest.raises(UserError, match="row 1: the padding is not zero"):
        inspect.verify(path)


def test_verify_compares_the_digest(good: Path, tmp_path: Path) -> None:
    digest = sha256_file(good)
    assert inspect.verify(good, digest) == NUM_ROWS
    path = damaged(good, tmp_path / "rom.safetensors", 7, 3, b"\x01")
    inspect.verify(path)
    with pytest.raises(UserError, match="the file's SHA-256 is"):
        inspect.verify(path, digest)
