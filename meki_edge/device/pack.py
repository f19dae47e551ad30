"""`meki-edge pack`: one directory that is all a device needs.

Graphs with their weights, the embedding, the tokenizer, the ROM files and, where there is one, the
NPU binary. Each file is hashed while it is copied, so what was edited since its stage ran is caught
without a second pass. Before that, everything that must fit together is compared: the export came
from this checkpoint, the ROM files from the same one, and ROM files, embedding, tokenizer and graphs
agree on ids, addresses and widths.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meki_edge import console, manifest
from meki_edge.device import bundle
from meki_edge.errors import UserError
from meki_edge.files import BLOCK_BYTES, read_json, require_free_space, sha256_file, storage_errors
from meki_edge.graph_spec import GraphSpec, RowFile
from meki_edge.manifest import FileEntry, Manifest, StageOutput
from meki_edge.rom.reader import RomReader
from meki_edge.rom.spec import RomSpec

WEIGHTS_ROLE = re.compile(r"weights(_\d+)?|embedding")
GRAPH_NAME = r"(prefill|decode)(_c\d+)?"
EXPORTED_ROLE = re.compile(rf"graph_spec|{GRAPH_NAME}_graph(_\d+)?|{WEIGHTS_ROLE.pattern}|{bundle.TOKENIZER_ROLE}")
COMPILED_ROLE = re.compile(rf"{GRAPH_NAME}_context(_\d+)?|({GRAPH_NAME}|model)_binary(_\d+)?")
ROM_ROLE = re.compile(r"rom(_\d+)?")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._+-]*")  # it names files and columns
NPU_METRICS = ("chipset", "hexagon_arch", "qnn_sdk_version")  # what a phone must have for the binary
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

    Args:
        exported: output of `meki-edge export`, or of `meki-edge calibrate`, whose ROM files then replace those
            of the checkpoint.

    Raises:
        UserError: the directories do not belong together, a file changed since its stage wrote
            it, the ROM or the embedding does not fit the graphs, or the disk is too full.
    """
    export_manifest = manifest.load(exported, stages=("export", "calibrate"))
    checkpoint_manifest = manifest.load(checkpoint, stages=("train", "reparam"))
    _require_made_from(export_manifest, exported, checkpoint, export_manifest.stage)
    tables = _listed(exported, export_manifest, ROM_ROLE)
    replaced = {source.name for source in tables}
    tables += [source for source in _listed(checkpoint, checkpoint_manifest, ROM_ROLE) if source.name not in replaced]
    spec, roms = _cross_check(exported, export_manifest, checkpoint, tables)
    sources = [*_listed(exported, export_manifest, EXPORTED_ROLE), *tables]
    inputs = {"export": exported, "checkpoint": checkpoint}
    if compiled is not None:
        compiled_manifest = manifest.load(compiled, stages=("compile",))
        _require_made_from(compiled_manifest, compiled, exported, "compile")
        sources += _listed(compiled, compiled_manifest, COMPILED_ROLE, prefix="npu/")
        inputs["compile"] = compiled
    model = _model_config(checkpoint, checkpoint_manifest)
    name = _default_name(model) if config.name is None else config.name
    if not NAME.fullmatch(name):
        fix = "use letters, digits and . _ + -, starting with a letter"
        raise UserError(f"{name!r} cannot name a bundle", where="--name", fix=fix)

    output = StageOutput(out, stage=bundle.STAGE, config={"name": name}, inputs=inputs, force=force)
    if output.complete is not None:
        return output.complete
    _copy_all(sources, output.partial, name)
    metrics = checkpoint_manifest.metrics
    return output.finish(
        roles={source.name: source.entry.role for source in sources},
        metrics={
            "name": name,
            **{key: metrics.get(key) for key in CARRIED_METRICS},
            **_read_a_token(model, metrics.get("ram_parameters"), export_manifest.metrics["weights_bytes"]),
            "precision": export_manifest.metrics.get("precision", "fp32"),
            "perplexity_increase": export_manifest.metrics.get("perplexity_increase"),
            "parts": len(spec.decode.parts),
            **_sizes(spec, roms, sources),
            **_rom_bytes_per_token(roms, metrics),
            "npu": None if compiled is None else {key: compiled_manifest.metrics.get(key) for key in NPU_METRICS},
        },
    )


def _listed(directory: Path, made: Manifest, role: re.Pattern[str], prefix: str = "") -> list[_Source]:
    """The files of a stage that play such a ``role``, to be copied under ``prefix``."""
    return [
        _Source(path=directory / name, name=prefix + name, entry=entry)
        for name, entry in made.files.items()
        if role.fullmatch(entry.role)
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
    exported: Path, export_manifest: Manifest, checkpoint: Path, tables: list[_Source]
) -> tuple[GraphSpec, list[RomSpec]]:
    """Check that graphs, tokenizer, embedding and ROM files fit; the graph spec and the ROM files' headers."""
    spec_path = export_manifest.file(exported, "graph_spec")
    if not spec_path.is_file() or manifest.digest(spec_path) != export_manifest.files[spec_path.name].sha256:
        raise _changed(spec_path)
    spec = GraphSpec.from_json(read_json(spec_path), spec_path)
    tokenizer = export_manifest.file(exported, bundle.TOKENIZER_ROLE)
    tokenizer_sha256 = export_manifest.files[tokenizer.name].sha256
    owned = {source.name: source.path for source in tables}
    wanted = {rom.file for rom in spec.roms}
    if owned.keys() != wanted:
        lists = [", ".join(sorted(names)) or "none" for names in (wanted, owned)]
        raise UserError(
            f"the graphs need these ROM files: {lists[0]}; the checkpoint has: {lists[1]}",
            where=checkpoint,
            fix="export the checkpoint that `meki-edge reparam` wrote, and give the same one to pack",
        )
    roms = [_check_rows(owned[rom.file], rom, spec, tokenizer_sha256, "meki-edge reparam") for rom in spec.roms]
    embedding = exported / spec.embedding.file
    header = _check_rows(embedding, spec.embedding, spec, tokenizer_sha256, "meki-edge export")
    _require(embedding, "source_sha256", header.source_sha256, manifest.digest(checkpoint), "meki-edge export")
    return spec, roms


def _check_rows(path: Path, wanted: RowFile, spec: GraphSpec, tokenizer_sha256: str, command: str) -> RomSpec:
    """Read the header of a ROM file (or embedding) and compare it with what the graphs need."""
    with RomReader(path) as reader:
        header = reader.spec
    _require(path, "addressing", header.addressing.kind, wanted.addressing, command)
    _require(path, "row_dim", header.row_dim, wanted.row_dim, command)
    _require(path, "num_tokens", header.num_tokens, spec.vocab_size, command)
    _require(path, "tokenizer_sha256", header.tokenizer_sha256, tokenizer_sha256, command)
    most = header.addressing.rows_per_token  # the graph masks what a token does not have
    _require(path, "rows_per_token", most, min(most, wanted.rows_per_token), command)
    return header


def _require(path: Path, field: str, found: Any, expected: Any, command: str) -> None:
    if found != expected:
        raise UserError(
            f"{field} is {found}, the exported model needs {expected}", where=path, fix=f"run `{command}` again"
        )


def _model_config(checkpoint: Path, made: Manifest) -> dict[str, Any]:
    """The checkpoint's ``config.json``, as its stage wrote it."""
    path = made.file(checkpoint, "config")
    if not path.is_file() or sha256_file(path) != made.files[path.name].sha256:
        raise _changed(path)
    return read_json(path)


def _default_name(model: dict[str, Any]) -> str:
    """ "dense" or "moe", or the kinds of the model's memories."""
    kinds = ["moe"] if model.get("num_experts") else []
    kinds += dict.fromkeys(placement["kind"] for placement in model.get("memories", []))
    return "+".join(kinds) or "dense"


def _read_a_token(model: dict[str, Any], ram_parameters: int | None, graph_bytes: int) -> dict[str, int | None]:
    """What decoding a token reads of the weights: parameters, bytes, and the bytes that its routing chooses.

    An embedding that is not the head as well costs one row, and of the experts only those chosen
    are read. Which ones is known layer by layer while the token is computed, so they can neither be
    fetched ahead nor stay in a cache smaller than all of them.

    Args:
        model: ``config.json``.
        graph_bytes: the size of the graphs' weights, of which an untied embedding is no part.
    """
    if ram_parameters is None:
        return dict.fromkeys(("active_parameters", "weight_bytes_per_token", "expert_bytes_per_token"))
    hidden, experts = model["hidden_size"], model.get("num_experts") or 0
    in_graphs = ram_parameters if model["tie_word_embeddings"] else ram_parameters - model["vocab_size"] * hidden
    chosen = idle = 0
    if experts:
        expert = 3 * hidden * model["moe_intermediate_size"] * model["num_hidden_layers"]
        chosen = expert * model["num_experts_per_tok"]
        idle = expert * experts - chosen
    active = in_graphs - idle
    return {
        "active_parameters": active if model["tie_word_embeddings"] else active + hidden,
        "weight_bytes_per_token": graph_bytes * active // in_graphs,
        "expert_bytes_per_token": graph_bytes * chosen // in_graphs if experts else None,
    }


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


def _rom_bytes_per_token(roms: list[RomSpec], metrics: dict[str, Any]) -> dict[str, float]:
    """The most that a token reads, and the mean: of re-encoded rows, in proportion to what `reparam` measured."""
    most = sum(rom.row_stride * rom.addressing.rows_per_token for rom in roms)
    scale = most / metrics["rom_bytes_per_token"] if metrics.get("rom_bytes_per_token") else 1
    expected = metrics.get("rom_bytes_per_token_expected", 0) * scale
    return {"rom_bytes_per_token": most, "rom_bytes_per_token_expected": expected}


def _sizes(spec: GraphSpec, roms: list[RomSpec], sources: list[_Source]) -> dict[str, Any]:
    """The metrics that a decision needs beside quality."""
    return {
        "rom_bytes": sum(source.entry.bytes for source in sources if ROM_ROLE.fullmatch(source.entry.role)),
        "table_precision": "+".join(dict.fromkeys(segment.codec for rom in roms for segment in rom.segments)) or None,
        "weights_bytes": sum(s.entry.bytes for s in sources if WEIGHTS_ROLE.fullmatch(s.entry.role)),
        "vocab_size": spec.vocab_size,
        "context_lengths": sorted(one.context_length for one in spec.contexts.values()),
    }
