"""Facts about the machine that a measurement was made on, and the state it was in."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

SYSTEM = Path("/sys")


def facts() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in bytes, operating system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.platform(),
    }


def conditions(system: Path = SYSTEM) -> dict[str, dict[str, float] | None]:
    """What decides the speed from one minute to the next, as the kernel shows it below ``system``.

    ``temperatures`` by thermal zone in °C, ``clocks`` by core in MHz. None, not zero, where the
    kernel shows nothing: a virtual machine has neither, and a sandbox may hide both.
    """
    temperatures = {}
    for zone in sorted((system / "class/thermal").glob("thermal_zone*")):
        value = _number(zone / "temp")
        if value is not None:
            temperatures[f"{zone.name.removeprefix('thermal_')} {_text(zone / 'type') or ''}".strip()] = value / 1e3
    clocks = {}
    for policy in sorted((system / "devices/system/cpu").glob("cpu[0-9]*/cpufreq")):
        value = _number(policy / "scaling_cur_freq")
        if value is not None:
            clocks[policy.parent.name] = value / 1e3
    return {"temperatures": temperatures or None, "clocks": clocks or None}


def _text(path: Path) -> str | None:
    """The contents of a file of the kernel's, or None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # a zone that is switched off answers with an error
        return None


def _number(path: Path) -> float | None:
    try:
        return float(_text(path) or "")
    except ValueError:
        return None


def _cpu_model() -> str:
    """The name in ``/proc/cpuinfo`` where there is one (``platform.processor()`` is often empty)."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware"):
                return value.strip()
    return platform.processor() or platform.machine()
