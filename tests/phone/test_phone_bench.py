"""From sideload to the comparison, by the commands of a user, with the arm64 harness on the phone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_files import write_elf
from phone import Phone

from meki_edge import compare, manifest
from meki_edge.device import adb, phone_bench, phone_conditions, phone_runner, sideload
from meki_edge.device.phone_bench import PhoneRunConfig
from meki_edge.device.sideload import SideloadConfig
from meki_edge.errors import UserError

COMMAND = [sys.executable, "-m", "meki_edge.cli"]
SYSTEM = {
    "class/thermal/thermal_zone0/type": "cpu-1-0",
    "class/thermal/thermal_zone0/temp": "41500",
    "class/thermal/thermal_zone1/type": "battery",
    "class/thermal/thermal_zone1/temp": "33000",
    "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "300000",
    "devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "2000000",
    "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "2000000",
    "devices/system/cpu/cpu6/cpufreq/scaling_cur_freq": "3200000",
    "devices/system/cpu/cpu6/cpufreq/scaling_max_freq": "3000000",
    "devices/system/cpu/cpu6/cpufreq/cpuinfo_max_freq": "4000000",
    "class/power_supply/battery/current_now": "-1500000",
    "class/power_supply/battery/voltage_now": "4000000",
    "class/power_supply/battery/status": "Discharging",
}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=environment)


@pytest.fixture
def warm_phone(arm_phone: Phone, monkeypatch: pytest.MonkeyPatch) -> Phone:
    """A phone with thermal zones, clocks and a battery gauge; its kernel's files lie in its own folder."""
    system = arm_phone.directory / "sys"
    for name, text in SYSTEM.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text + "\n")
    (arm_phone.directory / "dumpsys-power.txt").write_text("  mWakefulness=Awake\n")
    (arm_phone.directory / "dumpsys-battery.txt").write_text("  AC powered: false\n  level: 80\n  temperature: 335\n")
    for function in (phone_conditions.read, phone_conditions.power_sampler):
        defaults = tuple(str(system) if value == phone_conditions.SYSTEM else value for value in function.__defaults__)
        monkeypatch.setattr(function, "__defaults__", defaults)
    return arm_phone


def test_bench_and_compare(
    warm_phone: Phone, arm64: dict[str, Path], bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("ORT_HOME", str(arm64["ort"].parent))
    device = adb.find().device(None)
    arms = [bundles["dense"], bundles["meki"]]
    config = PhoneRunConfig(
        prompt_tokens=20, generate_tokens=3, repetitions=1, depth=4, threads=1, serial=device.serial,
        target=warm_phone.target, cool_wait_s=0,
    )  # fmt: skip
    with pytest.raises(UserError, match="the bundle 'dense' is not on the phone"):
        phone_bench.bench(arms, tokens_dir, tmp_path / "bench", config, device)
    sideload.sideload(arms, device, SideloadConfig(target=warm_phone.target, runner=arm64["runner"]))
    made = phone_bench.bench(arms, tokens_dir, tmp_path / "bench", config, device)
    manifest.verify(tmp_path / "bench", made)
    assert phone_bench.bench(arms, tokens_dir, tmp_path / "bench", config, device) == made

    results = json.loads((tmp_path / "bench/results.json").read_text())
    assert results["phone"]["soc"] == "SM8750" and results["phone"]["emulated"]
    assert results["host"]["cpu"] == "SM8750" and results["host"]["memory_bytes"] > 0
    for arm in results["arms"]:
        assert list(arm["tests"]) == ["pp20", "tg3"] and arm["conditions"]["hottest_celsius"] == 41.5
        assert arm["conditions"]["slowest_clock_mhz"] == 3200, "little cores do not count"
        assert arm["power_watts"] == pytest.approx(6.0)
        seconds = 1 / arm["tests"]["tg3"]["tokens_per_s"]["mean"]
        assert arm["energy_joules_per_token"] == pytest.approx(6.0 * seconds)
        (raw,) = [json.loads((tmp_path / "bench" / name).read_text()) for name in arm["raw"]]
        assert raw["conditions"]["before"]["screen"] == "Awake" and raw["page_cache_dropped"]
        assert raw["conditions"]["after"]["battery"] == {"level": 80, "celsius": 33.5, "plugged": False}
    assert results["notes"][0] == phone_bench.EMULATED_NOTE
    assert "The phone held its big cores down to 75% of their clock at times." in results["notes"]
    assert not warm_phone.left_behind() and not list(Path(warm_phone.target).glob("runs/*"))

    compare.compare(tmp_path / "bench", tmp_path / "compare")
    result = json.loads((tmp_path / "compare/compare.json").read_text())
    assert compare.HOST_NOTE not in result["notes"] and result["arms"]["meki"]["energy_joules_per_token"] > 0
    page, text = ((tmp_path / "compare" / name).read_text() for name in ("compare.html", "compare.md"))
    for shown in ("Published, not measured here", "arXiv:2602.03359", "Energy a decoded token", "42 °C"):
        assert shown in page and shown in text
    assert "Test Phone (SM8750), Android 15" in page


def test_warm_rows_are_read_first(
    arm_phone: Phone, arm64: dict[str, Path], bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORT_HOME", str(arm64["ort"].parent))
    device = adb.find().device(None)
    sideload.sideload([bundles["meki"]], device, SideloadConfig(target=arm_phone.target, runner=arm64["runner"]))
    harness = phone_runner.PhoneRunner(device, sideload.layout(arm_phone.target))
    (tmp_path / "trace.txt").write_text("1 2 3")
    harness.warm(bundles["meki"], tmp_path / "trace.txt")
    (tmp_path / "trace.txt").write_text("1 2 99999999")
    with pytest.raises(UserError, match="99999999"):
        harness.warm(bundles["meki"], tmp_path / "trace.txt")
    assert not list(Path(arm_phone.target).glob("runs/*"))


def test_commands(arm_phone: Phone, bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit codes, JSON and advice of the commands themselves."""
    monkeypatch.setenv("ORT_HOME", str(write_elf(tmp_path / "ort/libonnxruntime.so").parent))
    phone = ["-s", arm_phone.serial, "--target", arm_phone.target]
    there = run("sideload", bundles["dense"], *phone, "--runner", write_elf(tmp_path / "runner"), "--json")
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["pushed_bytes"] > 0
    shown = run("doctor", *phone)
    assert "Test Phone (SM8750), Android 15" in shown.stdout and "dense" in shown.stdout
    found = json.loads(run("doctor", *phone, "--json").stdout)
    assert [section["title"] for section in found] == ["This machine", f"Phone {arm_phone.serial}"]
    assert run("unload", "nothing", *phone).returncode == 1
    assert json.loads(run("unload", *phone, "--json").stdout)["removed"] == ["dense"]
    missing = run("generate", bundles["dense"], "Hello", "--on", "adb", *phone)
    assert missing.returncode == 1 and "is not on the phone" in missing.stderr
    assert "add --on adb" in run("generate", bundles["dense"], "Hello", "-s", "X").stderr
    nobody = run("doctor", "-s", "NOBODY")
    assert nobody.returncode == 1 and "there is no 'NOBODY'" in nobody.stdout


def test_doctor_and_a_phone_that_is_not_ready(make_phone: Callable[..., Phone]) -> None:
    phone = make_phone(unauthorized=True)
    shown = run("doctor")
    assert shown.returncode == 1 and phone.serial in shown.stdout and "allow USB debugging" in shown.stdout


@pytest.mark.parametrize("samples", ["", "-1500000 4000000 Charging", "x y Discharging", "1 2"])
def test_power_is_not_guessed(samples: str) -> None:
    assert phone_conditions.mean_watts(samples) is None


def test_power_of_gauges_in_microamperes_and_milliamperes() -> None:
    samples = "-1500000 4000000 Discharging\n-500000 4000000 Discharging"
    assert phone_conditions.mean_watts(samples) == pytest.approx(4.0)
    assert phone_conditions.mean_watts("1500 4000000 Discharging") == pytest.approx(6.0)


def conditions(celsius: float | None) -> dict[str, Any]:
    return {"temperatures": None if celsius is None else {"zone0 cpu-0": celsius, "zone1 battery": 90.0}}


def test_cooling_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phone_conditions, "POLL_SECONDS", 0.001)
    temperatures = iter([50.0, 47.0, 44.9, 10.0])
    seen: list[float] = []
    phone_conditions.cool_down(lambda: conditions(next(temperatures)), 45, 60, seen.append)
    assert seen == [50.0, 47.0] and next(temperatures) == 10.0, "a hot battery is not a hot processor"
    assert phone_conditions.cool_down(lambda: conditions(None), 45, 60, seen.append) < 1
    assert phone_conditions.cool_down(lambda: conditions(60.0), 45, 0, seen.append) < 1


def test_what_phones_print() -> None:
    found = phone_conditions.parse(
        "zone zone0 -40000 ddr\nzone zone1 38500 soc_max\nzone zone2 junk pmic\nscreen Asleep\nstatus 2\n"
        "hal skin 35.5\nbattery level=55\nbattery temperature=310\nbattery USB powered=true\ncore cpu0 1000000\n"
    )
    assert found["temperatures"] == {"zone1 soc_max": 38.5} and phone_conditions.hottest(found) == 38.5
    assert found["screen"] == "Asleep" and found["thermal_status"] == 2 and found["clocks"] == {"cpu0": 1000.0}
    assert found["battery"] == {"level": 55, "celsius": 31.0, "plugged": True}
    hidden = phone_conditions.parse("hal skin 35.5\nhal CPU0 41.0\n")
    assert hidden["temperatures"] == {"skin": 35.5, "CPU0": 41.0} and phone_conditions.hottest(hidden) == 41.0
    names = ("temperatures", "clocks", "clock_limits", "screen", "thermal_status", "battery")
    assert phone_conditions.parse("") == dict.fromkeys(names)
