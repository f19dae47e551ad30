"""Bounds against numbers worked out by hand at the MeKi paper's shapes, and against real exported graphs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import onnx
import pytest
from tiny import MEKI, tiny_config
from typer.testing import CliRunner

from export import bounds_report
from export.cost_bounds import PRECISIONS, bound, step_of_model, steps_of_directory
from export.targets import CHIPS, chip
from meki_edge import manifest
from meki_edge.cli import app
from meki_edge.errors import UserError
from meki_edge.memory_costs import cost
from meki_edge.train import presets

Exported = dict[str, tuple[Path, Path]]
VOCAB = 151_936
ELITE = chip("sm8750")

# Shape: layers, hidden size, FFN width, query heads; 8 key/value heads of 128 everywhere. m: MeKi's width.
SHAPES = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 128),
    "qwen3-1.7b": (28, 2048, 6144, 16, 256),
    "qwen3-4b": (36, 2560, 9728, 32, 512),
}


def test_peak_bandwidths() -> None:
    assert {known.soc: known.peak_bandwidth / 1e9 for known in CHIPS} == {
        "sm8550": 67.2,
        "sm8650": 76.8,
        "sm8750": 84.8,
        "sm8850": 84.8,
        "sc8380xp": 136.528,
    }


@pytest.mark.parametrize("preset", SHAPES)
def test_bytes_by_hand(preset: str) -> None:
    layers, hidden, ffn, heads, width = SHAPES[preset]
    step = step_of_model("meki", presets.build(preset, VOCAB, memory="meki"), "fp16", "float16")
    found = step.dram(10_240)
    assert found["attention"] == 2 * layers * (hidden * 128 * heads * 2 + hidden * 128 * 8 * 2)
    assert found["feed-forward"] == 2 * layers * 3 * hidden * ffn
    assert found["memory"] == 2 * layers * (2 * hidden * width + hidden)
    assert found["norms"] == 2 * (layers * (2 * hidden + 2 * 128) + hidden)
    assert found["head"] == 2 * VOCAB * hidden
    assert found["KV cache read"] == 2 * 2 * layers * 8 * 128 * 10_240
    assert found["KV cache write"] == 2 * 2 * layers * 8 * 128
    assert found["rows"] == layers * width * (4 + 2), "float32 as the graph's input, fp16 on storage"
    others = hidden + 2 * 64 + VOCAB + 10_241 + hidden  # embedding twice: from storage, and as the graph's input
    assert found["inputs and logits"] == 4 * others
    assert step.storage_bytes == layers * width * 2 + hidden * 4


def test_the_bound_by_hand() -> None:
    """Qwen3-1.7B, fp16 weights and cache, 10K: 4,616.3 MB at 84.8 GB/s."""
    step = step_of_model("dense", presets.build("qwen3-1.7b", VOCAB), "fp16", "float16")
    found = bound(step, ELITE, 10_240)
    weights = 28 * (2048 * 6144 * 3 + 2048 * 2048 * 2 + 2048 * 1024 * 2) + VOCAB * 2048
    assert found.total_dram_bytes == pytest.approx(2 * weights + 28 * 4 * 1024 * 10_240, rel=1e-3)
    assert found.dram_seconds == pytest.approx(54.44e-3, rel=1e-3)
    assert found.tokens_per_s == pytest.approx(18.37, rel=1e-3)
    assert found.seconds == found.dram_seconds > found.storage_seconds


def test_why_meki_costs_next_to_nothing() -> None:
    """RAM parameters +1.7 % at 1.7B, and the bound moves by less, since the cache is read as before."""
    dense = step_of_model("dense", presets.build("qwen3-1.7b", VOCAB), "fp16", "float16")
    meki = step_of_model("meki", presets.build("qwen3-1.7b", VOCAB, memory="meki"), "fp16", "float16")
    assert sum(meki.parameters.values()) / sum(dense.parameters.values()) - 1 == pytest.approx(0.0171, abs=5e-5)
    for length, slower in ((1024, 0.0163), (10_240, 0.0126)):
        ratio = bound(meki, ELITE, length).tokens_per_s / bound(dense, ELITE, length).tokens_per_s
        assert 1 - ratio == pytest.approx(slower, abs=2e-4)
    rows = meki.dram(10_240)["rows"]
    assert rows / bound(meki, ELITE, 10_240).total_dram_bytes < 1e-5


@pytest.mark.parametrize(("preset", "share"), [("qwen3-0.6b", 0.561), ("qwen3-1.7b", 0.751), ("qwen3-4b", 0.688)])
def test_how_far_the_papers_speeds_lie_from_the_bound(preset: str, share: float) -> None:
    rows = bounds_report.published(preset, VOCAB, "float16")
    assert [row["weights"] for row in rows[::2]] == ["fp16", "w8a16", "w4a16"]
    assert rows[0]["share_of_bound"] == pytest.approx(share, abs=1e-3)
    assert all(row["share_of_bound"] < 1 for row in rows), "a bound that a measurement exceeds would be none"


@pytest.mark.parametrize(
    ("precision", "body", "head"),
    [("w8a16", 8, 8), ("w4a16", 4, 8), ("w4a16-block32", 4.5, 8), ("w4a16-block64", 4.25, 8), ("w4fp16", 4.5, 8)],
)
def test_precisions(precision: str, body: float, head: float) -> None:
    fp16, found = (
        step_of_model("x", presets.build("qwen3-0.6b", VOCAB), name, "float16").weights for name in ("fp16", precision)
    )
    assert found["attention"] == fp16["attention"] * body / 16 and found["head"] == fp16["head"] * head / 16
    assert found["norms"] == fp16["norms"]
    assert precision in PRECISIONS


def test_the_cache_dtype() -> None:
    model = presets.build("qwen3-0.6b", VOCAB)
    steps = [step_of_model("x", model, "fp16", dtype) for dtype in ("float32", "float16", "int8")]
    sizes = [step.dram(1024)["KV cache read"] for step in steps]
    assert sizes == [2 * 28 * 8 * 128 * 1024 * width for width in (4, 2, 1)]


def test_a_directory_is_its_shape(exported: Exported) -> None:
    """What is read off a graph equals what is counted from the configuration."""
    for name, memories in (("dense", []), ("meki", MEKI)):
        *twin, found = steps_of_directory(exported[name][1], None, None)
        expected = step_of_model(name, tiny_config(memories, eos_token_id=0), "fp16", "float32")
        for part in ("attention", "feed-forward", "memory", "norms", "head"):
            assert found.weights.get(part) == expected.weights.get(part)
        assert found.weights.get("other weights", 0) < 4096, "constants that tracing left"
        assert found.kv_bytes_per_slot == expected.kv_bytes_per_slot
        assert found.activation_bytes == expected.activation_bytes
        assert bool(twin) == bool(memories)
        if twin:
            dense = step_of_model("dense", tiny_config(eos_token_id=0), "fp16", "float32")
            assert twin[0].dram(99) | {"other weights": 0} == dense.dram(99) | {"other weights": 0}


def test_a_memory_in_the_up_projections_place(tmp_path: Path, exported: Exported) -> None:
    """Where a layer has no up projection, its dense twin has one like its gate."""
    directory = shutil.copytree(exported["meki"][1], tmp_path / "export")
    model = onnx.load(directory / "decode.onnx", load_external_data=False)
    (up,) = [tensor for tensor in model.graph.initializer if tensor.name == "model.layers.1.mlp.up_proj.weight"]
    model.graph.initializer.remove(up)
    onnx.save(model, directory / "decode.onnx")
    twin, found = steps_of_directory(directory, None, None)
    dense = step_of_model("dense", tiny_config(eos_token_id=0), "fp16", "float32")
    assert twin.parameters["feed-forward"] == dense.parameters["feed-forward"] > found.parameters["feed-forward"]
    assert "memory" in found.weights and "memory" not in twin.weights


def test_every_addressing(mixed: tuple[Path, Path, Path]) -> None:
    """Several ROM files, states and masks: the rows of all of them, and nothing of them in the twin."""
    twin, found = steps_of_directory(mixed[2], None, None)
    dense = step_of_model("dense", tiny_config(eos_token_id=0), "fp16", "float32")
    assert found.rows_bytes > twin.rows_bytes == 0 and found.activation_bytes > twin.activation_bytes
    assert twin.activation_bytes == dense.activation_bytes and twin.storage_bytes == dense.storage_bytes


def test_counts_agree_with_memory_costs() -> None:
    dense = presets.build("qwen3-0.6b", VOCAB)
    for kind in ("meki", "stem", "ple"):
        model = presets.build("qwen3-0.6b", VOCAB, memory=kind)
        (placement,) = model.memories
        counted = cost(dense, kind, placement.options, placement.layers)
        sums = [sum(step_of_model("x", shape, "fp16", "float16").parameters.values()) for shape in (dense, model)]
        assert sums[1] - sums[0] == counted.ram_parameters
        storage = step_of_model("x", model, "fp16", "float16").storage_bytes
        assert storage == counted.bytes_per_token + 4 * dense.hidden_size


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["bounds", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return " ".join(result.output.split())  # lines break where the terminal ends


def test_the_command(tmp_path: Path, exported: Exported) -> None:
    text = run("--preset", "qwen3-1.7b", "--plot", tmp_path / "bounds.html")
    assert "not predictions" in text and "RAM parameters +1.71%" in text and "13.8" in text
    page = (tmp_path / "bounds.html").read_text()
    assert "<svg" in page and "not predictions" in page and "84.8 GB/s" in page
    result = json.loads(run(exported["dense"][1], exported["meki"][1], "--context-lengths", "64,160", "--json"))
    assert [found["context_length"] for found in result["arms"][1]["bounds"]] == [64, 160]
    assert result["what"].startswith("Lower bounds") and result["published"] == []
    assert len(json.loads(run(exported["meki"][1], "--json"))["arms"]) == 2, "its dense twin is computed"


def test_a_stages_directory_must_be_whole(tmp_path: Path, exported: Exported) -> None:
    """A directory that no stage wrote is taken as it is."""
    directory = shutil.copytree(exported["meki"][1], tmp_path / "export")
    (directory / "prefill.onnx").write_bytes(b"not what the bound is read off, but of the same export")
    with pytest.raises(UserError, match="the file has 54 bytes, the manifest says") as caught:
        run(exported["dense"][1], directory)
    assert Path(caught.value.where) == directory / "prefill.onnx"
    (directory / manifest.FILE_NAME).unlink()
    run(directory)
    (directory / manifest.PARTIAL).mkdir()
    with pytest.raises(UserError, match="the stage that fills this directory has not finished"):
        run(directory)


def test_the_plot_is_reproducible_and_says_what_it_is(tmp_path: Path) -> None:
    steps = [step_of_model("dense", presets.build("demo", 4096), "fp16", "float16")]
    result = bounds_report.report(steps, ELITE, [128, 256])
    for name in ("a.svg", "b.svg"):
        bounds_report.plot(result, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text() and re.search("not predictions", text)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "one place"),
        (["--preset", "demo", "--chipset", "sm9999"], "unknown chip"),
        (["--preset", "demo", "--context-lengths", "1k"], "not a list of lengths"),
        (["--preset", "demo", "--precision", "w8a61"], "unknown value 'w8a61'; did you mean 'w8a16'"),
        (["--preset", "demo", "--kv-dtype", "float61"], "unknown value"),
        (["--preset", "demo", "--plot", "x.png"], "neither .svg nor .html"),
        (["--preset", "dmeo"], "unknown preset 'dmeo'"),
        (["nowhere"], "does not exist"),
        ([__file__], "this is a file, not a directory"),
        ([f"{__file__}/export"], "does not exist"),
        (["--preset", "demo", "--plot", f"{__file__}/x.svg"], "does not exist"),
        (["--preset", "demo", "--plot", "/nonexistent/x.svg"], "the folder '/nonexistent' does not exist"),
        (["--preset", "demo", "--plot", "/proc/x.svg"], "/proc/x.svg cannot be written"),
        (["nowhere", "--memory", "ple"], "goes with --preset"),
        (["nowhere", "--vocab-size", "5"], "goes with --preset"),
        (["nowhere", "--memory-option", "memory_dim=5"], "goes with --preset"),
        (["--preset", "demo", "--context-lengths", "256,"], "'256,' is not a list of lengths: a number is missing"),
    ],
)
def test_errors(arguments: list[str], what: str) -> None:
    with pytest.raises(UserError, match=re.escape(what)):
        run(*arguments)
