"""What a ROM file is: segments, strides and metadata (``docs/rom-format.md``).

One ``U8`` tensor ``rows[num_rows, row_stride]``, token-major: all segments of one token lie
together with their scales, so one aligned read fetches everything that a token needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from meki_edge.config import from_dict, to_dict
from meki_edge.errors import UserError, nearest
from meki_edge.files import parse_json
from meki_edge.graph_spec import Quantization
from meki_edge.rom import addressing as rom_addressing
from meki_edge.rom.addressing import Addressing, Ragged

FORMAT = "meki-edge-rom"
VERSION = 1
PAGE_BYTES = 4096
MAX_STRIDE = 1 << 30
MAX_INTEGER = 2**63 - 1  # of a header
TENSOR = "rows"
CHECKSUMS = "checksums"
"""The metadata key, and the tensor U32 ``[num_rows + other tensors]`` after all others."""
CHECKSUM_KIND = {"algorithm": "crc32", "block_rows": 1}
"""CRC-32 as in zlib: Python's standard library has it, and 64-bit Arm has instructions for it."""


SCALES = (2.0**-126, 2.0**100)
"""Of a static quantization: every product is a normal float32 or zero, and finite."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How ``dim`` elements become bytes.

    ``element`` is ``float`` (IEEE), ``bfloat``, ``int`` (two's complement, scales in the row) or
    ``uint`` (one :class:`Quantization` in the header). ``scale_group`` is the number of elements
    that share one float16 scale (0: no scales; -1: the whole segment). Scales come first, then the
    elements; four bits are packed two to a byte, the even element in the low nibble.
    """

    name: str
    element: str
    element_bits: int
    scale_group: int = 0

    @property
    def is_static(self) -> bool:
        """The header's quantization says what the elements mean."""
        return self.element == "uint"

    def num_scales(self, dim: int) -> int:
        """How many scales a segment of ``dim`` elements carries."""
        if self.scale_group == 0:
            return 0
        return 1 if self.scale_group < 0 else -(-dim // self.scale_group)

    def num_bytes(self, dim: int) -> int:
        """Bytes of an encoded segment of ``dim`` elements, scales included."""
        return 2 * self.num_scales(dim) + -(-dim * self.element_bits // 8)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec(name="fp32", element="float", element_bits=32),
        Codec(name="fp16", element="float", element_bits=16),
        Codec(name="bf16", element="bfloat", element_bits=16),
        Codec(name="int8", element="int", element_bits=8, scale_group=-1),
        Codec(name="int4", element="int", element_bits=4, scale_group=32),
        Codec(name="int4_64", element="int", element_bits=4, scale_group=64),
        Codec(name="static8", element="uint", element_bits=8),
        Codec(name="static16", element="uint", element_bits=16),
    )
}
TABLE_PRECISIONS = tuple(name for name, codec in CODECS.items() if not codec.is_static)
"""Codecs that need nothing but a row: what ``reparam`` offers."""


def table_codec(name: str) -> Codec:
    """The codec called ``name``, for ``--table-precision``; any but those is a :class:`UserError`."""
    if codec(name).is_static:
        raise UserError(
            f"{name} needs a calibrated range",
            where="--table-precision",
            fix=f"use {', '.join(TABLE_PRECISIONS)}, or quantize the rows with the graphs by `meki-edge calibrate`",
        )
    return CODECS[name]


def codec(name: str, where: str | PathLike[str] = "--table-precision") -> Codec:
    """The codec called ``name``; an unknown name is a :class:`UserError`."""
    if name not in CODECS:
        raise UserError(f"unknown codec {name!r}{nearest(name, CODECS)}", where=where, fix=f"use {', '.join(CODECS)}")
    return CODECS[name]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The part of a row that belongs to one memory of one layer.

    ``layer`` is the decoder layer (0-based; -1 for the token embedding), ``memory`` its position
    in that layer's list of memories, ``offset`` the first byte within the row, ``dim`` the number
    of elements. Dequantized segments are concatenated in the order of the list.
    """

    layer: int
    memory: int
    offset: int
    dim: int
    codec: str


@dataclass(frozen=True, kw_only=True)
class RomSpec:
    """Everything the header says. ``row_dim`` elements a token come out of a ``row_stride``-byte row."""

    num_rows: int
    row_stride: int
    segments: tuple[Segment, ...]
    addressing: Addressing
    tokenizer_sha256: str
    source_sha256: str
    quantization: Quantization | None = None
    """What the integers of all segments mean, where their codec is static."""
    checksums: bool = False
    """Whether the file has a checksum of every row."""

    @property
    def num_tokens(self) -> int:
        """Token ids that have rows: 0 … ``num_tokens`` - 1."""
        return self.num_rows if self.addressing.num_tokens is None else self.addressing.num_tokens

    @property
    def row_dim(self) -> int:
        """Elements of a dequantized row, all segments together."""
        return sum(segment.dim for segment in self.segments)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that carry data (the rest of the stride is padding)."""
        return max((s.offset + CODECS[s.codec].num_bytes(s.dim) for s in self.segments), default=0)

    def to_metadata(self) -> dict[str, str]:
        """The safetensors ``__metadata__`` (string → string)."""
        objects = {
            "addressing_parameters": self.addressing.parameters(),
            "segments": [to_dict(segment) for segment in self.segments],
            "quantization": to_dict(self.quantization) if self.quantization else None,
            CHECKSUMS: CHECKSUM_KIND if self.checksums else None,
        }
        return {
            "format": FORMAT,
            "version": str(VERSION),
            "addressing": self.addressing.kind,
            **{key: json.dumps(value, separators=(",", ":")) for key, value in objects.items() if value},
            "tokenizer_sha256": self.tokenizer_sha256,
            "source_sha256": self.source_sha256,
        }


def row_stride(row_bytes: int, addressing: Addressing) -> int:
    """The stride that keeps what a token reads on the fewest pages.

    Up to a page: the next power of two, so that rows never straddle a page. Beyond: whole pages.
    A ragged address reads consecutive rows at once, so there they lie without gaps.
    """
    if isinstance(addressing, Ragged):
        return row_bytes
    if row_bytes <= PAGE_BYTES:
        return 1 << max(row_bytes - 1, 0).bit_length()
    return -(-row_bytes // PAGE_BYTES) * PAGE_BYTES


def build(
    dims: Sequence[tuple[int, int, int]],
    codec_name: str,
    *,
    num_rows: int,
    addressing: Addressing,
    tokenizer_sha256: str,
    source_sha256: str,
    quantization: Quantization | None = None,
    checksums: bool = False,
) -> RomSpec:
    """The spec of a file whose segments, (layer, memory, dim) in ``dims``, lie one after another.

    Args:
        quantization: of the elements, where the codec is static. Its scale becomes a float32.

    Raises:
        UserError: an unknown codec, or a quantization that the codec cannot have.
    """
    chosen = codec(codec_name)
    segments, offset = [], 0
    for layer, memory, dim in dims:
        segments.append(Segment(layer=layer, memory=memory, offset=offset, dim=dim, codec=codec_name))
        offset += chosen.num_bytes(dim)
    assert chosen.is_static == (quantization is not None), f"{codec_name} with quantization {quantization}"
    return RomSpec(
        num_rows=num_rows,
        row_stride=row_stride(offset, addressing),
        segments=tuple(segments),
        addressing=addressing,
        tokenizer_sha256=tokenizer_sha256,
        source_sha256=source_sha256,
        quantization=quantization and checked_quantization(quantization, chosen, "quantization"),
        checksums=checksums,
    )


def checked_quantization(found: Quantization, codec: Codec, where: str | PathLike[str]) -> Quantization:
    """``found`` with its scale as a float32.

    Raises:
        UserError: a scale outside :data:`SCALES`, or a zero point that the elements cannot be.
    """

    def broken(what: str) -> UserError:
        return UserError(what, where=where, fix="regenerate the file with `meki-edge calibrate`")

    largest = 2**codec.element_bits - 1
    if not SCALES[0] <= found.scale <= SCALES[1]:
        raise broken(f"the quantization's scale is {found.scale}, not a number from 2^-126 to 2^100")
    if not 0 <= found.zero_point <= largest:
        raise broken(f"the quantization's zero_point is {found.zero_point}, not in 0 to {largest}")
    return Quantization(scale=float(np.float32(found.scale)), zero_point=found.zero_point)


def from_metadata(
    metadata: Mapping[str, str],
    shape: tuple[int, ...],
    tensors: Mapping[str, np.ndarray],
    where: str | PathLike[str],
) -> RomSpec:
    """Parse and check a header: ``shape`` is that of the ``rows`` tensor, ``tensors`` are the others.

    Raises:
        UserError: not a ROM file, another version, unknown addressing or codec, or segments that
            overlap, are out of order, or do not fit the row.
    """

    def broken(what: str) -> UserError:
        return UserError(what, where=where, fix="regenerate the file with `meki-edge reparam`")

    if metadata.get("format") != FORMAT:
        raise broken(f"not a ROM file: format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.get("version") != str(VERSION):
        raise broken(f"ROM version {metadata.get('version')!r}, this reader knows {VERSION}")
    for key in ("addressing", "segments", "tokenizer_sha256", "source_sha256"):
        if key not in metadata:
            raise broken(f"the header lacks {key!r}")
    if len(shape) != 2 or min(shape) < 1 or shape[1] > MAX_STRIDE:
        wanted = f"[num_rows, row_stride]: it needs a row, and rows of 1 to {MAX_STRIDE} bytes"
        raise broken(f"the tensor 'rows' has shape {shape}, not {wanted}")
    segments = _segments(_json(metadata, "segments", broken), shape[1], where, broken)
    parameters = _json(metadata, "addressing_parameters", broken)
    if not isinstance(parameters, dict):
        raise broken(f"'addressing_parameters' is not a JSON object: {metadata['addressing_parameters']:.80}")
    if CHECKSUMS in metadata and _canonical(_json(metadata, CHECKSUMS, broken)) != _canonical(CHECKSUM_KIND):
        raise broken(f"'checksums' are {metadata[CHECKSUMS]}, this reader knows {_canonical(CHECKSUM_KIND)}")
    return RomSpec(
        num_rows=shape[0],
        row_stride=shape[1],
        segments=segments,
        addressing=rom_addressing.parse(metadata["addressing"], parameters, tensors, shape[0], where),
        tokenizer_sha256=metadata["tokenizer_sha256"],
        source_sha256=metadata["source_sha256"],
        quantization=_quantization(metadata, segments, where, broken),
        checksums=CHECKSUMS in metadata,
    )


def _segments(
    listed: Any, stride: int, where: str | PathLike[str], broken: Callable[[str], UserError]
) -> tuple[Segment, ...]:
    if not isinstance(listed, list) or not listed:
        raise broken("'segments' is not a list with at least one segment")
    segments = tuple(from_dict(Segment, values, f"{where}: segments[{i}]") for i, values in enumerate(listed))
    end, previous = 0, (-2, 0)
    for index, segment in enumerate(segments):
        if not previous < (segment.layer, segment.memory) or segment.layer < -1 or segment.memory < 0:
            raise broken(f"segment {index} (layer {segment.layer}, memory {segment.memory}) is out of order")
        if max(segment.layer, segment.memory) > MAX_INTEGER:
            raise broken(f"segment {index} has numbers of more than 63 bits")
        previous = (segment.layer, segment.memory)
        size = codec(segment.codec, f"{where}: segments[{index}].codec").num_bytes(segment.dim)
        if segment.dim < 1 or segment.offset < end or segment.offset + size > stride:
            raise broken(f"segment {index} overlaps its neighbour or does not fit the row of {stride} bytes")
        first = CODECS[segments[0].codec]
        if CODECS[segment.codec].is_static != first.is_static:
            raise broken(f"some segments are {first.name if first.is_static else segment.codec} and some are not")
        if first.is_static and (segment.offset > end or segment.codec != first.name):
            raise broken(f"segment {index} is {segment.codec} and does not continue an array of it at byte {end}")
        end = segment.offset + size
    return segments


def _quantization(
    metadata: Mapping[str, str],
    segments: tuple[Segment, ...],
    where: str | PathLike[str],
    broken: Callable[[str], UserError],
) -> Quantization | None:
    chosen = CODECS[segments[0].codec]
    if chosen.is_static != ("quantization" in metadata):
        raise broken(f"{chosen.name} rows {'need a' if chosen.is_static else 'have no'} 'quantization'")
    if not chosen.is_static:
        return None
    found = from_dict(Quantization, _json(metadata, "quantization", broken), f"{where}: quantization")
    return checked_quantization(found, chosen, where)


def _canonical(value: Any) -> str:
    """JSON text: unlike Python's ``==`` it tells 1 from 1.0 and from true."""
    return json.dumps(value, sort_keys=True)


def _json(metadata: Mapping[str, str], key: str, broken: Callable[[str], UserError]) -> Any:
    try:
        return parse_json(metadata.get(key, "{}"), strict=True)
    except (ValueError, RecursionError) as error:
        raise broken(f"{key!r} is not valid JSON: {error}") from None
