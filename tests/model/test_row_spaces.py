"""Which memories share a ROM file, and that rows reach the memory they belong to."""

from __future__ import annotations

import torch
from tiny import tiny_config

from meki_edge.memory import PaddedRows
from meki_edge.model.row_spaces import distribute, fetched_shape, row_spaces

MIXED = [
    {"kind": "meki", "layers": [0, 2], "options": {"memory_dim": 6}},
    {"kind": "l3", "layers": [1, 2], "options": {"max_entries": 5, "num_entries": 400, "value_dim": 8}},
    {"kind": "engram", "layers": [0, 1], "options": {"table_size": 11, "memory_dim": 8, "num_heads": 2}},
    {"kind": "ple", "layers": [2], "options": {"memory_dim": 4}},
]


def test_a_mixed_model_has_a_space_for_each_addressing() -> None:
    spaces = row_spaces(tiny_config(MIXED))
    assert [(s.file, s.addressing, s.rows_per_token, s.row_dim) for s in spaces] == [
        ("rom.safetensors", "identity", 1, 6 + 6 + 4),
        ("rom_1.safetensors", "ngram_hash", 4, 2),
        ("rom_2.safetensors", "ragged", 5, 2 * (32 + 8)),
        ("rom_3.safetensors", "ngram_hash", 4, 2),
    ]
    assert [(m.layer, m.number) for m in spaces[0].members] == [(0, 0), (2, 0), (2, 2)]
    assert spaces[1].num_rows == 11 + 13 + 17 + 19 and spaces[2].num_rows == 400
    assert [fetched_shape(space, 7) for space in spaces] == [(1, 7, 16), (1, 7, 8), (1, 7, 5, 80), (1, 7, 8)]


def test_rows_reach_their_memory() -> None:
    config = tiny_config(MIXED)
    spaces = row_spaces(config)
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(fetched_shape(space, 3), generator=generator) for space in spaces]
    mask = torch.zeros(1, 3, 5)
    rows = distribute(config, spaces, [plain[0], plain[1], PaddedRows(plain[2], mask), plain[3]])
    assert [len(layer) for layer in rows] == [2, 2, 3]
    assert torch.equal(rows[0][0], plain[0][..., :6]) and torch.equal(rows[2][0], plain[0][..., 6:12])
    assert torch.equal(rows[2][2], plain[0][..., 12:])
    assert torch.equal(rows[0][1], plain[1]) and torch.equal(rows[1][1], plain[3])
    assert torch.equal(rows[1][0].values, plain[2][..., :40]) and torch.equal(rows[2][1].values, plain[2][..., 40:])
    assert rows[1][0].mask is mask


def test_dense_has_none() -> None:
    config = tiny_config()
    assert row_spaces(config) == [] and distribute(config, [], []) == [[], [], []]
