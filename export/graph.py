"""Export: a checkpoint becomes ONNX graphs with static shapes, prefill and decode, in one part or several.

What depends on token ids alone stays with the host, which feeds embeddings, memory rows, the mask
and the rotary angles, and which owns the key/value cache (:mod:`meki_edge.graph_spec` says how).
The graphs are traced without their weights (:mod:`export.trace`); those are streamed from the
checkpoint into one file a part (:mod:`export.passes`), and the result is run against PyTorch
(:mod:`export.verify`) before the stage counts as done.

Output: ``graph_spec.json``, ``prefill.onnx`` and ``decode.onnx`` (operator set 23, float32), the
``weights.data`` that they refer to, ``embedding.safetensors`` (a ROM file of the token embedding)
and the tokenizer. Where the graphs are cut, each part has its own ``prefill_0.onnx``, ``decode_0.onnx``
and ``weights_0.data``; a shorter context has its own ``prefill_c256.onnx`` and ``decode_c256.onnx``, with
the same weights. The memories' ROM files stay in the checkpoint; ``meki-edge pack`` brings both
together.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from export import passes
from export.inputs import open_directory, open_tokens
from export.layout import PartLayers, cut, graph_spec
from export.lint_files import LIMIT_BYTES
from export.trace import trace
from export.verify import verify
from meki_edge import console, manifest
from meki_edge import tokens as token_shards
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import require_free_space, storage_errors, write_json
from meki_edge.graph_spec import FILE_NAME, GraphSpec, Part, part_suffix
from meki_edge.manifest import Manifest, StageOutput
from meki_edge.model.checkpoint import EMBEDDING, HEAD, TOKENIZER, Checkpoint
from meki_edge.model.config import ModelConfig
from meki_edge.model.row_spaces import RowSpace, row_spaces
from meki_edge.rom import spec as rom_spec
from meki_edge.rom.addressing import Identity
from meki_edge.rom.reader import RomReader
from meki_edge.rom.writer import RomWriter
from meki_edge.tokens import TokenShards

STAGE = "export"
EMBEDDING_LAYER = -1  # of a segment that holds token embeddings
EMBEDDING_ROWS = 4096  # rows of the token embedding held in memory at a time
KV_DTYPES = ("float32", "float16")
CARRIED_METRICS = ("validation_loss", "validation_tokens", "ram_parameters")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Shapes of the graphs, fixed at export because the NPU takes no others."""

    context_length: int = 1024
    """C: slots of the key/value cache, and the longest sequence."""

    shorter_contexts: tuple[int, ...] = ()
    """Fewer slots, ascending: a text runs in the shortest context that holds it, which is cheaper."""

    prefill_tokens: int = 128
    """T of the prefill graph: how many prompt tokens one call takes."""

    verify_tokens: int = 200
    """Tokens of validation text on which the graphs are compared with PyTorch (at most C)."""

    parts: int = 1
    """How many parts of about as many layers each graph is cut into."""

    split_layers: tuple[int, ...] = ()
    """Or the layers before which it is cut, ascending."""

    head_part: bool = False
    """Whether the final norm and the head are a part of their own."""

    kv_dtype: str = "float32"
    """Of the key/value cache: ``float32`` or ``float16``."""


def export(checkpoint: Path, tokens: Path, out: Path, config: ExportConfig, *, force: bool = False) -> Manifest:
    """Export ``checkpoint`` (dense, or folded by `meki-edge reparam`) and verify the graphs.

    Args:
        checkpoint: a directory of `meki-edge train` or `meki-edge reparam`.
        tokens: the tokens directory; its validation split is what the graphs are verified on.

    Raises:
        UserError: a training-form checkpoint with memories, shapes that do not fit the model, a
            ROM or tokenizer of another model, or graphs that do not compute what PyTorch does.
    """
    source = open_directory(checkpoint, ("train", "reparam"))
    started = time.monotonic()
    with Checkpoint(checkpoint) as weights:
        model = weights.config
        shards = _open_tokens(tokens, source, model, checkpoint)
        _check_shapes(config, model, checkpoint)
        parts = _parts(config, model.num_hidden_layers)
        roms = _roms(source, model, shards, checkpoint)
        text = shards.validation_windows(1, min(config.verify_tokens, config.context_length))[0]
        output = StageOutput(
            out,
            stage=STAGE,
            config=to_dict(config),
            inputs={"checkpoint": checkpoint, "tokens": tokens},
            tools=("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime"),
            force=force,
        )
        if output.complete is not None:
            return output.complete
        spec = graph_spec(
            model,
            context_length=config.context_length,
            prefill_tokens=config.prefill_tokens,
            eos_token_id=shards.eos_token_id,
            parts=parts,
            kv_dtype=config.kv_dtype,
            shorter_contexts=config.shorter_contexts,
        )
        with storage_errors(output.partial):
            metrics = _write_graphs(output.partial, spec, weights)
            _write_embedding(output.partial, spec, weights, shards)
            write_json(output.partial / FILE_NAME, to_dict(spec))
            shutil.copyfile(tokens / token_shards.TOKENIZER, output.partial / TOKENIZER)
    metrics |= verify(output.partial, spec, checkpoint, roms, text)
    return output.finish(
        roles=_roles(spec),
        metrics={
            **{name: source.metrics[name] for name in CARRIED_METRICS if name in source.metrics},
            **metrics,
            "export_seconds": round(time.monotonic() - started, 2),
        },
    )


def _roles(spec: GraphSpec) -> dict[str, str]:
    """Every file of the output with its role."""
    num_parts = len(spec.decode.parts)
    roles = {FILE_NAME: "graph_spec", spec.embedding.file: "embedding", TOKENIZER: "tokenizer"}
    for index in range(num_parts):
        suffix = part_suffix(index, num_parts)
        roles |= {graph.parts[index].file: f"{name}_graph{suffix}" for name, graph in spec.graphs.items()}
        roles[passes.weights_file(suffix)] = f"weights{suffix}"
    return roles


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """A traced part; ``weights`` says what its initializers are, which have no value yet."""

    part: Part
    model: ir.Model
    weights: dict[str, passes.Weight]


def _write_graphs(directory: Path, spec: GraphSpec, weights: Checkpoint) -> dict[str, int]:
    """Write the parts of all graphs and a weights file for each into ``directory``; return their sizes."""
    num_parts = len(spec.decode.parts)
    with console.progress() as bar:
        task = bar.add_task("tracing", total=len(spec.graphs) * num_parts)
        traced = []
        for index in range(num_parts):
            twins = []
            for graph in spec.graphs.values():
                twins.append(_trace(graph.parts[index], weights))
                bar.advance(task)
            traced.append(twins)
    placed = [passes.place(weight for twin in twins for weight in twin.weights.values()) for twins in traced]
    sizes = [sum(weight.num_bytes for weight in offsets) for offsets in placed]
    require_free_space(directory, sum(sizes), "the graphs' weights")
    _advise_parts(sizes)
    with console.byte_progress("writing weights", sum(sizes)) as advance:
        for index, (twins, offsets) in enumerate(zip(traced, placed, strict=True)):
            file = passes.weights_file(part_suffix(index, num_parts))
            for twin in twins:
                passes.refer(twin.model, twin.weights, offsets, file)
                ir.save(twin.model, directory / twin.part.file)
            passes.write_weights(directory / file, offsets, weights, advance)
    return {
        "parts": num_parts,
        "weights_bytes": sum(sizes),
        "largest_part_bytes": max(sizes),
        **{
            f"{name}_nodes": sum(twins[index].model.graph.num_nodes() for twins in traced)
            for index, name in enumerate(spec.graphs)
        },
    }


def _advise_parts(sizes: list[int]) -> None:
    """Say, before hours of other stages, that no device would load a part's weights (``sizes``: float32, bytes)."""
    largest = max(sizes) // 2
    if largest > LIMIT_BYTES:
        parts = len(sizes) * math.ceil(largest / LIMIT_BYTES)
        console.info(
            f"a part's weights take {largest / 1e9:.2f} GB in fp16, and devices are said to take 2 GB a binary: "
            f"export with --parts {parts} or more, unless they will be quantized"
        )


def _trace(part: Part, weights: Checkpoint) -> _Traced:
    model = trace(weights.config, part)
    taken = passes.take_weights(model, lambda name: weights.head_name if name in (HEAD, EMBEDDING) else name)
    passes.flatten_norms(model)
    passes.simplify(model)
    return _Traced(part=part, model=model, weights=taken)


def _write_embedding(directory: Path, spec: GraphSpec, weights: Checkpoint, shards: TokenShards) -> None:
    """Write the token embedding as a ROM file: float32, one segment a row."""
    rom = rom_spec.build(
        [(EMBEDDING_LAYER, 0, spec.hidden_size)],
        "fp32",
        num_rows=spec.vocab_size,
        addressing=Identity(),
        tokenizer_sha256=shards.tokenizer_sha256,
        source_sha256=manifest.digest(weights.directory),
    )
    with (
        RomWriter(directory / spec.embedding.file, rom) as writer,
        console.byte_progress("writing embedding", spec.vocab_size * rom.row_bytes) as advance,
    ):
        for first in range(0, rom.num_rows, EMBEDDING_ROWS):
            rows = weights.read(EMBEDDING, slice(first, min(first + EMBEDDING_ROWS, rom.num_rows))).numpy()
            writer.write(rows)
            advance(rows.nbytes)


def _check_shapes(config: ExportConfig, model: ModelConfig, checkpoint: Path) -> None:
    limit = model.max_position_embeddings
    if not 1 <= config.context_length <= limit:
        raise UserError(
            f"context_length is {config.context_length}, the model's positions go up to {limit}",
            where=f"{checkpoint}: max_position_embeddings",
            fix=f"choose --context-length between 1 and {limit}",
        )
    if not 1 <= config.prefill_tokens <= config.context_length:
        raise UserError(
            f"prefill_tokens is {config.prefill_tokens} with a context_length of {config.context_length}",
            where="--prefill-tokens",
            fix=f"choose --prefill-tokens between 1 and {config.context_length}, or a longer --context-length",
        )
    shorter = list(config.shorter_contexts)
    if shorter != sorted(set(shorter)) or not all(config.prefill_tokens < c < config.context_length for c in shorter):
        raise UserError(
            f"the shorter contexts are {shorter} with a context_length of {config.context_length}",
            where="--shorter-contexts",
            fix=f"give lengths of more than {config.prefill_tokens} and less than {config.context_length}, ascending",
        )
    if config.verify_tokens < 2:
        raise UserError(
            f"verify_tokens is {config.verify_tokens}",
            where="--verify-tokens",
            fix="give at least 2: one token for prefill and one for decode",
        )
    if config.kv_dtype not in KV_DTYPES:
        raise UserError(
            f"kv_dtype is {config.kv_dtype!r}", where="--kv-dtype", fix=f"use one of: {', '.join(KV_DTYPES)}"
        )


def _parts(config: ExportConfig, num_layers: int) -> list[PartLayers]:
    """Which layers each part holds."""
    boundaries = list(config.split_layers)
    if boundaries and config.parts != 1:
        raise UserError(
            f"{config.parts} parts and cuts at layers {boundaries} are both given",
            where="--parts, --split-layers",
            fix="give one of the two",
        )
    if boundaries != sorted(set(boundaries) & set(range(1, num_layers))):
        raise UserError(
            f"the model cannot be cut before layers {boundaries}",
            where="--split-layers",
            fix=f"name layers from 1 to {num_layers - 1}, ascending",
        )
    if not 1 <= config.parts <= num_layers:
        raise UserError(
            f"{config.parts} parts of {num_layers} layers", where="--parts", fix=f"choose 1 to {num_layers} parts"
        )
    boundaries = boundaries or [index * num_layers // config.parts for index in range(1, config.parts)]
    return cut(num_layers, boundaries, head_part=config.head_part)


def _open_tokens(tokens: Path, source: Manifest, model: ModelConfig, checkpoint: Path) -> TokenShards:
    shards = open_tokens(tokens, source, checkpoint)
    if shards.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {shards.vocab_size} tokens, the model only {model.vocab_size}",
            where=tokens,
            fix="give the tokens directory that the model was trained on",
        )
    return shards


def _roms(source: Manifest, model: ModelConfig, shards: TokenShards, checkpoint: Path) -> list[Path]:
    """The checkpoint's ROM files (none of a dense model), each checked against its row space."""
    if model.memories and not model.folded:
        raise UserError(
            "the memories are in training form",
            where=checkpoint,
            fix="fold it first: run `meki-edge reparam` and export its output",
        )
    spaces = row_spaces(model)
    paths = [source.file(checkpoint, space.role) for space in spaces]
    for path, space in zip(paths, spaces, strict=True):
        _check_rom(path, space, model, shards)
    return paths


def _check_rom(path: Path, space: RowSpace, model: ModelConfig, shards: TokenShards) -> None:
    with RomReader(path) as reader:
        spec = reader.spec
    found = [(segment.layer, segment.memory, segment.dim) for segment in spec.segments]
    expected = [(member.layer, member.number, member.dim) for member in space.members]
    addressing = spec.addressing
    if path.name != space.file:
        what = f"the ROM is called {path.name}, the graphs ask for {space.file}"
    elif addressing.kind != space.addressing:
        what = f"the ROM's addressing is {addressing.kind}, the memories' is {space.addressing}"
    elif spec.num_rows != space.num_rows:
        what = f"the ROM has {spec.num_rows} rows, the memories need {space.num_rows}"
    elif spec.num_tokens != model.vocab_size:
        what = f"the ROM has rows for {spec.num_tokens} tokens, the model has {model.vocab_size}"
    elif addressing.rows_per_token > space.rows_per_token:
        what = f"the ROM has up to {addressing.rows_per_token} rows a token, the memories take {space.rows_per_token}"
    elif found != expected:
        what = f"the ROM's segments (layer, memory, dim) are {found}, the model's memories are {expected}"
    elif spec.tokenizer_sha256 != shards.tokenizer_sha256:
        what = "the ROM was folded for another tokenizer (SHA-256)"
    else:
        return
    raise UserError(what, where=path, fix="fold the model again with `meki-edge reparam`")
