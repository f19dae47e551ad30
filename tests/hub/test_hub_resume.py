"""Interruptions at any point: no job is lost, none is sent twice, no byte of an upload either."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from hub_lab import QUICK, S25, Lab
from server import Loopback

from export.hub_ledger import ABANDONED, DONE, SENT
from export.hub_service import Timing
from export.hub_source import open_arms
from export.hub_stage import HubConfig, hub
from meki_edge.errors import UserError

LINK = HubConfig(devices=(S25,), step="link")
NAMES = {"compile_job": 2, "link_job": 1}


def kinds(service: Loopback) -> dict[str, int]:
    found = [job.kind for job in service.jobs.values()]
    return {kind: found.count(kind) for kind in found}


def test_interrupted_everywhere(
    lab: Lab, bundles: dict[str, Path], tokens_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after 1, 2, 3 … requests, until a run gets through: as many jobs as one run sends."""
    config = HubConfig(devices=(S25,), infer_steps=1)
    temporary = lab.directory / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    stops = 0
    while True:
        lab.hub.faults.interrupt_after = stops + 1
        try:
            made = hub([bundles["dense"]], lab.directory / "out", config, lab.access(), tokens=tokens_dir)
            break
        except KeyboardInterrupt:
            stops += 1
            assert stops < 100
    lab.hub.faults.interrupt_after = None
    assert stops > 15 and made.metrics["jobs"] == 7
    assert kinds(lab.hub) == {"compile_job": 2, "link_job": 1, "profile": 2, "inference": 2}
    entries = lab.ledger.entries()
    assert {entry.state for entry in entries} == {DONE}
    assert {entry.id for entry in entries if entry.kind not in ("model", "dataset")} == set(lab.hub.jobs)
    assert not list((lab.directory / "ledger/uploads").iterdir()), "no archive stays"
    assert not list(temporary.iterdir()), "nor what the client wrote"


def test_an_upload_goes_on_at_its_part(lab: Lab, bundles: dict[str, Path]) -> None:
    (arm,) = open_arms([bundles["dense"]])
    lab.hub.faults.interrupt_after = 6  # devices, announcement, links, three parts
    with pytest.raises(KeyboardInterrupt):
        hub([bundles["dense"]], lab.directory / "out", LINK, lab.access())
    sent = [path for method, path in lab.hub.requests if method == "PUT"]
    (saved,) = (lab.directory / "ledger/uploads").glob("*.json")
    assert len(sent) == 3 and saved.stat().st_mode & 0o077 == 0, "the links are nobody else's business"
    first, second, third = sent
    hub([bundles["dense"]], lab.directory / "out", LINK, lab.access())
    sent = [path for method, path in lab.hub.requests if method == "PUT"]
    assert len(set(sent)) > 5 and sent.count(first) == sent.count(second) == 1
    assert len(sent) - len(set(sent)) == sent.count(third) - 1 <= 1, "only the part whose answer was lost goes again"
    assert lab.hub.count("POST", "models") == 2
    for unit, model in zip(arm.units, [m for m in lab.hub.models.values() if not m.producer], strict=True):
        with zipfile.ZipFile(io.BytesIO(model.data)) as archive:
            for name, path, _ in unit.files:
                assert archive.read(f"{unit.name}.onnx/{name}") == path.read_bytes()


def test_a_connection_cut_in_an_upload(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.cut_upload_at = 20_000
    hub([bundles["dense"]], lab.directory / "out", LINK, lab.access())
    assert lab.hub.count("POST", "models") == 2 and kinds(lab.hub) == NAMES


def test_links_of_parts_expire(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.expired_parts = 1
    hub([bundles["dense"]], lab.directory / "out", LINK, lab.access())
    assert lab.hub.count("GET", r"models/\w+/multipart_upload") == 3 and lab.hub.count("POST", "models") == 2


def test_links_of_downloads_expire(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.expired_links = 2
    made = hub([bundles["dense"]], lab.directory / "out", LINK, lab.access())
    assert "binaries/dense/sm8750/part_0.bin" in made.files


@pytest.mark.parametrize("status", [429, 500, 503])
def test_rate_limits_and_server_errors_are_ridden_out(lab: Lab, bundles: dict[str, Path], status: int) -> None:
    lab.hub.faults.statuses = [
        (method, pattern, status)
        for method, pattern in (
            ("GET", "devices"),
            ("POST", "models"),
            ("GET", r"models/\w+/multipart_upload"),
            ("POST", r"models/\w+/multipart_upload"),
            ("POST", "jobs"),
            ("POST", "jobs"),
            ("GET", r"jobs/\w+"),
            ("GET", r"models/\w+/download"),
        )
    ]
    hub([bundles["dense"]], lab.directory / "out", LINK, lab.access())
    assert not lab.hub.faults.statuses and kinds(lab.hub) == NAMES


def test_the_answer_to_a_submission_is_lost(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.lost_answers = [("POST", "jobs"), ("POST", r"models/\w+/multipart_upload")]
    hub([bundles["dense"]], lab.directory / "out", LINK, lab.access())
    assert not lab.hub.faults.lost_answers and kinds(lab.hub) == NAMES, "looked up by its name, not sent again"


def test_the_time_runs_out_and_the_next_run_goes_on(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.stuck = "decode"
    timing = Timing(poll_seconds=0.02, retry_seconds=0.01, timeout_seconds=0.3)
    with pytest.raises(UserError, match=r"1 job is not finished after .* \(compile dense decode, job j") as caught:
        hub([bundles["dense"]], lab.directory / "out", LINK, lab.access(timing=timing))
    assert "nothing is submitted again" in caught.value.fix and lab.hub.url in caught.value.where
    lab.hub.faults.stuck = None
    hub([bundles["dense"]], lab.directory / "out", LINK, lab.access())
    assert kinds(lab.hub) == NAMES


def test_jobs_are_waited_for_together(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.polls_per_state = 3
    hub([bundles["dense"], bundles["meki"]], lab.directory / "out", LINK, lab.access())
    posts = [index for index, (method, path) in enumerate(lab.hub.requests) if (method, path) == ("POST", "jobs")]
    looks = [path for _, path in lab.hub.requests[posts[3] + 2 : posts[4]] if path.startswith("jobs/")]
    assert len(set(looks[:8])) == 4, "every round looks at every job"


def test_a_cancelled_job_is_not_waited_for(lab: Lab, bundles: dict[str, Path]) -> None:
    from export.hub_jobs import abandon

    lab.hub.faults.stuck = "decode"
    timing = Timing(poll_seconds=0.01, timeout_seconds=0.1)
    with pytest.raises(UserError, match="not finished"):
        hub([bundles["dense"]], lab.directory / "out", LINK, lab.access(timing=timing))
    (waiting,) = (entry for entry in lab.ledger.entries() if entry.state == SENT)
    assert abandon(lab.ledger, waiting.id).state == ABANDONED
    lab.hub.faults.stuck = None
    hub([bundles["dense"]], lab.directory / "out", LINK, lab.access())
    assert kinds(lab.hub) == {"compile_job": 3, "link_job": 1}, "what was cancelled is submitted anew"
    done = next(entry for entry in lab.ledger.entries() if entry.key == waiting.key)
    assert done.attempt == 2 and done.name.endswith("-2")
    with pytest.raises(UserError, match="already done"):
        abandon(lab.ledger, done.id)


def test_what_the_service_removed_is_uploaded_again(lab: Lab, bundles: dict[str, Path]) -> None:
    hub([bundles["dense"]], lab.directory / "first", HubConfig(devices=(S25,), step="compile"), lab.access())
    lab.hub.models.clear()
    config = HubConfig(devices=(S25,), step="compile", qairt_version="2.31")  # so that it must compile again
    hub([bundles["dense"]], lab.directory / "second", config, lab.access())
    assert lab.hub.count("POST", "models") == 4


def command(lab: Lab, bundle: Path, out: str) -> list[str]:
    return [
        *(sys.executable, "-m", "meki_edge.cli", "hub", "link", str(bundle)),
        *("-o", str(lab.directory / out), "--device", S25, "--poll-seconds", "0.02"),
    ]


def test_killed_outright(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.stuck = "compile"
    run = command(lab, bundles["dense"], "out")
    process = subprocess.Popen(run, env={**os.environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while len(lab.hub.jobs) < 2:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lab.hub.faults.stuck = None
    done = subprocess.run(run, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert kinds(lab.hub) == NAMES and lab.hub.token not in done.stdout + done.stderr


def test_two_runs_at_once(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.polls_per_state = 5
    runs = [
        subprocess.Popen(command(lab, bundles["dense"], out), env={**os.environ}, stderr=subprocess.PIPE, text=True)
        for out in ("one", "two")
    ]
    told = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told
    assert lab.hub.count("POST", "models") == 2 and kinds(lab.hub) == NAMES
    binaries = [(lab.directory / out / "binaries/dense/sm8750/part_0.bin").read_bytes() for out in ("one", "two")]
    assert binaries[0] == binaries[1]


def test_the_service_is_down(lab: Lab, bundles: dict[str, Path]) -> None:
    access = lab.access(timing=Timing(poll_seconds=0, retry_seconds=0.001, outage_seconds=0.2))
    lab.hub.__exit__()
    with pytest.raises(UserError, match="AI Hub could not be used for .* listing the devices") as caught:
        hub([bundles["dense"]], lab.directory / "out", LINK, access)
    assert "goes on where it stopped" in caught.value.fix
    assert QUICK.outage_seconds > 0
