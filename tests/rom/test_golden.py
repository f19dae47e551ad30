"""The golden files (tests/golden), written without the package: we read them right and write them alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from meki_edge.errors import UserError
from meki_edge.rom import inspect
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import build
from meki_edge.rom.writer import RomWriter

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))


def expected_rows(name: str) -> np.ndarray:
    """float32 ``[num_rows, row_dim]``, from the JSON file's bits."""
    listed = json.loads((GOLDEN / f"{name}.json").read_text())["rows"]
    return np.array([[int(word, 16) for word in row.split()] for row in listed], np.uint32).view(np.float32)


def test_the_script_writes_these_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, GOLDEN / "make.py", tmp_path], check=True)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in GOLDEN.iterdir() if path.suffix in (".json", ".safetensors")}
    assert made == committed and len(NAMES) == 11
    assert sum(map(len, committed.values())) < 100_000


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_addresses(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    rows = expected_rows(name)
    with RomReader(GOLDEN / golden["rom"]) as reader:
        every = np.arange(reader.spec.num_rows)
        assert rows.shape == (reader.spec.num_rows, reader.spec.row_dim)
        np.testing.assert_array_equal(reader.rows(every).view(np.uint32), rows.view(np.uint32))
        parts = [reader.segment(index, every[::-1]) for index in range(len(reader.spec.segments))]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1).view(np.uint32), rows[::-1].view(np.uint32))
        for case in golden["cases"]:
            ids, before = np.array(case["token_ids"]), np.array(case["before"], np.int64)
            row_ids, counts = reader.row_ids(ids, before)
            assert [row[:count].tolist() for row, count in zip(row_ids, counts, strict=True)] == case["row_ids"]
            values, counts = reader.fetch(ids, before)
            for found, count, expected in zip(values, counts, case["row_ids"], strict=True):
                np.testing.assert_array_equal(found[:count], rows[expected])
    assert inspect.verify(GOLDEN / golden["rom"]) == len(rows)


@pytest.mark.parametrize("name", NAMES)
def test_integers_as_they_are_stored(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    with RomReader(GOLDEN / golden["rom"]) as reader:
        if "codes" not in golden:
            with pytest.raises(UserError, match="not integers with one quantization"):
                reader.fetch_raw(np.array([0]))
            return
        quantization = reader.spec.quantization
        assert quantization is not None
        for case in golden["cases"]:
            codes, counts = reader.fetch_raw(np.array(case["token_ids"]), np.array(case["before"], np.int64))
            assert codes.dtype == (np.uint8 if "static8" in name else np.uint16)
            for found, count, expected in zip(codes, counts, case["row_ids"], strict=True):
                assert found[:count].tolist() == [golden["codes"][row] for row in expected]
                assert (found[count:] == quantization.zero_point).all()


@pytest.mark.parametrize("name", [name for name in NAMES if "checksums" in name])
def test_checksums(name: str) -> None:
    path = GOLDEN / f"{name}.safetensors"
    with RomReader(path, verify_rows=True) as reader:
        every = np.arange(reader.spec.num_rows)
        np.testing.assert_array_equal(reader.rows(every), expected_rows(name))


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_opens_them(name: str) -> None:
    with safe_open(GOLDEN / f"{name}.safetensors", "np") as opened, RomReader(GOLDEN / f"{name}.safetensors") as reader:
        addressing = reader.spec.addressing
        assert set(opened.keys()) == {"rows", *addressing.tensors(), *(["checksums"] if reader.spec.checksums else [])}
        for field, array in addressing.tensors().items():
            np.testing.assert_array_equal(opened.get_tensor(field), array)


@pytest.mark.parametrize("name", NAMES)
def test_our_writer_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    """Values that a codec holds exactly are coded as they were: scales, codes, header and all."""
    original = GOLDEN / f"{name}.safetensors"
    with RomReader(original) as reader:
        found = reader.spec
    spec = build(
        [(segment.layer, segment.memory, segment.dim) for segment in found.segments],
        found.segments[0].codec,
        num_rows=found.num_rows,
        addressing=found.addressing,
        tokenizer_sha256=found.tokenizer_sha256,
        source_sha256=found.source_sha256,
        quantization=found.quantization,
        checksums=found.checksums,
    )
    with RomWriter(tmp_path / "rom.safetensors", spec) as writer:
        writer.write(expected_rows(name))
    assert (tmp_path / "rom.safetensors").read_bytes() == original.read_bytes()
    assert os.listdir(tmp_path) == ["rom.safetensors"]
