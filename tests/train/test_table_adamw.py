"""A table's row-wise steps against plain AdamW over the whole table."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny import MEKI, MIXED, tiny_config
from torch import Tensor
from torch.nn import functional as F

from meki_edge import memory, tokens
from meki_edge.errors import UserError
from meki_edge.memory import MemoryLayer, Slot
from meki_edge.model.decoder import CausalLM
from meki_edge.rom.addressing import NOTHING
from meki_edge.train.config import TrainConfig
from meki_edge.train.initialize import prepare_memories
from meki_edge.train.optimizer import Optimizer
from meki_edge.train.schedule import learning_rate
from meki_edge.train.table_adamw import TableAdamW

VOCAB = 12
STAPLE = [{"kind": "staple", "layers": [0, 1], "options": {}}]
STEM = [{"kind": "stem", "layers": [1], "options": {}}]
CONFIG = TrainConfig(steps=12, warmup_steps=3, learning_rate=0.02, clip_norm=0.3, weight_decay=0.2)


def table_layer() -> MemoryLayer:
    """A float64 memory whose rows are its table's."""
    shape = tiny_config(vocab_size=VOCAB, intermediate_size=5)
    layer = memory.build("stem", {}, shape, Slot(layer=0, layers=(0,)), folded=False)
    layer.double()
    with torch.no_grad():
        layer.table.copy_(torch.randn(layer.table.shape, generator=torch.Generator().manual_seed(0)))
    return layer


def plain_adamw(
    table: np.ndarray,
    gradients: np.ndarray,
    rates: np.ndarray,
    decay: float,
    betas: tuple[float, float],
    epsilon: float,
) -> list[np.ndarray]:
    """The table after every step of AdamW with the gradients ``[steps, V, dim]`` of every row."""
    first, second, found = np.zeros_like(table), np.zeros_like(table), [table]
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        root = np.sqrt(second / (1 - betas[1] ** step)) + epsilon
        table = table * (1 - rate * decay) - rate * first / (1 - betas[0] ** step) / root
        found.append(table)
    return found


def rates_of(steps: int) -> np.ndarray:
    return np.array(
        [learning_rate(s, peak=0.03, minimum_ratio=0.1, warmup_steps=steps // 4, steps=steps) for s in range(steps)]
    )


def run_steps(optimizer: TableAdamW, gradients: np.ndarray, present: np.ndarray) -> None:
    for gradient, rows in zip(gradients, present, strict=True):
        ids = torch.from_numpy(np.flatnonzero(rows))
        leaf = optimizer.gather(ids[None], ids)
        leaf.grad = torch.from_numpy(gradient[rows])
        optimizer.step()


@pytest.mark.parametrize("decay", [0.0, 1.5])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9)])
def test_rows_take_the_steps_of_plain_adamw_however_long_they_are_absent(
    betas: tuple[float, float], decay: float
) -> None:
    layer, steps = table_layer(), 400
    generator = np.random.default_rng(1)
    chances = np.geomspace(1, 0.003, VOCAB)  # rows of every batch, rows hardly seen
    present = generator.random((steps, VOCAB)) < chances
    present[:, -1] = False  # and one never seen
    gradients = generator.normal(size=(steps, VOCAB, 5)) * present[..., None]
    rates = rates_of(steps)
    expected = plain_adamw(layer.table.detach().numpy(), gradients, rates, decay, betas, 1e-13)
    optimizer = TableAdamW(layer, rates, weight_decay=decay, betas=betas, epsilon=1e-13)
    for start, stop in ((0, 7), (7, 150), (150, 400)):
        run_steps(optimizer, gradients[start:stop], present[start:stop])
        some = torch.tensor([[3, VOCAB - 1], [9, 3]])
        np.testing.assert_allclose(layer.read_table(some), expected[stop][some], rtol=1e-9, atol=1e-12)
        leaf = optimizer.gather(some, some.unique())  # the forward pass sees rows as of now, too
        np.testing.assert_allclose(leaf.detach(), expected[stop][some.unique()], rtol=1e-9, atol=1e-12)
        assert torch.equal(layer.read_table(some), leaf[torch.tensor([[0, 2], [1, 0]])])
    optimizer.settle()
    assert layer.table_reader is None
    np.testing.assert_allclose(layer.table.detach(), expected[-1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1e-3, 1e-8, 1e-12])
def test_a_gradient_far_below_epsilon_moves_an_absent_row_by_a_third_more_at_most(size: float) -> None:
    layer, steps = table_layer(), 400
    before = layer.table.detach().numpy().copy()
    present = np.zeros((steps, VOCAB), bool)
    present[200, 0] = True
    gradients = np.full((steps, VOCAB, 5), size) * present[..., None]
    expected = plain_adamw(before, gradients, rates_of(steps), 0.0, (0.9, 0.95), 1e-8)[-1] - before
    optimizer = TableAdamW(layer, rates_of(steps), weight_decay=0.0, betas=(0.9, 0.95), epsilon=1e-8)
    run_steps(optimizer, gradients, present)
    optimizer.settle()
    moved = layer.table.detach().numpy() - before
    assert (moved[1:] == 0).all()
    ratio = moved[0] / expected[0]
    assert (ratio > 0.999).all() and (ratio < 1.34).all()
    if size == 1e-3:
        np.testing.assert_allclose(ratio, 1, rtol=1e-4)


def model_of(memories: list, tokens_dir) -> CausalLM:
    model = CausalLM(tiny_config(memories))
    model.reset_parameters(0)
    prepare_memories(model, tokens.open_shards(tokens_dir))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():  # so that nothing starts at zero, gradients included
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.double()


def batch_of(step: int) -> Tensor:
    return torch.randint(0, 60, (4, 7), generator=torch.Generator().manual_seed(step)) * 3 % 384


def loss_of(model: CausalLM, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_a_model_of_every_addressing_trains_as_with_dense_gradients(tokens_dir, apart: bool, parts: int) -> None:
    """Rows, clipping, rates, decay and micro-batches against torch.optim.AdamW, whose gradients are as large as tables."""
    scale = 1e6  # of the loss, so that gradients of rounding noise drown in ε and all others do not feel it
    config = dataclasses.replace(
        CONFIG,
        clip_norm=scale / 2,
        table_learning_rate_scale=3.0,
        table_weight_decay=0.7,
        separate_table_clip=apart,
    )
    ours, theirs = (model_of([*MIXED, *STAPLE], tokens_dir) for _ in range(2))
    optimizer = Optimizer(ours, config)
    tables = {name for name, _ in theirs.named_parameters() if name.endswith(".table")}
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in theirs.named_parameters():
        key = (3.0, 0.7) if name in tables else (1.0, 0.2 if parameter.dim() != 1 else 0.0)
        groups.setdefault(key, []).append(parameter)
    dense = torch.optim.AdamW(
        [{"params": found, "weight_decay": decay, "scale": scale} for (scale, decay), found in groups.items()],
        betas=(0.9, 0.95),
    )
    for step in range(config.steps):
        ids = batch_of(step)
        optimizer.begin(step, ids[:, :-1])
        for part in ids.chunk(parts):
            (scale * loss_of(ours, part) / parts).backward()
        norms = optimizer.clip()

        (scale * loss_of(theirs, ids)).backward()
        in_tables = [p for name, p in theirs.named_parameters() if name in tables]
        others = [p for name, p in theirs.named_parameters() if name not in tables]
        clipped = [others, in_tables] if apart else [others + in_tables]
        expected = [torch.nn.utils.clip_grad_norm_(found, config.clip_norm) for found in clipped]
        torch.testing.assert_close([norm for norm in norms if norm is not None], expected, rtol=1e-10, atol=0)

        optimizer.step()
        for group in dense.param_groups:
            group["lr"] = optimizer.rates[step] * group["scale"]
        dense.step()
        dense.zero_grad()
        with torch.no_grad():
            for (name, mine), other in zip(current(ours).items(), theirs.parameters(), strict=True):
                assert (mine - other).abs().max() < 1e-5, name
                other.copy_(mine)  # Adam magnifies differences from step to step


def current(model: CausalLM) -> dict[str, Tensor]:
    """Every parameter by name, the tables' rows as of now."""
    found = dict(model.named_parameters())
    for index, layer in enumerate(model.model.layers):
        for number, layer_memory in enumerate(layer.memories):
            rows = torch.arange(layer_memory.num_rows)
            found[f"model.layers.{index}.memories.{number}.table"] = layer_memory.read_table(rows)
    return found


def test_a_step_holds_the_gradients_of_distinct_rows_alone(tokens_dir) -> None:
    model = model_of(MIXED, tokens_dir)
    optimizer = Optimizer(model, CONFIG)
    ids = batch_of(0)
    optimizer.begin(0, ids[:, :-1])
    loss_of(model, ids).backward()
    memories = [layer_memory for layer in model.model.layers for layer_memory in layer.memories]
    for leaf, layer_memory in zip(optimizer._leaves, memories, strict=True):
        expected = set()
        for sequence in ids[:, :-1].numpy():
            row_ids, counts = layer_memory.addressing.row_ids(sequence, NOTHING)
            expected |= {row for rows, count in zip(row_ids.tolist(), counts, strict=True) for row in rows[:count]}
        assert layer_memory.touched_rows(ids[:, :-1], ids[:, :-1].unique()).tolist() == sorted(expected)
        assert leaf.grad.shape == (len(expected), layer_memory.table_dim)
        assert layer_memory.table.grad is None
        assert len(expected) < layer_memory.num_rows


def rows_after_one_step(memories: list, tokens_dir, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """A float64 table before and after one step at rate 0.01, and which of its rows the batch touched."""
    model = model_of(memories, tokens_dir)
    layer = model.model.layers[1].memories[0]
    before = layer.table.detach().clone()
    config = TrainConfig(steps=1, warmup_steps=0, learning_rate=0.01, minimum_learning_rate_ratio=1.0, weight_decay=0.2)
    optimizer = Optimizer(model, dataclasses.replace(config, **options))
    ids = batch_of(0)
    optimizer.begin(0, ids[:, :-1])
    loss_of(model, ids).backward()
    optimizer.clip()
    optimizer.step()
    optimizer.settle()
    touched = torch.zeros(len(before), dtype=torch.bool)
    touched[layer.touched_rows(ids[:, :-1], ids[:, :-1].unique())] = True
    return before, layer.table.detach(), touched


@pytest.mark.parametrize(
    ("memories", "options", "rate", "decay"),
    [
        (MEKI, {}, 0.01, 0.2),
        (STAPLE, {}, 0.04, 1e-4),
        ([{"kind": "engram", "layers": [1], "options": {"table_size": 50, "memory_dim": 16}}], {}, 0.05, 0.0),
        (STAPLE, {"table_learning_rate_scale": 2.0}, 0.02, 1e-4),
        (MEKI, {"table_weight_decay": 0.0}, 0.01, 0.0),
    ],
)
def test_tables_follow_their_recipe_or_the_options(
    tokens_dir, memories: list, options: dict, rate: float, decay: float
) -> None:
    before, after, touched = rows_after_one_step(memories, tokens_dir, epsilon=1e-30, **options)
    kept = before * (1 - rate * decay)
    torch.testing.assert_close(after[~touched], kept[~touched], rtol=1e-12, atol=0)
    # Adam's first step moves every element by the learning rate, whatever the gradient's size.
    moved = (after[touched] - kept[touched]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("memories", "apart"), [(STEM, True), (STAPLE, False)])
def test_stem_clips_its_tables_apart(tokens_dir, memories: list, apart: bool) -> None:
    model = model_of(memories, tokens_dir)
    optimizer = Optimizer(model, dataclasses.replace(CONFIG, clip_norm=1e-3))
    ids = batch_of(0)
    optimizer.begin(0, ids[:, :-1])
    loss_of(model, ids).backward()
    assert (optimizer.clip().tables is not None) is apart
    dense = [p.grad for p in model.parameters() if p.grad is not None]
    rows = [leaf.grad for leaf in optimizer._leaves]
    norms = [torch.nn.utils.get_total_norm(found).item() for found in (dense, rows, dense + rows)]
    assert norms == pytest.approx([1e-3, 1e-3, 2**0.5 * 1e-3] if apart else [norms[0], norms[1], 1e-3], rel=1e-2)


def test_augmented_up_projections_stay_frozen_and_their_moments_begin_with_the_thaw(tokens_dir) -> None:
    model = model_of(STAPLE, tokens_dir)
    optimizer = Optimizer(model, dataclasses.replace(CONFIG, freeze_up_steps=2))
    weights = [layer.mlp.up_proj.weight for layer in model.model.layers]  # the third is not augmented
    start = [weight.detach().clone() for weight in weights]
    for step in range(4):
        optimizer.begin(step, batch_of(step)[:, :-1])
        loss_of(model, batch_of(step)).backward()
        optimizer.clip()
        optimizer.step()
        moved = [not torch.equal(weight, old) for weight, old in zip(weights, start, strict=True)]
        assert moved == [step >= 2, step >= 2, True]
    counts = {id(parameter): state["step"].item() for parameter, state in optimizer._dense.state.items()}
    assert [counts[id(weight)] for weight in weights] == [2, 2, 4]


def test_options_that_do_not_suit_the_memories(tokens_dir) -> None:
    for changes, what in (
        ({"freeze_up_steps": 2}, "no memory of the model adds to an up projection"),
        ({"beta1": 0.98, "beta2": 0.95}, "beta1 0.98 is not below the square root of beta2"),
        ({"learning_rate": 6.0}, "learning rate times its weight decay is 1.2"),
    ):
        with pytest.raises(UserError, match=what):
            Optimizer(model_of(MEKI, tokens_dir), dataclasses.replace(CONFIG, **changes))
    Optimizer(model_of([], tokens_dir), dataclasses.replace(CONFIG, beta1=0.98, beta2=0.95))
