"""Small ROM files and what a reader must get out of them, for every reader in every language.

    python tests/golden/make.py [DIRECTORY]    # writes *.safetensors and *.json, the same bytes every time

Written from docs/rom-format.md alone, with nothing from the package. Each JSON file says:

- ``rom``: the ROM file's name.
- ``cases``: token ids, the ids ``before`` them (oldest first), and the row ids of each token, in order.
- ``rows``: for each row its decoded elements, as the bits of a float32 in hexadecimal ("3f800000" is 1).
- ``codes``: where the codec is static, for each row its integers as they are stored.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

PAGE = 4096
Segments = list[tuple[int, int, int]]
"""(layer, memory, dim) each."""

OFFSETS = [0, 2, 3, 7, 8, 13, 14, 17, 18]
TOKEN_MAP = [0, 1, 1, 2, 0, 3, 4, 5, 5, 6, 7, 2]
MULTIPLIERS = [1317624576693539401, 987654321987654321, 3, 1234567890123456789]  # 7 times the first is 2^63 - 1
PRIMES = [[5, 7], [11, 13], [17, 19]]
PAD_ID = 4
QUANTIZATIONS = {"static8": (0.0625, 130), "static16": (struct.unpack("<f", struct.pack("<f", 0.00123))[0], 32000)}
"""Scale (a float32) and zero point."""


def make(directory: Path) -> None:
    """Write every file."""
    segments = [(0, 0, 5), (1, 0, 33), (1, 1, 1), (3, 0, 4)]
    tokens = [([], [5, 0, 3, 3, 1]), ([2, 4], [4, 2])]
    for codec in ("fp32", "fp16", "bf16", "int8", "int4", "static8"):
        write(directory, f"identity_{codec}", codec, segments, 6, tokens)
    write(directory, "identity_int4_64", "int4_64", [(0, 0, 5), (1, 0, 65), (1, 1, 64), (3, 0, 1)], 6, tokens)
    write(directory, "identity_int8_checksums", "int8", segments, 6, tokens, checksums=True)
    write(
        directory,
        "ragged_int8",
        "int8",
        [(1, 0, 5), (3, 0, 4)],
        OFFSETS[-1],
        [([], [4, 0, 7, 2, 4, 1]), ([3], [5]), ([4, 4], [6, 3])],
        addressing="ragged",
        parameters={"rows_per_token": 5},
        tensor=("offsets", "I64", OFFSETS),
    )
    write(
        directory,
        "ragged_static16_checksums",
        "static16",
        [(1, 0, 5), (3, 0, 4)],
        OFFSETS[-1],
        [([], [4, 0, 7, 2, 4, 1]), ([3], [5])],
        addressing="ragged",
        parameters={"rows_per_token": 5},
        tensor=("offsets", "I64", OFFSETS),
        checksums=True,
    )
    write(
        directory,
        "ngram_hash_fp16",
        "fp16",
        [(2, 0, 3)],
        sum(map(sum, PRIMES)),
        [([], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11]), ([3], [5]), ([9, 10], [10, 0]), ([1, 2, 3, 4, 5, 6], [7, 11])],
        addressing="ngram_hash",
        parameters={"multipliers": MULTIPLIERS, "primes": PRIMES, "pad_id": PAD_ID},
        tensor=("token_map", "I32", TOKEN_MAP),
    )


def write(
    directory: Path,
    name: str,
    codec: str,
    segments: Segments,
    num_rows: int,
    texts: list[tuple[list[int], list[int]]],
    *,
    addressing: str = "identity",
    parameters: dict[str, Any] | None = None,
    tensor: tuple[str, str, list[int]] | None = None,
    checksums: bool = False,
) -> None:
    """Write one ROM file and its JSON; ``texts`` are (ids before, token ids)."""
    listed, end = [], 0
    for layer, memory, dim in segments:
        listed.append({"layer": layer, "memory": memory, "offset": end, "dim": dim, "codec": codec})
        end += len(encoded(codec, dim, 0)[0])
    stride = end if addressing == "ragged" else 1 << (end - 1).bit_length()  # all are shorter than a page
    data, rows, raw_rows = b"", [], []
    for row in range(num_rows):
        parts = [encoded(codec, dim, 7 * row + index) for index, (_, _, dim) in enumerate(segments)]
        raw_rows.append(b"".join(part for part, _ in parts))
        data += raw_rows[-1].ljust(stride, b"\0")
        rows.append(" ".join(struct.pack(">f", value).hex() for _, values in parts for value in values))
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "meki-edge-rom",
            "version": "1",
            "addressing": addressing,
            **({"addressing_parameters": compact(parameters)} if parameters else {}),
            "segments": compact(listed),
            **({"quantization": compact(quantization(codec))} if codec in QUANTIZATIONS else {}),
            **({"checksums": compact({"algorithm": "crc32", "block_rows": 1})} if checksums else {}),
            "tokenizer_sha256": hashlib.sha256(b"a tokenizer").hexdigest(),
            "source_sha256": hashlib.sha256(b"a checkpoint").hexdigest(),
        },
        "rows": {"dtype": "U8", "shape": [num_rows, stride], "data_offsets": [0, len(data)]},
    }
    if tensor is not None:
        field, dtype, numbers = tensor
        packed = struct.pack(f"<{len(numbers)}{'q' if dtype == 'I64' else 'i'}", *numbers)
        offsets = [len(data), len(data) + len(packed)]
        header[field] = {"dtype": dtype, "shape": [len(numbers)], "data_offsets": offsets}
        data += packed
    if checksums:
        covered = [*raw_rows, *([packed] if tensor is not None else [])]
        offsets = [len(data), len(data) + 4 * len(covered)]
        header["checksums"] = {"dtype": "U32", "shape": [len(covered)], "data_offsets": offsets}
        data += struct.pack(f"<{len(covered)}I", *map(zlib.crc32, covered))
    text = compact(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    (directory / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    address = {"identity": identity_rows, "ragged": ragged_rows, "ngram_hash": golden_hash_rows}[addressing]
    cases = [{"before": before, "token_ids": ids, "row_ids": address(ids, before)} for before, ids in texts]
    contents: dict[str, Any] = {"rom": f"{name}.safetensors", "cases": cases, "rows": rows}
    if codec in QUANTIZATIONS:
        letter = "B" if codec == "static8" else "H"
        count = len(raw_rows[0]) // struct.calcsize(letter)
        contents["codes"] = [list(struct.unpack(f"<{count}{letter}", raw)) for raw in raw_rows]
    lines = ",\n".join(f' "{key}": {laid_out(value)}' for key, value in contents.items())
    (directory / f"{name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def encoded(codec: str, dim: int, seed: int) -> tuple[bytes, list[float]]:
    """A segment's bytes and the values that they mean: odd ones, from the smallest to the largest."""
    if codec == "fp32":
        words = [word if word >> 23 & 255 < 255 else word & ~(1 << 30) for word in mixed(dim, seed, 32)]
        words[0] = (0x80000000, 0x00000001, 0x7F7FFFFF, 0x3EAAAAAB)[seed % 4]  # −0, the smallest, the largest, ⅓
        return struct.pack(f"<{dim}I", *words), list(struct.unpack(f"<{dim}f", struct.pack(f"<{dim}I", *words)))
    if codec == "fp16":
        words = [word if word >> 10 & 31 < 31 else word & ~(1 << 14) for word in mixed(dim, seed, 16)]
        words[0] = (0x8000, 0x0001, 0x7BFF, 0x83FF)[seed % 4]
        return struct.pack(f"<{dim}H", *words), list(struct.unpack(f"<{dim}e", struct.pack(f"<{dim}H", *words)))
    if codec == "bf16":
        words = [word if word >> 7 & 255 < 255 else word & ~(1 << 14) for word in mixed(dim, seed, 16)]
        words[0] = (0x8000, 0x0001, 0x7F7F, 0x807F)[seed % 4]
        wide = struct.pack(f"<{dim}I", *(word << 16 for word in words))
        return struct.pack(f"<{dim}H", *words), list(struct.unpack(f"<{dim}f", wide))
    if codec in QUANTIZATIONS:
        bits, letter = (8, "B") if codec == "static8" else (16, "H")
        scale, zero_point = QUANTIZATIONS[codec]
        words = mixed(dim, seed, bits)
        words[0] = (0, 2**bits - 1, zero_point, zero_point + 1)[seed % 4]
        return struct.pack(f"<{dim}{letter}", *words), [(word - zero_point) * scale for word in words]
    group, largest = {"int8": (dim, 127), "int4": (32, 7), "int4_64": (64, 7)}[codec]
    scales, codes = [], []
    for number, start in enumerate(range(0, dim, group)):
        count = min(group, dim - start)
        # The smallest and the largest, two ordinary ones, and zero.
        (scale,) = struct.unpack("<e", struct.pack("<H", (0x0001, 0x7BFF, 0x2E66, 0x1234, 0x0000)[(seed + number) % 5]))
        some = [word % (2 * largest + 1) - largest for word in mixed(count, seed + number, 16)]
        some[count // 2] = largest if seed % 2 else -largest  # the scale is the smallest that fits
        scales.append(scale)
        codes += some if scale else [0] * count
    values = [code * scales[index // group] for index, code in enumerate(codes)]
    if codec == "int8":
        packed = struct.pack(f"<{dim}b", *codes)
    else:
        nibbles = [code & 15 for code in codes] + [0] * (dim % 2)
        packed = bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    return struct.pack(f"<{len(scales)}e", *scales) + packed, values


def quantization(codec: str) -> dict[str, float | int]:
    """The header's, of a static codec."""
    scale, zero_point = QUANTIZATIONS[codec]
    return {"scale": scale, "zero_point": zero_point}


def mixed(count: int, seed: int, bits: int) -> list[int]:
    """Numbers that look random (multiplicative hashing)."""
    return [(index + 1000 * seed + 1) * 2654435761 % 2**32 >> (32 - bits) for index in range(count)]


def identity_rows(ids: list[int], before: list[int]) -> list[list[int]]:
    """Row t for token t."""
    return [[token] for token in ids]


def ragged_rows(ids: list[int], before: list[int], offsets: list[int] = OFFSETS) -> list[list[int]]:
    """A token's own rows."""
    return [list(range(offsets[token], offsets[token + 1])) for token in ids]


def hash_rows(
    ids: list[int],
    before: list[int],
    token_map: list[int],
    multipliers: list[int],
    primes: list[list[int]],
    pad_id: int,
) -> list[list[int]]:
    """Hashed n-grams, position by position, in integers without a limit."""
    compressed = [pad_id] * len(multipliers) + [token_map[token] for token in before + ids]
    rows = []
    for end in range(len(compressed) - len(ids), len(compressed)):
        row, offset = [], 0
        for order, heads in enumerate(primes, start=2):
            mix = 0
            for lag in range(order):
                mix ^= compressed[end - lag] * multipliers[lag]
            for prime in heads:
                row.append(mix % prime + offset)
                offset += prime
        rows.append(row)
    return rows


def golden_hash_rows(ids: list[int], before: list[int]) -> list[list[int]]:
    """:func:`hash_rows` with the constants of the golden file."""
    return hash_rows(ids, before, TOKEN_MAP, MULTIPLIERS, PRIMES, PAD_ID)


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def laid_out(value: Any) -> str:
    """JSON with one element of a list a line."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(element)}" for element in value) + "\n ]"


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
