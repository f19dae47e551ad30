"""Answers, files and settings that nobody expects: each is named, none is a traceback, none loses a job."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hub_lab import QUICK, S25, Lab
from server import TOKEN
from typer.testing import CliRunner

from export import aihub, hub_trace
from export.hub_jobs import Jobs, abandon, now
from export.hub_ledger import DONE, FAILED, SENT, Entry
from export.hub_service import ServiceTrouble, UploadLinks
from export.hub_source import open_arms
from export.hub_stage import HubConfig, hub
from export.hub_upload import Uploads
from export.hub_words import redacted
from meki_edge import cli_hub
from meki_edge.cli import app
from meki_edge.errors import UserError
from meki_edge.files import read_json, write_json
from meki_edge.graph_spec import TensorSpec

COMPILE = HubConfig(devices=(S25,), step="compile")


@pytest.mark.parametrize("token", ["sec\rret", "sec ret", "secr\u00e9t", "a\nb"])
def test_a_token_that_no_request_can_carry(lab: Lab, token: str) -> None:
    with pytest.raises(UserError, match="a character that no token has") as caught:
        aihub.login(token, api_url=lab.hub.url, timing=QUICK)
    assert token not in str(caught.value) and not lab.hub.requests


def test_a_token_with_a_percent_sign_is_read_back(lab: Lab) -> None:
    lab.hub.token = "100%sure%%"
    assert aihub.login("100%sure%%", api_url=lab.hub.url, timing=QUICK)[1] == 3
    assert len(aihub.connect(None, QUICK).devices()) == 3


@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://", "http://x:port", "http://[::1", ""])
def test_an_address_that_is_none(lab: Lab, url: str) -> None:
    path = lab.directory / "client.ini"
    path.write_text(f"[api]\napi_token = {TOKEN}\napi_url = {url}\nweb_url = x\n")
    with pytest.raises(UserError, match="is not the address of a service"):
        aihub.connect(None, QUICK)


def test_commands_without_a_service(lab: Lab, bundles: dict[str, Path]) -> None:
    """Those that wait for nothing say at once that nobody answers."""
    lab.hub.faults.stuck = "compile"
    with pytest.raises(UserError, match="not finished"):
        timing = dataclasses.replace(QUICK, timeout_seconds=0.0)
        hub([bundles["dense"]], lab.directory / "out", COMPILE, lab.access(timing=timing))
    (job, *_), requests = lab.hub.jobs, len(lab.hub.requests)
    lab.hub.faults.statuses = [("GET", ".*", 520)] * 20  # no retry in the client: not one of its statuses
    for words in (["devices"], ["logs", job]):
        with pytest.raises(ServiceTrouble):
            CliRunner().invoke(app, ["hub", *words], catch_exceptions=False)
    shown = CliRunner().invoke(app, ["hub", "status"], catch_exceptions=False)
    assert "AI Hub does not answer" in shown.stderr and "unknown" in shown.stdout
    assert len(lab.hub.requests) - requests == 3, "of two jobs only one is asked for"


@pytest.mark.parametrize("status", [408, 425, 507, 520, 599])
def test_every_5xx_is_ridden_out(lab: Lab, bundles: dict[str, Path], status: int) -> None:
    lab.hub.faults.statuses = [("GET", "devices", status), ("POST", "jobs", status), ("GET", r"jobs/\w+", status)]
    hub([bundles["dense"]], lab.directory / "out", COMPILE, lab.access())
    assert not lab.hub.faults.statuses and len(lab.hub.jobs) == 2


@pytest.mark.parametrize("path", ["devices", "models", "jobs"])
def test_nonsense_in_answers(lab: Lab, bundles: dict[str, Path], path: str) -> None:
    """A job whose answer was nonsense is found by its name later."""
    lab.hub.faults.garbage = path
    with pytest.raises(UserError, match="not what its client expects"):
        hub([bundles["dense"]], lab.directory / "out", COMPILE, lab.access())
    lab.hub.faults.garbage = None
    hub([bundles["dense"]], lab.directory / "out", COMPILE, lab.access())
    assert len(lab.hub.jobs) == 2


@pytest.mark.parametrize(
    ("links", "whole"),
    [
        ({}, True),
        ({"etags": ("a", "b", "c")}, True),
        ({"etags": ("a", "b", "c", "d")}, False),
        ({"part_bytes": 0}, False),
        ({"part_bytes": 5}, False),
        ({"urls": ()}, False),
    ],
)
def test_links_that_do_not_fit(links: dict[str, object], whole: bool) -> None:
    usual = {"bytes": 10, "upload_id": "u", "part_bytes": 4, "urls": ("1", "2", "3")}
    found = UploadLinks(**{**usual, **links})
    assert found.whole == whole
    if not links:
        assert [found.part(index) for index in range(3)] == [range(0, 4), range(4, 8), range(8, 10)]


def test_too_few_links(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.missing_links = 1
    with pytest.raises(UserError, match=r"AI Hub's \d+ links for parts of 60000 bytes are not for \d+ bytes"):
        hub([bundles["dense"]], lab.directory / "out", COMPILE, lab.access())
    assert not lab.hub.count("PUT", ".*")
    lab.hub.faults.missing_links = 0
    hub([bundles["dense"]], lab.directory / "out", COMPILE, lab.access())
    assert lab.hub.count("POST", "models") == 2, "announced once"


def test_broken_notes_of_an_upload(lab: Lab, bundles: dict[str, Path]) -> None:
    """Whatever lies in the ledger of an unfinished upload, the model arrives whole, and nothing stays behind."""
    (arm,) = open_arms([bundles["dense"]])
    unit, folder = arm.units[0], lab.directory / "ledger/uploads"
    service = lab.connect()
    uploads = Uploads(service, lab.ledger, Jobs(service, service.service, lab.ledger, lab.directory))
    for number, text in enumerate(("", "[]", '{"bytes": 1}', "links", "archive")):
        if number:
            (entry,) = lab.ledger.entries()
            uploads.forget_model(unit, entry.id)
        lab.hub.faults.interrupt_after = 4  # announcement, links, two parts
        with pytest.raises(KeyboardInterrupt):
            uploads.model(unit, "x")
        (notes,), (archive,) = folder.glob("*.json"), folder.glob("*.zip")
        (folder / f".{notes.name}.1.tmp").write_text("left by a run that was killed")
        if text == "archive":
            archive.write_bytes(archive.read_bytes()[:5_000])
        elif text == "links":
            write_json(notes, {**read_json(notes), "part_bytes": 1})
        else:
            notes.write_text(text)
        model = lab.hub.models[uploads.model(unit, "x")]
        assert len(model.data) > 100_000 and not list(folder.iterdir())


def test_a_ledger_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no ledger can be kept here"):
        cli_hub.open_access(None, tmp_path / "file", None, 1.0, False)


def test_entries_that_contradict_themselves(lab: Lab) -> None:
    entry = Entry(kind="link", key="k", label="x", service="s", state=SENT, name="x", id="j1")
    for change in ({"id": None}, {"key": "other"}, {"state": "intended"}):
        write_json(lab.directory / "ledger/entries/k.json", dataclasses.asdict(dataclasses.replace(entry, **change)))
        with pytest.raises(UserError, match="a broken entry of the ledger: key"):
            lab.ledger.get("k")


def test_a_job_that_another_run_submitted_anew_is_not_lost(lab: Lab) -> None:
    """A run that still waits for the first attempt goes over to the second, and does not overwrite it."""
    service = lab.connect()
    jobs = Jobs(service, service.service, lab.ledger, lab.directory)
    first = lab.ledger.put(Entry(kind="link", key="k", label="x", service="s", state=SENT, name="x", id="gone"))
    second = lab.ledger.update(first, id="second", attempt=2, updated=now())
    assert jobs._look(first) == (second, "created") and lab.ledger.get("k") == second
    done = lab.ledger.update(second, state=DONE)
    assert jobs._look(first)[0] == done
    with pytest.raises(UserError, match="already done"):
        abandon(lab.ledger, "second")
    lab.ledger.update(first, state=FAILED, reason="x")


def test_a_time_limit_holds_while_the_service_is_down(lab: Lab) -> None:
    for given, patience in ((7.0, 7.0), (1e6, 1800.0), (None, 1800.0)):
        timing = cli_hub.open_access(None, None, given, 1.0, False).connect().timing
        assert timing.outage_seconds == patience and timing.timeout_seconds == given


def test_outputs_that_are_no_numbers() -> None:
    spec = TensorSpec(name="y", role="logits", dtype="float32", shape=(1, 1, 2))
    reference = [np.array([[[0.0, 1.0]]], np.float32)]
    for bad in (np.nan, np.inf):
        with pytest.raises(UserError, match=r"the device computed no numbers .* in y"):
            hub_trace.compare({"y": [np.array([[[bad, 1.0]]], np.float32)]}, [(spec, reference)], "x")


def test_names_that_would_share_files(bundles: dict[str, Path], tmp_path: Path) -> None:
    for name in ("a b", "a_b"):
        copy = tmp_path / name
        copy.mkdir()
        for path in bundles["dense"].iterdir():
            (copy / path.name).symlink_to(path)
        (copy / "manifest.json").unlink()
        described = read_json(bundles["dense"] / "manifest.json")
        described["metrics"]["name"] = name
        write_json(copy / "manifest.json", described)
    with pytest.raises(UserError, match="two sources are called 'a_b'"):
        open_arms([tmp_path / "a b", tmp_path / "a_b"])


def test_what_is_never_shown() -> None:
    text = f"PUT https://s.example/x?X-Amz-Signature=abc&b=c failed (token {TOKEN})"
    assert redacted(text, TOKEN) == "PUT https://s.example/x?[…] failed (token [token])"
    assert redacted("is it so? yes", TOKEN) == "is it so? yes"


def test_a_full_disk_under_the_client(lab: Lab) -> None:
    """The client writes datasets into the folder for temporary files before it sends them; nothing stays there."""
    folder = lab.directory / "temporary"
    folder.mkdir()
    script = (
        "import resource, sys, numpy as np\n"
        "from export import aihub\n"
        "from meki_edge.errors import UserError\n"
        "service = aihub.connect()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    service.create_dataset('x', {'a': [np.zeros(100_000, np.float32)]})\n"
        "except UserError as error:\n"
        "    print(error.what, error.fix)\n"
    )
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "uploading the dataset x" in done.stdout and "TMPDIR" in done.stdout, done.stderr
    assert not list(folder.iterdir())


def test_two_runs_forget_a_model_once(lab: Lab, bundles: dict[str, Path]) -> None:
    (arm,) = open_arms([bundles["dense"]])
    service = lab.connect()
    uploads = Uploads(service, lab.ledger, Jobs(service, service.service, lab.ledger, lab.directory))
    unit = arm.units[0]
    first = uploads.model(unit, "x")
    uploads.forget_model(unit, first)
    second = uploads.model(unit, "x")
    other = threading.Thread(target=uploads.forget_model, args=(unit, first))
    other.start()
    other.join()
    assert uploads.model(unit, "x") == second and lab.hub.count("POST", "models") == 2
