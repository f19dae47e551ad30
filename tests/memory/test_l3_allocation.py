"""The LZW allocation against worked examples and a brute-force parser."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meki_edge.errors import UserError
from meki_edge.memory.l3_allocation import allocate

LINE = np.array([0, 1, 0, 1, 0, 1, 2, 0, 1, 0, 1, 2])


@pytest.mark.parametrize(
    ("mode", "max_entries", "expected"),
    [("listing", 3, [3, 3, 1, 1]), ("listing", 2, [2, 2, 2, 2]), ("textbook", 3, [2, 3, 2, 1])],
)
def test_worked_examples(mode: str, max_entries: int, expected: list[int]) -> None:
    entries = allocate(LINE, vocab_size=4, num_entries=8, max_entries=max_entries, separator=None, mode=mode)
    assert entries.tolist() == expected


def brute_force(lines: list[list[int]], vocab_size: int, num_entries: int, cap: int, textbook: bool) -> list[int]:
    counts = {(token,): 0 for token in range(vocab_size)}
    for line in lines:
        i = 0
        while i < len(line):
            j = i + 1
            while j < len(line) and tuple(line[i : j + 1]) in counts:
                j += 1
            if j == len(line):
                if textbook:
                    counts[tuple(line[i:j])] += 1
                break
            counts[tuple(line[i:j])] += 1
            counts[tuple(line[i : j + 1])] = 1
            i = j if textbook else j + 1
    d = [1] * vocab_size
    for word in sorted(counts, key=lambda w: -counts[w]):
        if sum(d) < num_entries and d[word[-1]] < cap:
            d[word[-1]] += 1
    while sum(d) < num_entries:
        for token in range(vocab_size):
            if sum(d) < num_entries and d[token] < cap:
                d[token] += 1
    return d


@given(
    lines=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=60), min_size=1, max_size=4),
    cap=st.integers(1, 6),
    extra=st.floats(0, 1),
    textbook=st.booleans(),
)
def test_equals_brute_force(lines: list[list[int]], cap: int, extra: float, textbook: bool) -> None:
    vocab_size, separator = 6, 5  # the separator is a token too, and gets its one entry
    num_entries = vocab_size + int(extra * (cap - 1) * vocab_size)
    corpus = np.array([token for line in lines for token in [*line, separator]])
    entries = allocate(
        corpus,
        vocab_size=vocab_size,
        num_entries=num_entries,
        max_entries=cap,
        separator=separator,
        mode="textbook" if textbook else "listing",
    )
    assert entries.tolist() == brute_force(lines, vocab_size, num_entries, cap, textbook)
    assert entries.sum() == num_entries and entries.min() >= 1 and entries.max() <= cap


@pytest.mark.parametrize("num_entries", [3, 13])
def test_an_impossible_budget_is_an_error(num_entries: int) -> None:
    with pytest.raises(UserError, match=f"{num_entries} entries can not be dealt to 4 tokens with 1 to 3 each"):
        allocate(LINE, vocab_size=4, num_entries=num_entries, max_entries=3, separator=None)


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(UserError, match="unknown allocation mode 'lz78'"):
        allocate(LINE, vocab_size=4, num_entries=8, max_entries=3, separator=None, mode="lz78")
