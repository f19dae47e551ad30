"""The host's side of the exported graphs in NumPy: cache, mask, rotary angles, rows.

The C++ harness does the same on a device. Here it serves to verify graphs, to compare compiled
binaries with them, and to collect what calibration needs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from meki_edge.graph_spec import Graph, GraphSpec
from meki_edge.rom.reader import RomReader


def cpu_session(path: Path) -> ort.InferenceSession:
    """An ONNX Runtime session of one graph on the CPU: the oracle for every other runtime."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors only
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class OnnxDecoder:
    """One sequence and its key/value cache. Sessions are the caller's, so only one need be loaded.

    Args:
        embedding: rows for ``input_embeds``.
        rom: rows for ``memory_rows``; ``None`` for a dense model.
    """

    def __init__(self, spec: GraphSpec, embedding: RomReader, rom: RomReader | None) -> None:
        assert len(spec.roms) == (rom is not None), "a model with memories needs its ROM"
        self.spec = spec
        self._embedding, self._rom = embedding, rom
        roles = ("past_key", "past_value")
        self._cache = {
            tensor.name: np.zeros(tensor.shape, tensor.dtype)
            for role in roles
            for tensor in spec.decode.by_role(role)
        }
        self.length = 0
        """Tokens in the cache."""

    def copy(self) -> OnnxDecoder:
        """A decoder that goes on from here on its own."""
        other = OnnxDecoder(self.spec, self._embedding, self._rom)
        other._cache = {name: array.copy() for name, array in self._cache.items()}
        other.length = self.length
        return other

    def prefill(self, session: ort.InferenceSession, ids: np.ndarray) -> np.ndarray:
        """Run the prompt ``ids`` ``[N]`` in chunks, the last one padded: logits ``[N, V]``."""
        step = self.spec.prefill.num_tokens
        chunks = [ids[first : first + step] for first in range(0, len(ids), step)]
        return np.concatenate([self.run(session, self.spec.prefill, chunk) for chunk in chunks])

    def decode(self, session: ort.InferenceSession, token: int) -> np.ndarray:
        """Run one token: logits ``[V]``."""
        return self.run(session, self.spec.decode, np.array([token]))[0]

    def run(self, session: ort.InferenceSession, graph: Graph, ids: np.ndarray) -> np.ndarray:
        """One call of ``graph`` for ``ids`` ``[n]``, ``n`` ≤ T; they enter the cache. Logits ``[n, V]``."""
        names = [tensor.name for tensor in graph.outputs]
        results = dict(zip(names, session.run(names, self.feeds(graph, ids)), strict=True))
        start, stop, count = self.length, self.length + len(ids), len(ids)
        for past, present in zip(graph.by_role("past_key"), graph.by_role("present_key"), strict=True):
            self._cache[past.name][..., start:stop] = results[present.name][..., :count]
        for past, present in zip(graph.by_role("past_value"), graph.by_role("present_value"), strict=True):
            self._cache[past.name][:, :, start:stop] = results[present.name][:, :, :count]
        self.length = stop
        return results[graph.by_role("logits")[0].name][0, :count]

    def feeds(self, graph: Graph, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The graph's inputs for ``ids`` ``[n]``, ``n`` ≤ T, at the current position; the rest is padding.

        Padding lies to the right, so the causal mask hides it from every real token.
        """
        assert 0 < len(ids) <= graph.num_tokens and self.length + len(ids) <= self.spec.context_length
        by_role = {
            "input_embeds": self._padded(graph, self._embedding.rows(ids)),
            "attention_mask": self._mask(graph.num_tokens),
            **dict(zip(("position_cos", "position_sin"), self._angles(graph.num_tokens), strict=True)),
        }
        if self._rom is not None:
            by_role["memory_rows"] = self._padded(graph, self._rom.rows(ids))
        return {
            tensor.name: self._cache[tensor.name] if tensor.name in self._cache else by_role[tensor.role]
            for tensor in graph.inputs
        }

    def _padded(self, graph: Graph, rows: np.ndarray) -> np.ndarray:
        padded = np.zeros((1, graph.num_tokens, rows.shape[1]), np.float32)
        padded[0, : len(rows)] = rows
        return padded

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
