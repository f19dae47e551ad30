"""What the C++ harness says when a bundle, an option or a library is wrong, and how a signal ends it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from harness import IO_MODES, generate, ids_file, rewrite, write_rom

from meki_edge.device import runner
from meki_edge.errors import UserError


@pytest.fixture
def spoiled(bundles: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the MeKi bundle to spoil."""
    return shutil.copytree(bundles["meki"], tmp_path / "bundle")


def move_weights(path: Path, location: str) -> None:
    """Say in a graph that its weights lie elsewhere."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    onnx.save(model, path)


BUNDLES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no spec", lambda b: (b / "graph_spec.json").unlink(), "cannot open the file"),
    ("spec key", lambda b: rewrite(b / "graph_spec.json", lambda s: s.update(extra=1)), "unknown key 'extra'"),
    (
        "spec shape",
        lambda b: rewrite(b / "graph_spec.json", lambda s: s.update(head_dim=s["head_dim"] * 2)),
        "has shape",
    ),
    ("mask", lambda b: rewrite(b / "graph_spec.json", lambda s: s.update(mask_value=-4)), "'mask_value' is -4"),
    (
        "end of text",
        lambda b: rewrite(b / "graph_spec.json", lambda s: s.update(eos_token_id=384)),
        "'eos_token_id' is 384, the vocabulary has 384 tokens",
    ),
    (
        "ROM elsewhere",
        lambda b: rewrite(b / "graph_spec.json", lambda s: s["roms"][0].update(file="../meki/rom.safetensors")),
        "'file' is '../meki/rom.safetensors', not the name of a file",
    ),
    (
        "graph elsewhere",
        lambda b: rewrite(b / "graph_spec.json", lambda s: s["decode"]["parts"][0].update(file="../decode.onnx")),
        "'file' is '../decode.onnx', not the name of a file",
    ),
    ("graph cut", lambda b: os.truncate(b / "decode.onnx", 1000), "not a valid ONNX file"),
    ("graph text", lambda b: (b / "decode.onnx").write_text("graph"), "not a valid ONNX file"),
    ("graph empty", lambda b: (b / "decode.onnx").write_bytes(b""), "ONNX Runtime"),
    ("weights cut", lambda b: os.truncate(b / "weights.data", 5000), "ends past the 5000 bytes"),
    ("weights elsewhere", lambda b: move_weights(b / "decode.onnx", "../weights.data"), "lies in '../weights.data'"),
    ("weights anywhere", lambda b: move_weights(b / "decode.onnx", "/etc/passwd"), "lies in '/etc/passwd'"),
    ("weights gone", lambda b: (b / "weights.data").unlink(), "cannot open the file"),
    ("ROM of another vocabulary", lambda b: write_rom(b / "rom.safetensors", [(36, "fp32")], 5), "for 5 tokens"),
    ("ROM of another shape", lambda b: write_rom(b / "rom.safetensors", [(35, "fp16")], 384), "of 35 elements for 384"),
    ("ROM of another tokenizer", lambda b: write_rom(b / "rom.safetensors", [(36, "fp16")], 384), "another tokenizer"),
    (
        "tensor name",
        lambda b: rewrite(b / "graph_spec.json", lambda s: s["decode"]["parts"][0]["inputs"][0].update(name="nothing")),
        "nothing",
    ),
]


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize(("spoil", "what"), [case[1:] for case in BUNDLES], ids=[case[0] for case in BUNDLES])
def test_a_spoiled_bundle_is_a_user_error(
    spoiled: Path, tmp_path: Path, spoil: Callable[[Path], object], what: str
) -> None:
    spoil(spoiled)
    with pytest.raises(UserError) as caught:
        generate(spoiled, tmp_path, [1, 2, 3], 4)
    assert what in caught.value.what
    assert caught.value.where and caught.value.fix


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize(
    ("prompt", "count", "options", "what"),
    [
        ([1] * 100, 62, [], "a prompt of 100 tokens and 62 new ones do not fit the context of 160"),
        ([384], 1, [], "token id 384 is out of range: the vocabulary has 384"),
        ([1], 1, ["--stop-token", "384"], "stop token 384 is out of range: the vocabulary has 384"),
        ([1], 0, [], "--max-new-tokens takes an integer from 1 to"),
        ([1], 1, ["--top-p", "1.5"], "--top-p takes a number from 0 to 1, got '1.5'"),
        ([1], 1, ["--turbo"], "unknown option '--turbo'"),
        ([1], 1, ["--io", "pigeon"], "--io takes pread, direct or mmap"),
        ([1], 1, ["--cores", "small"], "--cores takes big or all"),
    ],
)
def test_what_cannot_work_is_said(
    bundles: dict[str, Path], tmp_path: Path, prompt: list[int], count: int, options: list[str], what: str
) -> None:
    with pytest.raises(UserError) as caught:
        generate(bundles["meki"], tmp_path, prompt, count, *options)
    assert caught.value.what.startswith(what)


def test_a_context_that_is_just_long_enough(binary: Path, bundles: dict[str, Path], tmp_path: Path) -> None:
    assert binary.is_file()
    assert len(generate(bundles["meki"], tmp_path, [1] * 100, 61)["generated_tokens"]) == 61


@pytest.mark.parametrize(
    ("ort_library", "what"),
    [("/nowhere/libonnxruntime.so", "cannot load ONNX Runtime"), (sys.executable, "")],
)
def test_a_wrong_library_is_said(
    binary: Path, bundles: dict[str, Path], tmp_path: Path, ort_library: str, what: str
) -> None:
    command = [binary, "generate", "--bundle", bundles["dense"], "--max-new-tokens", "1"]
    command += ["--prompt-file", ids_file(tmp_path, [1]), "--ort-library", ort_library, "--output", tmp_path / "o.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and what in done.stderr and ort_library in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ids.txt"]


def test_usage(binary: Path) -> None:
    assert subprocess.run([binary], capture_output=True).returncode == 2
    missing = subprocess.run([binary, "rows"], capture_output=True)
    assert (missing.returncode, missing.stderr.split(b" [")[0]) == (2, b"error: --rom is missing")
    missing = subprocess.run([binary, "rows", "--rom"], capture_output=True)
    assert (missing.returncode, missing.stderr.split(b" [")[0]) == (2, b"error: --rom needs a value")
    bench = [binary, "bench", "--bundle", "b", "--trace-file", "t", "--ort-library", "o", "--output", "r"]
    nothing = subprocess.run([*bench, "--prompt-tokens", "0", "--generate-tokens", "0"], capture_output=True)
    assert (nothing.returncode, nothing.stderr.split(b":")[1]) == (2, b" there is nothing to measure")
    assert b"--drop-page-cache" in subprocess.run([binary, "--help"], capture_output=True, check=True).stdout
    assert subprocess.run([binary, "--version"], capture_output=True, check=True).stdout == b"meki-runner 0.1.0\n"


class Gate:
    """A harness that has read its prompt and cannot go on, because the pipe that it streams to is full."""

    def __init__(self, binary: Path, bundle: Path, directory: Path, output: Path) -> None:
        self._read, write = os.pipe()
        capacity = fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        os.write(write, b"\n" * capacity)
        command = [binary, "generate", "--bundle", bundle, "--max-new-tokens", "100", "--stream", "--threads", "1"]
        command += ["--prompt-file", ids_file(directory, [1, 2, 3]), "--ort-library", runner.find_ort_library()]
        self.process = subprocess.Popen([*command, "--output", output], stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        asleep = 0
        while asleep < 10:  # it sleeps for long only where it is blocked
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
            time.sleep(0.02)

    def open(self) -> tuple[int, str]:
        """Empty the pipe and wait for the end: exit status and standard error."""
        while os.read(self._read, 65536):
            pass
        os.close(self._read)
        error = self.process.communicate(timeout=60)[1]
        return self.process.returncode, error


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_between_steps(
    binary: Path, bundles: dict[str, Path], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    gate = Gate(binary, bundles["meki"], tmp_path, output / "out.json")
    gate.process.send_signal(number)
    code, error = gate.open()
    assert (code, error.count("\n")) == (status, 1) and "nothing was written" in error
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("io", IO_MODES)
def test_a_rom_that_shrinks_while_the_model_runs(binary: Path, spoiled: Path, tmp_path: Path, io: str) -> None:
    gate = Gate(binary, spoiled, tmp_path, tmp_path / "out.json")
    os.truncate(spoiled / "rom.safetensors", 4096)
    code, error = gate.open()
    assert code == 1 and "cannot be read whole" in error and "rom.safetensors" in error
    assert not (tmp_path / "out.json").exists()
