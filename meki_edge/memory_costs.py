"""What each memory costs at a model's shape: parameters in RAM, ROM bytes, bytes a token, FLOPs.

Counted on layers built without storage (torch's meta device), so a 4B shape costs nothing to ask
about, and a new memory kind needs no formula here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from meki_edge.memory import KINDS, Site, Slot, build
from meki_edge.model.config import MemoryPlacement, ModelConfig, check
from meki_edge.model.decoder import DecoderLayer
from meki_edge.model.placement import paper_placement
from meki_edge.rom.spec import table_codec


@dataclass(frozen=True, kw_only=True)
class MemoryCost:
    """The cost of one memory in all of its layers, beside the dense model; ROM bytes without padding."""

    kind: str
    options: dict[str, Any]
    layers: tuple[int, ...]
    ram_parameters: int
    """Parameters more (or fewer) than dense that stay in memory."""
    training_parameters: int
    """Parameters more than dense while training, tables included."""
    rom_parameters: int
    """Elements of all ROM rows."""
    rom_bytes: int
    bytes_per_token: int
    """Bytes of rows that a token reads at most."""
    flops_per_token: int
    """FLOPs more (or fewer) than dense a decoded token."""


def cost(
    dense: ModelConfig, kind: str, options: dict[str, Any], layers: tuple[int, ...], table_precision: str = "fp16"
) -> MemoryCost:
    """What memory ``kind`` with ``options`` in ``layers`` adds to the ``dense`` shape.

    Raises:
        UserError: options that the kind does not know or that do not fit, or an unknown precision.
    """
    codec = table_codec(table_precision)
    placement = MemoryPlacement(kind=kind, layers=layers, options=options)
    training = check(dataclasses.replace(dense, memories=(placement,)), f"memory {kind}")
    folded = dataclasses.replace(training, memory_form="rom")
    ram = in_training = rom_elements = rom_bytes = token_bytes = flops = 0
    with torch.device("meta"):
        plain = _parameters(dense, layers[0])
        for layer in layers:
            memory = build(kind, training.memories[0].options, dense, Slot(layer=layer, layers=layers), folded=True)
            ram += _parameters(folded, layer) - plain
            in_training += _parameters(training, layer) - plain
            rom_elements += memory.num_rows * memory.stored_dim
            rom_bytes += memory.num_rows * codec.num_bytes(memory.stored_dim)
            token_bytes += memory.rows_per_token * codec.num_bytes(memory.stored_dim)
            flops += memory.flops_per_token
            if memory.site is Site.FFN_UP:
                flops -= 2 * dense.hidden_size * dense.intermediate_size
    return MemoryCost(
        kind=kind,
        options=training.memories[0].options,
        layers=layers,
        ram_parameters=ram,
        training_parameters=in_training,
        rom_parameters=rom_elements,
        rom_bytes=rom_bytes,
        bytes_per_token=token_bytes,
        flops_per_token=flops,
    )


def survey(dense: ModelConfig, table_precision: str = "fp16") -> list[MemoryCost]:
    """Every memory at the ``dense`` shape, placed as its paper places it."""
    found = []
    for kind, extra in [*((kind, {}) for kind in KINDS), ("staple", {"rank": max(8, dense.hidden_size // 8)})]:
        layers, options = paper_placement(kind, dense)
        found.append(cost(dense, kind, {**options, **extra}, layers, table_precision))
    return found


def _parameters(config: ModelConfig, layer: int) -> int:
    return sum(parameter.numel() for parameter in DecoderLayer(config, layer).parameters())
