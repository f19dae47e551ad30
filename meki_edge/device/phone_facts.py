"""Facts about a phone: what it is, what it has room for, and whether programs can run in a folder of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from meki_edge.device.adb import Device, command

TARGET = "/data/local/tmp/meki"
EMULATED = ("ro.boot.qemu", "ro.kernel.qemu")

# Asks the nearest folder that exists, so that nothing has to be made in order to look.
_SCRIPT = """
folder=$1
while [ ! -d "$folder" ]; do folder=${folder%/*}; [ -n "$folder" ] || folder=/; done
echo "kernel=$(uname -r)"
echo "machine=$(uname -m)"
echo "page_bytes=$(getconf PAGE_SIZE 2>/dev/null)"
echo "cores=$(nproc 2>/dev/null)"
echo "memory_kb=$(sed -n 's/^MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo)"
echo "df=$(df -Pk "$folder" 2>/dev/null | tail -n 1)"
command -v sha256sum >/dev/null && echo sha256sum=yes
probe=$folder/.meki-edge-probe
if printf '' 2>/dev/null >"$probe"; then
    echo writable=yes
    chmod 755 "$probe"
    [ -x "$probe" ] && echo executable=yes
    rm -f "$probe"
fi
true
"""


@dataclass(frozen=True, kw_only=True)
class PhoneFacts:
    """What was found; a number that the phone did not tell is None, a text empty."""

    serial: str
    model: str
    soc: str
    """``ro.soc.model``, such as "SM8750"."""
    abis: tuple[str, ...]
    android: str
    sdk: int | None
    """Android's API level."""
    kernel: str
    machine: str
    page_bytes: int | None
    cores: int | None
    memory_bytes: int | None
    free_bytes: int | None
    """In the target folder."""
    writable: bool
    executable: bool
    """Files in the target folder may be run."""
    has_sha256sum: bool
    features: frozenset[str]
    """Of its adb daemon."""
    emulated: bool
    """Not a phone's own processor: its speeds mean nothing."""

    @property
    def title(self) -> str:
        return f"{self.model or 'unknown phone'} ({self.soc or 'unknown chip'}), Android {self.android or '?'}"

    def as_host(self) -> dict[str, Any]:
        """The facts in the form that ``results.json`` gives of the machine that was measured on."""
        return {
            "cpu": self.soc or self.model or "unknown chip",
            "architecture": self.machine,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes or 0,
            "os": f"Android {self.android} (API {self.sdk}), kernel {self.kernel}",
        }


def read(device: Device, target: str = TARGET) -> PhoneFacts:
    """Ask ``device``; ``target`` is the folder that things are to be put into."""
    found = device.run(f"set -- {command(target)}\n{_SCRIPT}").stdout
    values = dict(line.partition("=")[::2] for line in found.splitlines())
    space = re.search(r"\s(\d+)\s+\d+%\s", values.get("df", ""))
    properties = {
        name: device.getprop(name)
        for name in (
            "ro.product.cpu.abilist",
            "ro.product.cpu.abi",
            "ro.product.model",
            "ro.build.version.release",
            "ro.build.version.sdk",
            "ro.soc.model",
            *EMULATED,
        )
    }
    abis = properties["ro.product.cpu.abilist"] or properties["ro.product.cpu.abi"]
    machine = values.get("machine", "")
    memory = _number(values.get("memory_kb", ""))
    return PhoneFacts(
        serial=device.serial,
        model=properties["ro.product.model"],
        soc=properties["ro.soc.model"],
        abis=tuple(abi.strip() for abi in abis.split(",") if abi.strip()),
        android=properties["ro.build.version.release"],
        sdk=_number(properties["ro.build.version.sdk"]),
        kernel=values.get("kernel", ""),
        machine=machine,
        page_bytes=_number(values.get("page_bytes", "")),
        cores=_number(values.get("cores", "")),
        memory_bytes=None if memory is None else memory * 1024,
        free_bytes=int(space[1]) * 1024 if space else None,
        writable="writable" in values,
        executable="executable" in values,
        has_sha256sum="sha256sum" in values,
        features=frozenset(device.features()),
        emulated=machine != "aarch64" or any(properties[name] == "1" for name in EMULATED),
    )


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
