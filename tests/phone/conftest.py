"""Phones for the tests: see phone.py. Without adb they are skipped, with one line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from phone import Phone, free_port, missing_tools

from meki_edge.device import adb
from meki_edge.device.adb import Device

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def adb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server of adb's of our own, on a port and with a home of its own."""
    if missing := missing_tools("adb"):
        pytest.skip(f"{missing[0]} is missing (Debian: apt-get install adb)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANDROID_ADB_SERVER_PORT", str(free_port()))
        patch.delenv("ANDROID_SERIAL", raising=False)
        patch.delenv("ADB", raising=False)
        own = {**os.environ, "HOME": str(tmp_path_factory.mktemp("home"))}  # its keys lie there
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(["adb", "start-server"], env=own, check=True, **silent)
        yield
        subprocess.run(["adb", "kill-server"], capture_output=True)


@pytest.fixture
def make_phone(adb_server: None, tmp_path: Path) -> Iterator[Callable[..., Phone]]:
    """Start phones; they end with the test."""
    started: list[Phone] = []

    def start(name: str = "phone", **options: Any) -> Phone:
        started.append(Phone(tmp_path / name, **options).connect())
        return started[-1]

    yield start
    for phone in started:
        phone.stop()


@pytest.fixture
def phone(make_phone: Callable[..., Phone]) -> Phone:
    """One phone, connected."""
    return make_phone()


@pytest.fixture
def device(phone: Phone) -> Device:
    """The phone as meki-edge sees it."""
    return adb.find().device(None)


@pytest.fixture
def arm_phone(make_phone: Callable[..., Phone]) -> Phone:
    """A phone that runs programs for 64-bit Arm, under qemu."""
    if missing := missing_tools("qemu-aarch64", "gcc"):
        pytest.skip(f"{missing[0]} is missing (Debian: apt-get install qemu-user gcc)")
    return make_phone(sysroot=Path(os.environ.get("MEKI_ARM64_SYSROOT", ROOT / "build/arm64-sysroot")))


@pytest.fixture(scope="session")
def arm64() -> dict[str, Path]:
    """The harness (``runner``) and ONNX Runtime (``ort``) for 64-bit Arm, as `make test-arm64` leaves them."""
    runner = Path(os.environ.get("MEKI_RUNNER_ARM64", ROOT / "build/runner-arm64/meki-runner"))
    named = os.environ.get("MEKI_ORT_ARM64")
    pattern = "arm64-onnxruntime-*/onnxruntime/capi/libonnxruntime.so*"
    libraries = [Path(named)] if named else sorted((ROOT / "build").glob(pattern))
    if not runner.is_file() or not libraries:
        pytest.skip("the harness for arm64 is not built: run `make test-arm64`")
    return {"runner": runner, "ort": libraries[-1]}
