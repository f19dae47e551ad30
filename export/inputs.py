"""Opening what a stage of this package reads, and checking that it belongs together."""

from __future__ import annotations

from pathlib import Path

from meki_edge import console, manifest, tokens
from meki_edge.errors import UserError
from meki_edge.manifest import Manifest
from meki_edge.tokens import TokenShards

QUIET_BYTES = 1 << 29  # checking less than this is over before a progress bar could be read


def open_directory(directory: Path, stages: tuple[str, ...]) -> Manifest:
    """The manifest of a stage's output, after comparing every file with its digest.

    Raises:
        UserError: not the output of one of ``stages`` (of any, if none is given), or its files changed.
    """
    found = manifest.load(directory, stages=stages)
    total = sum(entry.bytes for entry in found.files.values())
    if total < QUIET_BYTES:
        manifest.verify(directory, found)
    else:
        with console.byte_progress(f"checking {directory.name}", total) as advance:
            manifest.verify(directory, found, advance)
    return found


def check_whole(path: Path) -> None:
    """Compare a directory that a stage wrote, or is writing, with its manifest; a bare one, or a file, is as it is.

    Raises:
        UserError: the stage has not finished, or files changed since.
    """
    if any((path / name).exists() for name in (manifest.FILE_NAME, manifest.PARTIAL)):
        open_directory(path, stages=())


def open_tokens(directory: Path, model: Manifest, model_directory: Path) -> TokenShards:
    """The tokens directory, which must have been made with the tokenizer of ``model``.

    Raises:
        UserError: not a tokens directory, its files changed, or another tokenizer.
    """
    shards = tokens.open_shards(directory)
    own = model.files[model.file(model_directory, "tokenizer").name]
    if own.sha256 != shards.tokenizer_sha256:
        raise UserError(
            f"the tokens were made with another tokenizer than that of {model_directory} (SHA-256)",
            where=directory,
            fix="give the tokens directory that the model was trained on",
        )
    return shards
