"""`meki-edge run` with the real harness on tiny bundles, and its statistics against NumPy and brute force."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meki_edge import manifest, tokens
from meki_edge.device import bench_report, stats
from meki_edge.device import run as run_module
from meki_edge.device.pack import PackConfig, pack
from meki_edge.device.run import RunConfig, run
from meki_edge.errors import UserError
from meki_edge.rom.reader import RomReader

TINY = RunConfig(prompt_tokens=40, generate_tokens=12, repetitions=3, threads=1)


def arms(bundles: dict[str, Path]) -> list[Path]:
    return [bundles["dense"], bundles["meki"]]


@pytest.fixture(scope="module")
def measured(
    binary: Path, bundles: dict[str, Path], tokens_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished run of both arms with the harness as it is built now; do not change it."""
    directory = tmp_path_factory.mktemp("run") / "out"
    run(arms(bundles), tokens_dir, directory, TINY)
    return directory


def test_results_agree_with_the_harness(measured: Path, bundles: dict[str, Path]) -> None:
    results = json.loads((measured / "results.json").read_text())
    assert [arm["name"] for arm in results["arms"]] == ["dense", "meki"]
    for arm in results["arms"]:
        raw = [json.loads((measured / name).read_text()) for name in arm["raw"]]
        assert len(raw) == TINY.repetitions
        assert arm["peak_rss_bytes"] == max(report["peak_rss_bytes"] for report in raw)
        ends, starts = ([report[f"resident_at_{when}"]["rss_bytes"] for report in raw] for when in ("end", "start"))
        assert arm["rss_bytes"] == max(ends) <= arm["peak_rss_bytes"]
        assert arm["rss_growth_bytes"] == max(end - start for end, start in zip(ends, starts, strict=True))
        for index, (name, test) in enumerate(arm["tests"].items()):
            reports = [report["tests"][index] for report in raw]
            assert name == reports[0]["test"]
            assert test["num_tokens"] == {"pp40": 40, "tg12": 12}[name]
            speeds = [test["num_tokens"] / (report["elapsed_us"] / 1e6) for report in reports]
            assert test["tokens_per_s"]["samples"] == pytest.approx(speeds)
            assert test["tokens_per_s"]["sd"] == pytest.approx(np.std(speeds, ddof=1))
            steps = [step for report in reports for step in report["steps"]]
            assert test["stall_us_per_token"]["p99"] == pytest.approx(
                np.percentile([step["stall_us"] / step["num_tokens"] for step in steps], 99)
            )
            late = [step["deadlines_missed"] for step in steps]
            assert [report["deadlines_missed"] for report in reports] == [
                sum(step["deadlines_missed"] for step in report["steps"]) for report in reports
            ]
            if arm["name"] == "dense":
                assert test["deadlines_missed_share"] is None and {step["slack_us"] for step in steps} == {None}
            else:  # one ROM file: one deadline a step
                assert set(late) <= {0, 1} and test["deadlines_missed_share"] == pytest.approx(np.mean(late))
                for step, missed in zip(steps, late, strict=True):
                    assert step["slack_us" if missed else "stall_us"] == 0
            assert test["stall_share"] == pytest.approx(
                sum(step["stall_us"] for step in steps) / sum(report["elapsed_us"] for report in reports)
            )
    assert results["runner"]["verify_rows"] is False
    dense, meki = results["arms"]
    assert dense["tests"]["tg12"]["bytes_read_per_token"] == 0
    assert dense["tests"]["tg12"]["cache_hit_share"] is None and meki["tests"]["tg12"]["cache_hit_share"] == 0
    with RomReader(bundles["meki"] / "rom.safetensors") as rom:
        assert meki["tests"]["tg12"]["bytes_read_per_token"] == rom.spec.row_bytes
    assert results["host"]["cores"] >= 1 and results["host"]["cpu"]
    shown = {"temperatures": "hottest_celsius", "CPU clocks": "slowest_clock_mhz"}
    missing = [name for name, key in shown.items() if dense["conditions"][key] is None]
    assert results["notes"] == ([f"This system shows no {' and no '.join(missing)}."] if missing else [])


def test_ratios_pair_the_rounds(measured: Path) -> None:
    results = json.loads((measured / "results.json").read_text())
    dense, meki = (
        {name: test["tokens_per_s"]["samples"] for name, test in arm["tests"].items()} for arm in results["arms"]
    )
    assert [(r["arm"], r["baseline"], r["test"]) for r in results["ratios"]] == [
        ("meki", "dense", "pp40"),
        ("meki", "dense", "tg12"),
    ]
    for ratio in results["ratios"]:
        pairs = np.array(meki[ratio["test"]]) / np.array(dense[ratio["test"]])
        assert ratio["samples"] == pytest.approx(pairs)
        assert ratio["low"] <= ratio["median"] <= ratio["high"]


def test_the_trace_is_validation_text_and_the_same_for_all(measured: Path, tokens_dir: Path) -> None:
    trace = [int(token) for token in (measured / "raw/trace.txt").read_text().split()]
    assert trace == tokens.open_shards(tokens_dir).validation[:40].tolist()
    for path in measured.glob("raw/*.json"):
        assert json.loads(path.read_text())["prompt_tokens"] == trace[:40]


def test_arms_alternate_and_a_resume_repeats_unfinished_rounds_only(
    bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    bench = run_module._bench

    def watched(arm: run_module.Bundle, trace: Path, config: RunConfig) -> dict[str, Any]:
        if len(order) == 5:
            raise KeyboardInterrupt
        order.append(arm.name)
        return bench(arm, trace, config)

    monkeypatch.setattr(run_module, "_bench", watched)
    with pytest.raises(KeyboardInterrupt):
        run(arms(bundles), tokens_dir, tmp_path / "out", TINY)
    assert order == ["dense", "meki", "meki", "dense", "dense"]
    assert not (tmp_path / "out" / manifest.FILE_NAME).exists()
    order.clear()
    done = run(arms(bundles), tokens_dir, tmp_path / "out", TINY)
    assert order == ["dense", "meki"], "the halves of a pair belong to the same hour"
    manifest.verify(tmp_path / "out", done)
    assert run(arms(bundles), tokens_dir, tmp_path / "out", TINY) == done
    assert len(order) == 2


def test_one_arm_one_test_with_depth(bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path) -> None:
    config = RunConfig(
        prompt_tokens=0, generate_tokens=4, depth=30, repetitions=1, threads=None, cold=False, cores="all"
    )
    run([bundles["meki"]], tokens_dir, tmp_path / "out", config)
    results = json.loads((tmp_path / "out/results.json").read_text())
    (arm,) = results["arms"]
    assert list(arm["tests"]) == ["tg4"]
    assert arm["tests"]["tg4"]["tokens_per_s"]["sd"] is None
    assert results["ratios"] == []
    assert results["config"]["threads"] >= 1
    assert "Rows were warm" in results["notes"][0]
    assert results["runner"]["cores"] is None
    report = json.loads((tmp_path / "out" / arm["raw"][0]).read_text())
    assert report["page_cache_dropped"] is False
    assert set(report["conditions"]) == {"before", "after"}


def test_a_row_cache_serves_what_comes_again(bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path) -> None:
    config = RunConfig(
        prompt_tokens=0, generate_tokens=100, repetitions=1, threads=1, io="direct", row_cache_bytes=1 << 20
    )
    run([bundles["meki"]], tokens_dir, tmp_path / "out", config)
    (arm,) = json.loads((tmp_path / "out/results.json").read_text())["arms"]
    text = tokens.open_shards(tokens_dir).validation[:100]
    assert arm["tests"]["tg100"]["cache_hit_share"] == pytest.approx(1 - len(np.unique(text)) / 100)


def test_rows_are_compared_with_their_checksums(checked_bundle: Path, tokens_dir: Path, tmp_path: Path) -> None:
    config = RunConfig(prompt_tokens=8, generate_tokens=4, repetitions=1, threads=1, verify_rows=True)
    run([checked_bundle], tokens_dir, tmp_path / "out", config)
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["runner"]["verify_rows"] is True
    assert json.loads((tmp_path / "out" / results["arms"][0]["raw"][0]).read_text())["verify_rows"] is True
    assert "| pread, cold, verified |" in bench_report.markdown(results)
    assert all(record["verify_rows"] for record in bench_report.records(results))


def test_a_rebuilt_harness_is_named(
    bundles: dict[str, Path], binary: Path, tokens_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(prompt_tokens=0, generate_tokens=2, repetitions=1, threads=1)
    rebuilt = tmp_path / "meki-runner"
    shutil.copy2(binary, rebuilt)
    monkeypatch.setenv("MEKI_RUNNER", str(rebuilt))
    run([bundles["meki"]], tokens_dir, tmp_path / "out", config)
    with open(rebuilt, "ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=r"inputs.runner was .*: .*/meki-runner has changed"):
        run([bundles["meki"]], tokens_dir, tmp_path / "out", config)


def test_a_harness_of_another_version_is_refused(
    bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "meki-runner"
    old.write_text('#!/bin/sh\nfor last; do :; done\necho \'{"schema": 1, "tests": []}\' > "$last"\n')
    old.chmod(0o755)
    monkeypatch.setenv("MEKI_RUNNER", str(old))
    config = RunConfig(prompt_tokens=0, generate_tokens=2, repetitions=1, threads=1)
    with pytest.raises(UserError, match="the harness is of another version: its report has schema 1, not 3"):
        run([bundles["meki"]], tokens_dir, tmp_path / "out", config)


def test_the_command_prints_llama_benchs_formats(measured: Path, bundles: dict[str, Path], tokens_dir: Path) -> None:
    command = [sys.executable, "-m", "meki_edge.cli", "run", *arms(bundles), "--tokens", tokens_dir, "-o", measured]
    command += ["-p", 40, "-n", 12, "-r", 3, "-t", 1]

    def printed(*options: str) -> str:
        return subprocess.run([*map(str, command), *options], capture_output=True, text=True, check=True).stdout

    results = json.loads((measured / "results.json").read_text())
    assert json.loads(printed("--format", "json")) == bench_report.records(results)
    assert [line["test"] for line in csv.DictReader(io.StringIO(printed("--format", "csv")))] == ["pp40", "tg12"] * 2
    heading = printed().splitlines()[1]
    assert "I/O µs/token p50 / p99" in heading, "lines stay whole at 80 columns"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompt_tokens": 161}, r"161 tokens \(depth 0 \+ 161\) do not fit the context of 160"),
        ({"depth": 150}, r"190 tokens \(depth 150 \+ 40\) do not fit"),
        ({"repetitions": 0}, "no repetition"),
        ({"generate_tokens": -1}, "negative"),
        ({"prompt_tokens": 0, "generate_tokens": 0}, "nothing to measure"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_what_cannot_work_is_said_before_it_starts(
    bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path, changes: dict[str, int], what: str
) -> None:
    settings = {"prompt_tokens": 40, "generate_tokens": 12, **changes}
    with pytest.raises(UserError, match=what):
        run(arms(bundles), tokens_dir, tmp_path / "out", RunConfig(**settings))
    assert not (tmp_path / "out").exists()


def test_bundles_must_differ_in_name(exported: dict[str, tuple[Path, Path]], tokens_dir: Path, tmp_path: Path) -> None:
    checkpoint, graphs = exported["dense"]
    for name in ("a", "b"):
        pack(graphs, checkpoint, tmp_path / name, PackConfig(name="same"))
    with pytest.raises(UserError, match="2 bundles are called 'same'"):
        run([tmp_path / "a", tmp_path / "b"], tokens_dir, tmp_path / "out", TINY)


def test_text_of_another_tokenizer_is_refused(bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path) -> None:
    source = manifest.load(tokens_dir)
    output = manifest.StageOutput(tmp_path / "tokens", stage="tokenize", config={}, inputs={})
    for name in source.files:
        shutil.copyfile(tokens_dir / name, output.partial / name)
    with open(output.partial / "tokenizer.json", "a") as file:
        file.write("\n")
    output.finish(roles={name: entry.role for name, entry in source.files.items()}, metrics=source.metrics)
    with pytest.raises(UserError, match="another tokenizer than the text"):
        run(arms(bundles), tmp_path / "tokens", tmp_path / "out", TINY)


def test_a_spoiled_bundle_is_refused(bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(bundles["meki"], tmp_path / "bundle")
    rom = tmp_path / "bundle/rom.safetensors"
    with open(rom, "r+b") as file:
        file.truncate(rom.stat().st_size - 1)
    with pytest.raises(UserError, match="the manifest says"):
        run([tmp_path / "bundle"], tokens_dir, tmp_path / "out", TINY)


def test_options_that_do_not_fit_claim_no_directory(bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path) -> None:
    for changes, what in (
        ({"io": "carrier-pigeon"}, "--io takes pread, direct or mmap"),
        ({"cores": "little"}, "--cores takes big or all"),
        ({"io": "mmap", "row_cache_bytes": 9999}, "--row-cache-bytes needs --io pread or direct"),
        ({"verify_rows": True}, "no checksums of its rows"),
    ):
        config = RunConfig(prompt_tokens=4, generate_tokens=2, repetitions=1, **changes)
        with pytest.raises(UserError, match=what):
            run([bundles["meki"]], tokens_dir, tmp_path / "out", config)
        assert not (tmp_path / "out").exists()


def test_what_the_harness_refuses_is_passed_on(bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path) -> None:
    config = RunConfig(prompt_tokens=4, generate_tokens=2, repetitions=1, row_cache_bytes=1)
    with pytest.raises(UserError, match="holds no row"):
        run([bundles["meki"]], tokens_dir, tmp_path / "out", config)


def test_distribution_and_samples_are_numpys() -> None:
    values = [3.0, 1.0, 2.0, 10.0]
    assert stats.distribution(values) == {"mean": 4.0, "p50": 2.5, "p99": pytest.approx(np.quantile(values, 0.99))}
    assert stats.samples(values) == {"mean": 4.0, "sd": pytest.approx(np.std(values, ddof=1)), "samples": values}
    assert stats.samples([5.0]) == {"mean": 5.0, "sd": None, "samples": [5.0]}
    assert (stats.share(1, 3), stats.share(0, 2), stats.share(0, 0)) == (0.25, 0, None)


def test_a_ratio_as_text() -> None:
    assert stats.ratio_text(stats.paired_ratio([1.0, 3.0], [2.0, 4.0])) == "0.625", "two rounds give no interval"
    assert stats.ratio_text({"median": 0.9876, "low": 0.9, "high": 1.0}) == "0.988 (0.900 … 1.000)"


def test_the_bootstrap_is_near_the_exact_one() -> None:
    ours, theirs = [1.0, 1.2, 0.9, 1.1, 1.3], [1.0, 1.0, 1.0, 1.0, 1.0]
    ratio = stats.paired_ratio(ours, theirs)
    every_resample = [np.median(draw) for draw in itertools.product(ours, repeat=5)]
    low, high = np.percentile(every_resample, (2.5, 97.5))
    assert (ratio["median"], ratio["low"], ratio["high"]) == (1.1, pytest.approx(low), pytest.approx(high))
    assert stats.paired_ratio([2.0, 4.0], [1.0, 1.0])["low"] is None
    assert stats.paired_ratio(ours, theirs) == ratio


def test_a_missing_runner_is_said(
    bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEKI_RUNNER", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="the harness is not built"):
        run(arms(bundles), tokens_dir, tmp_path / "out", TINY)
    assert not (tmp_path / "out").exists()
