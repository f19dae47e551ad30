"""What is sent to AI Hub: the ONNX files of a directory, each with its weights, by their digests.

A source is the output of `meki-edge pack`, `export` or `calibrate` (graphs, which the service
compiles) or of `compile` (binaries for one chip, which it runs as they are).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx.external_data_helper import ExternalDataInfo

from export.graph_view import read_model
from export.inputs import open_directory
from meki_edge import graph_spec
from meki_edge.errors import UserError
from meki_edge.files import BLOCK_BYTES, atomic_path, read_json, require_free_space
from meki_edge.graph_spec import Graph, GraphSpec, Part
from meki_edge.manifest import Manifest

GRAPH_STAGES = ("pack", "export", "calibrate")
BINARY_STAGE = "compile"
GRAPH = r"(?:prefill|decode)(?:_c(?P<context>\d+))?"  # a name of meki_edge.graph_spec
WRAPPER = re.compile(rf"(?P<graph>{GRAPH})(?:_(?P<part>\d+))?_ctx\.onnx")
LIMIT_BYTES = 2_000_000_000
"""What a device loads of one binary (its address space is 32 bits wide), and what the service takes."""
ZIP_LEVEL = 1  # weights barely shrink; a higher level costs minutes a gigabyte
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the same contents give the same archive


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One ONNX file with what lies outside it: what the service calls a model.

    ``graph`` is one of :attr:`meki_edge.graph_spec.GraphSpec.graphs`, such as ``decode_c256``; ``name`` names
    the graph inside the binary. ``files`` are (name, path, SHA-256), the ONNX file first. ``binary``:
    compiled already.
    """

    graph: str
    part: int
    name: str
    files: tuple[tuple[str, Path, str], ...]
    spec: Part | None = None
    binary: bool = False

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(path.stat().st_size for _, path, _ in self.files)

    @property
    def digest(self) -> str:
        """Of names and contents."""
        return hashlib.sha256(json.dumps([(name, sha256) for name, _, sha256 in self.files]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One model to be measured. ``spec`` is None for binaries; ``chipset`` only they have.

    ``row_directories`` are where its ROM files may lie, the likelier first.
    """

    name: str
    directory: Path
    manifest: Manifest
    spec: GraphSpec | None
    units: tuple[Unit, ...]
    chipset: str | None = None
    row_directories: tuple[Path, ...] = ()

    def rom(self, name: str) -> Path | None:
        """Where a ROM file lies, or None."""
        return next((path for folder in self.row_directories if (path := folder / name).is_file()), None)

    @property
    def num_parts(self) -> int:
        """Parts a graph is cut into."""
        return 1 + max(unit.part for unit in self.units)

    @property
    def shorter_contexts(self) -> list[int]:
        """Slots of the contexts beside the longest, ascending."""
        names = (re.fullmatch(GRAPH, unit.graph) for unit in self.units)
        return sorted({int(name["context"]) for name in names if name and name["context"]})

    def of(self, graph: str) -> list[Unit]:
        """The units of one graph, in the order in which they run."""
        return sorted((unit for unit in self.units if unit.graph == graph), key=lambda unit: unit.part)


def open_arms(directories: list[Path]) -> list[Arm]:
    """Open the sources; the first is the baseline.

    Raises:
        UserError: not such a directory, its files changed, a part is too large, or two have one name.
    """
    arms: list[Arm] = []
    for directory in directories:
        arm = _open(directory)
        if slug(arm.name) in {slug(other.name) for other in arms}:  # files are named after them
            fix = "give bundles of `meki-edge pack --name`, or directories with different names"
            raise UserError(f"two sources are called {arm.name!r}", where=directory, fix=fix)
        arms.append(arm)
    return arms


def write_archive(unit: Unit, path: Path, advance: Callable[[int], None]) -> None:
    """Write what is uploaded: a zip file with one directory that holds the unit's files."""
    require_free_space(path.parent, unit.num_bytes, f"the archive of {unit.name}", "--ledger")
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, source, _ in unit.files:
            member = zipfile.ZipInfo(f"{unit.name}.onnx/{name}", ZIP_TIME)
            member.compress_type, member._compresslevel = zipfile.ZIP_DEFLATED, ZIP_LEVEL
            with archive.open(member, "w", force_zip64=True) as out, open(source, "rb") as file:
                while block := file.read(BLOCK_BYTES):
                    out.write(block)
                    advance(len(block))


def _open(directory: Path) -> Arm:
    found = open_directory(directory, (*GRAPH_STAGES, BINARY_STAGE))
    name = str(found.metrics.get("name") or directory.resolve().name)
    if found.stage == BINARY_STAGE:
        units, chipset = _binaries(directory, found), found.metrics["chipset"]
        return Arm(name=name, directory=directory, manifest=found, spec=None, units=units, chipset=chipset)
    path = directory / graph_spec.FILE_NAME
    spec = GraphSpec.from_json(read_json(path), path)
    units = tuple(
        _unit(directory, found, name, part, described)
        for name, graph in spec.graphs.items()
        for part, described in enumerate(graph.parts)
    )
    return Arm(name=name, directory=directory, manifest=found, spec=spec, units=units, row_directories=(directory,))


def _unit(directory: Path, found: Manifest, graph: str, part: int, described: Part) -> Unit:
    names = [described.file, *external_files(directory / described.file)]
    return Unit(
        graph=graph,
        part=part,
        name=Path(described.file).stem,
        files=tuple((name, directory / name, _recorded(directory, found, name)) for name in names),
        spec=described,
    )


def _binaries(directory: Path, found: Manifest) -> tuple[Unit, ...]:
    """The wrappers of a `compile` directory, each with the binary that it names."""
    units = []
    for name in sorted(name for name in found.files if name.endswith(".onnx")):
        match = WRAPPER.fullmatch(name)
        if match is None:
            raise UserError(f"the file {name!r} is neither prefill nor decode", where=directory, fix="compile again")
        binary = _context_binary(directory / name)
        files = tuple((file, directory / file, _recorded(directory, found, file)) for file in (name, binary))
        stem = name.removesuffix("_ctx.onnx")
        units.append(Unit(graph=match["graph"], part=int(match["part"] or 0), name=stem, files=files, binary=True))
        _check_size(units[-1])
    if not units:
        raise UserError("there are no binaries here", where=directory, fix="run `meki-edge compile` again")
    return tuple(units)


def external_files(path: Path) -> list[str]:
    """The files beside an ONNX file that hold its weights, by the names that it gives them.

    Raises:
        UserError: not an ONNX file, or weights outside its directory.
    """
    names = dict.fromkeys(
        ExternalDataInfo(tensor).location for tensor in read_model(path).graph.initializer if tensor.external_data
    )
    for name in names:
        if os.path.basename(name) != name:
            raise UserError(f"its weights lie elsewhere: {name!r}", where=path, fix="keep them beside the ONNX file")
    return list(names)


def _context_binary(path: Path) -> str:
    for node in read_model(path).graph.node:
        for attribute in node.attribute:
            if attribute.name == "ep_cache_context":
                return attribute.s.decode(errors="replace")
    raise UserError("the ONNX file wraps no NPU binary", where=path, fix="run `meki-edge compile` again")


def _recorded(directory: Path, found: Manifest, name: str) -> str:
    if name not in found.files:
        fix = f"run `meki-edge {found.stage}` again"
        raise UserError(f"the manifest does not list {name!r}", where=directory, fix=fix)
    return found.files[name].sha256


def _check_size(unit: Unit) -> None:
    """Refuse a binary that no device would load (of a graph, :mod:`export.lint` knows)."""
    if unit.num_bytes > LIMIT_BYTES:
        raise UserError(
            f"{unit.name} is a binary of {unit.num_bytes / 1e9:.1f} GB; devices load at most "
            f"{LIMIT_BYTES / 1e9:.0f} GB in one part (lint rule part-over-2gb)",
            where=unit.files[-1][1],
            fix="export with --parts 2 or more and compile again",
        )


def slug(text: str) -> str:
    """A name for files."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("._") or "_"


def shapes(arm: Arm) -> dict[str, Any]:
    """What two arms must share for their times to be comparable."""
    same = {
        "precision": arm.manifest.metrics.get("precision") or "fp32",
        "parts": arm.num_parts,
        "shorter_contexts": arm.shorter_contexts,
    }
    if arm.spec is None:
        return same
    prefill: Graph = arm.spec.prefill
    return {
        **same,
        "context_length": arm.spec.context_length,
        "prefill_tokens": prefill.num_tokens,
        "vocab_size": arm.spec.vocab_size,
        "hidden_size": arm.spec.hidden_size,
        "num_hidden_layers": arm.spec.num_hidden_layers,
    }
