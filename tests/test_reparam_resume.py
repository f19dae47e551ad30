"""`meki-edge reparam` interrupted, killed, on a full disk, and with a large vocabulary."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from folding import ROM, config
from tiny import tiny_config, write_checkpoint

from meki_edge import manifest
from meki_edge.errors import UserError
from meki_edge.reparam import reparam
from meki_edge.reparam_fold import KEPT, Folder
from meki_edge.rom import inspect


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
from folding import config
from meki_edge.reparam import reparam
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
from folding import config
from meki_edge.reparam import reparam
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
from folding import config
from meki_edge.reparam import reparam
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
