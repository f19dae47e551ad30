"""The stage: every precision on real graphs, the rows' one quantization, the gate, resuming, and errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny import QUICK_CALIBRATION as QUICK
from torch.nn import functional as F

from calibration import samples
from calibration.config import CalibrateConfig
from calibration.gate import Accuracy, limits
from calibration.ranges import Observations
from calibration.sensitivity import choose
from calibration.stage import calibrate
from export.onnx_decoder import OnnxDecoder, cpu_sessions
from meki_edge import graph_spec, manifest, tokens
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.manifest import PARTIAL
from meki_edge.model.checkpoint import load_model
from meki_edge.model.rom_rows import rom_rows
from meki_edge.rom.reader import RomReader

Exported = dict[str, tuple[Path, Path]]
Mixed = tuple[Path, Path, Path]
LENIENT = {"max_perplexity_increase": 10.0, "min_top1_agreement": 0.0}


def spec_of(directory: Path) -> GraphSpec:
    path = directory / graph_spec.FILE_NAME
    return GraphSpec.from_json(read_json(path), path)


def decoder_of(directory: Path, roms: Path) -> OnnxDecoder:
    spec = spec_of(directory)
    readers = [RomReader(roms / rom.file) for rom in spec.roms]
    return OnnxDecoder(spec, RomReader(directory / spec.embedding.file), readers)


def test_the_output_stands_in_place_of_the_export(calibrated: Path, mixed: Mixed) -> None:
    made = manifest.load(calibrated, stages=("calibrate",))
    manifest.verify(calibrated, made)
    exported = manifest.load(mixed[2])
    roles = {name: entry.role for name, entry in made.files.items()}
    assert {name: entry.role for name, entry in exported.files.items()}.items() <= roles.items()
    assert made.inputs["checkpoint"].sha256 == exported.inputs["checkpoint"].sha256
    for role in ("rom", "rom_1", "rom_2", "rom_3"):
        assert roles[f"{role}.safetensors"] == role
    assert not (calibrated / PARTIAL).exists()
    spec, before = spec_of(calibrated), spec_of(mixed[2])
    for name, graph in spec.graphs.items():
        model = onnx.load(calibrated / graph.parts[0].file, load_external_data=False).graph
        for listed, real in ((graph.inputs, model.input), (graph.outputs, model.output)):
            types = {value.name: value.type.tensor_type for value in real}
            found = {n: (t.elem_type, tuple(d.dim_value for d in t.shape.dim)) for n, t in types.items()}
            assert found == {t.name: (onnx.helper.np_dtype_to_tensor_dtype(np.dtype(t.dtype)), t.shape) for t in listed}
        strip = lambda tensors: [dataclasses.replace(t, dtype="float32", quantization=None) for t in tensors]
        old = before.graphs[name]
        assert strip(graph.inputs) == strip(old.inputs) and strip(graph.outputs) == strip(old.outputs)
    for key in ("precision", "perplexity", "float_perplexity", "top1_agreement", "validation_loss", "ram_parameters"):
        assert key in made.metrics


def test_rows_and_graph_have_one_quantization(calibrated: Path, mixed: Mixed, tokens_dir: Path) -> None:
    """What is read from the file is what the graph takes, to the bit, and it is every row within half a step."""
    decoder = decoder_of(calibrated, calibrated)
    ids = tokens.open_shards(tokens_dir).validation_windows(1, 16)[0]
    feeds = decoder.feeds(decoder.spec.prefill, ids)
    for tensor, rom in zip(decoder.spec.prefill.by_role("memory_rows"), decoder.spec.roms, strict=True):
        with RomReader(calibrated / rom.file) as reader, RomReader(mixed[1] / rom.file) as source:
            assert reader.spec.quantization == tensor.quantization and tensor.dtype == "uint16"
            codes, _ = reader.fetch_raw(ids)
            found = feeds[tensor.name].reshape(16, -1)
            expected = codes.reshape(16, -1)
            assert np.array_equal(found[:, : expected.shape[1]], expected)
            assert (found[:, expected.shape[1] :] == tensor.quantization.zero_point).all(), "no row is a zero"
            every = np.arange(source.spec.num_rows)
            error = np.abs(reader.rows(every).astype(np.float64) - source.rows(every)).max()
            assert error <= tensor.quantization.scale * 0.501, "no row is clipped, however rare its token"


def test_the_gate_measures_what_it_says(calibrated: Path, mixed: Mixed, tokens_dir: Path) -> None:
    """Float perplexity against PyTorch; agreement by running both graphs here."""
    _, folded, exported = mixed
    made = manifest.load(calibrated)
    text = tokens.open_shards(tokens_dir).validation_windows(2, 40)
    model = load_model(folded)
    readers = [RomReader(folded / rom.file) for rom in spec_of(exported).roms]
    losses, agree = [], []
    for ids in text:
        batch = torch.from_numpy(ids)[None]
        with torch.inference_mode():
            logits = model(batch, rows=rom_rows(model.config, readers, batch))[0]
        losses.append(F.cross_entropy(logits[:-1].double(), batch[0, 1:]).item())
        decoder, graphs = decoder_of(calibrated, calibrated), spec_of(calibrated).graphs
        prefill, decode = (cpu_sessions(calibrated, graphs[name]) for name in ("prefill", "decode"))
        found = [*decoder.prefill(prefill, ids[:37]), *(decoder.decode(decode, token) for token in ids[37:])]
        agree.append(np.stack(found).argmax(axis=-1) == logits.numpy().argmax(axis=-1))
    assert made.metrics["float_perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert made.metrics["tokens"] == 80
    assert made.metrics["top1_agreement"] == pytest.approx(np.mean(agree), abs=0.026), "fused kernels may differ"
    assert made.metrics["top1_agreement"] > 0.97
    assert abs(made.metrics["perplexity_increase"]) < 0.01


def test_parts_compute_what_one_graph_does(tmp_path: Path, calibrated: Path, mixed: Mixed, tokens_dir: Path) -> None:
    from export.graph import ExportConfig, export

    config = ExportConfig(context_length=160, prefill_tokens=16, verify_tokens=20, parts=2)
    export(mixed[1], tokens_dir, tmp_path / "parts", config)
    calibrate(tmp_path / "parts", mixed[1], tokens_dir, tmp_path / "out", CalibrateConfig(**QUICK))
    ids = tokens.open_shards(tokens_dir).validation_windows(1, 30)[0]
    logits = []
    for directory in (calibrated, tmp_path / "out"):
        decoder, spec = decoder_of(directory, directory), spec_of(directory)
        made = cpu_sessions(directory, spec.prefill)
        found = decoder.prefill(made, ids[:20])
        decode = cpu_sessions(directory, spec.decode)
        logits.append(np.stack([*found, *(decoder.decode(decode, token) for token in ids[20:])]))
    assert len(spec.decode.parts) == 2
    assert np.array_equal(logits[0], logits[1])
    (given,) = (t for t in spec.decode.parts[0].outputs if t.role == "hidden")
    (taken,) = (t for t in spec.decode.parts[1].inputs if t.role == "hidden")
    assert given == taken and given.dtype == "uint16" and given.quantization is not None
    assert {f"weights_{i}.data" for i in range(2)} <= set(manifest.load(tmp_path / "out").files)


@pytest.mark.parametrize(
    ("options", "cache", "rows"),
    [
        ({"kv_dtype": "uint16", "rows_dtype": "uint8"}, "uint16", "uint8"),
        ({"kv_dtype": "float32", "rows_dtype": "float32"}, "float32", "float32"),
        ({"precision": "w8a8", "rows_dtype": "uint16", "method": "percentile", "percentile": 99.9}, "uint8", "uint16"),
        ({"precision": "w8a8", "method": "mse"}, "uint8", "uint16"),
    ],
)
def test_other_dtypes_and_methods(
    tmp_path: Path, exported: Exported, tokens_dir: Path, options: dict, cache: str, rows: str
) -> None:
    checkpoint, directory = exported["meki"]
    config = CalibrateConfig(sensitivity=False, **QUICK, **LENIENT, **options)
    made = calibrate(directory, checkpoint, tokens_dir, tmp_path / "out", config)
    spec = spec_of(tmp_path / "out")
    assert spec.prefill.by_role("past_value")[1].dtype == cache and spec.prefill.by_role("memory_rows")[0].dtype == rows
    assert made.metrics["top1_agreement"] > 0.6
    if rows != "float32":
        with RomReader(tmp_path / "out/rom.safetensors") as reader:
            assert reader.spec.segments[0].codec == {"uint8": "static8", "uint16": "static16"}[rows]


def test_a_stopped_run_goes_on_and_sees_the_same(
    tmp_path: Path, calibrated: Path, mixed: Mixed, tokens_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folded, exported = mixed
    monkeypatch.setattr(samples, "SAVE_EVERY", 1)
    calls = []
    original = samples._Watching.run

    def stop(self: object, *arguments: object) -> object:
        calls.append(1)
        if len(calls) == 13:  # in the third window
            raise KeyboardInterrupt
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(samples._Watching, "run", stop)
        with pytest.raises(KeyboardInterrupt):
            calibrate(exported, folded, tokens_dir, tmp_path / "out", CalibrateConfig(**QUICK))
    _, progress = Observations.load(tmp_path / "out" / PARTIAL / "ranges.npz")
    assert progress == {"windows": 2}
    calibrate(exported, folded, tokens_dir, tmp_path / "out", CalibrateConfig(**QUICK))
    graphs = ("graph_spec.json", "decode.onnx", "prefill.onnx", "weights.data")
    for name in (*graphs, "rom_2.safetensors", "decode.encodings"):
        assert (tmp_path / "out" / name).read_bytes() == (calibrated / name).read_bytes()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, exported: Exported, tokens_dir: Path) -> Path:
    """A calibration of the MeKi model whose ranges serve others; do not change it."""
    checkpoint, directory = exported["meki"]
    out = tmp_path_factory.mktemp("base") / "out"
    calibrate(directory, checkpoint, tokens_dir, out, CalibrateConfig(**QUICK, **LENIENT))
    return out


def test_ranges_serve_another_precision(
    tmp_path: Path, base: Path, exported: Exported, tokens_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, directory = exported["meki"]
    config = CalibrateConfig(precision="w8a8", sensitivity=False, **QUICK, **LENIENT)
    calibrate(directory, checkpoint, tokens_dir, tmp_path / "anew", config)
    monkeypatch.setattr(samples, "observe", None)  # a float graph that is observed again would fail
    calibrate(directory, checkpoint, tokens_dir, tmp_path / "served", config, ranges_from=base)
    for name in ("graph_spec.json", "decode.onnx", "weights.data"):
        assert (tmp_path / "anew" / name).read_bytes() == (tmp_path / "served" / name).read_bytes()
    for options, what in (
        ({**QUICK, "samples": 6}, "collected with samples 5, not 6"),
        ({**QUICK, "window_length": 41}, "collected with window_length 40, not 41"),
    ):
        with pytest.raises(UserError, match=what):
            calibrate(directory, checkpoint, tokens_dir, tmp_path / "no", CalibrateConfig(**options), ranges_from=base)
    with pytest.raises(UserError, match="without the histograms that the method mse needs"):
        config = CalibrateConfig(method="mse", **QUICK)
        calibrate(directory, checkpoint, tokens_dir, tmp_path / "mse", config, ranges_from=base)
    checkpoint, directory = exported["dense"]
    with pytest.raises(UserError, match="another export directory"):
        calibrate(directory, checkpoint, tokens_dir, tmp_path / "no", CalibrateConfig(**QUICK), ranges_from=base)
    with pytest.raises(UserError, match="output of `meki-edge export`"):
        calibrate(directory, checkpoint, tokens_dir, tmp_path / "no", CalibrateConfig(**QUICK), ranges_from=directory)


def test_a_gate_that_is_not_passed(tmp_path: Path, base: Path, exported: Exported, tokens_dir: Path) -> None:
    checkpoint, directory = exported["meki"]

    def run(out: str, **limits: float) -> manifest.Manifest:
        config = CalibrateConfig(precision="w4a16", **QUICK, **limits)
        return calibrate(directory, checkpoint, tokens_dir, tmp_path / out, config, ranges_from=base)

    with pytest.raises(UserError) as caught:
        run("out", max_perplexity_increase=-0.9, min_top1_agreement=1.0)
    assert "the accuracy gate failed: perplexity increase is" in caught.value.what
    assert "top-1 agreement is" in caught.value.what and "the limit is 1.0000" in caught.value.what
    page = Path(caught.value.where)
    assert page.is_file() and "NO" in page.read_text(encoding="utf-8")
    assert page.parent.name == PARTIAL and not (tmp_path / "out/manifest.json").exists()
    found = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert [limit["met"] for limit in found["limits"]] == [False, False]
    made = run("out", **LENIENT)
    assert made.metrics["precision"] == "w4a16", "limits only judge: the same work passes with others"
    with pytest.raises(UserError, match="the accuracy gate failed"):
        run("out", max_perplexity_increase=-0.9)


def test_a_gate_that_sees_little_says_so(
    tmp_path: Path, base: Path, exported: Exported, tokens_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, directory = exported["meki"]
    short = tmp_path / "short"
    shutil.copytree(tokens_dir, short)
    _replace(short, tokens.VALIDATION, tokens.open_shards(tokens_dir).validation[:130])
    config = CalibrateConfig(sensitivity=False, **{**QUICK, "gate_windows": 9}, **LENIENT)
    made = calibrate(directory, checkpoint, short, tmp_path / "out", config)
    told = " ".join(capsys.readouterr().err.split())
    assert "the validation text has 3 windows of 40 tokens: the gate sees those, not 9" in told
    assert "the gate sees 120 tokens, and fewer than 2,000 say little" in told
    assert (made.metrics["gate_windows"], made.metrics["tokens"]) == (3, 120)
    notes = read_json(tmp_path / "out/calibration_report.json")["notes"]
    assert len(notes) == 3 and " ".join(notes[1:]) in told


def test_a_perplexity_that_falls_is_no_proof() -> None:
    """Exit codes are those of the limit alone; what is said is that chance met it."""

    def found(perplexity: float, limit: float) -> tuple[bool, bool]:
        accuracy = Accuracy(
            tokens=9, float_perplexity=10.0, perplexity=perplexity, top1_agreement=1.0, decode_top1_agreement=1.0
        )
        first, second = limits(accuracy, max_perplexity_increase=limit, min_top1_agreement=0.5)
        assert second.is_clear
        return first.met, first.is_clear

    assert found(10.5, 0.1) == found(9.5, 0.1) == found(9.95, 0.0) == (True, True)
    assert found(8.9, 0.1) == found(9.8, 0.0) == (True, False)
    assert found(11.5, 0.1) == (False, True)


def test_sensitive_layers_are_kept_finer(
    tmp_path: Path, base: Path, exported: Exported, tokens_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, directory = exported["meki"]

    def run(out: str, **options: object) -> tuple[manifest.Manifest, list[dict]]:
        config = CalibrateConfig(precision="w4a16", **QUICK, **LENIENT, **options)
        made = calibrate(directory, checkpoint, tokens_dir, tmp_path / out, config, ranges_from=base)
        return made, read_json(tmp_path / out / "calibration_report.json")["units"]

    plain, units = run("plain")
    assert [unit["scheme"] for unit in units] == ["w4a16"] * 3 + ["w8a16"]
    losses = [unit["sensitivity"]["divergence"] for unit in units]
    assert all(loss > 0 for loss in losses) and losses[3] < min(losses[:3]), "8 bits lose less than 4"
    worst = losses.index(max(losses))
    before = sum(unit["bytes"] for unit in units)
    extra = units[worst]["bytes"]
    made, units = run("budget", budget_bytes=extra)
    assert before < sum(unit["bytes"] for unit in units) <= before + extra
    assert [unit["scheme"] == "w8a16" for unit in units] == [index in (worst, 3) for index in range(4)]
    assert plain.metrics["weights_bytes"] < made.metrics["weights_bytes"]
    assert "divergence_left" not in plain.metrics
    assert min(losses) < made.metrics["divergence_left"] < sum(losses)
    made, units = run("target", max_divergence=0.0)
    assert all(unit["scheme"] == "w8a16" for unit in units) and made.metrics["units_raised"] == 3
    assert made.metrics["top1_agreement"] >= plain.metrics["top1_agreement"]
    left = f"still sum to {made.metrics['divergence_left']:.3g} nats, wanted 0 (all that gains by it is raised already)"
    assert left in " ".join(capsys.readouterr().err.split())
    assert left in (tmp_path / "target/calibration_report.html").read_text(encoding="utf-8")
    made, _ = run("both", max_divergence=0.0, budget_bytes=extra)
    left = f"{made.metrics['divergence_left']:.3g} nats, wanted 0 (the budget is spent)"
    assert left in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("budget", "target", "expected", "left"),
    [
        (None, 0.0, {0, 1, 2}, 2.5),
        (None, 7.5, {2}, 7.5),
        (None, 4.5, {2, 1}, 4.5),
        (10, None, {2}, 7.5),
        (45, None, {2, 0}, 5.5),
        (0, None, set(), 11.5),
        (50, 4.0, {2, 0}, 5.5),
        (1000, 100.0, set(), 11.5),
    ],
)
def test_what_saves_most_a_byte_is_raised_first(
    budget: int | None, target: float | None, expected: set[int], left: float
) -> None:
    """Saved: 2 nats for 35 bytes, 3 for 50, 4 for 10, and nothing (unit 3)."""
    losses, finer = {0: 2.5, 1: 3.5, 2: 4.5, 3: 1.0}, {0: 0.5, 1: 0.5, 2: 0.5, 3: 1.0}
    extra = {0: 35, 1: 50, 2: 10, 3: 0}
    found = choose(losses, finer, extra, budget_bytes=budget, max_divergence=target)
    assert (found.raised, found.divergence, found.is_best) == (expected, left, expected == {0, 1, 2})


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"precision": "w8"}, "unknown precision 'w8'"),
        ({"method": "entropy"}, "'entropy' is not possible"),
        ({"kv_dtype": "int8"}, "'int8' is not possible"),
        ({"kv_dtype": "float16"}, "'float16' is not possible"),
        ({"precision": "fp16", "kv_dtype": "uint8"}, "'uint8' is not possible"),
        ({"precision": "fp16", "rows_dtype": "uint8"}, "'uint8' is not possible"),
        ({"samples": 0}, "--samples is 0"),
        ({"percentile": 40.0}, "--percentile is 40"),
        ({"min_top1_agreement": 1.5}, "--min-top1-agreement is 1.5"),
        ({"max_perplexity_increase": float("nan")}, "--max-perplexity-increase is nan"),
        ({"max_divergence": float("nan")}, "--max-divergence is nan"),
        ({"precision": "fp16", "budget_bytes": 10}, "nothing finer than fp16"),
        ({"precision": "w8a8", "budget_bytes": 10}, "takes no more bytes"),
        ({"budget_bytes": 10, "sensitivity": False}, "without measuring them"),
        ({"window_length": 161}, "windows of 161 tokens do not fit the context of 160"),
        ({"window_length": 8, "decode_steps": 8}, "8 decode steps leave nothing to prefill of windows of 8 tokens"),
        ({"decode_steps": 160}, "160 decode steps leave nothing to prefill of windows of 160 tokens"),
        ({"samples": 10**8}, "100000000 samples, but windows of 160 tokens start at"),
        ({"gate_windows": 0}, "--gate-windows is 0"),
    ],
)
def test_options(tmp_path: Path, exported: Exported, tokens_dir: Path, options: dict, what: str) -> None:
    checkpoint, directory = exported["meki"]
    with pytest.raises(UserError) as caught:
        calibrate(directory, checkpoint, tokens_dir, tmp_path / "out", CalibrateConfig(**options))
    assert what in caught.value.what and not (tmp_path / "out").exists()


def test_inputs_that_do_not_belong_together(tmp_path: Path, exported: Exported, tokens_dir: Path) -> None:
    checkpoint, directory = exported["meki"]
    config = CalibrateConfig(**QUICK)
    with pytest.raises(UserError, match="exported from another checkpoint"):
        calibrate(directory, exported["dense"][0], tokens_dir, tmp_path / "out", config)
    with pytest.raises(UserError, match="output of `meki-edge reparam`"):
        calibrate(checkpoint, checkpoint, tokens_dir, tmp_path / "out", config)
    with pytest.raises(UserError, match="a calibration window needs 160"):
        short = tmp_path / "short"
        shutil.copytree(tokens_dir, short)
        _replace(short, tokens.TRAIN, np.zeros(100, "<u2"))
        calibrate(directory, checkpoint, short, tmp_path / "out", CalibrateConfig())
    from export.graph import ExportConfig, export

    half = ExportConfig(context_length=32, prefill_tokens=8, verify_tokens=10, kv_dtype="float16")
    export(exported["dense"][0], tokens_dir, tmp_path / "half", half)
    with pytest.raises(UserError, match="calibration starts from float32"):
        calibrate(tmp_path / "half", exported["dense"][0], tokens_dir, tmp_path / "out", config)


def _replace(directory: Path, shard: str, ids: np.ndarray) -> None:
    old = manifest.load(directory)
    files = {name: entry.role for name, entry in old.files.items()}
    output = manifest.StageOutput(directory.with_name("made"), stage=old.stage, config={}, inputs={})
    for name in files:
        shutil.copyfile(directory / name, output.partial / name)
    ids.tofile(output.partial / shard)
    output.finish(roles=files, metrics=old.metrics)
    shutil.rmtree(directory)
    directory.with_name("made").rename(directory)


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


def test_the_command(tmp_path: Path, base: Path, exported: Exported, tokens_dir: Path) -> None:
    """Exit code 1 with the table when the gate fails; JSON, and nothing else on stdout, when it passes."""
    checkpoint, directory = exported["meki"]
    command = [sys.executable, "-m", "meki_edge.cli", "calibrate", directory, checkpoint, tokens_dir]
    command += ["-o", tmp_path / "out", "--json", "--no-sensitivity", "--ranges-from", base]
    command += ["--samples", 5, "--window-length", 40, "--gate-windows", 2, "--decode-steps", 3]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command), *more], capture_output=True, text=True)

    other = run("--percentile", "99")
    assert other.returncode == 1 and "a percentile, but the method is minmax" in other.stderr
    failed = run("--max-perplexity-increase", "-0.5")
    assert failed.returncode == 1 and "gate failed" in failed.stderr
    assert "top-1 agreement" in failed.stderr and failed.stdout == ""
    passed = run()
    assert passed.returncode == 0, passed.stderr
    assert json.loads(passed.stdout)["precision"] == "w8a16"
    assert manifest.load(tmp_path / "out").metrics["precision"] == "w8a16"
