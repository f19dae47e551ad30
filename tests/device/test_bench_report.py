"""What `meki-edge run` prints: one schema, read back from every format; and the machine's state."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from meki_edge.device import bench_report, host


def spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "p50": mean / 2, "p99": 9 * mean}


def arm(name: str, precision: str | None, hits: float | None, celsius: float | None = None) -> dict[str, Any]:
    test = {
        "tokens_per_s": {"mean": 1234.5, "sd": 1.25, "samples": [1233.25, 1235.75]},
        "io_us_per_token": spread(120.0),
        "stall_us_per_token": spread(2.5),
        "stall_share": 0.001,
        "deadlines_missed_share": None if hits is None else 0.125,
        "bytes_read_per_token": 7168.0,
        "cache_hit_share": hits,
    }
    return {
        "name": name,
        "metrics": {"table_precision": precision},
        "tests": {"pp512": {"num_tokens": 512, **test}, "tg128": {"num_tokens": 128, **test}},
        "rss_bytes": 3 << 30,
        "rss_growth_bytes": 4096,
        "peak_rss_bytes": 5 << 30,
        "conditions": {"hottest_celsius": celsius, "slowest_clock_mhz": None},
    }


def results(*arms: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    return {
        "host": {"cpu": "A CPU"},
        "runner": {
            "runner_version": "0.1.0",
            "backend": "cpu",
            "tensor_memory": "host",
            "ort_version": "1.32.0",
            "threads": 2,
            "cores": [4, 7],
            "io": "pread",
            "verify_rows": False,
        },
        "config": {"depth": depth, "repetitions": 2, "cold": True, "row_cache_bytes": 0},
        "arms": list(arms),
        "notes": ["A note."],
    }


RESULTS = results(arm("dense", None, None), arm("meki", "int8", 0.25, 41.5), depth=1024)


def test_a_record_is_flat_and_says_nothing_of_rows_where_there_are_none() -> None:
    dense, _, meki, _ = bench_report.records(RESULTS)
    assert meki | {
        "bundle": "meki",
        "table_precision": "int8",
        "io": "pread",
        "rows": "cold",
        "test": "pp512",
        "depth": 1024,
        "io_us_p50": 60.0,
        "io_us_p99": 1080.0,
        "stall_us_mean": 2.5,
        "deadlines_missed_share": 0.125,
        "verify_rows": False,
        "cache_hit_share": 0.25,
        "bytes_read_per_token": 7168.0,
        "hottest_celsius": 41.5,
        "slowest_clock_mhz": None,
    } == meki
    of_rows = ("io", "stall", "deadlines", "verify", "rows", "row_cache", "bytes")
    assert {dense[key] for key in dense if key.startswith(of_rows)} == {None}
    assert not any(isinstance(value, dict) for value in meki.values())


def test_every_machine_format_holds_the_records() -> None:
    records = bench_report.records(RESULTS)
    assert json.loads(bench_report.as_json(RESULTS)) == records
    assert [json.loads(line) for line in bench_report.json_lines(RESULTS).splitlines()] == records
    lines = list(csv.DictReader(io.StringIO(bench_report.comma_separated(RESULTS))))
    assert [list(line) for line in lines] == [list(record) for record in records]
    for line, record in zip(lines, records, strict=True):
        assert line["bundle"] == record["bundle"] and float(line["tokens_per_s"]) == record["tokens_per_s"]
        assert [float(value) for value in line["tokens_per_s_samples"].split()] == record["tokens_per_s_samples"]
        assert (line["cores"], line["slowest_clock_mhz"]) == ("4 7", "")


def test_the_tables_show_what_is_there() -> None:
    rows = [line.split("|")[1:-1] for line in bench_report.markdown(RESULTS).splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    heads = [cell.strip() for cell in rows[0]]
    assert "slowest clock" not in heads, "no record has one"
    dense, meki = (dict(zip(heads, (cell.strip() for cell in row), strict=True)) for row in (rows[2], rows[5]))
    assert meki == {
        "bundle": "meki",
        "table": "int8",
        "threads": "2",
        "io": "pread, cold",
        "test": "tg128 @ d1024",
        "tokens/s": "1,234.50 ± 1.25",
        "I/O µs/token p50 / p99": "60 / 1,080",
        "stall µs/token": "2.5",
        "late": "12.5%",
        "cache hits": "25.0%",
        "RSS": "3.00 GiB",
        "read/token": "7.00 KiB",
        "hottest": "42 °C",
    }
    assert dense["table"] == dense["io"] == dense["hottest"] == "–" and dense["test"] == "pp512 @ d1024"
    assert "- A note." in bench_report.markdown(RESULTS)
    console = Console(width=250, file=io.StringIO())
    console.print(bench_report.table(RESULTS))
    text = console.file.getvalue()
    assert "tg128 @ d1024" in text and "1,234.50 ± 1.25" in text and "A note." in text


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_temperatures_and_clocks_are_the_kernels(tmp_path: Path) -> None:
    system = write(
        tmp_path,
        {
            "class/thermal/thermal_zone0/type": "cpu-0-0",
            "class/thermal/thermal_zone0/temp": "41500",
            "class/thermal/thermal_zone1/type": "skin",
            "class/thermal/thermal_zone1/temp": "off",
            "class/thermal/thermal_zone2/temp": "-1000",
            "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1804800",
            "devices/system/cpu/cpu7/cpufreq/scaling_cur_freq": "3187200",
            "devices/system/cpu/cpu1/topology/core_id": "1",
        },
    )
    assert host.conditions(system) == {
        "temperatures": {"zone0 cpu-0-0": 41.5, "zone2": -1.0},
        "clocks": {"cpu0": 1804.8, "cpu7": 3187.2},
    }


def test_what_the_kernel_does_not_show_is_none(tmp_path: Path) -> None:
    assert host.conditions(tmp_path) == {"temperatures": None, "clocks": None}
    hidden = write(tmp_path, {"class/thermal/thermal_zone0/type": "cpu"})
    assert host.conditions(hidden)["temperatures"] is None
