"""The worker processes of one compilation (:mod:`export.qnn_worker`), their log and their results.

The compiler and the NPU simulator are native code that can abort: one job a process, a crash is said
to be one, and a job whose result is there is not done again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from export.targets import Chip
from meki_edge.errors import UserError
from meki_edge.files import FREE_SPACE, read_json, storage_errors

LOG = "compile.log"
LOG_LINES = 5  # of the log's end, quoted in an error
WRITE_FAILED = "Failed to write context cache file"  # ONNX Runtime's words for a binary; it does not say why
FULL_BYTES = 1_000_000
"""What is free on a full disk, at the most: a write that fails leaves less than a block."""


class Jobs:
    """Jobs for one chip. Results and the log lie in ``directory``, which a resumed run finds again."""

    def __init__(self, directory: Path, target: Chip, optimization_level: int) -> None:
        self._directory = directory
        self._target = target
        self._options = [f"--soc-model={target.soc_model}", f"--optimization-level={optimization_level}"]

    def compile(self, models: Sequence[Path], out: Path, binary: str) -> dict[str, Any]:
        """Compile ``models`` into one binary, called ``binary`` + ``_qnn.bin``, that they share the weights of."""
        doing = f"compiling {' and '.join(model.name for model in models)} for {self._target.soc}"
        out.mkdir(exist_ok=True)
        return self._run("compile", doing, out / f"{binary}.json", out, [f"--binary={binary}", "--model", *models])

    def simulate(
        self, exported: Path, compiled: Path, roms: Sequence[Path], ids: Sequence[int], steps: int
    ) -> dict[str, Any]:
        """Run the binaries of ``compiled`` on ``ids`` and compare them with ONNX Runtime."""
        arguments = [f"--exported={exported}", f"--steps={steps}", "--ids", *map(str, ids), "--roms", *roms]
        result = self._directory / "simulator.json"
        return self._run("simulate", "the NPU simulator's check", result, compiled, arguments)

    @property
    def log(self) -> Path:
        """What the workers printed."""
        return self._directory / LOG

    def _run(self, job: str, doing: str, result: Path, out: Path, arguments: list[str | Path]) -> dict[str, Any]:
        if not result.is_file():  # the worker writes it last
            command = [sys.executable, "-m", "export.qnn_worker", job, f"--result={result}", f"--out={out}"]
            command += [f"--parent={os.getpid()}", *self._options, *arguments]
            with storage_errors(self.log), open(self.log, "a", encoding="utf-8") as file:
                file.write(f"== {doing}\n")
                file.flush()
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
            if done.returncode:
                raise self._failure(f"{doing} {_how_it_ended(done.returncode)}")
        return read_json(result)

    def _failure(self, what: str) -> UserError:
        """Why a worker ended is in its log, but for a full disk: the libraries name that nowhere."""
        free, tail = shutil.disk_usage(self._directory).free, _tail(self.log)
        said = f"the log ends with:\n{tail}"
        if free >= FULL_BYTES and WRITE_FAILED not in tail:
            fix = "read the log; more parts, a smaller --context-length or --prefill-tokens need less memory"
            return UserError(f"{what}; {said}", where=self.log, fix=fix)
        why = "the disk is full" if free < FULL_BYTES else "a file could not be written"
        return UserError(f"{what}: {why}, {free / 1e6:,.1f} MB are free; {said}", where=self._directory, fix=FREE_SPACE)


def _how_it_ended(return_code: int) -> str:
    if return_code < 0:
        return f"crashed (signal {signal.Signals(-return_code).name})"
    return f"failed (exit status {return_code})"


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-LOG_LINES:])
