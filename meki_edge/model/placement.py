"""Where a memory sits, and how wide it is, when the user does not say: as its paper places it."""

from __future__ import annotations

from typing import Any

from meki_edge.model_shape import ModelShape


def paper_placement(kind: str, dense: ModelShape) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The layers and the options that ``kind`` needs and has no default for, at the ``dense`` shape.

    STEM leaves layer 0 dense; STAPLE takes the early layers after it; L3 and Engram take two, where
    there is something to hide a read behind; the others take every layer. MeKi's width is an
    eighth of the hidden size; Engram's is half of it, with as many rows a hash head as there are tokens.
    """
    every = tuple(range(dense.num_hidden_layers))
    half = max(1, len(every) // 2)
    middle = every[len(every) // 4 :: half][:2]
    layers = {"stem": every[1:], "staple": every[1 : 1 + half], "l3": middle, "engram": middle}.get(kind) or every
    options: dict[str, dict[str, Any]] = {
        "meki": {"memory_dim": max(8, dense.hidden_size // 8)},
        "engram": {"table_size": dense.vocab_size, "memory_dim": -(-dense.hidden_size // 2 // 16) * 16},
    }
    return layers, options.get(kind, {})
