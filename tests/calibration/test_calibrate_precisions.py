"""Every precision: what its graphs are, how accurate, and that the NPU compiler takes them and computes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from tiny import QUICK_CALIBRATION as QUICK

from calibration.config import CalibrateConfig
from calibration.precision import PRECISIONS
from calibration.stage import calibrate
from export.qnn_local import CompileConfig, compile_local, qnn_available
from meki_edge import graph_spec, manifest
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec

Exported = dict[str, tuple[Path, Path]]
needs_qnn = pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")

# One process for all: starting the simulator's libraries takes longer than these graphs do.
RUN = """
import json, sys
from pathlib import Path
import numpy as np, onnxruntime as ort, onnxruntime_qnn
from export.onnx_decoder import OnnxDecoder, cpu_sessions
from export.qnn_worker import PROVIDER, agreement, session
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.rom.reader import RomReader

ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())

def run(spec, directory, roms, load, ids):
    embedding = RomReader(directory / spec.embedding.file)
    decoder = OnnxDecoder(spec, embedding, [RomReader(roms / rom.file) for rom in spec.roms])
    prompt = decoder.prefill(load(spec.prefill), ids[:-6])
    decode = load(spec.decode)
    return np.stack([*prompt, *(decoder.decode(decode, token) for token in ids[-6:])])

ids, found = np.array(json.loads(sys.argv[1])), {}
for pair in sys.argv[2:]:
    directory, roms = map(Path, pair.split("|"))
    spec = GraphSpec.from_json(read_json(directory / "graph_spec.json"), directory)
    expected = run(spec, directory, roms, lambda graph: cpu_sessions(directory, graph), ids)
    npu = lambda graph: [session(directory / part.file, 69, 1) for part in graph.parts]
    found[directory.name] = agreement(run(spec, directory, roms, npu, ids), expected)
Path("agreement.json").write_text(json.dumps(found))
"""


def simulate(directory: Path, ids: list[int], pairs: list[tuple[Path, Path]]) -> dict[str, dict[str, float]]:
    arguments = [json.dumps(ids), *(f"{graphs}|{roms}" for graphs, roms in pairs)]
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((directory / "agreement.json").read_text())


@pytest.fixture(scope="module")
def ids(tokens_dir: Path) -> list[int]:
    from meki_edge.tokens import open_shards

    return open_shards(tokens_dir).validation_windows(1, 30)[0].tolist()


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory, exported: Exported, tokens_dir: Path) -> dict[str, Path]:
    """The MeKi model in every precision; do not change them."""
    checkpoint, directory = exported["meki"]
    folder, first, made = tmp_path_factory.mktemp("precisions"), None, {}
    for name, found in PRECISIONS.items():
        config = CalibrateConfig(
            precision=name, sensitivity=False, max_perplexity_increase=10, min_top1_agreement=0, **QUICK
        )
        calibrate(directory, checkpoint, tokens_dir, folder / name, config, ranges_from=first)
        first = first or (None if found.is_float else folder / name)
        made[name] = folder / name
    return made


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision(every: dict[str, Path], exported: Exported, name: str) -> None:
    made, out = manifest.load(every[name]), every[name]
    assert made.metrics["top1_agreement"] >= {"fp16": 0.97, "w8a16": 0.97, "w8a8": 0.85}.get(name, 0.6)
    assert abs(made.metrics["perplexity_increase"]) < {"fp16": 1e-3, "w8a16": 0.01}.get(name, 0.05)
    kind = "float16" if PRECISIONS[name].is_float else "uint8"
    assert made.metrics["kv_dtype"] == kind
    spec = GraphSpec.from_json(read_json(out / graph_spec.FILE_NAME), out)
    assert {tensor.dtype for tensor in spec.decode.by_role("past_key")} == {kind}
    assert ("rom.safetensors" in made.files) == (not PRECISIONS[name].is_float)
    operators = {node.op_type for node in onnx.load(out / "decode.onnx", load_external_data=False).graph.node}
    assert ("MatMulNBits" in operators) == (name == "w4fp16")
    assert ("QuantizeLinear" in operators) == (not PRECISIONS[name].is_float)
    assert (out / "weights.data").stat().st_size < (exported["meki"][1] / "weights.data").stat().st_size


@needs_qnn
def test_every_precision_on_the_npu(tmp_path: Path, every: dict[str, Path], exported: Exported, ids: list[int]) -> None:
    pairs = [(out, exported["meki"][0] if PRECISIONS[name].is_float else out) for name, out in every.items()]
    measured = simulate(tmp_path, ids, pairs)
    assert set(measured) == set(PRECISIONS)
    for name, agreement in measured.items():
        least = 0.99 if PRECISIONS[name].layers.activations == "uint8" else 0.9995
        assert agreement["min_cosine"] > least, f"{name}: {agreement}"


@needs_qnn
def test_mixed_schemes_and_a_wide_cache_on_the_npu(
    tmp_path: Path, every: dict[str, Path], exported: Exported, tokens_dir: Path, ids: list[int]
) -> None:
    """8- and 16-bit layers side by side, 16-bit weights, rows of 16 bits into layers of 8."""
    checkpoint, directory = exported["meki"]
    wanted = {
        "steps": {"precision": "w8a8", "max_divergence": 1e-4},
        "wide": {"precision": "w8a16", "kv_dtype": "uint16", "max_divergence": 0.0},
    }
    pairs, schemes = [], {}
    for name, options in wanted.items():
        out = tmp_path / name
        config = CalibrateConfig(max_perplexity_increase=10, min_top1_agreement=0, **QUICK, **options)
        calibrate(directory, checkpoint, tokens_dir, out, config, ranges_from=every["w8a16"])
        units = json.loads((out / "calibration_report.json").read_text())["units"]
        schemes[name] = {unit["scheme"] for unit in units}
        pairs.append((out, out))
    assert schemes["steps"] >= {"w8a16"} and "w16a16" in schemes["wide"]
    measured = simulate(tmp_path, ids, pairs)
    assert measured["steps"]["min_cosine"] > 0.99 and measured["wide"]["min_cosine"] > 0.9995


@needs_qnn
def test_every_memory_compiles(
    tmp_path: Path, calibrated: Path, mixed: tuple[Path, Path, Path], tokens_dir: Path
) -> None:
    """The mixed model through the compile stage, quantized rows, cache and all."""
    made = compile_local(calibrated, mixed[1], tokens_dir, tmp_path / "npu", CompileConfig(verify_steps=3))
    for name in ("prefill", "decode"):
        assert made.metrics[f"simulator_{name}_min_cosine"] > 0.999
