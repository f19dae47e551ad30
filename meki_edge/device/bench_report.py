"""The measurements of `meki-edge run` as llama-bench prints its own: a line a bundle and test, in several formats.

One schema (:func:`records`) serves all printers. What a reader compares are columns of the table
(``table``, ``md``); ``csv``, ``json`` and ``jsonl`` hold every field.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

MISSING = "–"
Record = dict[str, Any]


def records(results: dict[str, Any]) -> list[Record]:
    """A flat record for every arm and test of ``results.json``; None where there is nothing to say."""
    return [_record(results, arm, name, test) for arm in results["arms"] for name, test in arm["tests"].items()]


def _record(results: dict[str, Any], arm: dict[str, Any], name: str, test: dict[str, Any]) -> Record:
    config, runner = results["config"], results["runner"]
    has_rows = test["cache_hit_share"] is not None
    return {
        "bundle": arm["name"],
        "table_precision": arm["metrics"]["table_precision"],
        "backend": runner["backend"],
        "tensor_memory": runner["tensor_memory"],
        "threads": runner["threads"],
        "cores": runner["cores"],
        "io": runner["io"] if has_rows else None,
        "rows": ("cold" if config["cold"] else "warm") if has_rows else None,
        "row_cache_bytes": config["row_cache_bytes"] if has_rows else None,
        "verify_rows": runner["verify_rows"] if has_rows else None,
        "test": name,
        "depth": config["depth"],
        "num_tokens": test["num_tokens"],
        "repetitions": config["repetitions"],
        "tokens_per_s": test["tokens_per_s"]["mean"],
        "tokens_per_s_sd": test["tokens_per_s"]["sd"],
        "tokens_per_s_samples": test["tokens_per_s"]["samples"],
        **{f"io_us_{key}": test["io_us_per_token"][key] if has_rows else None for key in ("mean", "p50", "p99")},
        **{f"stall_us_{key}": test["stall_us_per_token"][key] if has_rows else None for key in ("mean", "p50", "p99")},
        "stall_share": test["stall_share"] if has_rows else None,
        "deadlines_missed_share": test["deadlines_missed_share"],
        "cache_hit_share": test["cache_hit_share"],
        "bytes_read_per_token": test["bytes_read_per_token"] if has_rows else None,
        "rss_bytes": arm["rss_bytes"],
        "rss_growth_bytes": arm["rss_growth_bytes"],
        "peak_rss_bytes": arm["peak_rss_bytes"],
        "hottest_celsius": arm["conditions"]["hottest_celsius"],
        "slowest_clock_mhz": arm["conditions"]["slowest_clock_mhz"],
        "runner_version": runner["runner_version"],
        "ort_version": runner["ort_version"],
        "cpu": results["host"]["cpu"],
    }


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table; left out where ``write`` gives None for every record."""

    label: str
    write: Callable[[Record], str | None]


def _plain(key: str, pattern: str = "{}") -> Callable[[Record], str | None]:
    return lambda record: None if record[key] is None else pattern.format(record[key])


def _pair(*keys: str) -> Callable[[Record], str | None]:
    return lambda record: None if record[keys[0]] is None else " / ".join(f"{record[key]:,.0f}" for key in keys)


def _speed(record: Record) -> str:
    spread = "" if record["tokens_per_s_sd"] is None else f" ± {record['tokens_per_s_sd']:,.2f}"
    return f"{record['tokens_per_s']:,.2f}{spread}"


def _test(record: Record) -> str:
    return record["test"] + (f" @ d{record['depth']}" if record["depth"] else "")


def _io(record: Record) -> str | None:
    verified = ", verified" if record["verify_rows"] else ""
    return None if record["io"] is None else f"{record['io']}, {record['rows']}{verified}"


def _bytes(key: str) -> Callable[[Record], str | None]:
    def write(record: Record) -> str | None:
        value = record[key]
        if value is None:
            return None
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= size:
                return f"{value / size:.2f} {unit}"
        return f"{value:.0f} B"

    return write


COLUMNS = (
    Column(label="bundle", write=_plain("bundle")),
    Column(label="table", write=_plain("table_precision")),
    Column(label="threads", write=_plain("threads")),
    Column(label="io", write=_io),
    Column(label="test", write=_test),
    Column(label="tokens/s", write=_speed),
    Column(label="I/O µs/token p50 / p99", write=_pair("io_us_p50", "io_us_p99")),
    Column(label="stall µs/token", write=_plain("stall_us_mean", "{:,.1f}")),
    Column(label="late", write=_plain("deadlines_missed_share", "{:.1%}")),
    Column(label="cache hits", write=_plain("cache_hit_share", "{:.1%}")),
    Column(label="RSS", write=_bytes("rss_bytes")),
    Column(label="read/token", write=_bytes("bytes_read_per_token")),
    Column(label="hottest", write=_plain("hottest_celsius", "{:.0f} °C")),
    Column(label="slowest clock", write=_plain("slowest_clock_mhz", "{:,.0f} MHz")),
)
NUM_LEFT = 5  # columns of words


def _cells(results: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """(label, one text a record) for every column that has something to show."""
    lines = records(results)
    columns = [(column.label, [column.write(line) for line in lines]) for column in COLUMNS]
    return [
        (label, [MISSING if text is None else text for text in texts])
        for label, texts in columns
        if any(text is not None for text in texts)
    ]


def table(results: dict[str, Any]) -> Table:
    """The table for a terminal; the notes are its caption."""
    shown = Table(caption="\n".join(results["notes"]) or None, caption_justify="left")
    cells = _cells(results)
    words = {column.label for column in COLUMNS[:NUM_LEFT]}
    for label, _ in cells:
        shown.add_column(label, justify="left" if label in words else "right", no_wrap=True)
    for line in zip(*(texts for _, texts in cells), strict=True):
        shown.add_row(*line)
    return shown


def markdown(results: dict[str, Any]) -> str:
    """The table as Markdown, then the notes."""
    cells = _cells(results)
    words = {column.label for column in COLUMNS[:NUM_LEFT]}
    lines = [
        f"| {' | '.join(label for label, _ in cells)} |",
        f"|{'|'.join('---' if label in words else '---:' for label, _ in cells)}|",
        *(f"| {' | '.join(line)} |" for line in zip(*(texts for _, texts in cells), strict=True)),
    ]
    notes = [f"- {note}" for note in results["notes"]]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def comma_separated(results: dict[str, Any]) -> str:
    """A line a record; samples and cores joined by blanks."""
    lines = records(results)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        flat = {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in line.items()}
        writer.writerow(flat)
    return text.getvalue()


def as_json(results: dict[str, Any]) -> str:
    """A JSON list of the records."""
    return json.dumps(records(results), indent=2, ensure_ascii=False) + "\n"


def json_lines(results: dict[str, Any]) -> str:
    """A record a line."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records(results))


PRINTERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "md": markdown,
    "json": as_json,
    "jsonl": json_lines,
    "csv": comma_separated,
}
