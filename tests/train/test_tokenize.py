"""`tokenize`: which documents go where, that nothing is lost, and what bad sources say."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from pydoc_data.topics import topics
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from meki_edge import tokens
from meki_edge.errors import UserError
from meki_edge.train.tokenize import TokenizeConfig, tokenize

TEXTS = {name: topics[name] for name in sorted(topics)[:40]}
CONFIG = TokenizeConfig(vocab_size=300, validation_fraction=0.25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty real documents in nested folders, and files that are not text."""
    root = tmp_path_factory.mktemp("text")
    for index, (name, text) in enumerate(TEXTS.items()):
        path = root / ("deep/er" if index % 3 else ".") / f"{name}.{'md' if index % 2 else 'txt'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "image.png").write_bytes(b"\xff\xd8")
    (root / ".hidden.txt").write_bytes(b"\xff")
    return root


def documents(directory: Path) -> tuple[list[str], list[str]]:
    """The texts of both splits, decoded by the library itself, cut at EOS."""
    shards = tokens.open_shards(directory)
    tokenizer = Tokenizer.from_file(str(directory / tokens.TOKENIZER))

    def cut(ids: np.ndarray) -> list[str]:
        assert ids[-1] == shards.eos_token_id
        pieces = np.split(ids, np.flatnonzero(ids == shards.eos_token_id) + 1)[:-1]
        return [tokenizer.decode([int(i) for i in piece[:-1]]) for piece in pieces]

    return cut(np.asarray(shards.train)), cut(np.asarray(shards.validation))


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def test_every_document_lands_whole_in_one_split(folder: Path, tmp_path: Path) -> None:
    manifest = tokenize([folder], tmp_path / "out", CONFIG)
    train, validation = documents(tmp_path / "out")
    assert sorted(train + validation) == sorted(TEXTS.values())
    metrics = manifest.metrics
    assert metrics["documents"] == len(TEXTS)
    assert (metrics["train_documents"], metrics["validation_documents"]) == (len(train), len(validation))
    assert metrics["validation_bytes"] == sum(len(text.encode()) for text in validation)
    assert metrics["train_bytes"] == sum(len(text.encode()) for text in train)
    assert 3 <= len(validation) <= 20
    assert metrics["vocab_size"] == 300
    assert metrics["token_bytes"] == 2
    assert metrics["train_tokens"] * 2 == (tmp_path / "out" / tokens.TRAIN).stat().st_size


def test_the_split_depends_on_text_and_seed_only(folder: Path, tmp_path: Path) -> None:
    tokenize([folder], tmp_path / "folder", CONFIG)
    shuffled = list(TEXTS.values())
    random.Random(1).shuffle(shuffled)
    lines = write_jsonl(tmp_path / "lines.jsonl", shuffled)
    tokenize([lines], tmp_path / "lines", CONFIG)
    held_out = documents(tmp_path / "folder")[1]
    assert sorted(documents(tmp_path / "lines")[1]) == sorted(held_out)
    tokenize([lines], tmp_path / "seed", TokenizeConfig(vocab_size=300, validation_fraction=0.25, seed=1))
    assert sorted(documents(tmp_path / "seed")[1]) != sorted(held_out)


def test_the_tokenizer_sees_training_documents_only(tmp_path: Path) -> None:
    rare = {f"doc {index} {'zyxwvut' * 50}{index}" for index in range(2)}
    path = write_jsonl(tmp_path / "a.jsonl", sorted(rare))
    tokenize([path], tmp_path / "out", TokenizeConfig(vocab_size=320, validation_fraction=0.5))
    train, validation = documents(tmp_path / "out")
    assert len(train) == len(validation) == 1
    vocabulary = Tokenizer.from_file(str(tmp_path / "out" / tokens.TOKENIZER)).get_vocab()
    assert max(map(len, vocabulary)) > 6
    held_out_only = write_jsonl(tmp_path / "b.jsonl", [train[0], "completely different words " * 30])
    for seed in range(20):  # find a seed that holds the second document out
        out = tmp_path / f"seed{seed}"
        tokenize([held_out_only], out, TokenizeConfig(vocab_size=320, validation_fraction=0.5, seed=seed))
        if documents(out)[1][0].startswith("completely"):
            words = Tokenizer.from_file(str(out / tokens.TOKENIZER)).get_vocab()
            assert not any("diff" in word for word in words)
            return
    pytest.fail("no seed of twenty held the second document out")


def test_duplicates_and_empty_documents_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [*TEXTS.values()][:6]
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, texts[0], "", " \n", texts[3]])
    manifest = tokenize([path, path], tmp_path / "out", CONFIG)
    assert manifest.metrics["documents"] == 6
    assert manifest.metrics["duplicate_documents"] == 2 + 6 + 2
    assert manifest.metrics["empty_documents"] == 4
    assert sorted(sum(documents(tmp_path / "out"), [])) == sorted(texts)
    assert "10 exact duplicates, 4 empty" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_an_empty_split_gets_one_document(tmp_path: Path, fraction: float, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS.values()][:5])
    tokenize([path], tmp_path / "out", TokenizeConfig(vocab_size=300, validation_fraction=fraction))
    sizes = [len(split) for split in documents(tmp_path / "out")]
    assert sizes == ([4, 1] if fraction < 0.5 else [1, 4])
    assert "moved there" in " ".join(capsys.readouterr().err.split())


def test_a_ready_tokenizer_is_kept_byte_for_byte(tmp_path: Path) -> None:
    words = {word: index for index, word in enumerate(["[UNK]", "alpha", "beta"])}
    words["far"] = 70_000
    ready = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    ready.pre_tokenizer = pre_tokenizers.Whitespace()
    ready.add_special_tokens([AddedToken("</s>", special=True)])
    ready.save(str(tmp_path / "ready.json"))
    path = write_jsonl(tmp_path / "a.jsonl", ["alpha beta", "beta far"], field="body")
    config = TokenizeConfig(text_field="body", validation_fraction=0.5)
    manifest = tokenize([path], tmp_path / "out", config, tokenizer=tmp_path / "ready.json")
    assert (tmp_path / "out" / tokens.TOKENIZER).read_bytes() == (tmp_path / "ready.json").read_bytes()
    assert manifest.metrics["token_bytes"] == 4
    shards = tokens.open_shards(tmp_path / "out")
    both = sorted([shards.train.tolist(), shards.validation.tolist()])
    assert both == [[1, 2, shards.eos_token_id], [2, 70_000, shards.eos_token_id]]
    with pytest.raises(UserError, match="exclude each other"):
        tokenize([path], tmp_path / "no", CONFIG, tokenizer=tmp_path / "ready.json")


def test_second_run_is_skipped_and_changed_text_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS.values()][:4])
    first = tokenize([path], tmp_path / "out", CONFIG)
    written = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    assert tokenize([path], tmp_path / "out", CONFIG) == first
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == written
    write_jsonl(path, [*TEXTS.values()][:5])
    with pytest.raises(UserError, match="documents_sha256"):
        tokenize([path], tmp_path / "out", CONFIG)
    assert tokenize([path], tmp_path / "out", CONFIG, force=True).metrics["documents"] == 5


@pytest.mark.parametrize(
    ("name", "data", "what", "where"),
    [
        ("a.txt", b"good \xff bad", r"invalid UTF-8 at byte offset 5 \(0xff\)", "a.txt"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xe9"}\n', "invalid UTF-8 at byte offset 25", "a.jsonl"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', "not valid JSON", "a.jsonl:2"),
        ("a.jsonl", b'{"texts": "ok"}\n', "no field 'text'; did you mean 'texts'", "a.jsonl:1"),
        ("a.jsonl", b'\n["ok"]\n', "not a JSON object", "a.jsonl:2"),
        ("a.jsonl", b'{"text": 7}\n', "not a string", "a.jsonl:1"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "half of a surrogate pair", "a.jsonl:1"),
        ("a.txt", b"one document", "1 documents are not enough", "a.txt"),
        ("a.png", b"", "no text was found among 1 files", "in"),
    ],
)
def test_bad_sources(tmp_path: Path, name: str, data: bytes, what: str, where: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    with pytest.raises(UserError, match=what) as caught:
        tokenize([tmp_path / "in"], tmp_path / "out", CONFIG)
    assert caught.value.where.endswith(where)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (TokenizeConfig(validation_fraction=0.0), "not between 0 and 1"),
        (TokenizeConfig(validation_fraction=float("nan")), "not between 0 and 1"),
        (TokenizeConfig(vocab_size=256), "too small for a byte-level tokenizer"),
        (TokenizeConfig(seed=1 << 70), "does not fit 64 bits"),
    ],
)
def test_bad_options(folder: Path, tmp_path: Path, config: TokenizeConfig, what: str) -> None:
    with pytest.raises(UserError, match=what):
        tokenize([folder], tmp_path / "out", config)


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        tokenize([tmp_path / "nowhere"], tmp_path / "out", CONFIG)
