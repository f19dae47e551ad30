"""Speeds that others published for the same chips: context for ours, not measured by us."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Published:
    """Decoding speed of one model as its publisher states it."""

    model: str
    precision: str
    runtime: str
    context_length: int
    device: str
    soc: str
    tokens_per_s: float
    source: str


SOURCE = "Qualcomm AI Hub, performance of Qwen3 as published on its model pages (aihub.qualcomm.com/models)"
PUBLISHED = tuple(
    Published(
        model=model,
        precision="w4a16",
        runtime=runtime,
        context_length=4096,
        device="Galaxy S25",
        soc="sm8750",
        tokens_per_s=speed,
        source=SOURCE,
    )
    for model, genie, qairt in (("Qwen3-0.6B", 125, 48.7), ("Qwen3-1.7B", 56.7, 30.2), ("Qwen3-4B", 26.1, 17.5))
    for runtime, speed in (("Genie", genie), ("QAIRT", qairt))
)
