"""`meki-edge hub …` as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_lab import S25, Lab
from server import TOKEN
from typer.testing import CliRunner, Result

from meki_edge.cli import app
from meki_edge.errors import UserError


def meki(*words: object, given: str | None = None) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words], input=given)
    assert TOKEN not in result.output + result.stderr
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_login_devices_and_the_rest(
    lab: Lab,
    bundles: dict[str, Path],
    tokens_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_token_in: Callable[[Path], None],
) -> None:
    monkeypatch.setenv("QAIHUB_CLIENT_INI", str(lab.directory / "login" / "client.ini"))
    with pytest.raises(UserError, match="no AI Hub token"):
        meki("hub", "devices")
    with pytest.raises(UserError, match="refused the token"):
        meki("hub", "login", "--token-stdin", "--api-url", lab.hub.url, given="nonsense\n")
    with pytest.raises(UserError, match="the token is empty"):
        meki("hub", "login", "--token-stdin", given="\n")
    assert "3 devices" in meki("hub", "login", "--token-stdin", "--api-url", lab.hub.url, given=TOKEN + "\n").stderr
    listed = json.loads(meki("hub", "devices", "--chipset", "sm8750", "--json").stdout)
    assert [device["name"] for device in listed] == [S25] and listed[0]["chipset"] == "sm8750"
    assert "Snapdragon 8 Gen 3" in meki("hub", "devices").stdout

    out = lab.directory / "out"
    words = ("hub", "run", bundles["dense"], bundles["meki"], "-o", out, "--device", S25, "--tokens", tokens_dir)
    words += ("--poll-seconds", 0.01, "--infer-steps", 1, "--prompt-lengths", "16,64", "--iterations", 3)
    shown = meki(*words)
    for text in ("Decode, tokens/s", "Time to first token, prompt of 64", "Qwen3-1.7B (w4a16)", "not measured here"):
        assert text in shown.stdout
    assert "no phone's times" in " ".join(shown.stderr.split())
    result = json.loads(meki(*words, "--json").stdout)
    assert set(result["measured"][S25]) == {"dense", "meki"} and result["config"]["prompt_lengths"] == [16, 64]

    told = json.loads(meki("hub", "status", "--json").stdout)
    assert {job["kind"] for job in told} == {"compile", "link", "profile", "inference"}
    assert {job["state"] for job in told} == {"done"} and {job["job"] for job in told} == set(lab.hub.jobs)
    job = told[0]["job"]
    assert job in meki("hub", "status").stdout
    meki("hub", "logs", job, "-o", lab.directory / "logs")
    assert f"job {job}" in (lab.directory / f"logs/{job}/hub.log").read_text()
    with pytest.raises(UserError, match="already done"):
        meki("hub", "cancel", job)
    with pytest.raises(UserError, match="no job 'nothing'"):
        meki("hub", "logs", "nothing")
    for directory in ("out", "ledger", "logs"):
        no_token_in(lab.directory / directory)


def test_waiting_status_and_cancel(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.stuck = "decode"
    with pytest.raises(UserError, match="not finished"):
        words = ("profile", bundles["dense"], "-o", lab.directory / "out", "-d", S25)
        meki(*words, "--poll-seconds", 0.01, "--timeout", 0.1)
    waiting = [job for job in json.loads(meki("hub", "status", "--json").stdout) if job["state"] != "done"]
    assert [job["state"] for job in waiting] == ["optimizing model"]
    with pytest.raises(UserError, match="is not finished"):
        meki("hub", "logs", waiting[0]["job"])
    assert "no longer waited for" in meki("hub", "cancel", waiting[0]["job"]).stderr
    assert [job["state"] for job in json.loads(meki("hub", "status", "--json").stdout)].count("abandoned") == 1


def test_compile_via_hub(lab: Lab, exported: dict[str, tuple[Path, Path]], tokens_dir: Path) -> None:
    checkpoint, directory = exported["meki"]
    words = ("compile", directory, checkpoint, tokens_dir, "-o", lab.directory / "npu", "--via", "hub")
    with pytest.raises(UserError, match="none is given"):
        meki(*words)
    with pytest.raises(UserError, match="an option of AI Hub is given"):
        meki("compile", directory, checkpoint, tokens_dir, "-o", lab.directory / "npu", "--device", S25)
    for option in (("--chipset", "sm8750"), ("--no-share-weights",)):
        with pytest.raises(UserError, match="AI Hub's compiler does not take this"):
            meki(*words, "-d", S25, *option)
    made = json.loads(meki(*words, "-d", S25, "--verify-steps", 1, "--poll-seconds", 0.01, "--json").stdout)
    assert made["chipset"] == "sm8750" and made["device"] == S25 and made["device_decode_min_cosine"] > 0.9999


def test_bad_lengths(lab: Lab, bundles: dict[str, Path]) -> None:
    for text in ("0", "a", ",", "1.5", "-3"):
        with pytest.raises(UserError, match="is not a list of lengths"):
            meki("hub", "run", bundles["dense"], "-o", lab.directory / "out", "-d", S25, f"--prompt-lengths={text}")


def test_errors_reach_the_user_without_a_traceback(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.write_config(lab.directory / "client.ini", token="wrong-7d21")
    run = [sys.executable, "-m", "meki_edge.cli", "hub", "run", str(bundles["dense"])]
    run += ["-o", str(lab.directory / "out"), "-d", S25]
    done = subprocess.run(run, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "error: AI Hub refused the token" in done.stderr and "Traceback" not in done.stderr
    assert "wrong-7d21" not in done.stderr


def test_help_loads_no_client() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from meki_edge.cli import app\n"
        "for command in ('hub', 'hub run', 'hub login', 'hub cancel', 'profile'):\n"
        "    assert CliRunner().invoke(app, [*command.split(), '--help']).exit_code == 0\n"
        "assert not {'qai_hub', 'torch', 'onnx', 'onnxruntime'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_client_is_imported_in_one_file() -> None:
    root = Path(__file__).parents[2]
    importers = {
        path.name
        for package in ("meki_edge", "export", "calibration")
        for path in (root / package).rglob("*.py")
        if re.search(r"^\s*(import|from) qai_hub", path.read_text(), re.MULTILINE)
    }
    assert importers == {"aihub.py"}
