"""The comparison as tables: one list of rows, printed for the terminal, Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

MISSING = "–"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table: ``key`` of an arm's figures, and how to write its value."""

    label: str
    key: str
    write: Callable[[Any], str]


def _count(value: int) -> str:
    return f"{value:,}"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def _counts(values: list[int]) -> str:
    return " / ".join(map(_count, values))


def _speed(value: dict[str, Any]) -> str:
    spread = "" if value["sd"] is None else f" ± {value['sd']:,.2f}"
    return f"{value['mean']:,.2f}{spread}"


def _microseconds(value: float) -> str:
    return f"{value:,.1f} µs"


def _milliseconds(value: dict[str, Any]) -> str:
    spread = "" if value["sd"] is None else f" ± {value['sd'] / 1e3:,.1f}"
    return f"{value['mean'] / 1e3:,.1f}{spread} ms"


def _millijoules(value: float) -> str:
    return f"{value * 1e3:,.2f} mJ"


def _load(value: dict[str, Any]) -> str:
    return f"{value['mean'] / 1e6:.2f} s"


def _ratio(value: dict[str, Any]) -> str:
    interval = MISSING if value["low"] is None else f"{value['low']:.3f} … {value['high']:.3f}"
    return f"{value['median']:.3f} ({interval})"


def rows(result: dict[str, Any]) -> list[Row]:
    """The lines of ``compare.json``'s table; the speeds are named by the tests that were run."""
    speeds = [(f"{test}_tokens_per_s", test) for test in result["tests"]]
    return [
        Row(label="Validation loss, nats a token", key="val_loss", write="{:.4f}".format),
        Row(label="Perplexity", key="perplexity", write="{:.2f}".format),
        Row(label="Validation tokens", key="val_tokens", write=_count),
        Row(label="Precision of the graphs", key="precision", write=str),
        Row(label="… perplexity by it, as calibration measured", key="perplexity_increase", write="{:+.2%}".format),
        *(Row(label=f"{_test_name(test)}, tokens/s", key=key, write=_speed) for key, test in speeds),
        *(
            Row(label=f"{test}: paired ratio to {result['baseline']} (95 %)", key=f"{test}_ratio", write=_ratio)
            for _, test in speeds
        ),
        Row(label="Time to the first token of the prompt", key="ttft_us", write=_milliseconds),
        Row(label="Stall a decoded token, mean", key="stall_us_per_token", write=_microseconds),
        Row(label="Stall a decoded token, p99", key="stall_us_p99", write=_microseconds),
        Row(label="Stall, share of decode time", key="stall_share", write="{:.3%}".format),
        Row(label="Row I/O a decoded token, mean", key="io_us_per_token", write=_microseconds),
        Row(label="Row I/O a decoded token, p99", key="io_us_p99", write=_microseconds),
        Row(label="ROM rows read a decoded token", key="bytes_read_per_token", write=_bytes),
        Row(label="Rows found in the harness's cache", key="cache_hit_share", write="{:.1%}".format),
        Row(label="Weights read a token", key="weight_bytes_per_token", write=_bytes),
        Row(label="… of them experts, known only layer by layer", key="expert_bytes_per_token", write=_bytes),
        Row(label="Parameters in RAM", key="ram_parameters", write=_count),
        Row(label="Parameters active a token", key="active_parameters", write=_count),
        Row(label="ROM on storage", key="rom_bytes", write=_bytes),
        Row(label="ROM a token, at most", key="rom_bytes_per_token", write=_bytes),
        Row(label="ROM a token of validation text, mean", key="rom_bytes_per_token_expected", write=_bytes),
        Row(label="Table precision", key="table_precision", write=str),
        Row(label="KV cache slots of the graphs", key="context_lengths", write=_counts),
        Row(label="RSS while decoding", key="rss_bytes", write=_bytes),
        Row(label="Peak RSS, loading included", key="peak_rss_bytes", write=_bytes),
        Row(label="PSS", key="pss_bytes", write=_bytes),
        Row(label="Load time", key="load_us", write=_load),
        Row(label="Hottest zone seen", key="condition_hottest_celsius", write="{:.0f} °C".format),
        Row(label="Slowest clock seen", key="condition_slowest_clock_mhz", write="{:,.0f} MHz".format),
        Row(label="Power, mean", key="power_watts", write="{:.2f} W".format),
        Row(label="Energy a decoded token", key="energy_joules_per_token", write=_millijoules),
        Row(label="Bundle", key="bundle_bytes", write=_bytes),
    ]


def _test_name(test: str) -> str:
    return {"pp": "Prefill", "tg": "Decode"}.get(test[:2], "Test") + f" ({test})"


def cells(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """(label, one text an arm) for every row that has a value in some arm."""
    table = []
    for row in rows(result):
        values = [arm.get(row.key) for arm in result["arms"].values()]
        if any(value is not None for value in values):
            table.append((row.label, [MISSING if value is None else row.write(value) for value in values]))
    return table


def terminal(result: dict[str, Any]) -> Table:
    """The table for a terminal; the notes are its caption."""
    table = Table(caption="\n".join(result["notes"]), caption_justify="left")
    table.add_column("")
    for name in result["arms"]:
        table.add_column(name, justify="right")
    for label, texts in cells(result):
        table.add_row(label, *texts)
    return table


def markdown(result: dict[str, Any]) -> str:
    """A Markdown document: headline, table, notes, and where it was measured."""
    names = list(result["arms"])
    host = result["host"]
    lines = [
        result["headline"],
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---:|' * len(names)}",
        *(f"| {label} | {' | '.join(texts)} |" for label, texts in cells(result)),
        "",
        *(f"- {note}" for note in result["notes"]),
        f"- {'Phone' if result['phone'] else 'Host'}: {host['cpu']}, {host['cores']} cores, {host['os']}; ONNX Runtime {result['runner']['ort_version']} "
        f"({result['runner']['backend']}), {result['runner']['threads']} threads, rows by {result['runner']['io']}.",
        *_published(result["published"]),
    ]
    return "\n".join(lines) + "\n"


def _published(table: dict[str, Any] | None) -> list[str]:
    """Others' figures as Markdown, set apart from ours."""
    if table is None:
        return []
    lines = [table["headings"], ["---", *["---:"] * (len(table["headings"]) - 1)], *table["rows"]]
    return ["", f"**{table['title']}**: {table['source']}.", "", *(f"| {' | '.join(line)} |" for line in lines)]


def comma_separated(result: dict[str, Any]) -> str:
    """One line an arm; mean and sd apart, samples joined by blanks, the notes in the last column."""
    records = []
    for name, arm in result["arms"].items():
        record: dict[str, Any] = {"arm": name}
        for key, value in arm.items():
            if isinstance(value, dict):
                for part, number in value.items():
                    joined = " ".join(map(str, number)) if isinstance(number, list) else number
                    record[f"{key}_{part}"] = joined
            else:
                record[key] = value
        records.append({**record, "notes": " ".join(result["notes"])})
    text = io.StringIO()
    header = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
