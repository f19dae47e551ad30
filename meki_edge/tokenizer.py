"""Tokenizers: train a byte-level BPE, or open any ``tokenizer.json`` of the `tokenizers` library.

No torch: the tokenize stage, the harness's command line and reports all need only this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meki_edge.errors import UserError, nearest
from meki_edge.files import sha256_file

EOS_TOKEN = "<|endoftext|>"
KNOWN_EOS_TOKENS = (EOS_TOKEN, "<|im_end|>", "</s>", "<eos>")
"""What end-of-text is called, in the order of preference. Qwen's files hold the first two: the
first ends a document, the second a turn of a conversation."""

NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A ``tokenizer.json``, opened for plain text: no truncation, padding or added start token."""

    path: Path
    inner: Tokenizer
    vocab_size: int
    """One more than the highest token id."""
    eos_token_id: int
    sha256: str

    @property
    def token_dtype(self) -> np.dtype:
        """The smallest little-endian unsigned type that holds every id: 2 or 4 bytes."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without EOS; the letters ``<|endoftext|>`` in a text are letters."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """As :meth:`encode`, on all cores."""
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; special tokens are left out."""
        return self.inner.decode(list(ids))


def load(path: Path, *, eos_token: str | int | None = None) -> TextTokenizer:
    """Open ``tokenizer.json``.

    Args:
        path: the file.
        eos_token: the token that ends a document, or its id; default: the first of
            ``KNOWN_EOS_TOKENS`` that the file has.

    Raises:
        UserError: no such file, not a tokenizer, an empty vocabulary, or no EOS token in it.
    """
    inner = read_tokenizer(path)
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    vocabulary = inner.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UserError("the tokenizer's vocabulary is empty", where=path, fix="give a trained tokenizer")
    return TextTokenizer(
        path=path,
        inner=inner,
        vocab_size=max(vocabulary.values()) + 1,
        eos_token_id=_find_eos(inner, eos_token, path),
        sha256=sha256_file(path),
    )


def read_tokenizer(path: Path) -> Tokenizer:
    """The `tokenizers` object of a file, as it is; a missing or broken file is a :class:`UserError`."""
    if not path.is_file():
        raise UserError("the tokenizer file does not exist", where=path, fix="give the path of a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
        raise UserError(
            f"not a tokenizer.json: {error}",
            where=path,
            fix="give the tokenizer.json of a Hugging Face fast tokenizer, or leave --tokenizer out to train one",
        ) from None


def train_bpe(texts: Iterator[str], vocab_size: int, eos_token: str = EOS_TOKEN) -> Tokenizer:
    """Train a byte-level BPE on ``texts``: id 0 is EOS, ids 1…256 the bytes, then the merges.

    The pre-tokenizer is GPT-2's. A text too small for ``vocab_size`` gives fewer tokens.
    """
    assert vocab_size > NUM_BYTES
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _find_eos(inner: Tokenizer, eos_token: str | int | None, path: Path) -> int:
    if isinstance(eos_token, int):
        eos_token = inner.id_to_token(eos_token) or f"id {eos_token}"
    for candidate in KNOWN_EOS_TOKENS if eos_token is None else (eos_token,):
        token_id = inner.token_to_id(candidate)
        if token_id is not None:
            return token_id
    special = [token.content for token in inner.get_added_tokens_decoder().values()]
    if eos_token is not None:
        what = f"the tokenizer has no token {eos_token!r}{nearest(eos_token, special)}"
    else:
        what = f"the tokenizer has none of the usual end-of-text tokens ({', '.join(KNOWN_EOS_TOKENS)})"
    raise UserError(
        what, where=path, fix=f"name the token that ends a document with --eos-token (special: {special[:8]})"
    )
