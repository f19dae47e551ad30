"""`meki-edge doctor`: is this machine, and is each phone, ready? One line a question, with what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from meki_edge.device import adb, elf, phone_checks, phone_conditions, phone_facts, phone_runtime, runner, sideload
from meki_edge.device.phone_checks import FIX, NOTE, OK, Check
from meki_edge.errors import UserError

STYLES = {OK: "green", NOTE: "yellow", FIX: "bold red"}
FREE_BYTES = 20e9  # a model of 1.7 B parameters, exported and compiled, with its ROM
ANDROID_LOADER = "/system/bin/linker64"

Sections = list[tuple[str, list[Check]]]


def examine(serial: str | None, target: str) -> Sections:
    """(title, checks) of this machine, then of each phone that adb sees (or of the one called ``serial``)."""
    sections = [("This machine", _host())]
    try:
        client = adb.find()
        listed = [entry for entry in client.devices() if serial in (None, entry.serial)]
    except UserError as error:
        return [*sections, ("Phones", [_failed("adb", error)])]
    if not listed:
        found = f"there is no {serial!r}" if serial else "none is connected"
        fix = "connect one by USB with USB debugging on (Settings, Developer options), or `adb connect ADDRESS`"
        sections.append(("Phones", [Check(name="phone", status=FIX if serial else NOTE, found=found, fix=fix)]))
    for entry in listed:
        sections.append((f"Phone {entry.serial}", _phone(client, entry, target)))
    return sections


def table(sections: Sections) -> Table:
    """All on one screen."""
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for number, (title, checks) in enumerate(sections):
        if number:
            shown.add_row("", "", "")
        shown.add_row("", Text(title, style="bold"), "")
        for check in checks:
            text = Text(check.found)
            if check.fix:
                text.append(f"\n→ {check.fix}", style="bold")
            shown.add_row(Text(check.status, style=STYLES[check.status]), Text(check.name), text)
    return shown


def ready(sections: Sections) -> bool:
    """Whether nothing has to be mended."""
    return all(check.status != FIX for _, checks in sections for check in checks)


def _host() -> list[Check]:
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return [
        Check(name="Python", status=OK, found=python),
        _package("onnxruntime", FIX, "pip install onnxruntime"),
        _package("onnxruntime-qnn", NOTE, "needed to compile for the NPU here; x86-64 Linux and Windows have it"),
        _asked("harness, this machine", lambda: str(runner.find_binary())),
        _space(),
        _asked("adb", lambda: f"{(found := adb.find()).version()} ({found.binary})"),
        _phone_harness(),
        _asked("ONNX Runtime, phone", _phone_ort, missing=NOTE),
        _qnn(),
    ]


def _package(name: str, missing: str, fix: str) -> Check:
    try:
        return Check(name=name, status=OK, found=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, status=missing, found="not installed", fix=fix)


def _asked(name: str, ask: Callable[[], str], missing: str = FIX) -> Check:
    """What ``ask`` finds; its error is the line's."""
    try:
        return Check(name=name, status=OK, found=ask())
    except UserError as error:
        return _failed(name, error, missing)


def _failed(name: str, error: UserError, status: str = FIX) -> Check:
    return Check(name=name, status=status, found=f"{error.what} ({error.where})", fix=error.fix)


def _space() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / 1e9:,.0f} GB in {Path.cwd()}"
    if free >= FREE_BYTES:
        return Check(name="free space", status=OK, found=found)
    return Check(name="free space", status=NOTE, found=found, fix=f"large models want {FREE_BYTES / 1e9:.0f} GB")


def _phone_harness() -> Check:
    name = "harness, phone"
    try:
        path = phone_runtime.find_runner(None)
        facts = elf.read(path)
    except UserError as error:
        return _failed(name, error, NOTE)
    if facts.machine != "arm64":
        return Check(name=name, status=FIX, found=f"{path} is for {facts.machine}", fix="build it for 64-bit Android")
    if facts.interpreter not in ("", ANDROID_LOADER):
        fix = "a phone needs the build of the preset android-arm64"
        return Check(name=name, status=NOTE, found=f"{path} is for Linux, not Android", fix=fix)
    return Check(name=name, status=OK, found=str(path))


def _phone_ort() -> str:
    with phone_runtime.sources() as found:
        return str(phone_runtime.find_ort(found))


def _qnn() -> Check:
    """QNN's libraries: their version, and the Hexagons that there are skeletons for."""
    name = "QNN, phone"
    with phone_runtime.sources() as found:
        try:
            version, archs = phone_runtime.qnn_at_hand(found)
        except UserError as error:
            return _failed(name, error, NOTE)
    if not archs:
        fix = "set QNN_SDK_ROOT to Qualcomm's SDK or the Maven package qnn-runtime, to run on the NPU"
        named = os.environ.get("QNN_SDK_ROOT")
        text = f"no libraries in {named}" if named else "QNN_SDK_ROOT is not set"
        return Check(name=name, status=NOTE, found=text, fix=fix)
    return Check(name=name, status=OK, found=f"{version or 'unknown version'}, for Hexagon {', '.join(archs)}")


def _phone(client: adb.Adb, entry: adb.Listed, target: str) -> list[Check]:
    if entry.state != "device":
        return [_failed("adb", adb.not_ready(entry))]
    device = adb.Device(client, entry.serial)
    try:
        places = sideload.layout(target)
        facts = phone_facts.read(device, places.target)
        conditions = phone_conditions.read(device)
        there = sideload.sideloaded(device, places)
    except UserError as error:
        return [_failed("phone", error)]
    emulated = [Check(name="emulated", status=NOTE, found="not a phone's own processor", fix="its speeds mean nothing")]
    return [
        Check(name="model", status=OK, found=facts.title),
        *(emulated if facts.emulated else []),
        *phone_checks.platform(facts, places.target),
        phone_checks.space(facts, 0),
        phone_checks.pages(facts, {}),
        *_state(conditions),
        Check(name="bundles", status=OK, found=", ".join(there) or "none yet: `meki-edge sideload BUNDLE`"),
    ]


def _state(conditions: dict) -> Sequence[Check]:
    """Heat and battery, where the phone tells."""
    checks = []
    celsius = phone_conditions.hottest(conditions)
    if celsius is None:
        checks.append(Check(name="heat", status=NOTE, found="the phone hides it", fix="let it rest before measuring"))
    else:
        hot = celsius > 45 or bool(conditions["thermal_status"])
        fix = "let it cool down before measuring" if hot else ""
        checks.append(Check(name="heat", status=NOTE if hot else OK, found=f"{celsius:.0f} °C", fix=fix))
    battery = conditions["battery"]
    if battery and battery["level"] is not None:
        low = battery["level"] < 30
        plugged = "on a cable" if battery["plugged"] else "on battery"
        fix = "charge it: many phones slow down on a low battery" if low else ""
        checks.append(
            Check(name="battery", status=NOTE if low else OK, found=f"{battery['level']:.0f} %, {plugged}", fix=fix)
        )
    return checks
