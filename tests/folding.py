"""How tests fold tiny checkpoints."""

from __future__ import annotations

from meki_edge.reparam import ReparamConfig

ROM = "rom.safetensors"
WINDOWS, LENGTH = 5, 48


def config(**changes: object) -> ReparamConfig:
    return ReparamConfig(**{"proof_windows": WINDOWS, "window_length": LENGTH, "chunk_rows": 100, **changes})
