"""Files that are whole or absent: what may be replaced, and what JSON is."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from meki_edge.errors import UserError
from meki_edge.files import parse_json, write_text


def test_a_link_stays_and_the_file_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there/target.txt"
    link = tmp_path / "link.txt"
    link.symlink_to("there/target.txt")
    for text in ("first", "second"):  # the first one makes it
        write_text(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link.txt", "target.txt", "there"]


def test_devices_and_directories_are_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(UserError, match="not a regular file"):
            write_text(path, "text")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="no file can be here"):
            write_text(path, "text")


def test_what_readers_differ_about_is_json_only_where_it_does_no_harm() -> None:
    assert math.isnan(parse_json("NaN")) and parse_json("[-0, -Infinity]") == [0, -math.inf]
    for text in ("NaN", '{"a": [Infinity]}', "-Infinity", "[-0]"):
        with pytest.raises(ValueError, match="is no JSON|is no integer"):
            parse_json(text, strict=True)
    assert parse_json('{"a": [1.5, -0.0, -7, 0]}', strict=True) == {"a": [1.5, 0.0, -7, 0]}
