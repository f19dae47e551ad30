"""The registry of memory kinds: one line a paper, and nothing else knows their names."""

from __future__ import annotations

import dataclasses
from os import PathLike
from typing import Any

from meki_edge.config import from_dict, to_dict
from meki_edge.errors import UserError, nearest
from meki_edge.memory.base import MemoryLayer, PaddedRows, RowSource, Site, Slot, TokenBatch
from meki_edge.memory.engram import EngramConfig, EngramLayer
from meki_edge.memory.l3 import L3Config, L3Layer
from meki_edge.memory.meki import MekiConfig, MekiLayer
from meki_edge.memory.mole import MoleConfig, MoleLayer
from meki_edge.memory.ple import PleConfig, PleLayer
from meki_edge.memory.staple import StapleConfig, StapleLayer
from meki_edge.memory.stem import StemConfig, StemLayer
from meki_edge.model_shape import ModelShape

__all__ = ["KINDS", "MemoryLayer", "PaddedRows", "RowSource", "Site", "Slot", "TokenBatch", "build", "check_options", "chosen_options"]

KINDS: dict[str, tuple[type, type[MemoryLayer]]] = {
    "meki": (MekiConfig, MekiLayer),
    "ple": (PleConfig, PleLayer),
    "stem": (StemConfig, StemLayer),
    "staple": (StapleConfig, StapleLayer),
    "l3": (L3Config, L3Layer),
    "engram": (EngramConfig, EngramLayer),
    "mole": (MoleConfig, MoleLayer),
}


def check_options(kind: str, options: Any, where: str | PathLike[str]) -> dict[str, Any]:
    """Validate the JSON ``options`` of memory ``kind`` and return them with defaults filled in.

    Raises:
        UserError: an unknown kind or option, or a value of the wrong type.
    """
    return to_dict(from_dict(_registered(kind, where)[0], options, where))


def chosen_options(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that are not the kind's defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(_registered(kind, "memories")[0])}
    return {name: value for name, value in options.items() if value != defaults[name]}


def build(kind: str, options: dict[str, Any], shape: ModelShape, slot: Slot, *, folded: bool) -> MemoryLayer:
    """The memory layer of ``kind`` in ``slot`` of a model of ``shape``, in training or (``folded``) ROM form."""
    config_class, layer_class = _registered(kind, "memories")
    return layer_class(from_dict(config_class, options, f"memories: {kind}"), shape, slot, folded=folded)


def _registered(kind: str, where: str | PathLike[str]) -> tuple[type, type[MemoryLayer]]:
    if kind not in KINDS:
        raise UserError(f"unknown memory {kind!r}{nearest(kind, KINDS)}", where=where, fix=f"use {', '.join(KINDS)}")
    return KINDS[kind]
