"""``meki-edge reparam``: fold the memories of a trained checkpoint into ROM files.

Everything that depends on token ids alone — tables, projections, their norms and scalars, and how
ids become row ids — goes into one ROM file a row space (:mod:`meki_edge.model.row_spaces`). Rows are
folded slice by slice (:mod:`meki_edge.reparam_fold`), so no table and no row matrix is ever whole in
memory. What remains is copied as it is, in float32.

An interrupted run resumes after the last slice that reached the disk.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress

from meki_edge import console, manifest
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import atomic_path, read_json, require_free_space, storage_errors, write_json
from meki_edge.manifest import Manifest, StageOutput
from meki_edge.model import config as model_config
from meki_edge.model.checkpoint import HEAD, TOKENIZER, WEIGHTS, Checkpoint
from meki_edge.model.config import ROM_FORM, ModelConfig
from meki_edge.model.decoder import CausalLM
from meki_edge.model.row_spaces import row_spaces
from meki_edge.reparam_fold import Folder, RomFile
from meki_edge.reparam_proof import Proof, Windows, prove, stored_rows
from meki_edge.rom import spec as rom_spec
from meki_edge.rom.addressing import Addressing
from meki_edge.rom.reader import RomReader
from meki_edge.safetensors_io import SafetensorsWriter
from meki_edge.tokens import TokenShards, open_shards

STAGE = "reparam"
TOLERANCE = 1e-4  # of the logit scale: float32 rounding through a deep model stays far below
COPY_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class ReparamConfig:
    """Options of ``meki-edge reparam``."""

    table_precision: str = "fp16"
    """How rows are stored: ``fp32``, ``fp16``, ``bf16``, ``int8`` (a scale a layer), ``int4`` or ``int4_64``
    (a scale per 32 or 64 elements)."""
    checksums: bool = False
    """Whether a checksum of every row lies behind the rows: four bytes each."""
    proof_windows: int | None = None
    """How many windows of validation text the proof reads; by default as many as training's validation."""
    window_length: int | None = None
    """Predicted tokens a window; by default as in training's validation."""
    chunk_rows: int = 1024
    """Rows folded at a time (fewer if they are wide): enough for the products to run at full speed,
    few enough for what lies between them to stay in cache."""


def reparam(checkpoint: Path, tokens: Path, out: Path, config: ReparamConfig, *, force: bool = False) -> Manifest:
    """Fold ``checkpoint`` (training form) into ``out`` (ROM form and its ROM files) and prove it on ``tokens``.

    Raises:
        UserError: nothing to fold, or folded already; inputs that changed or do not fit each other;
            a value that the table's precision cannot hold; no space; a proof that fails.
    """
    source = manifest.load(checkpoint, stages=("train", STAGE))
    _require_training_form(checkpoint)
    config = _completed(config, source, checkpoint)
    shards = open_shards(tokens)
    with console.progress() as bar, Checkpoint(checkpoint) as opened:
        manifest.verify(checkpoint, source, _megabytes(bar, "verify", sum(e.bytes for e in source.files.values())))
        windows = _windows(opened, source, shards, config)
        folders = [Folder(opened, space) for space in row_spaces(opened.config)]
        output = StageOutput(
            out,
            stage=STAGE,
            config=to_dict(config),
            inputs={"checkpoint": checkpoint, "tokens": tokens},
            tools=("torch", "numpy"),
            force=force,
        )
        if output.complete is not None:
            return output.complete
        digests = {
            "tokenizer_sha256": _sha256(source, checkpoint, "tokenizer"),
            "source_sha256": _sha256(source, checkpoint, "weights"),
        }
        roms = [
            RomFile(
                folder,
                output.partial,
                windows.row_ids(folder.addressing),
                config.table_precision,
                digests,
                checksums=config.checksums,
            )
            for folder in folders
        ]
        ram_parameters = _write_rom_form(opened, output.partial, bar)
        _fold(roms, config.chunk_rows, bar)
        proof = _prove(opened, output.partial, windows, roms, bar)
        return output.finish(
            roles={
                model_config.FILE_NAME: "config",
                WEIGHTS: "weights",
                TOKENIZER: "tokenizer",
                **{folder.space.file: folder.space.role for folder in folders},
            },
            metrics={
                "proof": to_dict(proof),
                "validation_loss": proof.loss_coded,
                "validation_tokens": proof.tokens,
                "ram_parameters": ram_parameters,
                **_sizes(roms, shards),
            },
        )


def _require_training_form(checkpoint: Path) -> None:
    path = checkpoint / model_config.FILE_NAME
    config = model_config.parse(read_json(path), path)
    if not config.memories:
        raise UserError(
            "the checkpoint is dense: there is nothing to fold",
            where=checkpoint,
            fix="give it to `meki-edge export` as it is",
        )
    if config.folded:
        raise UserError(
            "the checkpoint is folded already (memory_form 'rom')",
            where=checkpoint,
            fix="give it to `meki-edge export`, or fold the trained checkpoint that it came from",
        )


def _completed(config: ReparamConfig, source: Manifest, checkpoint: Path) -> ReparamConfig:
    """``config`` with its defaults taken from the checkpoint's validation, checked."""
    rom_spec.table_codec(config.table_precision)
    for field, metric in (("proof_windows", "validation_windows"), ("window_length", "window_length")):
        flag = "--" + field.replace("_", "-")
        if getattr(config, field) is None:
            if metric not in source.metrics:
                raise UserError(f"the manifest does not record {metric!r}", where=checkpoint, fix=f"give {flag}")
            config = dataclasses.replace(config, **{field: source.metrics[metric]})
        if getattr(config, field) < 1:
            raise UserError(f"{field} is {getattr(config, field)}", where=flag, fix="give a positive number")
    if config.chunk_rows < 1:
        raise UserError(f"chunk_rows is {config.chunk_rows}", where="--chunk-rows", fix="give a positive number")
    return config


def _sha256(source: Manifest, directory: Path, role: str) -> str:
    return source.files[source.file(directory, role).name].sha256


def _windows(checkpoint: Checkpoint, source: Manifest, shards: TokenShards, config: ReparamConfig) -> Windows:
    if _sha256(source, checkpoint.directory, "tokenizer") != shards.tokenizer_sha256:
        raise UserError(
            "the tokens were made with another tokenizer than the checkpoint's",
            where=shards.directory,
            fix="give the tokens that the checkpoint was trained on",
        )
    if shards.vocab_size > checkpoint.config.vocab_size:
        raise UserError(
            f"the tokens have ids up to {shards.vocab_size - 1}, the model's vocabulary {checkpoint.config.vocab_size}",
            where=shards.directory,
            fix="give the tokens that the checkpoint was trained on",
        )
    assert config.proof_windows is not None and config.window_length is not None
    return Windows.of(shards.validation_windows(config.proof_windows, config.window_length + 1))


def _write_rom_form(checkpoint: Checkpoint, directory: Path, bar: Progress) -> int:
    """Write config, tokenizer and the tensors that stay in RAM; return how many parameters those are."""
    config = dataclasses.replace(checkpoint.config, memory_form=ROM_FORM)
    write_json(directory / model_config.FILE_NAME, model_config.to_json(config))
    with storage_errors(directory / TOKENIZER):
        shutil.copyfile(checkpoint.directory / TOKENIZER, directory / TOKENIZER)
    shapes = _ram_shapes(config)
    if not (directory / WEIGHTS).is_file():
        _copy_tensors(checkpoint, shapes, directory / WEIGHTS, bar)
    return sum(map(math.prod, shapes.values()))


def _ram_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in CausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop(HEAD)
    return shapes


def _copy_tensors(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], path: Path, bar: Progress) -> None:
    """Copy tensors into a new safetensors file, at most ``COPY_BYTES`` at a time."""
    total = 4 * sum(map(math.prod, shapes.values()))
    require_free_space(path.parent, total, "the model without its tables")
    advance = _megabytes(bar, "copy", total)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        writer = SafetensorsWriter(file, {name: ("F32", shape) for name, shape in shapes.items()}, {"format": "pt"})
        for name, shape in shapes.items():
            for rows in _slices(shape):
                data = checkpoint.read(name, rows).numpy()
                writer.write(data)
                advance(data.nbytes)
        writer.finish()


def _slices(shape: tuple[int, ...]) -> list[slice | None]:
    if math.prod(shape) * 4 <= COPY_BYTES:
        return [None]
    step = max(1, COPY_BYTES // (4 * math.prod(shape[1:])))
    return [slice(start, start + step) for start in range(0, shape[0], step)]


def _fold(roms: list[RomFile], chunk_rows: int, bar: Progress) -> None:
    """Write the ROM files, or the rest of them."""
    task = bar.add_task("fold (rows)", total=sum(rom.spec.num_rows for rom in roms))
    before = 0
    for rom in roms:
        rom.write(chunk_rows, lambda done, before=before: bar.update(task, completed=before + done))
        before += rom.spec.num_rows


def _prove(
    training: Checkpoint, directory: Path, windows: Windows, roms: list[RomFile], bar: Progress
) -> Proof:
    """Prove the ROM form in ``directory``; if the proof fails, remove it."""
    task = bar.add_task("prove (layers)", total=3 * training.config.num_hidden_layers)
    spaces = [rom.folder.space for rom in roms]
    with ExitStack() as stack:
        folded = stack.enter_context(Checkpoint(directory))
        kept = [stack.enter_context(RomReader(rom.kept_path)) for rom in roms]
        stored = [stack.enter_context(RomReader(rom.path)) for rom in roms]
        proof = prove(
            training,
            folded,
            windows,
            stored_rows(
                spaces,
                [rom.folder.addressing for rom in roms],
                [partial(rom.kept_segment, reader) for rom, reader in zip(roms, kept, strict=True)],
            ),
            stored_rows(spaces, [reader.spec.addressing for reader in stored], [reader.segment for reader in stored]),
            lambda layers: bar.advance(task, layers),
        )
    if not proof.difference_float32 <= TOLERANCE * proof.logit_scale:
        shutil.rmtree(directory)
        raise UserError(
            f"the folded model is not the trained one: logits differ by {proof.difference_float32:.3g} "
            f"where the largest is {proof.logit_scale:.3g}",
            where=training.directory,
            fix="check that the weights are finite; if they are, report this with the checkpoint's config.json",
        )
    return proof


def _sizes(roms: list[RomFile], shards: TokenShards) -> dict[str, int | float]:
    """What the ROM files take on storage, and what a token reads of them at most and on average."""
    return {
        "rom_bytes": sum(rom.path.stat().st_size for rom in roms),
        "rom_bytes_per_token": sum(rom.spec.addressing.rows_per_token * rom.spec.row_stride for rom in roms),
        "rom_bytes_per_token_expected": sum(
            _mean_rows(rom.spec.addressing, shards.validation) * rom.spec.row_stride for rom in roms
        ),
    }


def _mean_rows(addressing: Addressing, text: np.ndarray) -> float:
    """Rows that a token of ``text`` ``[N]`` needs, on average."""
    times = np.bincount(text)
    ids = np.flatnonzero(times)
    return float(np.average(addressing.row_counts(ids), weights=times[ids]))


def _megabytes(bar: Progress, description: str, total: int) -> Callable[[int], None]:
    """A task measured in bytes and shown in MB; call the result with the bytes of each step."""
    task = bar.add_task(f"{description} (MB)", total=math.ceil(total / 1e6))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        bar.update(task, completed=math.ceil(done / 1e6))

    return advance
