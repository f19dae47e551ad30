"""The host's side of the exported graphs in NumPy: cache, mask, rotary angles, rows, memory states.

The C++ harness does the same on a device. Here it serves to verify graphs, to compare compiled
binaries with them, and to collect what calibration needs. All values are float32 here, whatever the
graph's inputs and outputs are; only what is kept is kept in the graph's own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from meki_edge.graph_spec import Graph, GraphSpec, TensorSpec
from meki_edge.rom.reader import RomReader


class Session(Protocol):
    """What runs one part of a graph: an ONNX Runtime session, or anything that stands before one."""

    def run(self, output_names: Any, input_feed: Any) -> Any:
        """The outputs of these names, in that order, as ONNX Runtime returns them."""


Sessions = Sequence[Session]
"""One for each part of a graph, in order."""


def cpu_session(model: Path | bytes, folder: Path | None = None, *, prepack: bool = True) -> ort.InferenceSession:
    """An ONNX Runtime session of one part on the CPU: the oracle for every other runtime.

    Q/DQ pairs are computed as they stand, in float32, never fused into integer kernels, which round otherwise.

    Args:
        model: its file, or its bytes.
        folder: where the weights of a model that is given as bytes lie.
        prepack: if not, the weights stay where they are mapped from instead of being copied into another layout.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.disable_prepacking", "0" if prepack else "1")
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def cpu_sessions(directory: Path, graph: Graph, *, prepack: bool = True) -> list[ort.InferenceSession]:
    """Sessions of the parts of a graph, whose files lie in ``directory``."""
    return [cpu_session(directory / part.file, prepack=prepack) for part in graph.parts]


class OnnxDecoder:
    """One sequence and what is kept of it. Sessions are the caller's, so only one graph need be loaded.

    Args:
        embedding: rows for ``input_embeds``.
        roms: rows for ``memory_rows``, one reader a ROM file of the spec, in its order.
    """

    def __init__(self, spec: GraphSpec, embedding: RomReader, roms: Sequence[RomReader]) -> None:
        assert len(spec.roms) == len(roms), "a model with memories needs its ROM files"
        self.spec = spec
        self._embedding, self._roms = embedding, roms
        self._kept = {
            tensor.name: encoded(tensor, np.zeros(tensor.shape, np.float32))
            for role in ("past_key", "past_value", "memory_state")
            for tensor in spec.decode.by_role(role)
        }
        self._history = max((rom.spec.addressing.history for rom in roms), default=0)
        self._before = np.empty(0, np.int64)  # the last ids, at most as many as an address depends on
        self.length = 0
        """Tokens in the cache."""

    def copy(self) -> OnnxDecoder:
        """A decoder that goes on from here on its own."""
        other = OnnxDecoder(self.spec, self._embedding, self._roms)
        other._kept = {name: array.copy() for name, array in self._kept.items()}
        other._before, other.length = self._before, self.length
        return other

    def prefill(self, sessions: Sessions, ids: np.ndarray) -> np.ndarray:
        """Run the prompt ``ids`` ``[N]`` in chunks, the last one padded: logits ``[N, V]``."""
        step = self.spec.prefill.num_tokens
        chunks = [ids[first : first + step] for first in range(0, len(ids), step)]
        return np.concatenate([self.run(sessions, self.spec.prefill, chunk) for chunk in chunks])

    def decode(self, sessions: Sessions, token: int) -> np.ndarray:
        """Run one token: logits ``[V]``."""
        return self.run(sessions, self.spec.decode, np.array([token]))[0]

    def run(self, sessions: Sessions, graph: Graph, ids: np.ndarray) -> np.ndarray:
        """One call of ``graph`` for ``ids`` ``[n]``, ``n`` ≤ T, which are kept. Logits ``[n, V]``."""
        results = run_parts(sessions, graph, self.feeds(graph, ids))
        start, stop, count = self.length, self.length + len(ids), len(ids)
        for past, present in zip(graph.by_role("past_key"), graph.by_role("present_key"), strict=True):
            self._kept[past.name][..., start:stop] = results[present.name][..., :count]
        for past, present in zip(graph.by_role("past_value"), graph.by_role("present_value"), strict=True):
            self._kept[past.name][:, :, start:stop] = results[present.name][:, :, :count]
        for state, present in zip(graph.by_role("memory_state"), graph.by_role("present_memory_state"), strict=True):
            seen = np.concatenate((self._kept[state.name], results[present.name][:, :count]), axis=1)
            self._kept[state.name] = seen[:, count:]
        self._before = np.concatenate((self._before, ids))
        self._before = self._before[max(len(self._before) - self._history, 0) :]
        self.length = stop
        (logits,) = graph.by_role("logits")
        return decoded(logits, results[logits.name][0, :count])

    def feeds(self, graph: Graph, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The graph's inputs for ``ids`` ``[n]``, ``n`` ≤ T, at the current position; the rest is padding.

        Padding lies to the right, so the causal mask hides it from every real token. Every array has its
        input's type.
        """
        assert 0 < len(ids) <= graph.num_tokens and self.length + len(ids) <= self.spec.context_length
        cos, sin = self._angles(graph.num_tokens)
        by_role = {
            "input_embeds": _padded(graph.by_role("input_embeds")[0], self._embedding.rows(ids)),
            "attention_mask": self._mask(graph.num_tokens),
            "position_cos": cos,
            "position_sin": sin,
        }
        rows = self._memory_feeds(graph, ids)
        return {
            tensor.name: self._kept[tensor.name]
            if tensor.name in self._kept
            else encoded(tensor, rows[tensor.name] if tensor.name in rows else by_role[tensor.role])
            for tensor in graph.inputs
        }

    def _memory_feeds(self, graph: Graph, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of ``ids`` from every ROM file, and which of them are meant where their number varies."""
        feeds, counts = {}, []
        for tensor, rom in zip(graph.by_role("memory_rows"), self._roms, strict=True):
            rows, found = rom.fetch(ids, self._before)
            feeds[tensor.name] = _padded(tensor, rows)
            counts.append(found)
        for tensor in graph.by_role("memory_mask"):
            mask = np.full(tensor.shape, self.spec.mask_value, np.float32)
            mask[0, : len(ids)][np.arange(tensor.shape[2]) < counts[tensor.index][:, None]] = 0
            feeds[tensor.name] = mask
        return feeds

    def _mask(self, num_tokens: int) -> np.ndarray:
        context = self.spec.context_length
        mask = np.full((1, 1, num_tokens, context + num_tokens), self.spec.mask_value, np.float32)
        mask[..., : self.length] = 0
        mask[..., context:][..., np.tri(num_tokens, dtype=bool)] = 0
        return mask

    def _angles(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        exponents = np.arange(0, self.spec.head_dim, 2) / self.spec.head_dim
        positions = np.arange(self.length, self.length + num_tokens)
        angles = positions[None, :, None] * self.spec.rope_theta**-exponents
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def run_parts(sessions: Sessions, graph: Graph, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the parts of a graph in order: what they give, ``hidden`` included, by name."""
    results: dict[str, np.ndarray] = {}
    for session, part in zip(sessions, graph.parts, strict=True):
        known = feeds | results
        names = [tensor.name for tensor in part.outputs]
        given = session.run(names, {tensor.name: known[tensor.name] for tensor in part.inputs})
        results |= zip(names, given, strict=True)
    return results


def encoded(tensor: TensorSpec, values: np.ndarray) -> np.ndarray:
    """Float32 ``values`` in the type of ``tensor``; integers round half to even and saturate."""
    if tensor.quantization is None:
        return values.astype(tensor.dtype, copy=False)
    limits = np.iinfo(tensor.dtype)
    steps = np.rint(values / np.float32(tensor.quantization.scale)) + tensor.quantization.zero_point
    return steps.clip(limits.min, limits.max).astype(tensor.dtype)


def decoded(tensor: TensorSpec, values: np.ndarray) -> np.ndarray:
    """``values`` of the type of ``tensor`` as float32."""
    if tensor.quantization is None:
        return values.astype(np.float32, copy=False)
    steps = values.astype(np.int32) - tensor.quantization.zero_point
    return steps.astype(np.float32) * np.float32(tensor.quantization.scale)


def _padded(tensor: TensorSpec, rows: np.ndarray) -> np.ndarray:
    """``rows`` ``[n, …]`` of real tokens in the shape of ``tensor``, zeros elsewhere.

    A token's K rows lie side by side, or on an axis of their own where their number varies.
    """
    padded = np.zeros(tensor.shape, np.float32)
    if len(tensor.shape) == 4:
        padded[0, : len(rows), : rows.shape[1]] = rows
    else:
        padded[0, : len(rows)] = rows.reshape(len(rows), -1)
    return padded
