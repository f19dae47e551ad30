"""Options of `meki-edge calibrate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from calibration.precision import FLOAT16, Precision, precision
from calibration.ranges import METHODS
from meki_edge.errors import UserError

INTEGERS = ("uint8", "uint16")
WINDOW_LENGTH = 512
"""Tokens a window, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """What to quantize to, on how much text, and what must come out."""

    precision: str = "w8a16"
    """A name of :mod:`calibration.precision`."""

    samples: int = 64
    """Windows of training text whose activations are observed."""

    window_length: int | None = None
    """Tokens a window, in calibration and in the gate, at most the context. None: 512, or the context where that
    is shorter."""

    decode_steps: int = 2
    """The last tokens of each window, which go through the decode graph."""

    method: str = "minmax"
    """How an activation's range follows from what was seen: minmax, percentile or mse."""

    percentile: float = 99.99
    """Share of the values that the method percentile keeps, in percent, on either side."""

    kv_dtype: str | None = None
    """How the host stores keys and values: uint8, uint16 or float32, or float16 where the graph computes
    in floating point (default: uint8, or float16 there)."""

    rows_dtype: str | None = None
    """How the host reads a memory's rows: uint8, uint16, or float32 for ROM files as they are
    (default: uint16, or float32 where the graph computes in floating point)."""

    sensitivity: bool = True
    """Whether each unit's own loss is measured."""

    budget_bytes: int | None = None
    """Raise the most sensitive units to a finer scheme, for at most this many more bytes of weights."""

    max_divergence: float | None = None
    """Raise the most sensitive units until the losses of all sum to this (nats) or less."""

    gate_windows: int = 8
    """Windows of validation text in the accuracy gate."""

    max_perplexity_increase: float = 0.1
    """The gate: largest increase of perplexity over float, relative."""

    min_top1_agreement: float = 0.8
    """The gate: smallest share of tokens whose likeliest successor is float's."""

    @property
    def chosen(self) -> Precision:
        """The precision by its name."""
        return precision(self.precision)

    @property
    def kv(self) -> str:
        """The dtype of keys and values."""
        return self.kv_dtype or (FLOAT16 if self.chosen.is_float else "uint8")

    @property
    def rows(self) -> str:
        """The dtype of rows."""
        return self.rows_dtype or ("float32" if self.chosen.is_float else "uint16")

    @property
    def is_mixed(self) -> bool:
        """Whether units are raised."""
        return self.budget_bytes is not None or self.max_divergence is not None


def check(config: CalibrateConfig) -> None:
    """Raise :class:`UserError` for values that make no sense, whatever the model."""
    chosen = config.chosen
    kinds = (FLOAT16, "float32") if chosen.is_float else (*INTEGERS, "float32")
    _one_of("--method", config.method, METHODS)
    _one_of(f"--kv-dtype of {chosen.name}", config.kv, kinds)
    _one_of(f"--rows-dtype of {chosen.name}", config.rows, ("float32",) if chosen.is_float else kinds)
    for option, value, least in (
        ("--samples", config.samples, 1),
        ("--window-length", config.window_length, 2),
        ("--decode-steps", config.decode_steps, 0),
        ("--gate-windows", config.gate_windows, 1),
        ("--budget-bytes", config.budget_bytes, 0),
        ("--max-divergence", config.max_divergence, 0),
    ):
        if value is not None and not value >= least:
            raise UserError(f"{option} is {value}", where=option, fix=f"give at least {least}")
    if not 50 < config.percentile <= 100:
        raise UserError(
            f"--percentile is {config.percentile}", where="--percentile", fix="give more than 50, up to 100"
        )
    if not 0 <= config.min_top1_agreement <= 1:
        raise UserError(
            f"--min-top1-agreement is {config.min_top1_agreement}",
            where="--min-top1-agreement",
            fix="give a share between 0 and 1",
        )
    if not math.isfinite(config.max_perplexity_increase):
        raise UserError(
            f"--max-perplexity-increase is {config.max_perplexity_increase}",
            where="--max-perplexity-increase",
            fix="give a number, such as 0.1 for ten percent",
        )
    if config.is_mixed:
        _check_mixed(config, chosen)


def fitted(config: CalibrateConfig, context_length: int) -> CalibrateConfig:
    """``config`` with a window length, for a model of ``context_length`` slots.

    Raises:
        UserError: windows that do not fit the context, or all of a window decoded step by step.
    """
    length = min(WINDOW_LENGTH, context_length) if config.window_length is None else config.window_length
    if length > context_length:
        raise UserError(
            f"windows of {length} tokens do not fit the context of {context_length}",
            where="--window-length",
            fix=f"give at most {context_length}, or export with a longer --context-length",
        )
    if config.decode_steps >= length:
        raise UserError(
            f"{config.decode_steps} decode steps leave nothing to prefill of windows of {length} tokens",
            where="--decode-steps",
            fix=f"give at most {length - 1}, or longer windows with --window-length",
        )
    return replace(config, window_length=length)


def _check_mixed(config: CalibrateConfig, chosen: Precision) -> None:
    option = "--budget-bytes" if config.budget_bytes is not None else "--max-divergence"
    if chosen.finer is None:
        raise UserError(f"there is nothing finer than {chosen.name}", where=option, fix=f"leave {option} out")
    if not config.sensitivity:
        raise UserError(
            "sensitive layers cannot be chosen without measuring them", where=option, fix="leave --no-sensitivity out"
        )
    if config.max_divergence is None and chosen.finer.weights == chosen.layers.weights:
        raise UserError(
            f"a finer layer of {chosen.name} takes no more bytes, so every layer fits the budget",
            where=option,
            fix=f"give --max-divergence, or --precision {chosen.finer}",
        )


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{value!r} is not possible", where=option, fix=f"use {' or '.join(known)}")
