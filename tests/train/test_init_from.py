"""Starting from another backbone: Hugging Face's own files, ours, and ones that do not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny import MEKI, TINY, VOCAB_SIZE, tiny_config, write_checkpoint
from pydoc_data.topics import topics
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from meki_edge.errors import UserError
from meki_edge.model.checkpoint import load_model
from meki_edge.model.decoder import CausalLM
from meki_edge.tokenizer import train_bpe
from meki_edge.train import presets
from meki_edge.train.config import TrainConfig
from meki_edge.train.initialize import initialize_backbone
from meki_edge.train.loop import train

ONE_STEP = TrainConfig(
    steps=1,
    batch_size=2,
    window_length=16,
    warmup_steps=0,
    learning_rate=1e-9,
    weight_decay=0.0,
    validation_windows=2,
    precision="fp32",
    device="cpu",
)


@pytest.fixture(scope="module")
def hub_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_pretrained` writes for a small Qwen3."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("hub")
    Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True)).save_pretrained(directory)
    return directory


def test_hugging_face_weights_compute_the_same(hub_checkpoint: Path) -> None:
    reference = Qwen3ForCausalLM.from_pretrained(hub_checkpoint)
    model = CausalLM(presets.from_checkpoint(hub_checkpoint))
    initialize_backbone(model, hub_checkpoint)
    ids = torch.randint(VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)


def test_training_starts_there_with_fresh_memories(hub_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    config = presets.from_checkpoint(hub_checkpoint, memory="meki", options={"memory_dim": 12})
    done = train(tokens_dir, tmp_path / "out", config, ONE_STEP, init_from=hub_checkpoint)
    assert set(done.inputs) == {"tokens", "init_from/config.json", "init_from/model.safetensors"}
    trained = load_model(tmp_path / "out").state_dict()
    for name, tensor in Qwen3ForCausalLM.from_pretrained(hub_checkpoint).state_dict().items():
        torch.testing.assert_close(trained[name], tensor, atol=1e-6, rtol=0)
    fresh = CausalLM(config)
    fresh.reset_parameters(0)
    for name, tensor in fresh.state_dict().items():
        if ".memories." in name:
            torch.testing.assert_close(trained[name], tensor, atol=1e-6, rtol=0)


def test_memories_may_upcycle_from_the_dense_layer(hub_checkpoint: Path) -> None:
    config = presets.from_checkpoint(hub_checkpoint, memory="stem", layers=(1,))
    model = CausalLM(config)
    initialize_backbone(model, hub_checkpoint)
    donor = Qwen3ForCausalLM.from_pretrained(hub_checkpoint).state_dict()
    expected = donor["model.embed_tokens.weight"] @ donor["model.layers.1.mlp.up_proj.weight"].T
    torch.testing.assert_close(model.model.layers[1].memories[0].table.detach(), expected)


def test_our_own_checkpoint_without_its_memories(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    assert presets.from_checkpoint(meki_checkpoint).memories == ()
    config = tiny_config(MEKI)
    done = train(tokens_dir, tmp_path / "out", config, ONE_STEP, init_from=meki_checkpoint)
    assert set(done.inputs) == {"tokens", "init_from"}
    ours, theirs = load_model(tmp_path / "out").state_dict(), load_model(meki_checkpoint).state_dict()
    backbone = "model.layers.2.mlp.up_proj.weight"
    table = "model.layers.2.memories.0.table"
    torch.testing.assert_close(ours[backbone], theirs[backbone], atol=1e-6, rtol=0)
    assert (ours[table] - theirs[table]).abs().max() > 0.05


def test_the_model_of_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "model_type": "qwen3", "memories": MEKI}))
    assert presets.from_config(path) == tiny_config(MEKI)
    both = presets.from_config(path, memory="stem", layers=(0,))
    assert [placement.kind for placement in both.memories] == ["meki", "stem"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"intermediate_size": 96}, r"'model.layers.0.mlp.gate_proj.weight' has shape \(80, 32\)"),
        ({"num_hidden_layers": 4}, r"'model.layers.3.\S+' is missing"),
        ({"rope_theta": 5e5}, "rope_theta is 10000.0 in the checkpoint and 500000.0 in the model"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is True in the checkpoint"),
    ],
)
def test_another_shape_is_refused(
    hub_checkpoint: Path, tokens_dir: Path, tmp_path: Path, changes: dict[str, object], what: str
) -> None:
    with pytest.raises(UserError, match=what):
        train(tokens_dir, tmp_path / "out", tiny_config(**changes), ONE_STEP, init_from=hub_checkpoint)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 2 in the checkpoint and 1 in the model"),
        ({"norm_topk_prob": False}, "norm_topk_prob is True in the checkpoint and False in the model"),
    ],
)
def test_another_routing_is_refused(tokens_dir: Path, tmp_path: Path, changes: dict[str, object], what: str) -> None:
    """Both change what the experts compute, and no tensor's shape."""
    experts = presets.with_moe(tiny_config(), 4, 2)
    directory = write_checkpoint(tmp_path / "moe", experts, tokens_dir)
    initialize_backbone(CausalLM(experts), directory)
    with pytest.raises(UserError, match=what):
        initialize_backbone(CausalLM(dataclasses.replace(experts, **changes)), directory)


def test_another_tokenizer_is_refused(hub_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(hub_checkpoint, tmp_path / "hub")
    same = Tokenizer.from_file(str(tokens_dir / "tokenizer.json"))
    same.save(str(directory / "tokenizer.json"), pretty=False)  # other bytes, the same vocabulary
    train(tokens_dir, tmp_path / "same", tiny_config(), ONE_STEP, init_from=directory)
    train_bpe(iter([topics["assert"]]), VOCAB_SIZE).save(str(directory / "tokenizer.json"))
    with pytest.raises(UserError, match="another vocabulary"):
        train(tokens_dir, tmp_path / "other", tiny_config(), ONE_STEP, init_from=directory)


def test_not_a_checkpoint(tokens_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="config.json is missing"):
        train(tokens_dir, tmp_path / "out", tiny_config(), ONE_STEP, init_from=tmp_path / "empty")


def test_an_edited_checkpoint_is_refused(tokens_dir: Path, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "dense", tiny_config(), tokens_dir)
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (directory / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="the contents changed"):
        train(tokens_dir, tmp_path / "out", tiny_config(), ONE_STEP, init_from=directory)
