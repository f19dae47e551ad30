"""The steps at AI Hub: upload, compile, link, profile, infer, download; each job sent once.

`qnn_dlc`: every part of every graph becomes a portable file, and for each chip a part's graphs
(prefill and decode of each context) are linked into one binary in which they share their weights.
`precompiled_qnn_onnx`: every graph becomes a binary of its own for each chip, wrapped in ONNX, as
ONNX Runtime's QNN provider loads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from export.hub_jobs import Jobs, Request, Service, now
from export.hub_ledger import FAILED, Entry, Ledger, request_key
from export.hub_service import HubDevice, NotFound
from export.hub_source import Arm, Unit
from export.hub_upload import Storage, Uploads
from meki_edge.errors import UserError

DLC, WRAPPED = "qnn_dlc", "precompiled_qnn_onnx"
RUNTIMES = (DLC, WRAPPED)
FLOAT_PRECISION = "default_graph_htp_precision=FLOAT16"
"""Of the operators that are not quantized: the NPU has no float32."""
OPTIMIZATION = "default_graph_htp_optimizations=O=3"
SAMPLES = dict[str, list[np.ndarray]]
T = TypeVar("T")


class Hub(Service, Storage, Protocol):
    """What the steps need of the service; :class:`export.aihub.AiHub` has it."""

    def devices(self) -> list[HubDevice]: ...
    def submit_compile(self, model_id: str, device: HubDevice, name: str, options: str) -> str: ...
    def submit_link(self, compile_ids: list[str], device: HubDevice, name: str, options: str) -> str: ...
    def submit_run(self, maker_id: str, device: HubDevice, dataset_id: str | None, name: str, options: str) -> str: ...
    def submit_run_of_file(self, model_id: str, device: HubDevice, name: str, options: str) -> str: ...
    def download_model(self, maker_id: str, directory: Path) -> Path: ...
    def profile(self, job_id: str) -> dict[str, Any]: ...
    def outputs(self, job_id: str) -> SAMPLES: ...


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that a device runs: a graph of a binary. ``made_by`` is the job that made the binary,
    None where the unit was uploaded as one."""

    arm: str
    unit: Unit
    device: HubDevice
    made_by: Entry | None

    @property
    def key(self) -> tuple[str, str, str]:
        """(device, arm, graph)."""
        return self.device.name, self.arm, self.unit.name


class Steps:
    """One run's dealings with the service.

    Args:
        qairt_version: of the service's compiler and runtime; None leaves the choice to the service.
    """

    def __init__(
        self, hub: Hub, ledger: Ledger, jobs: Jobs, *, runtime: str = DLC, qairt_version: str | None = None
    ) -> None:
        self._hub, self._ledger, self._jobs = hub, ledger, jobs
        self._runtime = runtime
        self._common = f" --qairt_version {qairt_version}" if qairt_version else ""
        self.uploads = Uploads(hub, ledger, jobs)

    def upload(self, arms: Iterable[Arm]) -> None:
        """Upload every unit that the service does not have yet."""
        for arm in arms:
            for unit in arm.units:
                self.uploads.model(unit, label(arm.name, unit.name))

    def make(self, arms: list[Arm], devices: list[HubDevice], *, link: bool = True) -> list[Target]:
        """Compile and link for every device; without ``link``, compile alone."""
        compiled = self._compile([arm for arm in arms if arm.chipset is None], devices)
        if link and self._runtime == DLC:
            made = self._link(arms, devices, compiled)
        else:
            made = {
                (arm.name, unit.name, device.binaries_for): compiled[arm.name, unit.name, self._platform(device)]
                for arm in arms
                if arm.chipset is None
                for unit in arm.units
                for device in devices
            }
        return [
            Target(
                arm=arm.name, unit=unit, device=device, made_by=made.get((arm.name, unit.name, device.binaries_for))
            )
            for device in devices
            for arm in arms
            for unit in arm.units
        ]

    def run(self, targets: list[Target], iterations: int, samples: dict[tuple[str, str], SAMPLES]) -> dict[str, dict]:
        """Profile every target, and let those with ``samples`` (by arm and graph) infer; all at once.

        Returns:
            ``profile`` and ``inference``: target key → entry.
        """
        entries: dict[str, dict[tuple[str, str, str], Entry]] = {"profile": {}, "inference": {}}
        for target in targets if iterations else ():
            options = f"--max_profiler_iterations {iterations}{self._selected(target)}{self._common}"
            entries["profile"][target.key] = self._jobs.submit(self._run_request("profile", target, options, None))
        for target in targets:
            found = samples.get((target.arm, target.unit.name))
            if found is not None:
                dataset = self.uploads.dataset(found, f"{label(target.arm, target.unit.name)} tokens")
                options = f"{self._selected(target)}{self._common}".strip()
                request = self._run_request("inference", target, options, dataset)
                entries["inference"][target.key] = self._jobs.submit(request)
        everything = [entry for kind in entries.values() for entry in kind.values()]
        final = self._jobs.wait(everything, "running on devices")
        return {kind: {key: final[entry.key] for key, entry in found.items()} for kind, found in entries.items()}

    def result(self, entry: Entry, fetch: Callable[[str], T]) -> T:
        """What a finished job left at the service."""
        assert entry.id is not None
        try:
            return self._jobs.patiently(lambda: fetch(entry.id or ""))
        except NotFound as error:
            self._ledger.update(entry, state=FAILED, reason="the service no longer has its result", updated=now())
            raise UserError(
                f"the result of {entry.label} is gone: {error.what}",
                where=f"job {entry.id}",
                fix="run the same command with --resubmit: the job is done again",
            ) from None

    def _compile(self, arms: list[Arm], devices: list[HubDevice]) -> dict[tuple[str, str, str], Entry]:
        """(arm, graph, platform) → compile job, finished. A portable file has one platform."""
        entries: dict[tuple[str, str, str], Entry] = {}
        platforms = {self._platform(device): device for device in reversed(devices)}
        for arm in arms:
            for unit in arm.units:
                for platform, device in platforms.items():
                    entries[arm.name, unit.name, platform] = self._jobs.submit(self._compile_request(arm, unit, device))
        final = self._jobs.wait(entries.values(), "compiling")
        return {key: final[entry.key] for key, entry in entries.items()}

    def _compile_request(self, arm: Arm, unit: Unit, device: HubDevice) -> Request:
        assert unit.spec is not None
        outputs = ",".join(tensor.name for tensor in unit.spec.outputs)
        backend = f"context_enable_graphs={unit.name};{FLOAT_PRECISION}"
        if self._runtime == WRAPPED:
            backend += f";{OPTIMIZATION}"
        options = f"--target_runtime {self._runtime} --output_names {outputs} --qnn_options {backend}{self._common}"
        what = label(arm.name, unit.name)

        def send(name: str) -> str:
            return self._of_upload(unit, what, lambda model: self._hub.submit_compile(model, device, name, options))

        identity = {"digest": unit.digest, "options": options, "device": self._platform(device)}
        return Request(
            kind="compile",
            key=request_key("compile", self._hub.service, **identity),
            label=f"compile {what}" + (f" for {device.binaries_for}" if self._runtime == WRAPPED else ""),
            device=device.name,
            options=options,
            send=send,
        )

    def _link(
        self, arms: list[Arm], devices: list[HubDevice], compiled: dict[tuple[str, str, str], Entry]
    ) -> dict[tuple[str, str, str], Entry]:
        """(arm, graph, chip) → link job, finished; a part's graphs have the same one."""
        entries: dict[tuple[str, str, str], Entry] = {}
        for device in {device.binaries_for: device for device in reversed(devices)}.values():
            for arm in (arm for arm in arms if arm.chipset is None):
                for part in range(arm.num_parts):
                    units = [unit for unit in arm.units if unit.part == part]
                    made = [compiled[arm.name, unit.name, self._platform(device)] for unit in units]
                    entry = self._jobs.submit(self._link_request(arm, part, made, device))
                    for unit in units:
                        entries[arm.name, unit.name, device.binaries_for] = entry
        final = self._jobs.wait(entries.values(), "linking")
        return {key: final[entry.key] for key, entry in entries.items()}

    def _link_request(self, arm: Arm, part: int, made: list[Entry], device: HubDevice) -> Request:
        options = f"--qnn_options {FLOAT_PRECISION};{OPTIMIZATION}{self._common}"
        identity = {"made_from": [entry.id for entry in made], "options": options, "device": device.binaries_for}
        ids = [entry.id or "" for entry in made]
        return Request(
            kind="link",
            key=request_key("link", self._hub.service, **identity),
            label=f"link {label(arm.name, f'part {part}')} for {device.binaries_for}",
            device=device.name,
            options=options,
            send=lambda name: self._hub.submit_link(ids, device, name, options),
        )

    def _run_request(self, kind: str, target: Target, options: str, dataset: str | None) -> Request:
        what = label(target.arm, target.unit.name)
        identity: dict[str, Any] = {"options": options, "device": [target.device.name, target.device.os]}

        def send(name: str) -> str:
            if target.made_by is not None:
                return self._hub.submit_run(target.made_by.id or "", target.device, dataset, name, options)
            return self._of_upload(
                target.unit, what, lambda model: self._hub.submit_run_of_file(model, target.device, name, options)
            )

        identity |= {"made_by": target.made_by.id if target.made_by else target.unit.digest, "dataset": dataset}
        return Request(
            kind=kind,
            key=request_key(kind, self._hub.service, **identity),
            label=f"{kind} {what} on {target.device.name}",
            device=target.device.name,
            options=options,
            send=send,
        )

    def _of_upload(self, unit: Unit, what: str, submit: Callable[[str], str]) -> str:
        """``submit`` a job of an uploaded model, which the service may have removed since."""
        model_id = self.uploads.model(unit, what)
        try:
            return submit(model_id)
        except NotFound:
            self.uploads.forget_model(unit, model_id)
            return submit(self.uploads.model(unit, what))

    def _platform(self, device: HubDevice) -> str:
        """What a compile job's output is tied to: nothing if it is portable."""
        return "any" if self._runtime == DLC else device.binaries_for

    def _selected(self, target: Target) -> str:
        """A linked binary holds several graphs: name the one that is meant."""
        if self._runtime != DLC or target.made_by is None:
            return ""
        return f" --qnn_options context_enable_graphs={target.unit.name}"


def label(arm: str, what: str) -> str:
    """What a job is called: short, and safe in a name."""
    return re.sub(r"[^\w.+ -]", "_", f"{arm} {what}")
