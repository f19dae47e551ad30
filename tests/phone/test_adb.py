"""The real `adb` client against a device-side daemon: what comes back, and every way in which it can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from phone import Phone

from meki_edge.device import adb
from meki_edge.device.adb import Device, command
from meki_edge.errors import UserError


def test_exit_codes_and_separate_stderr(device: Device) -> None:
    done = device.run("echo out; echo err >&2; exit 7")
    assert (done.status, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert device.run("true").status == 0
    assert device.run("kill -SEGV $$").status == 139
    assert device.run("echo 'error: of a program, not of adb' >&2; exit 1").status == 1


def test_words_reach_the_phone_as_they_are(device: Device) -> None:
    words = ["a b", "$HOME", "it's", '"', "*", "", "ünï", "; exit 3", "a\\b"]
    assert device.run(command("printf", "%s\n", *words)).stdout.splitlines() == words


def test_properties(device: Device) -> None:
    assert device.getprop("ro.soc.model") == "SM8750" and device.getprop("ro.nothing") == ""
    assert "shell_v2" in device.features() and device.state() == "device"


def test_files_with_spaces_arrive_whole_and_progress_adds_up(device: Device, phone: Phone, tmp_path: Path) -> None:
    local = tmp_path / "a file [1] 100%"
    local.write_bytes(os.urandom(9_000_001))
    remote = f"{phone.directory}/its copy"
    steps: list[int] = []
    device.push(local, remote, steps.append)
    assert sum(steps) == 9_000_001 and min(steps) >= 0
    device.pull(remote, tmp_path / "back again")
    assert (tmp_path / "back again").read_bytes() == local.read_bytes()


def test_an_empty_file(device: Device, phone: Phone, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    device.push(tmp_path / "empty", f"{phone.directory}/empty")
    assert (phone.directory / "empty").read_bytes() == b""


def test_a_full_phone(device: Device, phone: Phone, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3_000_000))
    phone.set(disk_bytes=1_000_000)
    with pytest.raises(UserError, match="the phone's storage is full") as caught:
        device.push(tmp_path / "large", f"{phone.directory}/large")
    assert "meki-edge unload" in caught.value.fix


def test_a_push_that_is_cut(device: Device, phone: Phone, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3_000_000))
    phone.set(cut_after_bytes=1_000_000)
    with pytest.raises(UserError, match="connection to the phone was lost") as caught:
        device.push(tmp_path / "large", f"{phone.directory}/large")
    assert "resumes" in caught.value.fix


def test_a_phone_that_goes_away(phone: Phone, device: Device) -> None:
    phone.stop()
    with pytest.raises(UserError, match="connection to the phone was lost"):
        device.run("echo")
    with pytest.raises(UserError, match="there is no phone .* adb sees no phone"):
        adb.find().device(device.serial)


def test_a_command_that_does_not_answer(device: Device) -> None:
    with pytest.raises(UserError, match="did not answer in 1 s"):
        device.run("sleep 20", timeout=1)


def test_a_folder_that_cannot_be_written(device: Device, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UserError, match="the transfer failed"):
        device.push(tmp_path / "file", "/proc/nowhere/file")
    with pytest.raises(UserError, match="the transfer failed"):
        device.pull("/nowhere/at all", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_two_phones_need_a_choice(make_phone: Callable[..., Phone], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_phone("first"), make_phone("second")
    client = adb.find()
    with pytest.raises(UserError, match="2 phones are connected") as caught:
        client.device(None)
    assert first.serial in caught.value.what and "--serial" in caught.value.fix
    assert client.device(second.serial).run(f"cat '{second.properties}'").status == 0
    monkeypatch.setenv("ANDROID_SERIAL", first.serial)
    assert client.device(None).serial == first.serial
    with pytest.raises(UserError, match="there is no phone 'ABC'"):
        client.device("ABC")


def test_an_unauthorised_phone(make_phone: Callable[..., Phone]) -> None:
    phone = make_phone(unauthorized=True)
    with pytest.raises(UserError, match="not ready: (unauthorized|authorizing)") as caught:
        adb.find().device(None)
    assert caught.value.where == phone.serial and "allow USB debugging" in caught.value.fix


def test_no_phone(adb_server: None) -> None:
    with pytest.raises(UserError, match="no phone is connected"):
        adb.find().device(None)


@pytest.mark.parametrize("state", ["offline", "no permissions (user x); see [http]", "recovery", "sideload"])
def test_states_that_are_not_ready(state: str) -> None:
    error = adb.not_ready(adb.Listed(serial="S", state=state))
    assert state.split(" (")[0] in error.what and error.fix


def test_adb_is_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADB", "ANDROID_HOME", "ANDROID_SDK_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="adb program was not found"):
        adb.find()
    sdk = tmp_path / "sdk/platform-tools/adb"
    sdk.parent.mkdir(parents=True)
    sdk.write_text("#!/bin/sh\necho 'no server' >&2\nexit 1\n")
    sdk.chmod(0o755)
    monkeypatch.setenv("ANDROID_HOME", str(tmp_path / "sdk"))
    with pytest.raises(UserError, match="`adb devices` failed: no server"):
        adb.find().devices()
    monkeypatch.setenv("ADB", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="adb program was not found") as caught:
        adb.find()
    assert "$ADB" in caught.value.fix


def test_an_old_daemon_knows_neither_stat_v2_nor_separate_errors(
    make_phone: Callable[..., Phone], tmp_path: Path
) -> None:
    phone = make_phone(features=["cmd"])
    with pytest.raises(UserError, match="gives no exit codes"):
        adb.find().device(None)
    device = adb.Device(adb.find(), phone.serial)
    (tmp_path / "file").write_bytes(b"0123456789" * 1000)
    device.push(tmp_path / "file", f"{phone.directory}/copy")
    device.pull(f"{phone.directory}/copy", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()
    assert "shell_v2" not in device.features()


def test_an_old_client(phone: Phone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "adb"
    script = 'case " $* " in *" features "*) echo "adb: unknown command features" >&2; exit 1;; esac'
    old.write_text(f'#!/bin/sh\n{script}\nexec {shutil.which("adb")} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("ADB", str(old))
    with pytest.raises(UserError, match="this adb cannot ask .*unknown command features") as caught:
        adb.find().device(phone.serial)
    assert "platform-tools" in caught.value.fix


def test_only_one_file_runs_adb() -> None:
    root = Path(__file__).parents[2]
    pattern = r"subprocess.*adb|\"adb\", \"(shell|push|pull|devices)"
    grep = ["grep", "-rlE", pattern, "--include=*.py", "meki_edge", "export"]
    found = subprocess.run(grep, cwd=root, capture_output=True, text=True).stdout.split()
    assert set(found) <= {"meki_edge/device/adb.py"}
