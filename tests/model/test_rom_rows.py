"""Rows through ROM files: cached decoding of a mixed model, and files that do not belong to the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_config, write_checkpoint

from meki_edge.errors import UserError
from meki_edge.memory import PaddedRows
from meki_edge.model.checkpoint import load_model
from meki_edge.model.decoder import CausalLM
from meki_edge.model.kv_cache import CachedAttention
from meki_edge.model.rom_rows import MASKED, RomRows, rom_rows
from meki_edge.model.row_spaces import row_spaces
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.rom.reader import RomReader

L3 = {"num_entries": 900, "max_entries": 7, "value_dim": 8}
MIX = [
    {"kind": "meki", "layers": [0, 2], "options": {"memory_dim": 6}},
    {"kind": "l3", "layers": [1, 2], "options": L3},
    {"kind": "engram", "layers": [0], "options": {"table_size": 40, "memory_dim": 24, "num_heads": 2}},
]


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory, tokens_dir: Path) -> Path:
    """A mixed model in ROM form."""
    directory = tmp_path_factory.mktemp("mix")
    write_checkpoint(directory / "training", tiny_config(MIX, eos_token_id=0), tokens_dir)
    config = ReparamConfig(table_precision="fp32", proof_windows=1, window_length=16)
    reparam(directory / "training", tokens_dir, directory / "rom", config)
    return directory / "rom"


@pytest.fixture
def model(folded: Path) -> CausalLM:
    return load_model(folded)


@pytest.fixture
def readers(folded: Path, model: CausalLM) -> Iterator[list[RomReader]]:
    with ExitStack() as stack:
        yield [stack.enter_context(RomReader(folded / space.file)) for space in row_spaces(model.config)]


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 384, shape, generator=torch.Generator().manual_seed(1))


def test_cached_decoding_equals_the_full_forward(folded: Path, model: CausalLM, readers: list[RomReader]) -> None:
    """Also of the training form; hashed addresses and convolutions reach back over every cut."""
    ids = random_ids(1, 40)
    rows = RomRows(model.config, readers)
    full = model(ids, rows=rows(ids))
    torch.testing.assert_close(full, load_model(folded.parent / "training")(ids), atol=1e-5, rtol=0)
    cache, pieces = CachedAttention(model.config, 64), []
    for start, stop in ((0, 17), (17, 18), (18, 19), (19, 33), (33, 34), (34, 40)):
        fed = rom_rows(model.config, readers, ids[:, start:stop], before=ids[0, :start].numpy())
        pieces.append(model(ids[:, start:stop], cache, fed))
        cache.advance(stop - start)
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, atol=1e-5, rtol=0)


def test_every_sequence_of_a_batch_has_its_own_rows(model: CausalLM, readers: list[RomReader]) -> None:
    ids = random_ids(3, 20)
    rows = RomRows(model.config, readers)
    together = model(ids, rows=rows(ids))
    for sequence, logits in zip(ids, together, strict=True):
        torch.testing.assert_close(logits[None], model(sequence[None], rows=rows(sequence[None])), atol=1e-5, rtol=0)


def test_padding_is_masked_and_no_wider_than_needed(model: CausalLM, readers: list[RomReader]) -> None:
    ragged = readers[2]
    counts = ragged.spec.addressing.row_counts(np.arange(384))
    few, many = int(counts.argmin()), int(counts.argmax())
    fed = RomRows(model.config, readers)(torch.tensor([[few, many]]))[1][0]
    assert isinstance(fed, PaddedRows) and fed.values.shape == (1, 2, counts.max(), 40)
    assert fed.mask[0, 0].tolist() == [0.0] * counts.min() + [MASKED] * (counts.max() - counts.min())
    assert not fed.values[0, 0, counts.min() :].any() and fed.values[0, 0, 0].any() and not fed.mask[0, 1].any()
    alone = RomRows(model.config, readers)(torch.tensor([[few]]))[1][0]
    assert alone.values.shape == (1, 1, counts.min(), 40)


def test_a_dense_model_reads_nothing() -> None:
    assert rom_rows(tiny_config(), [], random_ids(1, 4)) == [[], [], []]


def test_files_of_another_model_are_refused(model: CausalLM, readers: list[RomReader]) -> None:
    identity, hashed, ragged = readers
    assert [reader.spec.addressing.kind for reader in readers] == ["identity", "ngram_hash", "ragged"]
    for given, what in (
        ([], "the model reads 3 ROM files, 0 were given"),
        ([identity, hashed], "the model reads 3 ROM files, 2 were given"),
        ([hashed, identity, ragged], "the addressing is ngram_hash, the model needs identity"),
    ):
        with pytest.raises(UserError) as caught:
            RomRows(model.config, given)
        assert caught.value.what == what
    for layers, changes, what in (
        ([1], {"num_entries": 901}, "the number of rows is 900, the model needs 901"),
        ([1], {}, "the row's number of elements is 80, the model needs 40"),
        ([1, 2], {"max_entries": 6}, "a token has up to 7 rows, the model takes 6"),
    ):
        other = tiny_config([{"kind": "l3", "layers": layers, "options": {**L3, **changes}}])
        with pytest.raises(UserError) as caught:
            RomRows(other, [ragged])
        assert caught.value.what == what and caught.value.where == str(ragged.path)


def test_an_unknown_token_is_refused(model: CausalLM, readers: list[RomReader]) -> None:
    rows = RomRows(model.config, readers)
    with pytest.raises(UserError, match="token id 384 is not in the file"):
        rows(torch.tensor([[3, 384]]))
    with pytest.raises(UserError, match="token id 999 is not in the file"):
        rows(torch.tensor([[3]]), before=np.array([999]))
