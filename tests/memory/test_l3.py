"""L3 against a per-token loop in float64, its two paths against each other, and its padding."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from tiny import tiny_config
from torch import Tensor

from meki_edge import memory
from meki_edge.errors import UserError
from meki_edge.memory.base import PaddedRows, Slot, TokenBatch
from meki_edge.memory.l3 import BLOCK_TOKENS, L3Layer
from meki_edge.model.decoder import CausalLM
from meki_edge.rom.addressing import Ragged
from meki_edge.tokenizer import load

SLOT = Slot(layer=1, layers=(1,))
COUNTS = [3, 1, 1, 4, 2, 1, 1, 1, 5, 1]


def build(**options: object) -> L3Layer:
    shape = tiny_config(vocab_size=10, hidden_size=8)
    layer = memory.build("l3", {"num_entries": 20, "max_entries": 5, "up_dim": 6, **options}, shape, SLOT, folded=False)
    assert isinstance(layer, L3Layer)
    layer.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    layer.offsets.copy_(torch.tensor([0, *np.cumsum(COUNTS)]))
    return layer


def batch_of(ids: Tensor) -> TokenBatch:
    unique, inverse = ids.unique(return_inverse=True)
    return TokenBatch(ids, unique, inverse, torch.zeros(len(unique), 8, dtype=torch.float64))


def padded(layer: L3Layer, ids: Tensor) -> PaddedRows:
    row_ids, counts = layer.addressing.row_ids(ids.flatten().numpy(), np.empty(0, np.int64))
    values = layer.table[torch.from_numpy(row_ids)].unflatten(0, ids.shape)
    slots = torch.arange(row_ids.shape[1])
    mask = torch.where(slots < torch.from_numpy(counts)[:, None], 0.0, -1e9).double().unflatten(0, ids.shape)
    return PaddedRows(values, mask)


@pytest.mark.parametrize("tied", [False, True])
def test_both_paths_equal_a_loop_over_tokens(tied: bool) -> None:
    layer = build(tied=tied)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 10, (2, BLOCK_TOKENS), generator=generator)  # two blocks of sorted tokens
    x = torch.randn(2, BLOCK_TOKENS, 8, generator=generator, dtype=torch.float64)
    p = {**{k: v.detach().numpy() for k, v in layer.named_parameters()}, "offsets": layer.offsets.numpy()}
    expected = oracles.l3_stream(p, x.flatten(0, 1).numpy(), ids.flatten().numpy(), tied).reshape(x.shape)
    np.testing.assert_allclose(layer.fuse_batch(x, batch_of(ids)).detach(), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(layer.fuse(x, padded(layer, ids)).detach(), expected, rtol=1e-10, atol=1e-10)


def test_gradients() -> None:
    layer = build()
    ids = torch.tensor([[3, 8, 3, 0]])
    x = torch.randn(1, 4, 8, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(2))
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        parameters = {**dict(zip(names, values, strict=True)), "offsets": layer.offsets}
        return torch.func.functional_call(layer, parameters, (x, batch_of(ids), None))

    leaves = [x, *(parameter.detach().clone().requires_grad_() for parameter in layer.parameters())]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_starts_as_the_identity() -> None:
    dense = CausalLM(tiny_config())
    dense.reset_parameters(0)
    l3 = CausalLM(tiny_config([{"kind": "l3", "layers": [1], "options": {"max_entries": 8}}]))
    l3.reset_parameters(0)
    layer = l3.model.layers[1].memories[0]
    layer.offsets.copy_(torch.arange(385) * 4)
    ids = torch.arange(60)[None]
    assert torch.equal(dense(ids), l3(ids))


def test_prepare_allocates_from_the_corpus(tokens_dir) -> None:
    tokenizer = load(tokens_dir / "tokenizer.json")
    corpus = np.fromfile(tokens_dir / "train.bin", "<u2")[:20_000]
    model = CausalLM(tiny_config([{"kind": "l3", "layers": [0, 2], "options": {"max_entries": 16}}]))
    layers = [model.model.layers[i].memories[0] for i in (0, 2)]
    L3Layer.prepare(layers, corpus, tokenizer)
    addressing = layers[0].addressing
    assert isinstance(addressing, Ragged)
    counts = np.diff(addressing.offsets)
    assert counts.sum() == 4 * 384 and counts.min() == 1 and counts.max() == 16
    assert torch.equal(layers[0].offsets, layers[1].offsets)
    frequent, rare = np.bincount(corpus, minlength=384).argsort()[[-2, 0]]
    assert counts[frequent] == 16 and counts[rare] == 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tied": True, "value_dim": 4}, "tied entries are as wide as the hidden size"),
        ({"max_entries": 0}, "max_entries is 0"),
        ({"allocation": "lz"}, "unknown allocation 'lz'"),
    ],
)
def test_bad_options(options: dict, what: str) -> None:
    with pytest.raises(UserError) as caught:
        build(**options)
    assert caught.value.what == what
