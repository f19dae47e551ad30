r"""Engram: hashed n-gram memory (arXiv 2601.07372; deepseek-ai/Engram ``engram_demo_v1.py``).

Compressed ids (case, accents and white space folded together) of the last n tokens are hashed by
each of K heads for every order n = 2…N; the rows found are concatenated to e. Before attention::

    s = <RMSNorm(W_k e), RMSNorm(x)> / √d        g = σ( sign(s)·√max(|s|, 1e-6) )
    u = g · W_v e                                x ← x + u + SiLU( DWConv( RMSNorm(u) ) )

with a causal depthwise convolution of 4 taps, dilated by N. Rows can be fetched the moment a token
is sampled, but nothing folds. A decoder keeps N - 1 earlier ids and (4 - 1)·N convolution inputs.

Tables are trained at 5 times the learning rate without decay; the convolution starts at zero. As
published for one residual stream (no hyper-connections); the projections have no biases, as in the
paper (the demo's have). ``gate="plain"`` is the paper's g = σ(s).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor, nn
from torch.nn import functional as F

from meki_edge.errors import UserError
from meki_edge.memory.base import MemoryLayer, Past, RowSource, Site, Slot, TableRecipe, TokenBatch
from meki_edge.model_shape import ModelShape
from meki_edge.rom.addressing import Addressing, NgramHash
from meki_edge.tokenizer import TextTokenizer

INIT_STD = 0.02
LAYER_SEED_STEP = 10_007  # official code: the multipliers' seed grows by this a layer
SENTINEL = "\ue000"


@dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """Options of Engram."""

    table_size: int
    """Rows of a hash head, about: each head takes the next unused prime."""
    memory_dim: int
    """Width of e, all heads and orders together."""
    max_ngram: int = 3
    """N, the longest n-gram."""
    num_heads: int = 8
    """K, hash heads an order."""
    kernel_size: int = 4
    """Taps of the causal convolution."""
    gate: str = "signed_root"
    """``signed_root`` (official code) or ``plain`` (paper)."""
    pad_token_id: int | None = None
    """The id before a text begins; the tokenizer's EOS by default."""
    seed: int = 0
    """Seed of the hash multipliers."""


class EngramLayer(MemoryLayer):
    """One Engram module; see the module's docstring."""

    kind = "engram"
    addressing_kind = NgramHash.kind
    training_only = frozenset({"table", "token_map", "multipliers", "pad_id"})
    table_recipe = TableRecipe(learning_rate_scale=5.0, weight_decay=0.0)

    def __init__(self, config: EngramConfig, shape: ModelShape, slot: Slot, *, folded: bool) -> None:
        super().__init__()
        _check(config)
        self._config, self._layer = config, slot.layer
        self._primes = head_primes(config, slot)
        hidden_size = shape.hidden_size
        self.site = Site.BEFORE_ATTENTION
        self.row_dim = config.memory_dim
        self.num_rows = sum(map(sum, self._primes))
        self.rows_per_token = config.num_heads * (config.max_ngram - 1)
        self.table_dim = self.stored_dim = config.memory_dim // self.rows_per_token
        self.state_length = (config.kernel_size - 1) * config.max_ngram
        self.state_dim = hidden_size
        self._scale = hidden_size**-0.5
        self.key_proj = nn.Linear(config.memory_dim, hidden_size, bias=False)
        self.value_proj = nn.Linear(config.memory_dim, hidden_size, bias=False)
        self.key_norm = nn.RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        self.query_norm = nn.RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        self.conv_norm = nn.RMSNorm(hidden_size, eps=shape.rms_norm_eps)
        self.conv = nn.Conv1d(
            hidden_size, hidden_size, config.kernel_size, groups=hidden_size, dilation=config.max_ngram, bias=False
        )
        if not folded:
            self.table = nn.Parameter(torch.empty(self.num_rows, self.table_dim))
            self.token_map: Tensor
            self.multipliers: Tensor
            self.pad_id: Tensor
            self.register_buffer("token_map", torch.zeros(shape.vocab_size, dtype=torch.int64))
            self.register_buffer("multipliers", torch.ones(config.max_ngram, dtype=torch.int64))
            self.register_buffer("pad_id", torch.zeros((), dtype=torch.int64))

    @property
    def flops_per_token(self) -> int:
        return 4 * self.row_dim * self.state_dim + 2 * self._config.kernel_size * self.state_dim

    @property
    def addressing(self) -> Addressing:
        return NgramHash(
            token_map=self.token_map.cpu().numpy().astype(np.int32),
            multipliers=tuple(self.multipliers.tolist()),
            primes=self._primes,
            pad_id=int(self.pad_id),
        )

    @property
    def row_space(self) -> Hashable:
        return NgramHash.kind, self._layer, self._primes, self._config.seed, self._config.pad_token_id

    @classmethod
    def prepare(cls, layers: list[MemoryLayer], corpus: np.ndarray, tokenizer: TextTokenizer) -> None:
        for layer in layers:
            assert isinstance(layer, EngramLayer)
            token_map = torch.from_numpy(compressed_ids(tokenizer.inner, len(layer.token_map)))
            pad_token_id = layer._config.pad_token_id
            pad = tokenizer.eos_token_id if pad_token_id is None else pad_token_id
            layer.token_map.copy_(token_map)
            layer.pad_id.copy_(token_map[pad])
            layer.multipliers.copy_(
                hash_multipliers(layer._config, layer._layer, num_compressed=int(token_map.max()) + 1)
            )

    def row_ids(self, ids: Tensor) -> Tensor:
        """Rows int64 ``[B, T, K]`` of whole sequences ``[B, T]``; :class:`NgramHash` in PyTorch."""
        compressed = self.token_map[ids]
        columns, offset = [], 0
        mix = compressed * self.multipliers[0]
        for lag, heads in enumerate(self._primes, start=1):
            shifted = F.pad(compressed, (lag, 0), value=int(self.pad_id))[:, : ids.shape[1]]
            mix = mix ^ (shifted * self.multipliers[lag])
            for prime in heads:
                columns.append(mix % prime + offset)
                offset += prime
        return torch.stack(columns, dim=-1)

    def fold(self, table_rows: Tensor, embeddings: Tensor) -> Tensor:
        return table_rows

    def forward(self, hidden: Tensor, source: RowSource, past: Past) -> Tensor:
        rows = self._batch_rows(source) if isinstance(source, TokenBatch) else source
        return self._through(hidden, rows, past)

    def fuse(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """With nothing before the first token."""
        return self._through(hidden, rows, _EmptyPast())

    def touched_rows(self, ids: Tensor, unique: Tensor) -> Tensor:
        return self.row_ids(ids).unique()

    def reset_parameters(self, generator: torch.Generator) -> None:
        for weight in (self.table, self.key_proj.weight, self.value_proj.weight):
            nn.init.normal_(weight, std=INIT_STD, generator=generator)
        for norm in (self.key_norm, self.query_norm, self.conv_norm):
            nn.init.ones_(norm.weight)
        nn.init.zeros_(self.conv.weight)

    def _batch_rows(self, batch: TokenBatch) -> Tensor:
        return self.read_table(self.row_ids(batch.ids)).flatten(2)

    def _through(self, hidden: Tensor, rows: Tensor, past: Past) -> Tensor:
        score = (self.key_norm(self.key_proj(rows)) * self.query_norm(hidden)).sum(-1, keepdim=True) * self._scale
        if self._config.gate == "signed_root":
            score = torch.sign(score) * torch.sqrt(torch.clamp(score.abs(), min=1e-6))
        gated = torch.sigmoid(score) * self.value_proj(rows)
        window = past.extend(self.conv_norm(gated), self.state_length)
        return hidden + gated + F.silu(self.conv(window.transpose(1, 2)).transpose(1, 2))


class _EmptyPast:
    """The past of a text's first token."""

    def extend(self, x: Tensor, length: int) -> Tensor:
        return F.pad(x, (0, 0, length, 0))


def head_primes(config: EngramConfig, slot: Slot) -> tuple[tuple[int, ...], ...]:
    """Table sizes ``[N - 1][K]`` of this layer: ascending primes, none used twice in the model."""
    used: set[int] = set()
    for layer in slot.layers:
        sizes = []
        for _ in range(config.max_ngram - 1):
            heads, candidate = [], config.table_size - 1
            for _ in range(config.num_heads):
                candidate = _next_unused_prime(candidate, used)
                used.add(candidate)
                heads.append(candidate)
            sizes.append(tuple(heads))
        if layer == slot.layer:
            return tuple(sizes)
    raise AssertionError("the slot's layer is not among its layers")


def hash_multipliers(config: EngramConfig, layer: int, num_compressed: int) -> Tensor:
    """Odd multipliers int64 ``[N]``, small enough that their product with a compressed id fits 63 bits."""
    bound = max(1, (2**63 - 1) // num_compressed // 2)
    generator = np.random.default_rng(config.seed + LAYER_SEED_STEP * layer)
    return torch.from_numpy(generator.integers(0, bound, size=config.max_ngram, dtype=np.int64) * 2 + 1)


def compressed_ids(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """int64 ``[vocab_size]``: one number for all tokens that read alike, by first appearance."""
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), SENTINEL),  # a lone space must survive the strip
            normalizers.Strip(),
            normalizers.Replace(SENTINEL, " "),
        ]
    )
    numbers: dict[str, int] = {}
    compressed = np.empty(vocab_size, np.int64)
    for token in range(vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token)
        else:
            key = normalizer.normalize_str(text) or text
        compressed[token] = numbers.setdefault(key or f"<unused {token}>", len(numbers))
    return compressed


def _next_unused_prime(after: int, used: set[int]) -> int:
    candidate = after + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _check(config: EngramConfig) -> None:
    where = "memories: engram"
    for name, least in (("table_size", 2), ("memory_dim", 1), ("max_ngram", 2), ("num_heads", 1), ("kernel_size", 1)):
        if getattr(config, name) < least:
            raise UserError(f"{name} is {getattr(config, name)}", where=where, fix=f"give at least {least}")
    heads = config.num_heads * (config.max_ngram - 1)
    if config.memory_dim % heads:
        raise UserError(
            f"memory_dim {config.memory_dim} is not a multiple of the {heads} heads",
            where=where,
            fix=f"give a multiple of num_heads × (max_ngram − 1) = {heads}",
        )
    if config.gate not in ("signed_root", "plain"):
        raise UserError(f"unknown gate {config.gate!r}", where=where, fix="use signed_root or plain")
