"""Are the graphs the model? All are run on real text and compared with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from export.onnx_decoder import OnnxDecoder, cpu_sessions
from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.graph_spec import GraphSpec
from meki_edge.model.checkpoint import load_model
from meki_edge.model.rom_rows import rom_rows
from meki_edge.rom.reader import RomReader

DECODE_STEPS = 8
TOLERANCES = {"float32": 1e-3, "float16": 1e-2}
"""Largest logit difference that passes, relative to the largest logit, by the cache's type.

With float32 only sums are reordered; float16 rounds what is kept to 11 bits.
"""


def verify(
    directory: Path, spec: GraphSpec, checkpoint: Path, roms: Sequence[Path], ids: np.ndarray
) -> dict[str, float | int]:
    """Compare the graphs in ``directory`` with the model of ``checkpoint`` on real text ``ids`` ``[N]``.

    PyTorch runs the whole window at once, without a cache. The graphs of each context run it (or as
    much of it as fits) as a device does: prefill chunks, the last one partial where T allows it, then
    cached decode steps, one token each. Only one graph, or the PyTorch model, is in memory at a time.

    Args:
        roms: the ROM files whose rows both sides use, in the order of the spec.

    Returns:
        the differences, as metrics.

    Raises:
        UserError: they differ by more than ``TOLERANCES`` allow.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(RomReader(rom)) for rom in roms]
        embedding = stack.enter_context(RomReader(directory / spec.embedding.file))
        bar = stack.enter_context(console.progress())
        task = bar.add_task("verify", total=1 + len(spec.graphs))
        expected = _torch_logits(checkpoint, readers, ids)
        bar.advance(task)
        scale = float(np.abs(expected).max())
        metrics: dict[str, float | int] = {"verify_tokens": len(ids), "verify_logit_scale": scale}
        for suffix, one in spec.contexts.items():
            text = ids[: one.context_length]
            num_prompt = _prompt_length(len(text), one.prefill.num_tokens)
            decoder = OnnxDecoder(one, embedding, readers)
            prefill = decoder.prefill(cpu_sessions(directory, one.prefill), text[:num_prompt])
            metrics |= _compare(directory, spec, f"prefill{suffix}", prefill, expected[:num_prompt], scale)
            bar.advance(task)
            sessions = cpu_sessions(directory, one.decode)
            decode = np.stack([decoder.decode(sessions, token) for token in text[num_prompt:]])
            metrics |= _compare(directory, spec, f"decode{suffix}", decode, expected[num_prompt : len(text)], scale)
            bar.advance(task)
    return metrics


def _compare(
    directory: Path, spec: GraphSpec, name: str, found: np.ndarray, expected: np.ndarray, scale: float
) -> dict[str, float]:
    """The largest difference of one graph's logits ``[n, V]``, as a metric; more than ``TOLERANCES`` is an error."""
    error = float(np.abs(found - expected).max())
    if not error <= TOLERANCES[spec.decode.by_role("past_key")[0].dtype] * scale:  # a NaN must not pass
        raise UserError(
            f"logits differ from PyTorch's by up to {error:.3g} at a scale of {scale:.3g}",
            where=directory / spec.graphs[name].parts[-1].file,
            fix="report this with the model's config.json: the exported graph is not the model",
        )
    return {f"verify_{name}_max_abs_error": error}


def _prompt_length(num_tokens: int, chunk: int) -> int:
    """How many tokens go through prefill: all but the decode steps, and no whole number of chunks."""
    length = max(num_tokens - DECODE_STEPS, 1)
    return length - 1 if length % chunk == 0 and length > 1 else length


@torch.inference_mode()
def _torch_logits(checkpoint: Path, roms: list[RomReader], ids: np.ndarray) -> np.ndarray:
    """Logits ``[N, V]`` of ``ids`` ``[N]`` from one forward pass over the whole window."""
    model = load_model(checkpoint).eval()
    batch = torch.from_numpy(ids)[None]
    return model(batch, rows=rom_rows(model.config, roms, batch))[0].numpy()
