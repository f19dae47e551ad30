"""The parts of a training step, each against an independent oracle."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import MEKI, tiny_config
from torch.nn import functional as F

from meki_edge import cli_pipeline
from meki_edge.errors import UserError
from meki_edge.model.decoder import CausalAttention, CausalLM
from meki_edge.train import checkpointing, log, presets
from meki_edge.train.attention import MatmulAttention
from meki_edge.train.config import NO_OPTIONS, TrainConfig, check
from meki_edge.train.cross_entropy import head_cross_entropy
from meki_edge.train.data import TrainingWindows
from meki_edge.train.optimizer import Optimizer
from meki_edge.train.plot import loss_plot
from meki_edge.train.schedule import learning_rate


def test_each_epoch_visits_each_window_once_in_its_own_order() -> None:
    tokens = np.arange(7 * 5 + 3, dtype=np.uint16)
    windows = TrainingWindows(tokens, 4, seed=3, where=Path("x"))
    flat = np.concatenate([windows.batch(step, 2) for step in range(7)])
    assert flat.dtype == np.int64
    assert np.array_equal(np.diff(flat, axis=1), np.ones((14, 4)))
    epochs = flat[:, 0].reshape(2, 7)
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(0, 35, 5), (2, 1)))
    assert not np.array_equal(epochs[0], epochs[1])


def test_batches_depend_on_seed_and_step_alone() -> None:
    tokens = np.arange(1000, dtype=np.uint32)
    one, two = (TrainingWindows(tokens, 9, seed=5, where=Path("x")) for _ in range(2))
    forwards = [one.batch(step, 8) for step in range(40)]
    backwards = [two.batch(step, 8) for step in reversed(range(40))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    other = TrainingWindows(tokens, 9, seed=6, where=Path("x"))
    assert not np.array_equal(other.batch(0, 8), forwards[0])


def test_too_little_text_for_a_window() -> None:
    with pytest.raises(UserError, match="has 9 tokens, a window needs 11"):
        TrainingWindows(np.zeros(9, np.uint16), 10, seed=0, where=Path("train.bin"))


def test_learning_rate_reaches_peak_and_minimum() -> None:
    rates = [
        learning_rate(step, peak=4e-4, minimum_ratio=0.5, warmup_steps=10, steps=110) for step in range(110)
    ]
    assert rates[0] == pytest.approx(4e-5)
    assert rates[9] == pytest.approx(4e-4)
    assert rates[59] == pytest.approx(3e-4)  # half-way down the cosine
    assert rates[-1] == pytest.approx(2e-4)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert learning_rate(0, peak=1.0, minimum_ratio=0.0, warmup_steps=0, steps=1) == pytest.approx(0.0)


@pytest.mark.parametrize("num_tokens", [1, 700])
def test_head_cross_entropy_equals_the_plain_one(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 24, generator=generator, dtype=torch.float64)
    weight = torch.randn(5000, 24, generator=generator, dtype=torch.float64)
    targets = torch.randint(5000, (num_tokens,), generator=generator)
    results = []
    for loss_of in (head_cross_entropy, lambda h, w, t: F.cross_entropy(h @ w.T, t)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_of(h, w, targets)
        (loss * 3).backward()
        results.append((loss.detach(), h.grad, w.grad))
    (loss, h_grad, w_grad), (expected, expected_h, expected_w) = results
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)  # the softmax is float32
    torch.testing.assert_close(h_grad, expected_h, atol=1e-5, rtol=0)
    torch.testing.assert_close(w_grad, expected_w, atol=1e-5, rtol=0)


def test_head_cross_entropy_follows_autocast() -> None:
    hidden, weight = torch.randn(300, 32, requires_grad=True), torch.randn(512, 32, requires_grad=True)
    targets = torch.randint(512, (300,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_cross_entropy(hidden, weight, targets)
        plain = F.cross_entropy(F.linear(hidden, weight).float(), targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_matmul_attention_equals_the_fused_kernel() -> None:
    config = tiny_config()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 33, heads, 8, generator=generator) for heads in (4, 2, 2))
    expected = CausalAttention(config, 33).attend(0, query, key, value)
    actual = MatmulAttention(config, 33).attend(0, query, key, value)
    torch.testing.assert_close(actual.float(), expected, atol=0.04, rtol=0.02)
    changed = value.clone()
    changed[:, 20:] += 100.0
    later = MatmulAttention(config, 33).attend(0, query, key, changed)
    assert torch.equal(later[:, :20], actual[:, :20])  # no token sees a later one


def test_two_newest_checkpoints_are_kept_and_a_broken_one_passed_over(tmp_path: Path) -> None:
    ids = torch.arange(8)[None]
    config = TrainConfig(steps=11, warmup_steps=0, learning_rate=0.01)

    def start() -> tuple[CausalLM, Optimizer]:
        model = CausalLM(tiny_config(MEKI))
        model.reset_parameters(0)
        return model, Optimizer(model, config)

    def advance(model: CausalLM, optimizer: Optimizer, step: int) -> dict[str, torch.Tensor]:
        optimizer.begin(step, ids)
        model(ids).square().mean().backward()
        optimizer.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    model, optimizer = start()
    assert checkpointing.load_newest(tmp_path) is None
    weights = {}
    for step in range(1, 4):
        weights[step] = advance(model, optimizer, step - 1)
        checkpointing.save(tmp_path, model, optimizer, step=step, seconds=step / 4)
    names = ["step-00000002.safetensors", "step-00000003.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    (tmp_path / ".step-00000004.safetensors.1.tmp").write_bytes(b"half")
    newest = tmp_path / "step-00000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    state = checkpointing.load_newest(tmp_path)
    assert state is not None and (state.step, state.seconds) == (2, 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.safetensors"]
    fresh, fresh_optimizer = start()
    state.restore(fresh, fresh_optimizer)
    assert all(torch.equal(tensor, weights[2][name]) for name, tensor in fresh.state_dict().items())
    resumed = advance(fresh, fresh_optimizer, 2)  # with the restored moments this is the first optimizer's third step
    assert all(torch.equal(tensor, weights[3][name]) for name, tensor in resumed.items())


def test_log_is_cut_at_the_step_it_is_opened_at(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [{"step": step, "loss": 1 / step} for step in range(1, 6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "lo')
    opened = log.MetricsLog(path, 3)
    opened.append({"step": 4, "loss": 9.0})
    opened.flush()
    opened.close()
    assert log.read(path) == [*lines[:3], {"step": 4, "loss": 9.0}]


def test_plot_is_reproducible_svg(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 5 / step} for step in range(1, 50)] + [{"step": 49, "validation_loss": 1.0}]
    for name in ("a.svg", "b.svg"):
        loss_plot(lines, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"steps": 0}, "--steps is 0"),
        ({"learning_rate": -1.0}, "--learning-rate is -1.0"),
        ({"learning_rate": math.nan}, "--learning-rate is nan"),
        ({"beta2": 1.0}, "beta2 is 1.0"),
        ({"warmup_steps": 100}, "--warmup-steps is 100"),
        ({"batch_size": 6, "gradient_accumulation_steps": 4}, "--gradient-accumulation-steps is 4"),
        ({"minimum_learning_rate_ratio": 1.5}, "--minimum-learning-rate-ratio is 1.5"),
        ({"precision": "fp61"}, "--precision is 'fp61'"),
        ({"device": "gpu"}, "--device is 'gpu'"),
        ({"table_learning_rate_scale": 0.0}, "--table-learning-rate-scale is 0.0"),
        ({"table_weight_decay": -0.1}, "--table-weight-decay is -0.1"),
        ({"freeze_up_steps": 101}, "--freeze-up-steps is 101"),
    ],
)
def test_bad_training_options(changes: dict[str, object], what: str) -> None:
    with pytest.raises(UserError, match=what):
        check(TrainConfig(**{"steps": 100, "warmup_steps": 10, **changes}))


def test_errors_name_the_options_of_the_command() -> None:
    options = set(inspect.signature(cli_pipeline.train).parameters)
    for field in dataclasses.fields(TrainConfig):
        assert (field.name in options) is (field.name not in NO_OPTIONS), field.name


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (9, 0), (40, 4), (4999, 499), (5000, 500), (50_000, 500)])
def test_the_warmup_of_a_run_that_names_none(steps: int, warmup_steps: int) -> None:
    config = TrainConfig(steps=steps)
    assert check(config) == dataclasses.replace(config, warmup_steps=warmup_steps)
    given = TrainConfig(steps=steps, warmup_steps=0)
    assert check(given) == given


@pytest.mark.parametrize(
    ("preset", "vocab_size", "parameters", "rom_elements", "ram_added"),
    [
        # Hugging Face's model cards: 0.6B, 1.7B (tied), 4.0B; ROM sizes and RAM from the MeKi paper.
        ("qwen3-0.6b", 151_936, 596_049_920, 128 * 28, 28 * (2 * 1024 * 128 + 1024)),
        ("qwen3-1.7b", 151_936, 1_720_574_976, 256 * 28, 28 * (2 * 2048 * 256 + 2048)),
        ("qwen3-4b", 151_936, 4_022_468_096, 512 * 36, 36 * (2 * 2560 * 512 + 2560)),
    ],
)
def test_presets_have_the_published_sizes(
    preset: str, vocab_size: int, parameters: int, rom_elements: int, ram_added: int
) -> None:
    def count(model: CausalLM) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    with torch.device("meta"):
        dense = CausalLM(presets.build(preset, vocab_size))
        meki = CausalLM(presets.build(preset, vocab_size, memory="meki"))
    assert count(dense) == parameters
    memories = [memory for layer in meki.model.layers for memory in layer.memories]
    assert sum(memory.row_dim for memory in memories) == rom_elements
    assert sum(p.numel() for memory in memories for _, p in memory.ram_parameters()) == ram_added


def test_presets_take_changes_and_name_mistakes() -> None:
    config = presets.build("demo", 500, memory="meki", layers=(1, 3), options={"memory_dim": 8}, hidden_size=64)
    assert (config.vocab_size, config.hidden_size) == (500, 64)
    assert (config.memories[0].layers, config.memories[0].options["memory_dim"]) == ((1, 3), 8)
    with pytest.raises(UserError, match="unknown preset 'qwen3-0.6'; did you mean 'qwen3-0.6b'"):
        presets.build("qwen3-0.6", 500)
    with pytest.raises(UserError, match="unknown key 'hidden_sise'; did you mean 'hidden_size'"):
        presets.build("demo", 500, hidden_sise=3)
    with pytest.raises(UserError, match="unknown memory 'mekki'"):
        presets.build("demo", 500, memory="mekki")
