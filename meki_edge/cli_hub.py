"""`meki-edge hub …`: Qualcomm AI Hub from the command line.

`compile`, `link`, `profile`, `infer` and `run` go the same way, each further than the one before, and
find what an earlier one already did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.options import Force, Json, OutputDir, parse_lengths

if TYPE_CHECKING:
    from export.hub_stage import Access

Sources = Annotated[
    list[Path],
    typer.Argument(help="Outputs of `meki-edge pack`, `export`, `calibrate` or `compile`; the first is the baseline."),
]
Devices = Annotated[list[str], typer.Option("--device", "-d", help="A device of `hub devices`; may be repeated.")]
HubTokens = Annotated[
    Path | None, typer.Option("--tokens", help="Output of `meki-edge tokenize`: the real text that graphs are run on.")
]
Runtime = Annotated[
    str, typer.Option(help="qnn_dlc (parts linked, weights shared) or precompiled_qnn_onnx (for ONNX Runtime).")
]
InferSteps = Annotated[
    int, typer.Option(min=1, max=1000, help="Decode steps compared with ONNX Runtime, after a prefill chunk.")
]
PromptLengths = Annotated[str, typer.Option(help="Prompts whose time to the first token is told.")]
Iterations = Annotated[int, typer.Option(min=1, max=10_000, help="Runs of a graph in a profile.")]
QairtVersion = Annotated[str | None, typer.Option(help="The service's QAIRT version (default: its own choice).")]
Profile = Annotated[str | None, typer.Option("--hub-profile", help="Use the client's ~/.qai_hub/NAME.ini.")]
LedgerDir = Annotated[
    Path | None,
    typer.Option("--ledger", help="Where sent jobs are recorded (default: $MEKI_EDGE_HUB or ~/.meki-edge/hub)."),
]
Timeout = Annotated[float | None, typer.Option(min=0, help="Seconds to wait for jobs; they go on at the service.")]
Poll = Annotated[float, typer.Option("--poll-seconds", min=0, max=3600, help="Seconds between two looks at the jobs.")]
Resubmit = Annotated[bool, typer.Option("--resubmit", help="Submit jobs that failed before again.")]
JobIds = Annotated[list[str], typer.Argument(help="Job ids, as `hub status` lists them.")]

app = typer.Typer(
    name="hub",
    no_args_is_help=True,
    help="Qualcomm AI Hub: compile, link, profile and run on its devices. "
    "Every job is on disk before it is waited for: an interrupted command resumes, and submits nothing twice.",
)


def _flow(step: str, text: str) -> Callable[..., None]:
    """The command that goes as far as ``step``."""

    def command(
        sources: Sources,
        output_dir: OutputDir,
        device: Devices,
        tokens: HubTokens = None,
        target_runtime: Runtime = "qnn_dlc",
        infer_steps: InferSteps = 4,
        prompt_lengths: PromptLengths = "128,512,2048",
        iterations: Iterations = 100,
        qairt_version: QairtVersion = None,
        hub_profile: Profile = None,
        ledger: LedgerDir = None,
        timeout: Timeout = None,
        poll_seconds: Poll = 10.0,
        resubmit: Resubmit = False,
        force: Force = False,
        as_json: Json = False,
    ) -> None:
        from export import hub_stage

        config = hub_stage.HubConfig(
            devices=tuple(dict.fromkeys(device)),
            step=step,
            target_runtime=target_runtime,
            infer_steps=infer_steps,
            prompt_lengths=tuple(sorted(set(parse_lengths(prompt_lengths, "--prompt-lengths", "128,512")))),
            profiler_iterations=iterations,
            qairt_version=qairt_version,
        )
        access = open_access(hub_profile, ledger, timeout, poll_seconds, resubmit)
        hub_stage.hub(sources, output_dir, config, access, tokens=tokens, force=force)
        if as_json:
            console.show_json(hub_stage.read(output_dir))
        else:
            hub_stage.show(output_dir)

    command.__name__, command.__doc__ = step, text
    return command


def open_access(
    hub_profile: str | None, ledger: Path | None, timeout: float | None, poll_seconds: float, resubmit: bool
) -> Access:
    """The service and the ledger, as the options say; nothing is reached yet."""
    from export.hub_ledger import Ledger, default_directory
    from export.hub_service import Timing
    from export.hub_stage import Access

    patience = Timing.outage_seconds if timeout is None else min(timeout, Timing.outage_seconds)
    timing = Timing(poll_seconds=poll_seconds, timeout_seconds=timeout, outage_seconds=patience)

    def connect() -> Any:
        from export import aihub

        return aihub.connect(hub_profile, timing)

    return Access(connect=connect, ledger=Ledger(ledger or default_directory()), resubmit=resubmit)


compile_ = _flow("compile", "Upload and compile all graphs, part by part, and download what came out.")
link = _flow("link", "Compile, link each part's graphs so that they share weights, and download the binaries.")
profile = _flow("profile", "Compile, link, and profile on the devices: times, memory, operators.")
infer = _flow("infer", "Compile, link, and run real text on the devices; compare the logits with ONNX Runtime.")
run = _flow("run", "All: lint, upload, compile, link, profile, infer (with --tokens), download, report.")


def login(
    hub_profile: Profile = None,
    token_stdin: Annotated[bool, typer.Option("--token-stdin", help="Read the token from standard input.")] = False,
    api_url: Annotated[str | None, typer.Option(help="Another service that speaks AI Hub's protocol.")] = None,
) -> None:
    """Try an AI Hub token and keep it in the client's own configuration file."""
    from export import aihub
    from export.hub_service import Timing

    token = sys.stdin.readline() if token_stdin else typer.prompt("AI Hub token", hide_input=True, err=True)
    if not token.strip():
        raise UserError("the token is empty", where="login", fix="copy it from your AI Hub account page")
    path, count = aihub.login(token.strip(), profile=hub_profile, api_url=api_url, timing=Timing())
    console.info(f"the token works ({count} devices) and is kept in {path}")


def devices(
    chipset: Annotated[str | None, typer.Option(help="Only devices with this chip, such as sm8750.")] = None,
    hub_profile: Profile = None,
    as_json: Json = False,
) -> None:
    """List the service's devices and their chips."""
    from export import aihub
    from export.targets import chip

    wanted = None if chipset is None else chip(chipset)
    found = [device for device in aihub.connect(hub_profile).devices() if wanted in (None, device.chip)]
    if as_json:
        console.show_json(
            [
                {"name": d.name, "os": d.os, "chipset": d.chip.soc if d.chip else None, "attributes": d.attributes}
                for d in found
            ]
        )
        return
    rows = []
    for device in found:
        known = f"{device.chip.name} ({device.chip.soc})" if device.chip else ", ".join(device.values("chipset"))
        rows.append([device.name, known, device.os, ", ".join(device.values("hexagon"))])
    console.show_table("AI Hub devices", ["device", "chip", "system", "Hexagon"], rows)


def status(
    ledger: LedgerDir = None,
    hub_profile: Profile = None,
    as_json: Json = False,
) -> None:
    """List the jobs that were sent from here, and how far they are."""
    from export import hub_jobs
    from export.hub_ledger import SENT, UPLOADS

    access = open_access(hub_profile, ledger, None, 10.0, False)
    jobs = [entry for entry in access.ledger.entries() if entry.kind not in UPLOADS]
    told = [hub_jobs.describe(entry) for entry in jobs]
    if any(entry.state == SENT for entry in jobs):
        service = access.connect()
        for entry, row in zip(jobs, told, strict=True):
            if entry.state == SENT and entry.service == service.service:
                row |= hub_jobs.look(service, entry)
                if row["state"] == "unknown":  # one wait for an answer is enough
                    console.info(f"AI Hub does not answer: {row['reason']}")
                    break
    if as_json:
        console.show_json(told)
        return
    rows = [[job["job"] or "–", job["what"], job["state"], job["submitted"][:19], job["reason"] or ""] for job in told]
    console.show_table("jobs at AI Hub", ["job", "what", "state", "submitted", "reason"], rows)


def logs(
    jobs: JobIds,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Where to put them, a directory a job.")
    ] = Path("hub-logs"),
    ledger: LedgerDir = None,
    hub_profile: Profile = None,
) -> None:
    """Download the logs of finished jobs."""
    access = open_access(hub_profile, ledger, None, 10.0, False)
    entries = [access.ledger.job(job) for job in jobs]
    service, fetcher = access.open(output_dir)
    for entry in entries:
        if not service.status(entry.id or "").finished:
            fix = "wait for its end (`meki-edge hub status`); the service gives logs only then"
            raise UserError(f"job {entry.id} is not finished", where=entry.label, fix=fix)
        console.info(f"{entry.id}: {fetcher.log(entry)}")


def cancel(jobs: JobIds, ledger: LedgerDir = None, hub_profile: Profile = None) -> None:
    """Stop waiting for jobs, here and in a running command. The service's client has no way to stop them."""
    from export import hub_jobs

    access = open_access(hub_profile, ledger, None, 10.0, False)
    for job in jobs:
        access.ledger.job(job)
    service = access.connect()
    for job in jobs:
        entry = hub_jobs.abandon(access.ledger, job)
        console.info(f"{entry.label}: no longer waited for; if it must stop, do it there: {service.job_url(job)}")


for function in (login, devices, compile_, link, profile, infer, run, status, logs, cancel):
    app.command(function.__name__.rstrip("_"))(function)
