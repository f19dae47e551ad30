"""The only place that prints: results to stdout, everything else to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from meki_edge.errors import UserError

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def info(message: str) -> None:
    """One line of progress or advice (stderr)."""
    stderr.print(message)


def show_error(error: UserError) -> None:
    """The three parts of a user error (stderr)."""
    stderr.print(f"[bold red]error:[/] {_escape(error.what)}", soft_wrap=True)
    stderr.print(f"[dim]where:[/] {_escape(error.where)}", soft_wrap=True)
    stderr.print(f"[dim]   do:[/] {_escape(error.fix)}", soft_wrap=True)


@contextmanager
def progress(*extra: str) -> Iterator[Progress]:
    """A progress bar on stderr; ``extra`` are rich text columns such as ``"{task.fields[loss]}"``.

    On a terminal it is live; elsewhere only the finished state is printed.
    """
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *(TextColumn(text) for text in extra),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=stderr) as bar:
        yield bar


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
