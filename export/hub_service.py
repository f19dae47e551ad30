"""What the rest of the package knows of AI Hub: devices, states of a job, how long to be patient.

:mod:`export.aihub` speaks to the service; everything else works with these.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from export.targets import CHIPS, Chip
from meki_edge.errors import UserError


class ServiceTrouble(UserError):
    """The service cannot answer now (no connection, a rate limit, a 5xx): worth another try later."""


class NotFound(UserError):
    """The service does not know an id: it was removed, or belongs to another account."""


class Expired(UserError):
    """The storage does not take (or know) a part of an upload: its links are out of date."""


@dataclass(frozen=True, kw_only=True)
class UploadLinks:
    """Where the parts of an upload of ``bytes`` bytes go, and the storage's receipts of those it has."""

    bytes: int
    upload_id: str
    part_bytes: int
    urls: tuple[str, ...]
    etags: tuple[str, ...] = ()

    def part(self, index: int) -> range:
        """The bytes of one part."""
        first = index * self.part_bytes
        return range(first, min(first + self.part_bytes, self.bytes))

    @property
    def whole(self) -> bool:
        """Whether the parts make up the file."""
        return self.part_bytes > 0 and len(self.urls) == -(-self.bytes // self.part_bytes) >= len(self.etags)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How to wait for the service. Nothing of it changes what is computed."""

    poll_seconds: float = 10.0
    """Between two looks at the unfinished jobs."""

    retry_seconds: float = 0.75
    """Before the first repetition of a request that failed; it doubles each time, up to a minute."""

    outage_seconds: float = 1800.0
    """How long the service may be unreachable, or refuse for its rate limit, before we give up."""

    timeout_seconds: float | None = None
    """How long to wait for jobs altogether; they go on at the service."""


@dataclass(frozen=True, kw_only=True)
class HubDevice:
    """A device of the service. ``chip`` is ours, or None where we do not know it."""

    name: str
    os: str
    attributes: tuple[str, ...]

    @property
    def chip(self) -> Chip | None:
        """The chip that the attributes name (``chipset:qualcomm-snapdragon-8-elite`` and its like)."""
        names = {_plain(value) for value in self.values("chipset")}
        for candidate in CHIPS:
            if names & {_plain(candidate.soc), _plain(candidate.name)}:
                return candidate
        return None

    @property
    def binaries_for(self) -> str:
        """What a binary is tied to: the chip's name (or the device's own, if its chip is unknown)."""
        return self.chip.soc if self.chip is not None else "+".join(self.values("chipset")) or self.name

    def values(self, key: str) -> tuple[str, ...]:
        """The values of the attributes ``key:value``."""
        return tuple(text.removeprefix(f"{key}:") for text in self.attributes if text.startswith(f"{key}:"))


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What the service says of a job; ``state`` is its own word, in lower case."""

    state: str
    finished: bool
    succeeded: bool
    reason: str | None = None


def choose_device(devices: list[HubDevice], name: str) -> HubDevice:
    """The device called ``name``; of several with different systems, the newest.

    Raises:
        UserError: no such device; the nearest names are given.
    """
    found = [device for device in devices if device.name.casefold() == name.strip().casefold()]
    if found:
        return max(found, key=lambda device: tuple(int(part) for part in device.os.split(".") if part.isdecimal()))
    known = sorted({device.name for device in devices})
    folded = {candidate.casefold(): candidate for candidate in known}
    close = [folded[match] for match in difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.4)]
    near = close or [candidate for candidate in known if name.casefold() in candidate.casefold()][:3]
    raise UserError(
        f"AI Hub has no device {name!r}" + (f"; the nearest are {', '.join(map(repr, near))}" if near else ""),
        where="--device",
        fix="choose one that `meki-edge hub devices` lists",
    )


def _plain(name: str) -> str:
    for word in ("qualcomm", "snapdragon", "-", "_", " "):
        name = name.lower().replace(word, "")
    return name
