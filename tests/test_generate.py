"""`meki-edge generate` through the real harness, and streaming detokenization against whole decoding."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import split_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meki_edge import files, manifest
from meki_edge.errors import UserError
from meki_edge.generate import BROKEN, Detokenizer, GenerateConfig, generate
from meki_edge.model.checkpoint import load_model

PROMPT = "The with statement is used to wrap"
GREEDY = GenerateConfig(max_new_tokens=24, threads=1)


def run(bundle: Path, prompt: str, config: GenerateConfig) -> tuple[dict, list[str]]:
    pieces: list[str] = []
    return generate(bundle, prompt, config, pieces.append), pieces


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and one a word whose bytes end inside a character."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = byte_tokenizer()


@given(st.text(max_size=40))
def test_no_character_is_ever_broken(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push(token) for token in BYTES.encode(text).ids]
    assert "".join(pieces) == text.rstrip(BROKEN)
    assert all(BROKEN not in piece for piece in pieces) or BROKEN in text


@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_give_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES)
    assert "".join(detokenizer.push(token) for token in ids) == BYTES.decode(ids).rstrip(BROKEN)


def test_a_decoder_that_strips_the_first_blank_keeps_the_others() -> None:
    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in (0, 1, 2, 1, 0)] == ["the", " cat", "s", " cat", " the"]


@pytest.mark.parametrize("name", ["dense", "meki"])
def test_greedy_text_is_that_of_pytorch(
    name: str, bundles: dict[str, Path], exported: dict[str, tuple[Path, Path]]
) -> None:
    stats, pieces = run(bundles[name], PROMPT, GREEDY)
    tokenizer = Tokenizer.from_file(str(bundles[name] / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    expected = greedy(exported[name][0], ids, GREEDY.max_new_tokens, stop=0)
    assert stats["text"] == "".join(pieces) == tokenizer.decode([token for token in expected if token]).rstrip(BROKEN)
    assert (stats["prompt_tokens"], stats["generated_tokens"]) == (len(ids), len(expected))
    assert stats["stop"] == ("eos" if expected[-1] == 0 else "length")
    assert stats["generate_tokens_per_s"] > 0
    assert (stats["io_us_per_token"] > 0) == (name == "meki")


def greedy(checkpoint: Path, prompt: list[int], count: int, stop: int) -> list[int]:
    """The reference: a full forward pass a token."""
    from meki_edge.rom.reader import RomReader

    model = load_model(checkpoint)
    ids = list(prompt)
    for _ in range(count):
        rows = None
        if model.config.folded:
            with RomReader(checkpoint / "rom.safetensors") as rom:
                rows = split_rows(model, torch.from_numpy(rom.rows(np.array(ids)))[None])
        ids.append(int(model(torch.tensor([ids]), rows=rows)[0, -1].argmax()))
        if ids[-1] == stop:
            break
    return ids[len(prompt) :]


def test_rows_are_compared_with_their_checksums(checked_bundle: Path, bundles: dict[str, Path]) -> None:
    checked, _ = run(checked_bundle, PROMPT, dataclasses.replace(GREEDY, verify_rows=True))
    assert checked["verify_rows"] is True and checked["deadlines_missed"] >= 0
    plain, _ = run(bundles["meki"], PROMPT, GREEDY)
    assert plain["verify_rows"] is False and plain["text"] == checked["text"]
    with pytest.raises(UserError, match="the file has no checksums of its rows"):
        run(bundles["meki"], PROMPT, dataclasses.replace(GREEDY, verify_rows=True))


def test_an_empty_prompt_starts_from_end_of_text(bundles: dict[str, Path]) -> None:
    stats, _ = run(bundles["meki"], "", GREEDY)
    assert stats["prompt_tokens"] == 1


def test_a_seed_decides_what_is_sampled(bundles: dict[str, Path]) -> None:
    def sampled(seed: int) -> str:
        config = GenerateConfig(max_new_tokens=24, temperature=1.5, top_k=50, top_p=0.95, seed=seed, threads=1)
        return run(bundles["meki"], PROMPT, config)[0]["text"]

    assert sampled(1) == sampled(1) != sampled(2)


def test_a_prompt_that_does_not_fit_names_both_numbers(bundles: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"a prompt of \d+ tokens and 150 new ones do not fit the context of 160"):
        run(bundles["dense"], PROMPT, GenerateConfig(max_new_tokens=150))
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        run(bundles["dense"], PROMPT, GenerateConfig(max_new_tokens=0))


def test_an_edited_bundle_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(bundles["meki"], tmp_path / "bundle")
    with open(tmp_path / "bundle/rom.safetensors", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(UserError, match="the file has 5000 bytes"):
        run(tmp_path / "bundle", PROMPT, GREEDY)


def test_a_token_that_never_comes_ends_nothing(bundles: dict[str, Path], tmp_path: Path) -> None:
    """An end-of-text token outside the vocabulary is found before anything runs."""
    bundle = shutil.copytree(bundles["dense"], tmp_path / "bundle")
    path = bundle / "graph_spec.json"
    files.write_json(path, files.read_json(path) | {"eos_token_id": 99_999})
    described = files.read_json(bundle / manifest.FILE_NAME)
    described["files"][path.name] |= {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}
    files.write_json(bundle / manifest.FILE_NAME, described)
    with pytest.raises(UserError, match="eos_token_id is 99999, the vocabulary has 384 tokens"):
        generate(bundle, PROMPT, GREEDY, print, run_json=None)
