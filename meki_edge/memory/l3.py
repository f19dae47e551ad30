r"""L3: a large lookup layer with several entries a token (arXiv 2601.21461; no official code).

Between two blocks, with token t's :math:`d_t` keys and values, found by prefix sums of d::

    s = softmax( K_t h )        r = V_tᵀ s        out = W_mix [ RMSNorm(W_up r) ; h ]
    x ← x + out

How many entries a token gets is decided by LZW over a corpus (:mod:`.l3_allocation`). Rows are
pure in t: the ROM holds K_t‖V_t as it is, and a mask hides the slots that a token does not have.

The paper does not say, so these are options with our defaults: the residual add (on), a pre-norm
(``h = RMSNorm(x)``, on), logits scaled by 1/√d (on). Initialisation is ours: N(0, 0.02), and W_mix
zero, so that with the residual add the layer starts as the identity.

Limits: place it in the middle; reading before layer 4 leaves little to hide behind. A token reads
up to ``max_entries`` rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meki_edge.errors import UserError
from meki_edge.memory.base import MemoryLayer, PaddedRows, Site, Slot, TokenBatch
from meki_edge.memory.l3_allocation import MODES, allocate
from meki_edge.model_shape import ModelShape
from meki_edge.rom.addressing import Addressing, Ragged
from meki_edge.tokenizer import TextTokenizer

INIT_STD = 0.02
BLOCK_TOKENS = 256
DEFAULT_ENTRIES_PER_TOKEN = 4  # the paper: 710K entries for 180K tokens


@dataclass(frozen=True, kw_only=True)
class L3Config:
    """Options of L3."""

    num_entries: int | None = None
    """v, the entries of all tokens together; 4 a token by default."""
    max_entries: int = 512
    """k, the most entries a token may get."""
    value_dim: int | None = None
    """Width of a value; half the hidden size by default. Not with ``tied``."""
    up_dim: int | None = None
    """Width of W_up's output; twice the hidden size by default (4096 in the paper)."""
    tied: bool = False
    """Keys serve as values, which makes a row half to two thirds as wide."""
    residual: bool = True
    """Add the output to the residual stream instead of replacing it."""
    pre_norm: bool = True
    """Normalise x before it meets the keys and W_mix."""
    scale_logits: bool = True
    """Scale the logits by 1/√d."""
    allocation: str = "listing"
    """How the LZW parse goes on after a mismatch: ``listing`` or ``textbook``."""


class L3Layer(MemoryLayer):
    """One lookup layer; see the module's docstring."""

    kind = "l3"
    addressing_kind = Ragged.kind
    training_only = frozenset({"table", "offsets"})

    def __init__(self, config: L3Config, shape: ModelShape, slot: Slot, *, folded: bool) -> None:
        super().__init__()
        self._check(config, shape)
        self._config, self._vocab_size = config, shape.vocab_size
        hidden_size = shape.hidden_size
        value_dim = hidden_size if config.tied else config.value_dim or hidden_size // 2
        up_dim = config.up_dim or 2 * hidden_size
        self.site = Site.AFTER_FFN
        self.row_dim = self.table_dim = hidden_size if config.tied else hidden_size + value_dim
        self.num_rows = config.num_entries or DEFAULT_ENTRIES_PER_TOKEN * shape.vocab_size
        self.rows_per_token, self.stored_dim = config.max_entries, self.row_dim
        self._key_dim = hidden_size
        self._scale = hidden_size**-0.5 if config.scale_logits else 1.0
        self.input_norm = nn.RMSNorm(hidden_size, eps=shape.rms_norm_eps) if config.pre_norm else None
        self.up_proj = nn.Linear(value_dim, up_dim, bias=False)
        self.up_norm = nn.RMSNorm(up_dim, eps=shape.rms_norm_eps)
        self.mix_proj = nn.Linear(up_dim + hidden_size, hidden_size, bias=False)
        if not folded:
            self.table = nn.Parameter(torch.empty(self.num_rows, self.row_dim))
            self.offsets: Tensor
            self.register_buffer("offsets", torch.zeros(shape.vocab_size + 1, dtype=torch.int64))

    @property
    def flops_per_token(self) -> int:
        """At the cap, since a static graph computes every slot."""
        value_dim, up_dim = self.up_proj.in_features, self.up_proj.out_features
        attention = 2 * self._config.max_entries * (self._key_dim + value_dim)
        return attention + 2 * up_dim * value_dim + 2 * self._key_dim * (self._key_dim + up_dim)

    @property
    def addressing(self) -> Addressing:
        return Ragged(self.offsets.cpu().numpy())

    @property
    def row_space(self) -> Hashable:
        # The same budget, cap and mode over the same corpus give the same allocation.
        return Ragged.kind, self.num_rows, self._config.max_entries, self._config.allocation

    @classmethod
    def prepare(cls, layers: list[MemoryLayer], corpus: np.ndarray, tokenizer: TextTokenizer) -> None:
        first = layers[0]
        assert isinstance(first, L3Layer)
        entries = allocate(
            corpus,
            vocab_size=first._vocab_size,
            num_entries=first.num_rows,
            max_entries=first._config.max_entries,
            separator=tokenizer.eos_token_id,
            mode=first._config.allocation,
        )
        offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(entries))))
        for layer in layers:
            layer.offsets.copy_(offsets)

    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        return table_rows

    def fuse(self, hidden: Tensor, rows: PaddedRows) -> Tensor:
        normed = self._normed(hidden)
        keys, values = self._split(rows.values)
        logits = (keys @ normed.unsqueeze(-1)).squeeze(-1) * self._scale + rows.mask
        read = (torch.softmax(logits, dim=-1).unsqueeze(-2) @ values).squeeze(-2)
        return self._mix(hidden, normed, read)

    def fuse_batch(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """The same by blocks of tokens sorted by id, whose distinct rows are gathered once a block."""
        normed = self._normed(hidden)
        ids = batch.ids.flatten()
        order = torch.argsort(ids, stable=True)
        queries = F.embedding(order, normed.flatten(0, 1))
        pieces = [
            self._read_block(q, i) for q, i in zip(queries.split(BLOCK_TOKENS), ids[order].split(BLOCK_TOKENS), strict=True)
        ]
        read = F.embedding(torch.argsort(order), torch.cat(pieces)).unflatten(0, batch.ids.shape)
        return self._mix(hidden, normed, read)

    def touched_rows(self, ids: Tensor, unique: Tensor) -> Tensor:
        return self._owned(unique)[0]

    def reset_parameters(self, generator: torch.Generator) -> None:
        for weight in (self.table, self.up_proj.weight):
            nn.init.normal_(weight, std=INIT_STD, generator=generator)
        nn.init.zeros_(self.mix_proj.weight)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def _read_block(self, queries: Tensor, ids: Tensor) -> Tensor:
        """r ``[M, value_dim]`` of M tokens sorted by id, over the pool of rows that their ids own."""
        row_ids, owner_of_row = self._owned(ids.unique_consecutive())
        keys, values = self._split(self.read_table(row_ids))
        logits = (queries @ keys.T) * self._scale
        logits = logits.masked_fill(ids[:, None] != owner_of_row[None, :], -math.inf)
        return torch.softmax(logits, dim=-1).to(values.dtype) @ values

    def _owned(self, owners: Tensor) -> tuple[Tensor, Tensor]:
        """All rows of the ids ``owners`` ``[N]``, one after another, and the owner of each."""
        counts = self.offsets[owners + 1] - self.offsets[owners]
        owner_of_row = owners.repeat_interleave(counts)
        within = torch.arange(len(owner_of_row), device=owners.device)
        within -= (counts.cumsum(0) - counts).repeat_interleave(counts)
        return self.offsets[owner_of_row] + within, owner_of_row

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self.input_norm is None else self.input_norm(hidden)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return (rows, rows) if self._config.tied else (rows[..., : self._key_dim], rows[..., self._key_dim :])

    def _mix(self, hidden: Tensor, normed: Tensor, read: Tensor) -> Tensor:
        out = self.mix_proj(torch.cat((self.up_norm(self.up_proj(read)), normed), dim=-1))
        return hidden + out if self._config.residual else out

    @staticmethod
    def _check(config: L3Config, shape: ModelShape) -> None:
        where = "memories: l3"
        if config.tied and config.value_dim not in (None, shape.hidden_size):
            raise UserError("tied entries are as wide as the hidden size", where=where, fix="leave value_dim out")
        for name in ("num_entries", "max_entries", "value_dim", "up_dim"):
            value = getattr(config, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}", where=where, fix=f"give a positive {name}")
        if config.allocation not in MODES:
            raise UserError(f"unknown allocation {config.allocation!r}", where=where, fix=f"use {' or '.join(MODES)}")
