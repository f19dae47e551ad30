"""What is read of files before they go to a phone: ELF headers, QNN's packages, its error numbers."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest
from fake_files import ARM64, HEXAGON, X86_64, qnn_library, qnn_sdk, write_elf

from meki_edge.device import elf, phone_failure, phone_runtime, qnn_errors
from meki_edge.device.phone_runtime import NpuNeeds
from meki_edge.errors import UserError

V79 = NpuNeeds(chipset="sm8750", hexagon_arch="v79", qnn_version="2.51.0.260929")


def test_elf_facts(tmp_path: Path) -> None:
    arm = elf.read(write_elf(tmp_path / "arm", ARM64, alignment=0x4000))
    assert (arm.machine, arm.alignment, arm.hexagon_arch, arm.interpreter) == ("arm64", 0x4000, "", "")
    skeleton = elf.read(write_elf(tmp_path / "skel", HEXAGON, flags=0x79, alignment=0x1000))
    assert (skeleton.machine, skeleton.hexagon_arch) == ("hexagon", "v79")
    here = elf.read(Path(sys.executable).resolve())
    assert here.machine in ("x86-64", "arm64") and here.interpreter.startswith("/lib") and here.alignment >= 0x1000


@pytest.mark.parametrize(
    "contents",
    [b"", b"#!/bin/sh\n", b"\x7fELF\2\1\1" + bytes(49) + b"\1" + bytes(7), b"\x7fELF\2\1\1" + b"\xff" * 57],
    ids=["empty", "script", "headers of no size", "impossible offsets"],
)
def test_what_is_no_elf_file(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(contents)
    with pytest.raises(UserError, match="not an ELF program|the ELF file is damaged"):
        elf.read(tmp_path / "file")


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The harness; ``ORT_HOME`` holds ONNX Runtime alone."""
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    write_elf(tmp_path / "ort/lib/libonnxruntime.so")
    monkeypatch.setenv("ORT_HOME", str(tmp_path / "ort"))
    return write_elf(tmp_path / "meki-runner")


def test_everything_from_packages(runner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"onnxruntime.aar": ["libonnxruntime.so"]}
    packages["qnn-runtime.aar"] = ["libQnnHtp.so", "libQnnSystem.so", "libQnnHtpV79Stub.so"]
    for package, names in packages.items():
        with zipfile.ZipFile(tmp_path / package, "w") as archive:
            for name in names:
                archive.write(qnn_library(tmp_path / "made" / name), f"jni/arm64-v8a/{name}")
                archive.write(write_elf(tmp_path / "made/x86", X86_64), f"jni/x86_64/{name}")
            if package.startswith("qnn"):
                skeleton = qnn_library(tmp_path / "made/skel", HEXAGON, flags=0x79)
                archive.write(skeleton, "jni/arm64-v8a/libQnnHtpV79Skel.so")
    monkeypatch.setenv("ORT_HOME", f"{tmp_path / 'onnxruntime.aar'}:{tmp_path / 'qnn-runtime.aar'}")
    with phone_runtime.collect([V79], runner) as found:
        names = {"meki-runner", "libonnxruntime.so", *packages["qnn-runtime.aar"], "libQnnHtpV79Skel.so"}
        assert set(found.files) == names
        assert found.versions == {"qnn": "2.51.0"} and found.alignments["meki-runner"] == 0x4000
        assert all(elf.read(path).machine in ("arm64", "hexagon") for path in found.files.values())
        kept = found.files["libQnnHtp.so"]
    assert not kept.exists(), "what was unpacked goes away"
    with phone_runtime.sources() as places:
        assert phone_runtime.qnn_at_hand(places) == ("2.51.0", ["v79"])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"version": "2.40.0"}, "QNN 2.40.0 cannot load a binary that QNN 2.51.0.260929 made"),
        ({"skeleton": "73"}, "libQnnHtpV79Skel.so is made for hexagon v73, the phone needs hexagon v79"),
        ({"machine": X86_64}, "libQnnHtp.so is made for x86-64"),
    ],
)
def test_qnn_libraries_that_do_not_fit(
    changes: dict, what: str, runner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = changes.pop("machine", ARM64)
    sdk = qnn_sdk(tmp_path / "sdk", **changes)
    if machine != ARM64:
        qnn_library(sdk / "lib/aarch64-android/libQnnHtp.so", machine)
    monkeypatch.setenv("QNN_SDK_ROOT", str(sdk))
    with pytest.raises(UserError, match=what), phone_runtime.collect([V79], runner):
        pass


def test_qnn_libraries_of_two_versions(runner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = qnn_sdk(tmp_path / "sdk")
    qnn_library(sdk / "lib/aarch64-android/libQnnSystem.so", version="2.52.0")
    monkeypatch.setenv("QNN_SDK_ROOT", str(sdk))
    with pytest.raises(UserError, match="different versions: .*libQnnSystem.so 2.52.0"):
        with phone_runtime.collect([V79], runner):
            pass


def test_a_binary_for_an_unknown_hexagon(runner: Path) -> None:
    needs = phone_runtime.npu_needs({"npu": {"chipset": "sm8750", "hexagon_arch": None}})
    with pytest.raises(UserError, match="does not say which Hexagon"), phone_runtime.collect([needs], runner):
        pass
    assert phone_runtime.npu_needs({"npu": None}) is None and phone_runtime.npu_needs({}) is None


def test_files_that_are_missing(runner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "no"
    with pytest.raises(UserError, match="there is no harness for the phone"), phone_runtime.collect([], nowhere):
        pass
    monkeypatch.setenv("ORT_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="does not exist") as caught, phone_runtime.collect([], runner):
        pass
    assert caught.value.where == "$ORT_HOME"
    (tmp_path / "broken.aar").write_bytes(b"no archive")
    monkeypatch.setenv("ORT_HOME", str(tmp_path / "broken.aar"))
    with pytest.raises(UserError, match="this is no package"), phone_runtime.collect([], runner):
        pass
    monkeypatch.delenv("ORT_HOME")
    with pytest.raises(UserError, match="there is no libonnxruntime.so"), phone_runtime.collect([], runner):
        pass


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('[ERROR] "Could not create context from binary for context index = 0 : err 5000"', 5000),
        ("QNN graph execute error. Error code: 6031", 6031),
        (" <E> Transport layer setup failed: 14001 (error code 14001)", 14001),
        ("Failed to initialize graph with id 256 context 2 deviceId 0 coreId 0 pdId 0 with err 1002", 1002),
        ("QNN_CONTEXT_ERROR_BINARY_VERSION", 5004),
        ("QNN context error 5005\nand then nothing", 5005),
        ("QNN: error code 4242", None),
        ("error: 5005 tokens do not fit [x] y", None),
        ("", None),
    ],
)
def test_qnn_errors(line: str, code: int | None) -> None:
    found = qnn_errors.explain(line)
    assert (found.code if found else None) == code


def test_every_qnn_error_says_what_to_do_and_from_where() -> None:
    assert {1002, 5000, 5005, 14001, 6031} <= set(qnn_errors.ERRORS)
    for code, error in qnn_errors.ERRORS.items():
        assert error.code == code and error.meaning and error.fix and error.source
        assert re.fullmatch(r"QNN_[A-Z_]+|.*\(.*\)", error.name)


def test_how_a_process_ended() -> None:
    killed = phone_failure.explained(137, "", [], Path("log"))
    assert "ran out of memory" in killed.what and killed.where == "log"
    assert "status 3" in phone_failure.explained(3, "", [], Path("log")).what
