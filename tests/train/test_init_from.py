"""Starting from a checkpoint, with its memories or not: Hugging Face's own files, ours, and ones that do not fit."""

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
from typer.testing import CliRunner

from meki_edge import cli, console, manifest, tokens
from meki_edge.errors import UserError
from meki_edge.manifest import StageOutput
from meki_edge.model.checkpoint import load_model
from meki_edge.model.decoder import CausalLM
from meki_edge.tokenizer import train_bpe
from meki_edge.train import presets
from meki_edge.train.config import TrainConfig
from meki_edge.train.initialize import start_from
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
    start_from(model, hub_checkpoint)
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
    start_from(model, hub_checkpoint)
    donor = Qwen3ForCausalLM.from_pretrained(hub_checkpoint).state_dict()
    expected = donor["model.embed_tokens.weight"] @ donor["model.layers.1.mlp.up_proj.weight"].T
    torch.testing.assert_close(model.model.layers[1].memories[0].table.detach(), expected)


def test_the_kind_alone_names_the_checkpoints_memories(tmp_path: Path, tokens_dir: Path) -> None:
    """Whatever their layers and options; another option or layer makes others of them."""
    memories = [{"kind": "meki", "layers": [0, 2], "options": {"memory_dim": 12, "content": "dynamic"}}]
    directory = write_checkpoint(tmp_path / "meki", tiny_config(memories), tokens_dir)
    kept = presets.from_checkpoint(directory)
    assert kept == tiny_config(memories) == presets.from_checkpoint(directory, memory="meki")
    assert kept == presets.from_checkpoint(directory, memory="meki", layers=(0, 2), options={"memory_dim": 12})
    assert start_from(CausalLM(kept), directory)
    wider = presets.from_checkpoint(directory, memory="meki", options={"memory_dim": 16})
    assert wider == tiny_config([{**memories[0], "options": {**memories[0]["options"], "memory_dim": 16}}])
    assert not start_from(CausalLM(wider), directory)
    assert presets.from_checkpoint(directory, memory="meki", layers=(1,)).memories[0].layers == (1,)
    dense = presets.from_checkpoint(directory, memory=presets.NO_MEMORY)
    assert dense == tiny_config() and not start_from(CausalLM(dense), directory)
    assert presets.build("demo", 384, memory=presets.NO_MEMORY) == presets.build("demo", 384)


@pytest.mark.parametrize(
    ("memories", "rest"),
    [
        ([{"kind": "ple", "layers": [1], "options": {"memory_dim": 8}}], "the model's (ple in layers 1) start fresh"),
        ([], "the model has none"),
    ],
)
def test_other_memories_are_left_out_and_that_is_said(
    meki_checkpoint: Path,
    tokens_dir: Path,
    tmp_path: Path,
    memories: list,
    rest: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(console, "info", said.append)
    config = tiny_config(memories)
    done = train(tokens_dir, tmp_path / "out", config, ONE_STEP, init_from=meki_checkpoint)
    assert set(done.inputs) == {"tokens", "init_from"}
    assert f"the checkpoint's memories (meki in layers 0, 1, 2) are left out: {rest}" in said
    ours, theirs = load_model(tmp_path / "out").state_dict(), load_model(meki_checkpoint).state_dict()
    fresh = CausalLM(config)
    fresh.reset_parameters(0)
    for name, tensor in fresh.state_dict().items():
        expected = tensor if ".memories." in name else theirs[name]
        torch.testing.assert_close(ours[name], expected, atol=1e-6, rtol=0)


def test_addresses_come_with_the_memories(tokens_dir: Path, tmp_path: Path) -> None:
    """A table is no use with the addresses that another text would give."""
    memories = [{"kind": "l3", "layers": [1], "options": {"num_entries": 600, "max_entries": 4}}]
    directory = write_checkpoint(tmp_path / "l3", tiny_config(memories), tokens_dir)
    swapped = StageOutput(tmp_path / "swapped", stage=tokens.STAGE, config={}, inputs={})
    names = {tokens.TRAIN: tokens.VALIDATION, tokens.VALIDATION: tokens.TRAIN, tokens.TOKENIZER: tokens.TOKENIZER}
    for name, source in names.items():
        shutil.copyfile(tokens_dir / source, swapped.partial / name)
    made = manifest.load(tokens_dir)
    swapped.finish(roles={name: made.files[name].role for name in names}, metrics=made.metrics)
    config = presets.from_checkpoint(directory)
    train(tmp_path / "swapped", tmp_path / "kept", config, ONE_STEP, init_from=directory)
    train(tmp_path / "swapped", tmp_path / "fresh", config, ONE_STEP)
    offsets = "model.layers.1.memories.0.offsets"
    paths = (directory, tmp_path / "kept", tmp_path / "fresh")
    theirs, kept, fresh = (load_model(path).state_dict()[offsets] for path in paths)
    assert torch.equal(kept, theirs) and not torch.equal(fresh, theirs)


def test_a_memory_that_stood_in_place_of_the_backbone(tokens_dir: Path, tmp_path: Path) -> None:
    """STEM has no up projection, from which no other model could start."""
    memories = [{"kind": "stem", "layers": [1], "options": {}}]
    directory = write_checkpoint(tmp_path / "stem", tiny_config(memories), tokens_dir)
    with pytest.raises(UserError, match=r"'model.layers.1.mlp.up_proj.weight' is missing") as caught:
        start_from(CausalLM(presets.from_checkpoint(directory, memory="meki")), directory)
    assert "keep its memories" in caught.value.fix
    with pytest.raises(UserError, match=r"stem starts from the tensor 'model.layers.1.mlp.up_proj.weight'"):
        start_from(CausalLM(presets.from_checkpoint(directory, memory="stem", layers=(1, 2))), directory)


def test_the_rom_form_is_refused(exported: dict[str, tuple[Path, Path]], tokens_dir: Path, tmp_path: Path) -> None:
    folded, _ = exported["meki"]
    for memory in (None, "meki", "ple"):
        with pytest.raises(UserError, match="the checkpoint is in ROM form") as caught:
            presets.from_checkpoint(folded, memory=memory)
        assert "the checkpoint that `meki-edge reparam` read" in caught.value.fix
    with pytest.raises(UserError, match="the checkpoint is in ROM form"):
        train(tokens_dir, tmp_path / "out", tiny_config(MEKI), ONE_STEP, init_from=folded)


def test_the_command_goes_on_with_memories(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    options = "--steps 2 --batch-size 2 --window-length 16 --precision fp32 --learning-rate 1e-9".split()
    arguments = ["train", tokens_dir, "-o", tmp_path / "out", "--init-from", meki_checkpoint, *options]
    done = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert done.exit_code == 0, done.exception
    assert manifest.load(tmp_path / "out").config["warmup_steps"] == 0
    name = "model.layers.2.memories.0.table"
    ours, theirs = load_model(tmp_path / "out").state_dict()[name], load_model(meki_checkpoint).state_dict()[name]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_experts_cannot_be_added_to_a_checkpoint(dense_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    arguments = ["train", tokens_dir, "-o", tmp_path / "out", "--init-from", dense_checkpoint, "--steps", 1]
    arguments += ["--moe", "8/2"]
    refused = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert isinstance(refused.exception, UserError)
    assert refused.exception.what == "a mixture of experts cannot start from a dense checkpoint"
    assert "leave out --moe" in refused.exception.fix and "--init-from" in refused.exception.fix
    experts = presets.with_moe(tiny_config(), 4, 2)
    presets.check_experts(experts, 4, 2)
    with pytest.raises(UserError, match="the checkpoint has 4 experts of which a token uses 2, not 8 and 2"):
        presets.check_experts(experts, 8, 2)


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
    start_from(CausalLM(experts), directory)
    with pytest.raises(UserError, match=what):
        start_from(CausalLM(dataclasses.replace(experts, **changes)), directory)


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
