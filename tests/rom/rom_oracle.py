"""The ROM format decoded one element at a time, from docs/rom-format.md and from nothing in the package."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


GROUPS = {"int4": 32, "int4_64": 64}


def decode_segment(data: bytes, dim: int, codec: str, quantization: tuple[float, int] = (0.0, 0)) -> list[float]:
    """The ``dim`` elements at the start of ``data``; static codecs have a scale (a float32) and a zero point."""
    if codec == "bf16":
        return [struct.unpack("<f", b"\0\0" + data[2 * i : 2 * i + 2])[0] for i in range(dim)]
    if codec in ("static8", "static16"):
        scale, zero_point = quantization
        codes = struct.unpack_from(f"<{dim}{'B' if codec == 'static8' else 'H'}", data)
        return [(code - zero_point) * scale for code in codes]
    if codec in ("fp32", "fp16"):
        size, letter = (4, "f") if codec == "fp32" else (2, "e")
        return [struct.unpack_from(f"<{letter}", data, size * i)[0] for i in range(dim)]
    group = GROUPS.get(codec, dim)
    groups = -(-dim // group)
    scales = [struct.unpack_from("<e", data, 2 * i)[0] for i in range(groups)]
    elements = []
    for i in range(dim):
        if codec == "int8":
            (code,) = struct.unpack_from("<b", data, 2 * groups + i)
        else:
            nibble = data[2 * groups + i // 2] >> (4 * (i % 2)) & 15
            code = nibble - 16 if nibble > 7 else nibble
        elements.append(code * scales[i // group])
    return elements


class OracleFile:
    """A ROM file read whole."""

    def __init__(self, path: Path) -> None:
        contents = path.read_bytes()
        (length,) = struct.unpack_from("<Q", contents)
        self.header: dict[str, Any] = json.loads(contents[8 : 8 + length])
        self.data_start = 8 + length
        self.segments = json.loads(self.header["__metadata__"]["segments"])
        given = json.loads(self.header["__metadata__"].get("quantization", '{"scale": 0, "zero_point": 0}'))
        self.quantization = (given["scale"], given["zero_point"])
        self.num_rows, self.row_stride = self.header["rows"]["shape"]
        self._data = contents[self.data_start :]

    def row(self, token: int) -> list[float]:
        """The decoded row of ``token``."""
        raw = self._data[token * self.row_stride : (token + 1) * self.row_stride]
        return [
            element
            for segment in self.segments
            for element in decode_segment(raw[segment["offset"] :], segment["dim"], segment["codec"], self.quantization)
        ]
