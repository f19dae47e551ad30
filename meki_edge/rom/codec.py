"""How row elements become bytes and back (``docs/rom-format.md``).

int8 and int4: ``value = code · scale`` with float16 scales kept inside the row, codes rounded half
to even. The scale is fixed first, as the smallest float16 with ``largest |value| ≤ max_code · scale``,
and the codes are computed from the *stored* scale: no code overflows, and no value is further than
half a scale from its code (up to float32 rounding of the quotient). ``code · scale`` is exact in
float32.

Static codecs: ``value = (code − zero_point) · scale`` with one quantization for the file, which was
calibrated with the graph that takes the codes. So they do as ONNX's QuantizeLinear: values out of
range are clipped.

Shapes: n rows, g groups of elements that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike

import numpy as np

from meki_edge.errors import UserError
from meki_edge.graph_spec import Quantization
from meki_edge.rom.spec import CODECS, Codec, RomSpec, Segment

BLOCK_ELEMENTS = 1 << 16  # temporaries of this many float32 stay in a core's cache
DAMAGED = "the file is damaged: copy it again or regenerate it with the command that made it"
NOT_FINITE, BAD_SCALE = "an element is NaN or infinite", "a scale is negative, NaN or infinite"
LARGEST_SCALE_BITS = 0x7BFF  # 65504, the largest finite float16; a set sign bit or NaN compares higher


class CodecError(ValueError):
    """Row ``row`` (an index into the array at hand) cannot be encoded or decoded, and why."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(f"row {row}: {what}")
        self.row = row
        self.what = what


def encode(values: np.ndarray, codec: Codec, quantization: Quantization | None = None) -> np.ndarray:
    """Encode float32 ``[n, dim]`` as uint8 ``[n, codec.num_bytes(dim)]``; a static codec needs its quantization.

    Raises:
        CodecError: a value is NaN or infinite, or too large for the codec (as a value or as a scale).
    """
    out = np.zeros((values.shape[0], codec.num_bytes(values.shape[1])), np.uint8)
    _encode_into(out, values, codec, quantization)
    return out


def decode(raw: np.ndarray, dim: int, codec: Codec, quantization: Quantization | None = None) -> np.ndarray:
    """Decode uint8 ``[n, codec.num_bytes(dim)]`` to float32 ``[n, dim]``.

    Raises:
        CodecError: a scale is negative, NaN or infinite, or an element is NaN or infinite.
    """
    if codec.is_static:
        assert quantization is not None
        centred = raw.view(f"<u{codec.element_bits // 8}").astype(np.int32) - np.int32(quantization.zero_point)
        return np.multiply(centred.astype(np.float32), np.float32(quantization.scale))
    if codec.scale_group == 0:
        values = _floats(raw, codec)
        _require(_are_finite(values), NOT_FINITE)
        return values
    scales, codes = _split(raw, dim, codec)
    _require(_are_scales(scales), BAD_SCALE)
    unpacked = _unpack(codes, dim) if codec.element_bits == 4 else codes.view(np.int8)
    return np.multiply(unpacked, _factors(scales, dim, codec), dtype=np.float32)


def encode_rows(values: np.ndarray, spec: RomSpec, first_row: int, where: str | PathLike[str]) -> np.ndarray:
    """Encode whole rows: float32 ``[n, row_dim]`` → uint8 ``[n, row_stride]``, padding zero.

    Raises:
        UserError: a value that the segment's codec cannot hold; it names the row and the segment.
    """
    raw = np.zeros((values.shape[0], spec.row_stride), np.uint8)
    column = 0
    for segment in spec.segments:
        try:
            block = values[:, column : column + segment.dim]
            _encode_into(_bytes_of(raw, segment), block, CODECS[segment.codec], spec.quantization)
        except CodecError as error:
            raise UserError(
                f"row {first_row + error.row}, {name_of(segment)}: {error.what}",
                where=where,
                fix="check the checkpoint's weights, or choose another --table-precision (int8 has the widest range)",
            ) from None
        column += segment.dim
    return raw


def decode_rows(raw: np.ndarray, spec: RomSpec, ids: np.ndarray, where: str | PathLike[str]) -> np.ndarray:
    """Decode whole rows ``ids`` ``[n]``: uint8 ``[n, row_stride]`` → float32 ``[n, row_dim]``.

    Raises:
        UserError: a scale or an element that no writer stores; it names the row and the segment.
    """
    values = np.empty((raw.shape[0], spec.row_dim), np.float32)
    column = 0
    for segment in spec.segments:
        try:
            decoded = decode(_bytes_of(raw, segment), segment.dim, CODECS[segment.codec], spec.quantization)
        except CodecError as error:
            raise UserError(
                f"row {ids[error.row]}, {name_of(segment)}: {error.what}",
                where=where,
                fix=DAMAGED,
            ) from None
        values[:, column : column + segment.dim] = decoded
        column += segment.dim
    return values


def faults(raw: np.ndarray, spec: RomSpec) -> Iterator[tuple[np.ndarray, str]]:
    """What :func:`decode_rows` refuses of rows, uint8 ``[n, row_stride]``: which of them (bool ``[n]``), and why."""
    for segment in spec.segments:
        codec, stored = CODECS[segment.codec], _bytes_of(raw, segment)
        if codec.is_static:
            continue
        if codec.scale_group == 0:
            yield ~_are_finite(_floats(stored, codec)), f", {name_of(segment)}: {NOT_FINITE}"
        else:
            yield ~_are_scales(_split(stored, segment.dim, codec)[0]), f", {name_of(segment)}: {BAD_SCALE}"


def half_steps(raw: np.ndarray, decoded: np.ndarray, segment: Segment, codec: Codec) -> np.ndarray:
    """How far the elements of a segment may be from what they were rounded from: float32 ``[n, dim]`` or ``[n, 1]``.

    Args:
        raw: whole rows, uint8 ``[n, row_stride]``.
        decoded: the segment's values, float32 ``[n, dim]``.
    """
    if codec.element == "int":
        scales, _ = _split(_bytes_of(raw, segment), segment.dim, codec)
        return _factors(scales, segment.dim, codec) / 2
    relative, smallest = {"fp32": (2.0**-24, 0.0), "fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 0.0)}[codec.name]
    return np.maximum(np.abs(decoded) * np.float32(relative), np.float32(smallest))


def codes_of(raw: np.ndarray, spec: RomSpec) -> np.ndarray:
    """The integers of whole rows of a static codec: uint8 ``[n, row_stride]`` → uint8 or uint16 ``[n, row_dim]``."""
    return raw[:, : spec.row_bytes].view(f"<u{CODECS[spec.segments[0].codec].element_bits // 8}")


def padding(spec: RomSpec) -> np.ndarray:
    """The bits of a row that hold no data and MUST be zero: a uint8 mask ``[row_stride]``."""
    mask = np.full(spec.row_stride, 0xFF, np.uint8)
    for segment in spec.segments:
        used = _bytes_of(mask[None], segment)[0]
        used[:] = 0
        if CODECS[segment.codec].element_bits == 4 and segment.dim % 2:
            used[-1] = 0xF0
    return mask


def _encode_into(out: np.ndarray, values: np.ndarray, codec: Codec, quantization: Quantization | None) -> None:
    """Encode in blocks of rows, so that the temporaries stay in cache."""
    assert values.dtype == np.float32 and values.ndim == 2
    step = max(1, BLOCK_ELEMENTS // values.shape[1])
    for start in range(0, len(values), step):
        block = values[start : start + step]
        target = out[start : start + step]
        try:
            if codec.is_static:
                assert quantization is not None
                _quantize_static(target, block, codec, quantization)
            elif codec.scale_group == 0:
                _store(target, block, codec)
            else:
                _quantize(target, block, codec)
        except CodecError as error:
            raise CodecError(start + error.row, error.what) from None


def _store(out: np.ndarray, values: np.ndarray, codec: Codec) -> None:
    """Plain floating point."""
    if codec.element == "bfloat":
        bits = np.ascontiguousarray(values).view(np.uint32)
        with np.errstate(over="ignore"):  # a NaN of all ones wraps round; it is found below
            out.view("<u2")[...] = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    else:
        with np.errstate(over="ignore"):
            out.view(f"<f{codec.element_bits // 8}")[...] = values
    fits = np.isfinite(_floats(out, codec)).all(axis=1) & np.isfinite(values).all(axis=1)
    if not fits.all():
        _require(np.isfinite(values).all(axis=1), "a value is NaN or infinite")
        name, limit = ("bfloat16", "3.39e38") if codec.element == "bfloat" else ("float16", "65504")
        _require(fits, f"a value is too large for {name} (±{limit})")


def _floats(raw: np.ndarray, codec: Codec) -> np.ndarray:
    """Plain floating point as a fresh float32 array."""
    if codec.element == "bfloat":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view(f"<f{codec.element_bits // 8}").astype(np.float32)


def _quantize_static(out: np.ndarray, values: np.ndarray, codec: Codec, quantization: Quantization) -> None:
    """Unsigned integers with the file's quantization; what is out of its range becomes the nearest in it."""
    _require(np.isfinite(values).all(axis=1), "a value is NaN or infinite")
    zero_point, largest = quantization.zero_point, 2**codec.element_bits - 1
    with np.errstate(over="ignore"):
        steps = np.rint(values / np.float32(quantization.scale))
    np.clip(steps, -zero_point, largest - zero_point, out=steps)
    out.view(f"<u{codec.element_bits // 8}")[...] = steps.astype(np.int32) + zero_point


def _quantize(out: np.ndarray, values: np.ndarray, codec: Codec) -> None:
    """Integers with float16 scales."""
    count, dim = values.shape
    max_code = 2 ** (codec.element_bits - 1) - 1
    grouped = _group(values, codec)
    # NaN propagates to the scale, where it is found. abs turns −0 (of an all-zero group) into 0.
    largest = np.abs(np.maximum(grouped.max(axis=2), -grouped.min(axis=2)))
    scales = _scales(largest, max_code, values)
    stored, codes = _split(out, dim, codec)
    stored[...] = scales
    divisor = np.where(scales == 0, 1, scales)
    quotient = np.divide(grouped, divisor[:, :, None])
    rounded = np.rint(quotient, out=quotient).astype(np.int8).reshape(count, -1)[:, :dim]
    codes[...] = _pack(rounded) if codec.element_bits == 4 else rounded.view(np.uint8)


def _scales(largest: np.ndarray, max_code: int, values: np.ndarray) -> np.ndarray:
    """The smallest float16 (as float32) with ``largest ≤ max_code · scale``, ``[n, g]``."""
    with np.errstate(over="ignore"):
        nearest = (largest / np.float32(max_code)).astype("<f2")
        # The product of an 11-bit and a 7-bit number is exact in float32, so this comparison is too.
        too_small = nearest.astype(np.float32) * np.float32(max_code) < largest
        nearest[too_small] = np.nextafter(nearest[too_small], np.float16(np.inf))
    fits = np.isfinite(nearest).all(axis=1)
    if not fits.all():
        _require(np.isfinite(values).all(axis=1), "a value is NaN or infinite")
        _require(fits, f"a value is too large for a float16 scale (±{65504 * max_code})")
    return nearest.astype(np.float32)


def _group(values: np.ndarray, codec: Codec) -> np.ndarray:
    """``[n, dim]`` as ``[n, g, group]``, the last group filled up with zeros."""
    count, dim = values.shape
    groups = codec.num_scales(dim)
    if codec.scale_group > 0 and dim % codec.scale_group:
        filled = np.zeros((count, groups * codec.scale_group), np.float32)
        filled[:, :dim] = values
        values = filled
    return values.reshape(count, groups, -1)


def _pack(codes: np.ndarray) -> np.ndarray:
    """int8 ``[n, dim]`` in −7…7 → uint8 ``[n, ceil(dim / 2)]``, the even element in the low nibble."""
    nibbles = codes.view(np.uint8) & 0x0F
    packed = nibbles[:, 0::2].copy()
    odd = nibbles[:, 1::2]
    packed[:, : odd.shape[1]] |= odd << 4
    return packed


def _unpack(packed: np.ndarray, dim: int) -> np.ndarray:
    """uint8 ``[n, ceil(dim / 2)]`` → int8 ``[n, dim]``; shifting left and back extends the sign."""
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.int8)
    codes[:, 0::2] = (packed << 4).view(np.int8) >> 4
    codes[:, 1::2] = packed.view(np.int8) >> 4
    return codes[:, :dim]


def _factors(scales: np.ndarray, dim: int, codec: Codec) -> np.ndarray:
    """Each element's scale: float32 ``[n, dim]``, or ``[n, 1]`` where all share one."""
    factors = scales.astype(np.float32)
    return factors if factors.shape[1] == 1 else np.repeat(factors, codec.scale_group, axis=1)[:, :dim]


def _split(raw: np.ndarray, dim: int, codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """Views of a segment's scales (``<f2`` ``[n, g]``) and of the bytes of its codes."""
    scale_bytes = 2 * codec.num_scales(dim)
    return raw[:, :scale_bytes].view("<f2"), raw[:, scale_bytes:]


def _bytes_of(raw: np.ndarray, segment: Segment) -> np.ndarray:
    return raw[:, segment.offset : segment.offset + CODECS[segment.codec].num_bytes(segment.dim)]


def name_of(segment: Segment) -> str:
    """For people."""
    return "token embedding" if segment.layer < 0 else f"layer {segment.layer} memory {segment.memory}"


def _are_finite(values: np.ndarray) -> np.ndarray:
    return np.isfinite(values).all(axis=1)


def _are_scales(scales: np.ndarray) -> np.ndarray:
    return (scales.view("<u2") <= LARGEST_SCALE_BITS).all(axis=1)


def _require(good: np.ndarray, what: str) -> None:
    if not good.all():
        raise CodecError(int(np.argmin(good)), what)
