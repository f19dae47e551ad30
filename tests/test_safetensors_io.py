"""Our reader and writer against the `safetensors` library."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from meki_edge.errors import UserError
from meki_edge.safetensors_io import SafetensorsFile, SafetensorsWriter

TENSORS = {
    "matrix": torch.arange(24, dtype=torch.float32).reshape(6, 4) / 7,
    "half": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).half(),
    "brain": torch.randn(4, 2, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "scalar": torch.tensor(2.5),
    "bytes": torch.arange(8, dtype=torch.uint8),
}


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", metadata={"k": "v"})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert file.metadata == {"k": "v"}
        for name, tensor in TENSORS.items():
            expected = tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
            np.testing.assert_array_equal(file.read(name), expected)
        np.testing.assert_array_equal(file.read("matrix", slice(1, 4)), TENSORS["matrix"][1:4].numpy())
        np.testing.assert_array_equal(file.read("matrix", slice(4, 99)), TENSORS["matrix"][4:].numpy())
        ids = np.array([3, 0, 3, 1])
        np.testing.assert_array_equal(file.read_rows("brain", ids), TENSORS["brain"].float().numpy()[ids])


def test_the_library_reads_what_we_wrote(tmp_path: Path) -> None:
    values = np.arange(12, dtype="<f4").reshape(4, 3)
    path = tmp_path / "b.safetensors"
    with open(path, "wb") as file:
        writer = SafetensorsWriter(file, {"a": ("F32", (4, 3)), "b": ("U8", (2,))}, {"x": "y"}, alignment=4096)
        writer.write(values[:2])
        writer.write(values[2:])
        writer.write(b"\x07\x09")
        writer.finish()
    (header_bytes,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert (8 + header_bytes) % 4096 == 0
    with safe_open(path, "np") as opened:
        assert opened.metadata() == {"x": "y"}
        np.testing.assert_array_equal(opened.get_tensor("a"), values)
        np.testing.assert_array_equal(opened.get_tensor("b"), [7, 9])


def file_with(header: object, data: bytes = b"\0" * 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("contents", "what"),
    [
        (b"abc", "too short"),
        (struct.pack("<Q", 2**62) + b"{}", "the header claims"),
        (file_with(b"{oops"), "not valid"),
        (file_with(b"[1]"), "not valid"),
        (file_with({"a": {"dtype": "F32", "shape": [4]}}), "not valid"),
        (file_with(b" {}"), "does not begin with"),
        (file_with(b"\xef\xbb\xbf{}"), "does not begin with"),
        (file_with(b"{}\0"), "not valid"),
        (file_with({"a\ud800": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}), "surrogates not allowed"),
        (file_with(b'{"__metadata__": {"x": "\xed\xa0\x80"}}'), "not valid"),
        (file_with(b'{"a": {"dtype": "U8", "shape": [%s], "data_offsets": [0, 1]}}' % (b"9" * 4301)), "not valid"),
        (file_with(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [%s, 1]}}' % (b"9" * 4300)), "63 bits"),
        (file_with({"a": {"dtype": "U8", "shape": [2**62] * 500_000, "data_offsets": [0, 16]}}), "does not fit"),
        (file_with({"a": {"dtype": "F31", "shape": [4], "data_offsets": [0, 16]}}), "unsupported dtype"),
        (file_with({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}), "does not fit its byte range"),
        (file_with({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}}), "does not fit its byte range"),
        (file_with({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}), "does not fit its byte range"),
        (file_with({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}), "ends at byte"),
    ],
)
def test_broken_headers_have_names(tmp_path: Path, contents: bytes, what: str) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(contents)
    with pytest.raises(UserError, match=what):
        SafetensorsFile(path)


def test_a_tensor_beyond_the_memory_has_a_name(tmp_path: Path) -> None:
    """Sparse: 8 TB of zeros."""
    path = tmp_path / "large.safetensors"
    path.write_bytes(file_with({"a": {"dtype": "I64", "shape": [2**40], "data_offsets": [0, 2**43]}}, b""))
    os.truncate(path, path.stat().st_size + 2**43)
    with SafetensorsFile(path) as file, pytest.raises(UserError, match="of the tensor 'a' do not fit the memory"):
        file.read("a")


def test_a_file_that_shrinks_while_read_is_an_error(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        with open(tmp_path / "a.safetensors", "r+b") as other:
            other.truncate(file.entry("matrix").start + 10)
        with pytest.raises(UserError, match="ends inside tensor 'matrix'"):
            file.read("matrix")


def test_the_writer_keeps_its_promise() -> None:
    writer = SafetensorsWriter(io.BytesIO(), {"a": ("U8", (4,))}, {})
    writer.write(b"abc")
    with pytest.raises(AssertionError, match="1 declared bytes"):
        writer.finish()
    with pytest.raises(AssertionError, match="more bytes"):
        writer.write(b"de")
