"""`meki-edge hub …`: take models through Qualcomm AI Hub, as far as asked.

Lint, upload, compile, link, profile on one or several devices, infer on real text and compare with
ONNX Runtime, download. Every step finds what an earlier run already sent (:mod:`export.hub_ledger`),
so `hub profile` after `hub link` compiles nothing, and the same command after an interruption only
waits.

Output: ``hub.json``, ``hub.html``, the service's own profiles under ``raw/``, binaries under
``binaries/<arm>/<chip>/``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export import hub_plots, hub_report, hub_trace
from export.hub_flow import DLC, RUNTIMES, Hub, Steps, Target
from export.hub_jobs import Jobs
from export.hub_ledger import Entry, Ledger
from export.hub_lint import explain, require_clean
from export.hub_service import HubDevice, choose_device
from export.hub_source import Arm, open_arms, slug
from meki_edge import console, report_page
from meki_edge.config import to_dict
from meki_edge.errors import UserError, nearest
from meki_edge.files import read_json, write_json, write_text
from meki_edge.manifest import Manifest, StageOutput

STAGE = "hub"
STEPS = ("compile", "link", "profile", "infer", "run")
LOGS = "logs"


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """What to do at the service, and on which devices."""

    devices: tuple[str, ...]
    """Names as the service lists them; binaries are made for the chip of each."""

    step: str = "run"
    """How far to go: compile, link, profile (with what it needs), infer (with what it needs), run (all)."""

    target_runtime: str = DLC
    """``qnn_dlc`` (linked, weights shared) or ``precompiled_qnn_onnx`` (for ONNX Runtime)."""

    infer_steps: int = 4
    """Decode steps of real text that are compared with ONNX Runtime, after a prefill chunk."""

    prompt_lengths: tuple[int, ...] = (128, 512, 2048)
    """Prompts for which the time to the first token is given, as far as the context holds them."""

    profiler_iterations: int = 100
    """Runs of a graph in a profile."""

    qairt_version: str | None = None
    """Of the service's compiler and runtime; None: its default."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to reach the service, and what is remembered of it."""

    connect: Callable[[], Hub]
    ledger: Ledger
    resubmit: bool = False

    def open(self, logs: Path) -> tuple[Hub, Jobs]:
        """The service and its jobs; ``logs`` is where the logs of failed ones go."""
        service = self.connect()
        return service, Jobs(service, service.service, self.ledger, logs, resubmit=self.resubmit, explain=explain)


def hub(
    sources: list[Path],
    out: Path,
    config: HubConfig,
    access: Access,
    *,
    tokens: Path | None = None,
    force: bool = False,
) -> Manifest:
    """Take ``sources`` (bundles, exports, calibrated exports, or local binaries) through the service.

    Args:
        tokens: the tokens directory whose validation text the graphs are run on (steps infer and run).

    Raises:
        UserError: anything that can be known before an upload, a job that failed, time that ran out.
    """
    _check_config(config)
    arms = open_arms(sources)
    traced = _traced(arms, config, tokens)
    output = StageOutput(
        out,
        stage=STAGE,
        config=to_dict(config),
        inputs={arm.name: arm.directory for arm in arms} | ({"tokens": tokens} if traced and tokens else {}),
        tools=("qai-hub", "onnxruntime"),
        force=force,
    )
    if output.complete is not None:
        return output.complete
    service, jobs = access.open(output.partial / LOGS)
    offered = jobs.patiently(service.devices)
    devices = [choose_device(offered, name) for name in config.devices]
    for arm in arms:
        _check_fit(arm, devices)
        if arm.chipset is None:
            require_clean(arm, devices)
    samples, expected = hub_trace.trace(traced, tokens, config.infer_steps, output.partial / "trace")
    steps = Steps(service, access.ledger, jobs, runtime=config.target_runtime, qairt_version=config.qairt_version)
    steps.upload(arms)
    targets = steps.make(arms, devices, link=config.step != "compile")
    profiles, agreements = {}, {}
    if config.step in ("profile", "infer", "run"):
        iterations = 0 if config.step == "infer" else config.profiler_iterations
        ran = steps.run(targets, iterations, samples)
        with console.progress() as bar:
            task = bar.add_task("fetching results", total=sum(map(len, ran.values())))
            for key, entry in ran["profile"].items():
                profiles[key] = _profile(steps.result(entry, service.profile), entry)
                bar.advance(task)
            for key, entry in ran["inference"].items():
                found = steps.result(entry, service.outputs)
                agreements[key] = hub_trace.compare(found, expected[key[1:]], entry.label)
                bar.advance(task)
    roles = {}
    for key, profile in profiles.items():
        name = f"raw/{'-'.join(map(slug, key))}.json"
        write_json(output.partial / name, profile)
        roles[name] = "raw"
    if config.step in ("compile", "link", "run"):
        roles |= {name: "binary" for name in _download(steps, service, targets, output.partial)}
    result = hub_report.build(
        arms,
        devices,
        profiles,
        agreements,
        service=service.service,
        config=to_dict(config),
        jobs=[_told(service, entry) for entry in jobs.finished.values()],
    )
    write_json(output.partial / "hub.json", result)
    write_text(output.partial / "hub.html", page(result))
    return output.finish(
        roles={"hub.json": "results", "hub.html": "html", **roles},
        metrics={"headline": result["headline"], "notes": result["notes"], "jobs": len(result["jobs"])},
    )


def page(result: dict[str, Any]) -> str:
    """``hub.html`` from the contents of ``hub.json``."""
    tables = {name: dict(hub_report.cells(result, name)) for name in result["measured"]}
    arms = {name: list(figures) for name, figures in result["measured"].items()}
    labels = dict.fromkeys(label for cells in tables.values() for label in cells)
    rows = [
        (label, [text for name in tables for text in tables[name].get(label, [hub_report.MISSING] * len(arms[name]))])
        for label in labels
    ]
    return report_page.render(
        "hub.html.j2",
        result=result,
        tables={"devices": list(tables), "arms": arms, "rows": rows},
        published=hub_report.published_rows(result),
        plots=hub_plots.plots(result),
    )


def read(directory: Path) -> dict[str, Any]:
    """``hub.json`` of a finished run."""
    return read_json(directory / "hub.json")


def show(directory: Path) -> None:
    """Print the tables of a finished run."""
    result = read(directory)
    for device, figures in result["measured"].items():
        if figures:
            rows = [[label, *texts] for label, texts in hub_report.cells(result, device)]
            console.show_table(device, ["", *figures], rows)
    if result["published"] and any(result["measured"].values()):
        rows = hub_report.published_rows(result)
        title = f"Published for the same chip, not measured here. Source: {result['published'][0]['source']}"
        console.show_table(title, ["model", "device", "runtime", "context", "tokens/s"], rows)
    for note in result["notes"]:
        console.info(note)
    console.info(f"page: {directory / 'hub.html'}")


def _check_config(config: HubConfig) -> None:
    if config.step not in STEPS:
        raise UserError(f"unknown step {config.step!r}", where="step", fix=f"one of {', '.join(STEPS)}")
    if config.target_runtime not in RUNTIMES:
        close = nearest(config.target_runtime, RUNTIMES)
        fix = f"use {' or '.join(RUNTIMES)}"
        raise UserError(f"unknown target runtime {config.target_runtime!r}{close}", where="--target-runtime", fix=fix)
    if not config.devices:
        raise UserError("no device is given", where="--device", fix="name one that `meki-edge hub devices` lists")
    if config.target_runtime != DLC and config.step == "link":
        fix = "leave the runtime at qnn_dlc, or use `hub compile`"
        raise UserError(f"{config.target_runtime} is not linked", where="--target-runtime", fix=fix)


def _traced(arms: list[Arm], config: HubConfig, tokens: Path | None) -> list[Arm]:
    """The arms that are to infer; what that needs is checked here, before anything is sent."""
    if config.step == "run" and tokens is None:
        console.info("no --tokens: nothing is inferred on the devices, the logits stay uncompared")
        return []
    if config.step not in ("infer", "run"):
        return []
    if tokens is None:
        fix = "give the output of `meki-edge tokenize` with --tokens"
        raise UserError("inference needs real text", where="--tokens", fix=fix)
    traced = [arm for arm in arms if arm.spec is not None]
    if not traced:
        fix = "give a bundle or an export"
        raise UserError("binaries alone do not say what their inputs are", where=arms[0].directory, fix=fix)
    hub_trace.check(traced, tokens, config.infer_steps)
    return traced


def _check_fit(arm: Arm, devices: list[HubDevice]) -> None:
    """A binary runs on the chip it was made for; float graphs need an NPU that has float16."""
    for device in devices:
        if arm.chipset is not None and arm.chipset != device.binaries_for:
            chip = device.chip.name if device.chip else device.binaries_for
            raise UserError(
                f"the binaries were compiled for {arm.chipset}, {device.name} has {chip} ({device.binaries_for})",
                where=arm.directory,
                fix=f"compile for {device.binaries_for}, choose another --device, or give the bundle itself",
            )
        half = device.values("htp-supports-fp16")
        if half == ("false",) and not arm.manifest.metrics.get("precision", "fp16").startswith(("w8a", "w4a")):
            raise UserError(
                f"the NPU of {device.name} has no float16, and {arm.name} is not quantized",
                where=arm.directory,
                fix="calibrate it to w8a16 first, or choose another device",
            )


def _profile(found: dict[str, Any], entry: Entry) -> dict[str, Any]:
    if not found:
        raise UserError(
            f"the job {entry.id} ended well, but left no profile",
            where=entry.label,
            fix="look at the job's page; report it if the profile is there",
        )
    return found


def _download(steps: Steps, service: Hub, targets: list[Target], partial: Path) -> Iterator[str]:
    """Download each binary once, into ``binaries/<arm>/<chip>/``."""
    made: dict[str, tuple[Path, Entry]] = {}
    for target in targets:
        if target.made_by is not None:
            # A linked binary is named by its part, what was compiled alone by its graph.
            name = f"part_{target.unit.part}" if target.made_by.kind == "link" else target.unit.name
            directory = Path("binaries") / slug(target.arm) / slug(target.device.binaries_for)
            made.setdefault(target.made_by.key, (directory / name, target.made_by))
    with console.progress() as bar:
        for stem, entry in bar.track(made.values(), description="downloading"):
            yield from _download_one(steps, service, entry, partial, stem)


def _download_one(steps: Steps, service: Hub, entry: Entry, partial: Path, stem: Path) -> list[str]:
    target = partial / stem
    target.parent.mkdir(parents=True, exist_ok=True)
    there = [path for path in target.parent.glob(f"{stem.name}.*") if path.is_file()]
    if there:  # an interrupted run had it
        return [f"{stem.parent}/{path.name}" for path in there]
    work = partial / "download"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    found = steps.result(entry, lambda job_id: service.download_model(job_id, work))
    final = target.with_name(f"{stem.name}{found.suffix or '.bin'}")
    found.replace(final)
    return [f"{stem.parent}/{final.name}"]


def _told(service: Hub, entry: Entry) -> dict[str, Any]:
    url = service.job_url(entry.id or "")
    return {"job": entry.id, "what": entry.label, "device": entry.device, "options": entry.options, "url": url}
