"""The operators that :mod:`export.probe_operators` asks about, each as graphs use it."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from export.probe_graphs import Case, Input

CONTRIB = "com.microsoft"
NO_NUMBERS = ("UNDEFINED", "STRING", "COMPLEX64", "COMPLEX128")
X = Input()
INDICES = Input((1, 4), "int32")


def weight(*shape: int) -> Input:
    """A random constant of the case's dtype."""
    return Input(shape, weight=True)


def const(*values: int, dtype: str = "int64") -> Input:
    """A constant vector."""
    return Input((len(values),), dtype, values=list(values))


def scalar(value: float, dtype: str | None = None) -> Input:
    """A constant of rank 0."""
    return Input((), dtype, values=value)


def _cases() -> Iterator[Case]:
    unary = (
        "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor HardSwish Identity IsNaN Log LogSoftmax Mish "
        "Neg Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Tan Tanh Shape Size "
        "NonZero Hardmax Elu Celu LeakyRelu ThresholdedRelu HardSigmoid Shrink IsInf EyeLike Dropout "
        "Det Bernoulli RandomNormalLike RandomUniformLike DynamicQuantizeLinear MeanVarianceNormalization"
    )
    for op in unary.split():
        yield Case(op, (Input((1, 4, 4)),) if op == "Det" else (Input((4, 8)),) if op == "EyeLike" else (X,))
    yield Case("LpNormalization", variations={"p": (2, 1)})
    yield Case("Gelu", variations={"approximate": ("none", "tanh")})
    for op in "Add Sub Mul Div Max Min Sum Mean Equal Less Greater LessOrEqual GreaterOrEqual".split():
        yield Case(op, (X, X))
    yield Case("Mod", (X, X), dtype="int32", variations={"fmod": (0, 1)})
    yield Case("Pow", (X, scalar(2.0, "float32")))
    yield Case("PRelu", (X, weight(8)))
    for op in ("And", "Or", "Xor"):
        yield Case(op, (X, X), dtype="bool")
    yield Case("Not", dtype="bool")
    for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        yield Case(op, (X, X), dtype="int32")
    yield Case("BitwiseNot", dtype="int32")
    yield Case("BitShift", (X, X), {"direction": "LEFT"}, dtype="uint32")
    yield Case("Where", (Input((1, 4, 8), "bool"), X, X))
    yield Case("Clip", (X, scalar(-1.0), scalar(1.0)))
    numbers = tuple(kind for name, kind in TensorProto.DataType.items() if name not in NO_NUMBERS)
    yield Case("Cast", attributes={"to": TensorProto.FLOAT}, variations={"to": numbers})
    yield Case("CastLike", (X, Input((1, 4, 8), "float16")))

    yield Case("MatMul", (X, weight(8, 6)))
    yield Case("MatMul", (Input((1, 4, 8)), Input((1, 8, 4))))
    yield Case("Gemm", (Input((4, 8)), weight(8, 6), weight(6)), any_rank=False,
               variations={"transA": (0, 1), "transB": (0, 1), "alpha": (1.0, 0.5), "beta": (1.0, 0.5)})
    yield Case("Einsum", (Input((1, 4, 8)), Input((1, 8, 6))), {"equation": "bij,bjk->bik"}, any_rank=False)
    yield Case("MatMulInteger", (Input((4, 8), "uint8"), Input((8, 6), "uint8", weight=True)), any_rank=False)

    yield Case("LayerNormalization", (X, weight(8), weight(8)), variations={"axis": (-1, -2)})
    yield Case("RMSNormalization", (X, weight(8)), variations={"axis": (-1, -2)})
    yield Case("InstanceNormalization", (X, weight(4), weight(4)), any_rank=False)
    yield Case("GroupNormalization", (Input((1, 4, 6, 8)), weight(4), weight(4)), {"num_groups": 2}, any_rank=False)
    yield Case("BatchNormalization", (Input((1, 4, 6, 8)), *(weight(4),) * 4), any_rank=False)
    yield Case("LRN", (Input((1, 4, 6, 8)),), {"size": 3}, any_rank=False)
    yield Case("RotaryEmbedding", (Input((1, 2, 4, 8)), Input((1, 4, 4)), Input((1, 4, 4))), any_rank=False,
               variations={"interleaved": (0, 1)})
    heads = Input((1, 2, 4, 8))
    yield Case("Attention", (heads, heads, heads, Input((1, 1, 4, 4), "float32")), any_rank=False,
               variations={"is_causal": (0, 1), "softcap": (0.0, 2.0), "qk_matmul_output_mode": (0, 1, 2, 3)})
    yield Case("Attention", (heads, heads, heads, None, heads, heads), outputs=3, any_rank=False)

    for op in "Mean Sum Max Min Prod L1 L2 LogSum LogSumExp SumSquare".split():
        yield Case(f"Reduce{op}", (X, const(-1)), variations={"keepdims": (0, 1)})
    for op in ("ArgMax", "ArgMin"):
        yield Case(op, variations={"select_last_index": (0, 1), "keepdims": (0, 1), "axis": (0, -1)})
    yield Case("TopK", (X, const(2)), outputs=2, variations={"largest": (0, 1), "sorted": (0, 1), "axis": (-1, -2)})
    yield Case("CumSum", (X, scalar(0, "int32")), variations={"exclusive": (0, 1), "reverse": (0, 1)})
    yield Case("Unique", (X,), outputs=1)
    yield Case("Trilu", (X, scalar(0, "int64")), variations={"upper": (0, 1)})

    yield Case("Reshape", (X, const(-1)))
    yield Case("Flatten")
    yield Case("Transpose")
    yield Case("Squeeze", (Input((4, 8, 1)), const(-1)))
    yield Case("Unsqueeze", (X, const(0)))
    yield Case("Concat", (X, X), {"axis": -1})
    yield Case("Split", (X, const(3, 5)), {"axis": -1}, outputs=2)
    yield Case("Split", (X,), {"axis": -1, "num_outputs": 2}, outputs=2)
    yield Case("Slice", (X, const(0), const(2), const(-1), const(1)))
    yield Case("Expand", (Input((1, 1, 8)), const(1, 4, 8)))
    yield Case("Tile", (X, const(1, 2, 1)), any_rank=False)
    yield Case("Pad", (X, const(0, 0, 1, 0, 0, 1), scalar(0.0)), any_rank=False,
               variations={"mode": ("constant", "reflect", "edge", "wrap")})
    yield Case("Gather", (weight(16, 8), INDICES), any_rank=False)
    yield Case("Gather", (weight(16, 8), Input((1, 4), "int64")), any_rank=False)
    yield Case("Gather", (X, const(1, 0)), {"axis": -1})
    yield Case("GatherElements", (X, Input((1, 4, 8), "int32")), any_rank=False)
    yield Case("GatherND", (X, Input((1, 2, 1), "int64")), any_rank=False, variations={"batch_dims": (0, 1)})
    yield Case("ScatterElements", (X, Input((1, 2, 8), "int32"), Input((1, 2, 8))), {"axis": 1}, any_rank=False,
               variations={"reduction": ("none", "add", "max")})
    yield Case("ScatterND", (X, Input((1, 2, 2), "int64"), Input((1, 2, 8))), any_rank=False,
               variations={"reduction": ("none", "add", "mul", "max")})
    yield Case("OneHot", (Input((1, 4), "int32"), scalar(8, "int64"), Input((2,), values=[0, 1])), any_rank=False)
    yield Case("ConstantOfShape", (Input((2,), "int64"),), any_rank=False)
    yield Case("Range", (scalar(0, "int32"), Input((), "int32"), scalar(1, "int32")), any_rank=False)
    yield Case("ReverseSequence", (Input((4, 2, 8)), Input((2,), "int64")), any_rank=False)
    yield Case("Compress", (X, Input((4,), "bool")), {"axis": 1}, any_rank=False)
    yield Case("NonMaxSuppression", (Input((1, 6, 4), "float32"), Input((1, 1, 6), "float32")), any_rank=False)
    yield Case("DepthToSpace", (Input((1, 8, 4, 4)),), {"blocksize": 2}, any_rank=False,
               variations={"mode": ("DCR", "CRD")})
    yield Case("SpaceToDepth", (Input((1, 2, 4, 4)),), {"blocksize": 2}, any_rank=False)
    coordinates = (
        "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel", "half_pixel_symmetric", "tf_crop_and_resize"
    )
    yield Case("Resize", (Input((1, 4, 8, 8)), None, Input((4,), "float32", values=[1, 1, 2, 2])), any_rank=False,
               variations={"mode": ("nearest", "linear", "cubic"), "antialias": (0, 1),
                           "coordinate_transformation_mode": coordinates})
    yield Case("GridSample", (Input((1, 4, 8, 8)), Input((1, 6, 6, 2))), any_rank=False,
               variations={"mode": ("linear", "nearest", "cubic")})

    image = Input((1, 4, 8, 8))
    yield Case("Conv", (image, weight(6, 4, 1, 1), weight(6)), any_rank=False)
    yield Case("Conv", (Input((1, 4, 8)), weight(4, 1, 3)), {"group": 4}, any_rank=False)
    yield Case("ConvTranspose", (image, weight(4, 6, 2, 2)), {"strides": [2, 2]}, any_rank=False,
               variations={"dilations": ([1, 1], [2, 2])})
    yield Case("LpPool", (image,), {"kernel_shape": [2, 2]}, any_rank=False, variations={"p": (2, 4)})
    for op in ("AveragePool", "MaxPool"):
        yield Case(op, (image,), {"kernel_shape": [2, 2]}, any_rank=False, variations={"dilations": ([1, 1], [2, 2])})
    for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"):
        yield Case(op, (image,), any_rank=False)
    for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        inputs = (Input((4, 1, 8)), weight(1, 8 * gates, 8), weight(1, 8 * gates, 8))
        yield Case(op, inputs, {"hidden_size": 8}, any_rank=False)
    yield Case("STFT", (Input((1, 32, 1)), scalar(8, "int64"), None, scalar(16, "int64")), any_rank=False)
    yield Case("DFT", (Input((1, 16, 1)), None, scalar(1, "int64")), any_rank=False)

    for op in ("Gelu", "FastGelu", "QuickGelu", "BiasGelu"):
        yield Case(op, (X, weight(8)) if op == "BiasGelu" else (X,), domain=CONTRIB, any_rank=False)
    yield Case("FusedMatMul", (Input((1, 8, 8)), weight(8, 8)), domain=CONTRIB, any_rank=False)
    yield Case("SkipLayerNormalization", (X, X, weight(8), weight(8)), domain=CONTRIB, any_rank=False)
    yield Case("SkipSimplifiedLayerNormalization", (X, X, weight(8)), domain=CONTRIB, any_rank=False)
    yield Case("RotaryEmbedding", (Input((1, 2, 4, 8)), Input((1, 4), "int64"), weight(16, 4), weight(16, 4)),
               domain=CONTRIB, any_rank=False)
    yield Case("MultiHeadAttention", (X, X, X), {"num_heads": 2}, domain=CONTRIB, any_rank=False)
    yield Case("GroupQueryAttention", (X, X, X, None, None, Input((1,), "int32", values=[3]), scalar(4, "int32")),
               {"num_heads": 2, "kv_num_heads": 2}, domain=CONTRIB, any_rank=False)
    for bits in (4, 8):
        packed = Input((32, 1, 4 * bits), "uint8", weight=True)
        attributes = {"K": 32, "N": 32, "bits": bits, "block_size": 32}
        yield Case("MatMulNBits", (Input((1, 4, 32)), packed, weight(32)), attributes,
                   domain=CONTRIB, any_rank=False)


CASES = tuple(_cases())
