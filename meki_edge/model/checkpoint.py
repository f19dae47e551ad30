"""Checkpoints on disk: ``config.json`` and safetensors, sharded or not, read tensor by tensor.

The same layout as Hugging Face's, so a Qwen3 checkpoint from its hub opens as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meki_edge.errors import UserError
from meki_edge.files import read_json, storage_errors, write_json
from meki_edge.model import config as model_config
from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import CausalLM
from meki_edge.model.moe import published_parts
from meki_edge.safetensors_io import SafetensorsFile, SafetensorsWriter

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

# Parameters, and what addressing needs: as they may be stored, and (first) as they are written.
_STORED = {torch.float32: ("F32", "BF16", "F16", "F64"), torch.int64: ("I64",)}


class Checkpoint:
    """A checkpoint directory, opened lazily: tensors are read when asked for.

    Parameters come in float32, whatever their precision on disk; integers (addresses) as they are.

    Raises:
        UserError: a file is missing or broken, or the tensors do not fit ``config.json``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = model_config.parse(
            read_json(directory / model_config.FILE_NAME), directory / model_config.FILE_NAME
        )
        self._files: dict[str, SafetensorsFile] = {}
        # Parameters that a published checkpoint stores in pieces: the pieces of each slice.
        self._parts: dict[str, list[tuple[str, ...]]] = {}
        try:
            for name in weight_files(directory):
                file = SafetensorsFile(directory / name)
                self._files.update(dict.fromkeys(file.tensors, file))
            self._check_names()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the weight files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """The names of the tensors, sorted."""
        pieces = {piece for parts in self._parts.values() for slot in parts for piece in slot}
        return sorted((self._files.keys() - pieces) | self._parts.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header."""
        if name in self._parts:
            pieces = [self.shape(piece) for piece in self._parts[name][0]]
            return len(self._parts[name]), sum(piece[0] for piece in pieces), *pieces[0][1:]
        return self._files[name].entry(name).shape

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Tensor ``name`` (or a slice of its rows): float32, or int64 as stored."""
        if name in self._parts:
            chosen = self._parts[name][rows or slice(None)]
            return torch.stack([torch.cat([self.read(piece) for piece in pieces]) for pieces in chosen])
        return _tensor(self._files[name].read(name, rows))

    def read_rows(self, name: str, ids: np.ndarray) -> Tensor:
        """Rows ``ids`` of a matrix as float32 ``[N, dim]``."""
        return _tensor(self._files[name].read_rows(name, ids))

    @property
    def head_name(self) -> str:
        """The tensor that produces logits: the tied embedding or the head."""
        return EMBEDDING if self.config.tie_word_embeddings else HEAD

    def _check_names(self) -> None:
        with torch.device("meta"):
            expected = CausalLM(self.config).state_dict()
        if self.config.tie_word_embeddings:
            expected.pop(HEAD)
            self._files.pop(HEAD, None)  # some exporters store the tied copy too
        for name in list(expected):
            parts = published_parts(name, self.config)
            if parts and name not in self._files:
                self._parts[name] = parts
                slices = expected.pop(name)
                for pieces, whole in zip(parts, slices, strict=True):
                    expected |= zip(pieces, whole.chunk(len(pieces)), strict=True)
        for name in sorted(expected.keys() | self._files.keys()):
            if name not in self._files:
                problem = "is missing"
            elif name not in expected:
                problem = "is not part of this architecture"
            elif self.shape(name) != tuple(expected[name].shape):
                problem = f"has shape {self.shape(name)}, config.json asks for {tuple(expected[name].shape)}"
            elif (dtype := self._files[name].entry(name).dtype) not in _STORED[expected[name].dtype]:
                problem = f"is {dtype}, not {' or '.join(_STORED[expected[name].dtype])}"
            else:
                continue
            raise UserError(
                f"the tensor {name!r} {problem}",
                where=self.directory,
                fix="check that config.json and the weights belong together",
            )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.dtype.kind == "i" else array.astype(np.float32, copy=False))


def weight_files(directory: Path) -> list[str]:
    """The names of the safetensors files of a checkpoint directory (an index or a single file)."""
    if (directory / INDEX).is_file():
        return sorted(set(read_json(directory / INDEX)["weight_map"].values()))
    return [WEIGHTS]


def load_model(directory: Path) -> CausalLM:
    """The model of a checkpoint directory, on the CPU; parameters in float32."""
    with Checkpoint(directory) as checkpoint:
        with torch.device("meta"):
            model = CausalLM(checkpoint.config)
        tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    model.load_state_dict(tensors, strict=False, assign=True)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.requires_grad_(False)


def save_model(directory: Path, model: CausalLM) -> None:
    """Write ``config.json`` and ``model.safetensors`` (tied head stored once) into ``directory``."""
    write_json(directory / model_config.FILE_NAME, model_config.to_json(model.config))
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        tensors.pop(HEAD)
    save_tensors(directory / WEIGHTS, tensors, {"format": "pt"})


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, one tensor in memory at a time; a full disk is a :class:`UserError`.

    (The `safetensors` library hides the operating system's error in one of its own.)
    """
    declared = {name: (_STORED[tensor.dtype][0], tuple(tensor.shape)) for name, tensor in tensors.items()}
    with storage_errors(path), open(path, "wb") as file:
        writer = SafetensorsWriter(file, declared, metadata)
        for tensor in tensors.values():
            if tensor.numel() > 0:  # a memoryview of nothing cannot be cast
                writer.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        writer.finish()


__all__ = ["Checkpoint", "ModelConfig", "load_model", "save_model", "save_tensors", "weight_files"]
