"""`verify --checkpoint`: the fold of a checkpoint is recognised, and whatever is not it is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import MEKI, MIXED, tiny_config, write_checkpoint
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from meki_edge import cli, manifest, reparam_check
from meki_edge.errors import UserError
from meki_edge.graph_spec import Quantization
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.reparam_check import check_folds
from meki_edge.rom import inspect
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import TABLE_PRECISIONS
from meki_edge.rom.transcode import transcode


def fold(trained: Path, tokens: Path, out: Path, precision: str, checksums: bool = False) -> Path:
    config = ReparamConfig(table_precision=precision, proof_windows=1, window_length=32, checksums=checksums)
    reparam(trained, tokens, out, config)
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokens_dir: Path) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("trained") / "meki", tiny_config(MEKI, eos_token_id=0), tokens_dir)


@pytest.fixture(scope="module")
def folded(trained: Path, tokens_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fold(trained, tokens_dir, tmp_path_factory.mktemp("folded") / "rom", "int8")


@pytest.mark.parametrize("precision", TABLE_PRECISIONS)
def test_a_fold_is_recognised_in_every_codec(
    trained: Path, tokens_dir: Path, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the rows are folded in other numbers at a time than they were."""
    rom = fold(trained, tokens_dir, tmp_path / "rom", precision, checksums=True) / "rom.safetensors"
    assert inspect.describe(rom)["checksums"] and inspect.verify(rom) == 384
    monkeypatch.setattr(reparam_check, "CHUNK_ROWS", 100)
    found = check_folds([rom], trained, all_rows=True)["rom.safetensors"]
    assert found.rows == 384 and found.mismatches == ()


def test_every_addressing(mixed: tuple[Path, Path, Path]) -> None:
    trained, folded, _ = mixed
    roms = sorted(folded.glob("rom*.safetensors"))
    found = check_folds(roms, trained, all_rows=True)
    assert set(found) == {rom.name for rom in roms} and len(roms) == 4
    for rom in roms:
        with RomReader(rom) as reader:
            assert found[rom.name].rows == reader.spec.num_rows and found[rom.name].mismatches == ()


def test_a_sample_is_spread_over_the_file(trained: Path, folded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reparam_check, "STRETCHES", 5)
    monkeypatch.setattr(reparam_check, "STRETCH_ROWS", 4)
    assert check_folds([folded / "rom.safetensors"], trained, all_rows=False)["rom.safetensors"].rows == 20
    with RomReader(folded / "rom.safetensors") as reader:
        stretches = reparam_check._stretches(reader.spec, False)
    assert stretches == [(0, 4), (95, 99), (190, 194), (285, 289), (380, 384)]


def altered(rom: Path, path: Path, row: int, segment: int, step: int) -> Path:
    """One element of one segment moved by ``step`` integers, to the nearest that there are."""
    shutil.copyfile(rom, path)
    with RomReader(rom) as reader:
        spec = reader.spec
        offset = spec.segments[segment].offset + 2 + 5
        code = int(reader.raw(np.array([row]))[0, offset : offset + 1].view(np.int8)[0])
    moved = code + step if code + step <= 127 else code - step
    with open(path, "r+b") as file:
        file.seek(4096 + row * spec.row_stride + offset)
        file.write(np.int8(moved).tobytes())
    return path


def test_a_changed_element_is_named_by_token_and_layer(trained: Path, folded: Path, tmp_path: Path) -> None:
    path = altered(folded / "rom.safetensors", tmp_path / "rom.safetensors", 211, 2, 2)
    found = check_folds([path], trained, all_rows=True)["rom.safetensors"]
    assert [(wrong.row, wrong.name) for wrong in found.mismatches] == [(211, "token 211, layer 2 memory 0")]
    assert found.mismatches[0].difference > 0


def test_rows_are_named_by_their_tokens(mixed: tuple[Path, Path, Path]) -> None:
    names = []
    for rom in sorted(mixed[1].glob("rom*.safetensors")):
        with RomReader(rom) as reader:
            addressing = reader.spec.addressing
            names.append(addressing.name_of(7))
            if addressing.kind == "ragged":
                row_ids, counts = addressing.row_ids(np.arange(reader.spec.num_tokens), np.empty(0, np.int64))
                token = int(np.argmax(counts > 2))
                assert addressing.name_of(int(row_ids[token, 2])) == f"token {token}, its row 2"
    assert "token 7" in names and "row 7 of the hash heads" in names


def test_the_command(trained: Path, folded: Path, tmp_path: Path) -> None:
    arguments = ["verify", str(folded), "--checkpoint", str(trained)]
    good = CliRunner().invoke(cli.app, arguments)
    assert good.exit_code == 0 and "rom.safetensors: 384 rows are what the checkpoint folds to" in good.stdout
    path = altered(folded / "rom.safetensors", tmp_path / "rom.safetensors", 30, 0, 9)
    bad = CliRunner().invoke(cli.app, ["verify", str(path), "--checkpoint", str(trained), "--all", "--json"])
    assert isinstance(bad.exception, UserError) and "are not what the checkpoint folds to" in bad.exception.what
    folds = json.loads(bad.stdout)["folds"]["rom.safetensors"]
    assert folds["rows"] == 384 and [wrong["row"] for wrong in folds["mismatches"]] == [30]
    told = CliRunner().invoke(cli.app, ["verify", str(path), "--checkpoint", str(trained)])
    assert "rom.safetensors: token 30, layer 0 memory 0 differs by" in told.stdout


def test_a_directory_without_rows_to_compare(
    trained: Path, exported: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export's embedding is no ROM; nothing is read before that is said."""
    monkeypatch.setattr(manifest, "first_change", None)
    for directory, stage in ((exported["meki"][1], "export"), (exported["dense"][0], "train")):
        done = CliRunner().invoke(cli.app, ["verify", str(directory), "--checkpoint", str(trained)])
        assert isinstance(done.exception, UserError) and done.exception.where == str(directory)
        assert f"`meki-edge {stage}` wrote no ROM file here" in done.exception.what
        assert "leave out --checkpoint" in done.exception.fix


def test_reparam_stores_no_static_rows(trained: Path, tokens_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="static16 needs a calibrated range"):
        fold(trained, tokens_dir, tmp_path / "rom", "static16")
    assert not (tmp_path / "rom").exists()


def test_another_models_file_is_said(trained: Path, folded: Path, tokens_dir: Path, tmp_path: Path) -> None:
    rom = folded / "rom.safetensors"
    other = write_checkpoint(tmp_path / "other", tiny_config(MEKI, eos_token_id=0), tokens_dir, seed=5)
    with pytest.raises(UserError, match="it was made from another weights file"):
        check_folds([rom], other, all_rows=False)
    with pytest.raises(UserError, match="the checkpoint has no tables to fold"):
        check_folds([rom], folded, all_rows=False)
    transcode(rom, tmp_path / "static.safetensors", "static8", Quantization(scale=0.1, zero_point=128))
    with pytest.raises(UserError, match="quantized again after they were folded"):
        check_folds([tmp_path / "static.safetensors"], trained, all_rows=False)


def test_a_checkpoint_that_changed_is_said(trained: Path, folded: Path, tmp_path: Path) -> None:
    """Its manifest finds it; where the manifest says what the weights are now, the rows are compared and differ."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.memories.0.table"][40] += 0.5
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(UserError):
        check_folds([folded / "rom.safetensors"], copy, all_rows=True)
    made = json.loads((copy / manifest.FILE_NAME).read_text())
    listed = made["files"]["model.safetensors"]
    listed["sha256"], listed["bytes"] = manifest.digest(copy / "model.safetensors"), (copy / "model.safetensors").stat().st_size
    (copy / manifest.FILE_NAME).write_text(json.dumps(made))
    path = tmp_path / "rom.safetensors"
    contents = (folded / "rom.safetensors").read_bytes()
    with RomReader(folded / "rom.safetensors") as reader:
        path.write_bytes(contents.replace(reader.spec.source_sha256.encode(), listed["sha256"].encode()))
    found = check_folds([path], copy, all_rows=True)["rom.safetensors"]
    assert [wrong.name for wrong in found.mismatches] == ["token 40, layer 1 memory 0"]
