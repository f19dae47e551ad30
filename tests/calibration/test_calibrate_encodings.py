"""The encodings beside the graphs, as AIMET writes them."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
from calibration_outputs import LENIENT, spec_of
from tiny import QUICK_CALIBRATION as QUICK

from calibration.config import CalibrateConfig
from calibration.stage import calibrate

Exported = dict[str, tuple[Path, Path]]
Mixed = tuple[Path, Path, Path]


def test_encodings_are_aimets(calibrated: Path, mixed: Mixed) -> None:
    """Fields as its specification has them, names of the float graph, values of the quantized one."""
    found = json.loads((calibrated / "decode.encodings").read_text(encoding="utf-8"))
    assert found["version"] == "1.0.0"
    float_graph = onnx.load(mixed[2] / "decode.onnx", load_external_data=False).graph
    names = {name for node in float_graph.node for name in node.output} | {value.name for value in float_graph.input}
    initializers = {i.name: i for i in float_graph.initializer}
    for entry in found["activation_encodings"]:
        assert set(entry) == {"name", "enc_type", "dtype", "bw", "is_sym", "scale", "offset"}
        assert entry["name"] in names and entry["enc_type"] == "PER_TENSOR" and entry["dtype"] == "INT"
        assert len(entry["scale"]) == len(entry["offset"]) == 1 and -(2 ** entry["bw"]) < entry["offset"][0] <= 0
    spec = spec_of(calibrated)
    by_name = {entry["name"]: entry for entry in found["activation_encodings"]}
    for tensor in spec.decode.inputs:
        if tensor.quantization is not None:
            entry = by_name[tensor.name]
            assert entry["scale"] == [tensor.quantization.scale]
            assert entry["offset"] == [-tensor.quantization.zero_point]
            assert entry["is_sym"] == tensor.role.startswith("past_")
    channels = [entry for entry in found["param_encodings"] if entry["enc_type"] == "PER_CHANNEL"]
    products = [node for node in float_graph.node if node.op_type == "MatMul"]
    assert len(channels) == sum(node.input[1] in initializers for node in products)
    for entry in channels:
        assert len(entry["scale"]) == initializers[entry["name"]].dims[1]
        assert set(entry["offset"]) == {-128} and entry["is_sym"] is True and entry["bw"] == 8


def test_block_encodings(tmp_path: Path, base: Path, exported: Exported, tokens_dir: Path) -> None:
    checkpoint, directory = exported["meki"]
    config = CalibrateConfig(precision="w4a16-block32", sensitivity=False, **QUICK, **LENIENT)
    calibrate(directory, checkpoint, tokens_dir, tmp_path / "out", config, ranges_from=base)
    found = json.loads((tmp_path / "out/decode.encodings").read_text(encoding="utf-8"))
    entries = {entry["name"]: entry for entry in found["param_encodings"]}
    q_proj = entries["model.layers.0.self_attn.q_proj.weight"]  # [32, 32]: one block of input channels
    assert (q_proj["enc_type"], q_proj["block_size"], q_proj["bw"], len(q_proj["scale"])) == ("PER_BLOCK", 32, 4, 32)
    assert set(q_proj["offset"]) == {-8}
    down = entries["model.layers.0.mlp.down_proj.weight"]  # [80, 32]: no whole number of blocks
    assert (down["enc_type"], down["bw"]) == ("PER_CHANNEL", 8)
