"""Engram's hash, compression, gate and convolution against plain Python and float64 NumPy."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from tiny import tiny_config
from torch import Tensor

from meki_edge import memory
from meki_edge.errors import UserError
from meki_edge.memory.base import Slot, TokenBatch
from meki_edge.memory.engram import EngramConfig, EngramLayer, compressed_ids, hash_multipliers, head_primes
from meki_edge.model.decoder import CausalLM
from meki_edge.model.kv_cache import CachedAttention
from meki_edge.tokenizer import load

OPTIONS = {"table_size": 11, "memory_dim": 8, "max_ngram": 3, "num_heads": 2}
SLOT = Slot(layer=2, layers=(0, 2))


def build(**options: object) -> EngramLayer:
    shape = tiny_config(vocab_size=30, hidden_size=6)
    layer = memory.build("engram", {**OPTIONS, **options}, shape, SLOT, folded=False)
    assert isinstance(layer, EngramLayer)
    layer.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    layer.token_map.copy_(torch.arange(30) // 2)
    layer.pad_id.copy_(torch.tensor(4))
    layer.multipliers.copy_(hash_multipliers(EngramConfig(**OPTIONS), 2, num_compressed=15))
    return layer


def batch_of(ids: Tensor) -> TokenBatch:
    unique, inverse = ids.unique(return_inverse=True)
    return TokenBatch(ids, unique, inverse, torch.zeros(len(unique), 6, dtype=torch.float64))


def test_primes_ascend_and_no_head_of_the_model_shares_one() -> None:
    config = EngramConfig(**OPTIONS)
    first, second = (head_primes(config, Slot(layer=layer, layers=(0, 2))) for layer in (0, 2))
    assert first == ((11, 13), (17, 19)) and second == ((23, 29), (31, 37))


def test_row_ids_are_the_same_in_python_numpy_and_torch() -> None:
    layer = build()
    ids = torch.randint(0, 30, (3, 25), generator=torch.Generator().manual_seed(1))
    in_torch = layer.row_ids(ids)
    addressing = layer.addressing
    for sequence, found in zip(ids.tolist(), in_torch.tolist(), strict=True):
        expected = oracles.engram_row_ids(
            layer.token_map.tolist(), layer.multipliers.tolist(), ((23, 29), (31, 37)), 4, sequence
        )
        assert found == expected
        whole, counts = addressing.row_ids(np.array(sequence), np.empty(0, np.int64))
        assert whole.tolist() == expected and set(counts.tolist()) == {4}
        for cut in (1, 2, 9):  # decoding: the ids before are given
            rest, _ = addressing.row_ids(np.array(sequence[cut:]), np.array(sequence[:cut]))
            assert rest.tolist() == expected[cut:]


def test_multipliers_never_overflow() -> None:
    for layer in range(4):
        multipliers = hash_multipliers(EngramConfig(**OPTIONS), layer, num_compressed=151_936)
        assert all(m % 2 == 1 and 0 < m * 151_935 < 2**63 for m in multipliers.tolist())


@pytest.mark.parametrize("gate", ["signed_root", "plain"])
def test_fuse(gate: str) -> None:
    layer = build(gate=gate)
    ids = torch.randint(0, 30, (1, 20), generator=torch.Generator().manual_seed(2))
    x = torch.randn(1, 20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rows = layer.table[layer.row_ids(ids)].flatten(2)
    p = {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}
    expected = oracles.engram_stream(p, x[0].numpy(), rows[0].detach().numpy(), dilation=3, plain=gate == "plain")
    np.testing.assert_allclose(layer.fuse(x, rows)[0].detach(), expected, rtol=1e-12, atol=1e-12)


def test_gradients() -> None:
    layer = build()
    ids = torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(4))
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(5))
    names = [name for name, _ in layer.named_parameters()]
    past = CachedAttention(tiny_config(), 8)

    class Fresh:
        def extend(self, x: Tensor, length: int) -> Tensor:
            past._states.clear()
            return past.extend(0, 0, x, length)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        parameters = {**dict(layer.named_buffers()), **dict(zip(names, values, strict=True))}
        return torch.func.functional_call(layer, parameters, (x, batch_of(ids), Fresh()))

    leaves = [x, *(parameter.detach().clone().requires_grad_() for parameter in layer.parameters())]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_cached_decode_equals_full_forward(tokens_dir) -> None:
    placement = [{"kind": "engram", "layers": [0, 2], "options": OPTIONS}]
    model = CausalLM(tiny_config(placement))
    model.reset_parameters(0)
    layers = [model.model.layers[i].memories[0] for i in (0, 2)]
    EngramLayer.prepare(layers, np.empty(0), load(tokens_dir / "tokenizer.json"))
    with torch.no_grad():
        for layer in layers:
            layer.conv.weight.add_(torch.randn(layer.conv.weight.shape, generator=torch.Generator().manual_seed(6)))
    ids = torch.randint(0, 384, (1, 30), generator=torch.Generator().manual_seed(7))
    full = model(ids)
    rows = [[m.table[m.row_ids(ids)].flatten(2) for m in layer.memories] for layer in model.model.layers]
    cache, pieces = CachedAttention(model.config, 64), []
    for start, stop in ((0, 11), (11, 12), (12, 13), (13, 30)):
        part = [[r[:, start:stop] for r in layer] for layer in rows]
        pieces.append(model(ids[:, start:stop], cache, part))
        cache.advance(stop - start)
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, atol=1e-5, rtol=0)


def test_compression_folds_case_accents_and_space(tokens_dir) -> None:
    tokenizer = load(tokens_dir / "tokenizer.json").inner
    compressed = compressed_ids(tokenizer, tokenizer.get_vocab_size())
    number = {tokenizer.id_to_token(i): int(compressed[i]) for i in range(tokenizer.get_vocab_size())}
    assert number["a"] == number["A"] and number["a"] != number["b"]
    assert number["Ġ"] == number["Ċ"] != number["a"]  # a lone space and a lone newline read alike
    assert number["Ġa"] == number["a"]
    assert number["é" if "é" in number else "Ã"] >= 0  # half a character keeps its raw token
    assert len({number["Ã"], number["Â"], number["ã"]}) == 3
    assert compressed.max() + 1 == len(set(compressed.tolist())) < len(compressed)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"memory_dim": 9}, "memory_dim 9 is not a multiple of the 4 heads"),
        ({"max_ngram": 1}, "max_ngram is 1"),
        ({"gate": "root"}, "unknown gate 'root'"),
    ],
)
def test_bad_options(options: dict, what: str) -> None:
    with pytest.raises(UserError) as caught:
        build(**options)
    assert caught.value.what == what
