"""The harness as a process: signals, streams that are closed, limits of the system, and where its output may go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import ids_file

from meki_edge.device import runner

ROM = Path(__file__).parents[1] / "golden/identity_int8.safetensors"


@pytest.fixture(scope="module")
def probe(binary: Path) -> Path:
    subprocess.run(["cmake", "--build", binary.parent, "--target", "meki-rom-probe", "-j2"], check=True)
    return binary.parent / "meki-rom-probe"


def shell(script: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    """``script`` with ``arguments`` as ``"$@"``."""
    return subprocess.run(["sh", "-c", script, "sh", *map(str, arguments)], capture_output=True)


def command(binary: Path, bundle: Path, tmp_path: Path, output: Path) -> list[object]:
    """A short generation."""
    options = ["--bundle", bundle, "--ort-library", runner.find_ort_library(), "--max-new-tokens", 3]
    return [binary, "generate", *options, "--prompt-file", ids_file(tmp_path, [5, 6, 7]), "--output", output]


def test_a_reader_that_goes_away(binary: Path, tmp_path: Path) -> None:
    """While the next batch is being fetched, whose memory must last until that ends."""
    ids = tmp_path / "many.txt"
    ids.write_text("3\n" * 400_000)
    arguments = [binary, "fetch", "--rom", ROM, "--ids-file", ids, "--batch", "100000"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    said = process.stderr.read().decode()
    assert (process.wait(60), said.count("\n")) == (1, 1) and "cannot write: Broken pipe" in said


@pytest.mark.parametrize("name", ["rows", "fetch"])
def test_a_signal_ends_long_reading(binary: Path, tmp_path: Path, name: str) -> None:
    ids = tmp_path / "many.txt"
    ids.write_text("3\n" * 2_000_000)
    arguments = [binary, name, "--rom", ROM, "--ids-file", ids, "--io", "direct"]  # fetch: in one batch
    delay = 0.5
    while delay > 0.01:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
        if process.returncode != 0:
            assert (process.returncode, said.count(b"\n")) == (128 + signal.SIGTERM, 1)
            assert b"error: terminated [signal 15]" in said
            return
        delay /= 2  # it was done before, or about to end
    pytest.fail("it ends before a signal comes, or does not heed it")


def test_ids_and_report_do_not_mix_where_standard_output_is_closed(
    binary: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "out.json"
    arguments = command(binary, bundles["meki"], tmp_path, output)
    streamed = shell('"$@" --stream >&-', *arguments)
    assert streamed.returncode == 1 and b"cannot write: Bad file descriptor [stdout]" in streamed.stderr
    assert not output.exists()
    done = shell('"$@" >&-', *arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(json.loads(output.read_text())["generated_tokens"]) == 3


def test_only_a_file_is_replaced(binary: Path, bundles: dict[str, Path], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for output in (pipe, tmp_path):
        done = shell('"$@"', *command(binary, bundles["meki"], tmp_path, output))
        assert done.returncode == 1 and b"not a regular file" in done.stderr
    assert pipe.is_fifo()


def test_a_limit_on_files_is_an_error(binary: Path, bundles: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    done = shell('ulimit -f 1; exec "$@"', *command(binary, bundles["meki"], tmp_path, out / "out.json"))
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1) and b"cannot write: File too large" in done.stderr
    assert list(out.iterdir()) == []


def test_threads_that_cannot_start(
    binary: Path, probe: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    done = shell('ulimit -v 400000; exec "$@"', probe, "--rom", ROM, "--tokens", 20, "--threads", 256)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done.stderr
    assert b"error: cannot start a thread: " in done.stderr and b"[this process]" in done.stderr


@pytest.mark.parametrize("name", ["generate", "bench", "rows", "fetch"])
def test_every_command_helps(binary: Path, name: str) -> None:
    done = subprocess.run([binary, name, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"meki-runner {name} --" in done.stdout


def test_a_path_that_is_not_text(probe: Path, tmp_path: Path) -> None:
    rom = os.fsencode(tmp_path) + b"/\xff.safetensors"
    os.symlink(ROM, rom)
    done = subprocess.run([probe, "--rom", rom, "--tokens", "5", "--format", "json"], capture_output=True)
    assert done.returncode == 0 and json.loads(done.stdout)["rom"].endswith("\ufffd.safetensors")
