"""A run stopped at a random moment, by any signal, ends in the same losses and weights."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import MEKI, tiny_config

from meki_edge import manifest
from meki_edge.errors import UserError
from meki_edge.manifest import Manifest
from meki_edge.model.config import to_json
from meki_edge.train import loop
from meki_edge.train.config import TrainConfig
from meki_edge.train.loop import train

CONFIG = {
    "steps": 100,
    "batch_size": 4,
    "window_length": 32,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 20,
    "learning_rate": 3e-3,
    "validate_every": 13,
    "validation_windows": 4,
    "checkpoint_every": 10,
    "precision": "bf16",
    "device": "cpu",
}
MODEL = tiny_config(MEKI)
SCRIPT = """
import json, sys
from pathlib import Path
from meki_edge.model.config import parse
from meki_edge.train.config import TrainConfig
from meki_edge.train.loop import train
tokens, out, model, config = sys.argv[1:]
train(Path(tokens), Path(out), parse(json.loads(model), "argv"), TrainConfig(**json.loads(config)))
"""


def without_times(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


def newest(checkpoints: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max((int(path.stem.split("-")[1]) for path in checkpoints.glob("step-*.safetensors")), default=0)


@pytest.fixture(scope="module")
def uninterrupted(tokens_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    out = tmp_path_factory.mktemp("resume") / "whole"
    return out, train(tokens_dir, out, MODEL, TrainConfig(**CONFIG))


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)],
)
def test_stopped_run_resumes_to_the_same_result(
    tokens_dir: Path, tmp_path: Path, uninterrupted: tuple[Path, Manifest], number: signal.Signals, exit_code: int
) -> None:
    out = tmp_path / "out"
    arguments = [str(tokens_dir), str(out), json.dumps(to_json(MODEL)), json.dumps(CONFIG)]
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stderr=subprocess.PIPE)
    checkpoints = out / ".partial" / "checkpoints"
    try:
        wanted = random.randint(1, 50)
        while newest(checkpoints) < wanted:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))
        os.kill(process.pid, number)
        assert process.wait(60) == exit_code
    finally:
        process.kill()
        process.stderr.close()
    assert not (out / manifest.FILE_NAME).exists()
    saved = newest(checkpoints)
    assert 0 < saved < CONFIG["steps"]
    if number != signal.SIGKILL:  # the checkpoint of the very step that was interrupted
        steps = [json.loads(line)["step"] for line in (out / ".partial" / "running.jsonl").read_text().splitlines()]
        assert saved == steps[-1]

    whole, expected = uninterrupted
    resumed = train(tokens_dir, out, MODEL, TrainConfig(**CONFIG))
    assert without_times(out) == without_times(whole)
    for name in ("model.safetensors", "config.json"):
        assert resumed.files[name].sha256 == expected.files[name].sha256


def test_a_run_killed_while_it_finishes(
    tokens_dir: Path, tmp_path: Path, uninterrupted: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "loss_plot", killed)
        train(tokens_dir, out, MODEL, TrainConfig(**CONFIG))
    assert not (out / manifest.FILE_NAME).exists()
    resumed = train(tokens_dir, out, MODEL, TrainConfig(**CONFIG))
    assert without_times(out) == without_times(uninterrupted[0])
    assert resumed.files["model.safetensors"].sha256 == uninterrupted[1].files["model.safetensors"].sha256


def test_a_full_disk_is_said_and_survived(
    tokens_dir: Path, tmp_path: Path, uninterrupted: tuple[Path, Manifest]
) -> None:
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match="cannot write the file: File too large") as caught:
            train(tokens_dir, out, MODEL, TrainConfig(**CONFIG))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step-00000010.safetensors" in caught.value.where
    assert list((out / ".partial" / "checkpoints").iterdir()) == []
    train(tokens_dir, out, MODEL, TrainConfig(**CONFIG))
    assert without_times(out) == without_times(uninterrupted[0])
