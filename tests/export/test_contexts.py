"""Shorter contexts: the same model with fewer slots, through export, calibration, compilation, lint and pack."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny import QUICK_CALIBRATION, tiny_config, write_checkpoint

from calibration.config import CalibrateConfig
from calibration.stage import calibrate
from export.graph import ExportConfig, export
from export.lint import lint
from export.onnx_decoder import OnnxDecoder, cpu_sessions
from export.qnn_local import CompileConfig, compile_local, qnn_available
from meki_edge import graph_spec, manifest
from meki_edge.device.pack import PackConfig, pack
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.model.checkpoint import load_model
from meki_edge.rom.reader import RomReader
from meki_edge.tokens import open_shards

SHAPES = ExportConfig(context_length=96, shorter_contexts=(24, 48), prefill_tokens=16, verify_tokens=60, parts=2)
NAMES = ["prefill", "decode", "prefill_c24", "decode_c24", "prefill_c48", "decode_c48"]
needs_qnn = pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")


def spec_of(directory: Path) -> GraphSpec:
    path = directory / graph_spec.FILE_NAME
    return GraphSpec.from_json(read_json(path), path)


def logits(directory: Path, folded: Path, spec: GraphSpec, ids: np.ndarray, num_prompt: int) -> np.ndarray:
    """``[N, V]``: prefill in chunks, then steps from the cache."""
    roms = [RomReader((directory if (directory / rom.file).is_file() else folded) / rom.file) for rom in spec.roms]
    decoder = OnnxDecoder(spec, RomReader(directory / spec.embedding.file), roms)
    prefill, decode = (cpu_sessions(directory, graph) for graph in (spec.prefill, spec.decode))
    found = decoder.prefill(prefill, ids[:num_prompt])
    return np.stack([*found, *(decoder.decode(decode, token) for token in ids[num_prompt:])])


@pytest.fixture(scope="module")
def graphs(mixed: tuple[Path, Path, Path], tokens_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export with three contexts, in two parts, of the model with every addressing."""
    directory = tmp_path_factory.mktemp("contexts") / "export"
    export(mixed[1], tokens_dir, directory, SHAPES)
    return directory


@pytest.fixture(scope="module")
def quantized(graphs: Path, mixed: tuple[Path, Path, Path], tokens_dir: Path) -> Path:
    """The same in w8a16."""
    out = graphs.parent / "w8a16"
    calibrate(graphs, mixed[1], tokens_dir, out, CalibrateConfig(**QUICK_CALIBRATION))
    return out


def test_every_context_is_the_trained_model(graphs: Path, mixed: tuple[Path, Path, Path], tokens_dir: Path) -> None:
    spec = spec_of(graphs)
    assert list(spec.graphs) == NAMES
    assert {suffix: one.context_length for suffix, one in spec.contexts.items()} == {"": 96, "_c24": 24, "_c48": 48}
    ids = open_shards(tokens_dir).validation_windows(3, 96)[2]
    with torch.inference_mode():
        expected = load_model(mixed[0])(torch.from_numpy(ids)[None])[0].numpy()
    for one in spec.contexts.values():
        assert not one.shorter and one.decode.by_role("past_value")[0].shape[2] == one.context_length
        text = ids[: one.context_length]  # up to the last slot
        found = logits(graphs, mixed[1], one, text, len(text) - 7)
        assert np.abs(found - expected[: len(text)]).max() < 1e-4 * np.abs(expected).max()
    metrics = manifest.load(graphs).metrics
    assert all(0 < metrics[f"verify_{name}_max_abs_error"] < 1e-3 for name in NAMES)


def test_contexts_share_their_weights(graphs: Path) -> None:
    found = manifest.load(graphs)
    assert {entry.role for entry in found.files.values()} >= {f"{name}_graph_{i}" for name in NAMES for i in range(2)}
    assert sorted(path.name for path in graphs.glob("*.data")) == ["weights_0.data", "weights_1.data"]
    for index in range(2):
        places = []
        for name in NAMES:
            initializers = onnx.load(graphs / f"{name}_{index}.onnx", load_external_data=False).graph.initializer
            outside = [tensor for tensor in initializers if tensor.external_data]
            places.append({tensor.name: {e.key: e.value for e in tensor.external_data} for tensor in outside})
        assert all(place == places[0] for place in places)


def test_calibrated_contexts_are_one_quantization(quantized: Path, mixed: tuple[Path, Path, Path]) -> None:
    spec = spec_of(quantized)
    full = {tensor.name: tensor.quantization for tensor in (*spec.decode.inputs, *spec.decode.outputs)}
    for context in spec.shorter:
        for graph in (context.prefill, context.decode):
            assert {t.name: t.quantization for t in (*graph.inputs, *graph.outputs)} == full
    assert full["past_key_0"] is not None
    assert {f"{name}_{i}_encodings" for name in NAMES for i in range(2)} <= {
        entry.role for entry in manifest.load(quantized).files.values()
    }


def test_calibrated_contexts_compute_the_same(
    quantized: Path, mixed: tuple[Path, Path, Path], tokens_dir: Path
) -> None:
    """Sums over more slots are reordered, nothing else: what is masked weighs nothing."""
    spec = spec_of(quantized)
    ids = open_shards(tokens_dir).validation_windows(3, 24)[1]
    full, *shorter = (logits(quantized, mixed[1], one, ids, 19) for one in spec.contexts.values())
    for found in shorter:
        assert np.abs(found - full).max() < 0.01 * np.abs(full).max()


def test_lint_looks_at_every_context(graphs: Path, quantized: Path, tmp_path: Path) -> None:
    assert not lint(graphs) and not lint(quantized)
    broken = shutil.copytree(graphs, tmp_path / "broken") / "decode_c24_1.onnx"
    model = onnx.load(broken, load_external_data=False)
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(model, broken)
    assert {Path(finding.where).name for finding in lint(broken.parent)} == {broken.name}


@needs_qnn
def test_one_binary_a_part_and_the_simulator_checks_every_context(
    graphs: Path, mixed: tuple[Path, Path, Path], tokens_dir: Path, tmp_path: Path
) -> None:
    made = compile_local(graphs, mixed[1], tokens_dir, tmp_path / "npu", CompileConfig(verify_steps=2))
    assert {name: entry.role for name, entry in made.files.items()} == {
        "compile.log": "compile_log",
        **{f"{name}_{i}_ctx.onnx": f"{name}_context_{i}" for name in NAMES for i in range(2)},
        **{f"model_{i}_qnn.bin": f"model_binary_{i}" for i in range(2)},
    }
    assert all(made.metrics[f"simulator_{name}_min_cosine"] > 0.999 for name in NAMES)
    pack(graphs, mixed[1], tmp_path / "bundle", PackConfig(), compiled=tmp_path / "npu")
    packed = {path.relative_to(tmp_path / "bundle").as_posix() for path in (tmp_path / "bundle").rglob("*.onnx")}
    assert packed == {
        *(f"{name}_{i}.onnx" for name in NAMES for i in range(2)),
        *(f"npu/{name}_{i}_ctx.onnx" for name in NAMES for i in range(2)),
    }


def test_ten_thousand_tokens(tokens_dir: Path, tmp_path: Path) -> None:
    """The paper's context: up to its last slot the graphs turn queries and keys as PyTorch does; then calibrated."""
    length = 10_240
    config = tiny_config(eos_token_id=0, num_hidden_layers=1, max_position_embeddings=length)
    checkpoint = write_checkpoint(tmp_path / "trained", config, tokens_dir)
    shapes = ExportConfig(context_length=length, prefill_tokens=512, verify_tokens=20)
    export(checkpoint, tokens_dir, tmp_path / "export", shapes)
    spec = spec_of(tmp_path / "export")
    ids = open_shards(tokens_dir).validation_windows(1, length)[0]
    with torch.inference_mode():
        expected = load_model(checkpoint)(torch.from_numpy(ids)[None])[0].numpy()
    found = logits(tmp_path / "export", checkpoint, spec, ids, length - 5)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    small = CalibrateConfig(samples=2, window_length=520, gate_windows=1, sensitivity=False, min_top1_agreement=0.9)
    made = calibrate(tmp_path / "export", checkpoint, tokens_dir, tmp_path / "w8a16", small)
    assert made.metrics["tokens"] == 520
    if qnn_available():
        fast = CompileConfig(verify_steps=0, optimization_level=1)
        compiled = compile_local(tmp_path / "w8a16", checkpoint, tokens_dir, tmp_path / "npu", fast)
        assert compiled.metrics["model_binary_bytes"] > 10_000


@pytest.mark.parametrize("lengths", [(48, 24), (24, 24), (16, 48), (96,), (24, 200)])
def test_lengths_that_do_not_fit(
    lengths: tuple[int, ...], mixed: tuple[Path, Path, Path], tokens_dir: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(SHAPES, shorter_contexts=lengths)
    with pytest.raises(UserError, match=r"the shorter contexts are \[.*\] with a context_length of 96") as caught:
        export(mixed[1], tokens_dir, tmp_path / "out", config)
    assert caught.value.fix == "give lengths of more than 16 and less than 96, ascending"
