"""What `meki-edge reparam` refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from folding import config
from safetensors.torch import load_file, save_file

from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.manifest import StageOutput
from meki_edge.reparam import reparam


def edit_weights(directory: Path, name: str, index: tuple[int, ...], value: float) -> None:
    """Change one element and let the manifest agree."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name][index] = value
    save_file(tensors, path, metadata={"format": "pt"})
    record(directory)


def record(directory: Path) -> None:
    """Bring the manifest's sizes and digests up to date with the files."""
    path = directory / "manifest.json"
    values = json.loads(path.read_text())
    for name, entry in values["files"].items():
        entry |= {"bytes": (directory / name).stat().st_size, "sha256": sha256_file(directory / name)}
    path.write_text(json.dumps(values))


def test_a_dense_checkpoint_has_nothing_to_fold(dense_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the checkpoint is dense: there is nothing to fold") as caught:
        reparam(dense_checkpoint, tokens_dir, tmp_path / "rom", config())
    assert "meki-edge export" in caught.value.fix and not (tmp_path / "rom").exists()


def test_folding_twice_is_refused(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config())
    with pytest.raises(UserError, match="folded already"):
        reparam(tmp_path / "rom", tokens_dir, tmp_path / "again", config())
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"table_precision": "int7"}, "unknown codec 'int7'; did you mean"),
        ({"proof_windows": 0}, "proof_windows is 0"),
        ({"window_length": -3}, "window_length is -3"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
        ({"window_length": 10**9}, "the validation split has"),
    ],
)
def test_bad_options(
    meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path, changes: dict[str, object], what: str
) -> None:
    with pytest.raises(UserError) as caught:
        reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config(**changes))
    assert caught.value.what.startswith(what) and not (tmp_path / "rom").exists()


def test_directories_of_other_stages_are_refused(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this is the output of `meki-edge tokenize`"):
        reparam(tokens_dir, tokens_dir, tmp_path / "rom", config())
    with pytest.raises(UserError, match="this is the output of `meki-edge train`"):
        reparam(meki_checkpoint, meki_checkpoint, tmp_path / "rom", config())
    with pytest.raises(UserError, match="no manifest.json is here"):
        reparam(tmp_path, tokens_dir, tmp_path / "rom", config())


def test_changed_weights_are_found(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    with open(meki_checkpoint / "model.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(UserError, match="the contents changed"):
        reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config())
    assert not (tmp_path / "rom").exists()


def test_another_tokenizers_tokens_are_refused(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    output = StageOutput(tmp_path / "tokens", stage="tokenize", config={}, inputs={})
    for name in ("train.bin", "validation.bin"):
        (output.partial / name).write_bytes((tokens_dir / name).read_bytes())
    (output.partial / "tokenizer.json").write_text("{}")
    output.finish(
        roles={"tokenizer.json": "tokenizer", "train.bin": "train_tokens", "validation.bin": "validation_tokens"},
        metrics={"token_bytes": 2, "vocab_size": 384, "eos_token_id": 0},
    )
    with pytest.raises(UserError, match="another tokenizer"):
        reparam(meki_checkpoint, tmp_path / "tokens", tmp_path / "rom", config())


def test_a_value_that_the_precision_cannot_hold(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    edit_weights(meki_checkpoint, "model.layers.1.memories.0.mix_norm.weight", (3,), 1e6)
    with pytest.raises(UserError, match=r"row \d+, layer 1 memory 0: a value is too large for float16") as caught:
        reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config(table_precision="fp16"))
    assert "--table-precision" in caught.value.fix
    assert not (tmp_path / "rom" / "manifest.json").exists()
    reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config(table_precision="int8"), force=True)


def test_nan_in_a_table_names_its_row(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    edit_weights(meki_checkpoint, "model.layers.2.memories.0.table", (123, 4), float("nan"))
    with pytest.raises(UserError, match="row 123, layer 2 memory 0: a value is NaN or infinite"):
        reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config())


def test_a_proof_that_fails_leaves_no_rom(meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path) -> None:
    """NaN in the backbone makes every comparison fail."""
    edit_weights(meki_checkpoint, "model.layers.2.mlp.up_proj.weight", (0, 0), float("nan"))
    with pytest.raises(UserError, match="the folded model is not the trained one: logits differ by nan"):
        reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config())
    assert list((tmp_path / "rom").rglob("*")) == []
