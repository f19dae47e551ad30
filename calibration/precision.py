"""What ``--precision`` names: how weights are stored and in which arithmetic each layer runs.

A model is a list of *units*: its decoder layers and the head (final norm and projection to
logits). Each unit has a :class:`Scheme`; a precision gives all layers one, the head another, and
says which scheme a sensitive unit is moved to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meki_edge.errors import UserError, nearest

FLOAT16 = "float16"
WEIGHT_BITS = {"int4": 4, "int8": 8, "int16": 16, FLOAT16: 16}
SCALE_BYTES = {True: 2, False: 4}  # of a scale: float16 graphs keep float16 scales


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one unit is stored and computed.

    ``weights`` is ``int4``, ``int8`` or ``int16`` (symmetric, with a scale an output channel, or one
    a block of ``block_size`` input channels) or ``float16``. ``activations`` is ``uint8``,
    ``uint16`` (one scale and zero point a tensor) or ``float16``.
    """

    weights: str
    activations: str
    block_size: int | None = None

    def of_matrix(self, num_rows: int) -> Scheme:
        """The scheme of one ``[num_rows, N]`` weight: rows that fill no whole blocks get 8 bits a channel."""
        if self.block_size is None or num_rows % self.block_size == 0:
            return self
        weights = FLOAT16 if self.is_float else "int8"
        return Scheme(weights=weights, activations=self.activations)

    @property
    def is_float(self) -> bool:
        """Whether the unit computes in floating point."""
        return self.activations == FLOAT16

    def weight_bytes(self, num_rows: int, num_columns: int) -> int:
        """Bytes of one weight ``[num_rows, num_columns]`` with its scales."""
        own = self.of_matrix(num_rows)
        codes = -(-num_rows * num_columns * WEIGHT_BITS[own.weights] // 8)
        if own.weights == FLOAT16:
            return codes
        return codes + num_columns * (num_rows // own.block_size if own.block_size else 1) * SCALE_BYTES[own.is_float]

    def __str__(self) -> str:
        def bits(dtype: str) -> str:
            return "fp16" if dtype == FLOAT16 else dtype.partition("int")[2]

        if self.weights == FLOAT16:
            return "fp16"
        name = f"w{bits(self.weights)}{'a' * (not self.is_float)}{bits(self.activations)}"
        return f"{name}-block{self.block_size}" if self.block_size else name


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A named precision; ``finer`` is what a sensitive unit is moved to (None: there is nothing finer)."""

    name: str
    layers: Scheme
    head: Scheme
    finer: Scheme | None

    @property
    def is_float(self) -> bool:
        """Whether the graph computes in floating point."""
        return self.layers.is_float

    def schemes(self, num_layers: int, raised: frozenset[int] = frozenset()) -> dict[int, Scheme]:
        """The scheme of every unit (-1 is what all layers share), ``raised`` ones at the finer scheme."""
        found = {unit: self.layers for unit in range(-1, num_layers)} | {num_layers: self.head}
        assert not raised or self.finer is not None
        return found | {unit: self.finer for unit in raised}


def _quantized(name: str, weights: str, activations: str, finer: Scheme, block_size: int | None = None) -> Precision:
    """``name``, with the head's weights at 8 bits: it is the last to see an error, and the largest matrix."""
    return Precision(
        name=name,
        layers=Scheme(weights=weights, activations=activations, block_size=block_size),
        head=Scheme(weights="int8", activations=activations),
        finer=finer,
    )


_FP16 = Scheme(weights=FLOAT16, activations=FLOAT16)
_W8A16 = Scheme(weights="int8", activations="uint16")
_W4FP16 = Scheme(weights="int4", activations=FLOAT16, block_size=32)
_W8FP16 = Scheme(weights="int8", activations=FLOAT16, block_size=32)

PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="fp16", layers=_FP16, head=_FP16, finer=None),
        _quantized("w8a16", "int8", "uint16", Scheme(weights="int16", activations="uint16")),
        _quantized("w8a8", "int8", "uint8", _W8A16),
        _quantized("w4a16", "int4", "uint16", _W8A16),
        _quantized("w4a16-block32", "int4", "uint16", _W8A16, 32),
        _quantized("w4a16-block64", "int4", "uint16", _W8A16, 64),
        Precision(name="w4fp16", layers=_W4FP16, head=_W8FP16, finer=_W8FP16),
    )
}


def precision(name: str) -> Precision:
    """The precision called ``name``; another name is a :class:`UserError`."""
    if name not in PRECISIONS:
        raise UserError(
            f"unknown precision {name!r}{nearest(name, PRECISIONS)}",
            where="--precision",
            fix=f"use {', '.join(PRECISIONS)}",
        )
    return PRECISIONS[name]
