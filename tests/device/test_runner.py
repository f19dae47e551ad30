"""The C++ harness from outside: its tokens against PyTorch and a NumPy host."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import IO_MODES, generate, ids_file
from tiny import split_rows

from export.onnx_decoder import OnnxDecoder, cpu_sessions
from meki_edge import tokens
from meki_edge.device import runner
from meki_edge.graph_spec import GraphSpec
from meki_edge.model.checkpoint import load_model
from meki_edge.model.kv_cache import CachedAttention
from meki_edge.rom.reader import RomReader


@pytest.fixture(scope="module")
def text(tokens_dir: Path) -> list[int]:
    return tokens.open_shards(tokens_dir).validation[:400].tolist()


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
