"""`meki-edge reparam` end to end on tiny checkpoints, and its proof against the ordinary forward pass."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from folding import LENGTH, ROM, WINDOWS, config
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import MEKI, tiny_config, write_checkpoint
from torch.nn import functional as F

from meki_edge import manifest, reparam_proof
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.model.checkpoint import Checkpoint, load_model
from meki_edge.model.rom_rows import RomRows, rom_rows
from meki_edge.model.row_spaces import row_spaces
from meki_edge.model.validation import validation_loss
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.reparam_fold import Folder
from meki_edge.reparam_proof import LayerRows, Windows, prove, stored_rows, streamed_hidden, training_rows
from meki_edge.rom import inspect
from meki_edge.rom.reader import RomReader
from meki_edge.tokens import open_shards
from meki_edge.train.config import TrainConfig
from meki_edge.train.loop import train

TOLERANCE = {"fp32": 1e-6, "fp16": 3e-3, "int8": 0.05, "int4": 1.0}  # logits of this tiny model reach about 2.5


@pytest.mark.parametrize("precision", list(TOLERANCE))
def test_the_rom_form_is_the_trained_model(
    meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path, precision: str
) -> None:
    """The directory written, read back by the ordinary model, against the training form."""
    out = tmp_path / "rom"
    done = reparam(meki_checkpoint, tokens_dir, out, config(table_precision=precision))
    windows = open_shards(tokens_dir).validation_windows(WINDOWS, LENGTH + 1)
    ids = torch.from_numpy(windows[:, :-1])
    training, folded = load_model(meki_checkpoint), load_model(out)
    assert folded.config.folded
    expected = training(ids)
    with RomReader(out / ROM) as reader:
        logits = folded(ids, rows=rom_rows(folded.config, [reader], ids))
    difference = (logits - expected).abs().max().item()
    assert difference < TOLERANCE[precision]
    proof = done.metrics["proof"]
    assert proof["difference_coded"] == pytest.approx(difference, abs=1e-5)
    assert proof["difference_float32"] < 1e-5
    assert proof["logit_scale"] == pytest.approx(expected.abs().max().item(), rel=1e-5)
    agreement = (logits.argmax(-1) == expected.argmax(-1)).double().mean().item()
    assert proof["argmax_agreement"] == pytest.approx(agreement, abs=1 / proof["tokens"])
    targets = torch.from_numpy(windows[:, 1:]).flatten()
    for name, form in (("loss_training", expected), ("loss_coded", logits)):
        assert proof[name] == pytest.approx(F.cross_entropy(form.flatten(0, 1), targets).item(), abs=1e-5)


def test_the_loss_is_trainings_own_measure(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    windows = open_shards(tokens_dir).validation_windows(WINDOWS, LENGTH + 1)
    done = reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config(table_precision="int8"))
    assert done.metrics["proof"]["loss_training"] == pytest.approx(
        validation_loss(load_model(meki_checkpoint), windows), abs=1e-5
    )
    folded = load_model(tmp_path / "rom")
    with RomReader(tmp_path / "rom" / ROM) as reader:
        loss = validation_loss(folded, windows, rows_source=RomRows(folded.config, [reader]))
    assert done.metrics["validation_loss"] == pytest.approx(loss, abs=1e-5)


def test_a_trained_checkpoint_folds_to_the_loss_that_training_recorded(tokens_dir: Path, tmp_path: Path) -> None:
    """Defaults and all: the proof's training form is the model and the text of training's last validation."""
    training = TrainConfig(steps=3, batch_size=2, window_length=32, warmup_steps=1, validation_windows=6)
    trained = train(tokens_dir, tmp_path / "training", tiny_config(MEKI), training)
    done = reparam(tmp_path / "training", tokens_dir, tmp_path / "rom", ReparamConfig())
    assert done.metrics["proof"]["loss_training"] == pytest.approx(trained.metrics["validation_loss"], abs=1e-5)
    for name in ("validation_tokens", "ram_parameters"):
        assert done.metrics[name] == trained.metrics[name]
    assert done.metrics["validation_loss"] == pytest.approx(trained.metrics["validation_loss"], abs=1e-3)


def test_what_is_written(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "rom"
    done = reparam(meki_checkpoint, tokens_dir, out, config(table_precision="int8"))
    assert sorted(os.listdir(out)) == [
        "config.json", "manifest.json", "model.safetensors", "rom.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert {name: entry.role for name, entry in done.files.items()} == {
        "config.json": "config",
        "model.safetensors": "weights",
        "tokenizer.json": "tokenizer",
        "rom.safetensors": "rom",
    }
    assert manifest.load(out, stages=("reparam",)) == done
    source, kept = load_file(meki_checkpoint / "model.safetensors"), load_file(out / "model.safetensors")
    for name, tensor in kept.items():
        assert torch.equal(tensor, source[name])
    gone = {name.split(".memories.0.")[1].split(".")[0] for name in source.keys() - kept.keys()}
    assert gone == {"table", "projector", "mix_norm", "alpha", "beta"}
    metrics = done.metrics
    assert metrics["ram_parameters"] == sum(tensor.numel() for tensor in kept.values())
    assert metrics["rom_bytes"] == (out / ROM).stat().st_size == 4096 + 384 * 64
    assert metrics["rom_bytes_per_token"] == metrics["rom_bytes_per_token_expected"] == 64
    assert metrics["validation_tokens"] == metrics["proof"]["tokens"] == WINDOWS * LENGTH
    assert metrics["validation_loss"] == metrics["proof"]["loss_coded"]
    with safe_open(out / ROM, "np") as rom:
        assert rom.metadata()["tokenizer_sha256"] == sha256_file(tokens_dir / "tokenizer.json")
        assert rom.metadata()["source_sha256"] == sha256_file(meki_checkpoint / "model.safetensors")
    assert inspect.verify(out / ROM, done.files[ROM].sha256) == 384


@pytest.mark.parametrize("chunk_rows", [1, 7, 384, 5000])
def test_slices_do_not_show(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path, chunk_rows: int) -> None:
    out = tmp_path / "rom"
    reparam(meki_checkpoint, tokens_dir, out, config(table_precision="fp32", chunk_rows=chunk_rows))
    model = load_model(meki_checkpoint)
    ids = torch.arange(384)
    expected = torch.cat(
        [layer.memories[0].rom_rows(ids, model.model.embed_tokens.weight) for layer in model.model.layers], dim=1
    )
    with RomReader(out / ROM) as reader:
        np.testing.assert_allclose(reader.rows(ids.numpy()), expected, atol=2e-6)


def test_two_runs_give_the_same_bytes_and_a_third_is_skipped(
    meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path
) -> None:
    first, second = (reparam(meki_checkpoint, tokens_dir, tmp_path / name, config()) for name in ("a", "b"))
    assert first.files == second.files and first.metrics == second.metrics
    modified = (tmp_path / "a" / ROM).stat().st_mtime_ns
    assert reparam(meki_checkpoint, tokens_dir, tmp_path / "a", config()) == first
    assert (tmp_path / "a" / ROM).stat().st_mtime_ns == modified


def test_reparam_changes_no_input(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in meki_checkpoint.iterdir()}
    reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config())
    assert {path.name: path.read_bytes() for path in meki_checkpoint.iterdir()} == before


@pytest.mark.parametrize(
    "memories",
    [
        [
            {"kind": "meki", "layers": [2, 0], "options": {"memory_dim": 6}},
            {"kind": "ple", "layers": [1, 2], "options": {}},
        ],
        [{"kind": "mole", "layers": [1], "options": {"num_experts": 2, "expert_size": 8}}],
        [{"kind": "meki", "layers": [0], "options": {"memory_dim": 5, "content": "dynamic"}}],
        [{"kind": "stem", "layers": [1], "options": {}}, {"kind": "staple", "layers": [0, 2], "options": {"rank": 4}}],
    ],
    ids=["meki+ple", "mole", "dynamic", "stem+staple"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_other_memories_and_an_untied_head(tokens_dir: Path, tmp_path: Path, memories: list, tied: bool) -> None:
    model = tiny_config(memories, eos_token_id=0, tie_word_embeddings=tied)
    checkpoint = write_checkpoint(tmp_path / "training", model, tokens_dir)
    done = reparam(checkpoint, tokens_dir, tmp_path / "rom", config(proof_windows=2, table_precision="fp16"))
    assert done.metrics["proof"]["difference_float32"] < 1e-4
    assert done.metrics["proof"]["difference_coded"] < 0.05
    windows = open_shards(tokens_dir).validation_windows(2, LENGTH + 1)
    assert done.metrics["proof"]["loss_training"] == pytest.approx(
        validation_loss(load_model(checkpoint), windows), abs=1e-5
    )


def test_the_streamed_forward_is_the_ordinary_one(
    meki_checkpoint: Path, tokens_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in several steps of windows and slices of the vocabulary."""
    monkeypatch.setattr(reparam_proof, "TOKENS_AT_ONCE", 2 * LENGTH)
    monkeypatch.setattr(reparam_proof, "SLICE_ELEMENTS", 100 * WINDOWS * LENGTH)
    tokens = open_shards(tokens_dir).validation_windows(WINDOWS, LENGTH + 1)
    windows = Windows.of(tokens)
    model = load_model(meki_checkpoint)
    expected = model(torch.from_numpy(tokens[:, :-1]))
    with Checkpoint(meki_checkpoint) as checkpoint:
        hidden = streamed_hidden(checkpoint, windows, training_rows(checkpoint))
        torch.testing.assert_close(model.lm_head(hidden), expected, atol=2e-5, rtol=1e-5)


def test_a_wrong_row_is_noticed(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    """The proof is worth something: rows shifted by one id, or two layers swapped, do not pass."""
    reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config())
    windows = Windows.of(open_shards(tokens_dir).validation_windows(2, LENGTH + 1))
    with Checkpoint(meki_checkpoint) as training, Checkpoint(tmp_path / "rom") as folded:
        spaces = row_spaces(training.config)
        folder = Folder(training, spaces[0])
        table = folder.fold(0, 384)

        def rows(table: np.ndarray) -> LayerRows:
            return stored_rows(spaces, [folder.addressing], [lambda k, ids: table[ids, 12 * k : 12 * (k + 1)]])

        assert prove(training, folded, windows, rows(table), rows(table)).difference_coded < 1e-5
        for wrong in (np.roll(table, 1, axis=0), np.roll(table, 12, axis=1)):
            proof = prove(training, folded, windows, rows(table), rows(wrong))
            assert proof.difference_float32 < 1e-5 < 0.1 < proof.difference_coded


def test_defaults_come_from_trainings_validation(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the manifest does not record 'validation_windows'"):
        reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", ReparamConfig())
    path = meki_checkpoint / "manifest.json"
    values = json.loads(path.read_text())
    values["metrics"] |= {"validation_windows": 3, "window_length": 40}
    path.write_text(json.dumps(values))
    done = reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", ReparamConfig())
    assert (done.metrics["proof"]["windows"], done.metrics["proof"]["window_length"]) == (3, 40)
