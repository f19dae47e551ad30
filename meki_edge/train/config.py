"""Options of `meki-edge train`, and the checks that need no data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from meki_edge.errors import UserError, nearest

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "bf16", "fp32")
MOST_WARMUP_STEPS = 500
NO_OPTIONS = frozenset({"beta1", "beta2", "epsilon", "clip_norm"})
"""Fields that the command line does not offer."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The defaults are MeKi's recipe, but for the size of the run."""

    steps: int
    """Optimizer steps (the paper: 50,000)."""
    batch_size: int = 16
    """Windows of one optimizer step (the paper: 256)."""
    window_length: int = 512
    """Tokens predicted in a window (the paper: 4,096)."""
    gradient_accumulation_steps: int = 1
    """Equal parts in which a batch passes through the model, to save memory; the batch stays the same."""
    learning_rate: float = 4e-4
    """Peak learning rate."""
    minimum_learning_rate_ratio: float = 0.5
    """The last step's learning rate as a share of the peak (the paper: 4e-4 → 2e-4)."""
    warmup_steps: int | None = None
    """Steps of linear warmup; without it, a tenth of the run and at most 500. :func:`check` fills it in."""
    weight_decay: float = 0.1
    """On matrices, tables and 0-D scalars, not on norm gains: see :mod:`meki_edge.train.optimizer`."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    epsilon: float = 1e-8
    """AdamW's addition to the root of the second moment."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    table_learning_rate_scale: float | None = None
    """Learning rate of memory tables relative to the backbone's; without it, as each memory's paper has it."""
    table_weight_decay: float | None = None
    """Weight decay of memory tables; without it, as each memory's paper has it."""
    separate_table_clip: bool | None = None
    """Clip the tables' gradients by a norm of their own; without it, as each memory's paper has it."""
    freeze_up_steps: int = 0
    """Steps in which the up projections that a memory adds to (STAPLE's) stay as they are."""
    precision: str = "auto"
    """Of matrix products: ``bf16`` (autocast), ``fp32``, or ``auto``: bf16 where the processor has it.
    Weights, optimizer state, softmax of the loss and validation are float32 either way."""
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: cuda if there is one."""
    seed: int = 0
    """Of the initial weights and of the data order."""
    validate_every: int = 250
    """Steps between validations; the last step always validates."""
    validation_windows: int = 64
    """Windows of held-out text, the same each time; as many as there are, if fewer."""
    checkpoint_every: int = 250
    """Steps between checkpoints; an interrupt also writes one."""


def check(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with the warmup of its run; raise :class:`UserError` for a value that cannot work."""

    def wrong(name: str, fix: str) -> UserError:
        option = name if name in NO_OPTIONS else f"--{name.replace('_', '-')}"
        return UserError(f"{option} is {getattr(config, name)!r}", where=option, fix=fix)

    may_be_zero = {"warmup_steps", "weight_decay", "seed", "beta1", "beta2", "minimum_learning_rate_ratio"}
    may_be_zero |= {"table_weight_decay", "freeze_up_steps"}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None or isinstance(value, (str, bool)):
            continue
        if not (value > 0 or (value == 0 and field.name in may_be_zero)):
            raise wrong(field.name, "give a number that is not negative" if value < 0 else "give a positive number")
    for name in ("beta1", "beta2"):
        if getattr(config, name) >= 1:
            raise wrong(name, "give a number below 1")
    if config.minimum_learning_rate_ratio > 1:
        raise wrong("minimum_learning_rate_ratio", "give a share of the peak, at most 1")
    if config.warmup_steps is None:
        config = dataclasses.replace(config, warmup_steps=min(MOST_WARMUP_STEPS, config.steps // 10))
    if config.warmup_steps >= config.steps:
        raise wrong("warmup_steps", f"give fewer than the {config.steps} steps of the run, or leave it out")
    if config.freeze_up_steps > config.steps:
        raise wrong("freeze_up_steps", f"give at most the {config.steps} steps of the run")
    if config.batch_size % config.gradient_accumulation_steps:
        raise wrong("gradient_accumulation_steps", f"give a divisor of the batch size {config.batch_size}")
    for name, known in (("device", DEVICES), ("precision", PRECISIONS)):
        value = getattr(config, name)
        if value not in known:
            raise wrong(name, f"use {', '.join(known)}{nearest(value, known)}")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise wrong("device", "PyTorch sees no CUDA device here: use cpu, or install a CUDA build of PyTorch")
    return config


def resolve_device(config: TrainConfig) -> torch.device:
    """The device that ``config.device`` stands for on this machine."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def resolve_precision(config: TrainConfig, device: torch.device) -> str:
    """``bf16`` or ``fp32``: what ``config.precision`` stands for on ``device``."""
    if config.precision != "auto":
        return config.precision
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        abilities = torch.cpu.get_capabilities()
        fast = any(abilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # the last is Arm's
    return "bf16" if fast else "fp32"
