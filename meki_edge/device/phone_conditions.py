"""What decides a phone's speed from one minute to the next: heat, clocks, screen, battery.

Everything is read as the shell user, without root; what a phone hides is None. Temperatures are those
of the kernel's thermal zones, else what Android's thermal service reports; clocks are those of the
cores that the harness runs on, the faster kinds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from meki_edge.device.adb import Device, command

SYSTEM = "/sys"
SANE_CELSIUS = (-20.0, 150.0)  # zones that are switched off, or count something else, tell nonsense
POLL_SECONDS = 5.0
MILLIAMPERE_BELOW = 20_000  # some gauges count mA, not µA; no phone that computes draws 20 mA

_SCRIPT = """
for zone in "$system"/class/thermal/thermal_zone*; do
    [ -r "$zone/temp" ] || continue
    echo "zone ${zone##*/thermal_} $(cat "$zone/temp" 2>/dev/null) $(cat "$zone/type" 2>/dev/null)"
done
for core in "$system"/devices/system/cpu/cpu[0-9]*; do
    clock=$core/cpufreq
    [ -r "$clock/scaling_cur_freq" ] || continue
    echo "core ${core##*/}" $(cat "$clock/scaling_cur_freq" "$clock/scaling_max_freq" "$clock/cpuinfo_max_freq" 2>/dev/null)
done
dumpsys power 2>/dev/null | sed -n 's/.*mWakefulness=\\([A-Za-z]*\\).*/screen \\1/p' | head -n 1
dumpsys battery 2>/dev/null | sed -n 's/^ *\\([A-Za-z ]*\\): *\\(.*\\)/battery \\1=\\2/p'
dumpsys thermalservice 2>/dev/null | sed -n -e 's/.*Thermal Status: *\\([0-9]*\\).*/status \\1/p' \
-e 's/.*Temperature{mValue=\\([-0-9.]*\\), mType=[0-9]*, mName=\\([^,]*\\),.*/hal \\2 \\1/p'
true
"""


def read(device: Device, system: str = SYSTEM) -> dict[str, Any]:
    """The conditions now.

    Returns:
        ``temperatures`` by zone in °C, ``clocks`` of the big cores in MHz, ``clock_limits`` as a share
        of what the cores can do (1.0: not throttled), ``screen`` ("Awake" …), ``thermal_status``
        (Android's, 0: none), ``battery`` with ``level`` in %, ``celsius`` and ``plugged``.
    """
    return parse(device.run(f"system={command(system)}\n{_SCRIPT}").stdout)


def parse(text: str) -> dict[str, Any]:
    """:func:`read`'s dictionary from what its script printed."""
    zones: dict[str, float] = {}
    reported: dict[str, float] = {}
    cores: dict[str, list[float]] = {}
    found: dict[str, Any] = {"screen": None, "thermal_status": None}
    battery: dict[str, str] = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        words = rest.split()
        if kind == "zone" and len(words) >= 2 and (value := _number(words[1])) is not None:
            zones[" ".join([words[0], *words[2:]])] = value / 1e3
        elif kind == "hal" and (value := _number(words[-1])) is not None:
            reported.setdefault(" ".join(words[:-1]), value)
        elif kind == "core" and len(words) >= 2:
            cores[words[0]] = [value for word in words[1:] if (value := _number(word)) is not None]
        elif kind == "screen":
            found["screen"] = rest
        elif kind == "status" and found["thermal_status"] is None:
            found["thermal_status"] = int(rest) if rest.isdecimal() else None
        elif kind == "battery":
            name, _, value = rest.partition("=")
            battery[name.strip()] = value.strip()
    low, high = SANE_CELSIUS
    sane = {name: value for name, value in (zones or reported).items() if low < value < high}
    clocks = {name: values for name, values in cores.items() if values}
    return {"temperatures": sane or None, **_clocks(clocks), **found, "battery": _battery(battery)}


def hottest(conditions: dict[str, Any]) -> float | None:
    """The hottest zone of the processor in °C (of anything, where no zone is called so); None if none is known."""
    temperatures = conditions["temperatures"] or {}
    processor = [value for name, value in temperatures.items() if re.search(r"cpu|soc|nsp|npu", name, re.IGNORECASE)]
    return max(processor or temperatures.values(), default=None)


def cool_down(
    look: Callable[[], dict[str, Any]], limit_celsius: float, longest_s: float, on_wait: Callable[[float], None]
) -> float:
    """Wait until the phone is no hotter than ``limit_celsius``; at most ``longest_s``.

    Args:
        look: gives the conditions.
        on_wait: told the temperature at each look while waiting.

    Returns:
        The seconds waited.
    """
    start = time.monotonic()
    while (now := hottest(look())) is not None and now > limit_celsius:
        on_wait(now)
        left = longest_s - (time.monotonic() - start)
        if left <= 0:
            break
        time.sleep(min(POLL_SECONDS, left))
    return time.monotonic() - start


def power_sampler(place: str, system: str = SYSTEM) -> str:
    """Shell commands that write the battery's gauge to the file ``place`` each second, while this shell lives on."""
    gauge = f"{system}/class/power_supply/battery"
    current, voltage, status = (command(f"{gauge}/{name}") for name in ("current_now", "voltage_now", "status"))
    loop = f'while kill -0 $$; do echo "$(cat {current}) $(cat {voltage}) $(cat {status})"; sleep 1; done'
    return f"if [ -r {current} ] && [ -r {voltage} ]; then ( {loop} ) >{command(place)} 2>/dev/null </dev/null & fi"


def mean_watts(samples: str) -> float | None:
    """The mean power of what :func:`power_sampler` wrote; None unless the phone ran on its battery throughout."""
    watts = []
    for line in samples.splitlines():
        words = line.split(maxsplit=2)
        if len(words) < 3 or words[2] != "Discharging":
            return None
        current, voltage = _number(words[0]), _number(words[1])
        if current is None or voltage is None:
            return None
        amperes = abs(current) / (1e3 if abs(current) < MILLIAMPERE_BELOW else 1e6)
        watts.append(amperes * voltage / 1e6)
    return sum(watts) / len(watts) if watts else None


def _clocks(cores: dict[str, list[float]]) -> dict[str, dict[str, float] | None]:
    """Current clock and its limit of the cores that can be faster than the slowest kind."""
    most = {name: values[2] for name, values in cores.items() if len(values) == 3 and values[2] > 0}
    slowest = min(most.values(), default=0.0)
    big = [name for name in most if most[name] > slowest] or list(cores)
    return {
        "clocks": {name: cores[name][0] / 1e3 for name in big} or None,
        "clock_limits": {name: cores[name][1] / most[name] for name in big if name in most} or None,
    }


def _battery(values: dict[str, str]) -> dict[str, Any] | None:
    """Of `dumpsys battery`: the temperature comes in tenths of a degree."""
    if not values:
        return None
    temperature = _number(values.get("temperature", ""))
    plugged = [values[name] == "true" for name in values if name.endswith(" powered")]
    return {
        "level": _number(values.get("level", "")),
        "celsius": None if temperature is None else temperature / 10,
        "plugged": any(plugged) if plugged else None,
    }


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
