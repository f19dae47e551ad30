"""The harness on the phone: the pushed arm64 program runs under qemu, and every way in which it can end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_files import write_elf
from phone import Phone, missing_tools

from meki_edge.device import adb, phone_failure, runner, sideload
from meki_edge.device.adb import Device
from meki_edge.device.phone_runner import PhoneRunner
from meki_edge.device.sideload import SideloadConfig
from meki_edge.errors import UserError

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "meki_edge.cli"]


@pytest.fixture(scope="session")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A program for arm64 that goes wrong in a certain way."""
    if missing := missing_tools("aarch64-linux-gnu-gcc"):
        pytest.skip(f"{missing[0]} is missing (Debian: apt-get install gcc-aarch64-linux-gnu)")
    directory = tmp_path_factory.mktemp("misbehaving")

    def build(kind: int) -> Path:
        program = directory / f"misbehaving-{kind}"
        if not program.exists():
            options = ["-static", f"-DMISBEHAVE={kind}", "-o", program, HERE / "misbehaving.c"]
            subprocess.run(["aarch64-linux-gnu-gcc", *options], check=True)
        return program

    return build


@pytest.fixture
def bring(
    arm_phone: Phone, bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PhoneRunner]:
    """Sideload the dense bundle with a program as its harness, by default with a file in the place of ONNX Runtime."""

    def start(program: Path, ort: Path | None = None) -> PhoneRunner:
        library = ort or write_elf(tmp_path / "ort/libonnxruntime.so")
        monkeypatch.setenv("ORT_HOME", str(library.parent))
        device = adb.find().device(arm_phone.serial)
        config = SideloadConfig(target=arm_phone.target, runner=program)
        sideload.sideload([bundles["dense"]], device, config)
        return PhoneRunner(device, sideload.layout(arm_phone.target), failures=tmp_path / "failed")

    return start


def arguments(bundle: Path, tmp_path: Path) -> list[str]:
    ids = tmp_path / "ids with a space.txt"
    ids.write_text("20 21 22 23 24 25")
    return ["generate", "--bundle", str(bundle), "--prompt-file", str(ids), "--max-new-tokens", "4", "--threads", "1"]


def test_the_phone_generates_what_this_machine_does(
    bring: Callable[..., PhoneRunner], arm64: dict[str, Path], binary: Path, arm_phone: Phone,
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("MEKI_RUNNER", os.environ.get("MEKI_RUNNER", str(binary)))
    harness = bring(arm64["runner"], arm64["ort"])
    streamed: list[int] = []
    report = harness.run_json([*arguments(bundles["dense"], tmp_path), "--stream"], on_token=streamed.append)
    expected = runner.run_json(arguments(bundles["dense"], tmp_path))
    assert report["generated_tokens"] == streamed == expected["generated_tokens"]
    assert report["power_watts"] is None and not arm_phone.left_behind()
    assert harness.device.run(f"ls '{harness.places.runs}'").stdout == ""
    wrong = [*arguments(bundles["dense"], tmp_path)[:-3], "100000"]
    with pytest.raises(UserError, match="do not fit the context of 160"):
        harness.run_json(wrong)
    with pytest.raises(UserError, match="the bundle 'meki' is not on the phone"):
        harness.run_json(arguments(bundles["meki"], tmp_path))


def test_a_crash_keeps_the_report_and_the_phones_log(
    bring: Callable[..., PhoneRunner], misbehaving: Callable[[int], Path], arm_phone: Phone,
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (arm_phone.directory / "logcat.txt").write_text(
        "01-01 00:00:00.000  1  1 I chatty : nothing\n"
        "01-01 00:00:00.001  1  1 F DEBUG   : signal 11 (SIGSEGV), fault addr 0x0\n"
    )
    stones = arm_phone.directory / "tombstones"
    stones.mkdir()
    monkeypatch.setattr(phone_failure, "TOMBSTONES", str(stones))
    for number, age in ((0, -1000), (1, 1000)):  # of an earlier crash, and of this one
        (stones / f"tombstone_0{number}").write_text(f"backtrace {number}\n")
        os.utime(stones / f"tombstone_0{number}", (time.time() + age,) * 2)
    harness = bring(misbehaving(1))
    with pytest.raises(UserError, match=r"crashed on the phone \(SIGSEGV\); it last said: ") as caught:
        harness.run_json(arguments(bundles["dense"], tmp_path))
    assert "F DEBUG   : signal 11" in caught.value.what and "chatty" not in caught.value.what
    kept = Path(caught.value.where).parent
    assert kept.parent == tmp_path / "failed" and "fault addr" in (kept / "phone.log").read_text()
    assert "backtrace 1" in (kept / "phone.log").read_text() and "backtrace 0" not in (kept / "phone.log").read_text()
    assert json.loads((kept / "report.json").read_text())["half"] == "done"
    assert "about to crash" in (kept / "stderr.txt").read_text() and not arm_phone.left_behind()


def test_errors_of_qnn_are_explained(
    bring: Callable[..., PhoneRunner], misbehaving: Callable[[int], Path], bundles: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"QNN error 5005 \(QNN_CONTEXT_ERROR_CREATE_FROM_BINARY\)") as caught:
        bring(misbehaving(3)).run_json(arguments(bundles["dense"], tmp_path))
    assert "compile for this chip" in caught.value.fix and "issue" in caught.value.fix


def test_a_program_without_a_report(
    bring: Callable[..., PhoneRunner], misbehaving: Callable[[int], Path], bundles: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="ended well but wrote no report"):
        bring(misbehaving(4)).run_json(arguments(bundles["dense"], tmp_path))


def wait_for_process(phone: Phone) -> None:
    deadline = time.monotonic() + 60
    while not [path for path in Path(phone.target).glob("runs/*/process") if path.stat().st_size]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("keeps_orphans", [False, True], ids=["adbd hangs up", "adbd does not"])
def test_ctrl_c_leaves_no_process_on_the_phone(
    keeps_orphans: bool, bring: Callable[..., PhoneRunner], misbehaving: Callable[[int], Path], arm_phone: Phone,
    bundles: dict[str, Path],
) -> None:  # fmt: skip
    bring(misbehaving(2))
    arm_phone.set(keeps_orphans=keeps_orphans)
    options = ["--on", "adb", "-s", arm_phone.serial, "--target", arm_phone.target]
    process = subprocess.Popen(
        [*COMMAND, "generate", str(bundles["dense"]), "Hello", *options], stderr=subprocess.PIPE, text=True
    )
    wait_for_process(arm_phone)
    assert arm_phone.processes()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert not arm_phone.left_behind() and not list(Path(arm_phone.target).glob("runs/*"))


def test_kill_9_leaves_no_process_on_the_phone(
    bring: Callable[..., PhoneRunner], misbehaving: Callable[[int], Path], arm_phone: Phone, bundles: dict[str, Path]
) -> None:
    harness = bring(misbehaving(2))
    options = ["--on", "adb", "-s", arm_phone.serial, "--target", arm_phone.target]
    process = subprocess.Popen([*COMMAND, "generate", str(bundles["dense"]), "Hello", *options])
    wait_for_process(arm_phone)
    assert arm_phone.processes()
    process.kill()
    process.wait()
    assert not arm_phone.left_behind()
    starting, stale = (Path(arm_phone.target) / "runs" / name for name in ("run-starting", "run-stale"))
    starting.mkdir()
    stale.mkdir()
    os.utime(stale, (0, 0))
    PhoneRunner(harness.device, harness.places)
    assert list(Path(arm_phone.target).glob("runs/*")) == [starting], "the next run tidies up"


def test_the_phone_goes_offline_half_way(
    bring: Callable[..., PhoneRunner], misbehaving: Callable[[int], Path], arm_phone: Phone,
    bundles: dict[str, Path], tmp_path: Path,
) -> None:  # fmt: skip
    harness = bring(misbehaving(2))
    arm_phone.set(keeps_orphans=True)
    options = ["--on", "adb", "-s", arm_phone.serial, "--target", arm_phone.target]
    process = subprocess.Popen(
        [*COMMAND, "generate", str(bundles["dense"]), "Hello", *options], stderr=subprocess.PIPE, text=True
    )
    wait_for_process(arm_phone)
    subprocess.run(["adb", "disconnect", arm_phone.serial], check=True, capture_output=True)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "the connection to the phone was lost" in errors and "Traceback" not in errors
    arm_phone.connect()
    with pytest.raises(UserError, match="another run is under way on the phone") as caught:
        PhoneRunner(harness.device, harness.places)
    number = caught.value.where.split()[-1]
    assert f"kill {number}" in caught.value.fix
    harness.device.run(f"kill -KILL {number}")
    assert not arm_phone.left_behind()
    PhoneRunner(harness.device, harness.places)
    assert not list(Path(arm_phone.target).glob("runs/*")), "what a dead run left is removed"


def test_a_half_pushed_bundle_is_never_run(
    bring: Callable[..., PhoneRunner], misbehaving: Callable[[int], Path], arm_phone: Phone,
    bundles: dict[str, Path], tmp_path: Path,
) -> None:  # fmt: skip
    harness = bring(misbehaving(4))
    bundle = Path(arm_phone.target) / "bundles/dense"
    with open(bundle / "weights.data", "ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="'weights.data' of the bundle 'dense' was changed on the phone"):
        harness.run_json(arguments(bundles["dense"], tmp_path))
    (bundle / "manifest.json").unlink()
    with pytest.raises(UserError, match="was only half pushed"):
        harness.run_json(arguments(bundles["dense"], tmp_path))


def test_memory_is_shared_with_the_npu_alone(device: Device, phone: Phone) -> None:
    with pytest.raises(UserError, match="only the NPU has memory to share"):
        PhoneRunner(device, sideload.layout(phone.target), npu_memory="copied")


def test_only_known_options_name_files_of_this_machine(device: Device, tmp_path: Path) -> None:
    harness = PhoneRunner(device, sideload.layout("/data/local/tmp/meki"))
    words, files = harness._translated(["bench", "--trace-file", "/x/trace.txt", "--depth", "3"], "/run")
    assert words == ["bench", "--trace-file", "/run/trace.txt", "--depth", "3"]
    assert files == [(Path("/x/trace.txt"), "/run/trace.txt")]
