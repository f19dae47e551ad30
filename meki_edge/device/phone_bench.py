"""`meki-edge bench --on adb`: what `meki-edge run` does, on a phone.

The same rounds, traces and statistics, and the same ``results.json``, so `meki-edge compare` reads it.
Before each repetition the phone may cool down; heat, clocks, screen and battery are noted before and
after it. An interrupted measurement resumes at the first round that is not whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meki_edge import tokens
from meki_edge.config import to_dict
from meki_edge.device import phone_conditions, phone_facts, run, sideload
from meki_edge.device.adb import Device
from meki_edge.device.bundle import Bundle, open_bundle
from meki_edge.device.phone_facts import PhoneFacts
from meki_edge.device.phone_runner import PhoneRunner, require_npu
from meki_edge.errors import UserError
from meki_edge.manifest import Manifest, StageOutput

DEFAULT_THREADS = 2
EMULATED_NOTE = "Measured on an emulated phone: the figures show that everything works, and nothing about speed."


@dataclass(frozen=True, kw_only=True)
class PhoneRunConfig(run.RunConfig):
    """Options of `meki-edge bench --on adb`."""

    serial: str
    """The phone, as adb calls it."""
    target: str = phone_facts.TARGET
    """The folder on the phone that bundles were sideloaded to."""
    npu: bool = False
    """Run the bundles' Hexagon binaries, not their graphs on the CPU."""
    npu_memory: str = "auto"
    """Their inputs and outputs: ``shared`` with the NPU, ``copied`` in each step, or ``auto``: shared where the phone has
    ``libcdsprpc.so``."""
    cool_to_celsius: float = 45.0
    """Before each repetition, wait until the processor's hottest zone is no hotter than this."""
    cool_wait_s: float = 300.0
    """Wait at most so long; 0: never."""


def bench(
    bundles: list[Path], tokens_dir: Path, out: Path, config: PhoneRunConfig, device: Device, *, force: bool = False
) -> Manifest:
    """Measure sideloaded ``bundles`` (the first is the baseline) on ``device``; write ``results.json``.

    Raises:
        UserError: as :func:`run.run`; or a bundle is not on the phone, the harness fails there (its
            log is kept in ``out``), or the connection ends.
    """
    if config.cool_wait_s < 0:
        raise UserError(f"the wait is {config.cool_wait_s} s", where="--cool-wait", fix="give 0 or more")
    require_npu(config.npu_memory, npu=config.npu)
    config = dataclasses.replace(config, threads=config.threads or DEFAULT_THREADS)
    places = sideload.layout(config.target)
    opened = [open_bundle(directory) for directory in bundles]
    shards = tokens.open_shards(tokens_dir)
    run.check(opened, shards, config)
    output = StageOutput(
        out,
        stage=run.STAGE,
        config=to_dict(config),
        inputs={"tokens": tokens_dir, **{f"bundle {arm.name}": arm.directory for arm in opened}},
        force=force,
    )
    if output.complete is not None:
        return output.complete
    facts = phone_facts.read(device, places.target)
    failures = output.partial / "failed"
    harness = PhoneRunner(device, places, npu=config.npu, npu_memory=config.npu_memory, failures=failures)
    for arm in opened:
        harness.require(arm.directory)
    trace = run.write_trace(output.partial, shards, config)

    def once(arm: Bundle, say: Callable[[str], None]) -> dict[str, Any]:
        return _bench(arm, trace, config, harness, say)

    names, raw = run.measure(opened, output.partial, config, once)
    results = run.summarize(opened, raw, names, config)
    return run.finish(output, _on_phone(results, raw, facts, config))


def _bench(
    arm: Bundle, trace: Path, config: PhoneRunConfig, harness: PhoneRunner, say: Callable[[str], None]
) -> dict[str, Any]:
    """One repetition, with the conditions around it."""

    def look() -> dict[str, Any]:
        return phone_conditions.read(harness.device)

    def waiting(celsius: float) -> None:
        say(f"{arm.name}: cooling down, {celsius:.0f} °C")

    waited_s = phone_conditions.cool_down(look, config.cool_to_celsius, config.cool_wait_s, waiting)
    say(arm.name)
    if not config.cold:
        harness.warm(arm.directory, trace)
    before = look()
    report = harness.run_json(run.bench_arguments(arm, trace, config))
    return {**report, "waited_s": waited_s, "conditions": {"before": before, "after": look()}}


def _on_phone(
    results: dict[str, Any], raw: dict[str, list[dict[str, Any]]], facts: PhoneFacts, config: PhoneRunConfig
) -> dict[str, Any]:
    """``results.json`` with the phone in the place of the host."""
    arms = [{**arm, **_power(arm, raw[arm["name"]])} for arm in results["arms"]]
    reports = [report for reports in raw.values() for report in reports]
    backend = results["runner"]["backend"]
    unit = {"cpu": "CPU", "qnn": "NPU"}.get(backend, backend)
    place = f"Measured on {facts.title}, {facts.serial}, on its {unit}."
    notes = [EMULATED_NOTE if facts.emulated else place, *_notes(reports, config)]
    return {
        **results,
        "host": facts.as_host(),
        "phone": {
            "title": facts.title,
            "model": facts.model,
            "soc": facts.soc,
            "android": facts.android,
            "kernel": facts.kernel,
            "serial": facts.serial,
            "emulated": facts.emulated,
        },
        "arms": arms,
        "notes": [*notes, *results["notes"]],
    }


def _power(arm: dict[str, Any], reports: list[dict[str, Any]]) -> dict[str, float | None]:
    """Mean power over the arm's runs, and the energy of a decoded token at that power; None on a cable."""
    watts = [report["power_watts"] for report in reports]
    if not watts or any(value is None for value in watts):
        return {"power_watts": None, "energy_joules_per_token": None}
    mean = sum(watts) / len(watts)
    speed = next((test["tokens_per_s"]["mean"] for name, test in arm["tests"].items() if name.startswith("tg")), None)
    return {"power_watts": mean, "energy_joules_per_token": None if speed is None else mean / speed}


def _notes(reports: list[dict[str, Any]], config: PhoneRunConfig) -> list[str]:
    """What a reader must know of the phone's state."""
    moments = [moment for report in reports for moment in report["conditions"].values()]
    notes = []
    starts = [phone_conditions.hottest(report["conditions"]["before"]) for report in reports]
    hot = [value for value in starts if value is not None and value > config.cool_to_celsius]
    if hot:
        limit = f"{config.cool_to_celsius:.0f} °C (up to {max(hot):.0f})"
        notes.append(f"{len(hot)} of {len(reports)} runs started hotter than {limit}.")
    limits = [limit for moment in moments for limit in (moment["clock_limits"] or {}).values()]
    if limits and min(limits) < 1:
        notes.append(f"The phone held its big cores down to {min(limits):.0%} of their clock at times.")
    if any(moment["thermal_status"] for moment in moments):
        notes.append(f"Android reported thermal throttling (status {max(m['thermal_status'] or 0 for m in moments)}).")
    screens = sorted({moment["screen"] for moment in moments if moment["screen"]})
    if screens:
        notes.append(f"Screen: {', '.join(screens)}.")
    if all(report["power_watts"] is None for report in reports):
        notes.append("Energy is not known: the phone hides its battery gauge, or was on a cable.")
    return notes
