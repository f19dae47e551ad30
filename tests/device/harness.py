"""What tests give the C++ harness: ids, options, changed files, and ROM files written from the format's description."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meki_edge.device import runner

IO_MODES = ("pread", "direct", "mmap")


def encode(rng: np.random.Generator, dim: int, codec: str) -> tuple[bytes, np.ndarray]:
    """Random elements of one segment: their bytes, and the float32 values that they mean."""
    if codec in ("fp32", "fp16"):
        values = rng.standard_normal(dim).astype("<f4" if codec == "fp32" else "<f2")
        if codec == "fp16":
            values[rng.integers(dim)] = 3e-6  # a subnormal
        return values.tobytes(), values.astype(np.float32)
    group = dim if codec == "int8" else 32
    scales = rng.uniform(1e-7, 2.0, -(-dim // group)).astype("<f2")
    limit = 127 if codec == "int8" else 7
    quantized = rng.integers(-limit, limit + 1, dim).astype(np.int8)
    if codec == "int8":
        packed = quantized.tobytes()
    else:
        nibbles = np.append(quantized, np.zeros(dim % 2, np.int8)).view(np.uint8) & 15
        packed = (nibbles[0::2] | nibbles[1::2] << 4).tobytes()
    values = quantized.astype(np.float32) * np.repeat(scales.astype(np.float32), group)[:dim]
    return scales.tobytes() + packed, values


def write_rom(path: Path, layers: list[tuple[int, str]], num_rows: int, seed: int = 0) -> np.ndarray:
    """A ROM file of random rows; returns what they dequantize to: float32 ``[num_rows, row_dim]``."""
    rng = np.random.default_rng(seed)
    rows, values = [], []
    for _ in range(num_rows):
        parts = [encode(rng, dim, codec) for dim, codec in layers]
        rows.append(b"".join(data for data, _ in parts))
        values.append(np.concatenate([value for _, value in parts]))
    offsets = np.cumsum([0] + [len(data) for data, _ in parts])
    size = len(rows[0])
    stride = 1 << (size - 1).bit_length() if size <= 4096 else -(-size // 4096) * 4096
    segments = [
        {"layer": layer, "memory": 0, "offset": int(offsets[layer]), "dim": dim, "codec": codec}
        for layer, (dim, codec) in enumerate(layers)
    ]
    metadata = {
        "format": "meki-edge-rom",
        "version": "1",
        "addressing": "identity",
        "segments": json.dumps(segments),
        "tokenizer_sha256": "0" * 64,
        "source_sha256": "1" * 64,
    }
    tensor = {"dtype": "U8", "shape": [num_rows, stride], "data_offsets": [0, num_rows * stride]}
    header = json.dumps({"__metadata__": metadata, "rows": tensor}).encode()
    header += b" " * (-(8 + len(header)) % 4096)
    padded = b"".join(row.ljust(stride, b"\0") for row in rows)
    path.write_bytes(struct.pack("<Q", len(header)) + header + padded)
    return np.stack(values)


def ids_file(directory: Path, ids: list[int]) -> str:
    path = directory / "ids.txt"
    path.write_text(" ".join(map(str, ids)))
    return str(path)


def generate(bundle: Path, directory: Path, prompt: list[int], count: int, *options: str) -> dict[str, Any]:
    arguments = ["--bundle", str(bundle), "--prompt-file", ids_file(directory, prompt), "--threads", "1"]
    return runner.run_json(["generate", *arguments, "--max-new-tokens", str(count), *options])


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
