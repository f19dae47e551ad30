"""Checkpoints of a running training: whole or absent, the two newest kept.

A checkpoint is one safetensors file: the tensors of model and optimizer, and the run's scalars as
metadata strings. Nothing in it can run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import atomic_path
from meki_edge.model.checkpoint import save_tensors
from meki_edge.safetensors_io import SafetensorsFile
from meki_edge.train.optimizer import Optimizer

KEPT = 2
MODEL = "model/"
OPTIMIZER = "optimizer/"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Where a run stands after ``step`` steps, ``seconds`` of which it spent training."""

    step: int
    seconds: float
    tensors: Mapping[str, Tensor]

    def restore(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        """Load the tensors into a model and its optimizer."""
        result = model.load_state_dict(_under(MODEL, self.tensors), strict=False)
        assert not result.unexpected_keys
        optimizer.restore(_under(OPTIMIZER, self.tensors), self.step)


def save(directory: Path, model: torch.nn.Module, optimizer: Optimizer, *, step: int, seconds: float) -> None:
    """Write the checkpoint of ``step``, then remove all but the ``KEPT`` newest."""
    named = [*model.named_parameters(), *model.named_buffers()]  # a tied head appears once
    tensors = {MODEL + name: tensor for name, tensor in named}
    tensors |= {OPTIMIZER + name: tensor for name, tensor in optimizer.tensors().items()}
    with atomic_path(directory / f"step-{step:08d}.safetensors") as path:
        save_tensors(path, tensors, {"step": str(step), "seconds": str(seconds)})
    for old in _newest_first(directory)[KEPT:]:
        old.unlink()


def load_newest(directory: Path) -> TrainingState | None:
    """The newest readable checkpoint, or None; what a killed process left half-written is removed."""
    for leftover in directory.glob(".*.tmp"):
        leftover.unlink()
    for path in _newest_first(directory):
        try:
            with SafetensorsFile(path) as file:
                return TrainingState(
                    step=int(file.metadata["step"]),
                    seconds=float(file.metadata["seconds"]),
                    tensors={name: torch.from_numpy(file.read(name)) for name in file.tensors},
                )
        except UserError as error:
            console.info(f"{path.name} cannot be read ({error.what}); an older checkpoint is tried")
            path.unlink()
    return None


def _newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*.safetensors"), reverse=True)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
