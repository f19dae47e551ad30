"""`meki-edge compare`: figures, sentences and the page, from results made of known harness reports."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meki_edge import manifest
from meki_edge.compare import build, compare, table
from meki_edge.errors import UserError
from meki_edge.manifest import StageOutput

HOST = {"cpu": "A <fast> CPU", "architecture": "x86_64", "cores": 2, "memory_bytes": 8e9, "os": "Linux"}
RUNNER = {"runner_version": "0.1.0", "backend": "cpu", "ort_version": "1.32.0", "threads": 2, "io": "pread"}
CONFIG = {"prompt_tokens": 512, "generate_tokens": 128, "repetitions": 3, "depth": 0} | {
    "cold": True,
    "row_cache_bytes": 0,
}


def spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "p50": mean, "p99": 2 * mean}


def arm(name: str, loss: float | None, speeds: list[float], *, rom: bool, tokens: int = 1000) -> dict[str, Any]:
    """An arm of ``results.json``."""
    mean = sum(speeds) / len(speeds)
    tests = {
        test: {
            "num_tokens": 512,
            "tokens_per_s": {"mean": mean * scale, "sd": 0.5, "samples": [speed * scale for speed in speeds]},
            "step_us": spread(1e6 / speeds[0]),
            "io_us_per_token": spread(200.0 * rom),
            "stall_us_per_token": spread(1.5 * rom),
            "stall_share": 0.0002 * rom,
            "bytes_read_per_token": 4096.0 * rom,
            "cache_hit_share": 0.25 if rom else None,
        }
        for test, scale in (("pp512", 10), ("tg128", 1))
    }
    return {
        "name": name,
        "bundle": name,
        "bundle_sha256": "0" * 64,
        "bundle_bytes": 10_000_000,
        "metrics": {
            "name": name,
            "validation_loss": loss,
            "validation_tokens": tokens,
            "ram_parameters": 1_000_000,
            "active_parameters": 1_000_000,
            "weight_bytes_per_token": 4_000_000,
            "expert_bytes_per_token": None,
            "context_lengths": [256, 1024],
            "precision": "fp32",
            "perplexity_increase": None,
            "rom_bytes": 2_000_000 * rom,
            "rom_bytes_per_token": 4096 * rom,
            "rom_bytes_per_token_expected": 3000 * rom,
            "table_precision": "int8" if rom else None,
            "weights_bytes": 4_000_000,
        },
        "tests": tests,
        "load_us": {"mean": 5e5, "sd": None, "samples": [5e5]},
        "peak_rss_bytes": 50_000_000,
        "rss_bytes": 40_000_000,
        "rss_growth_bytes": 0,
        "raw": [f"raw/{index:03d}-{name}.json" for index in range(3)],
    }


def results(*arms: dict[str, Any], low: float | None = 0.97, high: float | None = 1.02) -> dict[str, Any]:
    ratios = [
        {"arm": other["name"], "baseline": arms[0]["name"], "test": test, "median": 0.99, "low": low, "high": high}
        for other in arms[1:]
        for test in other["tests"]
    ]
    for ratio in ratios:
        ratio["samples"] = [0.98, 0.99, 1.0]
    return {
        "schema": 3,
        "host": HOST,
        "runner": RUNNER,
        "config": CONFIG,
        "arms": list(arms),
        "ratios": ratios,
        "notes": ["A note on the measurement."],
    }


DENSE = arm("dense", 3.5, [30.0, 31.0, 32.0], rom=False)
MEKI = arm("meki", 3.25, [29.0, 31.0, 32.0], rom=True)


def report(rom: bool) -> dict[str, Any]:
    """What the harness writes for one repetition."""
    steps = [
        {"num_tokens": 1, "start_us": 1000 * i, "end_us": 1000 * i + 900, "io_us": 150 * rom, "stall_us": (i % 3) * rom}
        for i in range(128)
    ]
    prefill = {"test": "pp512", "elapsed_us": 9, "steps": []}
    return {"tests": [prefill, {"test": "tg128", "elapsed_us": 9, "steps": steps}]}


def write_runs(directory: Path, measured: dict[str, Any]) -> Path:
    output = StageOutput(directory, stage="run", config={}, inputs={})
    (output.partial / "results.json").write_text(json.dumps(measured))
    roles = {"results.json": "results"}
    for entry in measured["arms"]:
        for name in entry["raw"]:
            (output.partial / name).parent.mkdir(exist_ok=True)
            (output.partial / name).write_text(json.dumps(report(entry["metrics"]["rom_bytes"] > 0)))
            roles[name] = "raw"
    output.finish(roles=roles, metrics={})
    return directory


def write_training(directory: Path, shift: float, train_tokens: int = 10_000) -> Path:
    output = StageOutput(directory, stage="train", config={"shift": shift}, inputs={})
    lines: list[dict[str, Any]] = [{"step": step, "loss": 6 / step + shift} for step in range(1, 20)]
    lines += [{"step": step, "validation_loss": 6 / step + shift} for step in (10, 19)]
    (output.partial / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output.finish(roles={"metrics.jsonl": "metrics"}, metrics={"train_tokens": train_tokens})
    return directory


class Page(HTMLParser):
    """Collects what the checks need of a page, and that its elements close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.labels: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"]] if values.get("id") else []
        self.labels += [values["aria-label"]] if values.get("role") == "img" else []
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_json_has_every_figure_a_decision_needs(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", results(DENSE, MEKI))
    compare(runs, tmp_path / "out")
    result = json.loads((tmp_path / "out/compare.json").read_text())
    assert result["schema"] == 1
    assert result["arms"]["meki"] | {
        "val_loss": 3.25,
        "val_tokens": 1000,
        "tg128_tokens_per_s": MEKI["tests"]["tg128"]["tokens_per_s"],
        "pp512_tokens_per_s": MEKI["tests"]["pp512"]["tokens_per_s"],
        "stall_us_per_token": 1.5,
        "stall_us_p99": 3.0,
        "io_us_per_token": 200.0,
        "rom_bytes": 2_000_000,
        "rom_bytes_per_token": 4096,
        "rom_bytes_per_token_expected": 3000,
        "cache_hit_share": 0.25,
        "table_precision": "int8",
        "context_lengths": [256, 1024],
        "ram_parameters": 1_000_000,
        "peak_rss_bytes": 50_000_000,
    } == result["arms"]["meki"]
    assert result["arms"]["dense"]["stall_us_per_token"] == 0
    assert result["ratios"]["meki/dense"]["tg128"] == {
        "median": 0.99, "low": 0.97, "high": 1.02, "samples": [0.98, 0.99, 1.0]
    }  # fmt: skip
    assert result["host"] == HOST
    manifest.verify(tmp_path / "out", manifest.load(tmp_path / "out", stages=("compare",)))


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", results(DENSE, MEKI) | {"schema": 1})
    with pytest.raises(UserError, match="results of schema 1, this version reads 3"):
        compare(runs, tmp_path / "out")


def test_csv_has_one_line_an_arm(tmp_path: Path) -> None:
    compare(write_runs(tmp_path / "runs", results(DENSE, MEKI)), tmp_path / "out")
    lines = list(csv.DictReader((tmp_path / "out/compare.csv").open()))
    assert [line["arm"] for line in lines] == ["dense", "meki"]
    assert float(lines[1]["val_loss"]) == 3.25
    assert [float(value) for value in lines[1]["tg128_tokens_per_s_samples"].split()] == [29, 31, 32]
    assert lines[0]["tg128_ratio_median"] == "" and float(lines[1]["tg128_ratio_median"]) == 0.99


def test_markdown_is_a_table(tmp_path: Path) -> None:
    compare(write_runs(tmp_path / "runs", results(DENSE, MEKI)), tmp_path / "out")
    text = (tmp_path / "out/compare.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == "| | dense | meki |"
    assert len({row.count("|") for row in rows}) == 1
    assert "| Decode (tg128), tokens/s | 31.00 ± 0.50 | 30.67 ± 0.50 |" in rows
    assert "not on a phone" in text


def test_the_page_stands_alone_and_can_be_read_aloud(tmp_path: Path) -> None:
    curves = {name: write_training(tmp_path / name, shift) for name, shift in (("dense", 3.5), ("meki", 3.25))}
    compare(write_runs(tmp_path / "runs", results(DENSE, MEKI)), tmp_path / "out", curves=curves)
    text = (tmp_path / "out/compare.html").read_text()
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.findall(r'(?:src|href)="(?!#)', text.replace("xmlns:", "")) and "url(http" not in text
    assert page.tags.count("svg") == len(page.labels) == 5
    assert "meki ends at a validation loss of 3.5658 after step 19" in " ".join(page.labels)
    assert "largest 2.0 microseconds" in " ".join(page.labels)
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(page.ids)
    assert "A &lt;fast&gt; CPU" in text and "not on a phone" in text
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", text))
    assert used <= set(re.findall(r"(--[a-z0-9-]+):", text))
    assert "#a0a0" not in text, "a colour that no theme sets"


def test_comparing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", results(DENSE, MEKI))
    assert compare(runs, tmp_path / "a").files == compare(runs, tmp_path / "b").files


@pytest.mark.parametrize(
    ("loss", "low", "high", "sentences"),
    [
        (3.25, 0.97, 1.02, ["meki has the lower validation loss (3.2500 against 3.5", "no difference could be told"]),
        (3.75, 0.9, 0.95, ["meki has the higher validation loss", "0.950: slower)"]),
        (3.5, 1.1, 1.2, ["the same validation loss", "1.200: faster)"]),
        (None, None, None, ["cannot be compared: a validation loss is missing", "too few rounds for an interval"]),
    ],
)
def test_the_headline_says_what_was_seen(
    loss: float | None, low: float | None, high: float | None, sentences: list[str]
) -> None:
    other = arm("meki", loss, [30.0, 30.0, 30.0], rom=True)
    headline = build(results(DENSE, other, low=low, high=high))["headline"]
    assert all(sentence in headline for sentence in sentences), headline
    assert "waited 1.5 µs a token for rows, 0.020% of the time" in headline


def test_losses_on_different_texts_are_not_compared_silently(tmp_path: Path) -> None:
    other = arm("meki", 3.25, [30.0, 30.0, 30.0], rom=True, tokens=2000)
    compare(write_runs(tmp_path / "runs", results(DENSE, other)), tmp_path / "out")
    said = "different numbers of tokens (dense: 1000, meki: 2000)"
    for kind in ("json", "csv", "md", "html"):
        assert said in (tmp_path / f"out/compare.{kind}").read_text(), kind
    result = json.loads((tmp_path / "out/compare.json").read_text())
    terminal = Console(width=250, file=io.StringIO())
    terminal.print(table(result))
    assert said in " ".join(terminal.file.getvalue().split())
    assert "lower validation loss" not in result["headline"]


def test_different_training_budgets_are_said(tmp_path: Path) -> None:
    curves = {
        "dense": write_training(tmp_path / "dense", 3.5, train_tokens=10_000),
        "meki": write_training(tmp_path / "meki", 3.25, train_tokens=20_000),
    }
    compare(write_runs(tmp_path / "runs", results(DENSE, MEKI)), tmp_path / "out", curves=curves)
    notes = json.loads((tmp_path / "out/compare.json").read_text())["notes"]
    assert "The arms were trained on different numbers of tokens (dense: 10000, meki: 20000)." in notes


def test_three_arms_and_a_single_one(tmp_path: Path) -> None:
    third = arm("stem", 3.4, [28.0, 28.0, 28.0], rom=True)
    compare(write_runs(tmp_path / "three", results(DENSE, MEKI, third)), tmp_path / "out")
    result = json.loads((tmp_path / "out/compare.json").read_text())
    assert list(result["ratios"]) == ["meki/dense", "stem/dense"]
    assert result["headline"].count("validation loss") == 2
    compare(write_runs(tmp_path / "one", results(DENSE)), tmp_path / "alone")
    assert json.loads((tmp_path / "alone/compare.json").read_text())["headline"] == "dense was measured alone."


def test_what_experts_cost_a_token_stands_beside_the_rows(tmp_path: Path) -> None:
    moe = arm("moe", 3.3, [20.0, 20.0, 20.0], rom=False)
    moe["metrics"] |= {"weight_bytes_per_token": 4_100_000, "expert_bytes_per_token": 2_600_000}
    compare(write_runs(tmp_path / "runs", results(DENSE, MEKI, moe)), tmp_path / "out")
    result = json.loads((tmp_path / "out/compare.json").read_text())
    assert "Each decoded token reads 2.60 MB of experts" in result["headline"]
    assert result["arms"]["moe"]["weight_bytes_per_token"] == 4_100_000
    rows = (tmp_path / "out/compare.md").read_text().splitlines()
    assert "| Weights read a token | 4.00 MB | 4.00 MB | 4.10 MB |" in rows
    assert "| … of them experts, known only layer by layer | – | – | 2.60 MB |" in rows
    assert "| ROM a token, at most | 0 B | 4.10 kB | 0 B |" in rows
    assert "| ROM a token of validation text, mean | 0 B | 3.00 kB | 0 B |" in rows
    assert "| Rows found in the harness's cache | – | 25.0% | – |" in rows
    assert "experts, known only layer by layer" in (tmp_path / "out/compare.html").read_text()


def test_the_loss_of_a_quantized_arm_is_said_to_be_of_float(tmp_path: Path) -> None:
    coarse = arm("w4", 3.25, [20.0, 20.0, 20.0], rom=True)
    coarse["metrics"] |= {"precision": "w4a16", "perplexity_increase": 0.0037}
    compare(write_runs(tmp_path / "runs", results(DENSE, coarse)), tmp_path / "out")
    rows = (tmp_path / "out/compare.md").read_text().splitlines()
    assert "| Precision of the graphs | fp32 | w4a16 |" in rows
    assert "| … perplexity by it, as calibration measured | – | +0.37% |" in rows
    assert "- The losses of w4 are those of the models before their graphs were quantized." in rows


def test_bad_inputs_are_refused(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs", results(DENSE, MEKI))
    training = write_training(tmp_path / "training", 3.5)
    with pytest.raises(UserError, match="there is no arm 'mekki'"):
        compare(runs, tmp_path / "out", curves={"mekki": training})
    with pytest.raises(UserError, match="output of `meki-edge train`"):
        compare(training, tmp_path / "out")
    (runs / "raw/000-meki.json").write_text("{}")
    with pytest.raises(UserError, match="bytes, the manifest says"):
        compare(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
