"""ROM files whose header lies, that are cut, or on storage that fails: each its named error, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_files import GOLDEN, Header
from hypothesis import given, settings
from hypothesis import strategies as st
from rom_files import NUM_ROWS

from meki_edge.errors import UserError
from meki_edge.rom.reader import RomReader


def rewritten(good: Path, path: Path, change: Callable[[Header], object], align: int = 4096) -> Path:
    """A copy of ``good`` with another header."""
    contents = good.read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header = json.loads(contents[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % align)
    path.write_bytes(struct.pack("<Q", len(text)) + text + contents[8 + length :])
    return path


def metadata(**changes: str | None) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        header["__metadata__"] = {
            key: value for key, value in (header["__metadata__"] | changes).items() if value is not None
        }

    return change


def segments(edit: Callable[[list[dict[str, Any]]], object]) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        listed = json.loads(header["__metadata__"]["segments"])
        edit(listed)
        header["__metadata__"]["segments"] = json.dumps(listed)

    return change


def rows(**changes: object) -> Callable[[Header], None]:
    return lambda header: header["rows"].update(changes)


def add_tensor(header: Header) -> None:
    end = header["rows"]["data_offsets"][1]
    header["other"] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}


def rename(header: Header) -> None:
    header["tensor"] = header.pop("rows")


HEADERS: list[tuple[str, Callable[[Header], object], str]] = [
    ("no metadata", lambda h: h.pop("__metadata__"), "not a ROM file: format is None"),
    ("metadata of numbers", lambda h: h.update(__metadata__={"format": 1}), "__metadata__ maps strings to strings"),
    ("metadata a list", lambda h: h.update(__metadata__=["format"]), "header is not valid"),
    ("another format", metadata(format="gguf"), "not a ROM file: format is 'gguf'"),
    ("another version", metadata(version="2"), "ROM version '2', this reader knows 1"),
    ("no version", metadata(version=None), "ROM version None"),
    ("no tokenizer", metadata(tokenizer_sha256=None), "the header lacks 'tokenizer_sha256'"),
    ("no segments", metadata(segments=None), "the header lacks 'segments'"),
    ("unknown addressing", metadata(addressing="ngram"), "unknown addressing 'ngram'"),
    ("segments not JSON", metadata(segments="[{"), "'segments' is not valid JSON"),
    ("segments too deep", metadata(segments="[" * 100_000), "'segments' is not valid JSON"),
    ("segments an object", metadata(segments="{}"), "'segments' is not a list"),
    ("segments empty", metadata(segments="[]"), "'segments' is not a list"),
    ("segment a number", metadata(segments="[3]"), "expected a JSON object, got 3"),
    ("unknown codec", segments(lambda s: s[0].update(codec="int5")), "unknown codec 'int5'; did you mean"),
    ("unknown key", segments(lambda s: s[0].update(ofset=0)), "unknown key 'ofset'; did you mean 'offset'"),
    ("missing key", segments(lambda s: s[0].pop("dim")), "the key 'dim' is missing"),
    ("dim a string", segments(lambda s: s[0].update(dim="12")), "expected int, got '12'"),
    ("dim zero", segments(lambda s: s[3].update(dim=0)), "segment 3 overlaps its neighbour or does not fit"),
    ("dim negative", segments(lambda s: s[3].update(dim=-4)), "segment 3 overlaps its neighbour or does not fit"),
    ("dim huge", segments(lambda s: s[3].update(dim=10**30)), "segment 3 overlaps its neighbour or does not fit"),
    ("offset negative", segments(lambda s: s[0].update(offset=-1)), "segment 0 overlaps its neighbour"),
    ("overlap", segments(lambda s: s[1].update(offset=13)), "segment 1 overlaps its neighbour"),
    ("past the end", segments(lambda s: s[3].update(offset=63)), "segment 3 overlaps its neighbour or does not fit"),
    ("out of order", segments(lambda s: s.reverse()), "is out of order"),
    ("twice", segments(lambda s: s[1].update(layer=0)), "segment 1 (layer 0, memory 0) is out of order"),
    ("layer −2", segments(lambda s: s[0].update(layer=-2)), "segment 0 (layer -2, memory 0) is out of order"),
    ("no rows tensor", rename, "the tensor 'rows' has shape ()"),
    ("two tensors", add_tensor, "the file holds tensors that nothing in its header uses: other"),
    ("int8 rows", rows(dtype="I8"), "the tensor 'rows' is I8, not U8"),
    ("dtype a list", rows(dtype=["U8"]), "unsupported dtype"),
    ("one dimension", rows(shape=[NUM_ROWS * 128]), "the tensor 'rows' has shape (2560,)"),
    ("no rows", rows(shape=[0, 128], data_offsets=[0, 0]), "the tensor 'rows' has shape (0, 128)"),
    ("more rows than bytes", rows(shape=[21, 128], data_offsets=[0, 21 * 128]), "ends at byte"),
    ("fewer rows than bytes", rows(shape=[19, 128], data_offsets=[0, 19 * 128]), "the tensors end at byte"),
    ("shape and offsets disagree", rows(shape=[21, 128]), "does not fit its byte range"),
    ("shape of strings", rows(shape=["20", "128"]), "not all integers"),
    ("shape of floats", rows(shape=[20.0, 128.0]), "not all integers"),
    ("offsets of floats", rows(data_offsets=[0.0, 2560.0]), "not all integers"),
    ("negative shape", rows(shape=[-20, -128]), "does not fit its byte range"),
    ("offset before the data", rows(data_offsets=[-2560, 0]), "does not fit its byte range"),
]


@pytest.mark.parametrize(("change", "what"), [case[1:] for case in HEADERS], ids=[case[0] for case in HEADERS])
def test_headers(good: Path, tmp_path: Path, change: Callable[[Header], object], what: str) -> None:
    path = rewritten(good, tmp_path / "rom.safetensors", change)
    with pytest.raises(UserError) as caught:
        RomReader(path)
    assert what in caught.value.what
    assert str(path) in caught.value.where and caught.value.fix


def test_rows_off_the_page(good: Path, tmp_path: Path) -> None:
    path = rewritten(good, tmp_path / "rom.safetensors", lambda header: None, align=64)
    with pytest.raises(UserError, match="which is not a multiple of 4096"):
        RomReader(path)


def test_other_metadata_is_allowed(good: Path, tmp_path: Path) -> None:
    with RomReader(rewritten(good, tmp_path / "rom.safetensors", metadata(comment="mine"))) as reader:
        assert reader.spec.num_rows == NUM_ROWS


@pytest.mark.parametrize("size", [0, 5, 8, 300, 4096, 4097, 4096 + 2559, 4096 + 2561])
def test_any_other_length_is_refused(good: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "rom.safetensors"
    path.write_bytes((good.read_bytes() + b"\0" * 10)[:size])
    with pytest.raises(UserError):
        RomReader(path)


def test_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for somebody who writes
    with pytest.raises(UserError, match="not a regular file"):
        RomReader(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        RomReader(tmp_path)
    with pytest.raises(UserError, match="cannot open the file: No such file"):
        RomReader(tmp_path / "absent")


def test_a_file_that_shrinks_while_read(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "rom.safetensors"
    path.write_bytes(good.read_bytes())
    with RomReader(path) as reader:
        with open(path, "r+b") as file:
            file.truncate(4096 + 5 * 128 + 7)
        assert reader.rows(np.array([4])).shape == (1, reader.spec.row_dim)
        with pytest.raises(UserError, match="the file ends inside tensor 'rows'"):
            reader.rows(np.array([5]))


def failing(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """Make ``os.<name>`` fail as storage does, after so many calls."""
    calls, real = iter(range(1000)), getattr(os, name)

    def read(*arguments: Any) -> Any:
        if next(calls) >= after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(os, name, read)


@pytest.mark.parametrize("after", [0, 1])
def test_storage_that_fails_in_the_header(good: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    failing(monkeypatch, "pread", after)
    with pytest.raises(UserError, match="reading the header failed: Input/output error"):
        RomReader(good)


@pytest.mark.parametrize("name", ["identity_int8", "ragged_static16_checksums", "ngram_hash_fp16"])
def test_storage_that_fails(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In what the addressing needs, in the checksums and in the rows, wherever it begins."""
    path = GOLDEN / f"{name}.safetensors"
    for after in range(20):
        with monkeypatch.context() as patch:
            failing(patch, "preadv", after)
            try:
                with RomReader(path, verify_rows="checksums" in name) as reader:
                    reader.fetch(np.array([3, 1, 0]))
                assert after > 2
                return
            except UserError as error:
                assert "Input/output error" in error.what and error.where == str(path)
    raise AssertionError("it never came to an end")


@given(
    edits=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 7000)),
)
@settings(max_examples=300, deadline=None)
def test_no_header_crashes_the_reader(
    good: Path, tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], cut: int | None
) -> None:
    """Random edits of the header and random cuts: rows come out, or a UserError does."""
    contents = bytearray(good.read_bytes())
    for position, value in edits:
        contents[position] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(contents[:cut])
    try:
        with RomReader(path) as reader:
            reader.rows(np.array([0, reader.spec.num_rows - 1]))
    except UserError:
        pass
