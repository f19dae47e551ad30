"""Which rows a token needs: integers only, the same in Python and in the C++ harness.

*identity*: row t. *ragged* (L3): the rows ``offsets[t]`` to ``offsets[t+1]``. *ngram_hash*
(Engram): one row a hash head, from the last N token ids. Row ids are pure functions of token ids,
so the host knows them the moment a token is sampled.

Shapes: T tokens, K ``rows_per_token``, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Protocol

import numpy as np

from meki_edge.errors import UserError

OFFSETS = "offsets"
TOKEN_MAP = "token_map"

NOTHING = np.empty(0, np.int64)
"""The ids before a text."""


class Addressing(Protocol):
    """An address function and how a ROM file stores it."""

    kind: ClassVar[str]

    @property
    def rows_per_token(self) -> int:
        """K: the most rows that a token can need."""
        ...

    @property
    def history(self) -> int:
        """How many earlier token ids the address of a token depends on."""
        ...

    def row_ids(self, token_ids: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of ``token_ids`` ``[T]``, given the ids ``before`` them (any number, oldest first).

        Returns ``ids`` int64 ``[T, K]`` and ``counts`` int64 ``[T]``: of each token's K ids the
        first ``counts`` are meant, the rest are 0.
        """
        ...

    def row_counts(self, token_ids: np.ndarray) -> np.ndarray:
        """How many rows each of ``token_ids`` ``[T]`` needs: int64 ``[T]``, whatever came before."""
        ...

    def name_of(self, row: int) -> str:
        """Whose row it is, for people."""
        ...

    def parameters(self) -> dict[str, Any]:
        """What a ROM header records beside ``kind``; JSON."""
        ...

    def tensors(self) -> dict[str, np.ndarray]:
        """The tensors that a ROM file stores after ``rows``."""
        ...

    @property
    def num_tokens(self) -> int | None:
        """Token ids that have an address: 0 … ``num_tokens`` - 1 (None: as many as there are rows)."""
        ...


@dataclass(frozen=True)
class Identity:
    """Row t for token t (MeKi, PLE, STEM, STAPLE, MoLE)."""

    kind: ClassVar[str] = "identity"
    rows_per_token: ClassVar[int] = 1
    history: ClassVar[int] = 0
    num_tokens: ClassVar[None] = None

    def row_ids(self, token_ids: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(token_ids, np.int64)
        return ids[:, None], self.row_counts(ids)

    def row_counts(self, token_ids: np.ndarray) -> np.ndarray:
        return np.ones(len(token_ids), np.int64)

    def name_of(self, row: int) -> str:
        return f"token {row}"

    def parameters(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, np.ndarray]:
        return {}


@dataclass(frozen=True, eq=False)
class Ragged:
    """A different number of consecutive rows a token (L3): ``offsets`` int64 ``[V + 1]``, ascending."""

    offsets: np.ndarray
    kind: ClassVar[str] = "ragged"
    history: ClassVar[int] = 0

    @property
    def rows_per_token(self) -> int:
        return int(np.diff(self.offsets).max())

    @property
    def num_tokens(self) -> int:
        return len(self.offsets) - 1

    def row_ids(self, token_ids: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray(token_ids, np.int64)
        counts = self.row_counts(ids)
        slots = np.arange(self.rows_per_token, dtype=np.int64)
        return np.where(slots < counts[:, None], self.offsets[ids][:, None] + slots, 0), counts

    def row_counts(self, token_ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(token_ids, np.int64)
        return self.offsets[ids + 1] - self.offsets[ids]

    def name_of(self, row: int) -> str:
        token = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return f"token {token}, its row {row - self.offsets[token]}"

    def parameters(self) -> dict[str, Any]:
        return {"rows_per_token": self.rows_per_token}

    def tensors(self) -> dict[str, np.ndarray]:
        return {OFFSETS: np.ascontiguousarray(self.offsets, "<i8")}


@dataclass(frozen=True, eq=False)
class NgramHash:
    """Hashed n-grams of compressed ids (Engram, equation of section 2; see ``memory/engram.py``).

    With compressed ids ``x = token_map[t]`` (``pad_id`` before the text begins), order n of
    2…N hashes ``mix = XOR_{k<n} x[i-k]·multipliers[k]``; head j of that order reads row
    ``mix mod primes[n-2][j] + offset``, the offsets being running sums of the primes.
    """

    token_map: np.ndarray  # int32 [V]
    multipliers: tuple[int, ...]  # [N], odd
    primes: tuple[tuple[int, ...], ...]  # [N - 1][heads]
    pad_id: int
    kind: ClassVar[str] = "ngram_hash"

    @property
    def rows_per_token(self) -> int:
        return sum(len(heads) for heads in self.primes)

    @property
    def history(self) -> int:
        return len(self.multipliers) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_map)

    @property
    def num_rows(self) -> int:
        """Rows of all heads together."""
        return sum(sum(heads) for heads in self.primes)

    def row_ids(self, token_ids: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        length, history = len(token_ids), self.history
        padded = np.full(history + length, self.pad_id, np.int64)
        known = np.asarray(before, np.int64)[len(before) - min(len(before), history) :]
        padded[history - len(known) : history] = self.token_map[known]
        padded[history:] = self.token_map[np.asarray(token_ids, np.int64)]
        columns, offset = [], 0
        mix = padded[history:] * self.multipliers[0]
        for lag, heads in enumerate(self.primes, start=1):
            mix = mix ^ (padded[history - lag : history - lag + length] * self.multipliers[lag])
            for prime in heads:
                columns.append(mix % prime + offset)
                offset += prime
        return np.stack(columns, axis=1), self.row_counts(token_ids)

    def row_counts(self, token_ids: np.ndarray) -> np.ndarray:
        return np.full(len(token_ids), self.rows_per_token, np.int64)

    def name_of(self, row: int) -> str:
        return f"row {row} of the hash heads"

    def parameters(self) -> dict[str, Any]:
        return {
            "multipliers": list(self.multipliers),
            "primes": [list(heads) for heads in self.primes],
            "pad_id": self.pad_id,
        }

    def tensors(self) -> dict[str, np.ndarray]:
        return {TOKEN_MAP: np.ascontiguousarray(self.token_map, "<i4")}


KINDS = (Identity.kind, Ragged.kind, NgramHash.kind)
TENSORS = {Identity.kind: {}, Ragged.kind: {OFFSETS: "I64"}, NgramHash.kind: {TOKEN_MAP: "I32"}}
"""The tensors after ``rows`` by kind, with their safetensors dtype; each has one axis."""


def parse(
    kind: str,
    parameters: Any,
    tensors: Mapping[str, np.ndarray],
    num_rows: int,
    where: str | PathLike[str],
) -> Addressing:
    """The addressing of a ROM header and its extra tensors, checked against ``num_rows``.

    Raises:
        UserError: an unknown kind, wrong parameters, or addresses outside the file.
    """

    def broken(what: str) -> UserError:
        return UserError(what, where=where, fix="regenerate the file with `meki-edge reparam`")

    if kind not in KINDS:
        raise broken(f"unknown addressing {kind!r}")
    try:
        if kind == Ragged.kind:
            return _parse_ragged(tensors[OFFSETS], parameters, num_rows, broken)
        if kind == NgramHash.kind:
            hashed = NgramHash(
                token_map=tensors[TOKEN_MAP],
                multipliers=tuple(map(_integer, parameters["multipliers"])),
                primes=tuple(tuple(map(_integer, heads)) for heads in parameters["primes"]),
                pad_id=_integer(parameters["pad_id"]),
            )
            _check_hash(hashed, num_rows, broken)
            return hashed
    except (ValueError, KeyError, TypeError) as error:
        raise broken(f"'addressing_parameters' is not valid: {error!r}") from None
    return Identity()


def _parse_ragged(
    offsets: np.ndarray, parameters: Any, num_rows: int, broken: Callable[[str], UserError]
) -> Ragged:
    # Neighbours are compared, since differences of hostile offsets overflow.
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != num_rows or (offsets[1:] <= offsets[:-1]).any():
        raise broken(f"'offsets' does not divide the {num_rows} rows among the tokens")
    ragged = Ragged(offsets)
    if _integer(parameters["rows_per_token"]) != ragged.rows_per_token:
        raise broken(f"rows_per_token is {parameters['rows_per_token']}, the offsets say {ragged.rows_per_token}")
    return ragged


def _check_hash(hashed: NgramHash, num_rows: int, broken: Callable[[str], UserError]) -> None:
    if len(hashed.multipliers) != len(hashed.primes) + 1 or not hashed.primes or not all(hashed.primes):
        raise broken("the hash needs one multiplier more than orders, and a head in every order")
    if min(min(heads) for heads in hashed.primes) < 2:
        raise broken("a hash head has fewer than 2 rows")
    if hashed.num_rows != num_rows:
        raise broken(f"the hash addresses {hashed.num_rows} rows, the file has {num_rows}")
    if not len(hashed.token_map):
        raise broken("'token_map' is empty")
    largest = max(int(hashed.token_map.max()), hashed.pad_id)
    if int(hashed.token_map.min()) < 0 or hashed.pad_id < 0:
        raise broken("compressed ids must not be negative")
    if min(hashed.multipliers) < 1:
        raise broken("multipliers must be positive")
    if max(hashed.multipliers) * max(largest, 1) >= 2**63:
        raise broken("a multiplier times a compressed id overflows 64 bits")


def _integer(value: Any) -> int:
    """A JSON integer, and nothing that Python would take for one."""
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value
