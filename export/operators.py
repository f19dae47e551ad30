"""Which operators the NPU compiler takes, and how: a table measured by :mod:`export.probe_operators`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from meki_edge.config import from_dict
from meki_edge.files import read_json

TABLE_FILE = Path(__file__).with_name("npu_operators.json")


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What the compiler was seen to take of one operator."""

    typed_input: int | None
    """The input whose dtype ``dtypes`` speaks of."""
    dtypes: tuple[str, ...]
    """Empty: it does not run on the NPU."""
    quantized: tuple[str, ...]
    """Integer dtypes of activations, where it stands between DequantizeLinear and QuantizeLinear."""
    ranks: tuple[int, ...]
    """Of that input; empty where only one was tried."""
    outputs: int
    """How many of its outputs may be asked for; an operator with any number of outputs may have more."""
    must_be_constant: tuple[int, ...]
    """Inputs that may not be computed."""
    input_dtypes: dict[str, tuple[str, ...]]
    """Of other inputs, by number."""
    attributes: dict[str, dict[str, bool]]
    """Values that were tried of attributes, as text, and whether they are taken."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The operators by name (with ``domain::`` where it is not ONNX's own)."""

    versions: dict[str, str]
    soc_model: int
    operators: dict[str, Operator]


@functools.cache
def table() -> Table:
    """The table that the package carries."""
    return from_dict(Table, read_json(TABLE_FILE), TABLE_FILE)
