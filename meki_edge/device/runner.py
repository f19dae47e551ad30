"""Run the C++ harness (``android_runner/``) on this machine, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meki_edge.errors import UserError
from meki_edge.files import read_json

BINARY_VARIABLE = "MEKI_RUNNER"
BUILT_BINARY = Path(__file__).parents[2] / "build/runner/meki-runner"
REPORT_SCHEMA = 3
IO_MODES = ("pread", "direct", "mmap")
"""How rows are read."""
END_SECONDS = 10.0  # what a harness that was told to end gets to finish its step

_ERROR = re.compile(r"^error: (?P<what>.*) \[(?P<where>.*?)\] (?P<fix>.*)$", re.MULTILINE)


def find_binary() -> Path:
    """The harness: ``$MEKI_RUNNER``, else what `make runner` built beside this package.

    Raises:
        UserError: it is not there.
    """
    named = os.environ.get(BINARY_VARIABLE)
    path = Path(named) if named else BUILT_BINARY
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UserError(
            "the harness is not an executable file" if path.exists() else "the harness is not built",
            where=path,
            fix=f"correct ${BINARY_VARIABLE}" if named else f"build it with `make runner`, or set ${BINARY_VARIABLE}",
        )
    return path


def find_ort_library() -> Path:
    """The ``libonnxruntime.so`` of the installed `onnxruntime` package (which is not imported).

    Raises:
        UserError: the package is missing or holds no such library.
    """
    fix = "install the onnxruntime package for this platform"
    package = importlib.util.find_spec("onnxruntime")
    if package is None or package.origin is None:
        raise UserError("the onnxruntime package is not installed", where="onnxruntime", fix=fix)
    directory = Path(package.origin).parent / "capi"
    libraries = sorted(directory.glob("libonnxruntime.so*"))
    if not libraries:
        raise UserError("the onnxruntime package holds no libonnxruntime.so", where=directory, fix=fix)
    return libraries[-1]


def run_json(arguments: list[str], *, on_token: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Run ``generate`` or ``bench`` and return its report (``--output``).

    Args:
        arguments: the command and its options, without ``--ort-library`` and ``--output``.
        on_token: gets each id that ``--stream`` prints, as it is sampled. If it raises, or the
            user interrupts, the harness is ended first.

    Raises:
        UserError: the harness is missing, reports an error, or crashes; a crash leaves a log.
    """
    with tempfile.TemporaryDirectory(prefix="meki-runner-") as directory:
        report = Path(directory) / "report.json"
        _run([*arguments, "--ort-library", str(find_ort_library()), "--output", str(report)], on_token)
        if not report.is_file():
            fix = "build it with `make runner`, or set MEKI_RUNNER to a meki-runner"
            raise UserError("the program ended well but wrote no report", where=find_binary(), fix=fix)
        return checked(read_json(report), find_binary())


def checked(report: dict[str, Any], where: str | Path) -> dict[str, Any]:
    """``report`` of the harness at ``where``, if it is of the version that this package reads.

    Raises:
        UserError: the harness is older or newer.
    """
    if report.get("schema") != REPORT_SCHEMA:
        raise UserError(
            f"the harness is of another version: its report has schema {report.get('schema')}, not {REPORT_SCHEMA}",
            where=where,
            fix="build it again (`make runner`; for a phone as android_runner/README.md says)",
        )
    return report


def _run(arguments: list[str], on_token: Callable[[int], None] | None) -> None:
    command = [str(find_binary()), *arguments]
    # A file, not a pipe: nobody has to empty it while stdout is read, and a crash leaves it behind.
    handle, name = tempfile.mkstemp(prefix="meki-runner-", suffix=".log")
    log = Path(name)
    keep = False
    try:
        with os.fdopen(handle, "wb") as stderr:
            status = stream(command, stderr.fileno(), on_token)
        if status != 0:
            keep = status < 0
            raise _failure(status, log, arguments[0])
    finally:
        if not keep:
            log.unlink(missing_ok=True)


def stream(
    command: list[str], stderr: int, on_token: Callable[[int], None] | None, *, stdin: int = subprocess.DEVNULL
) -> int:
    """Run ``command``, handing on the ids that it prints; its exit status, or minus the signal that ended it."""
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": stderr}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if on_token is not None:
                    on_token(int(line))
            return process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _failure(status: int, log: Path, command: str) -> UserError:
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    if status < 0:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"\nmeki-runner {command} was ended by {signal.Signals(-status).name}\n")
        last = f"; it last said: {text.splitlines()[-1]}" if text else ""
        return UserError(
            f"the harness crashed ({signal.Signals(-status).name}){last}",
            where=log,
            fix="check the free memory and the bundle, and report it with this log if it happens again",
        )
    return reported_error(text) or UserError(
        f"the harness ended with status {status}: {text or 'it said nothing'}",
        where=find_binary(),
        fix="build the harness again with `make runner`",
    )


def reported_error(text: str) -> UserError | None:
    """The error that the harness wrote on its stderr, if it wrote one."""
    found = list(_ERROR.finditer(text))
    return UserError(found[-1]["what"], where=found[-1]["where"], fix=found[-1]["fix"]) if found else None
