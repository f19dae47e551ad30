"""Float64 NumPy memories, written from the papers' equations and from nothing in the package.

Each function takes the layer's parameters by name (``p``), table rows or ids, embeddings ``[N, d]``
and hidden states ``[N, d]``, one token a row.
"""

from __future__ import annotations

import math

import numpy as np

Params = dict[str, np.ndarray]
EPS = 1e-6


def rms_norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * gain


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def meki_rows(p: Params, ids: np.ndarray, embeddings: np.ndarray, content: str, projector: str) -> np.ndarray:
    z = p["table"][ids] if content != "dynamic" else 0.0
    if content != "static":
        if projector == "swiglu":
            inner = silu(embeddings @ p["projector.gate_proj.weight"].T) * (embeddings @ p["projector.up_proj.weight"].T)
            z = z + p["beta"] * (inner @ p["projector.down_proj.weight"].T)
        else:
            z = z + p["beta"] * (embeddings @ p["projector.weight"].T)
    return p["alpha"] * rms_norm(z, p["mix_norm.weight"])


def meki_update(p: Params, hidden: np.ndarray, rows: np.ndarray, fusion: str) -> np.ndarray:
    gate = hidden @ p["gate_proj.weight"].T
    gate = sigmoid(gate) if fusion.endswith("sigmoid") else silu(gate)
    mixed = rows + gate if fusion.startswith("add") else rows * gate
    return rms_norm(mixed @ p["out_proj.weight"].T, p["out_norm.weight"])


def ple_rows(p: Params, ids: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    hidden_size, width = embeddings.shape[1], p["table"].shape[1]
    scaled = math.sqrt(hidden_size) * embeddings
    projected = rms_norm(scaled @ p["projection.weight"].T * hidden_size**-0.5, p["projection_norm.weight"])
    return (projected + math.sqrt(width) * p["table"][ids]) / math.sqrt(2)


def ple_stream(p: Params, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    gated = gelu_tanh(x @ p["gate_proj.weight"].T) * rows
    u = rms_norm(gated @ p["out_proj.weight"].T, p["out_norm.weight"])
    return (x + u) * p.get("layer_scalar", 1.0)


def mole_rows(p: Params, embeddings: np.ndarray) -> np.ndarray:
    normed = rms_norm(embeddings, p["expert_norm.weight"])
    outputs = [
        (silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        for gate, up, down in zip(p["gate_proj"], p["up_proj"], p["down_proj"], strict=True)
    ]
    return np.concatenate(outputs, axis=1)


def mole_update(p: Params, hidden: np.ndarray, rows: np.ndarray) -> np.ndarray:
    weights = softmax(hidden @ p["router.weight"].T)
    experts = rows.reshape(len(rows), weights.shape[1], -1)
    return np.einsum("ne,ned->nd", weights, experts)


def l3_stream(p: Params, x: np.ndarray, ids: np.ndarray, tied: bool) -> np.ndarray:
    """One token at a time, over the token's own entries."""
    hidden_size = x.shape[1]
    out = np.empty_like(x)
    for i, token in enumerate(ids):
        entries = p["table"][p["offsets"][token] : p["offsets"][token + 1]]
        keys, values = entries[:, :hidden_size], entries if tied else entries[:, hidden_size:]
        h = rms_norm(x[i], p["input_norm.weight"])
        r = values.T @ softmax(keys @ h / math.sqrt(hidden_size))
        up = rms_norm(p["up_proj.weight"] @ r, p["up_norm.weight"])
        out[i] = x[i] + p["mix_proj.weight"] @ np.concatenate((up, h))
    return out


def engram_row_ids(
    token_map: list[int], multipliers: list[int], primes: list[list[int]], pad: int, ids: list[int]
) -> list[list[int]]:
    """Python integers, position by position."""
    rows = []
    for i in range(len(ids)):
        row, offset = [], 0
        for n in range(2, len(multipliers) + 1):
            mix = 0
            for k in range(n):
                compressed = token_map[ids[i - k]] if i - k >= 0 else pad
                mix ^= compressed * multipliers[k]
            for prime in primes[n - 2]:
                row.append(mix % prime + offset)
                offset += prime
        rows.append(row)
    return rows


def engram_stream(p: Params, x: np.ndarray, e: np.ndarray, dilation: int, plain: bool) -> np.ndarray:
    length, hidden_size = x.shape
    s = np.sum(
        rms_norm(e @ p["key_proj.weight"].T, p["key_norm.weight"]) * rms_norm(x, p["query_norm.weight"]),
        axis=1,
        keepdims=True,
    ) / math.sqrt(hidden_size)
    if not plain:
        s = np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6))
    u = sigmoid(s) * (e @ p["value_proj.weight"].T)
    normed, taps = rms_norm(u, p["conv_norm.weight"]), p["conv.weight"][:, 0]
    conv = np.zeros_like(u)
    for i in range(length):
        for tap in range(taps.shape[1]):
            source = i - (taps.shape[1] - 1 - tap) * dilation
            if source >= 0:
                conv[i] += taps[:, tap] * normed[source]
    return x + u + silu(conv)
