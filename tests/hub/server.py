"""A loopback server that speaks Qualcomm AI Hub's wire protocol, for tests and `make demo-hub`.

Standard library and the client's own messages. Files travel through a second server on another
port, as the real service's do through object storage. Jobs move on by being looked at, so a test
needs no clock. The knobs of :class:`Faults` make it misbehave.

    python tests/hub/server.py --write-config FILE [--local-compiler]
"""

from __future__ import annotations

import argparse
import configparser
import re
import signal
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import server_jobs as work
from qai_hub import public_api_pb2 as messages
from server_http import Api, Storage
from server_jobs import SOC_MODELS, JobFailed, Stored, soc_of

TOKEN = "loopback-4f1c9d2e7ab0"
State = messages.JobState
RUNNING = {
    "compile_job": [State.JOB_STATE_CREATED, State.JOB_STATE_OPTIMIZING_MODEL],
    "link_job": [State.JOB_STATE_CREATED, State.JOB_STATE_LINKING_MODELS],
    "profile": [State.JOB_STATE_CREATED, State.JOB_STATE_PROVISIONING_DEVICE, State.JOB_STATE_MEASURING_PERFORMANCE],
    "inference": [State.JOB_STATE_CREATED, State.JOB_STATE_PROVISIONING_DEVICE, State.JOB_STATE_RUNNING_INFERENCE],
}


@dataclass(kw_only=True)
class Faults:
    """How the server misbehaves; a test sets what it needs."""

    statuses: list[tuple[str, str, int]] = field(default_factory=list)
    """(method, pattern of the path, status): each answers one matching request, then it is used up."""

    lost_answers: list[tuple[str, str]] = field(default_factory=list)
    """(method, pattern): the request is carried out, but the connection closes without an answer."""

    cut_upload_at: int | None = None
    """Close the connection after this many bytes of one uploaded part; once."""

    expired_links: int = 0
    """How many of the next downloads find their link expired."""

    expired_parts: int = 0
    """How many of the next uploaded parts find their link expired."""

    missing_links: int = 0
    """How many links the next uploads are short of."""

    polls_per_state: int = 1
    """How often a job must be looked at before it moves on."""

    stuck: str | None = None
    """Jobs whose name has this never finish."""

    fail: dict[str, str] = field(default_factory=dict)
    """Jobs whose name has the key fail with the value as reason."""

    interrupt_after: int | None = None
    """Send this process the signal of Ctrl-C when so many more requests have come; once."""

    garbage: str | None = None
    """Requests of this path are answered with nonsense."""

    quota: str | None = None
    """Every new model or job is refused with this text."""


@dataclass(kw_only=True)
class Job:
    """A job: its message, and how it goes."""

    message: messages.Job
    kind: str
    options: dict[str, str]
    looks: int = 0
    result: messages.JobResult = field(default_factory=messages.JobResult)
    logs: dict[str, bytes] = field(default_factory=dict)
    work: threading.Thread | None = None
    failure: str | None = None
    finished: bool = False


class Loopback:
    """The service's state. Use as a context manager: it serves on two free ports until it ends."""

    def __init__(self, *, local_compiler: bool = False, part_bytes: int = 60_000, token: str = TOKEN) -> None:
        self.faults = Faults()
        self.token = token
        self.part_bytes = part_bytes
        self.local_compiler = local_compiler
        self.requests: list[tuple[str, str]] = []
        self.models: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.datasets: dict[str, bytes] = {}
        self.jobs: dict[str, Job] = {}
        self.lock = threading.RLock()
        self._directory = tempfile.TemporaryDirectory(prefix="loopback-hub-")
        self._links: dict[str, tuple[str, bytes]] = {}
        self._count = 0
        self._servers = [self._serve(Api), self._serve(Storage)]
        self.url, self.storage = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for job in self.jobs.values():
            if job.work is not None:
                job.work.join()
        self._directory.cleanup()

    def write_config(self, path: Path, token: str | None = None) -> Path:
        """A configuration file of the client for this server."""
        file = configparser.ConfigParser()
        file["api"] = {"api_token": token or self.token, "api_url": self.url, "web_url": self.url}
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as out:
            file.write(out)
        return path

    def count(self, method: str, pattern: str) -> int:
        """Requests so far whose path matches."""
        with self.lock:
            return sum(sent == method and re.fullmatch(pattern, path) is not None for sent, path in self.requests)

    def new_id(self, letter: str) -> str:
        with self.lock:
            self._count += 1
            return f"{letter}{self._count:06d}"

    def link(self, filename: str, data: bytes) -> str:
        """A download link."""
        name = self.new_id("link")
        self._links[name] = (filename, data)
        return f"{self.storage}/get/{name}?signature=abc"

    def linked(self, name: str) -> bytes:
        return self._links[name][1]

    def heard(self, method: str, path: str) -> None:
        """Record a request."""
        with self.lock:
            self.requests.append((method, path))
            if self.faults.interrupt_after is not None:
                self.faults.interrupt_after -= 1
                if self.faults.interrupt_after <= 0:
                    self.faults.interrupt_after = None
                    signal.raise_signal(signal.SIGINT)

    def directory(self, job_id: str) -> Path:
        path = Path(self._directory.name) / job_id
        path.mkdir(exist_ok=True)
        return path

    def start(self, message: messages.Job) -> str:
        """Create a job and let it work."""
        which = message.WhichOneof("job")
        inner = getattr(message, which)
        job_id = self.new_id("j")
        kind = ("profile" if inner.is_profiling_on else "inference") if which == "inference_job" else which
        setattr(inner, f"{which}_id", job_id)
        inner.job_state = State.JOB_STATE_CREATED
        inner.creation_time.GetCurrentTime()
        if which == "compile_job":
            inner.device.CopyFrom(inner.devices.devices[0])
        job = Job(message=message, kind=kind, options=work.options_of(inner.options))
        with self.lock:
            self.jobs[job_id] = job
        job.work = threading.Thread(target=self._run, args=(job_id, job, inner), daemon=True)
        job.work.start()
        return job_id

    def look(self, job_id: str) -> messages.Job:
        """The job as it is now; looking moves it on."""
        job = self.jobs[job_id]
        inner = getattr(job.message, job.message.WhichOneof("job"))
        with self.lock:
            job.looks += 1
            states = RUNNING[job.kind]
            index = job.looks // max(1, self.faults.polls_per_state)
            stuck = self.faults.stuck is not None and self.faults.stuck in inner.name
            if index < len(states) or stuck:
                inner.job_state = states[min(index, len(states) - 1)]
                return job.message
        job.work.join()
        with self.lock:
            inner.job_state = State.JOB_STATE_FAILED if job.failure else State.JOB_STATE_DONE
            inner.failure_reason = job.failure or ""
            job.finished = True
        return job.message

    def _run(self, job_id: str, job: Job, inner: Any) -> None:
        try:
            for word, reason in self.faults.fail.items():
                if word in inner.name:
                    raise JobFailed(reason)
            self._work(job_id, job, inner)
        except JobFailed as error:
            job.failure = str(error)
        except Exception as error:  # the service has its own accidents, too
            job.failure = f"Internal error: {type(error).__name__}: {error}"
        job.logs["hub.log"] = f"job {job_id} {inner.name}\n{job.failure or 'done'}\n".encode()
        job.message.available_artifacts.append(messages.JobArtifactType.JOB_ARTIFACT_TYPE_HUB_LOG)

    def _work(self, job_id: str, job: Job, inner: Any) -> None:
        soc_model = SOC_MODELS[soc_of(inner.device.name)]
        if job.kind in ("compile_job", "link_job"):
            if job.kind == "compile_job":
                source = self.models[inner.model.model_id]
                made = work.compile_model(source, job.options, soc_model, self.directory(job_id), self.local_compiler)
            else:
                sources = [self.models[model.model_id] for model in inner.models.models]
                made = work.link_models(sources, soc_model, self.directory(job_id), self.local_compiler)
            made.producer = job_id
            model_id = self.new_id("m")
            with self.lock:
                self.models[model_id] = made
                inner.target_model.CopyFrom(self.describe(model_id))
            return
        model = self.models[inner.model.model_id]
        if model.soc_model not in (None, soc_model) and model.kind != work.Type.MODEL_TYPE_QNN_DLC:
            raise JobFailed("The context binary was made for another SoC than this device's")
        job.result.inference_job_result.inference_job_id = job_id
        if job.kind == "profile":
            if model.graphs:
                detail = work.profile(model, job.options)
            else:  # uploaded as a binary
                detail = work.profile_binary(model, soc_model, self.directory(job_id))
            job.result.inference_job_result.detail.CopyFrom(detail)
        else:
            outputs = self.new_id("d")
            self.datasets[outputs] = work.infer(model, job.options, self.datasets[inner.dataset.dataset_id])
            job.result.inference_job_result.output_dataset_id = outputs

    def describe(self, model_id: str) -> messages.Model:
        model = self.models[model_id]
        found = messages.Model(model_id=model_id, name=model.name, model_type=model.kind, producer_id=model.producer)
        found.creation_time.GetCurrentTime()
        found.file_upload_complete = bool(model.data)
        found.metadata.SetInParent()
        return found

    def _serve(self, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type(handler.__name__, (handler,), {"hub": self}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write-config", type=Path, required=True, help="the client's configuration file to write")
    parser.add_argument("--local-compiler", action="store_true", help="make real binaries with onnxruntime-qnn")
    parser.add_argument("--part-bytes", type=int, default=4_000_000, help="of an upload")
    given = parser.parse_args()
    with Loopback(local_compiler=given.local_compiler, part_bytes=given.part_bytes) as hub:
        hub.write_config(given.write_config)
        threading.Event().wait()


if __name__ == "__main__":
    main()
