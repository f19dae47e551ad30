"""The lint and the NPU compiler agree: on every graph here, one finds an error exactly where the other fails.

The graphs are small, sound and broken ones: one for every rule that the compiler imposes and every
operator that graphs from elsewhere are likely to bring. They are written in ONNX's text form.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from export.findings import COMPILER
from export.lint import errors, lint
from export.npu_trial import try_compile
from export.qnn_local import qnn_available

pytestmark = pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")

def values(count: int, value: str = "1") -> str:
    """A constant's values in ONNX's text form, its closing brace included."""
    return ",".join([value] * count) + "}"


X = "float[1,4,8] x"
Y = "float[1,4,8] y"

SOUND = {
    "attention": (
        "float[1,2,4,8] q, float[1,2,8,6] past, float[1,2,8,4] k, float[1,1,4,10] mask",
        "float[1,2,4,10] y",
        "a = MatMul(q, past) b = MatMul(q, k) c = Concat<axis=-1>(a, b) d = Add(c, mask) y = Softmax<axis=-1>(d)",
    ),
    "norm and linear": (
        X,
        Y,
        "a = RMSNormalization<axis=-1>(x, g) b = MatMul(a, w) s = Sigmoid(b) c = Mul(b, s) y = Add(c, x)",
        "float[8] g = {1,1,1,1,1,1,1,1}, float[8,8] w = {" + values(64, "0.5"),
    ),
    "rotary": (
        "float[1,2,4,8] x, float[1,4,4] c, float[1,4,4] s",
        "float[1,2,4,8] y",
        "a = RotaryEmbedding(x, c, s) y = Neg(a)",
    ),
    "opset 17": (X, Y, "a = Relu(x) y = Tanh(a)", "", 17),
    "exact gelu": (
        X,
        Y,
        "a = Div(x, r) e = Erf(a) p = Add(e, one) m = Mul(x, p) y = Mul(m, h)",
        "float r = {1.4142135}, float one = {1}, float h = {0.5}",
    ),
    "gelu": (X, Y, "a = Gelu(x) y = Add(a, x)"),
    "dropout inside": (X, Y, "a = Relu(x) b = Dropout(a) y = Tanh(b)"),
    "bool inside": (X, Y, "c = Greater(x, z) y = Where(c, x, z)", "float z = {0}"),
    "bool boundary": ("float[1,4,8] x, bool[1,4,8] c", Y, "a = Neg(x) y = Where(c, x, a)"),
    "int64 boundary": ("int64[1,4] x", "int64[1,4] y", "a = Add(x, x) y = Mul(a, x)"),
    "gather by int64": (
        "int64[1,4] i",
        "float[1,4,8] y",
        "a = Gather(w, i) y = Relu(a)",
        "float[4,8] w = {" + values(32),
    ),
    "folds away": (X, Y, "s = Shape(x) d = Cast<to=1>(s) e = Erf(d) f = ReduceSum<keepdims=0>(e) y = Add(x, f)"),
    "float64 inside": (X, Y, "d = Cast<to=11>(x) e = Mul(d, d) y = Cast<to=1>(e)"),
    "int64 inside": (X, Y, "d = Cast<to=7>(x) e = Mul(d, d) y = Cast<to=1>(e)"),
    "computed shape of a fixed result": ("float[1,4,8] x, int64[2] s", "float[4,8] y", "y = Reshape(x, s)"),
    "if": (
        "float[1,4,8] x, bool c",
        Y,
        "y = If (c) <then_branch = t () => (float[1,4,8] a) { a = Relu(x) }, "
        "else_branch = e () => (float[1,4,8] b) { b = Neg(x) }>",
    ),
    "unused input": ("float[1,4,8] x, float[1,4,8] z", Y, "y = Relu(x)"),
    "input as output": (X, "float[1,4,8] y, float[1,4,8] x", "y = Relu(x)"),
    "rank 5": ("float[1,2,2,4,8] x", "float[1,2,2,4,8] y", "a = Sigmoid(x) y = Mul(a, x)"),
    "depth to space in rank 6": (
        "float[1,8,2,2] x",
        "float[1,2,4,4] y",
        "a = Reshape(x, s) b = Transpose<perm=[0,3,4,1,5,2]>(a) y = Reshape(b, t)",
        "int64[6] s = {1,2,2,2,2,2}, int64[4] t = {1,2,4,4}",
    ),
    "quantized": (
        X,
        Y,
        "xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) wd = DequantizeLinear(w, s, wz) "
        "m = MatMul(xd, wd) mq = QuantizeLinear(m, s, z) md = DequantizeLinear(mq, s, z) "
        "a = Softmax(md) aq = QuantizeLinear(a, s, z) y = DequantizeLinear(aq, s, z)",
        "float s = {0.1}, uint16 z = {32768}, int8 wz = {0}, int8[8,8] w = {" + values(64),
    ),
    "quantized boundary": (
        "uint16[1,4,8] x",
        "uint16[1,4,8] y",
        "a = DequantizeLinear(x, s, z) b = Sigmoid(a) y = QuantizeLinear(b, s, z)",
        "float s = {0.1}, uint16 z = {32768}",
    ),
    "dotted names": ('float[1,4,8] "a.b"', Y, 'b = Relu("a.b") y = Neg(b)'),
    "topk": (X, "float[1,4,2] y, int64[1,4,2] i", "a = Neg(x) y, i = TopK(a, k)", "int64[1] k = {2}"),
}

BROKEN = {
    "erf alone": (X, Y, "a = Relu(x) e = Erf(a) y = Add(e, x)"),
    "dropout at the end": (X, Y, "a = Relu(x) y = Dropout(a)"),
    "float64": ("double[1,4,8] x", "double[1,4,8] y", "a = Relu(x) y = Add(a, x)"),
    "dead branch": (X, Y, "y = Relu(x) n = NonZero(x)"),
    "not folded": (
        X,
        Y,
        "c = NonZero(s) d = Cast<to=1>(c) e = ReduceSum<keepdims=0>(d) y = Add(x, e)",
        "int64[3] s = {1,4,8}",
    ),
    "int8 inside": (X, Y, "d = Cast<to=3>(x) e = Cast<to=1>(d) y = Relu(e)"),
    "bfloat16 inside": (X, Y, "d = Cast<to=16>(x) e = Mul(d, d) y = Cast<to=1>(e)"),
    "bfloat16": ("bfloat16[1,4,8] x", "bfloat16[1,4,8] y", "a = Add(x, x) y = Mul(a, x)"),
    "dynamic batch": ("float[N,4,8] x", "float[N,4,8] y", "a = Relu(x) y = Neg(a)"),
    "nonzero": (X, "int64[3,N] y", "a = Relu(x) y = NonZero(a)"),
    "computed shape": ("float[1,4,8] x, int64[2] s", "float[N,M] y", "y = Reshape(x, s)"),
    "computed slice": (
        "float[1,4,8] x, int64[1] s",
        "float[1,4,8] y",
        "e = Add(s, n) y = Slice(x, s, e, a)",
        "int64[1] n = {4}, int64[1] a = {1}",
    ),
    "computed k": ("float[1,4,8] x, int64[1] k", "float[1,4,2] y, int64[1,4,2] i", "y, i = TopK(x, k)"),
    "space to depth in rank 6": (
        "float[1,2,4,4] x",
        "float[1,8,2,2] y",
        "a = Reshape(x, s) b = Transpose<perm=[0,3,5,1,2,4]>(a) y = Reshape(b, t)",
        "int64[6] s = {1,2,2,2,2,2}, int64[4] t = {1,8,2,2}",
    ),
    "norm over the last two": (
        X,
        Y,
        "a = RMSNormalization<axis=1>(x, g) y = Relu(a)",
        "float[4,8] g = {" + values(32),
    ),
    "whole power": (X, Y, "a = Relu(x) y = Pow(a, k)", "int32 k = {2}"),
    "rank 6": ("float[1,2,2,2,4,8] x", "float[1,2,2,2,4,8] y", "a = Relu(x) y = Add(a, x)"),
    "if with a branch that does not run": (
        "float[1,4,8] x, bool c",
        Y,
        "y = If (c) <then_branch = t () => (float[1,4,8] a) { a = Erf(x) }, "
        "else_branch = e () => (float[1,4,8] b) { b = Neg(x) }>",
    ),
    "loop": (
        X,
        Y,
        "y = Loop (n, c, x) <body = b (int64 i, bool ci, float[1,4,8] v) => "
        "(bool co, float[1,4,8] w) { co = Identity(ci) w = Relu(v) }>",
        "int64 n = {3}, bool c = {1}",
    ),
    "contrib rotary": (
        "float[1,2,4,8] x, int64[1,4] p",
        "float[1,2,4,8] y",
        "y = com.microsoft.RotaryEmbedding(x, p, c, c)",
        "float[4,4] c = {" + values(16),
    ),
    "contrib norm": (
        "float[1,4,8] x, float[1,4,8] r",
        Y,
        "y = com.microsoft.SkipSimplifiedLayerNormalization(x, r, g)",
        "float[8] g = {1,1,1,1,1,1,1,1}",
    ),
    "contrib attention": (
        "float[1,4,8] q, float[1,4,8] k, float[1,4,8] v",
        Y,
        "y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v)",
    ),
    "lone quantize": (X, "uint8[1,4,8] y", "y = QuantizeLinear(x, s, z)", "float s = {0.1}, uint8 z = {128}"),
    "zero size": (
        X,
        "float[1,4,8] y",
        "a = Slice(x, s, s, t) y = Concat<axis=1>(a, x)",
        "int64[1] s = {0}, int64[1] t = {1}",
    ),
    "norm over two axes": (X, Y, "a = LayerNormalization<axis=1>(x, g) y = Relu(a)", "float[4,8] g = {" + values(32)),
    "norm with its mean": (
        X,
        "float[1,4,8] y, float[1,4,1] m",
        "y, m = LayerNormalization<axis=-1>(x, g)",
        "float[8] g = {1,1,1,1,1,1,1,1}",
    ),
    "last maximum": (X, "int64[1,4,1] y", "a = Relu(x) y = ArgMax<axis=-1, select_last_index=1>(a)"),
    "backward sum": (X, Y, "a = Relu(x) y = CumSum<reverse=1>(a, k)", "int32 k = {1}"),
    "cubic grid": ("float[1,4,8,8] x, float[1,6,6,2] g", "float[1,4,6,6] y", 'y = GridSample<mode="cubic">(x, g)'),
    "scaled gemm": (
        "float[4,8] x",
        "float[4,8] y",
        "a = Relu(x) y = Gemm<alpha=0.5>(a, w)",
        "float[8,8] w = {" + values(64),
    ),
    "same node name": (X, Y, None),
    "quantized int32": (X, Y, "a = Relu(x) c = Cast<to=5>(a) y = Cast<to=1>(c)"),
}
# Operators with one float input and output that do not run, each between two that do.
BROKEN |= {
    op: (X, Y, f"a = Relu(x) b = {op}(a) y = Add(b, x)")
    for op in "Acos Acosh Asin Asinh Atanh Celu Cosh Hardmax Shrink Sinh Softsign".split()
} | {
    "BitShift": ("uint32[1,4,8] x", "uint32[1,4,8] y", 'a = Mul(x, x) y = BitShift<direction="LEFT">(a, x)'),
    "BitwiseAnd": ("int32[1,4,8] x", "int32[1,4,8] y", "a = Add(x, x) y = BitwiseAnd(a, x)"),
    "Det": ("float[1,4,4] x", "float[1] y", "a = Relu(x) y = Det(a)"),
    "Trilu": (X, Y, "a = Relu(x) y = Trilu(a)"),
    "Mod of floats with fmod": (X, Y, "a = Relu(x) y = Mod<fmod=1>(a, x)"),
    "ReduceProd": (X, "float[1,4,1] y", "a = Relu(x) y = ReduceProd(a, k)", "int64[1] k = {-1}"),
    "ReduceL1": (X, "float[1,4,1] y", "a = Relu(x) y = ReduceL1(a, k)", "int64[1] k = {-1}"),
    "IsInf": (X, "bool[1,4,8] y", "a = Relu(x) y = IsInf(a)"),
    "Unique": (X, "float[N] y", "a = Relu(x) y = Unique(a)"),
    "Compress": (X, "float[N] y", "y = Compress(x, c)", "bool[3] c = {1,0,1}"),
    "Range": ("int32 n", "int32[N] y", "y = Range(z, n, o)", "int32 z = {0}, int32 o = {1}"),
    "OneHot of a computed depth": (
        "int64[1,4] i, int64 d",
        "float[1,4,N] y",
        "y = OneHot(i, d, v)",
        "float[2] v = {0,1}",
    ),
    "Int8 sum": ("int8[1,4,8] x", "int8[1,4,8] y", "a = Add(x, x) y = Sub(a, x)"),
    "RNN": (
        "float[4,1,8] x",
        "float[4,1,1,8] y",
        "a = Relu(x) y = RNN<hidden_size=8>(a, w, w)",
        "float[1,8,8] w = {" + values(64, "0.1"),
    ),
    "MatMulInteger": ("uint8[4,8] x", "int32[4,8] y", "y = MatMulInteger(x, w)", "uint8[8,8] w = {" + values(64)),
    "ScatterElements max": (
        X,
        Y,
        'a = Relu(x) y = ScatterElements<axis=1, reduction="max">(a, i, u)',
        "int64[1,1,8] i = {0,1,2,3,0,1,2,3}, float[1,1,8] u = {1,1,1,1,1,1,1,1}",
    ),
}


def model_of(
    inputs: str, outputs: str, body: str | None, initializers: str = "", opset: int = 23
) -> onnx.ModelProto:
    """A model from ONNX's text form."""
    if body is None:
        model = model_of(inputs, outputs, "a = Relu(x) y = Neg(a)")
        for node in model.graph.node:
            node.name = "twice"
        return model
    contrib = ', "com.microsoft" : 1' if "com.microsoft" in body else ""
    head = f'<ir_version: 10, opset_import: ["" : {opset}{contrib}]>'
    constants = f"<{initializers}>" if initializers else ""
    return parser.parse_model(f"{head} g ({inputs}) => ({outputs}) {constants} {{ {body} }}")


def test_lint_and_compiler_agree(tmp_path: Path) -> None:
    files = {}
    for name, text in (SOUND | BROKEN).items():
        files[name] = tmp_path / f"{len(files)}.onnx"
        onnx.save(model_of(*text), files[name])
    compiled = try_compile(files.values())
    wrong = []
    for name, path in files.items():
        found = [finding for finding in errors(lint(path)) if finding.source == COMPILER]
        if bool(found) != (compiled[path] is not None) or bool(found) != (name in BROKEN):
            wrong.append(f"{name}: compiler {compiled[path] or 'takes it'}; lint {[finding.what for finding in found]}")
    assert not wrong, "\n".join(wrong)
