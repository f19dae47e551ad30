"""`meki-edge reparam` for every kind of memory, alone and mixed: each way to address rows, several ROM files."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_config, write_checkpoint
from safetensors.torch import load_file, save_file

from meki_edge import reparam_proof
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.manifest import Manifest
from meki_edge.memory import PaddedRows
from meki_edge.model.checkpoint import load_model
from meki_edge.model.rom_rows import RomRows
from meki_edge.model.row_spaces import row_spaces
from meki_edge.model.validation import validation_loss
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.rom import inspect
from meki_edge.rom.reader import RomReader
from meki_edge.rom.writer import RomWriter
from meki_edge.tokens import open_shards

WINDOWS, LENGTH = 3, 40
L3 = {"num_entries": 900, "max_entries": 7, "value_dim": 8, "up_dim": 24}
ENGRAM = {"table_size": 40, "memory_dim": 24, "num_heads": 2, "max_ngram": 4}


def placed(kind: str, *layers: int, **options: object) -> dict:
    return {"kind": kind, "layers": list(layers), "options": options}


MIX = [
    placed("meki", 0, 2, memory_dim=6),
    placed("l3", 1, 2, **L3),
    placed("engram", 0, 2, **ENGRAM),
    placed("staple", 1, rank=4),
]
KINDS = {
    "meki": [placed("meki", 0, 1, 2, memory_dim=6)],
    "ple": [placed("ple", 0, 2, memory_dim=5)],
    "stem": [placed("stem", 1, 2)],
    "staple": [placed("staple", 0, 1)],
    "staple low rank": [placed("staple", 0, 1, rank=4)],
    "mole": [placed("mole", 1, num_experts=2, expert_size=8)],
    "l3": [placed("l3", 1, **L3)],
    "l3 tied": [placed("l3", 0, 1, num_entries=900, max_entries=7, tied=True)],
    "engram": [placed("engram", 0, 1, **ENGRAM)],
    "mix": MIX,
}


def config(**changes: object) -> ReparamConfig:
    given = {"proof_windows": WINDOWS, "window_length": LENGTH, "chunk_rows": 100, "table_precision": "fp32"}
    return ReparamConfig(**{**given, **changes})


def trained(directory: Path, tokens_dir: Path, memories: list) -> Path:
    return write_checkpoint(directory / "training", tiny_config(memories, eos_token_id=0), tokens_dir)


@contextmanager
def rom_rows(directory: Path) -> Iterator[RomRows]:
    """The rows of a ROM-form directory."""
    model = load_model(directory).config
    with ExitStack() as stack:
        yield RomRows(model, [stack.enter_context(RomReader(directory / s.file)) for s in row_spaces(model)])


def expected_bytes(directory: Path, tokens_dir: Path) -> float:
    """Token by token of the validation text."""
    text = open_shards(tokens_dir).validation.tolist()
    total = 0
    for path in directory.glob("rom*.safetensors"):
        with RomReader(path) as reader:
            rows = [int(reader.row_ids(np.array([token]))[1][0]) for token in range(384)]
            total += sum(rows[token] for token in text) * reader.spec.row_stride
    return total / len(text)


@pytest.mark.parametrize("memories", KINDS.values(), ids=KINDS.keys())
def test_the_rom_form_is_the_trained_model(tokens_dir: Path, tmp_path: Path, memories: list) -> None:
    """The directory written, by the ordinary forward pass, against the training form."""
    checkpoint, out = trained(tmp_path, tokens_dir, memories), tmp_path / "rom"
    done = reparam(checkpoint, tokens_dir, out, config())
    windows = open_shards(tokens_dir).validation_windows(WINDOWS, LENGTH + 1)
    ids = torch.from_numpy(windows[:, :-1])
    training, folded = load_model(checkpoint), load_model(out)
    expected, proof = training(ids), done.metrics["proof"]
    with rom_rows(out) as rows:
        found, misled = folded(ids, rows=rows(ids)), folded(ids, rows=rows(ids.flip(1)))
        loss = validation_loss(folded, windows, rows_source=rows)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (misled - expected).abs().max() > 0.05  # so the rows matter
    assert max(proof["difference_float32"], proof["difference_coded"]) < 1e-5
    assert proof["logit_scale"] == pytest.approx(expected.abs().max().item(), rel=1e-5)
    assert proof["loss_training"] == pytest.approx(validation_loss(training, windows), abs=1e-5)
    assert done.metrics["validation_loss"] == pytest.approx(loss, abs=1e-5)
    _check_files(done, checkpoint, out)
    assert done.metrics["rom_bytes_per_token_expected"] == pytest.approx(expected_bytes(out, tokens_dir))


def _check_files(done: Manifest, checkpoint: Path, out: Path) -> None:
    spaces = row_spaces(load_model(out).config)
    roms = [name for name, entry in done.files.items() if entry.role.startswith("rom")]
    assert roms == [space.file for space in spaces] and set(os.listdir(out)) == {*done.files, "manifest.json"}
    assert [done.files[name].role for name in roms] == [space.role for space in spaces]
    assert done.metrics["rom_bytes"] == sum((out / name).stat().st_size for name in roms)
    worst = 0
    for space in spaces:
        assert inspect.verify(out / space.file, done.files[space.file].sha256) == space.num_rows
        facts = inspect.describe(out / space.file)
        assert (facts["addressing"], facts["num_tokens"]) == (space.addressing, 384)
        worst += facts["rows_per_token"] * facts["row_stride"]
    assert done.metrics["rom_bytes_per_token"] == worst
    source, kept = load_file(checkpoint / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(tensor, source[name]) and tensor.is_floating_point() for name, tensor in kept.items())
    assert all(".memories." in name for name in source.keys() - kept.keys())
    assert not any(name.endswith((".table", ".offsets", ".token_map", ".multipliers", ".pad_id")) for name in kept)
    assert done.metrics["ram_parameters"] == sum(tensor.numel() for tensor in kept.values())


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_every_file_is_coded(tokens_dir: Path, tmp_path: Path, precision: str) -> None:
    checkpoint = trained(tmp_path, tokens_dir, MIX)
    done = reparam(checkpoint, tokens_dir, tmp_path / "rom", config(table_precision=precision))
    proof = done.metrics["proof"]
    assert proof["difference_float32"] < 1e-5 < proof["difference_coded"] < 0.5
    for space in row_spaces(load_model(checkpoint).config):
        facts = inspect.describe(tmp_path / "rom" / space.file)
        assert {segment["codec"] for segment in facts["segments"]} == {precision}
    windows = open_shards(tokens_dir).validation_windows(WINDOWS, LENGTH + 1)
    with rom_rows(tmp_path / "rom") as rows:
        loss = validation_loss(load_model(tmp_path / "rom"), windows, rows_source=rows)
    assert done.metrics["validation_loss"] == pytest.approx(loss, abs=1e-5)


def test_the_proof_holds_few_rows_at_a_time(
    tokens_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows are cut into slices, to the same result."""
    checkpoint = trained(tmp_path, tokens_dir, MIX)
    whole = reparam(checkpoint, tokens_dir, tmp_path / "whole", config())
    gather, sizes = reparam_proof.gather, []

    def watched(*arguments: object) -> torch.Tensor | PaddedRows:
        rows = gather(*arguments)
        if isinstance(rows, PaddedRows):
            sizes.append(rows.values.numel())
        return rows

    monkeypatch.setattr(reparam_proof, "gather", watched)
    monkeypatch.setattr(reparam_proof, "ROW_ELEMENTS", 1000)
    sliced = reparam(checkpoint, tokens_dir, tmp_path / "sliced", config())
    assert max(sizes) <= 1000 < WINDOWS * LENGTH * 40 < sum(sizes)
    for name, value in whole.metrics["proof"].items():
        assert sliced.metrics["proof"][name] == pytest.approx(value, abs=1e-5)


class Stop(Exception):
    """An interruption."""


@pytest.mark.parametrize(("where", "what"), [(RomWriter, "write"), (os, "replace")])
def test_interrupted_anywhere_it_resumes_to_the_same_bytes(
    tokens_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, what: str
) -> None:
    """Stopped again and again: in each run one write of rows later, or one file put in place later."""
    checkpoint = trained(tmp_path, tokens_dir, MIX)
    options = config(chunk_rows=500, table_precision="int8")
    whole = reparam(checkpoint, tokens_dir, tmp_path / "whole", options)
    original, left = getattr(where, what), 0

    def stopping(*arguments: object) -> None:
        nonlocal left
        if left == 0:
            raise Stop
        left -= 1
        original(*arguments)

    monkeypatch.setattr(where, what, stopping)
    for run in itertools.count(1):
        left = run
        try:
            done = reparam(checkpoint, tokens_dir, tmp_path / "rom", options)
            break
        except Stop:
            assert not (tmp_path / "rom" / "manifest.json").exists()
    assert run > 3
    assert done.files == whole.files and done.metrics == whole.metrics


def edit(directory: Path, name: str, tensor: torch.Tensor) -> None:
    """Replace a tensor and let the manifest agree."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    assert name in tensors
    save_file({**tensors, name: tensor}, path, metadata={"format": "pt"})
    values = json.loads((directory / "manifest.json").read_text())
    values["files"][path.name] |= {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (directory / "manifest.json").write_text(json.dumps(values))


def test_addresses_that_were_never_prepared_are_refused(tokens_dir: Path, tmp_path: Path) -> None:
    checkpoint = trained(tmp_path, tokens_dir, KINDS["l3"])
    edit(checkpoint, "model.layers.1.memories.0.offsets", torch.zeros(385, dtype=torch.int64))
    with pytest.raises(UserError, match="layer 1 memory 0: 'offsets' does not divide the 900 rows") as caught:
        reparam(checkpoint, tokens_dir, tmp_path / "rom", config())
    assert caught.value.fix == "train the model again" and not (tmp_path / "rom").exists()


def test_memories_of_one_file_must_agree_on_addresses(tokens_dir: Path, tmp_path: Path) -> None:
    checkpoint = trained(tmp_path, tokens_dir, KINDS["l3 tied"])
    name = "model.layers.1.memories.0.offsets"
    offsets = load_file(checkpoint / "model.safetensors")[name]
    counts = offsets.diff()
    edit(checkpoint, name, torch.cat((offsets[:1], counts.flip(0).cumsum(0))))
    with pytest.raises(UserError, match="layer 0 memory 0 and layer 1 memory 0 have different addresses"):
        reparam(checkpoint, tokens_dir, tmp_path / "rom", config())
