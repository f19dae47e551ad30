"""A Qwen3-architecture decoder with memories spliced in at their sites.

Parameter names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight`` …), so a
``Qwen3ForCausalLM`` state dict loads as it is; memories add
``model.layers.{i}.memories.{k}.*``. How attention sees the past is a strategy, so training,
cached decoding and the exported graphs run the same layers.

Shapes: B batch, T tokens, d hidden_size, H num_attention_heads, KV num_key_value_heads,
D head_dim, V vocab_size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meki_edge.errors import UserError
from meki_edge.memory import MemoryLayer, RowSource, Site, TokenBatch
from meki_edge.model.config import ModelConfig
from meki_edge.model.moe import MixtureOfExperts

Rows = list[list[RowSource]]
"""``rows[layer][memory]``: mostly ``[B, T, row_dim]``."""


class AttentionStrategy(Protocol):
    """How queries meet keys: causal over the batch, over a cache, or as an NPU graph."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``query`` ``[B, T, H, D]``, ``key`` and ``value`` ``[B, T, KV, D]``, before RoPE → ``[B, T, H·D]``."""
        ...

    def extend(self, layer: int, memory: int, x: Tensor, length: int) -> Tensor:
        """``x`` ``[B, T, c]`` of a memory with the ``length`` steps before it: ``[B, length + T, c]``."""
        ...


@dataclass(frozen=True)
class MemoryPast:
    """One memory's view of the strategy's past; see :class:`meki_edge.memory.base.Past`."""

    attention: AttentionStrategy
    layer: int
    memory: int

    def extend(self, x: Tensor, length: int) -> Tensor:
        return self.attention.extend(self.layer, self.memory, x, length)


def rotary_angles(positions: Tensor, head_dim: int, rope_theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin ``[T, D/2]`` (float32) of ``positions`` ``[T]``; computed in float64, since float32 angles drift."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * rope_theta**-exponents
    return angles.cos().float(), angles.sin().float()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[B, T, heads, D]`` by cos and sin ``[T, D/2]``; halves, not interleaved (as Qwen3)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class CausalAttention:
    """Attention of a batch of whole sequences, without a cache: positions 0…T-1."""

    def __init__(self, config: ModelConfig, num_tokens: int, device: torch.device | None = None) -> None:
        positions = torch.arange(num_tokens, device=device)
        self._cos, self._sin = rotary_angles(positions, config.head_dim, config.rope_theta)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = apply_rotary(query, self._cos, self._sin).transpose(1, 2)
        key = apply_rotary(key, self._cos, self._sin).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value.transpose(1, 2), is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def extend(self, layer: int, memory: int, x: Tensor, length: int) -> Tensor:
        return F.pad(x, (0, 0, length, 0))


class Attention(nn.Module):
    """Projections, per-head q/k norm and output projection; the strategy does the rest."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        query_dim = config.num_attention_heads * config.head_dim
        key_value_dim = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value_dim, bias=False)
        self.o_proj = nn.Linear(query_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, layer: int, hidden: Tensor, attention: AttentionStrategy) -> Tensor:
        heads = (-1, self._head_dim)
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, heads))
        key = self.k_norm(self.k_proj(hidden).unflatten(-1, heads))
        value = self.v_proj(hidden).unflatten(-1, heads)
        return self.o_proj(attention.attend(layer, query, key, value))


class FeedForward(nn.Module):
    """SwiGLU, whose up projection memories may replace (``with_up`` false) or add to."""

    def __init__(self, config: ModelConfig, *, with_up: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False) if with_up else None
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, up_terms: list[Tensor]) -> Tensor:
        """``up_terms`` (each ``[B, T, intermediate_size]``) join the up projection's output."""
        terms = up_terms if self.up_proj is None else [self.up_proj(hidden), *up_terms]
        return self.down_proj(F.silu(self.gate_proj(hidden)) * sum(terms[1:], start=terms[0]))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, with memories at their sites."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self.memories = nn.ModuleList(config.build_memories(layer))
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = self._feed_forward(config)

    def _feed_forward(self, config: ModelConfig) -> FeedForward | MixtureOfExperts:
        """The layer's FFN, without what its memories replace."""
        sites = {memory.site for memory in self.memories}
        if config.num_experts is None:
            return FeedForward(config, with_up=Site.FFN_UP not in sites)
        if sites & {Site.FFN_UP, Site.FFN_UP_RESIDUAL}:
            kinds = [m.kind for m in self.memories if m.site in (Site.FFN_UP, Site.FFN_UP_RESIDUAL)]
            raise UserError(
                f"{' and '.join(kinds)} joins the FFN's up projection, which a mixture of experts does not have",
                where=f"config.json: memories, layer {self._layer}",
                fix="use a memory beside the FFN, or a dense model",
            )
        return MixtureOfExperts(config)

    def forward(self, x: Tensor, attention: AttentionStrategy, rows: list[RowSource]) -> Tensor:
        """``x`` ``[B, T, d]``; ``rows[k]`` feeds ``memories[k]``."""
        pasts = [MemoryPast(attention, self._layer, number) for number in range(len(self.memories))]
        fed = list(zip(self.memories, rows, pasts, strict=True))
        x = _through(Site.BEFORE_ATTENTION, x, fed)
        hidden = self.input_layernorm(x)
        attended = self.self_attn(self._layer, hidden, attention)
        x = x + sum(_terms(Site.PARALLEL_ATTENTION, hidden, fed), start=attended)
        x = _through(Site.AFTER_ATTENTION, x, fed)
        hidden = self.post_attention_layernorm(x)
        up_terms = _terms(Site.FFN_UP, hidden, fed) + _terms(Site.FFN_UP_RESIDUAL, hidden, fed)
        x = x + sum(_terms(Site.PARALLEL_FFN, hidden, fed), start=self.mlp(hidden, up_terms))
        return _through(Site.AFTER_FFN, x, fed)


Fed = list[tuple[MemoryLayer, RowSource, MemoryPast]]
"""Each memory of a layer with what feeds it."""


def _terms(site: Site, hidden: Tensor, fed: Fed) -> list[Tensor]:
    """What each memory at a parallel ``site`` adds."""
    return [memory(hidden, rows, past) for memory, rows, past in fed if memory.site is site]


def _through(site: Site, x: Tensor, fed: Fed) -> Tensor:
    """The residual stream after each memory at a sequential ``site``."""
    for memory, rows, past in fed:
        if memory.site is site:
            x = memory(x, rows, past)
    return x


class Decoder(nn.Module):
    """Token embedding, layers and final norm: what Hugging Face calls ``model``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embeds: Tensor, attention: AttentionStrategy, rows: Rows) -> Tensor:
        """Final hidden states ``[B, T, d]`` from token embeddings ``[B, T, d]``."""
        x = embeds
        for layer, layer_rows in zip(self.layers, rows, strict=True):
            x = layer(x, attention, layer_rows)
        return self.norm(x)


class CausalLM(nn.Module):
    """The whole language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor, attention: AttentionStrategy | None = None, rows: Rows | None = None) -> Tensor:
        """Logits ``[B, T, V]`` of token ``ids`` ``[B, T]`` (int64); arguments as :meth:`final_hidden`."""
        return self.lm_head(self.final_hidden(ids, attention, rows))

    def final_hidden(self, ids: Tensor, attention: AttentionStrategy | None = None, rows: Rows | None = None) -> Tensor:
        """What the head reads: normalised hidden states ``[B, T, d]`` of token ``ids`` ``[B, T]`` (int64).

        Args:
            attention: defaults to causal attention over whole sequences.
            rows: the memory rows of every token; needed in ROM form, computed in training form.
        """
        # One gather for the distinct ids of the batch serves the backbone and every memory.
        unique, inverse = ids.unique(return_inverse=True)
        batch = TokenBatch(ids, unique, inverse, self.model.embed_tokens(unique))
        if rows is None:
            assert not self.config.folded, "the ROM form needs rows"
            rows = [[batch for _ in layer.memories] for layer in self.model.layers]
        if attention is None:
            attention = CausalAttention(self.config, ids.shape[1], ids.device)
        return self.model(F.embedding(inverse, batch.embeddings), attention, rows)

    def auxiliary_loss(self) -> Tensor | float:
        """What training adds to the cross-entropy of the last pass: the experts' balance, 0 without experts."""
        balances = [layer.mlp.take_balance() for layer in self.model.layers if isinstance(layer.mlp, MixtureOfExperts)]
        return self.config.router_aux_loss_coef * sum(balances) / max(len(balances), 1)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw the initial parameters.

        The backbone draws from one generator and each memory from its own, so a model with
        memories and its dense twin start from the same backbone. Normal with standard deviation
        ``initializer_range``; projections into the residual stream are scaled by 1/√(2L).
        """
        generator = torch.Generator().manual_seed(seed)
        std = self.config.initializer_range
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if ".memories." in name:
                continue
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            elif "o_proj" in name or "down_proj" in name:
                nn.init.normal_(parameter, std=residual_std, generator=generator)
            else:
                nn.init.normal_(parameter, std=std, generator=generator)
        for index, layer in enumerate(self.model.layers):
            for number, memory in enumerate(layer.memories):
                own_seed = (seed * 1_000_003 + index * 1_009 + number + 1) % 2**63
                memory.reset_parameters(torch.Generator().manual_seed(own_seed))
