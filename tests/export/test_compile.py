"""A real QNN compilation and the NPU simulator, on a tiny MeKi model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from export import qnn_local
from export.qnn_local import CompileConfig, compile_local, qnn_available
from meki_edge import manifest
from meki_edge.errors import UserError
from meki_edge.manifest import PARTIAL, StageOutput

Exported = dict[str, tuple[Path, Path]]
CONFIG = CompileConfig(chipset="8 elite", verify_steps=2)
needs_qnn = pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")


@needs_qnn
def test_compile_simulate_and_resume(
    tmp_path: Path, tokens_dir: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, directory = exported["meki"]
    out = tmp_path / "npu"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(qnn_local._Jobs, "simulate", interrupted)
        compile_local(directory, checkpoint, tokens_dir, out, CONFIG)
    written = {file.name: file.stat().st_mtime_ns for file in (out / PARTIAL).iterdir()}
    assert {"decode_qnn.bin", "decode_ctx.onnx", "prefill_qnn.bin", "prefill_ctx.onnx"} < set(written)

    made = compile_local(directory, checkpoint, tokens_dir, out, CONFIG)
    assert {name: entry.role for name, entry in made.files.items()} == {
        "compile.log": "compile_log",
        "decode_ctx.onnx": "decode_context",
        "decode_qnn.bin": "decode_binary",
        "prefill_ctx.onnx": "prefill_context",
        "prefill_qnn.bin": "prefill_binary",
    }
    assert not (out / PARTIAL).exists()
    for name in ("decode", "prefill"):
        binary = out / f"{name}_qnn.bin"
        assert binary.stat().st_mtime_ns == written[binary.name], "a finished graph was compiled again"
        assert made.metrics[f"{name}_binary_bytes"] == binary.stat().st_size > 10_000
        (node,) = onnx.load(out / f"{name}_ctx.onnx").graph.node
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert node.op_type == "EPContext" and attributes["ep_cache_context"].decode() == binary.name
        assert made.metrics[f"simulator_{name}_min_cosine"] > 0.999
        assert made.metrics[f"simulator_{name}_max_abs_error"] < 0.2
    assert made.metrics["simulator_prefill_tokens"] == 16 and made.metrics["simulator_decode_tokens"] == 2
    assert (made.metrics["chipset"], made.metrics["hexagon_arch"]) == ("sm8750", "v79")
    assert made.metrics["qnn_sdk_version"].startswith("v2.") and "onnxruntime-qnn" in made.versions
    assert made.metrics["decode_compile_peak_rss_bytes"] > 50_000_000

    same = CompileConfig(chipset="SM8750", verify_steps=2)
    assert compile_local(directory, checkpoint, tokens_dir, out, same) == made
    with pytest.raises(UserError, match="config.chipset was 'sm8750' and is now 'sm8650'"):
        compile_local(directory, checkpoint, tokens_dir, out, CompileConfig(chipset="sm8650", verify_steps=2))


@needs_qnn
def test_logits_that_do_not_follow(
    tmp_path: Path, tokens_dir: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, directory = exported["dense"]
    monkeypatch.setattr(qnn_local, "MIN_COSINE", 1.1)
    with pytest.raises(UserError, match="simulator's logits do not follow ONNX Runtime's"):
        compile_local(directory, checkpoint, tokens_dir, tmp_path / "npu", CONFIG)
    assert not (tmp_path / "npu" / manifest.FILE_NAME).exists()


@needs_qnn
def test_a_graph_that_the_npu_cannot_run(tmp_path: Path, tokens_dir: Path, exported: Exported) -> None:
    checkpoint, directory = exported["dense"]
    source = manifest.load(directory)
    output = StageOutput(tmp_path / "export", stage="export", config={}, inputs={"checkpoint": checkpoint})
    for name in source.files:
        shutil.copyfile(directory / name, output.partial / name)
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Det", ["x"], ["y"])],
            "determinant",
            [helper.make_tensor_value_info("x", TensorProto.DOUBLE, [1, 4, 4])],
            [helper.make_tensor_value_info("y", TensorProto.DOUBLE, [1])],
        ),
        opset_imports=[helper.make_opsetid("", 22)],
        ir_version=10,
    )
    onnx.save(model, output.partial / "decode.onnx")
    output.finish(roles={name: entry.role for name, entry in source.files.items()}, metrics={})
    with pytest.raises(UserError) as caught:
        compile_local(tmp_path / "export", checkpoint, tokens_dir, tmp_path / "npu", CONFIG)
    assert "compiling decode.onnx for sm8750 failed (exit status 1)" in caught.value.what
    assert "CPU EP" in caught.value.what, "the end of the log says why"
    assert Path(caught.value.where) == tmp_path / "npu" / PARTIAL / "compile.log"
    assert Path(caught.value.where).is_file()


@needs_qnn
def test_a_crash_is_called_a_crash(
    tmp_path: Path, tokens_dir: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, directory = exported["dense"]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    with pytest.raises(UserError, match=r"compiling decode.onnx for sm8750 crashed \(signal SIGSEGV\)"):
        compile_local(directory, checkpoint, tokens_dir, tmp_path / "npu", CONFIG)


@needs_qnn
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CompileConfig(chipset="sm8751"), "unknown chip 'sm8751'; did you mean 'sm8750'"),
        (CompileConfig(optimization_level=0), "optimization_level is 0"),
        (CompileConfig(verify_steps=-1), "verify_steps is -1"),
    ],
)
def test_options(tmp_path: Path, tokens_dir: Path, exported: Exported, config: CompileConfig, expected: str) -> None:
    checkpoint, directory = exported["dense"]
    with pytest.raises(UserError) as caught:
        compile_local(directory, checkpoint, tokens_dir, tmp_path / "npu", config)
    assert expected in caught.value.what and not (tmp_path / "npu").exists()


@needs_qnn
def test_another_checkpoint(tmp_path: Path, tokens_dir: Path, exported: Exported) -> None:
    _, directory = exported["dense"]
    with pytest.raises(UserError, match="exported from another checkpoint"):
        compile_local(directory, exported["meki"][0], tokens_dir, tmp_path / "npu", CONFIG)
    with pytest.raises(UserError, match="output of `meki-edge train`"):
        compile_local(exported["dense"][0], exported["dense"][0], tokens_dir, tmp_path / "npu", CONFIG)


def test_no_wheel_for_this_platform(
    tmp_path: Path, tokens_dir: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, directory = exported["dense"]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not qnn_available()
    with pytest.raises(UserError, match="onnxruntime-qnn is not installed"):
        compile_local(directory, checkpoint, tokens_dir, tmp_path / "npu", CONFIG)


@needs_qnn
def test_agreement_measures() -> None:
    from export.qnn_worker import agreement

    generator = np.random.default_rng(0)
    expected = generator.standard_normal((5, 9)).astype(np.float32)
    assert agreement(expected, expected) == {
        "tokens": 5,
        "min_cosine": pytest.approx(1),
        "max_abs_error": 0,
        "argmax_agreement": 1,
    }
    changed = expected.copy()
    changed[3] = -expected[3]
    measured = agreement(changed, expected)
    assert measured["min_cosine"] == pytest.approx(-1) and measured["argmax_agreement"] == 0.8
    assert measured["max_abs_error"] == pytest.approx(2 * np.abs(expected[3]).max())
    assert np.isnan(agreement(np.full_like(expected, np.nan), expected)["min_cosine"])
