"""Graphs in parts, and with a float16 cache: still the trained model, and each part alone is what the spec says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from export import graph as export_graph
from export.graph import ExportConfig, export
from export.layout import cut
from export.onnx_decoder import OnnxDecoder, cpu_sessions, decoded, encoded
from meki_edge import graph_spec, manifest
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import HIDDEN, GraphSpec, Quantization, TensorSpec
from meki_edge.model.checkpoint import load_model
from meki_edge.rom.reader import RomReader
from meki_edge.tokens import open_shards

SMALL = ExportConfig(context_length=64, prefill_tokens=8, verify_tokens=20)
CUTS = {
    "two parts": {"parts": 2},
    "every layer, head apart": {"parts": 3, "head_part": True},
    "after two layers, float16 cache": {"split_layers": (2,), "kv_dtype": "float16"},
    "head apart": {"head_part": True, "kv_dtype": "float16"},
}
LAYERS = {  # of each part; the last one has the head
    "two parts": [[0], [1, 2]],
    "every layer, head apart": [[0], [1], [2], []],
    "after two layers, float16 cache": [[0, 1], [2]],
    "head apart": [[0, 1, 2], []],
}


def spec_of(directory: Path) -> GraphSpec:
    path = directory / graph_spec.FILE_NAME
    return GraphSpec.from_json(read_json(path), path)


@pytest.fixture(scope="module", params=CUTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def split(
    name: str, mixed: tuple[Path, Path, Path], tokens_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The export in parts of the model with every addressing."""
    directory = tmp_path_factory.mktemp("split") / "export"
    export(mixed[1], tokens_dir, directory, dataclasses.replace(SMALL, **CUTS[name]))
    return directory


def test_parts_compute_the_trained_model(
    name: str, split: Path, mixed: tuple[Path, Path, Path], tokens_dir: Path
) -> None:
    ids = open_shards(tokens_dir).validation_windows(3, 50)[2]
    with torch.inference_mode():
        expected = load_model(mixed[0])(torch.from_numpy(ids)[None])[0].numpy()
    spec = spec_of(split)
    roms = [RomReader(mixed[1] / rom.file) for rom in spec.roms]
    decoder = OnnxDecoder(spec, RomReader(split / spec.embedding.file), roms)
    prefill, decode = (cpu_sessions(split, graph) for graph in spec.graphs.values())
    found = [*decoder.prefill(prefill, ids[:35]), *(decoder.decode(decode, token) for token in ids[35:])]
    error = np.abs(np.stack(found) - expected).max() / np.abs(expected).max()
    half = CUTS[name].get("kv_dtype") == "float16"
    assert error < (2e-3 if half else 1e-4)
    assert {array.dtype for array in decoder.feeds(spec.decode, ids[:1]).values()} == (
        {np.dtype(np.float32), np.dtype(np.float16)} if half else {np.dtype(np.float32)}
    )


def test_each_part_is_what_the_spec_says(name: str, split: Path) -> None:
    spec = spec_of(split)
    kinds = {"float32": "tensor(float)", "float16": "tensor(float16)"}
    for graph_name, graph in spec.graphs.items():
        assert [part.file for part in graph.parts] == [f"{graph_name}_{i}.onnx" for i in range(len(LAYERS[name]))]
        for index, (part, layers) in enumerate(zip(graph.parts, LAYERS[name], strict=True)):
            session = ort.InferenceSession(split / part.file, providers=["CPUExecutionProvider"])
            for listed, real in ((part.inputs, session.get_inputs()), (part.outputs, session.get_outputs())):
                assert [(t.name, list(t.shape), kinds[t.dtype]) for t in listed] == [
                    (t.name, t.shape, t.type) for t in real
                ]
            assert [tensor.index for tensor in part.by_role("past_key")] == layers
            dtypes = {t.dtype for role in ("past_key", "present_value") for t in part.by_role(role)}
            assert dtypes <= {CUTS[name].get("kv_dtype", "float32")}
            taken = [t.index for t in part.inputs if t.role == HIDDEN]
            given = [t.index for t in part.outputs if t.role == HIDDEN]
            last = index == len(graph.parts) - 1
            assert (taken, given) == ([index - 1] * (index > 0), [] if last else [index])
            # The head alone needs neither mask nor angles; rows reach the layers that use them.
            roles = {tensor.role for tensor in part.inputs}
            assert ("attention_mask" in roles) == bool(layers) == ("position_cos" in roles)
            used = {0: {0, 1}, 1: {2, 3}, 2: {0}}  # ROM files by layer
            rows = {tensor.index for tensor in part.by_role("memory_rows")}
            assert rows == set().union(*(used[layer] for layer in layers))
        names = [tensor.name for tensor in (*graph.inputs, *graph.outputs)]
        assert len(names) == len(set(names)) and HIDDEN not in {t.role for t in (*graph.inputs, *graph.outputs)}
        assert len(graph.by_role("past_key")) == 3 and len(graph.by_role("attention_mask")) == 1


def test_a_head_apart_is_known_by_its_tensors(name: str, split: Path) -> None:
    spec = spec_of(split)
    assert spec.head_is_apart == CUTS[name].get("head_part", False)
    path = split / graph_spec.FILE_NAME
    for graph in ("prefill", "decode"):
        values = read_json(path)
        values[graph]["parts"][-1]["outputs"][0]["role"] = "present_key"
        assert not GraphSpec.from_json(values, path).head_is_apart
    values = read_json(path)
    twice = values["decode"]["parts"][0]
    twice["outputs"][1]["name"] = twice["outputs"][0]["name"]
    with pytest.raises(UserError, match=f"decode_0.onnx has two tensors called '{twice['outputs'][0]['name']}'"):
        GraphSpec.from_json(values, path)


def test_each_part_has_its_own_weights(name: str, split: Path) -> None:
    found = manifest.load(split)
    files = {entry.role: file for file, entry in found.files.items()}
    seen: set[str] = set()
    total = 0
    for index in range(len(LAYERS[name])):
        parts = {}
        for graph in ("prefill", "decode"):
            assert files[f"{graph}_graph_{index}"] == f"{graph}_{index}.onnx"
            proto = onnx.load(split / f"{graph}_{index}.onnx", load_external_data=False).graph
            outside = [tensor for tensor in proto.initializer if tensor.external_data]
            parts[graph] = {tensor.name: {e.key: e.value for e in tensor.external_data} for tensor in outside}
            assert {entry["location"] for entry in parts[graph].values()} == {f"weights_{index}.data"}
        assert parts["prefill"] == parts["decode"]
        assert not seen & parts["decode"].keys(), "a weight lies in two parts"
        seen |= parts["decode"].keys()
        assert files[f"weights_{index}"] == f"weights_{index}.data"
        sizes = sum(int(entry["length"]) for entry in parts["decode"].values())
        total += sizes
    assert found.metrics["parts"] == len(LAYERS[name])
    assert found.metrics["weights_bytes"] == total >= found.metrics["largest_part_bytes"] > 0


def test_where_a_model_is_cut() -> None:
    assert [(p.first, p.stop, p.head) for p in cut(3, [], head_part=False)] == [(0, 3, True)]
    assert [(p.first, p.stop, p.head) for p in cut(5, [1, 4], head_part=True)] == [
        (0, 1, False), (1, 4, False), (4, 5, False), (5, 5, True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"parts": 0}, "0 parts of 3 layers"),
        ({"parts": 4}, "4 parts of 3 layers"),
        ({"parts": 2, "split_layers": (1,)}, "are both given"),
        ({"split_layers": (2, 1)}, "cannot be cut before layers [2, 1]"),
        ({"split_layers": (0,)}, "cannot be cut before layers [0]"),
        ({"split_layers": (3,)}, "cannot be cut before layers [3]"),
        ({"kv_dtype": "float8"}, "kv_dtype is 'float8'"),
    ],
)
def test_cuts_that_cannot_be(
    tmp_path: Path, tokens_dir: Path, dense_checkpoint: Path, changes: dict, expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        export(dense_checkpoint, tokens_dir, tmp_path / "out", dataclasses.replace(SMALL, **changes))
    assert expected in caught.value.what and not (tmp_path / "out" / manifest.FILE_NAME).exists()


@pytest.mark.parametrize(("dtype", "zero_point"), [("uint8", 128), ("int8", -5), ("uint16", 30000), ("int16", 0)])
def test_integers_and_back(dtype: str, zero_point: int) -> None:
    quantization = Quantization(scale=0.037, zero_point=zero_point)
    tensor = TensorSpec(name="x", role="past_key", dtype=dtype, shape=(), quantization=quantization)
    limits = np.iinfo(dtype)
    every = np.arange(limits.min, limits.max + 1).astype(dtype)
    values = decoded(tensor, every)
    exact = (every.astype(np.float64) - zero_point) * np.float64(np.float32(0.037))
    assert values.dtype == np.float32 and np.allclose(values, exact, rtol=1e-6, atol=0)
    assert np.array_equal(encoded(tensor, values), every)
    wild = encoded(tensor, np.array([1e9, -1e9, 0, 0.037 * 2.5, 0.037 * 3.5], np.float32))
    assert wild[:3].tolist() == [limits.max, limits.min, zero_point]
    assert (wild[3:].astype(int) - zero_point).tolist() == [min(q, limits.max - zero_point) for q in (2, 4)]


def test_export_advises_parts(
    tmp_path: Path,
    exported: dict[str, tuple[Path, Path]],
    tokens_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = manifest.load(exported["dense"][1]).metrics["largest_part_bytes"]
    for limit, advised in ((size // 2, False), (size // 5, True)):
        monkeypatch.setattr(export_graph, "LIMIT_BYTES", limit)
        export(exported["dense"][0], tokens_dir, tmp_path / str(limit), SMALL)
        said = " ".join(capsys.readouterr().err.split())
        assert ("in fp16, and devices are said to take 2 GB a binary: export with --parts 3" in said) is advised
