"""Affine quantization against its definition, and against ONNX Runtime's own operators."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from quantization_oracle import dequantize, dequantize_weight

from calibration.affine import (
    UNIT,
    Range,
    limits,
    pack_int4,
    quantization,
    quantize,
    quantize_weight,
)
from calibration.precision import PRECISIONS, Scheme, precision
from meki_edge.errors import UserError
from meki_edge.graph_spec import Quantization

ACTIVATIONS = st.sampled_from(["uint8", "uint16"])
REALS = st.floats(-1e4, 1e4, width=32)


def run(nodes: list, inputs: dict[str, np.ndarray], initializers: list) -> np.ndarray:
    """One small graph in ONNX Runtime."""
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in inputs.items()
        ],
        [helper.make_empty_tensor_value_info("y")],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


@given(st.tuples(REALS, REALS), ACTIVATIONS, st.booleans())
def test_a_range_is_covered_and_zero_is_exact(ends: tuple[float, float], dtype: str, symmetric: bool) -> None:
    found = Range(low=min(ends), high=max(ends))
    how = quantization(found, dtype, symmetric=symmetric)
    least, most = limits(dtype)
    assert least <= how.zero_point <= most and how.scale == float(np.float32(how.scale)) > 0
    assert dequantize(np.array([how.zero_point], dtype), how)[0] == 0
    ends_again = dequantize(quantize(np.array([found.low, found.high], np.float32), how, dtype), how)
    assert np.abs(ends_again - [found.low, found.high]).max() <= how.scale * 1.001
    if symmetric:
        assert how.zero_point == 2 ** (8 if dtype == "uint8" else 16) // 2


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=20),
    st.floats(np.float32(1e-3).item(), 2, width=32),
    st.integers(0, 255),
    ACTIVATIONS,
)
def test_rounding_is_onnx_runtimes(values: list[float], scale: float, zero_point: int, dtype: str) -> None:
    how = Quantization(scale=scale, zero_point=zero_point)
    x = np.array(values, np.float32)
    parameters = [
        numpy_helper.from_array(np.float32(scale), "s"),
        numpy_helper.from_array(np.array(zero_point, dtype), "z"),
    ]
    expected = run([helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])], {"x": x}, parameters)
    codes = quantize(x, how, dtype)
    assert codes.dtype == dtype and np.array_equal(codes, expected)
    expected = run([helper.make_node("DequantizeLinear", ["x", "s", "z"], ["y"])], {"x": codes}, parameters)
    assert np.array_equal(dequantize(codes, how), expected)


def test_halves_go_to_even() -> None:
    how = Quantization(scale=0.5, zero_point=10)
    assert quantize(np.array([0.25, 0.75, 1.25, -0.25, -1e9, 1e9]), how, "uint8").tolist() == [10, 12, 12, 10, 0, 255]


def test_softmax_and_sigmoid_have_the_kernels_scale() -> None:
    assert quantization(UNIT, "uint16") == Quantization(scale=2**-16, zero_point=0)
    assert quantization(UNIT, "uint8") == Quantization(scale=2**-8, zero_point=0)


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("int16", 32767)])
def test_wide_weights_by_definition(dtype: str, largest: int) -> None:
    weight = np.random.default_rng(0).standard_normal((40, 7)).astype(np.float32)
    weight[:, 3] = 0
    codes, scales = quantize_weight(weight, dtype)
    wide = weight.astype(np.float64)
    expected = np.abs(wide).max(axis=0) / largest
    expected[3] = 1
    assert np.allclose(scales, expected, rtol=1e-6)
    assert np.array_equal(codes, np.rint(weight / scales).astype(codes.dtype))
    assert np.abs(dequantize_weight(codes, scales) - wide).max() <= scales.max() * 0.5001


@pytest.mark.parametrize("block_size", [None, 8, 32])
def test_narrow_weights_are_the_best_of_the_scales_tried(block_size: int | None) -> None:
    """Brute force over one column at a time, in float64."""
    weight = np.random.default_rng(1).standard_t(3, (64, 5)).astype(np.float32)
    codes, scales = quantize_weight(weight, "int4", block_size=block_size)
    assert codes.dtype == np.int8 and codes.min() >= -8 and codes.max() <= 7
    group = block_size or 64
    for block in range(64 // group):
        for column in range(5):
            part = weight[block * group : (block + 1) * group, column].astype(np.float64)
            errors = []
            for shrink in np.linspace(1, 0.5, 11):
                scale = np.abs(part).max() / 7 * shrink
                errors.append(((np.clip(np.rint(part / scale), -8, 7) * scale - part) ** 2).sum())
            scale = scales[column] if block_size is None else scales[block, column]
            found = ((codes[block * group : (block + 1) * group, column] * np.float64(scale) - part) ** 2).sum()
            assert found <= min(errors) * 1.0001
            assert min(errors) < errors[0] or shrinks_do_not_help(errors)


def shrinks_do_not_help(errors: list[float]) -> bool:
    return int(np.argmin(errors)) == 0


@pytest.mark.parametrize(
    ("dtype", "block_size"), [("int4", None), ("int4", 16), ("int8", None), ("int8", 16), ("int16", None)]
)
def test_weights_are_what_onnx_runtime_dequantizes(dtype: str, block_size: int | None) -> None:
    weight = np.random.default_rng(2).standard_normal((48, 6)).astype(np.float32)
    codes, scales = quantize_weight(weight, dtype, block_size=block_size)
    kind = {"int4": TensorProto.INT4, "int8": TensorProto.INT8, "int16": TensorProto.INT16}[dtype]
    raw = (pack_int4(codes) if dtype == "int4" else codes).tobytes()
    attributes = {"axis": 0, "block_size": block_size} if block_size else {"axis": 1}
    found = run(
        [
            helper.make_node("DequantizeLinear", ["w", "s"], ["d"], **attributes),
            helper.make_node("Mul", ["d", "x"], ["y"]),
        ],
        {"x": np.ones((1,), np.float32)},
        [helper.make_tensor("w", kind, codes.shape, raw, raw=True), numpy_helper.from_array(scales, "s")],
    )
    assert np.array_equal(found, dequantize_weight(codes, scales))


@given(st.lists(st.integers(-8, 7), min_size=1, max_size=33))
def test_int4_is_packed_as_onnx_packs_it(codes: list[int]) -> None:
    packed = pack_int4(np.array(codes, np.int8))
    tensor = helper.make_tensor("w", TensorProto.INT4, [len(codes)], packed.tobytes(), raw=True)
    assert numpy_helper.to_array(tensor).astype(int).tolist() == codes


def test_names_of_precisions() -> None:
    assert {name: str(found.layers) for name, found in PRECISIONS.items()} == {
        "fp16": "fp16",
        "w8a16": "w8a16",
        "w8a8": "w8a8",
        "w4a16": "w4a16",
        "w4a16-block32": "w4a16-block32",
        "w4a16-block64": "w4a16-block64",
        "w4fp16": "w4fp16-block32",
    }
    with pytest.raises(UserError, match="unknown precision 'w8a17'; did you mean 'w8a1?6'"):
        precision("w8a17")


def test_bytes_of_a_weight() -> None:
    assert Scheme(weights="int8", activations="uint16").weight_bytes(64, 10) == 640 + 40
    assert Scheme(weights="int4", activations="uint16", block_size=32).weight_bytes(64, 10) == 320 + 2 * 40
    assert Scheme(weights="int4", activations="uint16", block_size=32).weight_bytes(33, 10) == 330 + 40
    assert Scheme(weights="int4", activations="float16", block_size=32).weight_bytes(64, 10) == 320 + 2 * 20
    assert Scheme(weights="float16", activations="float16").weight_bytes(64, 10) == 1280
