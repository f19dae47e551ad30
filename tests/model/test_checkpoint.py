"""Checkpoints hold integers beside parameters, and give them back as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_config, write_checkpoint
from safetensors.torch import load_file, save_file

from meki_edge.errors import UserError
from meki_edge.model.checkpoint import Checkpoint, load_model, save_model

ENGRAM = [{"kind": "engram", "layers": [1], "options": {"table_size": 40, "memory_dim": 24, "num_heads": 2}}]
BUFFERS = {name: f"model.layers.1.memories.0.{name}" for name in ("token_map", "multipliers", "pad_id")}


@pytest.fixture
def directory(tmp_path: Path, tokens_dir: Path) -> Path:
    return write_checkpoint(tmp_path / "engram", tiny_config(ENGRAM), tokens_dir)


def test_integers_survive(directory: Path, tmp_path: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    multipliers = stored[BUFFERS["multipliers"]]
    assert (multipliers > 2**53).any()  # no float64 holds them all, let alone float32
    model = load_model(directory)
    with Checkpoint(directory) as checkpoint:
        for name in BUFFERS.values():
            assert checkpoint.read(name).dtype == torch.int64
            assert torch.equal(checkpoint.read(name), stored[name])
            assert torch.equal(model.state_dict()[name], stored[name])
        assert torch.equal(checkpoint.read(BUFFERS["token_map"], slice(5, 9)), stored[BUFFERS["token_map"]][5:9])
    (tmp_path / "again").mkdir()
    save_model(tmp_path / "again", model)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == stored.keys() and all(torch.equal(tensor, stored[name]) for name, tensor in again.items())


def test_other_precisions_are_read_as_float32(directory: Path) -> None:
    path = directory / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.1.memories.0.table"
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        save_file({**stored, name: stored[name].to(dtype)}, path)
        with Checkpoint(directory) as checkpoint:
            assert torch.equal(checkpoint.read(name), stored[name].to(dtype).float())


@pytest.mark.parametrize(
    ("name", "dtype", "what"),
    [
        (BUFFERS["multipliers"], torch.float32, f"the tensor {BUFFERS['multipliers']!r} is F32, not I64"),
        (BUFFERS["token_map"], torch.int32, f"the tensor {BUFFERS['token_map']!r} is I32, not I64"),
        ("model.norm.weight", torch.int8, "the tensor 'model.norm.weight' is I8, not F32 or BF16 or F16 or F64"),
    ],
)
def test_numbers_of_another_kind_are_refused(directory: Path, name: str, dtype: torch.dtype, what: str) -> None:
    path = directory / "model.safetensors"
    stored = load_file(path)
    save_file({**stored, name: stored[name].to(dtype)}, path)
    with pytest.raises(UserError) as caught:
        Checkpoint(directory)
    assert caught.value.what == what
