"""A ROM file in another codec: the values of the source, rounded once more, wherever the source's rows lie."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from test_rom_file import DIMS, HASHED, RAGGED, random_rows, spec_of, write

from meki_edge.errors import UserError
from meki_edge.graph_spec import Quantization
from meki_edge.rom import inspect, transcode as module
from meki_edge.rom.addressing import Addressing, Identity
from meki_edge.rom.codec import encode
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import CODECS
from meki_edge.rom.transcode import transcode

QUANTIZATION = Quantization(scale=0.031, zero_point=90)


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("addressing", [Identity(), RAGGED, HASHED], ids=lambda addressing: addressing.kind)
def test_rows_are_the_sources_rounded_once_more(
    tmp_path: Path, codec: str, addressing: Addressing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 3000)  # a few rows at a time
    num_rows = {"identity": 50, "ragged": 8, "ngram_hash": 17}[addressing.kind]
    spec = spec_of(DIMS, "fp16", num_rows, addressing)
    source = write(tmp_path / "source.safetensors", spec, random_rows(spec))
    quantization = QUANTIZATION if CODECS[codec].is_static else None
    steps: list[int] = []
    written = transcode(source, tmp_path / "out.safetensors", codec, quantization, advance=steps.append)
    assert sum(steps) == num_rows and (len(steps) > 1 or num_rows < 9)
    assert sorted(os.listdir(tmp_path)) == ["out.safetensors", "source.safetensors"]
    with RomReader(source) as before, RomReader(tmp_path / "out.safetensors") as after:
        every = np.arange(num_rows)
        values, column = before.rows(every), 0
        for segment, found in zip(after.spec.segments, before.spec.segments, strict=True):
            assert (segment.layer, segment.memory, segment.dim) == (found.layer, found.memory, found.dim)
            part = np.ascontiguousarray(values[:, column : column + segment.dim])
            size = CODECS[codec].num_bytes(segment.dim)
            np.testing.assert_array_equal(
                after.raw(every)[:, segment.offset : segment.offset + size],
                encode(part, CODECS[codec], after.spec.quantization),
            )
            column += segment.dim
        assert (after.spec.tokenizer_sha256, after.spec.source_sha256) == ("t" * 64, "s" * 64)
        assert after.spec.addressing.parameters() == addressing.parameters()
        assert after.spec.to_metadata() == written.to_metadata()
    inspect.verify(tmp_path / "out.safetensors")


def test_static_rows_are_an_array(tmp_path: Path) -> None:
    """What a graph input of uint16 takes: the row's first bytes, and nothing else."""
    spec = spec_of(DIMS, "fp32", 20)
    source = write(tmp_path / "source.safetensors", spec, random_rows(spec))
    transcode(source, tmp_path / "out.safetensors", "static16", Quantization(scale=1e-3, zero_point=32768))
    with RomReader(source) as before, RomReader(tmp_path / "out.safetensors") as after:
        codes, counts = after.fetch_raw(np.array([7, 3, 7]))
        assert codes.dtype == np.uint16 and codes.shape == (3, 1, spec.row_dim) and counts.tolist() == [1, 1, 1]
        assert after.raw(np.array([7]))[0, : 2 * spec.row_dim].tobytes() == codes[0, 0].astype("<u2").tobytes()
        expected = np.rint(before.rows(np.array([7, 3])) / np.float32(1e-3)) + 32768
        np.testing.assert_array_equal(codes[:2, 0], expected)
        np.testing.assert_allclose(after.rows(np.array([3])), before.rows(np.array([3])), atol=0.00051)


@pytest.mark.parametrize(("before", "asked", "after"), [(True, None, True), (False, True, True), (True, False, False)])
def test_checksums(tmp_path: Path, before: bool, asked: bool | None, after: bool) -> None:
    spec = spec_of(DIMS, "fp16", 20, checksums=before)
    source = write(tmp_path / "source.safetensors", spec, random_rows(spec))
    assert transcode(source, tmp_path / "out.safetensors", "bf16", checksums=asked).checksums is after
    inspect.verify(tmp_path / "out.safetensors")


def test_what_cannot_work_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    spec = spec_of(DIMS, "fp32", 20)
    values = random_rows(spec)
    values[17, 3] = 1e6
    source = write(tmp_path / "source.safetensors", spec, values)
    out = tmp_path / "out.safetensors"
    for codec, quantization, what in (
        ("int5", None, "unknown codec 'int5'"),
        ("static8", None, "static8 needs quantization"),
        ("fp16", QUANTIZATION, "fp16 has no quantization"),
        ("static8", Quantization(scale=0.0, zero_point=0), "the quantization's scale is 0.0"),
        ("static8", Quantization(scale=float("nan"), zero_point=0), "the quantization's scale is nan"),
        ("static8", Quantization(scale=0.1, zero_point=256), "zero_point is 256, not in 0 to 255"),
        ("fp16", None, "row 17, layer 0 memory 0: a value is too large"),
    ):
        with pytest.raises(UserError, match=what):
            transcode(source, out, codec, quantization)
    with pytest.raises(UserError, match="the output is the input"):
        transcode(source, source, "fp16")
    with pytest.raises(UserError, match="cannot open the file"):
        transcode(tmp_path / "absent", out, "fp16")
    assert os.listdir(tmp_path) == ["source.safetensors"] and source.stat().st_size > 4096


def test_rot_in_the_source_is_found(tmp_path: Path) -> None:
    spec = spec_of(DIMS, "fp32", 20, checksums=True)
    source = write(tmp_path / "source.safetensors", spec, random_rows(spec))
    with open(source, "r+b") as file:
        file.seek(4096 + 11 * spec.row_stride + 5)
        file.write(b"\x01")
    with pytest.raises(UserError, match="row 11: the checksum does not match"):
        transcode(source, tmp_path / "out.safetensors", "int8")
    assert os.listdir(tmp_path) == ["source.safetensors"]
