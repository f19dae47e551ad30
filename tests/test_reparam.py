"""`meki-edge reparam` end to end on tiny checkpoints, and its proof against the ordinary forward pass."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import MEKI, tiny_config, write_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from meki_edge import manifest, reparam_proof
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.manifest import StageOutput
from meki_edge.model.checkpoint import Checkpoint, load_model
from meki_edge.model.validation import validation_loss
from meki_edge.model.rom_rows import RomRows, rom_rows
from meki_edge.model.row_spaces import row_spaces
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.reparam_fold import KEPT, Folder
from meki_edge.reparam_proof import LayerRows, Windows, prove, stored_rows, streamed_hidden, training_rows
from meki_edge.rom import inspect
from meki_edge.rom.reader import RomReader
from meki_edge.tokens import open_shards
from meki_edge.train.config import TrainConfig
from meki_edge.train.loop import train

ROM = "rom.safetensors"
WINDOWS, LENGTH = 5, 48
TOLERANCE = {"fp32": 1e-6, "fp16": 3e-3, "int8": 0.05, "int4": 1.0}  # logits of this tiny model reach about 2.5


def config(**changes: object) -> ReparamConfig:
    return ReparamConfig(**{"proof_windows": WINDOWS, "window_length": LENGTH, "chunk_rows": 100, **changes})


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


def test_an_interrupted_run_resumes(
    meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reparam(meki_checkpoint, tokens_dir, tmp_path / "whole", config(chunk_rows=50))
    fold, starts = Folder.fold, []

    def interrupted(self: Folder, start: int, stop: int) -> np.ndarray:
        starts.append(start)
        if start == 200 and len(starts) == 5:
            raise KeyboardInterrupt
        return fold(self, start, stop)

    monkeypatch.setattr(Folder, "fold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config(chunk_rows=50))
    assert os.listdir(tmp_path / "rom") == [".partial"]
    with pytest.raises(UserError, match="has not finished"):
        manifest.load(tmp_path / "rom")
    with pytest.raises(UserError, match="unfinished work of another run: config.table_precision was"):
        reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config(chunk_rows=50, table_precision="int4"))
    done = reparam(meki_checkpoint, tokens_dir, tmp_path / "rom", config(chunk_rows=50))
    assert starts == [0, 50, 100, 150, 200, 200, 250, 300, 350]
    assert done.files == whole.files and done.metrics == whole.metrics


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from test_reparam import config, reparam
reparam(*map(Path, sys.argv[1:4]), config(table_precision="int8", chunk_rows=1))
"""


def test_killed_half_way_leaves_no_manifest_and_resumes(
    meki_checkpoint: Path, tokens_dir: Path, tmp_path: Path
) -> None:
    """SIGKILL while rows are being folded."""
    out = tmp_path / "rom"
    command = [sys.executable, "-c", RUN, meki_checkpoint, tokens_dir, out, Path(__file__).parent]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    partial = out / ".partial" / f".{ROM}.partial"
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.stat().st_size > 4096 + 3 * 64):
        assert process.poll() is None and time.monotonic() < deadline, "folding never began"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.listdir(out) == [".partial"]
    assert (out / ".partial" / f".{KEPT.format(ROM)}.partial").exists()
    done = reparam(meki_checkpoint, tokens_dir, out, config(table_precision="int8", chunk_rows=1))
    whole = reparam(meki_checkpoint, tokens_dir, tmp_path / "whole", config(table_precision="int8", chunk_rows=1))
    assert done.files == whole.files and done.metrics == whole.metrics


@pytest.mark.parametrize(("limit", "name"), [(150_000, "model.safetensors"), (300_000, ROM)])
def test_a_full_disk(tokens_dir: Path, tmp_path: Path, limit: int, name: str) -> None:
    """A real failing write: the process may not write files of more than ``limit`` bytes."""
    memories = [{"kind": "meki", "layers": [0, 1, 2], "options": {"memory_dim": 64}}]
    checkpoint = write_checkpoint(tmp_path / "training", tiny_config(memories, eos_token_id=0), tokens_dir)
    script = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from meki_edge.errors import UserError
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_reparam import config, reparam
try:
    reparam(*map(Path, sys.argv[1:4]), config(table_precision="fp32", chunk_rows=50))
except UserError as error:
    print(error.what, "|", Path(error.where).name)
"""
    out = tmp_path / "rom"
    command = [sys.executable, "-c", script, checkpoint, tokens_dir, out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == f"cannot write the file: File too large | {name}", done.stderr
    assert os.listdir(out) == [".partial"] and not (out / ".partial" / name).exists()
    reparam(checkpoint, tokens_dir, out, config(table_precision="fp32", chunk_rows=50))
    inspect.verify(out / ROM)


def test_memory_does_not_grow_with_the_vocabulary(tokens_dir: Path, tmp_path: Path) -> None:
    """10 times the ids, 110 MB more of tables and embeddings: less than 30 MB more at the peak."""
    sizes = {"small": 20_000, "large": 200_000}
    memories = [{"kind": "meki", "layers": [0, 1, 2], "options": {"memory_dim": 40}}]
    for name, vocab_size in sizes.items():
        model = tiny_config(memories, eos_token_id=0, vocab_size=vocab_size)
        write_checkpoint(tmp_path / name, model, tokens_dir)
    script = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from meki_edge import reparam as stage, reparam_fold, reparam_proof
from test_reparam import config, reparam
options = config(chunk_rows=1024, proof_windows=1)
# What a slice may take, made small beside what the larger tables take.
stage.COPY_BYTES = reparam_fold.FOLD_BYTES = 1 << 20
reparam_proof.ROW_ELEMENTS = reparam_proof.SLICE_ELEMENTS = 1 << 18
for name in ("small", "large"):
    directory = Path({str(tmp_path)!r})
    reparam(directory / name, Path({str(tokens_dir)!r}), directory / f"{{name}}-rom", options)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert large - small < 30e6
