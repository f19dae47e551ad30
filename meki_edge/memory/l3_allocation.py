"""How many L3 entries each token gets: LZW over a corpus (arXiv 2601.21461, listing of the appendix).

A token that ends many frequent phrases deserves more entries. Parse the corpus into LZW
codewords, sort them by count, and walk down: each codeword grants one entry to its last token,
up to a cap, until the budget is spent.
"""

from __future__ import annotations

import numpy as np

from meki_edge.errors import UserError

MODES = ("listing", "textbook")


def allocate(
    corpus: np.ndarray,
    *,
    vocab_size: int,
    num_entries: int,
    max_entries: int,
    separator: int | None,
    mode: str = "listing",
) -> np.ndarray:
    """Entries a token: int64 ``[vocab_size]``, each in 1…``max_entries``, summing to ``num_entries``.

    Args:
        corpus: token ids ``[N]``.
        separator: the id that ends a line (a document); it belongs to no codeword.
        mode: ``listing`` continues after the mismatching token and drops a remainder at the end of
            a line, as the paper's listing does; ``textbook`` continues at the mismatching token and
            counts the remainder. (Where a remainder of several tokens is already a codeword, the
            listing would set its count back to 1; here it is left alone.)

    Deterministic: equal counts keep the order of insertion. If the codewords run out before the
    budget does, the rest is dealt round-robin to tokens below the cap.

    Raises:
        UserError: the budget is below one entry a token or above the cap for every token.
    """
    where = "memories: l3"
    if mode not in MODES:
        raise UserError(f"unknown allocation mode {mode!r}", where=where, fix=f"use {' or '.join(MODES)}")
    if not vocab_size <= num_entries <= max_entries * vocab_size:
        raise UserError(
            f"{num_entries} entries can not be dealt to {vocab_size} tokens with 1 to {max_entries} each",
            where=where,
            fix=f"give num_entries between {vocab_size} and {max_entries * vocab_size}",
        )
    last_tokens = _last_tokens_by_count(corpus, vocab_size, separator, restart_at_mismatch=mode == "textbook")
    entries = np.ones(vocab_size, np.int64)
    left = num_entries - vocab_size
    for token in last_tokens:
        if left == 0:
            return entries
        if entries[token] < max_entries:
            entries[token] += 1
            left -= 1
    while left:
        below = np.flatnonzero(entries < max_entries)[:left]
        entries[below] += 1
        left -= len(below)
    return entries


def _last_tokens_by_count(
    corpus: np.ndarray, vocab_size: int, separator: int | None, *, restart_at_mismatch: bool
) -> list[int]:
    """The last token of every codeword, most frequent codeword first.

    Codeword w is a node of a trie; node t < vocab_size is the single token t.
    """
    children: dict[int, int] = {}  # node · vocab_size + token → node
    counts = [0] * vocab_size
    last = list(range(vocab_size))
    node = -1  # no token of the current codeword read yet
    for token in corpus.tolist():
        if token == separator:
            if node >= 0 and restart_at_mismatch:
                counts[node] += 1
            node = -1
        elif node < 0:
            node = token
        else:
            key = node * vocab_size + token
            longer = children.get(key)
            if longer is not None:
                node = longer
            else:
                counts[node] += 1
                children[key] = len(counts)
                counts.append(1)
                last.append(token)
                node = token if restart_at_mismatch else -1
    if node >= 0 and restart_at_mismatch:
        counts[node] += 1
    order = np.argsort(-np.asarray(counts), kind="stable")
    return np.asarray(last)[order].tolist()
