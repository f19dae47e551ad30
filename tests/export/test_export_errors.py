"""What export refuses, and how it says so."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_config, write_checkpoint

from export.graph import ExportConfig, export
from export.verify import verify
from meki_edge import graph_spec, manifest, tokens
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.manifest import StageOutput
from meki_edge.rom.reader import RomReader
from meki_edge.rom.addressing import Identity, Ragged
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


def respoil(checkpoint: Path, out: Path, name: str, **changes: object) -> Path:
    """A copy of a folded checkpoint whose ROM file ``name`` is whole but belongs to another model."""
    source = manifest.load(checkpoint)
    output = StageOutput(out, stage="reparam", config={}, inputs={})
    for file in source.files:
        if file != name:
            shutil.copyfile(checkpoint / file, output.partial / file)
    with RomReader(checkpoint / name) as reader:
        spec = dataclasses.replace(reader.spec, **changes)
    spec = dataclasses.replace(spec, row_stride=row_stride(spec.row_bytes, spec.addressing))
    with RomWriter(output.partial / name, spec) as writer:
        writer.write(np.ones((spec.num_rows, spec.row_dim), np.float32))
    output.finish(roles={file: entry.role for file, entry in source.files.items()}, metrics=source.metrics)
    return out


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
    tmp_path: Path, tokens_dir: Path, exported: Exported, changes: dict, expected: str
) -> None:
    checkpoint = respoil(exported["meki"][0], tmp_path / "spoiled", "rom.safetensors", **changes)
    what = what_of(checkpoint, tokens_dir, tmp_path / "out")
    assert expected in what and "meki-edge reparam" in what


def ragged(*counts: int) -> Ragged:
    """``counts`` rows for the first tokens, two for the others, 900 rows for all 384 together."""
    rest = np.full(384 - len(counts), 2)
    rest[: 900 - sum(counts) - rest.sum()] += 1
    return Ragged(np.concatenate(([0], np.cumsum([*counts, *rest]))))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("rom_2.safetensors", {"addressing": Identity()}, "the ROM's addressing is identity, the memories' is ragged"),
        ("rom_2.safetensors", {"addressing": ragged(9)}, "the ROM has up to 9 rows a token, the memories take 8"),
        (
            "rom_2.safetensors",
            {"addressing": Ragged(np.arange(0, 901, 3))},
            "the ROM has rows for 300 tokens, the model has 384",
        ),
        ("rom_2.safetensors", {"segments": segments((1, 0, 47))}, "the ROM's segments (layer, memory, dim) are"),
        ("rom_1.safetensors", {"tokenizer_sha256": "0" * 64}, "folded for another tokenizer"),
    ],
)
def test_rom_of_another_mixed_model(
    tmp_path: Path, tokens_dir: Path, mixed: tuple[Path, Path, Path], name: str, changes: dict, expected: str
) -> None:
    checkpoint = respoil(mixed[1], tmp_path / "spoiled", name, **changes)
    what = what_of(checkpoint, tokens_dir, tmp_path / "out")
    assert expected in what and "meki-edge reparam" in what


def test_rom_files_in_each_others_place(tmp_path: Path, tokens_dir: Path, mixed: tuple[Path, Path, Path]) -> None:
    source = manifest.load(mixed[1])
    roles = {name: entry.role for name, entry in source.files.items()}

    def copied(out: Path, roles: dict[str, str]) -> Path:
        output = StageOutput(out, stage="reparam", config={}, inputs={})
        for name in roles:
            shutil.copyfile(mixed[1] / name, output.partial / name)
        output.finish(roles=roles, metrics={})
        return out

    swapped = copied(tmp_path / "swapped", {**roles, "rom_1.safetensors": "rom_3", "rom_3.safetensors": "rom_1"})
    what = what_of(swapped, tokens_dir, tmp_path / "out")
    assert "the ROM is called rom_3.safetensors, the graphs ask for rom_1.safetensors" in what
    del roles["rom_3.safetensors"]
    what = what_of(copied(tmp_path / "short", roles), tokens_dir, tmp_path / "out")
    assert "0 files have the role 'rom_3'" in what


def test_truncated_rom(tmp_path: Path, tokens_dir: Path, exported: Exported) -> None:
    checkpoint = respoil(exported["meki"][0], tmp_path / "spoiled", "rom.safetensors")
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
