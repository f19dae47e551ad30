"""The harness with QNN's provider, in the NPU simulator of the `onnxruntime-qnn` wheel, against its CPU provider."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from test_runner import generate

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
    # What the simulator prints is not taken for ids.
    assert streamed == found["generated_tokens"] == expected["generated_tokens"]
    assert all(step["rows_read"] > 0 for test in found["tests"] for step in test["steps"])


def test_what_is_missing_is_said(bundle: Path, library: Path, tmp_path: Path) -> None:
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
    bare = shutil.copytree(bundle, tmp_path / "bare", ignore=shutil.ignore_patterns("npu"))
    error = refusal(bare, *qnn(library))
    assert error.what == "the bundle has no NPU binary of decode_0.onnx" and "meki-edge compile" in error.fix
