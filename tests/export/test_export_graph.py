"""The exported graphs against PyTorch, transformers and their own contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny import MEKI, split_rows, tiny_config, write_checkpoint
from safetensors import safe_open
from transformers import Qwen3ForCausalLM

from export.graph import ExportConfig, export
from export.onnx_decoder import OnnxDecoder, cpu_session, cpu_sessions
from meki_edge import graph_spec, manifest
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.model.checkpoint import load_model
from meki_edge.model.kv_cache import CachedAttention
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.rom.reader import RomReader
from meki_edge.tokens import open_shards

Exported = dict[str, tuple[Path, Path]]
ARMS = ("dense", "meki")
GRAPHS = ("prefill", "decode")


def spec_of(directory: Path) -> GraphSpec:
    path = directory / graph_spec.FILE_NAME
    return GraphSpec.from_json(read_json(path), path)


def load_onnx(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def decoder_of(checkpoint: Path, directory: Path) -> OnnxDecoder:
    spec = spec_of(directory)
    roms = [RomReader(checkpoint / rom.file) for rom in spec.roms]
    return OnnxDecoder(spec, RomReader(directory / spec.embedding.file), roms)


def run_onnx(checkpoint: Path, directory: Path, ids: np.ndarray, num_prompt: int) -> np.ndarray:
    """Logits of prefill (``num_prompt`` tokens) and cached decode (the rest)."""
    decoder = decoder_of(checkpoint, directory)
    prefill = decoder.prefill(cpu_sessions(directory, decoder.spec.prefill), ids[:num_prompt])
    sessions = cpu_sessions(directory, decoder.spec.decode)
    return np.stack([*prefill, *(decoder.decode(sessions, token) for token in ids[num_prompt:])])


@torch.inference_mode()
def run_torch_cached(checkpoint: Path, ids: np.ndarray) -> np.ndarray:
    """Logits of token-by-token decoding with PyTorch's own cache."""
    model = load_model(checkpoint)
    rom = RomReader(checkpoint / "rom.safetensors") if model.config.folded else None
    attention = CachedAttention(model.config, len(ids))
    steps = []
    for token in ids:
        rows = split_rows(model, torch.from_numpy(rom.rows(np.array([token])))[None]) if rom else None
        steps.append(model(torch.tensor([[token]]), attention, rows)[0, 0].numpy())
        attention.advance(1)
    return np.stack(steps)


@pytest.fixture(scope="module")
def text(tokens_dir: Path) -> np.ndarray:
    return open_shards(tokens_dir).validation_windows(3, 160)[2]


@pytest.mark.parametrize("arm", ARMS)
def test_chunked_prefill_and_cached_decode_equal_torch(exported: Exported, text: np.ndarray, arm: str) -> None:
    checkpoint, directory = exported[arm]
    expected = run_torch_cached(checkpoint, text)
    found = run_onnx(checkpoint, directory, text, 75)  # 4 whole chunks, one of 11, then up to the last slot
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_dense_graphs_equal_transformers(exported: Exported, text: np.ndarray) -> None:
    checkpoint, directory = exported["dense"]
    reference = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.from_numpy(text[None, :40])).logits[0].numpy()
    found = run_onnx(checkpoint, directory, text[:40], 19)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_other_shapes(tmp_path: Path, tokens_dir: Path, text: np.ndarray) -> None:
    """Untied head, one query head a key/value head, memories in some layers, a prompt as long as the cache."""
    memories = [{**MEKI[0], "layers": [1]}, {**MEKI[0], "layers": [2, 1], "options": {"memory_dim": 5}}]
    config = tiny_config(memories, tie_word_embeddings=False, num_key_value_heads=4, num_hidden_layers=3)
    write_checkpoint(tmp_path / "trained", config, tokens_dir)
    folding = ReparamConfig(table_precision="fp16", proof_windows=2, window_length=32)
    reparam(tmp_path / "trained", tokens_dir, tmp_path / "folded", folding)
    shapes = ExportConfig(context_length=24, prefill_tokens=24, verify_tokens=200)
    made = export(tmp_path / "folded", tokens_dir, tmp_path / "export", shapes)
    assert made.metrics["verify_tokens"] == 24
    expected = run_torch_cached(tmp_path / "folded", text[:24])
    for num_prompt in (24, 1):
        found = run_onnx(tmp_path / "folded", tmp_path / "export", text[:24], num_prompt)
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("arm", ARMS)
def test_spec_is_what_the_files_say(exported: Exported, tokens_dir: Path, arm: str) -> None:
    checkpoint, directory = exported[arm]
    spec = spec_of(directory)
    for graph in (spec.prefill, spec.decode):
        (part,) = graph.parts
        session = cpu_session(directory / part.file)
        for listed, real in ((graph.inputs, session.get_inputs()), (graph.outputs, session.get_outputs())):
            assert [(t.name, list(t.shape)) for t in listed] == [(t.name, t.shape) for t in real]
            assert {t.type for t in real} == {"tensor(float)"} and {t.dtype for t in listed} == {"float32"}
    assert spec.eos_token_id == manifest.load(tokens_dir).metrics["eos_token_id"]
    assert (spec.prefill.num_tokens, spec.decode.num_tokens, spec.context_length) == (16, 1, 160)
    assert [rom.row_dim for rom in spec.roms] == ([36] if arm == "meki" else [])


def test_a_session_is_the_same_of_a_file_and_of_its_bytes(exported: Exported) -> None:
    """Whether weights are copied into another layout or stay where they are mapped from."""
    _, directory = exported["meki"]
    path, rng = directory / "decode.onnx", np.random.default_rng(0)
    shapes = {tensor.name: tensor.shape for tensor in spec_of(directory).decode.inputs}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    expected = cpu_session(path).run(["logits"], feeds)[0]
    for prepack in (True, False):
        session = cpu_session(path.read_bytes(), directory, prepack=prepack)
        settings = session.get_session_options()
        assert settings.get_session_config_entry("session.disable_prepacking") == str(int(not prepack))
        assert settings.get_session_config_entry("session.disable_quant_qdq") == "1"
        np.testing.assert_allclose(session.run(["logits"], feeds)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arm", ARMS)
def test_only_native_operators(exported: Exported, arm: str) -> None:
    _, directory = exported[arm]
    for name in GRAPHS:
        model = load_onnx(directory / f"{name}.onnx")
        onnx.checker.check_model(directory / f"{name}.onnx")
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 23)] and not model.functions
        kinds = [node.op_type for node in model.graph.node]
        assert kinds.count("RotaryEmbedding") == 3 * 2
        assert kinds.count("RMSNormalization") == 3 * 4 + 1 + (3 if arm == "meki" else 0)
        weights = {tensor.name for tensor in model.graph.initializer if tensor.external_data}
        assert not any(node.op_type == "Transpose" and node.input[0] in weights for node in model.graph.node)


@pytest.mark.parametrize("arm", ARMS)
def test_weights_are_stored_once_and_are_the_checkpoints(exported: Exported, arm: str) -> None:
    checkpoint, directory = exported[arm]
    data = (directory / "weights.data").read_bytes()
    places: dict[str, tuple[int, int]] = {}
    for name in GRAPHS:
        for tensor in load_onnx(directory / f"{name}.onnx").graph.initializer:
            if tensor.external_data:
                where = {entry.key: entry.value for entry in tensor.external_data}
                place = (int(where["offset"]), int(where["length"]))
                assert where["location"] == "weights.data" and place[0] % 4096 == 0
                assert places.setdefault(tensor.name, place) == place  # both graphs read the same bytes
                array = np.frombuffer(data[place[0] :][: place[1]], "<f4").reshape(tensor.dims)
                assert np.array_equal(array, stored(checkpoint, tensor.name).T)
            else:
                assert np.prod(tensor.dims) < 8, f"{tensor.name} is a weight inside the graph"
    ends = [0, *(offset + length for offset, length in sorted(places.values()))]
    starts = sorted(offset for offset, _ in places.values())
    assert all(0 <= start - end < 4096 for start, end in zip(starts, ends[:-1], strict=True))
    assert ends[-1] == len(data)
    assert sum(length for _, length in places.values()) == manifest.load(directory).metrics["weights_bytes"]
    per_layer = 11 + (3 if arm == "meki" else 0)
    assert len(places) == 3 * per_layer + 2


def stored(checkpoint: Path, name: str) -> np.ndarray:
    with safe_open(checkpoint / "model.safetensors", "np") as file:
        return file.get_tensor("model.embed_tokens.weight" if name == "lm_head.weight" else name)


def test_embedding_file(exported: Exported) -> None:
    checkpoint, directory = exported["meki"]
    reader = RomReader(directory / "embedding.safetensors")
    assert [(s.layer, s.codec, s.dim) for s in reader.spec.segments] == [(-1, "fp32", 32)]
    assert np.array_equal(reader.rows(np.arange(384)), stored(checkpoint, "model.embed_tokens.weight"))


def test_the_same_bytes_twice_and_nothing_of_this_machine(
    tmp_path: Path, tokens_dir: Path, exported: Exported
) -> None:
    checkpoint, directory = exported["dense"]
    config = ExportConfig(context_length=160, prefill_tokens=16, verify_tokens=20)
    again = export(checkpoint, tokens_dir, tmp_path / "again", config)
    assert again.files == manifest.load(directory).files
    for name in GRAPHS:
        content = (directory / f"{name}.onnx").read_bytes()
        assert str(Path.cwd()).encode() not in content and b"site-packages" not in content
    assert export(checkpoint, tokens_dir, tmp_path / "again", config) == again  # complete: nothing to do
    assert not (tmp_path / "again" / manifest.PARTIAL).exists()
