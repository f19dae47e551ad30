"""Every memory through `train`: it learns, resumes exactly, and starts from a dense checkpoint as its paper says."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import MIXED, tiny_config, write_checkpoint
from safetensors import safe_open
from torch.nn import functional as F

from meki_edge.model.checkpoint import load_model
from meki_edge.model.config import ModelConfig
from meki_edge.tokens import open_shards
from meki_edge.train import presets
from meki_edge.train.config import TrainConfig
from meki_edge.train.data import TrainingWindows
from meki_edge.train.loop import train

KINDS: dict[str, list] = {
    "meki": [{"kind": "meki", "layers": [0, 1, 2], "options": {"memory_dim": 8}}],
    "meki-dynamic": [{"kind": "meki", "layers": [0, 2], "options": {"memory_dim": 8, "content": "dynamic"}}],
    "ple": [{"kind": "ple", "layers": [0, 2], "options": {"memory_dim": 8}}],
    "stem": [{"kind": "stem", "layers": [1, 2], "options": {}}],
    "staple": [{"kind": "staple", "layers": [0, 1], "options": {}}],
    "staple-low-rank": [{"kind": "staple", "layers": [0, 1], "options": {"rank": 8}}],
    "l3": [{"kind": "l3", "layers": [1], "options": {"num_entries": 600, "max_entries": 4}}],
    "engram": [{"kind": "engram", "layers": [0, 1], "options": {"table_size": 97, "memory_dim": 32}}],
    "mole": [{"kind": "mole", "layers": [1], "options": {"num_experts": 2, "expert_size": 16}}],
    "mixed": MIXED,
}
CONFIG = TrainConfig(
    steps=14,
    batch_size=4,
    gradient_accumulation_steps=2,
    window_length=24,
    warmup_steps=2,
    learning_rate=4e-3,
    validate_every=5,
    validation_windows=4,
    checkpoint_every=4,
    precision="bf16",
    device="cpu",
)
AT_REST = dataclasses.replace(  # steps too small to change any weight but one that is zero
    CONFIG, steps=1, warmup_steps=0, learning_rate=1e-30, weight_decay=0.0, table_weight_decay=0.0, precision="fp32"
)


def read_lines(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_resumes_to_the_same_bits(
    tokens_dir: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_config(KINDS[kind])
    config = dataclasses.replace(CONFIG, freeze_up_steps=6 if "staple" in kind else 0)
    whole = train(tokens_dir, tmp_path / "whole", model, config)
    lines = read_lines(tmp_path / "whole")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.3
    assert all(("table_grad_norm" in line) is (kind == "stem") for line in lines if "loss" in line)

    batch = TrainingWindows.batch

    def interrupting(self: TrainingWindows, step: int, batch_size: int) -> np.ndarray:
        if step == 6:  # between two checkpoints: the interrupt itself writes one, after this step
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, step, batch_size)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingWindows, "batch", interrupting)
        train(tokens_dir, tmp_path / "out", model, config)
    saved = sorted((tmp_path / "out" / ".partial" / "checkpoints").iterdir())[-1]
    assert saved.name == "step-00000007.safetensors"
    check_checkpoint(saved, model)
    resumed = train(tokens_dir, tmp_path / "out", model, config)
    assert read_lines(tmp_path / "out") == lines
    assert resumed.files["model.safetensors"].sha256 == whole.files["model.safetensors"].sha256


def check_checkpoint(path: Path, model: ModelConfig) -> None:
    """Each table lies there with two moments of its size, and each address with it."""
    with safe_open(path, "np") as file:
        names = set(file.keys())
        tables = [name for name in names if name.startswith("model/") and name.endswith(".table")]
        moments = [name for name in names if name.startswith("optimizer/table/") and not name.endswith("last_step")]
        shapes = [sorted(tuple(file.get_slice(n).get_shape()) for n in found) for found in (tables, moments)]
        assert sorted(shapes[0] * 2) == shapes[1]
        for placement in model.memories:
            for address in {"l3": ["offsets"], "engram": ["token_map", "multipliers"]}.get(placement.kind, []):
                for layer in placement.layers:
                    (name,) = (n for n in names if n.startswith(f"model/model.layers.{layer}.") and n.endswith(address))
                    assert file.get_tensor(name).any()


@pytest.mark.parametrize("kind", KINDS)
def test_further_training_starts_where_the_checkpoint_is(tokens_dir: Path, tmp_path: Path, kind: str) -> None:
    seed = write_checkpoint(tmp_path / "seed", tiny_config(KINDS[kind], eos_token_id=0), tokens_dir)
    model = presets.from_checkpoint(seed)
    assert model == tiny_config(KINDS[kind], eos_token_id=0)
    train(tokens_dir, tmp_path / "out", model, AT_REST, init_from=seed)
    before, after = load_model(seed), load_model(tmp_path / "out")
    expected = before.state_dict()
    assert any(".memories." in name for name in expected)
    for name, tensor in after.state_dict().items():
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected
    windows = TrainingWindows(open_shards(tokens_dir).train, AT_REST.window_length, AT_REST.seed, where=tokens_dir)
    batch = torch.from_numpy(windows.batch(0, AT_REST.batch_size))
    loss = F.cross_entropy(before(batch[:, :-1]).double().flatten(0, 1), batch[:, 1:].flatten())
    assert read_lines(tmp_path / "out")[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_staple_starts_as_the_dense_checkpoint_bit_for_bit(tokens_dir: Path, tmp_path: Path) -> None:
    seed = write_checkpoint(tmp_path / "seed", tiny_config(eos_token_id=0), tokens_dir)
    model = presets.from_checkpoint(seed, memory="staple", layers=(0, 1))
    for name, config in (("staple", model), ("dense", presets.from_checkpoint(seed))):
        train(tokens_dir, tmp_path / name, config, AT_REST, init_from=seed)
    assert read_lines(tmp_path / "staple")[0]["loss"] == read_lines(tmp_path / "dense")[0]["loss"]
    started = load_model(tmp_path / "staple")
    assert 0 < started.model.layers[0].memories[0].table.abs().max() < 1e-28
    ids = torch.randint(0, 384, (3, 60), generator=torch.Generator().manual_seed(0))
    assert torch.equal(started(ids), load_model(seed)(ids))


def test_stem_starts_from_the_up_projection_of_every_token(tokens_dir: Path, tmp_path: Path) -> None:
    seed = write_checkpoint(tmp_path / "seed", tiny_config(eos_token_id=0), tokens_dir)
    model = presets.from_checkpoint(seed, memory="stem", layers=(1,))
    train(tokens_dir, tmp_path / "stem", model, AT_REST, init_from=seed)
    donor, started = load_model(seed), load_model(tmp_path / "stem")
    assert started.model.layers[1].mlp.up_proj is None
    expected = donor.model.embed_tokens.weight.numpy() @ donor.model.layers[1].mlp.up_proj.weight.numpy().T
    np.testing.assert_allclose(started.model.layers[1].memories[0].table.numpy(), expected, rtol=1e-4, atol=1e-5)
    for layer in (0, 2):
        assert torch.equal(started.model.layers[layer].mlp.up_proj.weight, donor.model.layers[layer].mlp.up_proj.weight)
