"""Every memory kind, alone and mixed: the graphs against the trained model, and in the NPU simulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny import MIXED, tiny_config, write_checkpoint

from export.graph import ExportConfig, export
from export.onnx_decoder import OnnxDecoder, cpu_sessions
from export.qnn_local import CompileConfig, compile_local, qnn_available
from meki_edge import graph_spec
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.model.checkpoint import load_model
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.rom.reader import RomReader
from meki_edge.tokens import open_shards


def placed(kind: str, *layers: int, **options: object) -> dict:
    return {"kind": kind, "layers": list(layers), "options": options}


KINDS = {
    "meki": [
        placed("meki", 0, memory_dim=8, position="parallel_attention", fusion="mul_sigmoid"),
        placed("meki", 0, memory_dim=6, position="after_attention", fusion="add_silu"),
        placed("meki", 1, memory_dim=6, position="parallel_ffn", fusion="add_sigmoid"),
        placed("meki", 1, memory_dim=4, position="after_ffn", fusion="mul_silu"),
    ],
    "ple": [placed("ple", 0, memory_dim=8), placed("ple", 1, memory_dim=8, layer_scalar=False)],
    "stem and staple": [placed("stem", 0), placed("staple", 1), placed("staple", 1, rank=6)],
    "mole": [placed("mole", 0, 1, num_experts=3)],
    "l3": [
        placed("l3", 0, max_entries=8, num_entries=900),
        placed("l3", 1, max_entries=5, tied=True, residual=False, pre_norm=False),
    ],
    "engram": [
        placed("engram", 0, table_size=31, memory_dim=16, num_heads=2),
        placed("engram", 1, table_size=31, memory_dim=8, max_ngram=2, num_heads=2, gate="plain", kernel_size=3),
        placed("engram", 1, table_size=31, memory_dim=9, max_ngram=4, num_heads=1, kernel_size=1),
    ],
}


def spec_of(directory: Path) -> GraphSpec:
    path = directory / graph_spec.FILE_NAME
    return GraphSpec.from_json(read_json(path), path)


def decoder_of(folded: Path, exported: Path) -> OnnxDecoder:
    spec = spec_of(exported)
    readers = [RomReader(folded / rom.file) for rom in spec.roms]
    return OnnxDecoder(spec, RomReader(exported / spec.embedding.file), readers)


def assert_graphs_are_the_model(trained: Path, folded: Path, exported: Path, ids: np.ndarray) -> None:
    """Chunks whole and partial, one in the middle shorter than any state, then single tokens."""
    with torch.inference_mode():
        expected = load_model(trained)(torch.from_numpy(ids)[None])[0].numpy()
    decoder = decoder_of(folded, exported)
    prefill, decode = (cpu_sessions(exported, graph) for graph in decoder.spec.graphs.values())
    pieces = [
        decoder.prefill(prefill, ids[:19]),
        decoder.prefill(prefill, ids[19:21]),
        decoder.decode(decode, ids[21])[None],
        decoder.prefill(prefill, ids[22:50]),
    ]
    other = decoder.copy()
    pieces += [decoder.decode(decode, token)[None] for token in ids[50:]]
    assert np.abs(np.concatenate(pieces) - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.array_equal(other.decode(decode, ids[50]), pieces[4][0]), "the copy goes on where it was made"


@pytest.fixture(scope="module")
def text(tokens_dir: Path) -> np.ndarray:
    return open_shards(tokens_dir).validation_windows(3, 60)[2]


@pytest.mark.parametrize("name", KINDS)
def test_prefill_and_decode_equal_the_trained_model(
    tmp_path: Path, tokens_dir: Path, text: np.ndarray, name: str
) -> None:
    trained, folded, exported = (tmp_path / stage for stage in ("trained", "folded", "exported"))
    write_checkpoint(trained, tiny_config(KINDS[name], num_hidden_layers=2, eos_token_id=0), tokens_dir)
    reparam(trained, tokens_dir, folded, ReparamConfig(table_precision="fp32", proof_windows=1, window_length=32))
    export(folded, tokens_dir, exported, ExportConfig(context_length=64, prefill_tokens=8, verify_tokens=20))
    assert_graphs_are_the_model(trained, folded, exported, text)


def test_a_mixed_model_equals_the_trained_one(mixed: tuple[Path, Path, Path], text: np.ndarray) -> None:
    assert_graphs_are_the_model(*mixed, text)


def test_the_spec_of_a_mixed_model(mixed: tuple[Path, Path, Path]) -> None:
    _, _, exported = mixed
    spec = spec_of(exported)
    assert [(rom.file, rom.addressing, rom.row_dim, rom.rows_per_token) for rom in spec.roms] == [
        ("rom.safetensors", "identity", 6 + 6 + 4, 1),
        ("rom_1.safetensors", "ngram_hash", 4, 4),
        ("rom_2.safetensors", "ragged", 32 + 16, 8),
        ("rom_3.safetensors", "ngram_hash", 4, 4),
    ]
    for graph, count in ((spec.prefill, 16), (spec.decode, 1)):
        model = onnx.load(exported / graph.parts[0].file, load_external_data=False).graph
        for listed, real in ((graph.inputs, model.input), (graph.outputs, model.output)):
            shapes = {value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim) for value in real}
            assert {tensor.name: tensor.shape for tensor in listed} == shapes
        found = {t.name: (t.role, t.index, t.shape) for t in (*graph.inputs, *graph.outputs) if "memory" in t.role}
        assert found == {
            "memory_rows_0": ("memory_rows", 0, (1, count, 16)),
            "memory_rows_1": ("memory_rows", 1, (1, count, 16)),
            "memory_rows_2": ("memory_rows", 2, (1, count, 8, 48)),
            "memory_mask_2": ("memory_mask", 2, (1, count, 8)),
            "memory_rows_3": ("memory_rows", 3, (1, count, 16)),
            **{f"memory_state_{i}": ("memory_state", i, (1, 9, 32)) for i in range(2)},
            **{f"present_memory_state_{i}": ("present_memory_state", i, (1, count, 32)) for i in range(2)},
        }


def test_padding_asks_for_no_rows(mixed: tuple[Path, Path, Path], text: np.ndarray) -> None:
    """A chunk of 5 real tokens: rows, mask and state inputs as their addresses say."""
    _, folded, exported = mixed
    decoder = decoder_of(folded, exported)
    feeds = decoder.feeds(decoder.spec.prefill, text[:5])
    with RomReader(folded / "rom_2.safetensors") as ragged:
        offsets = ragged.spec.addressing.tensors()["offsets"]
        for place, token in enumerate(text[:5]):
            first, last = offsets[token], offsets[token + 1]
            count = last - first
            assert np.array_equal(feeds["memory_rows_2"][0, place, :count], ragged.rows(np.arange(first, last)))
            assert not feeds["memory_rows_2"][0, place, count:].any()
            assert feeds["memory_mask_2"][0, place].tolist() == [0] * count + [-100] * (8 - count)
    assert len({int(row.sum()) for row in feeds["memory_mask_2"][0, :5]}) > 1, "the text has tokens of several lengths"
    for name in ("memory_rows_0", "memory_rows_1", "memory_rows_2", "memory_rows_3"):
        assert feeds[name][0, :5].any() and not feeds[name][0, 5:].any()
    assert (feeds["memory_mask_2"][0, 5:] == -100).all()
    assert not feeds["memory_state_0"].any() and not feeds["memory_state_1"].any()


@pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")
def test_a_mixed_model_on_the_npu(tmp_path: Path, tokens_dir: Path, mixed: tuple[Path, Path, Path]) -> None:
    _, folded, exported = mixed
    made = compile_local(exported, folded, tokens_dir, tmp_path / "npu", CompileConfig(verify_steps=3))
    for name in ("prefill", "decode"):
        assert made.metrics[f"simulator_{name}_min_cosine"] > 0.999
        assert made.metrics[f"simulator_{name}_max_abs_error"] < 0.2
