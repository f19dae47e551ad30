"""What the paper and its official code say of MeKi beyond the equations (which test_identity_kinds.py holds)."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_config

from meki_edge import memory
from meki_edge.memory.base import MemoryLayer, Slot
from meki_edge.model.decoder import CausalLM

HIDDEN, WIDTH, VOCAB, LAYERS = 64, 24, 500, 3
PLACEMENT = [{"kind": "meki", "layers": [0, 1, 2], "options": {"memory_dim": WIDTH}}]


def build(*, folded: bool) -> MemoryLayer:
    shape = tiny_config(hidden_size=HIDDEN, vocab_size=VOCAB)
    return memory.build("meki", {"memory_dim": WIDTH}, shape, Slot(layer=0, layers=(0, 1, 2)), folded=folded)


@pytest.fixture
def layer() -> MemoryLayer:
    """As initialised."""
    built = build(folded=False)
    with torch.no_grad():
        built.reset_parameters(torch.Generator().manual_seed(0))
    return built.requires_grad_(False)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(dim=-1).sqrt()


def test_initial_parameters(layer: MemoryLayer) -> None:
    """N(0, 0.014), the down projection scaled by 1/√(2L), everything else one."""
    for name, parameter in layer.named_parameters():
        if parameter.dim() < 2:
            assert (parameter == 1).all(), name
            continue
        std = 0.014 / math.sqrt(2 * LAYERS) if name == "projector.down_proj.weight" else 0.014
        assert parameter.std().item() == pytest.approx(std, rel=0.08), name
        assert abs(parameter.mean().item()) < 0.1 * std, name


def test_it_does_not_start_as_the_identity(layer: MemoryLayer) -> None:
    rows = layer.rom_rows(torch.arange(8), torch.randn(8, HIDDEN))
    update = layer.fuse(torch.randn(1, 8, HIDDEN), rows[None])
    torch.testing.assert_close(rms(update), torch.ones(1, 8), atol=1e-3, rtol=0)


def test_every_row_is_as_large_as_alpha(layer: MemoryLayer) -> None:
    """With unit gains; so no row needs a scale far from the others'."""
    layer.alpha.fill_(-1.7)
    layer.table[5] *= 1000
    rows = layer.rom_rows(torch.arange(VOCAB), torch.randn(VOCAB, HIDDEN))
    torch.testing.assert_close(rms(rows), torch.full((VOCAB,), 1.7), atol=0.02, rtol=0)


def test_what_stays_in_memory(layer: MemoryLayer) -> None:
    """2dm + d parameters and 4dm FLOPs; the ROM form owns nothing else."""
    kept = dict(layer.ram_parameters())
    assert sum(parameter.numel() for parameter in kept.values()) == 2 * HIDDEN * WIDTH + HIDDEN
    assert kept.keys() == dict(build(folded=True).named_parameters()).keys()
    assert layer.flops_per_token == 4 * HIDDEN * WIDTH


def test_folding_is_not_idempotent(layer: MemoryLayer) -> None:
    """Why the folded state is recorded in config.json and the ROM form has no table to fold again."""
    ids, embeddings = torch.arange(VOCAB), torch.randn(VOCAB, HIDDEN)
    once = layer.rom_rows(ids, embeddings)
    assert (layer.fold(once, embeddings) - once).abs().max() > 0.01
    assert not hasattr(build(folded=True), "table")


def test_evaluation_changes_no_weight() -> None:
    """The official demo folds into its own table at the first forward pass in eval mode; this one must not."""
    model = CausalLM(tiny_config(PLACEMENT))
    model.reset_parameters(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(40)[None]
    model.train()
    trained = model(ids)
    model.eval()
    with torch.no_grad():
        first, second = model(ids), model(ids)
    assert torch.equal(first, second) and torch.equal(first, trained)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_embedding_learns_through_the_memory() -> None:
    """E is not detached: an id's embedding gets a gradient through G alone."""
    built = build(folded=False)
    with torch.no_grad():
        built.reset_parameters(torch.Generator().manual_seed(0))
    embeddings = torch.randn(4, HIDDEN, requires_grad=True)
    update = built.fuse(torch.randn(1, 4, HIDDEN), built.rom_rows(torch.arange(4), embeddings)[None])
    (update * torch.randn(1, 4, HIDDEN)).sum().backward()
    assert (rms(embeddings.grad) > 1e-5).all()
