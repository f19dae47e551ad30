"""`meki-edge run`: measure bundles side by side, as llama-bench does.

Every arm is fed the same trace of real validation text: after ``depth`` tokens that are only
cached, ``pp`` prefills ``prompt_tokens`` and ``tg`` feeds ``generate_tokens``, one a step. A round
measures each arm once, in a process of its own, and every second round reverses the order
(ABBA…), so that a machine that drifts cannot decide the result; arms are then compared round by
round. An interrupted run resumes at the first round that is not whole: a pair is never measured
hours apart.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meki_edge import console, manifest, tokens
from meki_edge.config import to_dict
from meki_edge.device import host, runner, stats
from meki_edge.device.bundle import Bundle, open_bundle
from meki_edge.errors import UserError
from meki_edge.files import read_json, write_json, write_text
from meki_edge.manifest import Manifest, StageOutput

STAGE = "run"
SCHEMA = 1
RESULTS = "results.json"
TRACE = "raw/trace.txt"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of `meki-edge run`."""

    prompt_tokens: int = 512
    """Tokens of the prefill test (``-p``); 0 leaves it out."""
    generate_tokens: int = 128
    """Tokens of the decode test (``-n``); 0 leaves it out."""
    repetitions: int = 5
    """Rounds: how often each arm is measured (``-r``)."""
    depth: int = 0
    """Tokens already in the KV cache when a test starts (``-d``)."""
    threads: int | None = 2
    """Threads of the graph; None takes one a core."""
    io: str = "pread"
    """How rows are read: pread, direct or mmap."""
    drop_page_cache: bool = True
    """Drop the ROM file from the page cache first, so that rows come from storage."""


def run(bundles: list[Path], tokens_dir: Path, out: Path, config: RunConfig, *, force: bool = False) -> Manifest:
    """Measure ``bundles`` (the first is the baseline) on text of ``tokens_dir``; write ``results.json``.

    Raises:
        UserError: a bundle is not whole, two have the same name, one has another tokenizer, the
            tests do not fit a context, the text is too short, or the harness fails.
    """
    config = dataclasses.replace(config, threads=os.cpu_count() if config.threads is None else config.threads)
    opened = [open_bundle(directory) for directory in bundles]
    shards = tokens.open_shards(tokens_dir)
    _check(opened, shards, config)
    output = StageOutput(
        out,
        stage=STAGE,
        config=to_dict(config),
        inputs={
            "tokens": tokens_dir,
            "runner": runner.find_binary(),
            **{f"bundle {arm.name}": arm.directory for arm in opened},
        },
        tools=("onnxruntime",),
        force=force,
    )
    if output.complete is not None:
        return output.complete
    trace = output.partial / TRACE
    write_text(trace, "\n".join(map(str, shards.validation[: _trace_tokens(config)])) + "\n")
    names = _measure(opened, trace, output.partial, config)
    raw = {arm.name: [read_json(output.partial / name) for name in names[arm.name]] for arm in opened}
    results = summarize(opened, raw, names, config)
    write_json(output.partial / RESULTS, results)
    return output.finish(
        roles={RESULTS: "results", TRACE: "trace", **{name: "raw" for arm in opened for name in names[arm.name]}},
        metrics=_metrics(results),
    )


def _check(arms: list[Bundle], shards: tokens.TokenShards, config: RunConfig) -> None:
    """Everything that can be known before the first measurement."""
    if not arms:
        raise UserError("no bundle is given", where="run", fix="name the bundles to measure, the baseline first")
    if config.repetitions < 1 or min(config.prompt_tokens, config.generate_tokens, config.depth) < 0:
        raise UserError("a count is negative or there is no repetition", where="run", fix="give -r 1 or more")
    if config.threads is not None and config.threads < 1:
        raise UserError(f"threads is {config.threads}", where="--threads", fix="give 1 or more")
    if config.prompt_tokens + config.generate_tokens == 0:
        raise UserError("there is nothing to measure", where="run", fix="give -p or -n")
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{names.count(name)} bundles are called {name!r}",
                where=", ".join(str(arm.directory) for arm in arms if arm.name == name),
                fix="pack them with different --name",
            )
    for arm in arms:
        if arm.tokenizer_sha256 != shards.tokenizer_sha256:
            raise UserError(
                f"the bundle {arm.name!r} has another tokenizer than the text",
                where=shards.directory,
                fix="give the tokens directory that the model was trained on",
            )
        for flag, count in (("--prompt-tokens", config.prompt_tokens), ("--generate-tokens", config.generate_tokens)):
            if config.depth + count > arm.spec.context_length:
                raise UserError(
                    f"{config.depth + count} tokens (depth {config.depth} + {count}) do not fit the context of "
                    f"{arm.spec.context_length}",
                    where=arm.directory,
                    fix=f"lower {flag} or --depth, or export with a larger --context-length",
                )
    needed = _trace_tokens(config)
    if len(shards.validation) < needed:
        raise UserError(
            f"the validation text has {len(shards.validation)} tokens, the tests need {needed}",
            where=shards.directory / tokens.VALIDATION,
            fix="lower --prompt-tokens, --generate-tokens or --depth, or tokenize more text",
        )


def _trace_tokens(config: RunConfig) -> int:
    """What the harness reads: the cached tokens, then those that a test feeds."""
    return config.depth + max(config.prompt_tokens, config.generate_tokens)


def _measure(arms: list[Bundle], trace: Path, partial: Path, config: RunConfig) -> dict[str, list[str]]:
    """Run what is missing; the names of each arm's raw files, by round."""
    names = {arm.name: [f"raw/{index:03d}-{arm.name}.json" for index in range(config.repetitions)] for arm in arms}
    with console.progress("{task.fields[arm]}") as bar:
        task = bar.add_task("measuring", total=config.repetitions * len(arms), arm="")
        for index in range(config.repetitions):
            if all((partial / names[arm.name][index]).is_file() for arm in arms):
                bar.advance(task, len(arms))
                continue
            for arm in arms if index % 2 == 0 else reversed(arms):
                bar.update(task, arm=arm.name)
                _bench(arm, trace, partial / names[arm.name][index], config)
                bar.advance(task)
    return names


def _bench(arm: Bundle, trace: Path, target: Path, config: RunConfig) -> None:
    """One repetition in a process of its own; its first step is untimed (``--warmup``)."""
    arguments = ["bench", "--bundle", str(arm.directory), "--trace-file", str(trace)]
    for flag in ("prompt_tokens", "generate_tokens", "depth", "threads", "io"):
        arguments += [f"--{flag.replace('_', '-')}", str(getattr(config, flag))]
    arguments += ["--warmup", "1", *(["--drop-page-cache"] if config.drop_page_cache else [])]
    write_json(target, runner.run_json(arguments))


def summarize(
    arms: Sequence[Bundle], raw: dict[str, list[dict[str, Any]]], names: dict[str, list[str]], config: RunConfig
) -> dict[str, Any]:
    """``results.json`` from the harness's reports ``raw[arm][round]``."""
    first = raw[arms[0].name][0]
    entries = [
        {
            "name": arm.name,
            "bundle": os.fspath(arm.directory),
            "bundle_sha256": manifest.digest(arm.directory),
            "bundle_bytes": arm.total_bytes,
            "metrics": arm.metrics,
            "tests": {
                test["test"]: _summarize_test([report["tests"][index] for report in raw[arm.name]])
                for index, test in enumerate(raw[arm.name][0]["tests"])
            },
            "load_us": stats.samples([report["load_us"] for report in raw[arm.name]]),
            "peak_rss_bytes": max(report["peak_rss_bytes"] for report in raw[arm.name]),
            "raw": names[arm.name],
        }
        for arm in arms
    ]
    return {
        "schema": SCHEMA,
        "host": host.facts(),
        "runner": {key: first[key] for key in ("runner_version", "backend", "ort_version", "threads", "io")},
        "config": to_dict(config),
        "arms": entries,
        "ratios": [
            {"arm": other["name"], "baseline": entries[0]["name"], "test": test, **_ratio(other, entries[0], test)}
            for other in entries[1:]
            for test in other["tests"]
        ],
        "notes": _notes(config),
    }


def _metrics(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The manifest's short form: mean speeds by arm, medians of the paired ratios."""
    speeds = {
        arm["name"]: {f"{name}_tokens_per_s": test["tokens_per_s"]["mean"] for name, test in arm["tests"].items()}
        for arm in results["arms"]
    }
    ratios: dict[str, dict[str, float]] = {}
    for ratio in results["ratios"]:
        ratios.setdefault(f"{ratio['arm']}/{ratio['baseline']}", {})[ratio["test"]] = ratio["median"]
    return {**speeds, **ratios}


def _ratio(arm: dict[str, Any], baseline: dict[str, Any], test: str) -> dict[str, Any]:
    speeds = [entry["tests"][test]["tokens_per_s"]["samples"] for entry in (arm, baseline)]
    return stats.paired_ratio(*speeds)


def _summarize_test(repetitions: list[dict[str, Any]]) -> dict[str, Any]:
    """One test of one arm over all rounds. Per-token values of a prefill step are spread over its tokens."""
    steps = [step for repetition in repetitions for step in repetition["steps"]]
    num_tokens = sum(step["num_tokens"] for step in steps)

    def per_token(key: str) -> dict[str, float]:
        return stats.distribution([step[key] / step["num_tokens"] for step in steps])

    return {
        "num_tokens": repetitions[0]["num_tokens"],
        "tokens_per_s": stats.samples([1e6 * r["num_tokens"] / r["elapsed_us"] for r in repetitions]),
        "step_us": stats.distribution([step["end_us"] - step["start_us"] for step in steps]),
        "io_us_per_token": per_token("io_us"),
        "stall_us_per_token": per_token("stall_us"),
        "stall_share": sum(step["stall_us"] for step in steps) / sum(r["elapsed_us"] for r in repetitions),
        "bytes_read_per_token": sum(step["bytes_read"] for step in steps) / num_tokens,
    }


def _notes(config: RunConfig) -> list[str]:
    """What a reader of the figures must know."""
    return [] if config.drop_page_cache else ["The page cache was left as it was: rows may have come from memory."]
