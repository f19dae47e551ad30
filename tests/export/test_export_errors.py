"""What export refuses, and how it says so."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_config, write_checkpoint

from export.graph import ExportConfig, export
from export.verify import verify
from meki_edge import graph_spec, manifest, tokens
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.manifest import StageOutput
from meki_edge.rom.reader import RomReader
from meki_edge.rom.addressing import Identity
from meki_edge.rom.spec import Segment, build, row_stride
from meki_edge.rom.writer import RomWriter
from meki_edge.tokens import open_shards

Exported = dict[str, tuple[Path, Path]]
SMALL = ExportConfig(context_length=64, prefill_tokens=16, verify_tokens=20)


def segments(*dims: tuple[int, int, int]) -> tuple[Segment, ...]:
    """Consecutive int8 segments of (layer, memory, dim)."""
    spec = build(dims, "int8", num_rows=1, addressing=Identity(), tokenizer_sha256="", source_sha256="")
    return spec.segments


def what_of(checkpoint: Path, tokens_dir: Path, out: Path, config: ExportConfig = SMALL) -> str:
    with pytest.raises(UserError) as caught:
        export(checkpoint, tokens_dir, out, config)
    assert not (out / manifest.FILE_NAME).exists()
    return f"{caught.value.what} — {caught.value.fix}"


def test_training_form(tmp_path: Path, tokens_dir: Path, meki_checkpoint: Path) -> None:
    what = what_of(meki_checkpoint, tokens_dir, tmp_path / "out")
    assert "training form" in what and "fold it first: run `meki-edge reparam`" in what


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"context_length": 257}, "context_length is 257, the model's positions go up to 256"),
        ({"context_length": 0}, "context_length is 0"),
        ({"prefill_tokens": 65}, "prefill_tokens is 65 with a context_length of 64"),
        ({"prefill_tokens": 0}, "prefill_tokens is 0"),
        ({"verify_tokens": 1}, "verify_tokens is 1"),
    ],
)
def test_shapes(
    tmp_path: Path, tokens_dir: Path, dense_checkpoint: Path, changes: dict[str, int], expected: str
) -> None:
    config = dataclasses.replace(SMALL, **changes)
    assert expected in what_of(dense_checkpoint, tokens_dir, tmp_path / "out", config)


def test_not_a_checkpoint(tmp_path: Path, tokens_dir: Path, exported: Exported) -> None:
    assert "output of `meki-edge tokenize`" in what_of(tokens_dir, tokens_dir, tmp_path / "out")
    assert "no manifest.json" in what_of(tmp_path / "nothing", tokens_dir, tmp_path / "out")


def test_changed_weights(tmp_path: Path, tokens_dir: Path, dense_checkpoint: Path) -> None:
    weights = dense_checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "contents changed" in what_of(dense_checkpoint, tokens_dir, tmp_path / "out")


def test_another_tokenizer(tmp_path: Path, tokens_dir: Path, dense_checkpoint: Path) -> None:
    output = StageOutput(tmp_path / "tokens", stage=tokens.STAGE, config={}, inputs={})
    for name in (tokens.TRAIN, tokens.VALIDATION):
        shutil.copyfile(tokens_dir / name, output.partial / name)
    tokenizer = json.loads((tokens_dir / tokens.TOKENIZER).read_text())
    (output.partial / tokens.TOKENIZER).write_text(json.dumps(tokenizer, indent=3))
    source = manifest.load(tokens_dir)
    output.finish(roles={name: entry.role for name, entry in source.files.items()}, metrics=source.metrics)
    assert "another tokenizer" in what_of(dense_checkpoint, tmp_path / "tokens", tmp_path / "out")


def test_more_tokens_than_the_model(tmp_path: Path, tokens_dir: Path) -> None:
    write_checkpoint(tmp_path / "small", tiny_config(vocab_size=383), tokens_dir)
    what = what_of(tmp_path / "small", tokens_dir, tmp_path / "out")
    assert "the tokenizer has 384 tokens, the model only 383" in what


@pytest.fixture
def respoiled(tmp_path: Path, exported: Exported) -> Callable[..., Path]:
    """A folded checkpoint whose ROM is whole but belongs to another model."""
    checkpoint, _ = exported["meki"]
    source = manifest.load(checkpoint)

    def spoil(**changes: object) -> Path:
        output = StageOutput(tmp_path / "spoiled", stage="reparam", config={}, inputs={})
        for name in source.files:
            shutil.copyfile(checkpoint / name, output.partial / name)
        with RomReader(checkpoint / "rom.safetensors") as reader:
            spec = dataclasses.replace(reader.spec, **changes)
        spec = dataclasses.replace(spec, row_stride=row_stride(spec.row_bytes, spec.addressing))
        (output.partial / "rom.safetensors").unlink()
        with RomWriter(output.partial / "rom.safetensors", spec) as writer:
            writer.write(np.ones((spec.num_rows, spec.row_dim), np.float32))
        output.finish(roles={name: entry.role for name, entry in source.files.items()}, metrics=source.metrics)
        return tmp_path / "spoiled"

    return spoil


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_rows": 380}, "the ROM has 380 rows, the memories need 384"),
        ({"segments": segments((0, 0, 12), (1, 0, 12), (2, 0, 11))}, "the ROM's segments"),
        ({"segments": segments((0, 0, 12), (1, 0, 12))}, "the ROM's segments"),
        ({"segments": segments((0, 0, 12), (1, 1, 12), (2, 0, 12))}, "the ROM's segments"),
        ({"tokenizer_sha256": "0" * 64}, "folded for another tokenizer"),
    ],
)
def test_rom_of_another_model(
    tmp_path: Path, tokens_dir: Path, respoiled: Callable[..., Path], changes: dict, expected: str
) -> None:
    what = what_of(respoiled(**changes), tokens_dir, tmp_path / "out")
    assert expected in what and "meki-edge reparam" in what


def test_truncated_rom(tmp_path: Path, tokens_dir: Path, respoiled: Callable[..., Path]) -> None:
    checkpoint = respoiled()
    rom = checkpoint / "rom.safetensors"
    rom.write_bytes(rom.read_bytes()[:-1])
    assert "bytes, the manifest says" in what_of(checkpoint, tokens_dir, tmp_path / "out")


@pytest.mark.parametrize("damage", [1.5, float("nan")])
def test_graphs_that_compute_something_else(
    tmp_path: Path, tokens_dir: Path, exported: Exported, damage: float
) -> None:
    checkpoint, directory = exported["dense"]
    copy = shutil.copytree(directory, tmp_path / "copy")
    weights = np.fromfile(copy / "weights.data", "<f4")
    weights[:32] = damage  # the first norm's gain
    weights.tofile(copy / "weights.data")
    path = copy / graph_spec.FILE_NAME
    with pytest.raises(UserError, match="logits differ from PyTorch's"):
        text = open_shards(tokens_dir).validation_windows(1, 20)[0]
        verify(copy, GraphSpec.from_json(read_json(path), path), checkpoint, [], text)


def test_validation_text_shorter_than_the_check(tmp_path: Path, tokens_dir: Path, dense_checkpoint: Path) -> None:
    output = StageOutput(tmp_path / "tokens", stage=tokens.STAGE, config={}, inputs={})
    source = manifest.load(tokens_dir)
    for name in source.files:
        shutil.copyfile(tokens_dir / name, output.partial / name)
    (output.partial / tokens.VALIDATION).write_bytes(bytes(20))
    output.finish(roles={name: entry.role for name, entry in source.files.items()}, metrics=source.metrics)
    assert "10 tokens, a window needs 20" in what_of(dense_checkpoint, tmp_path / "tokens", tmp_path / "out")
