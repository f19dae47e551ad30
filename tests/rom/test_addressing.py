"""Row ids against brute force, and files whose addresses lie."""

from __future__ import annotations

import json
import runpy
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rom_file import random_rows, spec_of, write

from meki_edge.errors import UserError
from meki_edge.rom.addressing import NOTHING, Addressing, Identity, NgramHash, Ragged
from meki_edge.rom.reader import RomReader

ORACLE = runpy.run_path(str(Path(__file__).parents[1] / "golden" / "make.py"))


def listed(addressing: Addressing, ids: list[int], before: list[int]) -> list[list[int]]:
    """The row ids that are meant; also checks what surrounds them."""
    row_ids, counts = addressing.row_ids(np.array(ids, np.int64), np.array(before, np.int64))
    assert row_ids.dtype == counts.dtype == np.int64 and row_ids.shape == (len(ids), addressing.rows_per_token)
    assert counts.tolist() == addressing.row_counts(np.array(ids, np.int64)).tolist()
    for row, count in zip(row_ids, counts, strict=True):
        assert not row[count:].any()
    return [row[:count].tolist() for row, count in zip(row_ids, counts, strict=True)]


def test_identity() -> None:
    assert listed(Identity(), [4, 0, 4], [7]) == [[4], [0], [4]]


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_ragged(counts: list[int], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(counts) - 1), min_size=1, max_size=20))
    addressing = Ragged(np.concatenate(([0], np.cumsum(counts))))
    assert addressing.rows_per_token == max(counts)
    assert listed(addressing, ids, [0]) == [
        list(range(sum(counts[:token]), sum(counts[: token + 1]))) for token in ids
    ]


@st.composite
def hashes(draw: st.DrawFn) -> NgramHash:
    token_map = draw(st.lists(st.integers(0, 200), min_size=1, max_size=25))
    pad_id = draw(st.integers(0, 200))
    orders = draw(st.integers(1, 4))
    largest = (2**63 - 1) // max(*token_map, pad_id, 1)
    primes = st.lists(st.sampled_from([2, 3, 5, 7, 11, 101, 65_537]), min_size=1, max_size=3)
    return NgramHash(
        token_map=np.array(token_map, np.int32),
        multipliers=tuple(draw(st.lists(st.integers(1, largest), min_size=orders + 1, max_size=orders + 1))),
        primes=tuple(map(tuple, draw(st.lists(primes, min_size=orders, max_size=orders)))),
        pad_id=pad_id,
    )


@given(hashed=hashes(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_hashed_ngrams(hashed: NgramHash, data: st.DataObject) -> None:
    """Whatever the history, also where it is shorter or longer than the n-gram."""
    tokens = st.integers(0, len(hashed.token_map) - 1)
    ids, before = data.draw(st.lists(tokens, min_size=1, max_size=12)), data.draw(st.lists(tokens, max_size=7))
    constants = (hashed.token_map.tolist(), hashed.multipliers, hashed.primes, hashed.pad_id)
    expected = ORACLE["hash_rows"](ids, before, *constants)
    assert listed(hashed, ids, before) == expected
    assert all(0 <= row < hashed.num_rows for rows in expected for row in rows)
    for cut in range(1, len(ids)):  # in pieces, as a decoder sees them
        assert listed(hashed, ids[cut:], before + ids[:cut]) == expected[cut:]


HASHED = NgramHash(
    token_map=np.array([0, 1, 1, 2, 3], np.int32), multipliers=(3, 7, 11), primes=((2, 3), (5, 7)), pad_id=2
)


def rewritten(path: Path, parameters: dict[str, Any], token_map: list[int] | None = None) -> Path:
    """A hashed file with some parameters replaced, and perhaps its map."""
    spec = spec_of([(0, 0, 3)], "int8", HASHED.num_rows, HASHED)
    contents = write(path, spec, random_rows(spec)).read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header = json.loads(contents[8 : 8 + length])
    header["__metadata__"]["addressing_parameters"] = json.dumps({**HASHED.parameters(), **parameters})
    rows = contents[8 + length :]
    if token_map is not None:
        rows = rows[: header["rows"]["data_offsets"][1]] + np.array(token_map, "<i4").tobytes()
    path.write_bytes(contents[:8] + json.dumps(header).encode().ljust(length) + rows)
    return path


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({"multipliers": [3, 7]}, "the hash needs one multiplier more than orders"),
        ({"multipliers": [3, 7, 11, 13]}, "the hash needs one multiplier more than orders"),
        ({"multipliers": []}, "the hash needs one multiplier more than orders"),
        ({"multipliers": [3, 7, 2**62]}, "a multiplier times a compressed id overflows 64 bits"),
        ({"multipliers": [3, 7, -11]}, "multipliers must be positive"),
        ({"multipliers": [3, 7, 11.0]}, "'addressing_parameters' is not valid"),
        ({"multipliers": [3, 7, "11"]}, "'addressing_parameters' is not valid"),
        ({"multipliers": 3}, "'addressing_parameters' is not valid"),
        ({"multipliers": [3], "primes": []}, "the hash needs one multiplier more than orders"),
        ({"primes": [[2, 3], []]}, "the hash needs one multiplier more than orders, and a head in every order"),
        ({"primes": [[2, 3], [5, 11]]}, "the hash addresses 21 rows, the file has 17"),
        ({"primes": [[2, 3], [-1, 13]]}, "a hash head has fewer than 2 rows"),
        ({"primes": [[2, 3], [True, 11]]}, "'addressing_parameters' is not valid"),
        ({"pad_id": -1}, "compressed ids must not be negative"),
        ({"pad_id": 2**62}, "a multiplier times a compressed id overflows 64 bits"),
        ({"pad_id": None}, "'addressing_parameters' is not valid"),
    ],
)
def test_hostile_hash_constants(tmp_path: Path, parameters: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError) as caught:
        RomReader(rewritten(tmp_path / "rom.safetensors", parameters))
    assert caught.value.what.startswith(what)


def test_a_negative_compressed_id(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="compressed ids must not be negative"):
        RomReader(rewritten(tmp_path / "rom.safetensors", {}, [0, 1, -1, 2, 3]))


def test_the_largest_product_that_fits(tmp_path: Path) -> None:
    """63 bits are used in full, and one more is refused."""
    largest = (2**63 - 1) // 3
    path = rewritten(tmp_path / "rom.safetensors", {"multipliers": [largest, largest, 1]})
    with RomReader(path) as reader:
        ids = [4, 4, 0, 3]
        expected = ORACLE["hash_rows"](ids, [], [0, 1, 1, 2, 3], [largest, largest, 1], HASHED.primes, 2)
        assert listed(reader.spec.addressing, ids, []) == expected
    with pytest.raises(UserError, match="overflows 64 bits"):
        RomReader(rewritten(tmp_path / "rom.safetensors", {"multipliers": [largest + 1, 1, 1]}))


def test_offsets_that_overflow_back_into_order(tmp_path: Path) -> None:
    """Differences of these are all positive in 64-bit arithmetic."""
    spec = spec_of([(1, 0, 5)], "fp32", 8, Ragged(np.array([0, 2, 3, 8], np.int64)))
    path = write(tmp_path / "rom.safetensors", spec, random_rows(spec))
    contents = path.read_bytes()
    path.write_bytes(contents[:-32] + np.array([0, 2**63 - 1, -2, 8], "<i8").tobytes())
    with pytest.raises(UserError, match="'offsets' does not divide the 8 rows"):
        RomReader(path)


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    with RomReader(rewritten(tmp_path / "rom.safetensors", {})) as reader:
        for ids, before in ((np.array([5]), NOTHING), (np.array([0]), np.array([-1]))):
            with pytest.raises(UserError, match="is not in the file, which has 5"):
                reader.row_ids(ids, before)
