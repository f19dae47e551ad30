"""`train` as a whole: the recipe against a plain float64 loop, what it leaves, and its refusals."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import MEKI, VOCAB_SIZE, tiny_config
from safetensors import safe_open
from torch.nn import functional as F

from meki_edge import manifest, tokens
from meki_edge.errors import UserError
from meki_edge.model.checkpoint import load_model
from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import CausalLM
from meki_edge.train.config import TrainConfig
from meki_edge.train.data import TrainingWindows
from meki_edge.train.loop import train

CONFIG = TrainConfig(
    steps=6,
    batch_size=4,
    window_length=24,
    warmup_steps=2,
    learning_rate=3e-3,
    validate_every=3,
    validation_windows=5,
    checkpoint_every=4,
    precision="fp32",
    device="cpu",
)


def read_lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def plain_losses(model: ModelConfig, config: TrainConfig, tokens_dir: Path) -> tuple[list[float], CausalLM]:
    """The recipe written out in float64: gradients by autograd, AdamW, clipping and cosine by hand."""
    shards = tokens.open_shards(tokens_dir)
    windows = TrainingWindows(shards.train, config.window_length, config.seed, where=tokens_dir)
    network = CausalLM(model)
    network.reset_parameters(config.seed)
    network.double()
    parameters = list(network.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for step in range(config.steps):
        batch = torch.from_numpy(windows.batch(step, config.batch_size))
        loss = F.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum((g**2).sum().item() for g in gradients))
        scale = min(1.0, config.clip_norm / norm)
        if step < config.warmup_steps:
            rate = config.learning_rate * (step + 1) / config.warmup_steps
        else:
            turn = math.pi * (step + 1 - config.warmup_steps) / (config.steps - config.warmup_steps)
            low = config.learning_rate * config.minimum_learning_rate_ratio
            rate = low + (config.learning_rate - low) * 0.5 * (1 + math.cos(turn))
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                m.mul_(0.9).add_(0.1 * scale * g)
                v.mul_(0.95).add_(0.05 * (scale * g) ** 2)
                m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
                if p.dim() != 1:
                    p.mul_(1 - rate * config.weight_decay)
                p.sub_(rate * m_hat / (v_hat.sqrt() + config.epsilon))
    return losses, network


@pytest.mark.parametrize("parts", [1, 2])
def test_the_recipe(tokens_dir: Path, tmp_path: Path, parts: int) -> None:
    model = tiny_config(MEKI, eos_token_id=0)
    config = dataclasses.replace(CONFIG, gradient_accumulation_steps=parts, clip_norm=0.3)
    train(tokens_dir, tmp_path / "out", model, config)
    expected, network = plain_losses(model, config, tokens_dir)
    losses = [line["loss"] for line in read_lines(tmp_path / "out") if "loss" in line]
    assert losses == pytest.approx(expected, rel=2e-5)
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        for name, parameter in network.named_parameters():
            # Adam's first steps divide gradients by their own size, which turns rounding of a
            # gradient near zero into a different step: few elements may differ, by little.
            difference = np.abs(file.get_tensor(name) - parameter.detach().numpy())
            assert np.quantile(difference, 0.95) < 1e-4, name


@pytest.mark.parametrize("memories", [None, MEKI])
def test_what_it_leaves(tokens_dir: Path, tmp_path: Path, memories: list | None) -> None:
    config = dataclasses.replace(CONFIG, precision="bf16", steps=40, validate_every=16)
    done = train(tokens_dir, tmp_path / "out", tiny_config(memories), config)
    assert {name: entry.role for name, entry in done.files.items()} == {
        "config.json": "config",
        "model.safetensors": "weights",
        "tokenizer.json": "tokenizer",
        "metrics.jsonl": "metrics",
        "loss.svg": "plot",
    }
    manifest.verify(tmp_path / "out", done)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*done.files, "manifest.json"}
    lines = read_lines(tmp_path / "out")
    training = [line for line in lines if "loss" in line]
    validation = [line for line in lines if "validation_loss" in line]
    assert [line["step"] for line in training] == list(range(1, 41))
    assert [line["step"] for line in validation] == [16, 32, 40]
    assert training[-1]["tokens"] == 40 * 4 * 24 == done.metrics["train_tokens"]
    assert training[-1]["loss"] < training[0]["loss"] - 0.5
    assert validation[-1]["validation_loss"] == done.metrics["validation_loss"]
    assert done.metrics["validation_tokens"] == 5 * 24
    model = load_model(tmp_path / "out")
    assert model.config.eos_token_id == 0  # taken from the tokenizer
    assert done.metrics["parameters"] == sum(p.numel() for p in model.parameters())
    per_layer = 2 * 32 * 12 + 32  # 2dm + d
    dense = sum(p.numel() for n, p in model.named_parameters() if ".memories." not in n)
    assert done.metrics["ram_parameters"] == dense + (3 * per_layer if memories else 0)
    assert train(tokens_dir, tmp_path / "out", tiny_config(memories), config) == done  # skipped


def test_validating_changes_no_weight(tokens_dir: Path, tmp_path: Path) -> None:
    often, once = (
        train(tokens_dir, tmp_path / str(every), tiny_config(MEKI), dataclasses.replace(CONFIG, validate_every=every))
        for every in (1, 1000)
    )
    assert often.files["model.safetensors"].sha256 == once.files["model.safetensors"].sha256


def test_twins_start_from_the_same_backbone_and_data(tokens_dir: Path, tmp_path: Path) -> None:
    dense, meki = CausalLM(tiny_config()), CausalLM(tiny_config(MEKI))
    for model in (dense, meki):
        model.reset_parameters(7)
    for name, tensor in dense.state_dict().items():
        assert torch.equal(tensor, meki.state_dict()[name]), name


def test_refusals(tokens_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=f"the tokenizer has {VOCAB_SIZE} tokens, the model's vocabulary 300"):
        train(tokens_dir, out, tiny_config(vocab_size=300), CONFIG)
    with pytest.raises(UserError, match="in ROM form"):
        train(tokens_dir, out, tiny_config(MEKI, memory_form="rom"), CONFIG)
    with pytest.raises(UserError, match="max_position_embeddings is 16"):
        train(tokens_dir, out, tiny_config(max_position_embeddings=16), CONFIG)
    with pytest.raises(UserError, match="a window needs"):
        long = dataclasses.replace(CONFIG, window_length=10**6)
        train(tokens_dir, out, tiny_config(max_position_embeddings=10**6), long)
    assert not (out / "manifest.json").exists()


def test_a_diverging_run_stops_with_its_step(tokens_dir: Path, tmp_path: Path) -> None:
    wild = dataclasses.replace(CONFIG, learning_rate=1e30, steps=20)
    with pytest.raises(UserError, match=r"training diverged at step \d+: loss") as caught:
        train(tokens_dir, tmp_path / "out", tiny_config(), wild)
    assert "--learning-rate" in caught.value.fix
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_unfinished_run_of_other_options_is_refused(tokens_dir: Path, tmp_path: Path) -> None:
    wild = dataclasses.replace(CONFIG, learning_rate=1e30, steps=20)
    with pytest.raises(UserError, match="diverged"):
        train(tokens_dir, tmp_path / "out", tiny_config(), wild)
    with pytest.raises(UserError, match="config.steps was 20 and is now 6"):
        train(tokens_dir, tmp_path / "out", tiny_config(), CONFIG)
    assert train(tokens_dir, tmp_path / "out", tiny_config(), CONFIG, force=True).stage == "train"
