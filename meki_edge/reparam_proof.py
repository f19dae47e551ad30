"""Proof that folding changed nothing: logits and loss of three forms of one model, on real text.

*Training* form: rows computed from tables and projections, as in training. *Float32* ROM form: the
ROM checkpoint with the rows that the streaming fold computed, before their codec. *Coded* ROM
form: the same with rows read back from the ROM file.

The forward pass streams: one decoder layer's weights at a time, the head in slices of the
vocabulary. So a model larger than memory can be proved.

Shapes: N windows, T tokens, M = N·T positions, U distinct ids, d hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from meki_edge.model.checkpoint import EMBEDDING, Checkpoint
from meki_edge.model.decoder import CausalAttention, DecoderLayer, Rows, split_rows

TOKENS_AT_ONCE = 2048  # bounds the activations of a layer
SLICE_ELEMENTS = 1 << 23  # bounds a slice of the head, and of each form's logits: 32 MiB

LayerRows = Callable[[int, DecoderLayer], list[Tensor]]
"""The rows of the distinct ids for each memory of a layer: ``[U, row_dim]`` each."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the comparison found; losses in nats per token, differences in logits."""

    windows: int
    window_length: int
    tokens: int
    """Predicted tokens: ``windows · window_length``."""
    logit_scale: float
    """The largest absolute logit of the training form."""
    difference_float32: float
    """The largest difference between the training form and the ROM form before the codec."""
    difference_coded: float
    """The largest difference between the training form and the ROM form as stored."""
    argmax_agreement: float
    """The share of positions where the stored form's top token is the training form's."""
    loss_training: float
    loss_float32: float
    loss_coded: float


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Validation text as distinct ids: ``ids[places]`` is what the model reads."""

    ids: np.ndarray
    """The distinct input ids, sorted: int64 ``[U]``."""
    places: Tensor
    """Where each position's id lies in ``ids``: int64 ``[N, T]``."""
    targets: Tensor
    """The id that follows each position: int64 ``[N, T]``."""

    @classmethod
    def of(cls, tokens: np.ndarray) -> Windows:
        """From windows of ids ``[N, T + 1]``."""
        ids, places = np.unique(tokens[:, :-1], return_inverse=True)
        return cls(
            ids=ids,
            places=torch.from_numpy(places.reshape(tokens.shape[0], -1)),
            targets=torch.from_numpy(tokens[:, 1:].copy()),
        )


def prove(
    training: Checkpoint,
    folded: Checkpoint,
    windows: Windows,
    float32_rows: np.ndarray,
    coded_rows: np.ndarray,
    advance: Callable[[int], None] = lambda steps: None,
) -> Proof:
    """Run the three forms and compare them; ``*_rows`` are ``[U, row_dim]``, ``advance`` counts layers."""
    hidden = [
        streamed_hidden(training, windows, training_rows(training, windows.ids), advance),
        streamed_hidden(folded, windows, rom_rows(folded, float32_rows), advance),
        streamed_hidden(folded, windows, rom_rows(folded, coded_rows), advance),
    ]
    heads = [training, folded, folded]
    targets = windows.targets.flatten()
    step = max(1, SLICE_ELEMENTS // max(len(targets), training.config.hidden_size))
    sums = [_Running(len(targets)) for _ in hidden]
    differences = [0.0, 0.0, 0.0]
    for start in range(0, training.config.vocab_size, step):
        logits = [
            F.linear(states.flatten(0, 1), head.read(head.head_name, slice(start, start + step)))
            for states, head in zip(hidden, heads, strict=True)
        ]
        for index, form in enumerate(logits):
            sums[index].add(form, start, targets)
            # np.maximum keeps NaN, which Python's max may drop.
            differences[index] = float(np.maximum(differences[index], (form - logits[0]).abs().max().item()))
    reference, exact, coded = sums
    return Proof(
        windows=len(windows.targets),
        window_length=windows.targets.shape[1],
        tokens=len(targets),
        logit_scale=reference.scale,
        difference_float32=differences[1],
        difference_coded=differences[2],
        argmax_agreement=(reference.best_id == coded.best_id).double().mean().item(),
        loss_training=reference.loss,
        loss_float32=exact.loss,
        loss_coded=coded.loss,
    )


@torch.no_grad()
def streamed_hidden(
    checkpoint: Checkpoint, windows: Windows, layer_rows: LayerRows, advance: Callable[[int], None] = lambda steps: None
) -> Tensor:
    """The final hidden states ``[N, T, d]``, with one decoder layer's weights in memory at a time."""
    config = checkpoint.config
    num_windows, length = windows.places.shape
    attention = CausalAttention(config, length)
    hidden = F.embedding(windows.places, checkpoint.read_rows(EMBEDDING, windows.ids))
    step = max(1, TOKENS_AT_ONCE // length)
    for layer in range(config.num_hidden_layers):
        module = _load_layer(checkpoint, layer)
        rows = layer_rows(layer, module)
        for start in range(0, num_windows, step):
            some = slice(start, start + step)
            hidden[some] = module(hidden[some], attention, [F.embedding(windows.places[some], r) for r in rows])
        advance(1)
    return F.rms_norm(hidden, (config.hidden_size,), checkpoint.read("model.norm.weight"), config.rms_norm_eps)


def training_rows(checkpoint: Checkpoint, ids: np.ndarray) -> LayerRows:
    """Rows as the training form computes them for ``ids`` ``[U]``."""
    embeddings = checkpoint.read_rows(EMBEDDING, ids)

    def rows(layer: int, module: DecoderLayer) -> list[Tensor]:
        folded = []
        for number, memory in enumerate(module.memories):
            name = f"model.layers.{layer}.memories.{number}.table"
            table = checkpoint.read_rows(name, ids) if memory.table_dim else embeddings[:, :0]
            folded.append(memory.fold(table, embeddings))
        return folded

    return rows


def rom_rows(checkpoint: Checkpoint, flat: np.ndarray) -> LayerRows:
    """Rows ``[U, row_dim]`` that came from outside, split by layer and memory."""
    with torch.device("meta"):
        memories = [checkpoint.config.build_memories(layer) for layer in range(checkpoint.config.num_hidden_layers)]
    dims = [[memory.row_dim for memory in layer] for layer in memories]
    rows: Rows = split_rows(torch.from_numpy(flat), dims)
    return lambda layer, module: rows[layer]


class _Running:
    """Loss, scale and best token of one form, gathered over slices of the vocabulary."""

    def __init__(self, count: int) -> None:
        self.scale = 0.0
        self._log_sum = torch.full((count,), -torch.inf)
        self._target = torch.zeros(count)
        self._best = torch.full((count,), -torch.inf)
        self.best_id = torch.zeros(count, dtype=torch.int64)

    def add(self, logits: Tensor, start: int, targets: Tensor) -> None:
        """Take in ``logits`` ``[M, slice]`` of the ids from ``start``."""
        self.scale = max(self.scale, logits.abs().max().item())
        self._log_sum = torch.logaddexp(self._log_sum, logits.logsumexp(dim=1))
        here = (targets >= start) & (targets < start + logits.shape[1])
        self._target[here] = logits[here].gather(1, (targets[here] - start)[:, None])[:, 0]
        best, best_id = logits.max(dim=1)
        self.best_id = torch.where(best > self._best, best_id + start, self.best_id)
        self._best = torch.maximum(self._best, best)

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return (self._log_sum - self._target).double().mean().item()


def _load_layer(checkpoint: Checkpoint, layer: int) -> DecoderLayer:
    """One decoder layer with all its weights but the tables, which stay on disk."""
    with torch.device("meta"):
        module = DecoderLayer(checkpoint.config, layer)
    names = [name for name in module.state_dict() if name.split(".")[2:] != ["table"]]
    tensors = {name: checkpoint.read(f"model.layers.{layer}.{name}") for name in names}
    module.load_state_dict(tensors, strict=False, assign=True)
    return module.requires_grad_(False)
