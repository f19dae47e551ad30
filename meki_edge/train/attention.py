"""Causal attention for bfloat16 training on a CPU, as plain batched matrix products.

PyTorch's fused CPU kernel keeps to small blocks that do not reach the CPU's bfloat16 units: at
256 tokens and head_dim 64 it takes about three times as long as two products and a softmax over
the whole score matrix. Memory grows with T², so long windows keep the fused kernel.

Shapes: B batch, T tokens, H num_attention_heads, KV num_key_value_heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import CausalAttention, apply_rotary

MAX_TOKENS = 1024


class MatmulAttention(CausalAttention):
    """As :class:`CausalAttention`, with products and softmax in bfloat16 (rows summed in float32)."""

    def __init__(self, config: ModelConfig, num_tokens: int) -> None:
        super().__init__(config, num_tokens)
        scale = config.head_dim**-0.5
        self._query_cos, self._query_sin = self._cos * scale, self._sin * scale
        self._mask = torch.full((num_tokens, num_tokens), float("-inf"), dtype=torch.bfloat16).triu(1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[2]
        query = apply_rotary(query, self._query_cos, self._query_sin)
        key = apply_rotary(key, self._cos, self._sin)
        # Autocast would compute the softmax in float32: twice the bytes of the largest tensor.
        with torch.autocast("cpu", enabled=False):
            query, key, value = (x.bfloat16().transpose(1, 2) for x in (query, key, value))  # [B, heads, T, D]
            query = query.reshape(batch * num_kv_heads, -1, head_dim)  # heads that share keys, one after another
            key, value = (x.reshape(batch * num_kv_heads, num_tokens, head_dim) for x in (key, value))
            scores = torch.bmm(query, key.transpose(1, 2)).unflatten(1, (-1, num_tokens))
            shares = (scores + self._mask).softmax(-1).flatten(1, 2)
            out = torch.bmm(shares, value).view(batch, num_heads, num_tokens, head_dim)
            return out.transpose(1, 2).flatten(2)
