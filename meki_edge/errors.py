"""The one error that is a user's to mend.

Everything that bad input, a full disk or a changed file can cause is raised as a
:class:`UserError` with three parts: *what* is wrong (with values), *where* (file, tensor or
field) and *what to do*. It is caught once, in :mod:`meki_edge.cli`, and shown without a
traceback. A broken promise of our own code stays an ``AssertionError``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from os import PathLike


class UserError(Exception):
    """What is wrong, where, and what to do about it."""

    def __init__(self, what: str, *, where: str | PathLike[str], fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = str(where)
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what} [{self.where}] {self.fix}"


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
