"""What calibration reads, and whether it belongs together: the export, its checkpoint, an earlier calibration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from calibration.config import CalibrateConfig
from export.inputs import open_directory
from meki_edge import graph_spec, manifest
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.manifest import Manifest

STAGE = "calibrate"
RANGES_FILE, REFERENCE_FILE = "ranges.npz", "reference.npz"
SHARED_OPTIONS = ("samples", "window_length", "decode_steps", "gate_windows")
"""What must be the same for another calibration's ranges and float scores to serve again."""


def read_spec(directory: Path) -> GraphSpec:
    """The spec of an export or of a calibration."""
    path = directory / graph_spec.FILE_NAME
    return GraphSpec.from_json(read_json(path), path)


def check_checkpoint(source: Manifest, checkpoint: Path, exported: Path) -> None:
    """Raise :class:`UserError` unless the graphs come from ``checkpoint`` as it is now."""
    if source.inputs["checkpoint"].sha256 != manifest.digest(checkpoint):
        raise UserError(
            "the graphs were exported from another checkpoint",
            where=checkpoint,
            fix=f"give the checkpoint that {exported} was exported from",
        )


def check_float(spec: GraphSpec, exported: Path) -> None:
    """Raise :class:`UserError` unless all that the host exchanges with the graphs is float32."""
    typed = {
        tensor.name
        for graph in spec.graphs.values()
        for tensor in (*graph.inputs, *graph.outputs)
        if tensor.dtype != "float32"
    }
    if typed:
        raise UserError(
            f"calibration starts from float32 inputs and outputs, and {sorted(typed)[0]} is not",
            where=exported,
            fix="export with --kv-dtype float32; calibrate has a --kv-dtype of its own",
        )


def reusable(directory: Path, inputs: Mapping[str, Path], config: CalibrateConfig) -> dict[str, Path]:
    """The files of another calibration, finished or not, that hold what was seen of the same graphs and text.

    Raises:
        UserError: it is of other graphs, text or options, or it collected no ranges and they are needed.
    """
    unfinished = directory / manifest.PARTIAL / manifest.FINGERPRINT
    if unfinished.is_file():
        found = read_json(unfinished)
        folder, stage, other, digests = unfinished.parent, found["stage"], found["config"], found["inputs"]
    else:
        made = open_directory(directory, (STAGE,))
        folder, stage, other = directory, made.stage, made.config
        digests = {role: entry.sha256 for role, entry in made.inputs.items()}
    fix = "give a calibration of the same export, text and options, or leave --ranges-from out"
    if stage != STAGE:
        raise UserError(f"this is the work of `meki-edge {stage}`", where=directory, fix=fix)
    for role in ("export", "tokens"):
        if digests[role] != manifest.digest(inputs[role]):
            raise UserError(f"the ranges were collected from another {role} directory", where=directory, fix=fix)
    values = to_dict(config)
    for name in SHARED_OPTIONS:
        if other[name] != values[name]:
            what = f"the ranges were collected with {name} {other[name]}, not {values[name]}"
            raise UserError(what, where=directory, fix=fix)
    names = (REFERENCE_FILE,) if config.chosen.is_float else (RANGES_FILE, REFERENCE_FILE)
    seen = {name.removesuffix(".npz"): folder / name for name in names if (folder / name).is_file()}
    if RANGES_FILE in names and "ranges" not in seen:
        raise UserError("that calibration collected no ranges", where=directory, fix=fix)
    return seen
