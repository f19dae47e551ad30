"""Passes and the weights file, each alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open

from export import passes
from export.passes import Weight
from meki_edge.model.checkpoint import Checkpoint


def norm_model(after_reshape: bool) -> onnx.ModelProto:
    """RMSNormalization of ``[1, 4, 3, 8]``, fed directly or by a Reshape of ``[1, 4, 24]``."""
    shape = [1, 4, 24] if after_reshape else [1, 4, 3, 8]
    nodes = [helper.make_node("RMSNormalization", ["x", "gain"], ["y"], axis=-1, epsilon=1e-3)]
    values = [numpy_helper.from_array(np.arange(1, 9, dtype=np.float32), "gain")]
    if after_reshape:
        nodes[0].input[0] = "heads"
        nodes.insert(0, helper.make_node("Reshape", ["x", "shape"], ["heads"]))
        values.append(numpy_helper.from_array(np.array([1, 4, 3, 8]), "shape"))
    graph = helper.make_graph(
        nodes,
        "norm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 4, 3, 8])],
        values,
        value_info=[
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 3, 8])
            for name in (["heads", "y"] if after_reshape else ["y"])
        ],
    )
    graph.node.append(helper.make_node("Neg", ["y"], ["z"]))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


@pytest.mark.parametrize("after_reshape", [False, True])
def test_norms_become_flat_and_compute_the_same(after_reshape: bool) -> None:
    proto = norm_model(after_reshape)
    model = ir.from_proto(proto)
    passes.flatten_norms(model)
    passes.simplify(model)
    changed = ir.to_proto(model)
    onnx.checker.check_model(changed, full_check=True)
    norm = next(node for node in model.graph if node.op_type == "RMSNormalization")
    assert tuple(norm.inputs[0].shape) == (1, 12, 8)
    assert [node.op_type for node in model.graph] == ["Reshape", "RMSNormalization", "Reshape", "Neg"]
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 4, 24)).astype(np.float32)}
    feeds["x"] = feeds["x"].reshape([dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim])
    found, expected = (
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for m in (changed, proto)
    )
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_weights_are_streamed_in_blocks(
    tmp_path: Path, dense_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(passes, "BLOCK_ELEMENTS", block)  # of a row, a few rows, everything
    names = ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight")
    written: list[int] = []
    with Checkpoint(dense_checkpoint) as checkpoint:
        weights = [Weight(tensor=names[0], transposed=False, shape=(32,))]
        weights.append(Weight(tensor=names[1], transposed=True, shape=(32, 80)))
        weights.append(Weight(tensor=names[2], transposed=False, shape=(32, 80)))
        offsets = passes.place([*weights, *weights])
        passes.write_weights(tmp_path / "weights.data", offsets, checkpoint, written.append)
    assert list(offsets.values()) == [0, 4096, 4096 + 12288]
    data = (tmp_path / "weights.data").read_bytes()
    with safe_open(dense_checkpoint / "model.safetensors", "np") as file:
        for weight, start in offsets.items():
            stored = file.get_tensor(weight.tensor)
            expected = (stored.T if weight.transposed else stored).tobytes()
            assert data[start : start + len(expected)] == expected
    assert sum(written) == sum(weight.num_bytes for weight in weights)


def test_a_full_disk_leaves_no_file(tmp_path: Path, dense_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    from meki_edge.errors import UserError

    offsets = passes.place([Weight(tensor="model.norm.weight", transposed=False, shape=(32,))])
    with Checkpoint(dense_checkpoint) as checkpoint, pytest.raises(UserError, match="No space left"):
        passes.write_weights(tmp_path / "out" / "weights.data", offsets, checkpoint, lambda _: None)
    assert list((tmp_path / "out").iterdir()) == []
