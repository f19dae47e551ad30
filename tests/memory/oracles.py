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
