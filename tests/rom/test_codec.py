"""Codecs: round trips, error bounds and the bytes themselves, against an element-by-element decoder."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper
from rom_oracle import decode_segment

from meki_edge.errors import UserError
from meki_edge.graph_spec import Quantization
from meki_edge.rom.addressing import Identity
from meki_edge.rom.codec import CodecError, decode, encode, encode_rows
from meki_edge.rom.spec import CODECS, RomSpec, Segment

MAX_CODE = {"int8": 127, "int4": 7, "int4_64": 7}
GROUPS = {"int4": 32, "int4_64": 64}
STATIC = {name: codec for name, codec in CODECS.items() if codec.is_static}
SCALE = float(np.float32(0.37))


def quantization_for(name: str) -> Quantization | None:
    """One whose zero point lies within the integers, for a static codec."""
    return Quantization(scale=SCALE, zero_point=100) if name in STATIC else None


def encoded(values: np.ndarray, name: str) -> np.ndarray:
    return encode(values, CODECS[name], quantization_for(name))


def decoded_of(raw: np.ndarray, dim: int, name: str) -> np.ndarray:
    return decode(raw, dim, CODECS[name], quantization_for(name))


def matrices(limit: float) -> st.SearchStrategy[np.ndarray]:
    """Float32 rows whose widths meet and miss the groups of 32 and 64."""
    widths = st.sampled_from([1, 2, 5, 31, 32, 33, 64, 70, 129])
    shapes = st.tuples(st.integers(1, 4), widths)
    limit = float(np.float32(limit))
    return hnp.arrays(
        np.float32, shapes, elements=st.floats(-limit, limit, width=32, allow_nan=False, allow_infinity=False)
    )


def groups(dim: int, codec: str) -> list[slice]:
    size = GROUPS.get(codec, dim)
    return [slice(start, min(start + size, dim)) for start in range(0, dim, size)]


@pytest.mark.parametrize("name", list(CODECS))
@given(values=matrices(60000.0))
@settings(max_examples=60, deadline=None)
def test_decoding_agrees_with_the_oracle(name: str, values: np.ndarray) -> None:
    raw = encoded(values, name)
    assert raw.shape == (len(values), CODECS[name].num_bytes(values.shape[1]))
    decoded = decoded_of(raw, values.shape[1], name)
    assert decoded.dtype == np.float32
    expected = [decode_segment(row.tobytes(), values.shape[1], name, (SCALE, 100)) for row in raw]
    np.testing.assert_array_equal(decoded, np.array(expected, np.float32))


@given(values=matrices(3e38))
@settings(max_examples=60, deadline=None)
def test_fp32_is_exact(values: np.ndarray) -> None:
    np.testing.assert_array_equal(decode(encode(values, CODECS["fp32"]), values.shape[1], CODECS["fp32"]), values)


@given(values=matrices(65504.0))
@settings(max_examples=60, deadline=None)
def test_fp16_is_the_nearest_half(values: np.ndarray) -> None:
    decoded = decode(encode(values, CODECS["fp16"]), values.shape[1], CODECS["fp16"])
    np.testing.assert_array_equal(decoded, values.astype(np.float16))


@given(values=matrices(3e38))
@settings(max_examples=100, deadline=None)
def test_bf16_is_torchs(values: np.ndarray) -> None:
    decoded = decoded_of(encoded(values, "bf16"), values.shape[1], "bf16")
    np.testing.assert_array_equal(decoded, torch.from_numpy(values).bfloat16().float().numpy())


def test_bf16_rounds_half_to_even() -> None:
    bits = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0xBF818000, 0x00008000, 0x00018000]], np.uint32)
    found = encoded(bits.view(np.float32), "bf16").view("<u2")[0].tolist()
    assert found == [0x3F80, 0x3F82, 0x3F81, 0xBF82, 0x0000, 0x0002]


@pytest.mark.parametrize("name", list(STATIC))
@pytest.mark.parametrize("zero_point", [0, 131, 255])
@pytest.mark.parametrize("scale", [2.0**-126, 1e-6, 0.0123, 1.0, 2.0**100])
def test_static_integers_are_onnx_runtimes(name: str, zero_point: int, scale: float) -> None:
    """What QuantizeLinear and DequantizeLinear make of the same values, clipping and rounding included."""
    rng = np.random.default_rng(zero_point)
    scale = float(np.float32(scale))
    values = np.concatenate([rng.standard_normal(500) * 300, np.arange(-40, 40) + 0.5, [0, 3e38, -3e38]])
    values *= min(scale, 1.0)
    values = values.astype(np.float32)[None]
    quantization = Quantization(scale=scale, zero_point=zero_point)
    raw = encode(values, STATIC[name], quantization)
    kind = TensorProto.UINT8 if name == "static8" else TensorProto.UINT16
    integers = helper.make_tensor("zero_point", kind, [], [zero_point])
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"]),
        ],
        "quantize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, values.shape[1]])],
        [
            helper.make_tensor_value_info("q", integers.data_type, [1, values.shape[1]]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, values.shape[1]]),
        ],
        [helper.make_tensor("scale", TensorProto.FLOAT, [], [scale]), integers],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    codes, expected = session.run(None, {"x": values})
    np.testing.assert_array_equal(raw.view(codes.dtype), codes)
    np.testing.assert_array_equal(decode(raw, values.shape[1], STATIC[name], quantization), expected)


@pytest.mark.parametrize("name", list(MAX_CODE))
@given(values=matrices(400000.0), exponent=st.integers(-60, 0))
@settings(max_examples=150, deadline=None)
def test_no_code_overflows_and_no_error_exceeds_half_a_scale(name: str, values: np.ndarray, exponent: int) -> None:
    """Also for values so small that their scale is a subnormal float16."""
    values = values * np.float32(2.0**exponent)
    dim, largest = values.shape[1], MAX_CODE[name]
    raw = encode(values, CODECS[name])
    decoded = decode(raw, dim, CODECS[name]).astype(np.float64)
    scales = raw[:, : 2 * CODECS[name].num_scales(dim)].copy().view("<f2").astype(np.float64)
    for index, columns in enumerate(groups(dim, name)):
        scale, group = scales[:, index], values[:, columns].astype(np.float64)
        top = np.abs(group).max(axis=1)
        assert (top <= largest * scale).all(), "a value would be clipped"
        below = np.nextafter(scale.astype(np.float16), np.float16(-1)).astype(np.float64)
        assert ((top > largest * below) | (scale == 0)).all(), "a smaller scale would do"
        error = np.abs(decoded[:, columns] - group)
        assert (error <= scale[:, None] / 2 * (1 + 1e-5)).all()
        assert (np.abs(decoded[:, columns]) <= largest * scale[:, None]).all()


def test_codes_round_half_to_even() -> None:
    for name, largest in MAX_CODE.items():
        row = np.array([[largest, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -largest]], np.float32)
        decoded = decode(encode(row, CODECS[name]), 8, CODECS[name])[0]
        np.testing.assert_array_equal(decoded, [largest, 0, 2, 2, 0, -2, -2, -largest])


def test_int4_bytes() -> None:
    """Scale 1 (0x3c00), then 1 and −2 in the low and high nibble, then 7 alone."""
    raw = encode(np.array([[1, -2, 7]], np.float32), CODECS["int4"])
    assert raw.tobytes() == bytes([0x00, 0x3C, 0xE1, 0x07])


@pytest.mark.parametrize("name", [name for name in CODECS if name not in STATIC])
def test_zero_groups_are_zero_bytes(name: str) -> None:
    values = np.zeros((3, 40), np.float32)
    raw = encode(values, CODECS[name])
    assert not raw.any()
    np.testing.assert_array_equal(decode(raw, 40, CODECS[name]), values)


@pytest.mark.parametrize("name", list(CODECS))
def test_blocks_do_not_show(name: str) -> None:
    """Enough rows for several blocks of work encode as each row alone."""
    values = np.random.default_rng(0).standard_normal((900, 200), dtype=np.float32)
    raw = encoded(values, name)
    for row in (0, 326, 327, 328, 899):
        np.testing.assert_array_equal(raw[row], encoded(values[row : row + 1], name)[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", list(CODECS))
def test_nan_and_infinity_are_refused(name: str, bad: float) -> None:
    values = np.ones((600, 130), np.float32)
    values[555, 101] = bad
    with pytest.raises(CodecError, match="a value is NaN or infinite") as caught:
        encoded(values, name)
    assert caught.value.row == 555


@pytest.mark.parametrize(
    ("name", "fits", "too_large"),
    [
        ("fp16", 65504.0, 65520.0),
        ("bf16", 3.3895e38, 3.3962e38),
        ("int8", 127 * 65504.0, 127 * 65505.0),
        ("int4", 7 * 65504.0, 7 * 65505.0),
        ("int4_64", 7 * 65504.0, 7 * 65505.0),
    ],
)
def test_what_float16_cannot_hold_is_refused(name: str, fits: float, too_large: float) -> None:
    values = np.array([[1.0, fits], [0.0, -fits]], np.float32)
    np.testing.assert_allclose(decode(encode(values, CODECS[name]), 2, CODECS[name])[:, 1], values[:, 1], rtol=0.004)
    values[1, 1] = -too_large
    with pytest.raises(CodecError, match="too large for .*float16") as caught:
        encode(values, CODECS[name])
    assert caught.value.row == 1


def test_an_error_names_row_and_segment() -> None:
    segments = (
        Segment(layer=-1, memory=0, offset=0, dim=3, codec="fp32"),
        Segment(layer=4, memory=1, offset=12, dim=2, codec="fp16"),
    )
    spec = RomSpec(
        num_rows=9, row_stride=16, segments=segments, addressing=Identity(), tokenizer_sha256="", source_sha256=""
    )
    values = np.ones((3, 5), np.float32)
    values[2, 4] = 1e6
    with pytest.raises(UserError) as caught:
        encode_rows(values, spec, 1000, "rom.safetensors")
    assert caught.value.what == "row 1002, layer 4 memory 1: a value is too large for float16 (±65504)"
    assert caught.value.where == "rom.safetensors"
    values[1, 0] = np.nan
    with pytest.raises(UserError, match="row 1001, token embedding: a value is NaN"):
        encode_rows(values, spec, 1000, "rom.safetensors")
