"""Rules on a directory: graphs, spec, embedding, row files and tokenizer must be of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from onnx import numpy_helper

from export.findings import DIRECTORY, ERROR, Finding
from export.graph_view import GraphView, type_of_value
from meki_edge import manifest
from meki_edge.errors import UserError
from meki_edge.files import sha256_file
from meki_edge.graph_spec import GraphSpec, Part, RowFile, TensorSpec
from meki_edge.rom.reader import RomReader
from meki_edge.tokenizer import read_tokenizer

TOKENIZER = "tokenizer.json"
AGAIN = "export the model again"


def _finding(path: Path, rule: str, what: str, fix: str = AGAIN, tensor: str | None = None) -> Finding:
    return Finding(rule=rule, severity=ERROR, source=DIRECTORY, where=str(path), tensor=tensor, what=what, fix=fix)


def graph_against_spec(view: GraphView, part: Part) -> Iterator[Finding]:
    """What the spec says of the graph's inputs and outputs, against the graph."""
    found = partial(_finding, view.path, "spec-mismatch")
    for side, stated, values in (("input", part.inputs, view.inputs), ("output", part.outputs, view.graph.output)):
        real = {value.name: type_of_value(value) for value in values}
        expected = {tensor.name: tensor for tensor in stated}
        for name in expected.keys() - real.keys():
            yield found(f"graph_spec.json names an {side} that the graph does not have", tensor=name)
        for name in real.keys() - expected.keys():
            yield found(f"the graph has an {side} that graph_spec.json does not name", tensor=name)
        for name in expected.keys() & real.keys():
            tensor, kind = expected[name], real[name]
            if kind.dtype != tensor.dtype:
                yield found(f"{side} is {kind.dtype}, {tensor.dtype} in graph_spec.json", tensor=name)
            if kind.shape != tensor.shape:
                shapes = f"{_shape(kind.shape)}, {_shape(tensor.shape)}"
                yield found(f"{side} has shape {shapes} in graph_spec.json", tensor=name)
            yield from _quantization(view, tensor, found)


def _shape(shape: tuple[int | None, ...] | None) -> str:
    return "?" if shape is None else str(["?" if size is None else size for size in shape]).replace("'", "")


def _quantization(view: GraphView, tensor: TensorSpec, found: Callable[..., Finding]) -> Iterator[Finding]:
    """An integer input or output is dequantized in the graph as the spec says."""
    if tensor.quantization is None:
        return
    node = view.producers.get(tensor.name)
    nodes = [node] if node is not None and node.op_type == "QuantizeLinear" else view.consumers.get(tensor.name, [])
    for node in nodes:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.input[1] not in view.initializers:
            continue
        scale = float(numpy_helper.to_array(view.initializers[node.input[1]]).reshape(-1)[0])
        zero = view.initializers.get(node.input[2]) if len(node.input) > 2 else None
        zero_point = 0 if zero is None else int(numpy_helper.to_array(zero).reshape(-1)[0])
        stated = tensor.quantization
        if np.float32(scale) != np.float32(stated.scale) or zero_point != stated.zero_point:
            yield found(
                f"the graph's quantization is (scale {scale:g}, zero point {zero_point}), graph_spec.json's "
                f"({stated.scale:g}, {stated.zero_point})",
                tensor=tensor.name,
            )


def vocabulary(directory: Path, spec: GraphSpec) -> Iterator[Finding]:
    """The spec's vocabulary against logits, embedding, row files and tokenizer."""
    found = partial(_finding, rule="vocabulary-mismatch")
    for graph in spec.graphs.values():
        for tensor in graph.by_role("logits"):
            if tensor.shape[-1] != spec.vocab_size:
                what = f"logits for {tensor.shape[-1]} tokens, a vocabulary of {spec.vocab_size}"
                yield found(directory / graph.parts[-1].file, what=what, tensor=tensor.name)
    tokenizer = directory / TOKENIZER
    digest = None
    if tokenizer.is_file():
        digest = sha256_file(tokenizer)
        yield from _tokenizer(tokenizer, spec)
    else:
        yield _finding(tokenizer, "missing-file", "there is no tokenizer.json", "export the model again")
    yield from _row_file(directory / spec.embedding.file, spec.embedding, spec, digest)
    for rom in spec.roms:
        try:
            path = _find_rom(directory, rom)
        except UserError as error:  # a manifest that is damaged
            what = f"where {rom.file} lies is not known: {error.what}"
            yield _finding(Path(error.where), "row-file", what, error.fix)
            return
        if path is not None:
            yield from _row_file(path, rom, spec, digest)


def _tokenizer(path: Path, spec: GraphSpec) -> Iterator[Finding]:
    fix = "take the tokenizer.json that the model was trained with"
    try:
        ids = read_tokenizer(path).get_vocab(with_added_tokens=True).values()
    except UserError as error:
        yield _finding(path, "vocabulary-mismatch", error.what, fix)
        return
    if max(ids, default=-1) >= spec.vocab_size:
        what = f"the tokenizer has ids up to {max(ids)}, the vocabulary {spec.vocab_size} tokens"
        yield _finding(path, "vocabulary-mismatch", what, fix)


def _find_rom(directory: Path, rom: RowFile) -> Path | None:
    """A row file of the spec: here, or in the checkpoint that was exported, where that still lies there."""
    if (directory / rom.file).is_file():
        return directory / rom.file
    if not (directory / manifest.FILE_NAME).is_file():
        return None
    entry = manifest.load(directory).inputs.get("checkpoint")
    checkpoint = Path(entry.path) if entry else directory
    if entry is None or not (checkpoint / manifest.FILE_NAME).is_file() or not (checkpoint / rom.file).is_file():
        return None
    return checkpoint / rom.file if manifest.digest(checkpoint) == entry.sha256 else None


def _row_file(path: Path, stated: RowFile, spec: GraphSpec, tokenizer: str | None) -> Iterator[Finding]:
    try:
        with RomReader(path) as reader:
            rom = reader.spec
    except UserError as error:
        yield _finding(path, "missing-file" if not path.is_file() else "row-file", error.what, error.fix)
        return
    fix = "take the file that was made with this model"
    if rom.num_tokens != spec.vocab_size:
        what = f"the file has rows for {rom.num_tokens} tokens, the vocabulary {spec.vocab_size}"
        yield _finding(path, "vocabulary-mismatch", what, fix)
    if tokenizer is not None and rom.tokenizer_sha256 != tokenizer:
        what = "the file was made for another tokenizer than tokenizer.json (SHA-256)"
        yield _finding(path, "tokenizer-mismatch", what, fix)
    if rom.row_dim != stated.row_dim or rom.addressing.kind != stated.addressing:
        what = (
            f"the file has {rom.addressing.kind} rows of {rom.row_dim} elements, graph_spec.json says "
            f"{stated.addressing} rows of {stated.row_dim}"
        )
        yield _finding(path, "spec-mismatch", what, fix)
