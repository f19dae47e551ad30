"""The backbone's shape, with Hugging Face's field names (``Qwen3Config``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a Qwen3-architecture decoder is made of.

    RMSNorm, grouped-query attention with per-head q/k norm, RoPE, SwiGLU, tied or untied head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 500_000.0
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
