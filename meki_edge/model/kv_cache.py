"""Decoding with a key/value cache in PyTorch: the reference that the harness is tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from meki_edge.model.config import ModelConfig
from meki_edge.model.decoder import apply_rotary, rotary_angles


class CachedAttention:
    """Attention over ``context_length`` cache slots (batch of one sequence).

    Call :meth:`advance` once a forward pass, after it, with the number of tokens it consumed.
    """

    def __init__(self, config: ModelConfig, context_length: int, device: torch.device | None = None) -> None:
        shape = (config.num_hidden_layers, 1, config.num_key_value_heads, context_length, config.head_dim)
        self._keys = torch.zeros(shape, device=device)
        self._values = torch.zeros(shape, device=device)
        positions = torch.arange(context_length, device=device)
        self._cos, self._sin = rotary_angles(positions, config.head_dim, config.rope_theta)
        self._states: dict[tuple[int, int], Tensor] = {}
        self.length = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        start, stop = self.length, self.length + query.shape[1]
        assert stop <= self._keys.shape[3], "the cache is full"
        cos, sin = self._cos[start:stop], self._sin[start:stop]
        self._keys[layer, :, :, start:stop] = apply_rotary(key, cos, sin).transpose(1, 2)
        self._values[layer, :, :, start:stop] = value.transpose(1, 2)
        columns = torch.arange(stop, device=query.device)
        mask = columns[None, :] <= columns[start:, None]
        out = F.scaled_dot_product_attention(
            apply_rotary(query, cos, sin).transpose(1, 2),
            self._keys[layer, :, :, :stop].to(query.dtype),
            self._values[layer, :, :, :stop].to(query.dtype),
            attn_mask=mask,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(2)

    def extend(self, layer: int, memory: int, x: Tensor, length: int) -> Tensor:
        state = self._states.get((layer, memory))
        if state is None:
            state = x.new_zeros(x.shape[0], length, x.shape[2])
        extended = torch.cat((state, x), dim=1)
        self._states[layer, memory] = extended[:, extended.shape[1] - length :]
        return extended

    def advance(self, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens as cached."""
        self.length += num_tokens
