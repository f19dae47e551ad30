"""Snapdragon chips with a Hexagon NPU that a graph can be compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from meki_edge.errors import UserError, nearest


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip. ``soc_model`` is QNN's number for it and implies ``arch``, the Hexagon version.

    The memory's transfer rate and bus width are the most that the chip was announced to take; a
    phone may carry slower memory.
    """

    soc: str
    name: str
    soc_model: int
    arch: str
    hvx_threads: int
    vtcm_mb: int
    memory_mt_per_s: int
    memory_bus_bits: int
    memory_source: str

    @property
    def peak_bandwidth(self) -> float:
        """Bytes a second between DRAM and the chip, at the most."""
        return self.memory_mt_per_s * 1e6 * self.memory_bus_bits / 8


CHIPS = (
    Chip(
        soc="sm8550",
        name="Snapdragon 8 Gen 2",
        soc_model=43,
        arch="v73",
        hvx_threads=4,
        vtcm_mb=8,
        memory_mt_per_s=8400,
        memory_bus_bits=64,
        memory_source="Qualcomm's announcement, November 2022: LPDDR5X at 4200 MHz, 4 × 16 bit",
    ),
    Chip(
        soc="sm8650",
        name="Snapdragon 8 Gen 3",
        soc_model=57,
        arch="v75",
        hvx_threads=4,
        vtcm_mb=8,
        memory_mt_per_s=9600,
        memory_bus_bits=64,
        memory_source="Qualcomm's announcement, October 2023: LPDDR5X at 4800 MHz, 4 × 16 bit",
    ),
    Chip(
        soc="sm8750",
        name="Snapdragon 8 Elite",
        soc_model=69,
        arch="v79",
        hvx_threads=6,
        vtcm_mb=8,
        memory_mt_per_s=10600,
        memory_bus_bits=64,
        memory_source="Qualcomm's announcement, October 2024: LPDDR5X at 5300 MHz, 4 × 16 bit",
    ),
    Chip(
        soc="sm8850",
        name="Snapdragon 8 Elite Gen 5",
        soc_model=87,
        arch="v81",
        hvx_threads=8,
        vtcm_mb=8,
        memory_mt_per_s=10600,
        memory_bus_bits=64,
        memory_source="Qualcomm's announcement, September 2025: LPDDR5X at 5300 MHz, 4 × 16 bit",
    ),
    Chip(
        soc="sc8380xp",
        name="Snapdragon X Elite",
        soc_model=60,
        arch="v73",
        hvx_threads=4,
        vtcm_mb=8,
        memory_mt_per_s=8533,
        memory_bus_bits=128,
        memory_source="Qualcomm's announcement, October 2023: LPDDR5X at 8533 MT/s, 8 × 16 bit",
    ),
)


def chip(name: str) -> Chip:
    """The chip called ``name``: its SoC (``sm8750``) or marketing name, "Snapdragon" optional, in any case.

    Raises:
        UserError: no such chip; the nearest name is given.
    """
    wanted = _plain(name)
    for candidate in CHIPS:
        if wanted in (_plain(candidate.soc), _plain(candidate.name)):
            return candidate
    known = [spelling for candidate in CHIPS for spelling in (candidate.soc, candidate.name)]
    close = nearest(name.lower(), [spelling.lower() for spelling in known])
    raise UserError(
        f"unknown chip {name!r}{close}",
        where="--chipset",
        fix="use one of: " + ", ".join(f"{candidate.soc} ({candidate.name})" for candidate in CHIPS),
    )


def _plain(name: str) -> str:
    return name.lower().replace("snapdragon", "").replace("-", "").replace(" ", "")
