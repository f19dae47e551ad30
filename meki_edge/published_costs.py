"""Sizes that papers publish, and what :mod:`meki_edge.memory_costs` counts at the same shapes.

A memory whose rows here agree reproduces its paper's numbers; the tests hold every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meki_edge.memory_costs import MemoryCost, cost
from meki_edge.model.config import ModelConfig, parse

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class PublishedShape:
    """The part of a paper's model that decides a memory's cost, and where the memory sits."""

    paper: str
    name: str
    kind: str
    layers: int
    """Layers with the memory; the costs counted do not depend on the other layers."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int = 64
    """Where it is not the paper's, the memory's cost does not depend on it."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def cost(self) -> MemoryCost:
        """What the memory costs at this shape."""
        return cost(self._dense(), self.kind, dict(self.options), tuple(range(self.layers)))

    def _dense(self) -> ModelConfig:
        values = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
        }
        return parse(values, f"{self.paper}, {self.name}")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One number of a paper: ``value`` of ``quantity``, a field of :class:`MemoryCost`."""

    shape: PublishedShape
    quantity: str
    value: float
    tolerance: float = 0.0
    """Relative: how coarsely the paper rounds."""
    per_layer: bool = False
    derived: bool = False
    """Not printed in the paper: it follows from sizes that the paper, or its code, gives."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published number beside ours."""

    kind: str
    paper: str
    shape: str
    quantity: str
    published: float
    derived: bool
    ours: float
    agrees: bool


def _facts() -> tuple[Published, ...]:
    def shape(
        paper: str, name: str, kind: str, layers: int, vocab: int, hidden: int, ffn: int = 64, **options: Any
    ) -> PublishedShape:
        return PublishedShape(
            paper=paper,
            name=name,
            kind=kind,
            layers=layers,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=ffn,
            options=options,
        )

    def fact(of: PublishedShape, quantity: str, value: float, tolerance: float = 0.0, **more: bool) -> Published:
        return Published(shape=of, quantity=quantity, value=value, tolerance=tolerance, **more)

    meki = "MeKi, arXiv 2602.03359"
    small = shape(meki, "0.6B, m=128", "meki", 28, 151_680, 1024, 3072, memory_dim=128)
    middle = shape(meki, "1.7B, m=256", "meki", 28, 151_680, 2048, 6144, memory_dim=256)
    large = shape(meki, "4B, m=512", "meki", 36, 151_680, 2560, 9728, memory_dim=512)
    stem = shape("STEM, arXiv 2601.10639", "1B, 5 tables", "stem", 5, 128_256, 2048, 8192)
    olmo = shape("STAPLE, arXiv 2610.12599", "OLMo-2 1B, 12 tables", "staple", 12, 100_352, 2048, 8192)
    low = shape("STAPLE, arXiv 2610.12599", "OLMo-2 1B, r=512", "staple", 12, 100_352, 2048, 8192, rank=512)
    entries = {"num_entries": 710_000, "max_entries": 512}
    l3 = shape("L3, arXiv 2601.21461", "800M, one layer", "l3", 1, 180_000, 1024, **entries, up_dim=4096)
    tied = shape("L3, arXiv 2601.21461", "800M, tied", "l3", 1, 180_000, 1024, **entries, tied=True)
    ple = shape("Gemma 3n", "E4B", "ple", 35, 262_144, 2048, 16_384, memory_dim=256, layer_scalar=False)
    engram = shape("Engram, arXiv 2601.07372", "27B", "engram", 2, 129_280, 2560, table_size=646_400, memory_dim=1280)
    mole = shape("MoLE, arXiv 2503.15798", "410M, 16 experts", "mole", 24, 50_304, 1024, 4096, num_experts=16)
    return (
        fact(small, "rom_parameters", 0.544e9, 1e-3),
        fact(small, "bytes_per_token", 7 * KIB),
        fact(middle, "rom_parameters", 1.087e9, 1e-3),
        fact(middle, "bytes_per_token", 14 * KIB),
        fact(middle, "ram_parameters", 29.4e6, 2e-3),
        fact(middle, "flops_per_token", 58.7e6, 1e-3),
        fact(large, "rom_parameters", 2.796e9, 1e-3),
        fact(large, "bytes_per_token", 36 * KIB),
        fact(stem, "bytes_per_token", 80 * KIB, derived=True),
        fact(olmo, "rom_bytes", 19.73e9, 1e-3),
        fact(olmo, "bytes_per_token", 192 * KIB),
        fact(low, "bytes_per_token", 12 * KIB),
        fact(low, "ram_parameters", 4.2e6, 2e-3, per_layer=True),
        fact(l3, "rom_parameters", 1.09e9, 2e-3, derived=True),
        fact(l3, "bytes_per_token", 1.5 * KIB * KIB, derived=True),
        fact(tied, "bytes_per_token", 1 * KIB * KIB, derived=True),
        fact(ple, "rom_parameters", 2.35e9, 2e-3, derived=True),
        fact(ple, "bytes_per_token", 17.5 * KIB, derived=True),
        fact(ple, "ram_parameters", 36.8e6, 3e-3, derived=True),
        fact(engram, "bytes_per_token", 5 * KIB, derived=True),
        fact(mole, "rom_parameters", 19.7e9, 5e-3),
        fact(mole, "bytes_per_token", 768 * KIB),
    )


PUBLISHED = _facts()


def compare_published() -> list[Comparison]:
    """Every published number beside ours, in the order of :data:`PUBLISHED`."""
    costs = {shape_id: shape.cost() for shape_id, shape in {id(fact.shape): fact.shape for fact in PUBLISHED}.items()}
    found = []
    for fact in PUBLISHED:
        shape = fact.shape
        ours = getattr(costs[id(shape)], fact.quantity) / (shape.layers if fact.per_layer else 1)
        found.append(
            Comparison(
                kind=shape.kind,
                paper=shape.paper,
                shape=shape.name,
                quantity=f"{fact.quantity}{' a layer' if fact.per_layer else ''}",
                published=fact.value,
                derived=fact.derived,
                ours=ours,
                agrees=abs(ours - fact.value) <= fact.tolerance * fact.value,
            )
        )
    return found
