"""Every identity-addressed memory against float64 NumPy, and inside a decoder."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from tiny import split_rows, tiny_config
from torch import Tensor

from meki_edge import memory
from meki_edge.errors import UserError
from meki_edge.memory.base import MemoryLayer, Site, Slot
from meki_edge.model.decoder import CausalLM

MEKI_VARIANTS = [
    {"content": content, "projector": projector, "fusion": fusion}
    for content in ("both", "static", "dynamic")
    for projector in ("swiglu", "linear")
    for fusion in ("add_sigmoid", "mul_sigmoid", "add_silu", "mul_silu")
]
POSITIONS = ("parallel_ffn", "parallel_attention", "after_attention", "after_ffn")
CASES: list[tuple[str, dict]] = [
    *(("meki", {"memory_dim": 6, "position": position}) for position in POSITIONS),
    ("meki", {"memory_dim": 5, "content": "dynamic", "projector": "linear"}),
    ("meki", {"memory_dim": 5, "content": "static"}),
    ("ple", {"memory_dim": 6}),
    ("ple", {"memory_dim": 6, "layer_scalar": False}),
    ("stem", {}),
    ("staple", {}),
    ("staple", {"rank": 7}),
    ("mole", {"num_experts": 3, "expert_size": 10}),
]


def build(kind: str, options: dict, *, folded: bool = False) -> MemoryLayer:
    """A float64 layer with every parameter random."""
    shape = tiny_config(vocab_size=20, hidden_size=8, intermediate_size=14)
    layer = memory.build(kind, options, shape, Slot(layer=0, layers=(0,)), folded=folded)
    generator = torch.Generator().manual_seed(3)
    layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.tensor([3, 0, 19, 3, 7])
    embeddings, hidden = (torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return ids, embeddings, hidden


def arrays(layer: MemoryLayer) -> oracles.Params:
    return {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}


def check(layer: MemoryLayer, rows: Callable, fuse: Callable) -> None:
    ids, embeddings, hidden = inputs()
    p = arrays(layer)
    expected_rows = rows(p, ids.numpy(), embeddings.numpy())
    actual_rows = layer.rom_rows(ids, embeddings).detach()
    np.testing.assert_allclose(actual_rows, expected_rows, rtol=1e-12, atol=1e-12)
    actual = layer.fuse(hidden[None], actual_rows[None])[0].detach()
    np.testing.assert_allclose(actual, fuse(p, hidden.numpy(), expected_rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", MEKI_VARIANTS, ids=lambda v: "-".join(v.values()))
def test_meki(variant: dict) -> None:
    check(
        build("meki", {"memory_dim": 6, **variant}),
        lambda p, ids, e: oracles.meki_rows(p, ids, e, variant["content"], variant["projector"]),
        lambda p, h, rows: oracles.meki_update(p, h, rows, variant["fusion"]),
    )


@pytest.mark.parametrize("position", ["after_attention", "after_ffn"])
def test_sequential_meki_normalises_its_input_and_keeps_the_stream(position: str) -> None:
    check(
        build("meki", {"memory_dim": 6, "position": position}),
        lambda p, ids, e: oracles.meki_rows(p, ids, e, "both", "swiglu"),
        lambda p, x, rows: x
        + oracles.meki_update(p, oracles.rms_norm(x, p["input_norm.weight"]), rows, "add_sigmoid"),
    )


@pytest.mark.parametrize("layer_scalar", [True, False])
def test_ple(layer_scalar: bool) -> None:
    check(build("ple", {"memory_dim": 6, "layer_scalar": layer_scalar}), oracles.ple_rows, oracles.ple_stream)


def test_stem_is_its_row() -> None:
    check(build("stem", {}), lambda p, ids, e: p["table"][ids], lambda p, h, rows: rows)


@pytest.mark.parametrize("rank", [None, 7])
def test_staple(rank: int | None) -> None:
    check(
        build("staple", {"rank": rank}),
        lambda p, ids, e: p["table"][ids],
        lambda p, h, rows: rows if rank is None else rows @ p["expand.weight"].T,
    )


def test_mole() -> None:
    check(
        build("mole", {"num_experts": 3, "expert_size": 10}),
        lambda p, ids, e: oracles.mole_rows(p, e),
        oracles.mole_update,
    )


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_gradients(kind: str, options: dict) -> None:
    """Analytic against numeric, through rows and fuse, for every parameter, embedding and hidden state."""
    layer = build(kind, options)
    ids, embeddings, hidden = inputs()
    names = [name for name, _ in layer.named_parameters()]

    def run(embeddings: Tensor, hidden: Tensor, *values: Tensor) -> Tensor:
        parameters = dict(zip(names, values, strict=True))
        rows = torch.func.functional_call(_Call(layer, "rom_rows"), _prefixed(parameters), (ids, embeddings))
        return torch.func.functional_call(_Call(layer, "fuse"), _prefixed(parameters), (hidden[None], rows[None]))

    leaves = [value.detach().clone().requires_grad_() for value in (embeddings, hidden, *layer.parameters())]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


class _Call(torch.nn.Module):
    """A module whose forward is one method of ``layer``, for ``functional_call``."""

    def __init__(self, layer: MemoryLayer, method: str) -> None:
        super().__init__()
        self.layer = layer
        self._method = method

    def forward(self, *arguments: Tensor) -> Tensor:
        return getattr(self.layer, self._method)(*arguments)


def _prefixed(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"layer.{name}": value for name, value in parameters.items()}


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_rom_form_equals_training_form(kind: str, options: dict) -> None:
    """Folding drops exactly the training-only parameters and changes no logit."""
    placement = [{"kind": kind, "layers": [0, 2], "options": options}]
    training = CausalLM(tiny_config(placement))
    training.reset_parameters(5)
    rom = CausalLM(tiny_config(placement, memory_form="rom"))
    kept = {name: tensor for name, tensor in training.state_dict().items() if name in rom.state_dict()}
    rom.load_state_dict(kept, strict=True)
    ids = torch.randint(0, training.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(6))
    all_ids = torch.arange(training.config.vocab_size)
    embeddings = training.model.embed_tokens.weight
    tables = [
        [layer_memory.rom_rows(all_ids, embeddings) for layer_memory in layer.memories] for layer in training.model.layers
    ]
    rows = [[table[ids] for table in layer] for layer in tables]
    torch.testing.assert_close(rom(ids, rows=rows), training(ids), atol=2e-5, rtol=1e-5)
    flat = torch.cat([r for layer in rows for r in layer], dim=-1)
    torch.testing.assert_close(rom(ids, rows=split_rows(rom, flat)), rom(ids, rows=rows), atol=0, rtol=0)


@pytest.mark.parametrize("rank", [None, 4])
def test_staple_starts_as_the_seed_model_bit_for_bit(rank: int | None) -> None:
    dense = CausalLM(tiny_config())
    dense.reset_parameters(7)
    staple = CausalLM(tiny_config([{"kind": "staple", "layers": [0, 1], "options": {"rank": rank}}]))
    staple.reset_parameters(7)
    ids = torch.arange(40)[None]
    assert torch.equal(dense(ids), staple(ids))


def test_stem_replaces_the_up_projection_and_upcycles_from_it() -> None:
    """With one-hot hidden states the upcycled table reproduces what the embedding alone would give."""
    stem = CausalLM(tiny_config([{"kind": "stem", "layers": [1], "options": {}}]))
    assert stem.model.layers[1].mlp.up_proj is None and stem.model.layers[0].mlp.up_proj is not None
    up = torch.randn(80, 32)
    embeddings = torch.randn(384, 32)
    layer = stem.model.layers[1].memories[0]
    with torch.no_grad():
        layer.upcycle({"mlp.up_proj.weight": up}, embeddings)
    torch.testing.assert_close(layer.rom_rows(torch.tensor([9]), embeddings[9:10])[0], up @ embeddings[9])


def test_two_memories_share_a_layer() -> None:
    model = CausalLM(
        tiny_config(
            [
                {"kind": "meki", "layers": [0, 1], "options": {"memory_dim": 6}},
                {"kind": "ple", "layers": [1, 2], "options": {"memory_dim": 4}},
            ]
        )
    )
    model.reset_parameters(0)
    assert [[m.kind for m in layer.memories] for layer in model.model.layers] == [["meki"], ["meki", "ple"], ["ple"]]
    assert model(torch.arange(10)[None]).shape == (1, 10, 384)


@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        ("meki", {"memory_dim": 0}, "memory_dim is 0"),
        ("meki", {"memory_dim": 4, "position": "paralel_ffn"}, "unknown position 'paralel_ffn'; did you mean"),
        ("meki", {"memory_dim": 4, "fusion": "add"}, "unknown fusion 'add'"),
        ("staple", {"rank": 0}, "rank is 0"),
        ("mole", {"num_experts": 0}, "num_experts is 0"),
        ("ple", {"memory_dim": -1}, "memory_dim is -1"),
    ],
)
def test_bad_options(kind: str, options: dict, what: str) -> None:
    with pytest.raises(UserError) as caught:
        memory.build(kind, options, tiny_config(), Slot(layer=0, layers=(0,)), folded=False)
    assert caught.value.what.startswith(what)


def test_sites_of_the_registry() -> None:
    assert {kind: build(kind, {"memory_dim": 4} if kind == "meki" else {}).site for kind in ("meki", "ple", "stem")} == {
        "meki": Site.PARALLEL_FFN,
        "ple": Site.AFTER_FFN,
        "stem": Site.FFN_UP,
    }
