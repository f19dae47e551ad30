"""`meki-edge run`: measure bundles side by side, as llama-bench does.

Every arm is fed the same trace of real validation text: after ``depth`` tokens that are only
cached, ``pp`` prefills ``prompt_tokens`` and ``tg`` feeds ``generate_tokens``, one a step. A round
measures each arm once, in a process of its own, and every second round reverses the order
(ABBA…), so that a machine that drifts cannot decide the result; arms are then compared round by
round. An interrupted run resumes at the first round that is not whole: a pair is never measured
hours apart. Thermal zones and clocks are noted before and after each measurement, where the
system shows them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meki_edge import console, manifest, tokens
from meki_edge.config import to_dict
from meki_edge.device import host, runner, stats
from meki_edge.device.bundle import Bundle, open_bundle
from meki_edge.errors import UserError
from meki_edge.files import read_json, write_json, write_text
from meki_edge.manifest import Manifest, StageOutput
from meki_edge.rom.reader import RomReader

STAGE = "run"
SCHEMA = 3  # of results.json
RESULTS = "results.json"
TRACE = "raw/trace.txt"
RUNNER_FACTS = (
    "runner_version",
    "backend",
    "tensor_memory",
    "ort_version",
    "threads",
    "cores",
    "io",
    "verify_rows",
)
WARM_ROWS = 1024  # read at a time to warm the page cache


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
    cold: bool = True
    """Drop the ROM files from the page cache before each test, so that rows come from storage; else
    read the rows of the trace into it first, so that they come from memory."""
    row_cache_bytes: int = 0
    """Memory of the harness's own cache of rows; 0: none. Not with ``mmap``."""
    verify_rows: bool = False
    """Compare every row that is read with its checksum; the ROM files need them."""
    cores: str = "big"
    """Where the harness runs: ``big`` keeps off the slowest cores, where a processor has several kinds; ``all``."""


def run(bundles: list[Path], tokens_dir: Path, out: Path, config: RunConfig, *, force: bool = False) -> Manifest:
    """Measure ``bundles`` (the first is the baseline) on text of ``tokens_dir``; write ``results.json``.

    Raises:
        UserError: a bundle is not whole, two have the same name, one has another tokenizer, the
            tests do not fit a context, the text is too short, or the harness fails.
    """
    config = dataclasses.replace(config, threads=os.cpu_count() if config.threads is None else config.threads)
    opened = [open_bundle(directory) for directory in bundles]
    shards = tokens.open_shards(tokens_dir)
    check(opened, shards, config)
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
    trace = write_trace(output.partial, shards, config)
    names, raw = measure(opened, output.partial, config, lambda arm, _: _bench(arm, trace, config))
    return finish(output, summarize(opened, raw, names, config))


def write_trace(partial: Path, shards: tokens.TokenShards, config: RunConfig) -> Path:
    """The ids that every arm is fed, as a file of the run."""
    trace = partial / TRACE
    write_text(trace, "\n".join(map(str, shards.validation[: _trace_tokens(config)])) + "\n")
    return trace


def finish(output: StageOutput, results: dict[str, Any]) -> Manifest:
    """Write ``results.json`` and the manifest."""
    write_json(output.partial / RESULTS, results)
    raw = {name: "raw" for arm in results["arms"] for name in arm["raw"]}
    return output.finish(roles={RESULTS: "results", TRACE: "trace", **raw}, metrics=_metrics(results))


def check(arms: list[Bundle], shards: tokens.TokenShards, config: RunConfig) -> None:
    """Everything that can be known before the first measurement."""
    if not arms:
        raise UserError("no bundle is given", where="run", fix="name the bundles to measure, the baseline first")
    if config.repetitions < 1 or min(config.prompt_tokens, config.generate_tokens, config.depth) < 0:
        raise UserError("a count is negative or there is no repetition", where="run", fix="give -r 1 or more")
    if config.threads is not None and config.threads < 1:
        raise UserError(f"threads is {config.threads}", where="--threads", fix="give 1 or more")
    if config.prompt_tokens + config.generate_tokens == 0:
        raise UserError("there is nothing to measure", where="run", fix="give -p or -n")
    for flag, given, known in (("--io", config.io, runner.IO_MODES), ("--cores", config.cores, ("big", "all"))):
        if given not in known:
            what = f"{flag} takes {', '.join(known[:-1])} or {known[-1]}, got {given!r}"
            raise UserError(what, where=flag, fix="give one of them")
    if config.row_cache_bytes > 0 and config.io == "mmap":
        what = "--row-cache-bytes needs --io pread or direct: the pages of a map are a cache already"
        raise UserError(what, where="--row-cache-bytes", fix="leave it out, or give another --io")
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
        for rom in arm.spec.roms if config.verify_rows else ():
            RomReader(arm.directory / rom.file, verify_rows=True).close()  # it has checksums
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


def measure(
    arms: list[Bundle],
    partial: Path,
    config: RunConfig,
    bench: Callable[[Bundle, Callable[[str], None]], dict[str, Any]],
) -> tuple[dict[str, list[str]], dict[str, list[dict[str, Any]]]]:
    """Run what is missing.

    Args:
        bench: makes one repetition of an arm and returns its report; it may show words beside the
            progress bar by the function that it is given.

    Returns:
        Each arm's raw files and their contents, by round.
    """
    names = {arm.name: [f"raw/{index:03d}-{arm.name}.json" for index in range(config.repetitions)] for arm in arms}
    with console.progress("{task.fields[arm]}") as bar:
        task = bar.add_task("measuring", total=config.repetitions * len(arms), arm="")
        for index in range(config.repetitions):
            if all((partial / names[arm.name][index]).is_file() for arm in arms):
                bar.advance(task, len(arms))
                continue
            for arm in arms if index % 2 == 0 else reversed(arms):
                bar.update(task, arm=arm.name)
                report = bench(arm, lambda words: bar.update(task, arm=words))
                write_json(partial / names[arm.name][index], report)
                bar.advance(task)
    return names, {arm.name: [read_json(partial / name) for name in names[arm.name]] for arm in arms}


def bench_arguments(arm: Bundle, trace: Path, config: RunConfig) -> list[str]:
    """The harness's command for one repetition; its first step is untimed (``--warmup``)."""
    arguments = ["bench", "--bundle", str(arm.directory), "--trace-file", str(trace)]
    for flag in ("prompt_tokens", "generate_tokens", "depth", "threads", "cores", "io", "row_cache_bytes"):
        arguments += [f"--{flag.replace('_', '-')}", str(getattr(config, flag))]
    flags = {"--drop-page-cache": config.cold, "--verify-rows": config.verify_rows}
    return [*arguments, "--warmup", "1", *(flag for flag, given in flags.items() if given)]


def _bench(arm: Bundle, trace: Path, config: RunConfig) -> dict[str, Any]:
    """One repetition on this machine, in a process of its own."""
    if not config.cold:
        _warm(arm, trace)
    before = host.conditions()
    report = runner.run_json(bench_arguments(arm, trace, config))
    return {**report, "conditions": {"before": before, "after": host.conditions()}}


def _warm(arm: Bundle, trace: Path) -> None:
    """Read the rows of the trace into the page cache."""
    ids = np.array(trace.read_text(encoding="utf-8").split(), np.int64)
    for rom in arm.spec.roms:
        with RomReader(arm.directory / rom.file) as reader:
            row_ids, counts = reader.row_ids(ids)
            wanted = np.unique(row_ids[np.arange(row_ids.shape[1]) < counts[:, None]])
            for start in range(0, len(wanted), WARM_ROWS):
                reader.raw(wanted[start : start + WARM_ROWS])


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
            **_memory(raw[arm.name]),
            "ttft_us": _time_to_first_token(raw[arm.name]),
            "conditions": _conditions(raw[arm.name]),
            "raw": names[arm.name],
        }
        for arm in arms
    ]
    return {
        "schema": SCHEMA,
        "host": host.facts(),
        "runner": {key: first[key] for key in RUNNER_FACTS},
        "config": to_dict(config),
        "arms": entries,
        "ratios": [
            {"arm": other["name"], "baseline": entries[0]["name"], "test": test, **_ratio(other, entries[0], test)}
            for other in entries[1:]
            for test in other["tests"]
        ],
        "notes": _notes(config, entries),
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
        "deadlines_missed_share": _missed(steps),
        "bytes_read_per_token": sum(step["bytes_read"] for step in steps) / num_tokens,
        "cache_hit_share": stats.share(sum(s["cache_hits"] for s in steps), sum(s["rows_read"] for s in steps)),
    }


def _missed(steps: list[dict[str, Any]]) -> float | None:
    """The share of steps whose rows were not ready when the graph could take them; None where none were due."""
    late = [step["deadlines_missed"] > 0 for step in steps if step["slack_us"] is not None]
    return stats.share(sum(late), len(late) - sum(late))


def _memory(reports: list[dict[str, Any]]) -> dict[str, int | None]:
    """Resident memory, the largest over the rounds: of the whole process (loading maps every weight
    once), when the tests were done, and what it grew by from the first timed step to then."""
    return {
        "peak_rss_bytes": max(report["peak_rss_bytes"] for report in reports),
        "rss_bytes": max(report["resident_at_end"]["rss_bytes"] for report in reports),
        "pss_bytes": max((report["pss_bytes"] for report in reports if report.get("pss_bytes")), default=None),
        "rss_file_bytes": max(report["resident_at_end"]["file_bytes"] for report in reports),
        "rss_growth_bytes": max(
            report["resident_at_end"]["rss_bytes"] - report["resident_at_start"]["rss_bytes"] for report in reports
        ),
    }


def _time_to_first_token(reports: list[dict[str, Any]]) -> dict[str, Any] | None:
    """From a prompt's ids to its logits, once the bundle is loaded: the prefill test's time; None without one."""
    prefills = [test["elapsed_us"] for report in reports for test in report["tests"] if test["test"].startswith("pp")]
    return stats.samples(prefills) if prefills else None


def _conditions(reports: list[dict[str, Any]]) -> dict[str, float | None]:
    """The hottest zone and the slowest core seen before or after a round; None where the system shows none."""
    seen = [moment for report in reports for moment in report["conditions"].values()]
    degrees = [value for moment in seen for value in (moment["temperatures"] or {}).values()]
    clocks = [value for moment in seen for value in (moment["clocks"] or {}).values()]
    return {"hottest_celsius": max(degrees, default=None), "slowest_clock_mhz": min(clocks, default=None)}


def _notes(config: RunConfig, arms: list[dict[str, Any]]) -> list[str]:
    """What a reader of the figures must know."""
    notes = []
    if not config.cold:
        past = "; but --io direct reads past it, from storage" if config.io == "direct" else ""
        notes.append(f"Rows were warm: the trace's were read into the page cache before each round{past}.")
    shown = {"temperatures": "hottest_celsius", "CPU clocks": "slowest_clock_mhz"}
    missing = [name for name, key in shown.items() if all(arm["conditions"][key] is None for arm in arms)]
    if missing:
        notes.append(f"This system shows no {' and no '.join(missing)}.")
    contexts = {arm["name"]: arm["metrics"]["context_lengths"] for arm in arms}
    if any(lengths != contexts[arms[0]["name"]] for lengths in contexts.values()):
        counts = ", ".join(f"{name}: {' / '.join(map(str, lengths))}" for name, lengths in contexts.items())
        notes.append(
            f"The graphs attend to different numbers of slots, which is part of any difference in speed ({counts})."
        )
    precisions = {arm["name"]: arm["metrics"]["precision"] for arm in arms}
    if len(set(precisions.values())) > 1:
        listed = ", ".join(f"{name}: {precision}" for name, precision in precisions.items())
        notes.append(f"The graphs are of different precisions, which is part of any difference in speed ({listed}).")
    return notes
