"""What a phone can tell after a program failed on it: the system's log, a tombstone, QNN's error numbers."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from meki_edge.device import qnn_errors
from meki_edge.device.adb import Device, command
from meki_edge.errors import UserError
from meki_edge.files import write_text

TOMBSTONES = "/data/tombstones"  # many phones keep it from the shell user; the log of crashes says the same
EXCERPT_LINES = 3
LOG_LINES = 2000
_TELLING = re.compile(
    r"meki|qnn|adsprpc|fastrpc|cdsp|\bF DEBUG\b|\blibc\b.*\b[Ff]atal\b|lowmemorykiller|Out of memory", re.IGNORECASE
)


def collect(device: Device, since: str, directory: Path) -> list[str]:
    """Write the phone's log and newest tombstone into ``directory``; the lines of the log that may tell why.

    Args:
        since: a file on the phone that was made when the program started.
    """
    script = f"""
        echo '--- logcat'; logcat -d -t {LOG_LINES} 2>&1
        echo '--- logcat, crashes'; logcat -d -b crash -t {LOG_LINES} 2>&1
        for stone in $(ls -t {TOMBSTONES}/tombstone_* 2>/dev/null | grep -v '[.]pb$' | head -n 1); do
            [ "$stone" -nt {command(since)} ] && echo "--- $stone" && cat "$stone"
        done
        true"""
    try:
        text = device.run(script).stdout
    except UserError as error:  # the phone is gone: say so where its log would be
        text = f"--- no log: {error.what}\n"
    write_text(directory / "phone.log", text)
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if _TELLING.search(line)))


def explained(status: int, said: str, telling: list[str], log: Path) -> UserError:
    """The error of a harness that ended with ``status`` and ``said`` something on its stderr.

    Args:
        telling: lines of the phone's log.
        log: the file that has all of it.
    """
    ended = ""
    if status > 128 and status - 128 in {number.value for number in signal.Signals}:
        ended = f"the harness crashed on the phone ({signal.Signals(status - 128).name})"
        if status - 128 == signal.SIGKILL:
            ended = "the harness was killed on the phone (SIGKILL): most often it ran out of memory"
    last = said.strip().splitlines()[-1] if said.strip() else ""
    what = ended or f"the harness ended with status {status} on the phone"
    what += f"; it last said: {last}" if last else ""
    found = qnn_errors.explain(said) or qnn_errors.explain("\n".join(telling))
    if found is not None:
        what += f"; QNN error {found.code} ({found.name}): {found.meaning}"
        return UserError(what, where=log, fix=f"{found.fix} (from: {found.source})")
    if telling:
        what += "; the phone's log: " + " | ".join(telling[-EXCERPT_LINES:])
    fix = "see the log; check the free memory, and sideload again if files may be damaged"
    return UserError(what, where=log, fix=fix)
