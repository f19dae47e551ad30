"""The accuracy gate: what it measures, what does not pass it, and what it says of little text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from calibration_outputs import LENIENT, decoder_of, replace_shard, spec_of
from tiny import QUICK_CALIBRATION as QUICK
from torch.nn import functional as F

from calibration.config import CalibrateConfig
from calibration.gate import Accuracy, limits
from calibration.stage import calibrate
from export.onnx_decoder import cpu_sessions
from meki_edge import manifest, tokens
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.manifest import PARTIAL
from meki_edge.model.checkpoint import load_model
from meki_edge.model.rom_rows import rom_rows
from meki_edge.rom.reader import RomReader

Exported = dict[str, tuple[Path, Path]]
Mixed = tuple[Path, Path, Path]


def test_the_gate_measures_what_it_says(calibrated: Path, mixed: Mixed, tokens_dir: Path) -> None:
    """Float perplexity against PyTorch; agreement by running both graphs here."""
    _, folded, exported = mixed
    made = manifest.load(calibrated)
    text = tokens.open_shards(tokens_dir).validation_windows(2, 40)
    model = load_model(folded)
    readers = [RomReader(folded / rom.file) for rom in spec_of(exported).roms]
    losses, agree = [], []
    for ids in text:
        batch = torch.from_numpy(ids)[None]
        with torch.inference_mode():
            logits = model(batch, rows=rom_rows(model.config, readers, batch))[0]
        losses.append(F.cross_entropy(logits[:-1].double(), batch[0, 1:]).item())
        decoder, graphs = decoder_of(calibrated, calibrated), spec_of(calibrated).graphs
        prefill, decode = (cpu_sessions(calibrated, graphs[name]) for name in ("prefill", "decode"))
        found = [*decoder.prefill(prefill, ids[:37]), *(decoder.decode(decode, token) for token in ids[37:])]
        agree.append(np.stack(found).argmax(axis=-1) == logits.numpy().argmax(axis=-1))
    assert made.metrics["float_perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert made.metrics["tokens"] == 80
    assert made.metrics["top1_agreement"] == pytest.approx(np.mean(agree), abs=0.026), "fused kernels may differ"
    assert made.metrics["top1_agreement"] > 0.97
    assert abs(made.metrics["perplexity_increase"]) < 0.01


def test_a_gate_that_is_not_passed(tmp_path: Path, base: Path, exported: Exported, tokens_dir: Path) -> None:
    checkpoint, directory = exported["meki"]

    def run(out: str, **limits: float) -> manifest.Manifest:
        config = CalibrateConfig(precision="w4a16", **QUICK, **limits)
        return calibrate(directory, checkpoint, tokens_dir, tmp_path / out, config, ranges_from=base)

    with pytest.raises(UserError) as caught:
        run("out", max_perplexity_increase=-0.9, min_top1_agreement=1.0)
    assert "the accuracy gate failed: perplexity increase is" in caught.value.what
    assert "top-1 agreement is" in caught.value.what and "the limit is 1.0000" in caught.value.what
    page = Path(caught.value.where)
    assert page.is_file() and "NO" in page.read_text(encoding="utf-8")
    assert page.parent.name == PARTIAL and not (tmp_path / "out/manifest.json").exists()
    found = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert [limit["met"] for limit in found["limits"]] == [False, False]
    made = run("out", **LENIENT)
    assert made.metrics["precision"] == "w4a16", "limits only judge: the same work passes with others"
    with pytest.raises(UserError, match="the accuracy gate failed"):
        run("out", max_perplexity_increase=-0.9)


def test_a_gate_that_sees_little_says_so(
    tmp_path: Path, base: Path, exported: Exported, tokens_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, directory = exported["meki"]
    short = tmp_path / "short"
    shutil.copytree(tokens_dir, short)
    replace_shard(short, tokens.VALIDATION, tokens.open_shards(tokens_dir).validation[:130])
    config = CalibrateConfig(sensitivity=False, **{**QUICK, "gate_windows": 9}, **LENIENT)
    made = calibrate(directory, checkpoint, short, tmp_path / "out", config)
    told = " ".join(capsys.readouterr().err.split())
    assert "the validation text has 3 windows of 40 tokens: the gate sees those, not 9" in told
    assert "the gate sees 120 tokens, and fewer than 2,000 say little" in told
    assert (made.metrics["gate_windows"], made.metrics["tokens"]) == (3, 120)
    notes = read_json(tmp_path / "out/calibration_report.json")["notes"]
    assert len(notes) == 3 and " ".join(notes[1:]) in told


def test_a_perplexity_that_falls_is_no_proof() -> None:
    """Exit codes are those of the limit alone; what is said is that chance met it."""

    def found(perplexity: float, limit: float) -> tuple[bool, bool]:
        accuracy = Accuracy(
            tokens=9, float_perplexity=10.0, perplexity=perplexity, top1_agreement=1.0, decode_top1_agreement=1.0
        )
        first, second = limits(accuracy, max_perplexity_increase=limit, min_top1_agreement=0.5)
        assert second.is_clear
        return first.met, first.is_clear

    assert found(10.5, 0.1) == found(9.5, 0.1) == found(9.95, 0.0) == (True, True)
    assert found(8.9, 0.1) == found(9.8, 0.0) == (True, False)
    assert found(11.5, 0.1) == (False, True)
