"""Files that lie, are cut or are damaged: each its named error, never a traceback or a wrong row."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from meki_edge import cli
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.rom import inspect
from meki_edge.rom.addressing import Identity
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import build
from meki_edge.rom.writer import RomWriter

GOLDEN = Path(__file__).parents[1] / "golden"
Header = dict[str, Any]
NUM_ROWS = 20
DIMS = [(0, 0, 12), (1, 0, 33), (1, 1, 5), (2, 0, 64)]


def written(path: Path, dims: list[tuple[int, int, int]], codec: str, num_rows: int) -> Path:
    """A sound file of random rows."""
    digests = {"tokenizer_sha256": "t" * 64, "source_sha256": "s" * 64}
    spec = build(dims, codec, num_rows=num_rows, addressing=Identity(), **digests)
    with RomWriter(path, spec) as writer:
        writer.write(np.random.default_rng(0).standard_normal((num_rows, spec.row_dim), dtype=np.float32))
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("good") / "rom.safetensors", DIMS, "int8", NUM_ROWS)


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


def test_a_file_that_shrinks_while_verified(good: Path, tmp_path: Path) -> None:
    """Between one block of rows and the next."""
    path = tmp_path / "rom.safetensors"
    path.write_bytes(good.read_bytes())
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the file ends inside tensor 'rows'"):
        patch.setattr(inspect, "BLOCK_BYTES", 500)
        inspect.verify(path, advance=lambda rows: os.truncate(path, 4096 + 700))


def damaged(good: Path, path: Path, row: int, offset: int, data: bytes) -> Path:
    contents = bytearray(good.read_bytes())
    start = 4096 + row * 128 + offset
    contents[start : start + len(data)] = data
    path.write_bytes(contents)
    return path


SCALES = {"nan": 0x7E00, "inf": 0x7C00, "negative": 0xBC00, "negative zero": 0x8000, "negative nan": 0xFE00}


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
