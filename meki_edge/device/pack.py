"""`meki-edge pack`: one directory that is all a device needs.

Graphs with their weights, the embedding, the tokenizer, the ROM and, where there is one, the NPU
binary. Each file is hashed while it is copied, so what was edited since its stage ran is caught
without a second pass. Before that, everything that must fit together is compared: the export
came from this checkpoint, the ROM from the same one, and ROM, embedding, tokenizer and graphs
agree on ids and widths.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meki_edge import console, graph_spec, manifest
from meki_edge.config import to_dict
from meki_edge.device import bundle
from meki_edge.errors import UserError
from meki_edge.files import BLOCK_BYTES, read_json, require_free_space, storage_errors, write_json
from meki_edge.graph_spec import GraphSpec, RowFile
from meki_edge.manifest import FileEntry, Manifest, StageOutput
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import RomSpec

EXPORTED_ROLES = ("prefill_graph", "decode_graph", "weights", "embedding", bundle.TOKENIZER_ROLE)
COMPILED_ROLES = ("prefill_context", "prefill_binary", "decode_context", "decode_binary")
ROM_ROLE = "rom"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._+-]*")  # it names files and columns
CARRIED_METRICS = ("validation_loss", "validation_tokens", "ram_parameters")


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    """Options of `meki-edge pack`."""

    name: str | None = None
    """What reports call this arm; by default the kinds of its memories ("meki"), or "dense"."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One file to copy: from where, as what, and what its stage said about it."""

    path: Path
    name: str
    entry: FileEntry


def pack(
    exported: Path,
    checkpoint: Path,
    out: Path,
    config: PackConfig,
    *,
    compiled: Path | None = None,
    force: bool = False,
) -> Manifest:
    """Write the bundle of ``exported`` (graphs) and ``checkpoint`` (dense, or in ROM form) into ``out``.

    Raises:
        UserError: the directories do not belong together, a file changed since its stage wrote
            it, the ROM or the embedding does not fit the graphs, or the disk is too full.
    """
    export_manifest = manifest.load(exported, stages=("export",))
    checkpoint_manifest = manifest.load(checkpoint, stages=("train", "reparam"))
    _require_made_from(export_manifest, exported, checkpoint, "export")
    spec, rom = _cross_check(exported, export_manifest, checkpoint, checkpoint_manifest)
    sources = _listed(exported, export_manifest, EXPORTED_ROLES)
    if rom is not None:
        sources += _listed(checkpoint, checkpoint_manifest, (ROM_ROLE,))
    inputs = {"export": exported, "checkpoint": checkpoint}
    if compiled is not None:
        compiled_manifest = manifest.load(compiled, stages=("compile",))
        _require_made_from(compiled_manifest, compiled, exported, "compile")
        sources += _listed(compiled, compiled_manifest, COMPILED_ROLES, prefix="npu/")
        inputs["compile"] = compiled
    name = _default_name(checkpoint) if config.name is None else config.name
    if not NAME.fullmatch(name):
        fix = "use letters, digits and . _ + -, starting with a letter"
        raise UserError(f"{name!r} cannot name a bundle", where="--name", fix=fix)

    output = StageOutput(out, stage=bundle.STAGE, config={"name": name}, inputs=inputs, force=force)
    if output.complete is not None:
        return output.complete
    _copy_all(sources, output.partial, name)
    write_json(output.partial / graph_spec.FILE_NAME, to_dict(spec))
    carried: dict[str, Any] = {key: checkpoint_manifest.metrics.get(key) for key in CARRIED_METRICS}
    return output.finish(
        roles={graph_spec.FILE_NAME: "graph_spec", **{source.name: source.entry.role for source in sources}},
        metrics={"name": name, **carried, **_sizes(spec, rom, sources)},
    )


def _listed(directory: Path, made: Manifest, roles: tuple[str, ...], prefix: str = "") -> list[_Source]:
    """The files of a stage that play one of ``roles``, to be copied under ``prefix``."""
    return [
        _Source(path=directory / name, name=prefix + name, entry=entry)
        for name, entry in made.files.items()
        if entry.role in roles
    ]


def _require_made_from(made: Manifest, directory: Path, source: Path, stage: str) -> None:
    """An output that was made from another ``source`` than the one given is an error."""
    expected = manifest.digest(source)
    if expected not in {entry.sha256 for entry in made.inputs.values()}:
        used = ", ".join(f"{role} {entry.path}" for role, entry in made.inputs.items())
        raise UserError(
            f"this {stage} was not made from {source} as it is now",
            where=directory,
            fix=f"give the directory it was made from ({used}), or run `meki-edge {stage}` again",
        )


def _cross_check(
    exported: Path, export_manifest: Manifest, checkpoint: Path, checkpoint_manifest: Manifest
) -> tuple[GraphSpec, RomSpec | None]:
    """Check that graphs, tokenizer, embedding and ROM fit; the graph spec with its ROM filled in."""
    spec_path = export_manifest.file(exported, "graph_spec")
    if not spec_path.is_file() or manifest.digest(spec_path) != export_manifest.files[spec_path.name].sha256:
        raise _changed(spec_path)
    spec = GraphSpec.from_json(read_json(spec_path), spec_path)
    tokenizer = export_manifest.file(exported, bundle.TOKENIZER_ROLE)
    expected = {
        "num_rows": spec.vocab_size,
        "tokenizer_sha256": export_manifest.files[tokenizer.name].sha256,
    }
    wanted = spec.decode.by_role("memory_rows")
    has_rom = checkpoint_manifest.has(ROM_ROLE)
    if len(wanted) != has_rom:
        raise UserError(
            f"the graphs take {len(wanted)} inputs of memory rows, the checkpoint has {int(has_rom)} ROM files",
            where=checkpoint,
            fix="export the checkpoint that `meki-edge reparam` wrote, and give the same one to pack",
        )
    rom = None
    if has_rom:
        path = checkpoint_manifest.file(checkpoint, ROM_ROLE)
        rom = _check_rows(path, {"row_dim": wanted[0].shape[-1], **expected}, "meki-edge reparam")
        spec = dataclasses.replace(spec, roms=(RowFile(file=path.name, row_dim=rom.row_dim),))
    embedding = {"row_dim": spec.hidden_size, "source_sha256": manifest.digest(checkpoint), **expected}
    _check_rows(exported / spec.embedding.file, embedding, "meki-edge export")
    return spec, rom


def _check_rows(path: Path, expected: dict[str, Any], command: str) -> RomSpec:
    """Read the header of a ROM file (or embedding) and compare it with what the graphs need."""
    with RomReader(path) as reader:
        header = reader.spec
    for field, value in expected.items():
        found = getattr(header, field)
        if found != value:
            raise UserError(
                f"{field} is {found}, the exported model needs {value}", where=path, fix=f"run `{command}` again"
            )
    return header


def _default_name(checkpoint: Path) -> str:
    """ "dense", or the kinds of the checkpoint's memories. Its config.json was checked by export."""
    memories = read_json(checkpoint / "config.json").get("memories", [])
    kinds = list(dict.fromkeys(placement["kind"] for placement in memories))
    return "+".join(kinds) or "dense"


def _copy_all(sources: list[_Source], directory: Path, name: str) -> None:
    total = sum(source.entry.bytes for source in sources)
    require_free_space(directory, total, f"the bundle {name!r}")
    with console.byte_progress(f"packing {name}", total) as advance:
        for source in sources:
            _copy(source, directory / source.name, advance)


def _copy(source: _Source, target: Path, advance: Callable[[int], None]) -> None:
    """Copy one file and compare what was read with its stage's manifest."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    if not source.path.is_file():
        raise _changed(source.path)
    with storage_errors(target), open(source.path, "rb", buffering=0) as reader, open(target, "wb") as writer:
        while block := reader.read(BLOCK_BYTES):
            writer.write(block)
            digest.update(block)
            advance(len(block))
    if digest.hexdigest() != source.entry.sha256:
        raise _changed(source.path)


def _changed(path: Path) -> UserError:
    what = "the contents changed since the manifest was written (SHA-256)" if path.is_file() else "the file is missing"
    return UserError(what, where=path, fix="rerun the stage that wrote it with --force")


def _sizes(spec: GraphSpec, rom: RomSpec | None, sources: list[_Source]) -> dict[str, Any]:
    """The metrics that a decision needs beside quality."""
    return {
        "rom_bytes": sum(source.entry.bytes for source in sources if source.entry.role == ROM_ROLE),
        "rom_bytes_per_token": rom.row_stride if rom else 0,
        "table_precision": "+".join(dict.fromkeys(segment.codec for segment in rom.segments)) if rom else None,
        "weights_bytes": sum(s.entry.bytes for s in sources if s.entry.role in ("weights", "embedding")),
        "vocab_size": spec.vocab_size,
        "context_length": spec.context_length,
    }
