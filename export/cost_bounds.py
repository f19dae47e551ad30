"""What a decode step must move, and so how fast it can be at the most: a bound, never a prediction.

Decoding one token reads every weight and the whole key/value cache once. Their bytes, divided by
the fastest that the chip's DRAM is announced to deliver, are a lower bound on the step's time: no
implementation can be faster, and real ones are slower (memory refresh, compute, launch, the host).
What is computed inside the step is taken to stay on the chip.

A step is described by the graph's own contract (:class:`~meki_edge.graph_spec.GraphSpec`) and the
sizes of its weights. Both come from a directory of `meki-edge export`, or from a named shape, where
no checkpoint is needed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from export.graph_view import ITEM_BITS, dtype_of, load
from export.layout import graph_spec as spec_of_model
from export.lint_files import COMPILED_BITS
from export.targets import Chip
from meki_edge import graph_spec
from meki_edge.errors import UserError, nearest
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec, TensorSpec
from meki_edge.model.config import ROM_FORM, ModelConfig
from meki_edge.model.decoder import CausalLM
from meki_edge.rom.reader import RomReader

STORAGE_BYTES_PER_S = 5.8e9
"""UFS 4.0: two lanes of 23.2 Gbit/s (JEDEC JESD220F), the interface's own limit."""
ROW_BYTES_PER_ELEMENT = 2  # of a row on storage, where there is no ROM file to ask: fp16, as the papers count


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bits of a weight as stored, block scales included: of the layers' matrices, and of the head's."""

    body_bits: float
    head_bits: float


PRECISIONS = {
    "fp16": Precision(body_bits=16, head_bits=16),
    "w8a16": Precision(body_bits=8, head_bits=8),
    "w8a8": Precision(body_bits=8, head_bits=8),
    "w4a16": Precision(body_bits=4, head_bits=8),
    "w4a16-block32": Precision(body_bits=4 + 16 / 32, head_bits=8),
    "w4a16-block64": Precision(body_bits=4 + 16 / 64, head_bits=8),
    "w4fp16": Precision(body_bits=4 + 16 / 32, head_bits=8),
}
NORM_BITS = 16
KV_DTYPES = ("float32", "float16", "int8")

ATTENTION, FFN, MEMORY, NORMS, HEAD, OTHER = "attention", "feed-forward", "memory", "norms", "head", "other weights"
KV_READ, KV_WRITE, ROWS, ACTIVATIONS = "KV cache read", "KV cache write", "rows", "inputs and logits"
PARTS = (ATTENTION, FFN, MEMORY, NORMS, HEAD, OTHER, KV_READ, KV_WRITE, ROWS, ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One decode step of a model: what it moves, by part.

    Sizes in bytes; those of cache and mask a slot of the context.
    """

    name: str
    weights: Mapping[str, float]
    """DRAM bytes by part: every weight is read once."""
    parameters: Mapping[str, int]
    """Elements of those weights by part. The embedding is not among them: its row lies on storage."""
    kv_bytes_per_slot: int
    mask_bytes_per_slot: int
    kv_write_bytes: int
    rows_bytes: int
    """DRAM bytes of memory rows: storage writes them there, the graph reads them as its inputs."""
    activation_bytes: int
    """The other inputs and the outputs of the graph, the embedding's row included."""
    storage_bytes: int
    """Bytes that the step reads from storage at the most."""

    def dram(self, context_length: int) -> dict[str, float]:
        """DRAM bytes by part at a context of ``context_length`` slots, all of which the static graph reads."""
        found = {
            **self.weights,
            KV_READ: self.kv_bytes_per_slot * context_length,
            KV_WRITE: self.kv_write_bytes,
            ROWS: self.rows_bytes,
            ACTIVATIONS: self.activation_bytes + self.mask_bytes_per_slot * (context_length + 1),
        }
        return {part: found[part] for part in PARTS if found.get(part)}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least time of a step at one context length, and what it is made of."""

    context_length: int
    dram_bytes: Mapping[str, float]
    total_dram_bytes: float
    storage_bytes: int
    dram_seconds: float
    storage_seconds: float
    seconds: float
    """The longer of the two: rows are read while the graph works."""
    tokens_per_s: float


def bound(step: Step, chip: Chip, context_length: int) -> Bound:
    """The lower bound on the time of ``step`` on ``chip``."""
    parts = step.dram(context_length)
    total = sum(parts.values())
    dram, storage = total / chip.peak_bandwidth, step.storage_bytes / STORAGE_BYTES_PER_S
    return Bound(
        context_length=context_length,
        dram_bytes=parts,
        total_dram_bytes=total,
        storage_bytes=step.storage_bytes,
        dram_seconds=dram,
        storage_seconds=storage,
        seconds=max(dram, storage),
        tokens_per_s=1 / max(dram, storage),
    )


def step_of_model(name: str, model: ModelConfig, precision: str, kv_dtype: str) -> Step:
    """The step of a model of this shape (memories in ROM form), exported with ``kv_dtype`` caches."""
    model = dataclasses.replace(model, memory_form=ROM_FORM)
    spec = spec_of_model(model, context_length=1, prefill_tokens=1, eos_token_id=None)
    with torch.device("meta"):
        tensors = CausalLM(model).state_dict()
    weights = {
        tensor: _Weight(elements=parameter.numel(), bits=_bits(tensor, precision))
        for tensor, parameter in tensors.items()
        if "embed_tokens" not in tensor
    }
    row_bytes = sum(rom.row_dim * rom.rows_per_token for rom in spec.roms) * ROW_BYTES_PER_ELEMENT
    return _step(name, spec, weights, row_bytes, kv_dtype)


def steps_of_directory(directory: Path, precision: str | None, kv_dtype: str | None) -> list[Step]:
    """The step of the decode graph in a directory of `meki-edge export`, `calibrate` or `pack`.

    Where it has memories, its dense twin comes first: the same graph without them, and with an up
    projection like the gate's where a memory stands in its place.

    Args:
        precision: of :data:`PRECISIONS`; None: as the graph stores its weights (float32 compiles to float16).
        kv_dtype: of the cache; None: as the graph has it.

    Raises:
        UserError: no spec, or a graph that is missing.
    """
    if directory.is_file():
        fix = "give the directory that `meki-edge export` wrote"
        raise UserError("this is a file, not a directory of graphs", where=directory, fix=fix)
    path = directory / graph_spec.FILE_NAME
    spec = GraphSpec.from_json(read_json(path), path)
    weights: dict[str, _Weight] = {}
    for part in spec.decode.parts:
        for tensor in load(directory / part.file).graph.initializer:
            dtype = dtype_of(tensor)
            if dtype == "int64" or not tensor.dims:  # a shape, a scale: part of the program, not read from DRAM
                continue
            stored = COMPILED_BITS.get(dtype, ITEM_BITS.get(dtype, 0))
            bits = stored if precision is None else _bits(tensor.name, precision)
            weights[tensor.name] = _Weight(elements=prod(tensor.dims), bits=bits)
    row_bytes = sum(rom.rows_per_token * _row_stride(directory / rom.file, rom.row_dim) for rom in spec.roms)
    steps = [_step(directory.name, spec, weights, row_bytes, kv_dtype)]
    if spec.roms:
        twin = {name: weight for name, weight in weights.items() if _part(name) != MEMORY}
        for name, weight in weights.items():
            replaced = name.replace("gate_proj", "up_proj")
            if _part(name) == FFN and replaced not in twin:
                twin[replaced] = weight
        without = {"memory_rows", "memory_mask", "memory_state", "present_memory_state"}
        steps.insert(0, _step(f"{directory.name} without memory", spec, twin, 0, kv_dtype, without=without))
    return steps


def _row_stride(rom: Path, row_dim: int) -> int:
    if not rom.is_file():
        return row_dim * ROW_BYTES_PER_ELEMENT
    with RomReader(rom) as reader:
        return reader.spec.row_stride


@dataclass(frozen=True, kw_only=True)
class _Weight:
    elements: int
    bits: float


def _step(
    name: str,
    spec: GraphSpec,
    weights: Mapping[str, _Weight],
    row_bytes: int,
    kv_dtype: str | None,
    *,
    without: set[str] = frozenset(),
) -> Step:
    """A step from the graph's contract, but for the roles ``without``; ``row_bytes`` are a token's rows on storage."""
    inputs = [tensor for tensor in spec.decode.inputs if tensor.role not in without]
    outputs = [tensor for tensor in spec.decode.outputs if tensor.role not in without]
    slots = spec.context_length
    sizes, parameters = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0)
    for tensor, weight in weights.items():
        sizes[_part(tensor)] += weight.elements * weight.bits / 8
        parameters[_part(tensor)] += weight.elements

    def kv_bytes(tensors: Iterable[TensorSpec], *roles: str) -> int:
        return sum(
            prod(tensor.shape) * ITEM_BITS[kv_dtype or tensor.dtype] // 8 for tensor in tensors if tensor.role in roles
        )

    rows = _bytes(tensor for tensor in inputs if tensor.role in ("memory_rows", "memory_mask"))
    apart = {"past_key", "past_value", "present_key", "present_value", "memory_rows", "memory_mask", "attention_mask"}
    embedding_row = spec.hidden_size * ITEM_BITS["float32"] // 8
    return Step(
        name=name,
        weights={part: size for part, size in sizes.items() if size},
        parameters={part: count for part, count in parameters.items() if count},
        kv_bytes_per_slot=kv_bytes(inputs, "past_key", "past_value") // slots,
        mask_bytes_per_slot=_bytes(tensor for tensor in inputs if tensor.role == "attention_mask") // (slots + 1),
        kv_write_bytes=kv_bytes(outputs, "present_key", "present_value"),
        rows_bytes=rows + row_bytes,
        activation_bytes=_bytes(tensor for tensor in (*inputs, *outputs) if tensor.role not in apart) + embedding_row,
        storage_bytes=row_bytes + embedding_row,
    )


def _bytes(tensors: Iterable[TensorSpec]) -> int:
    return sum(prod(tensor.shape) * ITEM_BITS[tensor.dtype] // 8 for tensor in tensors)


_PART_OF_NAME = (
    (MEMORY, re.compile(r"\bmemories\b")),
    (NORMS, re.compile(r"norm\b|norm\.|_norm")),
    (ATTENTION, re.compile(r"\bself_attn\b")),
    (FFN, re.compile(r"\bmlp\b")),
    (HEAD, re.compile(r"lm_head|embed_tokens")),
)


def _part(tensor: str) -> str:
    return next((part for part, pattern in _PART_OF_NAME if pattern.search(tensor)), OTHER)


def _bits(tensor: str, precision: str) -> float:
    if precision not in PRECISIONS:
        raise UserError(
            f"unknown precision {precision!r}{nearest(precision, PRECISIONS)}",
            where="--precision",
            fix=f"use {', '.join(PRECISIONS)}",
        )
    part = _part(tensor)
    if part == NORMS or (part == MEMORY and "norm" in tensor):
        return NORM_BITS
    return PRECISIONS[precision].head_bits if part == HEAD else PRECISIONS[precision].body_bits
