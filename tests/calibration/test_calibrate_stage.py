"""The stage: its output, the rows' one quantization, resuming, ranges that serve again, and errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from calibration_outputs import LENIENT, decoder_of, replace_shard, spec_of
from tiny import QUICK_CALIBRATION as QUICK

from calibration import samples
from calibration.config import CalibrateConfig
from calibration.ranges import Observations
from calibration.stage import calibrate
from export.onnx_decoder import cpu_sessions
from meki_edge import manifest, tokens
from meki_edge.errors import UserError
from meki_edge.manifest import PARTIAL
from meki_edge.rom.reader import RomReader

Exported = dict[str, tuple[Path, Path]]
Mixed = tuple[Path, Path, Path]


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
        replace_shard(short, tokens.TRAIN, np.zeros(100, "<u2"))
        calibrate(directory, checkpoint, short, tmp_path / "out", CalibrateConfig())
    from export.graph import ExportConfig, export

    half = ExportConfig(context_length=32, prefill_tokens=8, verify_tokens=10, kv_dtype="float16")
    export(exported["dense"][0], tokens_dir, tmp_path / "half", half)
    with pytest.raises(UserError, match="calibration starts from float32"):
        calibrate(tmp_path / "half", exported["dense"][0], tokens_dir, tmp_path / "out", config)


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
