"""What calibration wrote, opened; limits that everything meets; other text to calibrate on."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from export.onnx_decoder import OnnxDecoder
from meki_edge import graph_spec, manifest
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.rom.reader import RomReader

LENIENT = {"max_perplexity_increase": 10.0, "min_top1_agreement": 0.0}


def spec_of(directory: Path) -> GraphSpec:
    path = directory / graph_spec.FILE_NAME
    return GraphSpec.from_json(read_json(path), path)


def decoder_of(directory: Path, roms: Path) -> OnnxDecoder:
    spec = spec_of(directory)
    readers = [RomReader(roms / rom.file) for rom in spec.roms]
    return OnnxDecoder(spec, RomReader(directory / spec.embedding.file), readers)


def replace_shard(directory: Path, shard: str, ids: np.ndarray) -> None:
    """Other ids in a tokens directory, and a manifest that agrees."""
    old = manifest.load(directory)
    files = {name: entry.role for name, entry in old.files.items()}
    output = manifest.StageOutput(directory.with_name("made"), stage=old.stage, config={}, inputs={})
    for name in files:
        shutil.copyfile(directory / name, output.partial / name)
    ids.tofile(output.partial / shard)
    output.finish(roles=files, metrics=old.metrics)
    shutil.rmtree(directory)
    directory.with_name("made").rename(directory)
