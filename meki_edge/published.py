"""Figures that the MeKi paper published, to be shown beside measurements of a phone: never as ours.

arXiv:2602.03359, Table 1: decoding on a Snapdragon 8 Elite's NPU with 10K tokens in the KV cache, and
the average of ten zero-shot benchmarks; each pair is the dense Qwen3 model, then with MeKi.
"""

from __future__ import annotations

from typing import Any

TITLE = "Published, not measured here"
SOURCE = (
    "MeKi, arXiv:2602.03359, Table 1: decoding on a Snapdragon 8 Elite's NPU, 10K tokens in the KV cache; "
    "quality is the mean of ten zero-shot benchmarks"
)
HEADINGS = ("model", "tokens/s, dense", "tokens/s, MeKi", "ratio", "quality, dense", "quality, MeKi", "ROM parameters")

_TABLE_1 = (
    {"model": "Qwen3-0.6B", "tokens_per_s": (20.1, 19.9), "quality": (53.0, 55.5), "rom_parameters": 0.544e9},
    {"model": "Qwen3-1.7B", "tokens_per_s": (13.8, 13.7), "quality": (56.0, 59.7), "rom_parameters": 1.087e9},
    {"model": "Qwen3-4B", "tokens_per_s": (6.1, 6.1), "quality": (60.5, 63.0), "rom_parameters": 2.796e9},
)


def table() -> dict[str, Any]:
    """``title``, ``source``, ``headings`` and ``rows`` of text."""
    rows = [
        [
            str(line["model"]),
            *(f"{value:.1f}" for value in line["tokens_per_s"]),
            f"{line['tokens_per_s'][1] / line['tokens_per_s'][0]:.2f}",
            *(f"{value:.1f}" for value in line["quality"]),
            f"{line['rom_parameters'] / 1e9:.2f} B",
        ]
        for line in _TABLE_1
    ]
    return {"title": TITLE, "source": SOURCE, "headings": list(HEADINGS), "rows": rows}
