"""Whole ROM files: written by us, opened by `safetensors` and by an independent decoder."""

from __future__ import annotations

import json
import os
import subprocess
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rom_oracle import OracleFile
from safetensors import safe_open

from meki_edge.errors import UserError
from meki_edge.graph_spec import Quantization
from meki_edge.rom import inspect
from meki_edge.rom import writer as writer_module
from meki_edge.rom.addressing import Addressing, Identity, NgramHash, Ragged
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import CODECS, RomSpec, build, row_stride
from meki_edge.rom.writer import RomWriter, header_bytes

IDENTITY = Identity()


def spec_of(
    dims: list[tuple[int, int, int]],
    codec: str,
    num_rows: int,
    addressing: Addressing = IDENTITY,
    *,
    checksums: bool = False,
) -> RomSpec:
    return build(
        dims,
        codec,
        num_rows=num_rows,
        addressing=addressing,
        tokenizer_sha256="t" * 64,
        source_sha256="s" * 64,
        quantization=Quantization(scale=0.04, zero_point=120) if CODECS[codec].is_static else None,
        checksums=checksums,
    )


def random_rows(spec: RomSpec, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((spec.num_rows, spec.row_dim), dtype=np.float32)


def write(path: Path, spec: RomSpec, values: np.ndarray, step: int = 7) -> Path:
    with RomWriter(path, spec) as writer:
        for start in range(0, len(values), step):
            writer.write(values[start : start + step])
    return path


DIMS = [(0, 0, 12), (1, 0, 33), (1, 1, 5), (2, 0, 64)]


@pytest.mark.parametrize("addressing", ["identity", "ragged", "ngram_hash"])
def test_checksums_are_zlibs(tmp_path: Path, addressing: str) -> None:
    """Of a row's data without its padding, then of what the addressing needs."""
    chosen = {"identity": (IDENTITY, 30), "ragged": (RAGGED, 8), "ngram_hash": (HASHED, 17)}[addressing]
    spec = spec_of(DIMS, "int4_64", chosen[1], chosen[0], checksums=True)
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    with safe_open(path, "np") as opened:
        found = opened.get_tensor("checksums")
        expected = [zlib.crc32(row[: spec.row_bytes].tobytes()) for row in opened.get_tensor("rows")]
        expected += [zlib.crc32(opened.get_tensor(name).tobytes()) for name in spec.addressing.tensors()]
        assert found.dtype == np.uint32 and found.tolist() == expected
        assert json.loads(opened.metadata()["checksums"]) == {"algorithm": "crc32", "block_rows": 1}
    assert inspect.verify(path) == chosen[1] and inspect.describe(path)["checksums"] is True


@pytest.mark.parametrize("codec", list(CODECS))
def test_safetensors_and_the_oracle_read_what_was_written(tmp_path: Path, codec: str) -> None:
    spec = spec_of(DIMS, codec, 50)
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    oracle = OracleFile(path)
    assert oracle.data_start % 4096 == 0
    with safe_open(path, "np") as opened, RomReader(path) as reader:
        assert list(opened.keys()) == ["rows"]
        assert opened.metadata()["format"] == "meki-edge-rom"
        np.testing.assert_array_equal(opened.get_tensor("rows"), reader.raw(np.arange(50)))
        assert reader.spec == spec
        expected = np.array([oracle.row(token) for token in range(50)], np.float32)
        np.testing.assert_array_equal(reader.rows(np.arange(50)), expected)
    assert os.listdir(tmp_path) == ["rom.safetensors"]
    assert inspect.verify(path) == 50


@given(
    dims=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    codec=st.sampled_from(list(CODECS)),
    num_rows=st.integers(1, 40),
    step=st.integers(1, 41),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, dims: list[int], codec: str, num_rows: int, step: int, seed: int
) -> None:
    spec = spec_of([(layer, 0, dim) for layer, dim in enumerate(dims)], codec, num_rows)
    values = random_rows(spec, seed)
    path = write(tmp_path_factory.mktemp("rom") / "rom.safetensors", spec, values, step)
    oracle = OracleFile(path)
    ids = np.random.default_rng(seed).integers(0, num_rows, 20)
    with RomReader(path) as reader:
        np.testing.assert_array_equal(reader.rows(ids), np.array([oracle.row(token) for token in ids], np.float32))
        assert np.abs(reader.rows(np.arange(num_rows)) - values).max() < 0.6  # int4's half scale of values within ±4.2
    inspect.verify(path)


def test_one_read_for_a_row_that_tokens_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(DIMS, "int8", 30)
    values = random_rows(spec)
    path = write(tmp_path / "rom.safetensors", spec, values)
    reads = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: reads.append(offset) or preadv(fd, buffers, offset))
    with RomReader(path) as reader:
        rows = reader.rows(np.array([9, 2, 9, 9, 2]))
    assert reads == [4096 + 2 * spec.row_stride, 4096 + 9 * spec.row_stride]
    np.testing.assert_array_equal(rows[[0, 2, 3]], rows[[0, 0, 0]])
    assert not np.array_equal(rows[0], rows[1])


def test_no_rows(tmp_path: Path) -> None:
    spec = spec_of(DIMS, "int8", 3)
    with RomReader(write(tmp_path / "rom.safetensors", spec, random_rows(spec))) as reader:
        assert reader.rows(np.array([], np.int64)).shape == (0, spec.row_dim)


@pytest.mark.parametrize("bad", [-1, 30, 2**40])
def test_an_id_out_of_range_has_a_name(tmp_path: Path, bad: int) -> None:
    spec = spec_of(DIMS, "int8", 30)
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    with RomReader(path) as reader:
        for read in (reader.rows, reader.raw):
            with pytest.raises(UserError, match=f"row {bad} is not in the file, which has 30"):
                read(np.array([0, bad, 1]))


def test_a_sparse_file_of_ten_gigabytes(tmp_path: Path) -> None:
    """64-bit offsets: rows on both sides of 2 GiB, 4 GiB and 6 GB, and the checksums beyond them all."""
    spec = spec_of([(0, 0, 2048)], "fp16", 2_500_000, checksums=True)
    values = {0: 1.0, 2_499_999: 2.0}
    for number, place in enumerate((2**31, 2**32, 6 * 10**9)):
        row = (place - 4096) // spec.row_stride
        values |= {row - 1: 3.0 + number, row: 6.0 + number}
    path = tmp_path / "large.safetensors"
    with open(path, "wb") as file:
        file.write(header_bytes(spec))
        file.truncate(4096 + spec.num_rows * (spec.row_stride + 4))
        for row, value in values.items():
            raw = np.full(2048, value, "<f2").tobytes()
            file.seek(4096 + row * spec.row_stride)
            file.write(raw)
            file.seek(4096 + spec.num_rows * spec.row_stride + 4 * row)
            file.write(struct.pack("<I", zlib.crc32(raw)))
    assert path.stat().st_size > 10e9 and path.stat().st_blocks * 512 < 1e6
    with RomReader(path, verify_rows=True) as reader:
        rows = reader.rows(np.array(list(values)))
        np.testing.assert_array_equal(rows, np.repeat([list(values.values())], 2048, 0).T)
        np.testing.assert_array_equal(reader.raw_range(2_499_999, 2_500_000).view("<f2"), 2.0)
        with pytest.raises(UserError, match="row 2000000: the checksum does not match"):
            reader.rows(np.array([2_000_000]))  # a hole: zeros without the checksum of zeros


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    spec = spec_of(DIMS, "fp16", 30)
    values = random_rows(spec)
    values[20, 3] = np.nan
    with pytest.raises(UserError, match="row 20, layer 0 memory 0: a value is NaN"):
        write(tmp_path / "rom.safetensors", spec, values)
    assert os.listdir(tmp_path) == []


def test_the_writer_counts_rows(tmp_path: Path) -> None:
    spec = spec_of(DIMS, "fp16", 30)
    with pytest.raises(AssertionError, match="29 of 30 rows"):
        write(tmp_path / "rom.safetensors", spec, random_rows(spec)[:29])
    with pytest.raises(AssertionError, match="more rows"):
        write(tmp_path / "rom.safetensors", spec, np.zeros((31, spec.row_dim), np.float32))
    assert os.listdir(tmp_path) == []


def test_a_writer_keeps_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    spec = spec_of(DIMS, "fp16", 30)
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), RomWriter(path, spec) as writer:
        writer.write(random_rows(spec, 1)[:4])
        raise KeyboardInterrupt
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["rom.safetensors"]


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("cut", [0, 3, 100])
def test_resume(tmp_path: Path, cut: int, checksums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows are kept, a half one is written again, another header starts anew; the bytes are the same."""
    monkeypatch.setattr(writer_module, "BLOCK_BYTES", 1000)
    spec = spec_of(DIMS, "int8", 30, checksums=checksums)
    values = random_rows(spec)
    whole = write(tmp_path / "whole.safetensors", spec, values).read_bytes()
    path = tmp_path / "rom.safetensors"
    with pytest.raises(KeyboardInterrupt), RomWriter(path, spec, resume=True) as writer:
        writer.write(values[:20])
        raise KeyboardInterrupt
    partial = tmp_path / ".rom.safetensors.partial"
    os.truncate(partial, partial.stat().st_size - cut)
    with RomWriter(path, spec, resume=True) as writer:
        assert writer.rows_written == 20 - -(-cut // spec.row_stride)
        writer.write(values[writer.rows_written :])
    assert path.read_bytes() == whole
    assert not partial.exists()


def test_resume_ignores_another_models_rows(tmp_path: Path) -> None:
    path = tmp_path / "rom.safetensors"
    with pytest.raises(KeyboardInterrupt), RomWriter(path, spec_of(DIMS, "fp16", 30), resume=True) as writer:
        writer.write(random_rows(writer.spec)[:20])
        raise KeyboardInterrupt
    with RomWriter(path, spec_of(DIMS, "int8", 30), resume=True) as writer:
        assert writer.rows_written == 0
        writer.write(random_rows(writer.spec))
    inspect.verify(path)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A real write that fails: the process may not write files of more than 10,000 bytes."""
    script = f"""
import resource, sys
import numpy as np
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_rom_file import DIMS, random_rows, spec_of, write
from meki_edge.errors import UserError
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
spec = spec_of(DIMS, "fp32", 30)
try:
    write(Path({str(tmp_path)!r}) / "rom.safetensors", spec, random_rows(spec))
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cannot write the file: File too large ["), done.stderr
    assert os.listdir(tmp_path) == []


def test_not_enough_space_is_found_before_the_first_row(tmp_path: Path) -> None:
    spec = spec_of([(0, 0, 2048)], "fp32", 2**40)
    with pytest.raises(UserError, match="rom needs .* MB but only"), RomWriter(tmp_path / "rom", spec):
        pass
    assert os.listdir(tmp_path) == []


def test_describe(tmp_path: Path) -> None:
    spec = spec_of([(layer, 0, 128) for layer in range(28)], "int8", 10)
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    assert inspect.describe(path) == {
        "version": 1,
        "addressing": "identity",
        "rows_per_token": 1,
        "num_tokens": 10,
        "file_bytes": 4096 * 11,
        "num_rows": 10,
        "row_dim": 28 * 128,
        "row_bytes": 28 * 130,
        "row_stride": 4096,
        "layers": list(range(28)),
        "segments": [{"count": 28, "dim": 128, "codec": "int8", "bytes": 130}],
        "checksums": False,
        "tokenizer_sha256": "t" * 64,
        "source_sha256": "s" * 64,
    }


def test_describe_a_quantization(tmp_path: Path) -> None:
    spec = spec_of(DIMS, "static16", 10)
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    assert inspect.describe(path)["quantization"] == {"scale": float(np.float32(0.04)), "zero_point": 120}


@pytest.mark.parametrize(("row_bytes", "stride"), [(1, 1), (3, 4), (64, 64), (65, 128), (2049, 4096), (4096, 4096)])
def test_a_small_row_never_straddles_a_page(row_bytes: int, stride: int) -> None:
    assert row_stride(row_bytes, IDENTITY) == stride


@pytest.mark.parametrize(("row_bytes", "stride"), [(4097, 8192), (7280, 8192), (14336, 16384), (16384, 16384)])
def test_a_large_row_takes_whole_pages(row_bytes: int, stride: int) -> None:
    assert row_stride(row_bytes, IDENTITY) == stride


RAGGED = Ragged(np.array([0, 2, 3, 7, 8], np.int64))
HASHED = NgramHash(
    token_map=np.array([0, 1, 1, 2, 3], np.int32), multipliers=(3, 7, 11), primes=((2, 3), (5, 7)), pad_id=2
)


def test_a_ragged_file_holds_its_offsets_and_fetches_each_tokens_rows(tmp_path: Path) -> None:
    spec = spec_of([(1, 0, 5), (3, 0, 5)], "fp16", 8, RAGGED)
    assert spec.row_stride == 20 and spec.num_tokens == 4  # rows of one token lie without gaps
    values = random_rows(spec).astype(np.float16).astype(np.float32)
    path = write(tmp_path / "rom.safetensors", spec, values)
    with safe_open(path, "np") as opened:
        np.testing.assert_array_equal(opened.get_tensor("offsets"), [0, 2, 3, 7, 8])
    with RomReader(path) as reader:
        fetched, counts = reader.fetch(np.array([2, 0, 3, 2]))
        assert fetched.shape == (4, 4, 10) and counts.tolist() == [4, 2, 1, 4]
        for found, count, (first, last) in zip(fetched, counts, [(3, 7), (0, 2), (7, 8), (3, 7)], strict=True):
            np.testing.assert_array_equal(found[:count], values[first:last])
            assert not found[count:].any()
        with pytest.raises(UserError, match="token id 4 is not in the file, which has 4"):
            reader.fetch(np.array([4]))
    assert inspect.verify(path) == 8


def test_a_hashed_file_holds_its_constants_and_fetches_by_history(tmp_path: Path) -> None:
    spec = spec_of([(0, 0, 3)], "int8", 17, HASHED)
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    with RomReader(path) as reader:
        read = reader.spec.addressing
        assert isinstance(read, NgramHash) and read.parameters() == HASHED.parameters()
        ids = np.array([4, 0, 3, 1, 2])
        whole, counts = reader.fetch(ids)
        assert whole.shape == (5, 4, 3) and set(counts.tolist()) == {4}
        last, _ = reader.fetch(ids[4:], ids[:4])
        np.testing.assert_array_equal(last[0], whole[4])
        expected, _ = HASHED.row_ids(ids, np.empty(0, np.int64))
        np.testing.assert_array_equal(whole[3], reader.rows(expected[3]))


def test_a_resumed_writer_keeps_a_ragged_file_whole(tmp_path: Path) -> None:
    spec = spec_of([(1, 0, 5)], "fp32", 8, RAGGED)
    values = random_rows(spec)
    with pytest.raises(ZeroDivisionError), RomWriter(tmp_path / "rom.safetensors", spec, resume=True) as writer:
        writer.write(values[:3])
        raise ZeroDivisionError
    with RomWriter(tmp_path / "rom.safetensors", spec, resume=True) as writer:
        writer.write(values[writer.rows_written :])
    with RomReader(tmp_path / "rom.safetensors") as reader:
        np.testing.assert_array_equal(reader.rows(np.arange(8)), values)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"addressing_parameters": '{"rows_per_token": 3}'}, "rows_per_token is 3, the offsets say 4"),
        ({"addressing_parameters": "{}"}, "'addressing_parameters' is not valid"),
        ({"addressing_parameters": "{"}, "'addressing_parameters' is not valid JSON"),
        ({"addressing": "ngram_hash"}, "the tensor 'token_map' is missing"),
        ({"addressing": "identity"}, "the file holds tensors that nothing in its header uses: offsets"),
    ],
)
def test_hostile_addresses(tmp_path: Path, change: dict[str, str], what: str) -> None:
    spec = spec_of([(1, 0, 5)], "fp32", 8, RAGGED)
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    contents = path.read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header = json.loads(contents[8 : 8 + length])
    header["__metadata__"].update(change)
    path.write_bytes(contents[:8] + json.dumps(header).encode().ljust(length) + contents[8 + length :])
    with pytest.raises(UserError) as caught:
        RomReader(path)
    assert caught.value.what.startswith(what)


@pytest.mark.parametrize("offsets", [[0, 2, 2, 7, 8], [1, 2, 3, 7, 8], [0, 2, 3, 7, 9], [0, 5, 3, 7, 8]])
def test_hostile_offsets(tmp_path: Path, offsets: list[int]) -> None:
    spec = spec_of([(1, 0, 5)], "fp32", 8, RAGGED)
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    with open(path, "r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(np.array(offsets, "<i8").tobytes())
    with pytest.raises(UserError, match="'offsets' does not divide the 8 rows"):
        RomReader(path)
