"""A real QNN compilation and the NPU simulator, on a tiny MeKi model."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export import qnn_local
from export.graph import ExportConfig, export
from export.qnn_jobs import Jobs
from export.qnn_local import CompileConfig, compile_local, qnn_available
from meki_edge import manifest
from meki_edge.errors import UserError
from meki_edge.files import FREE_SPACE
from meki_edge.manifest import PARTIAL, StageOutput

Exported = dict[str, tuple[Path, Path]]
CONFIG = CompileConfig(chipset="8 elite", verify_steps=2)
UNSHARED = dataclasses.replace(CONFIG, share_weights=False)
needs_qnn = pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")


def wrapped(path: Path) -> str:
    """The binary that a wrapper, which must hold nothing else, names."""
    (node,) = onnx.load(path).graph.node
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert node.op_type == "EPContext"
    return attributes["ep_cache_context"].decode()


@needs_qnn
def test_compile_simulate_and_resume(
    tmp_path: Path, tokens_dir: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, directory = exported["meki"]
    out = tmp_path / "npu"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Jobs, "simulate", interrupted)
        compile_local(directory, checkpoint, tokens_dir, out, UNSHARED)
    written = {file.name: file.stat().st_mtime_ns for file in (out / PARTIAL).iterdir()}
    assert {"decode_qnn.bin", "decode_ctx.onnx", "prefill_qnn.bin", "prefill_ctx.onnx"} < set(written)

    made = compile_local(directory, checkpoint, tokens_dir, out, UNSHARED)
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
        assert wrapped(out / f"{name}_ctx.onnx") == binary.name
        assert made.metrics[f"simulator_{name}_min_cosine"] > 0.999
        assert made.metrics[f"simulator_{name}_max_abs_error"] < 0.2
    assert made.metrics["simulator_prefill_tokens"] == 16 and made.metrics["simulator_decode_tokens"] == 2
    assert (made.metrics["chipset"], made.metrics["hexagon_arch"]) == ("sm8750", "v79")
    assert (made.metrics["precision"], made.metrics["parts"]) == ("fp16", 1)
    assert made.metrics["qnn_sdk_version"].startswith("v2.") and "onnxruntime-qnn" in made.versions
    assert made.metrics["decode_compile_peak_rss_bytes"] > 50_000_000

    same = dataclasses.replace(UNSHARED, chipset="SM8750")
    assert compile_local(directory, checkpoint, tokens_dir, out, same) == made
    with pytest.raises(UserError, match="config.chipset was 'sm8750' and is now 'sm8650'"):
        compile_local(directory, checkpoint, tokens_dir, out, dataclasses.replace(UNSHARED, chipset="sm8650"))


@needs_qnn
def test_parts_share_their_weights(
    tmp_path: Path, tokens_dir: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts with a float16 cache: checked apart, then a binary a part; resumed in the middle of the last step."""
    checkpoint, out = exported["meki"][0], tmp_path / "npu"
    shapes = ExportConfig(context_length=48, prefill_tokens=16, verify_tokens=20, parts=2, kv_dtype="float16")
    export(checkpoint, tokens_dir, tmp_path / "export", shapes)
    compile_one = Jobs.compile

    def interrupted(jobs: Jobs, models: list[Path], directory: Path, binary: str) -> dict:
        if binary == "model_1":
            raise KeyboardInterrupt
        return compile_one(jobs, models, directory, binary)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Jobs, "compile", interrupted)
        compile_local(tmp_path / "export", checkpoint, tokens_dir, out, CONFIG)
    first = (out / PARTIAL / "model_0_qnn.bin").stat().st_mtime_ns
    made = compile_local(tmp_path / "export", checkpoint, tokens_dir, out, CONFIG)
    assert (out / "model_0_qnn.bin").stat().st_mtime_ns == first, "a finished part was compiled again"
    assert {name: entry.role for name, entry in made.files.items()} == {
        "compile.log": "compile_log",
        **{f"{g}_{i}_ctx.onnx": f"{g}_context_{i}" for g in ("prefill", "decode") for i in range(2)},
        **{f"model_{i}_qnn.bin": f"model_binary_{i}" for i in range(2)},
    }
    assert {file.name for file in out.iterdir()} == {*made.files, manifest.FILE_NAME}
    for graph in ("prefill", "decode"):
        assert made.metrics[f"simulator_{graph}_min_cosine"] > 0.999
        for index in range(2):
            assert wrapped(out / f"{graph}_{index}_ctx.onnx") == f"model_{index}_qnn.bin"
    for index in range(2):
        shared = made.metrics[f"model_{index}_binary_bytes"]
        alone = [made.metrics[f"{graph}_{index}_binary_bytes"] for graph in ("prefill", "decode")]
        assert shared == (out / f"model_{index}_qnn.bin").stat().st_size < sum(alone)
    log = (out / "compile.log").read_text()
    assert "compiling decode_1.onnx and prefill_1.onnx for sm8750" in log and "simulator's check" in log


@needs_qnn
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed by a signal that it cannot catch, while the worker is busy."""
    site, pid = tmp_path / "site", tmp_path / "pid"
    site.mkdir()
    (site / "onnxruntime_qnn.py").write_text(
        "import os, pathlib, time\n\n\ndef get_library_path():\n"
        f"    pathlib.Path({str(pid)!r}).write_text(f'{{os.getpid()}} ')\n    time.sleep(600)\n"
    )
    script = (
        "from pathlib import Path\nfrom export.qnn_jobs import Jobs\nfrom export.targets import chip\n"
        f"Jobs(Path({str(tmp_path)!r}), chip('sm8750'), 1).compile([Path('x.onnx')], Path({str(tmp_path)!r}), 'x')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=Path(__file__).parents[2]) as parent:
        try:
            _await(lambda: pid.exists() and pid.read_text().endswith(" "))
        finally:
            parent.kill()
    status = Path(f"/proc/{int(pid.read_text())}/stat")
    _await(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z")


def _await(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it does not happen")


@needs_qnn
def test_a_part_that_devices_refuse(
    tmp_path: Path, tokens_dir: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, directory = exported["dense"]
    monkeypatch.setattr(qnn_local, "LIMIT_BYTES", 50_000)
    with pytest.raises(UserError, match="devices are said to take 2 GB a binary") as caught:
        compile_local(directory, checkpoint, tokens_dir, tmp_path / "npu", CONFIG)
    assert caught.value.where.endswith("decode.onnx") and "export again with --parts 3 or more" in caught.value.fix
    assert not list((tmp_path / "npu").rglob("*.bin"))


@needs_qnn
@pytest.mark.parametrize(("config", "name", "size"), [(CONFIG, "model", 2), (UNSHARED, "decode", 1)])
def test_a_binary_that_devices_refuse(
    tmp_path: Path,
    tokens_dir: Path,
    exported: Exported,
    monkeypatch: pytest.MonkeyPatch,
    config: CompileConfig,
    name: str,
    size: int,
) -> None:
    """Its weights are few enough; what the compiler made of them is not."""
    checkpoint, directory = exported["dense"]

    def compiled(jobs: Jobs, models: list[Path], out: Path, binary: str) -> dict:
        return {"compile_seconds": 0, "qnn_sdk_version": "", "binary_bytes": len(models) * 1_500_000_000}

    monkeypatch.setattr(Jobs, "compile", compiled)
    monkeypatch.setattr(qnn_local, "LIMIT_BYTES", 2_000_000_000 if size == 2 else 1_400_000_000)
    config = dataclasses.replace(config, verify_steps=0)
    with pytest.raises(UserError, match=f"the binary takes {1.5 * size:.2f} GB; devices are said to take") as caught:
        compile_local(directory, checkpoint, tokens_dir, tmp_path / "npu", config)
    assert caught.value.where.endswith(f"{name}_qnn.bin") and "export again with --parts 2 or more" in caught.value.fix
    assert not (tmp_path / "npu" / manifest.FILE_NAME).exists()


def test_which_graphs_compute_in_float(tmp_path: Path, exported: Exported) -> None:
    pytest.importorskip("onnxruntime_qnn")
    from export.qnn_worker import computes_in_float

    assert computes_in_float(exported["dense"][1] / "decode.onnx")
    value = helper.make_tensor_value_info
    for quantized in (True, False):
        nodes = [helper.make_node("DequantizeLinear", ["x", "s", "z"], ["a"])] if quantized else []
        nodes.append(helper.make_node("MatMul", ["a" if quantized else "x", "w"], ["y"]))
        model = helper.make_model(
            helper.make_graph(
                nodes,
                "product",
                [value("x", TensorProto.UINT16 if quantized else TensorProto.FLOAT, [1, 2])],
                [value("y", TensorProto.FLOAT, [1, 2])],
                [
                    numpy_helper.from_array(np.float32(1), "s"),
                    numpy_helper.from_array(np.uint16(0), "z"),
                    numpy_helper.from_array(np.eye(2, dtype=np.float32), "w"),
                ],
            )
        )
        onnx.save(model, tmp_path / "product.onnx")
        assert computes_in_float(tmp_path / "product.onnx") != quantized


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


def compile_command(exported: Exported, tokens_dir: Path, out: Path) -> list[str]:
    checkpoint, directory = exported["dense"]
    command = [sys.executable, "-m", "meki_edge.cli", "compile", directory, checkpoint, tokens_dir]
    return [*map(str, command), "-o", str(out), "--verify-steps=0"]


def told(command: list[str]) -> str:
    """What a command that must fail says."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    return " ".join(done.stderr.split())


@needs_qnn
def test_a_full_disk(tmp_path: Path, tokens_dir: Path, exported: Exported) -> None:
    """A real one, of 150 kB, in a mount namespace of the command's own; the binary takes 279 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    alone = ["unshare", "--mount", "--map-root-user", "sh", "-c", 'mount -t tmpfs -o size=150k tmpfs "$0" && exec "$@"']
    if shutil.which("unshare") is None or subprocess.run([*alone, disk, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no process mount a file system of its own")
    said = told([*alone, str(disk), *compile_command(exported, tokens_dir, disk / "npu")])
    assert "for sm8750 failed (exit status 1): the disk is full, 0.0 MB are free; the log ends with:" in said
    assert f"where: {disk / 'npu' / PARTIAL} do: {FREE_SPACE}" in said and "need less memory" not in said


@needs_qnn
def test_a_binary_that_cannot_be_written(tmp_path: Path, tokens_dir: Path, exported: Exported) -> None:
    """Not for want of space: the process may not write files of more than 100,000 bytes. Later it may."""
    command = compile_command(exported, tokens_dir, tmp_path / "npu")
    limit = "import os, resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    said = told([sys.executable, "-c", f"{limit}os.execv(sys.argv[1], sys.argv[1:])", *command])
    assert "failed (exit status 1): a file could not be written, " in said and "Failed to write context cache" in said
    assert f"where: {tmp_path / 'npu' / PARTIAL} do: {FREE_SPACE}" in said and "the disk is full" not in said
    subprocess.run(command, capture_output=True, check=True)
    assert (tmp_path / "npu/model_qnn.bin").stat().st_size > 150_000


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
    from export.agreement import agreement

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
