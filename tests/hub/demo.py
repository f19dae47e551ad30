"""`make demo-hub`: the whole way through AI Hub, against the loopback server, with the real client.

    python tests/hub/demo.py DIRECTORY BUNDLE… -- TOKENS EXPORT CHECKPOINT
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from server import TOKEN, Loopback

from export.qnn_local import qnn_available

MEKI = Path(sys.executable).with_name("meki-edge")
DEVICES = ("Samsung Galaxy S25 (Family)", "Samsung Galaxy S24 (Family)")


def show(*words: object) -> list[str]:
    """The command line, as it is typed."""
    texts = [str(word) for word in words]
    print(f"\n$ meki-edge {shlex.join(texts)}", flush=True)
    return [str(MEKI), *texts]


def meki(*words: object, given: str | None = None) -> None:
    """Run one command."""
    subprocess.run(show(*words), check=True, input=given, text=True)


def interrupted(hub: Loopback, *words: object) -> None:
    """Run one command and kill it when its first jobs are on their way."""
    process = subprocess.Popen(show(*words))
    while len(hub.jobs) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    print(f"killed, with {len(hub.jobs)} jobs at the service; the same command again:")


def main(directory: Path, bundles: list[str], tokens: str, exported: str, checkpoint: str) -> None:
    """Run the commands of the README."""
    os.environ["QAIHUB_CLIENT_INI"] = str(directory / "client.ini")
    os.environ["MEKI_EDGE_HUB"] = str(directory / "ledger")
    os.environ["NO_PROXY"] = "127.0.0.1"
    with Loopback(local_compiler=qnn_available(), part_bytes=2_000_000) as hub:
        print(f"AI Hub is a loopback server at {hub.url}: no phone is measured.", flush=True)
        meki("hub", "login", "--token-stdin", "--api-url", hub.url, given=TOKEN + "\n")
        meki("hub", "devices")
        devices = [word for name in DEVICES for word in ("--device", name)]
        run = ("hub", "run", *bundles, "--tokens", tokens, "-o", directory / "run", *devices, "--poll-seconds", 0.5)
        interrupted(hub, *run)
        meki(*run)
        meki("hub", "status")
        wanted = ("--via", "hub", "--device", DEVICES[0], "--poll-seconds", 0.5)
        meki("compile", exported, checkpoint, tokens, "-o", directory / "npu", *wanted)
        sent = len(hub.jobs)
        meki("profile", *bundles, "-o", directory / "again", *devices, "--poll-seconds", 0.5)
        assert len(hub.jobs) == sent, "a job was sent twice"
    print(f"\n{sent} jobs in all, none sent twice. The page: {directory / 'run/hub.html'}")


if __name__ == "__main__":
    split = sys.argv.index("--")
    main(Path(sys.argv[1]), sys.argv[2:split], *sys.argv[split + 1 :])
