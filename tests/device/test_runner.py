"""The C++ harness from outside: its rows against NumPy, its tokens against PyTorch and a NumPy host, its errors."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tiny import split_rows

from export.onnx_decoder import OnnxDecoder, cpu_sessions
from meki_edge import tokens
from meki_edge.device import runner
from meki_edge.errors import UserError
from meki_edge.graph_spec import GraphSpec
from meki_edge.model.checkpoint import load_model
from meki_edge.model.kv_cache import CachedAttention
from meki_edge.rom.reader import RomReader

IO_MODES = ("pread", "direct", "mmap")
SEGMENTS = [  # (dim, codec) a layer
    pytest.param([(7, "fp32"), (3, "fp32")], id="fp32"),
    pytest.param([(129, "fp16"), (64, "fp16")], id="fp16"),
    pytest.param([(100, "int8"), (1, "int8"), (33, "int8")], id="int8"),
    pytest.param([(64, "int4"), (33, "int4"), (1, "int4"), (31, "int4")], id="int4"),
    pytest.param([(5, "int4"), (3, "int8"), (9, "fp16"), (2, "fp32")], id="mixed"),
    pytest.param([(1024, "fp16")] * 7, id="fp16-14336-bytes"),
    pytest.param([(1000, "int4")] * 12, id="int4-two-pages"),
]


# --- ROM files, written here from the format's description -------------------------------------------------


def encode(rng: np.random.Generator, dim: int, codec: str) -> tuple[bytes, np.ndarray]:
    """Random elements of one segment: their bytes, and the float32 values that they mean."""
    if codec in ("fp32", "fp16"):
        values = rng.standard_normal(dim).astype("<f4" if codec == "fp32" else "<f2")
        if codec == "fp16":
            values[rng.integers(dim)] = 3e-6  # a subnormal
        return values.tobytes(), values.astype(np.float32)
    group = dim if codec == "int8" else 32
    scales = rng.uniform(1e-7, 2.0, -(-dim // group)).astype("<f2")
    limit = 127 if codec == "int8" else 7
    quantized = rng.integers(-limit, limit + 1, dim).astype(np.int8)
    if codec == "int8":
        packed = quantized.tobytes()
    else:
        nibbles = np.append(quantized, np.zeros(dim % 2, np.int8)).view(np.uint8) & 15
        packed = (nibbles[0::2] | nibbles[1::2] << 4).tobytes()
    values = quantized.astype(np.float32) * np.repeat(scales.astype(np.float32), group)[:dim]
    return scales.tobytes() + packed, values


def write_rom(path: Path, layers: list[tuple[int, str]], num_rows: int, seed: int = 0) -> np.ndarray:
    """A ROM file of random rows; returns what they dequantize to: float32 ``[num_rows, row_dim]``."""
    rng = np.random.default_rng(seed)
    rows, values = [], []
    for _ in range(num_rows):
        parts = [encode(rng, dim, codec) for dim, codec in layers]
        rows.append(b"".join(data for data, _ in parts))
        values.append(np.concatenate([value for _, value in parts]))
    offsets = np.cumsum([0] + [len(data) for data, _ in parts])
    size = len(rows[0])
    stride = 1 << (size - 1).bit_length() if size <= 4096 else -(-size // 4096) * 4096
    segments = [
        {"layer": layer, "memory": 0, "offset": int(offsets[layer]), "dim": dim, "codec": codec}
        for layer, (dim, codec) in enumerate(layers)
    ]
    metadata = {
        "format": "meki-edge-rom",
        "version": "1",
        "addressing": "identity",
        "segments": json.dumps(segments),
        "tokenizer_sha256": "0" * 64,
        "source_sha256": "1" * 64,
    }
    tensor = {"dtype": "U8", "shape": [num_rows, stride], "data_offsets": [0, num_rows * stride]}
    header = json.dumps({"__metadata__": metadata, "rows": tensor}).encode()
    header += b" " * (-(8 + len(header)) % 4096)
    padded = b"".join(row.ljust(stride, b"\0") for row in rows)
    path.write_bytes(struct.pack("<Q", len(header)) + header + padded)
    return np.stack(values)


def rows_command(binary: Path, rom: Path, ids: str, io: str = "pread") -> subprocess.CompletedProcess[bytes]:
    ids_file = rom.with_suffix(".ids")
    ids_file.write_text(ids)
    return subprocess.run([binary, "rows", "--rom", rom, "--ids-file", ids_file, "--io", io], capture_output=True)


@pytest.mark.parametrize("io", IO_MODES)
@pytest.mark.parametrize("layers", SEGMENTS)
def test_rows_are_numpys_bit_for_bit(binary: Path, tmp_path: Path, layers: list[tuple[int, str]], io: str) -> None:
    expected = write_rom(tmp_path / "rom.safetensors", layers, 37)
    ids = [*range(37), 36, 0, 5, 5]
    done = rows_command(binary, tmp_path / "rom.safetensors", "\n".join(map(str, ids)), io)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == expected[ids].astype("<f4").tobytes()


def test_rows_of_the_real_writer_are_those_of_the_python_reader(binary: Path, bundles: dict[str, Path]) -> None:
    for name in ("rom.safetensors", "embedding.safetensors"):
        copy = bundles["meki"] / name
        with RomReader(copy) as reader:
            expected = reader.rows(np.arange(reader.spec.num_rows))
        ids_file = copy.parent.parent / f"{name}.ids"
        ids_file.write_text(" ".join(map(str, range(len(expected)))))
        done = subprocess.run([binary, "rows", "--rom", copy, "--ids-file", ids_file], capture_output=True, check=True)
        assert done.stdout == expected.tobytes()


def edited_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    contents = path.read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header = json.loads(contents[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    path.write_bytes(struct.pack("<Q", len(text)) + text + contents[8 + length :])


def edited_bytes(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


HOSTILE: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty", lambda p: p.write_bytes(b""), "too short for a header"),
    ("header length", lambda p: edited_bytes(p, 0, b"\xff" * 8), "the header claims 18446744073709551615 bytes"),
    ("header text", lambda p: edited_bytes(p, 8, b"{{{"), "not valid JSON"),
    ("truncated", lambda p: os.truncate(p, p.stat().st_size - 1), "'rows' ends at byte"),
    ("longer", lambda p: os.truncate(p, p.stat().st_size + 1), "the tensors end at byte"),
    ("format", lambda p: edited_header(p, lambda h: h["__metadata__"].update(format="gguf")), "not a ROM file"),
    ("version", lambda p: edited_header(p, lambda h: h["__metadata__"].update(version="9")), "ROM version '9'"),
    ("addressing", lambda p: edited_header(p, lambda h: h["__metadata__"].update(addressing="x")), "addressing"),
    ("segments", lambda p: edited_header(p, lambda h: h["__metadata__"].update(segments="[]")), "'segments' is not"),
    ("shape", lambda p: edited_header(p, lambda h: h["rows"].update(shape=[9, 64])), "does not fit its byte range"),
    ("scale", lambda p: edited_bytes(p, 4096 + 64, b"\x00\x7e"), "row 1, layer 0 memory 0: a scale is negative, NaN"),
]


@pytest.mark.parametrize(("spoil", "what"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_file_is_a_named_error(
    binary: Path, tmp_path: Path, spoil: Callable[[Path], object], what: str
) -> None:
    path = tmp_path / "rom.safetensors"
    write_rom(path, [(50, "int8")], 8)
    spoil(path)
    done = rows_command(binary, path, "0 1 2")
    assert done.returncode == 1
    line = done.stderr.decode()
    assert line.startswith("error: ") and line.count("\n") == 1
    assert what in line and str(path) in line


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ("8", "row 8 is not in the file, which has 8"),
        ("", "holds no token ids"),
        ("1 -2", "'-2' is not a token id"),
        ("1\0\x1b[2J", "'1  [2J' is not a token id"),
    ],
)
def test_bad_ids(binary: Path, tmp_path: Path, ids: str, what: str) -> None:
    write_rom(tmp_path / "rom.safetensors", [(50, "int8")], 8)
    done = rows_command(binary, tmp_path / "rom.safetensors", ids)
    error = done.stderr.decode()
    assert done.returncode == 1 and what in error and error.endswith(" white space\n" if "'" in what else "\n")


# --- The model: prefill, decode and sampling ---------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tokens_dir: Path) -> list[int]:
    return tokens.open_shards(tokens_dir).validation[:400].tolist()


def ids_file(directory: Path, ids: list[int]) -> str:
    path = directory / "ids.txt"
    path.write_text(" ".join(map(str, ids)))
    return str(path)


def generate(bundle: Path, directory: Path, prompt: list[int], count: int, *options: str) -> dict[str, Any]:
    arguments = ["--bundle", str(bundle), "--prompt-file", ids_file(directory, prompt), "--threads", "1"]
    return runner.run_json(["generate", *arguments, "--max-new-tokens", str(count), *options])


def pytorch_greedy(checkpoint: Path, prompt: list[int], count: int) -> list[int]:
    """Cached decoding in PyTorch."""
    model = load_model(checkpoint)
    cache = CachedAttention(model.config, 160)
    ids, fed = list(prompt), 0
    rom = RomReader(checkpoint / "rom.safetensors") if model.config.folded else None
    while len(ids) < len(prompt) + count:
        new = ids[fed:]
        rows = split_rows(model, torch.from_numpy(rom.rows(np.array(new)))[None]) if rom else None
        logits = model(torch.tensor([new]), attention=cache, rows=rows)
        cache.advance(len(new))
        fed = len(ids)
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 50])
@pytest.mark.parametrize("name", ["dense", "meki"])
def test_greedy_tokens_are_pytorchs(
    name: str,
    length: int,
    bundles: dict[str, Path],
    exported: dict[str, tuple[Path, Path]],
    text: list[int],
    tmp_path: Path,
) -> None:
    """Prompts around the chunk length of 16: one chunk, padded chunks, and a last chunk of one token."""
    report = generate(bundles[name], tmp_path, text[:length], 12)
    assert report["generated_tokens"] == pytorch_greedy(exported[name][0], text[:length], 12)
    prompt, generated = report["tests"]
    chunks = [16] * (length // 16) + [length % 16] * (length % 16 > 0)
    assert [step["num_tokens"] for step in prompt["steps"]] == chunks
    assert generated["num_tokens"] == len(generated["steps"]) == 11
    rows = [step["rows_read"] for test in report["tests"] for step in test["steps"]]
    if name == "dense":
        assert sum(rows) == 0
    else:
        starts = range(0, length, 16)
        assert rows == [len(set(text[start : min(start + 16, length)])) for start in starts] + [1] * 11


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize("depth", [0, 37])
def test_bench_feeds_the_trace(depth: int, bundles: dict[str, Path], text: list[int], tmp_path: Path) -> None:
    """What decode samples at each step is what the NumPy host gets from the same graphs."""
    bundle = bundles["meki"]
    arguments = ["--bundle", str(bundle), "--trace-file", ids_file(tmp_path, text), "--depth", str(depth)]
    arguments += ["--prompt-tokens", "40", "--generate-tokens", "9", "--drop-page-cache", "--warmup", "2"]
    report = runner.run_json(["bench", *arguments])
    spec = GraphSpec.from_json(json.loads((bundle / "graph_spec.json").read_text()), bundle)
    with RomReader(bundle / "embedding.safetensors") as embedding, RomReader(bundle / "rom.safetensors") as rom:
        host = OnnxDecoder(spec, embedding, [rom])
        if depth:
            host.prefill(cpu_sessions(bundle, spec.prefill), np.array(text[:depth]))
        sessions = cpu_sessions(bundle, spec.decode)
        expected = [int(host.decode(sessions, token).argmax()) for token in text[depth : depth + 9]]
        stride, row_bytes = rom.spec.row_stride, rom.spec.row_bytes
    assert report["generated_tokens"] == expected
    assert report["prompt_tokens"] == text[depth : depth + 40]
    assert [(test["test"], test["num_tokens"], len(test["steps"])) for test in report["tests"]] == [
        ("pp40", 40, 3),
        ("tg9", 9, 9),
    ]
    assert (report["schema"], report["command"], report["backend"], report["io"]) == (3, "bench", "cpu", "pread")
    assert report["page_cache_dropped"] is True and report["rom_bytes_per_token"] == stride
    for moment in ("resident_at_start", "resident_at_end"):
        memory = report[moment]
        assert 0 < memory["anonymous_bytes"] + memory["file_bytes"] <= memory["rss_bytes"] <= report["peak_rss_bytes"]
    for test in report["tests"]:
        steps = test["steps"]
        assert test["elapsed_us"] == steps[-1]["end_us"] - steps[0]["start_us"]
        for step, following in zip(steps, steps[1:], strict=False):
            assert step["end_us"] <= following["start_us"]
        for step in steps:
            assert step["stall_us"] + step["run_us"] <= step["end_us"] - step["start_us"]
            assert step["bytes_read"] == step["rows_read"] * row_bytes
        assert sum(step["io_us"] for step in steps) > 0
    assert report["load_us"] < report["tests"][0]["steps"][0]["start_us"]
    assert 1 << 20 < report["peak_rss_bytes"] < 1 << 30


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize("io", IO_MODES)
def test_every_way_to_read_gives_the_same_tokens(
    io: str, bundles: dict[str, Path], text: list[int], tmp_path: Path
) -> None:
    expected = generate(bundles["meki"], tmp_path, text[:20], 8)["generated_tokens"]
    report = generate(bundles["meki"], tmp_path, text[:20], 8, "--io", io, "--drop-page-cache", "--threads", "2")
    assert report["generated_tokens"] == expected and report["io"] == io


@pytest.mark.usefixtures("binary")
def test_streaming_stop_tokens_and_seeds(bundles: dict[str, Path], text: list[int], tmp_path: Path) -> None:
    streamed: list[int] = []
    arguments = ["--bundle", str(bundles["meki"]), "--prompt-file", ids_file(tmp_path, text[:30]), "--stream"]
    arguments += ["--temperature", "1.5", "--top-k", "40", "--max-new-tokens", "40", "--seed", "3"]
    report = runner.run_json(["generate", *arguments], on_token=streamed.append)
    assert streamed == report["generated_tokens"] and len(streamed) == 40
    assert runner.run_json(["generate", *arguments])["generated_tokens"] == streamed
    other = runner.run_json(["generate", *arguments, "--seed", "4"])["generated_tokens"]
    assert other != streamed
    stop, unseen = streamed[10], min(set(range(384)) - set(streamed))
    stopped = runner.run_json(["generate", *arguments, "--stop-token", str(unseen), "--stop-token", str(stop)])
    assert stopped["generated_tokens"] == streamed[: streamed.index(stop) + 1]


# --- What goes wrong ---------------------------------------------------------------------------------------


@pytest.fixture
def spoiled(bundles: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the MeKi bundle to spoil."""
    return shutil.copytree(bundles["meki"], tmp_path / "bundle")


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


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


# --- The Python side ---------------------------------------------------------------------------------------


def script(directory: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a shell script in the harness's place."""
    path = directory / "runner.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv(runner.BINARY_VARIABLE, str(path))


def test_a_crash_names_the_signal_and_keeps_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "echo 'loading' >&2; kill -SEGV $$", monkeypatch)
    with pytest.raises(UserError, match=r"crashed \(SIGSEGV\); it last said: loading") as caught:
        runner.run_json(["bench"])
    log = Path(caught.value.where)
    assert log.read_text().split("\n")[0] == "loading" and "SIGSEGV" in log.read_text()
    log.unlink()


def test_an_interrupt_ends_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "echo $$; exec sleep 600", monkeypatch)
    seen: list[int] = []

    def interrupt(pid: int) -> None:
        seen.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_json(["generate"], on_token=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_an_end_without_a_word_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "exit 7", monkeypatch)
    with pytest.raises(UserError, match="ended with status 7: it said nothing"):
        runner.run_json(["bench"])


def test_the_three_parts_of_an_error_come_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "echo 'error: shape [1,2] is wrong [/a/b: x[0]] mend it' >&2; exit 1", monkeypatch)
    with pytest.raises(UserError) as caught:
        runner.run_json(["bench"])
    parts = caught.value.what, caught.value.where, caught.value.fix
    assert parts == ("shape [1,2] is wrong", "/a/b: x[0]", "mend it")


def test_where_the_harness_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runner.BINARY_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(UserError, match="the harness is not built"):
        runner.find_binary()
    monkeypatch.setenv(runner.BINARY_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match="not an executable file"):
        runner.find_binary()
    monkeypatch.delenv(runner.BINARY_VARIABLE)
    monkeypatch.setattr(runner, "BUILT_BINARY", tmp_path / "absent")
    with pytest.raises(UserError) as caught:
        runner.find_binary()
    assert "make runner" in caught.value.fix
    assert runner.find_ort_library().name.startswith("libonnxruntime.so")
