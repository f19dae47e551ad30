"""The tokenizer: byte-level BPE that loses nothing, any tokenizer.json, and its end-of-text token."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydoc_data.topics import topics
from tokenizers import AddedToken, Tokenizer, models

from meki_edge.errors import UserError
from meki_edge.tokenizer import load, train_bpe

TEXTS = [topics[name] for name in sorted(topics)][:20]


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(iter(TEXTS), 400).save(str(path))
    return path


def word_level(path: Path, words: dict[str, int], special: list[str]) -> Path:
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(path))
    return path


def test_training_is_deterministic_and_sized(bpe_file: Path) -> None:
    again = train_bpe(iter(TEXTS), 400)
    assert json.loads(again.to_str()) == json.loads(bpe_file.read_text())
    loaded = load(bpe_file)
    assert (loaded.vocab_size, loaded.eos_token_id, loaded.token_dtype) == (400, 0, np.dtype("<u2"))
    assert loaded.sha256 == hashlib.sha256(bpe_file.read_bytes()).hexdigest()


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(bpe_file: Path, text: str) -> None:
    loaded = load(bpe_file)
    ids = loaded.encode(text)
    assert loaded.encode_batch([text]) == [ids]
    assert loaded.decode(ids) == text


def test_special_tokens_in_text_are_letters(bpe_file: Path) -> None:
    loaded = load(bpe_file)
    ids = loaded.encode("a<|endoftext|>b")
    assert loaded.eos_token_id not in ids
    assert loaded.decode(ids) == "a<|endoftext|>b"


def test_too_little_text_gives_fewer_tokens() -> None:
    assert train_bpe(iter(["abc"]), 5000).get_vocab_size() < 300


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (["<|im_end|>", "<|endoftext|>"], "<|endoftext|>"),
        (["<s>", "</s>"], "</s>"),
        (["<eos>"], "<eos>"),
    ],
)
def test_end_of_text_is_found(tmp_path: Path, special: list[str], expected: str) -> None:
    path = word_level(tmp_path / "tokenizer.json", {"[UNK]": 0, "word": 1}, special)
    loaded = load(path)
    assert loaded.inner.id_to_token(loaded.eos_token_id) == expected
    assert load(path, eos_token=special[0]).eos_token_id == loaded.inner.token_to_id(special[0])


def test_vocab_size_counts_to_the_highest_id(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", {"[UNK]": 0, "far": 70_000}, ["<eos>"])
    loaded = load(path)
    assert loaded.vocab_size > 70_000
    assert loaded.token_dtype == np.dtype("<u4")


def test_truncation_in_the_file_does_not_cut_documents(tmp_path: Path, bpe_file: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bpe_file))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=99)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path / "tokenizer.json").encode(TEXTS[0]) == load(bpe_file).encode(TEXTS[0])


def test_errors(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match="does not exist"):
        load(path)
    path.write_text('{"model": 3}')
    with pytest.raises(UserError, match="not a tokenizer.json"):
        load(path)
    word_level(path, {"[UNK]": 0}, ["<|end|>"])
    with pytest.raises(UserError, match="none of the usual end-of-text tokens"):
        load(path)
    with pytest.raises(UserError, match="no token '<|edn|>'; did you mean '<|end|>'"):
        load(path, eos_token="<|edn|>")
