"""The only place that prints: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from meki_edge.errors import UserError

WIDE = 400  # columns; no table is wider

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def info(message: str) -> None:
    """One line of progress or advice (stderr)."""
    stderr.print(message, markup=False)


def show_error(error: UserError) -> None:
    """The three parts of a user error (stderr)."""
    stderr.print(f"[bold red]error:[/] {_escape(error.what)}", soft_wrap=True)
    stderr.print(f"[dim]where:[/] {_escape(error.where)}", soft_wrap=True)
    stderr.print(f"[dim]   do:[/] {_escape(error.fix)}", soft_wrap=True)


def stream(text: str) -> None:
    """Text as it comes, exactly, without a line break of ours (stdout)."""
    stdout.file.write(text)
    stdout.file.flush()


def show_json(value: Any) -> None:
    """A result as JSON (stdout)."""
    stream(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def show_metrics(values: Mapping[str, Any], *, title: str | None, skip: tuple[str, ...] = ()) -> None:
    """Named figures as a two-column table (stderr); nested objects are flattened with dots.

    The title is a line of its own, as long as it is: it may hold a path, which can then be copied whole.
    """
    if title is not None:
        stderr.print(f"[table.title]{_escape(title)}[/]", soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _flat(values):
        if name not in skip:
            table.add_row(name, _escape(f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if _whole(value) else str(value)))
    stderr.print(table)


def show_table(title: str, headings: list[str], rows: list[list[str]], *, where: Console = stdout) -> None:
    """A table of text; columns after the second are numbers. On stdout, or ``stderr`` if it is no command's result."""
    table = Table(title=_escape(title), title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_escape, row))
    where.print(table)


def show_wide(table: Table) -> None:
    """A table whose lines stay whole, however narrow the terminal is (stdout)."""
    Console(highlight=False, width=max(stdout.width, WIDE)).print(table)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


@contextmanager
def byte_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over ``total`` bytes; call what it yields with the bytes of each step."""
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=stderr) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
