"""A mixture of experts in place of the feed-forward network: the baseline that memories compete with.

Routing, parameters and their names are those of Hugging Face's ``Qwen3MoeForCausalLM``: a softmax
over all experts, the k likeliest, their weights optionally scaled to sum to one. The balancing loss
is the Switch Transformer's (https://arxiv.org/abs/2101.03961, eqs. 4–6), averaged over the layers
(`transformers` pools the layers' counts before multiplying).

The same mathematics runs in three ways. Training sorts tokens by expert, so each expert multiplies
its own tokens only. An exported decode graph gathers the k chosen experts' weights and reads no
others. An exported prefill graph, whose shapes are static, runs every expert on every token and
masks: num_experts / k times the arithmetic, and nearly every expert's weights are needed anyway.

Shapes: B batch, T tokens, N = B·T, d hidden_size, E num_experts, k num_experts_per_tok,
f moe_intermediate_size.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meki_edge.model.config import ModelConfig


class Experts(nn.Module):
    """The experts' SwiGLU weights, stacked; each is stored ``[out, in]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_experts is not None and config.moe_intermediate_size is not None
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, hidden, inner))


class MixtureOfExperts(nn.Module):
    """Router and experts; what ``FeedForward`` is to a dense layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_experts is not None and config.num_experts_per_tok is not None
        self._num_experts, self._num_chosen = config.num_experts, config.num_experts_per_tok
        self._normalize = config.norm_topk_prob
        self._balance: Tensor | None = None
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden: Tensor, up_terms: list[Tensor]) -> Tensor:
        """``hidden`` ``[B, T, d]`` → ``[B, T, d]``; experts have no common up projection to add terms to."""
        assert not up_terms
        if torch.compiler.is_exporting():
            return self._static(hidden)
        return self._sorted(hidden.flatten(0, 1)).view_as(hidden)

    def take_balance(self) -> Tensor:
        """The balancing loss of the last forward pass, 0-D float32: k if every expert is used alike.

        It may be taken once, and only after a pass that records gradients.
        """
        assert self._balance is not None, "no forward pass recorded gradients"
        balance, self._balance = self._balance, None
        return balance

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Router ``logits`` ``[…, E]`` → probabilities ``[…, E]``; the chosen experts' weights and ids ``[…, k]``."""
        probabilities = logits.softmax(dim=-1)
        weights, chosen = probabilities.topk(self._num_chosen, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return probabilities, weights, chosen

    def _sorted(self, hidden: Tensor) -> Tensor:
        """``hidden`` ``[N, d]`` through the experts, its copies for the k experts sorted by expert."""
        # In float32 also where training runs in bfloat16: rounding would flip close choices.
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.float(), self.gate.weight)
        probabilities, weights, chosen = self._choose(logits)
        order = chosen.flatten().argsort(stable=True)
        inverse = order.argsort()
        counts = torch.bincount(chosen.flatten(), minlength=self._num_experts)
        if torch.is_grad_enabled():
            share = counts / len(hidden)
            self._balance = self._num_experts * (share * probabilities.mean(dim=0)).sum()
        copies = hidden.unsqueeze(1).expand(-1, self._num_chosen, -1).flatten(0, 1)
        sizes = counts.tolist()
        gate, up = _each(_Permute.apply(copies, order, inverse), sizes, self.experts.gate_up_proj).chunk(2, dim=-1)
        outputs = _each(F.silu(gate) * up, sizes, self.experts.down_proj)
        restored = _Permute.apply(outputs, inverse, order).unflatten(0, (-1, self._num_chosen))
        return (weights.to(restored.dtype).unsqueeze(1) @ restored).squeeze(1).to(hidden.dtype)

    def _static(self, hidden: Tensor) -> Tensor:
        """``hidden`` ``[1, T, d]`` with static shapes: the chosen experts of one token, or all of them, masked.

        Weights stand on the left of the products, as they are stored, so nothing is transposed but
        the few tokens, and both graphs share one copy.
        """
        _, weights, chosen = self._choose(self.gate(hidden))
        gate_up_proj, down_proj = self.experts.gate_up_proj, self.experts.down_proj
        if hidden.shape[1] == 1:
            ids = chosen.flatten()
            gate_up_proj, down_proj = gate_up_proj.index_select(0, ids), down_proj.index_select(0, ids)
            shares = weights.reshape(-1, 1, 1)
            columns = hidden.reshape(1, -1, 1)  # a transposition ONNX Runtime would fuse, twice as slow
        else:
            ids = torch.arange(self._num_experts, device=hidden.device)
            masked = torch.where(chosen.unsqueeze(-1) == ids, weights.unsqueeze(-1), 0.0)  # [1, T, k, E]
            shares = masked.sum(dim=2).permute(2, 0, 1)
            columns = hidden.transpose(1, 2)
        gate, up = (gate_up_proj @ columns).chunk(2, dim=1)  # [k or E, f, T]
        return (down_proj @ (F.silu(gate) * up * shares)).sum(dim=0, keepdim=True).transpose(1, 2)


def _each(x: Tensor, sizes: list[int], weights: Tensor) -> Tensor:
    """``x``, whose first ``sizes[0]`` rows belong to ``weights[0]`` and so on, through its experts' projections."""
    # unbind, because its backward stacks the experts' gradients; indexing would add E padded ones.
    groups = zip(x.split(sizes), weights.unbind(), strict=True)
    return torch.cat([F.linear(group, weight) for group, weight in groups])


class _Permute(torch.autograd.Function):
    """``x[order]`` of a permutation, whose gradient is ``gradient[inverse]``.

    PyTorch would scatter-add instead: slower, and in no fixed order, so that a resumed run would
    not see the same losses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


_STACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def published_parts(name: str, config: ModelConfig) -> list[tuple[str, ...]]:
    """The tensors of a published checkpoint that make up parameter ``name``, one tuple an expert.

    Those of a tuple lie one below the other; the tuples are stacked. Empty for every parameter that
    is published under its own name.
    """
    found = _STACKED.fullmatch(name)
    if found is None or config.num_experts is None:
        return []
    prefix, kind = found.groups()
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return [tuple(f"{prefix}.{expert}.{part}.weight" for part in parts) for expert in range(config.num_experts)]
