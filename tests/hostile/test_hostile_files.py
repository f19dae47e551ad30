"""Static codecs, checksums and what else a header can lie about: the same named error in Python and in the harness."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hostile_files import GOLDEN, Change, ids_file, lying, metadata, nested, parts_of, rotten, segment, tensor, whole

from meki_edge.errors import UserError
from meki_edge.rom import inspect
from meki_edge.rom.reader import RomReader

STATIC, INT8 = "identity_static8", "identity_int8"
CHECKED, RAGGED = "identity_int8_checksums", "ragged_static16_checksums"
LARGE = "1" + "0" * 400  # a JSON integer beyond every float
SCALE, ZERO_POINT = "the quantization's scale is", "the quantization's zero_point is"
CHECKSUMS = "the tensor 'checksums'"
KNOWN = "this reader knows"
ONE = {"scale": 1, "zero_point": 0}
CRC32 = {"algorithm": "crc32", "block_rows": 1}
ARRAY = "does not continue an array"


def quantization(text: str) -> Change:
    return metadata(quantization=text)


HEADERS: list[tuple[str, str, Change, str, str]] = [
    # name, golden file, change, what Python says, what the harness says
    ("scale zero", STATIC, nested("quantization", scale=0), SCALE, SCALE),
    ("scale negative", STATIC, nested("quantization", scale=-0.5), SCALE, SCALE),
    ("scale tiny", STATIC, nested("quantization", scale=1e-300), SCALE, SCALE),
    ("scale subnormal", STATIC, nested("quantization", scale=2.0**-127), SCALE, SCALE),
    ("scale huge", STATIC, nested("quantization", scale=1e300), SCALE, SCALE),
    ("scale nan", STATIC, quantization('{"scale":NaN,"zero_point":1}'), "not valid JSON", "not valid JSON"),
    ("scale infinite", STATIC, quantization('{"scale":1e999,"zero_point":1}'), SCALE, "not valid JSON"),
    ("scale endless", STATIC, quantization(f'{{"scale":{LARGE},"zero_point":1}}'), "too large", "not valid JSON"),
    ("scale a string", STATIC, nested("quantization", scale="1"), "expected float, got '1'", "must be a number"),
    ("scale true", STATIC, nested("quantization", scale=True), "expected float, got True", "'scale' must be a number"),
    ("scale missing", STATIC, nested("quantization", scale=None), "'scale' is missing", "'scale' is missing"),
    ("zero point negative", STATIC, nested("quantization", zero_point=-1), ZERO_POINT, ZERO_POINT),
    ("zero point too large", STATIC, nested("quantization", zero_point=256), ZERO_POINT, ZERO_POINT),
    ("zero point of 16 bits", RAGGED, nested("quantization", zero_point=65536), ZERO_POINT, ZERO_POINT),
    ("zero point a float", STATIC, nested("quantization", zero_point=1.0), "expected int", "must be an integer"),
    ("zero point beyond 64 bits", STATIC, nested("quantization", zero_point=2**64), ZERO_POINT, "must be an integer"),
    ("zero point missing", STATIC, nested("quantization", zero_point=None), "'zero_point' is missing", "is missing"),
    ("an unknown key", STATIC, nested("quantization", axis=1), "unknown key 'axis'", "unknown key 'axis'"),
    ("quantization a list", STATIC, metadata(quantization=[1, 2]), "expected a JSON object", "expected a JSON object"),
    ("quantization cut", STATIC, quantization('{"scale":'), "not valid JSON", "not valid JSON"),
    ("no quantization", STATIC, metadata(quantization=None), "static8 rows need a 'quantization'", "rows need a"),
    ("quantization of int8", INT8, metadata(quantization=ONE), "rows have no", "rows have no"),
    ("static and not", STATIC, segment(3, codec="int8"), "some segments are static8", "some segments are static8"),
    ("not static and static", INT8, segment(3, codec="static8"), "segments are static8", "segments are static8"),
    ("a gap at the front", STATIC, segment(0, offset=1, dim=4), ARRAY, ARRAY),
    ("a gap", STATIC, segment(1, offset=6, dim=32), ARRAY, ARRAY),
    ("two static codecs", RAGGED, segment(1, codec="static8"), ARRAY, ARRAY),
    ("an overlap", STATIC, segment(1, offset=4), "segment 1 overlaps", "segment 1 overlaps"),
    ("past the row", STATIC, segment(3, dim=4000), "segment 3 overlaps its neighbour or does not fit", "does not fit"),
    ("static16 past the row", RAGGED, segment(1, dim=5), "does not fit", "does not fit"),
    ("an unknown algorithm", CHECKED, nested("checksums", algorithm="crc32c"), KNOWN, KNOWN),
    ("blocks of two rows", CHECKED, nested("checksums", block_rows=2), KNOWN, KNOWN),
    ("blocks of 1.0 rows", CHECKED, nested("checksums", block_rows=1.0), KNOWN, KNOWN),
    ("blocks of true rows", CHECKED, nested("checksums", block_rows=True), KNOWN, KNOWN),
    ("no block", CHECKED, nested("checksums", block_rows=None), KNOWN, KNOWN),
    ("checksums a number", CHECKED, metadata(checksums=7), KNOWN, KNOWN),
    ("checksums cut", CHECKED, metadata(checksums="{"), "not valid JSON", "not valid JSON"),
    ("checksums undeclared", CHECKED, metadata(checksums=None), "header uses: checksums", "header uses: checksums"),
    ("checksums absent", INT8, metadata(checksums=CRC32), f"{CHECKSUMS} is missing", f"{CHECKSUMS} is missing"),
    ("checksums signed", CHECKED, tensor("checksums", dtype="I32"), f"{CHECKSUMS} is I32", f"{CHECKSUMS} is I32"),
    ("checksums in two axes", CHECKED, tensor("checksums", shape=[6, 1]), "not U32 of one axis", "not U32 of one axis"),
    ("a layer of 64 bits", INT8, segment(3, layer=2**63), "more than 63 bits", "'layer' must be an integer"),
    ("a memory of 64 bits", INT8, segment(3, memory=2**63), "more than 63 bits", "'memory' must be an integer"),
    ("parameters a list", INT8, metadata(addressing_parameters=[]), "not a JSON object", "expected a JSON object"),
    ("parameters null", INT8, metadata(addressing_parameters="null"), "not a JSON object", "expected a JSON object"),
    ("half a character", INT8, metadata(spare="\ud800"), "surrogates not allowed", "not valid JSON"),
    ("half a character inside", INT8, segment(0, codec="\ud800"), "surrogates not allowed", "not valid JSON"),
    ("checksums of negative length", CHECKED, tensor("checksums", shape=[-6]), "does not fit", "not sizes"),
    ("checksums past the end", CHECKED, tensor("checksums", shape=[9]), "does not fit its byte range", "does not fit"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "python", "harness"), [c[1:] for c in HEADERS], ids=[c[0] for c in HEADERS])
def test_a_header_that_lies(
    binary: Path, tmp_path: Path, name: str, change: Change, python: str, harness: str
) -> None:
    path = lying(tmp_path / "rom.safetensors", name, change)
    with pytest.raises(UserError) as caught:
        RomReader(path)
    assert python in caught.value.what and str(path) in caught.value.where and caught.value.fix
    assert harness in refusal(binary, path, tmp_path)


@pytest.mark.parametrize(
    ("before", "after"), [(b"\xef\xbb\xbf", b""), (b" ", b""), (b"", b"\0"), (b"", b"\0{"), (b"", b"{}")]
)
def test_more_than_a_json_object(binary: Path, tmp_path: Path, before: bytes, after: bytes) -> None:
    """What some JSON parsers skip and others do not: a file that is sound for one reader only."""
    header, data = parts_of(INT8)
    contents = whole(header, b"")
    text = before + contents[8:].rstrip(b" ") + after
    text += b" " * (-(8 + len(text)) % 4096)
    path = tmp_path / "rom.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(UserError, match="the safetensors header is not valid"):
        RomReader(path)
    assert ("does not begin with" if before else "not valid JSON") in refusal(binary, path, tmp_path)


def test_rows_beyond_a_gigabyte(binary: Path, tmp_path: Path) -> None:
    """A sparse file of two rows, one byte too long each."""
    stride = 2**30 + 1
    path = lying(tmp_path / "rom.safetensors", INT8, tensor("rows", shape=[2, stride], data_offsets=[0, 2 * stride]))
    os.truncate(path, path.stat().st_size - 6 * 64 + 2 * stride)
    with pytest.raises(UserError, match=r"it needs a row, and rows of 1 to 1073741824 bytes"):
        RomReader(path)
    assert "it needs a row, and rows of 1 to 1073741824 bytes" in refusal(binary, path, tmp_path)


def refusal(binary: Path, path: Path, directory: Path, *options: str) -> str:
    """The one line of error that the harness ends with."""
    return error_of(binary, "rows", "--rom", path, "--ids-file", ids_file(directory, [0, 5, 3]), *options)


def error_of(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, timeout=60)
    error = done.stderr.decode()
    assert (done.returncode, error.count("\n")) == (1, 1) and error.startswith("error: ")
    return error


@pytest.mark.parametrize(
    ("name", "length", "tail"), [(CHECKED, 5, -4), (CHECKED, 7, 4), (RAGGED, 18, -4), (RAGGED, 20, 4)]
)
def test_checksums_of_another_length(binary: Path, tmp_path: Path, name: str, length: int, tail: int) -> None:
    """The file is as long as its header says: only the number of rows tells."""

    def change(header: dict) -> None:
        start = header["checksums"]["data_offsets"][0]
        header["checksums"].update(shape=[length], data_offsets=[start, start + 4 * length])

    path = lying(tmp_path / "rom.safetensors", name, change, tail)
    with pytest.raises(UserError, match="does not have one for each row and tensor"):
        RomReader(path)
    assert "does not have one for each row and tensor" in refusal(binary, path, tmp_path)


@pytest.mark.parametrize(("first", "second"), [("checksums", "rows"), ("offsets", "rows"), ("checksums", "offsets")])
def test_tensors_that_share_bytes(binary: Path, tmp_path: Path, first: str, second: str) -> None:
    """The file ends with its last tensor, and each fits: but a flipped bit of one would change both."""

    def change(header: dict) -> None:
        size = header[first]["data_offsets"][1] - header[first]["data_offsets"][0]
        end = header[second]["data_offsets"][1]
        header[first]["data_offsets"] = [end - size, end]

    path = lying(tmp_path / "rom.safetensors", RAGGED, change)
    with pytest.raises(UserError):
        RomReader(path)
    assert refusal(binary, path, tmp_path)


ROT: list[tuple[str, str, str, int, bytes, str]] = [
    ("a code", CHECKED, "rows", 3 * 64 + 3, b"\x11", "row 3: the checksum does not match"),
    ("a scale", CHECKED, "rows", 5 * 64, b"\x11", "row 5: the checksum does not match"),
    ("the last byte", CHECKED, "rows", 5 * 64 + 50, b"\x5a", "row 5: the checksum does not match"),
    ("a checksum", CHECKED, "checksums", 4 * 3 + 2, b"\xa5", "row 3: the checksum does not match"),
    ("an integer", RAGGED, "rows", 3 * 18 + 7, b"\x33", "row 3: the checksum does not match"),
    ("an address", RAGGED, "offsets", 8, b"\x01", "the tensor 'offsets': the checksum does not match"),
    ("an address's checksum", RAGGED, "checksums", 4 * 18, b"\x01", "tensor 'offsets': the checksum does not match"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "offset", "data", "what"), [c[1:] for c in ROT], ids=[c[0] for c in ROT])
@pytest.mark.parametrize("io", ["pread", "direct", "mmap"])
def test_rot_is_found(
    binary: Path, tmp_path: Path, name: str, where: str, offset: int, data: bytes, what: str, io: str
) -> None:
    """Each is a sound file; only the checksums know better."""
    path = rotten(tmp_path / "rom.safetensors", name, where, offset, data)
    RomReader(path).close()
    with pytest.raises(UserError, match=what), RomReader(path, verify_rows=True) as reader:
        reader.rows(np.arange(reader.spec.num_rows))
    with pytest.raises(UserError, match=what):
        inspect.verify(path)
    assert what in refusal(binary, path, tmp_path, "--verify-rows", "--io", io)
    command = [binary, "fetch", "--rom", path, "--ids-file", ids_file(tmp_path, [0, 5, 3, 2]), "--io", io]
    assert str(path) in error_of(*command, "--verify-rows")


def test_rows_beside_the_rotten_one_are_read(binary: Path, tmp_path: Path) -> None:
    path = rotten(tmp_path / "rom.safetensors", CHECKED, "rows", 3 * 64 + 3, b"\x11")
    with RomReader(path, verify_rows=True) as reader, RomReader(GOLDEN / f"{CHECKED}.safetensors") as sound:
        rows = sound.rows(np.array([0, 4, 5]))
        np.testing.assert_array_equal(reader.rows(np.array([0, 4, 5])), rows)
    command = [binary, "rows", "--rom", path, "--ids-file", ids_file(tmp_path, [0, 4, 5]), "--verify-rows"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == rows.tobytes()


def test_a_file_without_checksums_cannot_be_checked(binary: Path, tmp_path: Path) -> None:
    path = GOLDEN / f"{INT8}.safetensors"
    with pytest.raises(UserError, match="the file has no checksums of its rows"):
        RomReader(path, verify_rows=True)
    assert "the file has no checksums of its rows" in refusal(binary, path, tmp_path, "--verify-rows")


def test_rows_that_are_not_integers_have_no_raw_form(binary: Path, tmp_path: Path) -> None:
    assert "not integers with one quantization" in refusal(binary, GOLDEN / f"{INT8}.safetensors", tmp_path, "--raw")


@pytest.mark.parametrize("bad", [6, 2**32 - 1])
@pytest.mark.parametrize("name", [INT8, STATIC, CHECKED])
def test_ids_out_of_range(binary: Path, tmp_path: Path, name: str, bad: int) -> None:
    path = GOLDEN / f"{name}.safetensors"
    with RomReader(path) as reader:
        for read in (reader.rows, reader.raw, *([reader.raw_rows, reader.fetch_raw] if name == STATIC else [])):
            with pytest.raises(UserError, match=f"{bad} is not in the file, which has 6"):
                read(np.array([0, bad]))
    for command, what in (("rows", f"row {bad} is not in the file"), ("fetch", f"token id {bad} has no row")):
        assert what in error_of(binary, command, "--rom", path, "--ids-file", ids_file(tmp_path, [0, bad]))
