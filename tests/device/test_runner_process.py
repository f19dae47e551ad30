"""The Python side of the harness: its process, its errors, where it is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meki_edge.device import runner
from meki_edge.errors import UserError


def script(directory: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a shell script in the harness's place."""
    path = directory / "runner.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv(runner.BINARY_VARIABLE, str(path))


def test_a_crash_names_the_signal_and_keeps_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "echo 'loading' >&2; kill -SEGV $$", monkeypatch)
    with pytest.raises(UserError, match=r"crashed \(SIGSEGV\); it last said: loading") as caught:
        runner.run_json(["bench"])
    log = Path(caught.value.where)
    assert log.read_text().split("\n")[0] == "loading" and "SIGSEGV" in log.read_text()
    log.unlink()


def test_an_interrupt_ends_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "echo $$; exec sleep 600", monkeypatch)
    seen: list[int] = []

    def interrupt(pid: int) -> None:
        seen.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_json(["generate"], on_token=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_an_end_without_a_word_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "exit 7", monkeypatch)
    with pytest.raises(UserError, match="ended with status 7: it said nothing"):
        runner.run_json(["bench"])


def test_the_three_parts_of_an_error_come_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "echo 'error: shape [1,2] is wrong [/a/b: x[0]] mend it' >&2; exit 1", monkeypatch)
    with pytest.raises(UserError) as caught:
        runner.run_json(["bench"])
    parts = caught.value.what, caught.value.where, caught.value.fix
    assert parts == ("shape [1,2] is wrong", "/a/b: x[0]", "mend it")


def test_where_the_harness_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runner.BINARY_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(UserError, match="the harness is not built"):
        runner.find_binary()
    monkeypatch.setenv(runner.BINARY_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match="not an executable file"):
        runner.find_binary()
    monkeypatch.delenv(runner.BINARY_VARIABLE)
    monkeypatch.setattr(runner, "BUILT_BINARY", tmp_path / "absent")
    with pytest.raises(UserError) as caught:
        runner.find_binary()
    assert "make runner" in caught.value.fix
    assert runner.find_ort_library().name.startswith("libonnxruntime.so")
