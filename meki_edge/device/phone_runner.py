"""Run the C++ harness on a phone, as :mod:`runner` does on this machine.

Each run has a folder of its own on the phone, for its input, its report and the number of its process.
The harness takes the place of the shell that starts it, so that number is its own: however the caller
ends, the process can be ended by it, and nothing is left on the phone.
"""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meki_edge import graph_spec
from meki_edge.device import phone_conditions, phone_failure, runner, sideload
from meki_edge.device.adb import Device, command, commands
from meki_edge.device.phone_runtime import ORT_LIBRARY, QNN_LIBRARY, QNN_PROVIDER, RUNNER
from meki_edge.device.sideload import Layout
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec

PROCESS, REPORT, POWER, STDERR = "process", "report.json", "power.txt", "stderr.txt"
LOCAL_OPTIONS = ("--prompt-file", "--trace-file", "--ids-file")
END_SECONDS = 15
STARTING_MINUTES = 10  # a run's folder without a process is no longer one that starts

# The number in the file `process` may be another program's by now: only one of this run is ended.
_END = """
cd {folder} 2>/dev/null || exit 0
for i in 1 2 3 4 5; do [ -s process ] && break; sleep 0.2; done
ours() {{ [ -n "$number" ] && grep -q {name} "/proc/$number/cmdline" 2>/dev/null; }}
number=$(cat process 2>/dev/null)
ours && kill -TERM "$number"
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do ours || break; sleep 0.2; done
ours && kill -KILL "$number"
true
"""


# The input of the phone's shell is a pipe that only our process holds: its end means that we are gone, even by SIGKILL.
_WATCH = "exec 3<&0 && {{ ( cat <&3; grep -q {name} /proc/$$/cmdline && kill -TERM $$ ) >/dev/null 2>&1 & }}"


def require_npu(npu_memory: str, *, npu: bool) -> None:
    """Raise :class:`UserError` if ``npu_memory`` is chosen and nothing runs on the NPU."""
    if npu_memory != "auto" and not npu:
        raise UserError("only the NPU has memory to share", where="--npu-memory", fix="give --compute npu")


class PhoneRunner:
    """The harness that was sideloaded to a phone.

    Raises (the constructor):
        UserError: another run is under way on the phone, or ``npu_memory`` is given without the NPU.
    """

    def __init__(
        self,
        device: Device,
        places: Layout,
        *,
        npu: bool = False,
        npu_memory: str = "auto",
        failures: Path | None = None,
    ) -> None:
        """
        Args:
            npu: run the bundles' Hexagon binaries.
            npu_memory: the harness's ``--npu-memory``.
            failures: a directory that gets the phone's log when a run fails; by default a temporary one.
        """
        require_npu(npu_memory, npu=npu)
        self.device, self.places = device, places
        self._npu = npu
        self._npu_memory = npu_memory
        self._failures = failures
        self._bundles: dict[Path, str] = {}  # what was checked already: directory here → folder there
        self._forget_dead_runs()

    def run_json(self, arguments: list[str], *, on_token: Callable[[int], None] | None = None) -> dict[str, Any]:
        """As :func:`runner.run_json`: the paths of bundle and files of ids are this machine's.

        The report gets ``power_watts`` beside what the harness wrote: the battery's mean power, or None.

        Raises:
            UserError: the bundle is not on the phone, the harness fails (the phone's log is kept), or
                the connection ends.
        """
        name = f"run-{secrets.token_hex(6)}"
        folder = f"{self.places.runs}/{name}"
        words, files = self._translated(arguments, folder)
        self._run_or_raise(command("mkdir", "-p", folder))
        try:
            for local, remote in files:
                self.device.push(local, remote)
            return self._run(words, folder, name, on_token)
        finally:
            self._tidy(folder, name)

    def warm(self, bundle: Path, ids: Path) -> None:
        """Read the rows of a text into the phone's page cache."""
        remote = self.require(bundle)
        spec_path = bundle / graph_spec.FILE_NAME
        spec = GraphSpec.from_json(read_json(spec_path), spec_path)
        folder = f"{self.places.runs}/run-{secrets.token_hex(6)}"
        self._run_or_raise(command("mkdir", "-p", folder))
        try:
            self.device.push(ids, f"{folder}/{ids.name}")
            for rom in spec.roms:
                harness = command(f"{self.places.runtime}/{RUNNER}", "fetch", "--rom", f"{remote}/{rom.file}")
                script = f"{harness} {command('--ids-file', f'{folder}/{ids.name}')} >/dev/null"
                self._run_or_raise(f"{self.places.environment} && {script}", timeout=600)
        finally:
            self.device.run(command("rm", "-rf", folder))

    def require(self, directory: Path) -> str:
        """The folder of a bundle on the phone, which must be there and whole."""
        if directory not in self._bundles:
            there = sideload.require_sideloaded(self.device, self.places, directory, npu=self._npu)
            self._bundles[directory] = there
        return self._bundles[directory]

    def _translated(self, arguments: list[str], folder: str) -> tuple[list[str], list[tuple[Path, str]]]:
        """Arguments with this machine's paths replaced by the phone's, and the files to copy there."""
        words: list[str] = []
        files: list[tuple[Path, str]] = []
        for option, word in zip([""] + arguments, arguments, strict=False):
            if option == "--bundle":
                word = self.require(Path(word))
            elif option in LOCAL_OPTIONS:
                files.append((Path(word), f"{folder}/{Path(word).name}"))
                word = files[-1][1]
            words.append(word)
        return words, files

    def _run(
        self, words: list[str], folder: str, name: str, on_token: Callable[[int], None] | None
    ) -> dict[str, Any]:
        runtime = self.places.runtime
        words = [*words, "--ort-library", f"{runtime}/{ORT_LIBRARY}", "--output", f"{folder}/{REPORT}"]
        words += self._backend()
        script = commands(
            [
                command("cd", folder),
                self.places.environment,
                f"echo $$ >{PROCESS}",
                "{ " + phone_conditions.power_sampler(f"{folder}/{POWER}") + "; }",
                _WATCH.format(name=name),
                f"exec {command(f'{runtime}/{RUNNER}', *words)} </dev/null 3<&-",
            ]
        )
        with tempfile.TemporaryDirectory(prefix="meki-edge-") as scratch:
            log = Path(scratch) / STDERR
            with open(log, "wb") as stderr:
                status = runner.stream(
                    self.device.shell_command(script), stderr.fileno(), on_token, stdin=subprocess.PIPE
                )
            said = log.read_text(encoding="utf-8", errors="replace")
            self.device.require_connection(status, "" if runner.reported_error(said) else said)
            report = self._pulled(folder, Path(scratch))
            if status != 0:
                raise self._failure(status, said, folder, report)
            if report is None:
                fix = "sideload again: the program on the phone may be another one"
                raise UserError("the harness ended well but wrote no report", where=self.device.serial, fix=fix)
            runner.checked(report, f"{self.places.runtime}/{RUNNER} on {self.device.serial}")
            samples = self.device.run(command("cat", f"{folder}/{POWER}")).stdout
            return {**report, "power_watts": phone_conditions.mean_watts(samples)}

    def _backend(self) -> list[str]:
        """The harness's options for the NPU."""
        if not self._npu:
            return []
        runtime = self.places.runtime
        options = ["--backend", "qnn", "--qnn-library", f"{runtime}/{QNN_LIBRARY}", "--npu-memory", self._npu_memory]
        if self.device.run(command("ls", f"{runtime}/{QNN_PROVIDER}")).status == 0:  # where it is a plug-in
            options += ["--qnn-provider", f"{runtime}/{QNN_PROVIDER}"]
        return options

    def _pulled(self, folder: str, scratch: Path) -> dict[str, Any] | None:
        """The harness's report, if it got to write one."""
        if self.device.run(command("ls", f"{folder}/{REPORT}")).status != 0:
            return None
        self.device.pull(f"{folder}/{REPORT}", scratch / REPORT)
        return read_json(scratch / REPORT)

    def _failure(self, status: int, said: str, folder: str, report: dict[str, Any] | None) -> UserError:
        """Keep what can be had of a failed run, and say what is known."""
        error = runner.reported_error(said)
        if error is not None and status < 128 and phone_failure.qnn_errors.explain(said) is None:
            return error
        keep = self._failures or Path(tempfile.mkdtemp(prefix="meki-edge-failed-"))
        keep = keep / Path(folder).name
        keep.mkdir(parents=True, exist_ok=True)
        telling = phone_failure.collect(self.device, f"{folder}/{PROCESS}", keep)
        (keep / STDERR).write_text(said, encoding="utf-8")
        if report is not None:
            self.device.pull(f"{folder}/{REPORT}", keep / REPORT)
        return phone_failure.explained(status, said, telling, keep / "phone.log")

    def _tidy(self, folder: str, name: str) -> None:
        """End the harness, if it still runs, and remove the run's folder; both wait if the phone is gone."""
        script = _END.format(folder=command(folder), name=name) + command("rm", "-rf", folder)
        try:
            self.device.run(script, timeout=END_SECONDS)
        except UserError:
            pass

    def _forget_dead_runs(self) -> None:
        """Remove what a run left whose connection ended; one that is alive is somebody's measurement."""
        script = f"""
            cd {command(self.places.runs)} 2>/dev/null || exit 0
            for name in run-*; do
                number=$(cat "$name/process" 2>/dev/null)
                if [ -n "$number" ] && grep -q "$name" "/proc/$number/cmdline" 2>/dev/null; then echo "$number"
                elif [ -n "$number" ] || [ -n "$(find "$name" -maxdepth 0 -mmin +{STARTING_MINUTES})" ]; then
                    rm -rf "$name"
                fi
            done"""
        alive = self.device.run(script).stdout.split()
        if alive:
            stop = command("adb", "-s", self.device.serial, "shell", f"kill {alive[0]}")
            raise UserError(
                "another run is under way on the phone",
                where=f"{self.device.serial}: process {alive[0]}",
                fix=f"wait for it to end, or stop it with {stop}",
            )

    def _run_or_raise(self, script: str, timeout: float = 60) -> None:
        done = self.device.run(script, timeout=timeout)
        if done.status != 0:
            error = runner.reported_error(done.stderr)
            said = done.stderr.strip() or f"status {done.status}"
            fix = "check the folder on the phone, and sideload again"
            raise error or UserError(f"the phone could not prepare the run: {said}", where=self.device.serial, fix=fix)
