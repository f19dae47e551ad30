"""Accuracy on held-out text: perplexity, and how often the likeliest next token is float's.

Both graphs run as on a device, prefill in chunks and then single steps from the cache that they
left, on ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibration.samples import Host, Windows
from export.onnx_decoder import Sessions
from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import atomic_path


PERPLEXITY = "--max-perplexity-increase"
CHANCE = 0.01
"""By how much, relative, perplexity may well fall on a text that is long enough."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model says of text ``[N, L]``: ``log_probabilities`` ``[N, L - 1]`` of each window's next tokens
    (nats), and the likeliest next tokens ``[N, L]``."""

    log_probabilities: np.ndarray
    likeliest: np.ndarray

    @property
    def perplexity(self) -> float:
        """exp of the mean cross-entropy."""
        return float(np.exp(-self.log_probabilities.mean()))


def finished(found: Path, count: int) -> Scores | None:
    """What :func:`score` left in the file ``found``, if it came to all ``count`` windows."""
    if not found.is_file():
        return None
    with np.load(found) as arrays:
        scores = Scores(log_probabilities=arrays["scores"], likeliest=arrays["likeliest"])
    return scores if len(scores.likeliest) == count else None


def score(
    host: Host,
    prefill: Sessions,
    decode: Sessions,
    text: Windows,
    decode_steps: int,
    found: Path,
    description: str,
) -> Scores:
    """Run ``text``; resumes from, and leaves behind, the file ``found`` (``.npz``).

    The last ``decode_steps`` tokens of each window go through the decode graph.
    """
    scores: list[np.ndarray] = []
    likeliest: list[np.ndarray] = []
    if found.is_file():
        with np.load(found) as arrays:
            scores, likeliest = list(arrays["scores"]), list(arrays["likeliest"])
    with console.progress() as bar:
        task = bar.add_task(f"{description} (windows)", total=len(text), completed=len(scores))
        for number in range(len(scores), len(text)):
            decoder, ids = host.decoder(), text[number]
            split = len(ids) - decode_steps
            logits = list(decoder.prefill(prefill, ids[:split])) if split else []
            logits += [decoder.decode(decode, token) for token in ids[split:]]
            scores.append(np.array([_log_probability(row, target) for row, target in zip(logits, ids[1:])]))
            likeliest.append(np.array([row.argmax() for row in logits]))
            with atomic_path(found) as temporary, open(temporary, "wb") as file:
                np.savez(file, scores=np.stack(scores), likeliest=np.stack(likeliest))
            bar.advance(task)
    return Scores(log_probabilities=np.stack(scores), likeliest=np.stack(likeliest))


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A precision beside float on the same text."""

    tokens: int
    float_perplexity: float
    perplexity: float
    top1_agreement: float
    decode_top1_agreement: float

    @property
    def perplexity_increase(self) -> float:
        """Relative to float: 0.01 is one percent more."""
        return self.perplexity / self.float_perplexity - 1


def compare(found: Scores, reference: Scores, decode_steps: int) -> Accuracy:
    """How ``found`` follows ``reference``."""
    agree = found.likeliest == reference.likeliest
    return Accuracy(
        tokens=agree.size,
        float_perplexity=reference.perplexity,
        perplexity=found.perplexity,
        top1_agreement=float(agree.mean()),
        decode_top1_agreement=float(agree[:, agree.shape[1] - decode_steps :].mean()) if decode_steps else 1.0,
    )


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit of the gate: ``option`` is what sets it; ``met`` says whether ``found`` keeps it."""

    option: str
    what: str
    found: float
    limit: float
    met: bool

    @property
    def is_clear(self) -> bool:
        """Whether it is met by more than chance: no quantization makes a model better by as much as it may lose."""
        return not (self.met and self.option == PERPLEXITY and self.found < -max(abs(self.limit), CHANCE))


def limits(accuracy: Accuracy, *, max_perplexity_increase: float, min_top1_agreement: float) -> list[Limit]:
    """The gate's limits. A NaN meets none."""
    increase, agreement = accuracy.perplexity_increase, accuracy.top1_agreement
    return [
        Limit(
            option=PERPLEXITY,
            what="perplexity increase",
            found=increase,
            limit=max_perplexity_increase,
            met=increase <= max_perplexity_increase,
        ),
        Limit(
            option="--min-top1-agreement",
            what="top-1 agreement",
            found=agreement,
            limit=min_top1_agreement,
            met=agreement >= min_top1_agreement,
        ),
    ]


def require(found: Sequence[Limit], report: Path) -> None:
    """Raise :class:`UserError` naming the limits that are not met."""
    failed = [limit for limit in found if not limit.met]
    if failed:
        raise UserError(
            "the accuracy gate failed: "
            + "; ".join(f"{limit.what} is {limit.found:.4f}, the limit is {limit.limit:.4f}" for limit in failed),
            where=report,
            fix="choose a finer --precision, keep sensitive layers finer with --max-divergence, "
            f"or change {' and '.join(limit.option for limit in failed)}",
        )


def _log_probability(logits: np.ndarray, target: int) -> float:
    wide = logits.astype(np.float64)
    largest = wide.max()
    return float(wide[target] - largest - np.log(np.exp(wide - largest).sum()))
