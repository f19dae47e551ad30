"""A bundle: the directory that `meki-edge pack` writes and that a device needs, opened and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meki_edge import console, graph_spec, manifest
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec

STAGE = "pack"
TOKENIZER_ROLE = "tokenizer"
QUIET_BYTES = 1 << 29  # checking less than this is over before a progress bar could be read


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle. ``metrics`` are those of its manifest: name, quality, sizes."""

    directory: Path
    name: str
    spec: GraphSpec
    metrics: dict[str, Any]
    tokenizer: Path
    tokenizer_sha256: str
    total_bytes: int


def open_bundle(directory: Path) -> Bundle:
    """Open a bundle after comparing every file with its digest.

    Raises:
        UserError: not a bundle, or one whose files were edited, truncated or lost.
    """
    found = manifest.load(directory, stages=(STAGE,))
    total = sum(entry.bytes for entry in found.files.values())
    if total < QUIET_BYTES:
        manifest.verify(directory, found)
    else:
        with console.byte_progress(f"checking {directory.name}", total) as advance:
            manifest.verify(directory, found, advance)
    tokenizer = found.file(directory, TOKENIZER_ROLE)
    spec_path = directory / graph_spec.FILE_NAME
    return Bundle(
        directory=directory,
        name=found.metrics["name"],
        spec=GraphSpec.from_json(read_json(spec_path), spec_path),
        metrics=found.metrics,
        tokenizer=tokenizer,
        tokenizer_sha256=found.files[tokenizer.name].sha256,
        total_bytes=total,
    )
