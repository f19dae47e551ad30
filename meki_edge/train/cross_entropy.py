"""Head and cross-entropy in one pass over chunks of tokens.

Logits are the largest tensor of a small model's step (tokens × vocabulary, several float32
copies under autograd). Here a chunk's logits are made, reduced to a loss and turned into
gradients at once, and never kept. Same mathematics as ``cross_entropy(lm_head(hidden))``: the
products run in the autocast dtype, softmax and loss in float32.

Shapes: N tokens, d hidden_size, V vocab_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK_LOGITS = 1 << 21
MIN_CHUNK_TOKENS = 256


def head_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats (0-D, float32) of the logits ``hidden`` · ``weight``ᵀ.

    Args:
        hidden: ``[N, d]``.
        weight: ``[V, d]``. The result is differentiable, once, in both.
        targets: ``[N]``, int64.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return _HeadCrossEntropy.apply(hidden, weight, targets, dtype)


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        num_tokens = len(hidden)
        chunk = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS // len(weight))
        with torch.autocast(hidden.device.type, enabled=False):
            hidden_low, weight_low = hidden.to(dtype), weight.to(dtype)
            hidden_grad = torch.empty_like(hidden_low)
            weight_grad = torch.zeros_like(weight)
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            for start in range(0, num_tokens, chunk):
                tokens = slice(start, start + chunk)
                target = targets[tokens, None]
                logits = F.linear(hidden_low[tokens], weight_low)
                log_shares = F.log_softmax(logits, -1, dtype=torch.float32)
                total -= log_shares.gather(1, target).sum()
                # d loss / d logits = (softmax - one-hot) / N, made in the same memory; 1/N comes last
                shares = log_shares.exp_()
                shares.scatter_add_(1, target, shares.new_full(target.shape, -1.0))
                gradient = shares.to(dtype)
                torch.mm(gradient, weight_low, out=hidden_grad[tokens])
                weight_grad += gradient.T @ hidden_low[tokens]
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.hidden_dtype = hidden.dtype
        return total / num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = upstream / len(hidden_grad)
        return hidden_grad.to(ctx.hidden_dtype) * scale, weight_grad * scale, None, None
