"""The harness with QNN's provider, in the NPU simulator of the `onnxruntime-qnn` wheel, against its CPU provider."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness import generate

from export.graph import ExportConfig, export
from export.qnn_local import CompileConfig, compile_local
from meki_edge import manifest, tokens
from meki_edge.device import runner
from meki_edge.device.bundle import open_bundle
from meki_edge.device.pack import PackConfig, pack
from meki_edge.errors import UserError

PACKAGE = importlib.util.find_spec("onnxruntime_qnn")
pytestmark = [
    pytest.mark.skipif(PACKAGE is None, reason="onnxruntime-qnn has no wheel for this platform"),
    pytest.mark.usefixtures("binary"),
]


@pytest.fixture(scope="module")
def library() -> Path:
    assert PACKAGE is not None and PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent


@pytest.fixture(scope="module")
def bundle(
    exported: dict[str, tuple[Path, Path]], tokens_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """MeKi in two parts with a float16 cache, compiled without sharing: what the simulator can load."""
    checkpoint = exported["meki"][0]
    directory = tmp_path_factory.mktemp("qnn")
    shapes = ExportConfig(context_length=64, prefill_tokens=8, verify_tokens=20, parts=2, kv_dtype="float16")
    export(checkpoint, tokens_dir, directory / "export", shapes)
    config = CompileConfig(optimization_level=1, verify_steps=0, share_weights=False)
    compile_local(directory / "export", checkpoint, tokens_dir, directory / "npu", config)
    pack(directory / "export", checkpoint, directory / "bundle", PackConfig(), compiled=directory / "npu")
    return directory / "bundle"


def qnn(library: Path) -> list[str]:
    provider = library / "libonnxruntime_providers_qnn.so"
    return ["--backend", "qnn", "--qnn-library", str(library / "libQnnHtp.so"), "--qnn-provider", str(provider)]


def test_a_bundle_with_npu_binaries(bundle: Path) -> None:
    names = {name for name in manifest.load(bundle).files if name.startswith("npu/")}
    parts = [f"npu/{graph}_{part}" for graph in ("prefill", "decode") for part in (0, 1)]
    assert names == {f"{part}_{kind}" for part in parts for kind in ("ctx.onnx", "qnn.bin")}
    assert open_bundle(bundle).metrics["parts"] == 2


@pytest.mark.parametrize("length", [3, 21])
def test_the_simulators_tokens_are_the_cpus(
    bundle: Path, library: Path, tokens_dir: Path, tmp_path: Path, length: int
) -> None:
    """float16 against float32: a random model's likeliest token is far enough from the second one."""
    prompt = tokens.open_shards(tokens_dir).validation[:length].tolist()
    expected = generate(bundle, tmp_path, prompt, 12)
    streamed: list[int] = []
    arguments = ["--bundle", str(bundle), "--prompt-file", str(tmp_path / "ids.txt"), "--max-new-tokens", "12"]
    found = runner.run_json(["generate", *arguments, *qnn(library), "--stream"], on_token=streamed.append)
    assert (found["backend"], expected["backend"]) == ("qnn", "cpu")
    assert (found["tensor_memory"], expected["tensor_memory"]) == ("copied", "host")
    # What the simulator prints is not taken for ids.
    assert streamed == found["generated_tokens"] == expected["generated_tokens"]
    assert all(step["rows_read"] > 0 for test in found["tests"] for step in test["steps"])


class Phone:
    """The memory of a phone (tests/phone_memory.c of the harness) around the simulator."""

    def __init__(self, directory: Path, stand_in: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory.mkdir()
        for name in ("libcdsprpc.so", "libQnnHtpPhone.so"):
            (directory / name).symlink_to(stand_in)
        (directory / "libQnnSystem.so").symlink_to(library / "libQnnSystem.so")
        self._log = directory / "log.json"
        provider = library / "libonnxruntime_providers_qnn.so"
        self.options = ["--backend", "qnn", "--qnn-library", str(directory / "libQnnHtpPhone.so")]
        self.options += ["--qnn-provider", str(provider)]
        monkeypatch.setenv("LD_LIBRARY_PATH", str(directory))
        monkeypatch.setenv("PHONE_QNN_LIBRARY", str(library / "libQnnHtp.so"))
        monkeypatch.setenv("PHONE_LOG", str(self._log))

    def counts(self) -> dict[str, int]:
        """What the last run did; nothing if it took no memory."""
        found = json.loads(self._log.read_text()) if self._log.exists() else {}
        self._log.unlink(missing_ok=True)
        return found


@pytest.fixture
def phone(binary: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Phone:
    build = binary.parent
    subprocess.run(["cmake", "--build", build, "--target", "phone_memory", "-j2"], check=True)
    return Phone(tmp_path / "phone", build / "tests/libphone_memory.so", library, monkeypatch)


def test_inputs_and_outputs_lie_in_memory_that_the_npu_sees(
    bundle: Path, phone: Phone, tokens_dir: Path, tmp_path: Path
) -> None:
    """The real provider registers each tensor's memory, and the NPU finds the caller's bytes by the handle alone."""
    prompt = tokens.open_shards(tokens_dir).validation[:21].tolist()

    def run(*options: str) -> tuple[dict[str, Any], dict[str, int]]:
        return generate(bundle, tmp_path, prompt, 12, *phone.options, *options), phone.counts()

    expected = generate(bundle, tmp_path, prompt, 12)["generated_tokens"]
    spec = json.loads((bundle / "graph_spec.json").read_text())
    tensors = {
        name: sum(len(part["inputs"]) + len(part["outputs"]) for part in spec[name]["parts"])
        for name in ("prefill", "decode")
    }
    for options in ([], ["--npu-memory", "shared"]):
        report, counts = run(*options)
        assert (report["tensor_memory"], report["generated_tokens"]) == ("shared", expected)
        # Three chunks of the prompt, the first two with rows in either slot; then eleven tokens.
        assert counts["runs"] == 2 * (3 + 11)
        assert counts["shared_tensors"] == 3 * tensors["prefill"] + 11 * tensors["decode"]
        assert counts["copied_tensors"] == 0
        assert 0 < counts["allocated"] == counts["freed"]
        # Once for each tensor of a graph, with both row slots of the prefill: not once for each run.
        assert counts["registered"] == counts["deregistered"]
        assert sum(tensors.values()) <= counts["registered"] <= sum(tensors.values()) + 2
    report, counts = run("--npu-memory", "copied")
    assert (report["tensor_memory"], report["generated_tokens"], counts) == ("copied", expected, {})


def test_runners_on_the_npu_live_in_one_process(bundle: Path, binary: Path, phone: Phone, tmp_path: Path) -> None:
    """By the C API: two at a time, closed in either order, opened again; one with shared memory, one without."""
    subprocess.run(["cmake", "--build", binary.parent, "--target", "test_c_api", "-j2"], check=True)
    command = [binary.parent / "tests/test_c_api", bundle, runner.find_ort_library(), "npu", *phone.options[3::2]]
    done = subprocess.run([*command, "5", "6", "7"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = " ".join(map(str, generate(bundle, tmp_path, [5, 6, 7], 3)["generated_tokens"]))
    assert [line for line in done.stdout.splitlines() if "LIBNATIVE" not in line] == [expected] * 5
    counts = phone.counts()
    assert counts["allocated"] == counts["freed"] and counts["shared_tensors"] > 0 < counts["copied_tensors"]


def test_memory_that_cannot_be_shared(
    bundle: Path, library: Path, phone: Phone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*options: str) -> UserError:
        with pytest.raises(UserError) as caught:
            generate(bundle, tmp_path, [1, 2], 1, *options)
        return caught.value

    monkeypatch.setenv("PHONE_MEMORY_BYTES", "10000")
    full = refusal(*phone.options)
    assert "bytes of memory to share with the NPU: rpcmem_alloc() failed" in full.what
    assert full.where == "libcdsprpc.so" and "--npu-memory copied" in full.fix
    counts = phone.counts()
    assert counts["allocated"] == counts["freed"] > 0
    assert "--npu-memory takes auto, shared or copied" in refusal(*phone.options, "--npu-memory", "both").what
    assert "need --backend qnn" in refusal("--npu-memory", "shared").what
    monkeypatch.delenv("PHONE_MEMORY_BYTES")
    unregistered = refusal(*qnn(library))  # the simulator alone
    assert "memRegister() failed" in unregistered.what and "--npu-memory copied" in unregistered.fix
    monkeypatch.delenv("LD_LIBRARY_PATH")
    missing = refusal(*qnn(library), "--npu-memory", "shared")
    assert "no memory can be shared with the NPU" in missing.what and missing.where == "libcdsprpc.so"


def test_what_is_missing_is_said(
    bundle: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(directory: Path, *options: str) -> UserError:
        with pytest.raises(UserError) as caught:
            generate(directory, tmp_path, [1, 2], 1, *options)
        return caught.value

    backend, provider = qnn(library)[2:4], qnn(library)[4:]
    assert "needs --qnn-library" in refusal(bundle, "--backend", "qnn").what
    assert "--backend takes cpu or qnn" in refusal(bundle, "--backend", "gpu").what
    assert "need --backend qnn" in refusal(bundle, *backend).what
    built_in = refusal(bundle, "--backend", "qnn", *backend)
    assert "not supported in this build" in built_in.what and "--qnn-provider" in built_in.fix
    missing = refusal(bundle, "--backend", "qnn", "--qnn-library", "nothing.so", *provider)
    assert "cannot load the QNN library" in missing.what and missing.where == "nothing.so"
    other = refusal(bundle, "--backend", "qnn", *backend, "--qnn-provider", str(library / "libQnnIr.so"))
    assert "CreateEpFactories" in other.what and other.where.endswith("libQnnIr.so")
    monkeypatch.chdir(library)  # a relative path is one from here
    relative = ["--qnn-provider", "libonnxruntime_providers_qnn.so"]
    assert len(generate(bundle, tmp_path, [1, 2], 1, "--backend", "qnn", *backend, *relative)["generated_tokens"]) == 1
    shared = shutil.copytree(bundle, tmp_path / "shared")
    (shared / "npu/decode_0_qnn.bin").rename(shared / "npu/model_0_qnn.bin")
    error = refusal(shared, *qnn(library))
    assert "the NPU's simulator cannot load" in error.what and "--no-share-weights" in error.fix
    bare = shutil.copytree(bundle, tmp_path / "bare", ignore=shutil.ignore_patterns("npu"))
    error = refusal(bare, *qnn(library))
    assert error.what == "the bundle has no NPU binary of decode_0.onnx" and "meki-edge compile" in error.fix
