"""Proof that folding changed nothing: logits and loss of three forms of one model, on real text.

*Training* form: rows computed from tables and projections, as in training. *Float32* ROM form: the
ROM checkpoint with the rows that the streaming fold computed, before their codec. *Coded* ROM
form: the same with rows, and their addresses, read back from the ROM files.

The forward pass streams: one decoder layer's weights at a time, a memory's rows for a few tokens at
a time, the head in slices of the vocabulary. So a model larger than memory can be proved.

Shapes: N windows, T tokens, M = N·T positions, K rows a token, d hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meki_edge.memory import MemoryLayer, PaddedRows
from meki_edge.memory.base import Past
from meki_edge.model.checkpoint import EMBEDDING, Checkpoint
from meki_edge.model.decoder import CausalAttention, DecoderLayer
from meki_edge.model.rom_rows import ReadRows, addresses, gather
from meki_edge.model.row_spaces import Member, RowSpace
from meki_edge.reparam_fold import table_name
from meki_edge.rom.addressing import NOTHING, Addressing, Identity

TOKENS_AT_ONCE = 2048  # bounds the activations of a layer
ROW_ELEMENTS = 1 << 24  # bounds the rows that tokens read at once: 64 MiB
SLICE_ELEMENTS = 1 << 23  # bounds a slice of the head, and of each form's logits: 32 MiB


@dataclass(frozen=True)
class Source:
    """Where a memory's rows come from: which ones tokens need, and how they are read."""

    addressing: Addressing
    read: ReadRows


LayerRows = Callable[[int, DecoderLayer], list[Source]]
"""The source of each memory of a layer."""


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
    """Validation text: what the model reads, and what it should predict."""

    inputs: Tensor
    """int64 ``[N, T]``."""
    targets: Tensor
    """The id that follows each input: int64 ``[N, T]``."""

    @classmethod
    def of(cls, tokens: np.ndarray) -> Windows:
        """From windows of ids ``[N, T + 1]``."""
        return cls(inputs=torch.from_numpy(tokens[:, :-1].copy()), targets=torch.from_numpy(tokens[:, 1:].copy()))

    def row_ids(self, addressing: Addressing) -> np.ndarray:
        """The distinct rows that the windows need, each a text of its own: int64, ascending."""
        needed = []
        for window in self.inputs.numpy():
            row_ids, counts = addressing.row_ids(window, NOTHING)
            needed.append(np.unique(row_ids[np.arange(row_ids.shape[1]) < counts[:, None]]))
        return np.unique(np.concatenate(needed))


def prove(
    training: Checkpoint,
    folded: Checkpoint,
    windows: Windows,
    float32_rows: LayerRows,
    coded_rows: LayerRows,
    advance: Callable[[int], None] = lambda steps: None,
) -> Proof:
    """Run the three forms and compare them; ``advance`` counts layers."""
    hidden = [
        streamed_hidden(training, windows, training_rows(training), advance),
        streamed_hidden(folded, windows, float32_rows, advance),
        streamed_hidden(folded, windows, coded_rows, advance),
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
    num_windows, length = windows.inputs.shape
    attention = CausalAttention(config, length)
    unique, places = windows.inputs.unique(return_inverse=True)
    hidden = F.embedding(places, checkpoint.read_rows(EMBEDDING, unique.numpy()))
    step = max(1, TOKENS_AT_ONCE // length)
    for layer in range(config.num_hidden_layers):
        module = _load_layer(checkpoint, layer)
        sources = layer_rows(layer, module)
        module.memories = nn.ModuleList(map(_Reading, module.memories, sources))
        for start in range(0, num_windows, step):
            some = slice(start, start + step)
            hidden[some] = module(hidden[some], attention, [windows.inputs[some]] * len(sources))
        advance(1)
    return F.rms_norm(hidden, (config.hidden_size,), checkpoint.read("model.norm.weight"), config.rms_norm_eps)


def training_rows(checkpoint: Checkpoint) -> LayerRows:
    """Rows as the training form computes them, from tables that stay on disk."""

    def read(table: str, memory: MemoryLayer, row_ids: np.ndarray) -> np.ndarray:
        by_token = memory.addressing_kind == Identity.kind
        embeddings = checkpoint.read_rows(EMBEDDING, row_ids) if by_token else torch.empty(len(row_ids), 0)
        rows = checkpoint.read_rows(table, row_ids) if memory.table_dim else embeddings[:, :0]
        return memory.fold(rows, embeddings).numpy()

    def sources(layer: int, module: DecoderLayer) -> list[Source]:
        found = []
        for number, memory in enumerate(module.memories):
            table = table_name(Member(layer=layer, number=number, dim=memory.stored_dim))
            found.append(Source(memory.addressing, partial(read, table, memory)))
        return found

    return sources


def stored_rows(
    spaces: Sequence[RowSpace],
    addressings: Sequence[Addressing],
    segments: Sequence[Callable[[int, np.ndarray], np.ndarray]],
) -> LayerRows:
    """Rows of row spaces: ``segments[s](k, row_ids)`` reads those of member k of space s."""
    found = {
        (member.layer, member.number): Source(addressing, partial(segment, index))
        for space, addressing, segment in zip(spaces, addressings, segments, strict=True)
        for index, member in enumerate(space.members)
    }
    return lambda layer, module: [found[layer, number] for number in range(len(module.memories))]


class _Reading(nn.Module):
    """A memory that fetches its own rows: what feeds it are the token ids ``[B, T]``.

    Unless a memory keeps a state, ``fuse`` acts on each token alone. Tokens are then taken in
    slices, those with most rows first and equal ones together, so that little more than
    ``ROW_ELEMENTS`` of padded rows are in memory, and few rows are read twice.
    """

    def __init__(self, memory: MemoryLayer, source: Source) -> None:
        super().__init__()
        self.site = memory.site
        self._memory, self._source = memory, source

    def forward(self, hidden: Tensor, ids: Tensor, past: Past) -> Tensor:
        row_ids, counts = addresses(self._source.addressing.row_ids, ids.numpy())
        if self._memory.state_length:
            return self._memory(hidden, self._rows(row_ids, counts), past)
        tokens, row_ids, counts = hidden.flatten(0, 1), row_ids.reshape(-1, row_ids.shape[-1]), counts.reshape(-1)
        order = np.lexsort((row_ids[:, 0], -counts))
        pieces, start = [], 0
        while start < len(order):
            size = max(1, ROW_ELEMENTS // int(counts[order[start]] * self._memory.stored_dim))
            some = order[start : start + size]
            rows = self._rows(row_ids[None, some], counts[None, some])
            pieces.append(self._memory(tokens[None, some], rows, past)[0])
            start += size
        return torch.cat(pieces)[np.argsort(order)].unflatten(0, ids.shape)

    def _rows(self, row_ids: np.ndarray, counts: np.ndarray) -> Tensor | PaddedRows:
        return gather(self._source.addressing, row_ids, counts, self._source.read)


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
