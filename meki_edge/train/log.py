"""``metrics.jsonl``: one JSON object a line, and a plot of it.

Training lines: ``step`` (1-based), ``loss`` (nats), ``learning_rate``, ``grad_norm`` (before
clipping), ``table_grad_norm`` (where tables are clipped apart), ``tokens`` (so far),
``tokens_per_s``. Validation lines: ``step``, ``validation_loss``.
Of these only ``tokens_per_s`` differs between two runs of the same configuration.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from meki_edge.files import storage_errors, write_text


class MetricsLog:
    """Append-only; opened at the step a run (re)starts from, later lines are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in read(path) if line["step"] <= step] if path.exists() else []
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # a line at a time, to be followed live

    def append(self, line: dict[str, Any]) -> None:
        """Write one line."""
        with storage_errors(self.path):
            self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Put every line on the disk; called before a checkpoint, so that none it covers is lost."""
        with storage_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that a killed process left unfinished is dropped."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
