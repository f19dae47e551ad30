"""Qualcomm AI Hub, through its official client: the one file that imports `qai_hub`.

What the client's public functions do is left to them. Two things are done here with its own
requests and messages, because the client cannot: an upload that goes on at the part where it
stopped, also in another process, and a progress bar of ours. All errors leave as one of three:
:class:`UserError`, :class:`NotFound` (an id that the service does not know) and
:class:`ServiceTrouble` (try later). The token never leaves this file.
"""

from __future__ import annotations

import configparser
import contextlib
import errno
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import qai_hub
import requests
from google.protobuf.message import DecodeError
from qai_hub import api_utils, public_rest_api
from qai_hub import public_api_pb2 as messages
from qai_hub.client import RateLimitedError
from qai_hub.util import session

from export.hub_service import Expired, HubDevice, JobStatus, NotFound, ServiceTrouble, Timing, UploadLinks
from export.hub_words import ACCOUNT, advice, check_access, plain, redacted
from meki_edge.errors import UserError
from meki_edge.files import atomic_path

DOWNLOADS = 4  # tries, each with a fresh link: links expire
SUMMARIES, PAGES = 50, 20  # of past jobs, when one is looked up by its name
BUSY = frozenset({408, 425, 429})  # try later, as after every 5xx
INTERNAL = 500
UNAUTHORIZED, MISSING, UPGRADE = 401, 404, 426
EXPIRED = frozenset({400, 403, 404, 410})  # how storage refuses a link that is out of date
CLIENT_ERRORS = (
    qai_hub.Error,
    public_rest_api.APIException,
    requests.RequestException,
    DecodeError,
    ValueError,
    AssertionError,
)


def login(token: str, *, profile: str | None = None, api_url: str | None = None, timing: Timing) -> tuple[Path, int]:
    """Try a token and keep it where the client looks for it, readable by the user alone.

    Returns:
        the configuration file, and how many devices the service offers.

    Raises:
        UserError: the service cannot be reached or refuses the token; then nothing is written.
    """
    path = Path(api_utils.get_config_path(profile))
    url = api_url or public_rest_api.DEFAULT_HUB_API_URL
    config = public_rest_api.ClientConfig(api_token=token, api_url=url, web_url=url)
    found = AiHub(config, path, timing).devices()
    file = configparser.ConfigParser(interpolation=None)
    values = {"api_token": token, "api_url": url, "web_url": url, "verbose": "False"}
    file["api"] = {name: value.replace("%", "%%") for name, value in values.items()}  # the client interpolates
    with atomic_path(path) as temporary:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            file.write(out)
    return path, len(found)


def connect(profile: str | None = None, timing: Timing | None = None) -> AiHub:
    """The service, with the token of the client's own configuration file.

    Raises:
        UserError: there is no file, or no token in it.
    """
    path = Path(api_utils.get_config_path(profile))
    fix = f"run `meki-edge hub login` (or `qai-hub configure`) with {ACCOUNT}"
    try:
        config = api_utils.load_api_config_from_file(str(path))
    except FileNotFoundError:
        raise UserError("no AI Hub token is configured on this machine", where=path, fix=fix) from None
    except (public_rest_api.APIException, configparser.Error, ValueError, OSError) as error:
        what = "api_token, api_url or web_url is missing"
        if not isinstance(error, public_rest_api.APIException):
            what = f"the file cannot be read: {type(error).__name__}"
        raise UserError(f"AI Hub's configuration is not whole: {what}", where=path, fix=fix) from None
    return AiHub(config, path, timing or Timing())


class AiHub:
    """One account of the service. Job and model ids are the service's own strings."""

    def __init__(self, config: public_rest_api.ClientConfig, path: Path, timing: Timing) -> None:
        check_access(config.api_token, config.api_url, path)
        config.verbose = False
        self.service = config.api_url
        self.timing = timing
        self._path = path
        self._config = config
        self._client = qai_hub.Client(config=config)
        self._jobs: dict[str, qai_hub.Job] = {}
        session.BACKOFF_FACTOR = timing.retry_seconds  # of the client's own repetitions

    # Devices

    def devices(self) -> list[HubDevice]:
        """All devices of the service."""
        with self._calls("listing the devices"):
            found = self._client.get_devices()
        return [
            HubDevice(name=device.name, os=device.os, attributes=tuple(device.attributes))
            for device in sorted(found, key=lambda device: (device.name, device.os))
        ]

    # Uploads

    def create_model(self, name: str) -> str:
        """Announce an ONNX model (a directory in a zip archive), before any of its bytes are sent."""
        request = messages.Model(name=name, model_type=messages.ModelType.MODEL_TYPE_ONNX, is_directory=True)
        with self._calls(f"announcing the model {name}"):
            answer = self._post(messages.CreateUpdateResponse, request, *self._project(), "models")
            if not answer.id:
                raise UserError(f"AI Hub did not take the model: {answer.status}", where=name, fix="see what it says")
        return answer.id

    def open_upload(self, model_id: str, archive: Path, progress: Callable[[int], None]) -> UploadLinks | None:
        """Ask where each part of an announced model's archive goes.

        None if the service wanted the file in its own storage: then the client has sent it, and it is there.
        """
        size = archive.stat().st_size
        url = api_utils.api_url(self._config, "models", model_id, "multipart_upload")
        parameters = {"file_size": size, "use_acceleration": "true", "supports_s3_credentials": "true"}
        headers = api_utils.auth_header(self._config)
        with self._calls(f"uploading {archive.name}"):
            reply = session.create_session().get(url, headers=headers, params=parameters)
            answer = api_utils.response_as_protobuf(reply, messages.FileUploadResponse)
            if answer.HasField("credentials"):
                public_rest_api.upload_model(self._config, str(archive), model_id, verbose=False)
                progress(size)
                return None
        parts = answer.multipart_url
        links = UploadLinks(
            bytes=size, upload_id=parts.upload_id, part_bytes=parts.max_part_size, urls=tuple(parts.urls)
        )
        if not links.whole:
            what = f"AI Hub's {len(links.urls)} links for parts of {links.part_bytes} bytes are not for {size} bytes"
            raise UserError(what, where=archive.name, fix="run the same command again; report it if it stays so")
        return links

    def send_part(self, archive: Path, links: UploadLinks, index: int, progress: Callable[[int], None]) -> str:
        """Send one part; the storage's receipt. ``progress`` is told how far into the archive we are.

        Raises:
            Expired: the storage does not take it any more.
        """
        part = links.part(index)
        progress(part.start)
        with self._calls(f"uploading {archive.name}"), _expiry(archive), _Watched(archive, progress) as file:
            file.seek(part.start)
            etag = api_utils.upload_asset(
                upload_url=links.urls[index],
                asset_file=file,
                asset_size=len(part),
                full_file_size=links.bytes,
                file_field_name="file",
                verbose=False,
                upload_method="put",
            )
        if not etag:
            raise UserError("the storage gave no ETag for a part", where=archive.name, fix="try again")
        progress(part.stop)
        return etag

    def close_upload(self, model_id: str, archive: Path, links: UploadLinks) -> None:
        """Tell the service that all parts are there.

        Raises:
            Expired: the storage does not know them any more.
        """
        request = messages.FileMultipartUploadComplete(upload_id=links.upload_id, etags=links.etags)
        with self._calls(f"uploading {archive.name}"), _expiry(archive):
            self._post(messages.CreateUpdateResponse, request, "models", model_id, "multipart_upload")

    def is_uploaded(self, model_id: str) -> bool:
        """Whether the service has all of a model."""
        with self._calls("looking up a model"):
            return bool(public_rest_api.get_model(self._config, model_id).file_upload_complete)

    def create_dataset(self, name: str, entries: Mapping[str, list[np.ndarray]]) -> str:
        """Upload a dataset (graph input → one array a sample)."""
        with self._calls(f"uploading the dataset {name}"), _own_temporaries():
            return self._client.upload_dataset(dict(entries), name=name).dataset_id

    def dataset_usable(self, dataset_id: str) -> bool:
        """Whether an uploaded dataset is still there."""
        try:
            with self._calls("looking up a dataset"):
                return not self._client.get_dataset(dataset_id).is_expired()
        except NotFound:
            return False

    # Jobs

    def submit_compile(self, model_id: str, device: HubDevice, name: str, options: str) -> str:
        """Submit a compile job of an uploaded ONNX model."""
        with self._calls(f"submitting {name}"), _once():
            model = self._model(model_id, qai_hub.SourceModelType.ONNX)
            return _id_of(
                self._client.submit_compile_job(model, device=_named(device), name=name, options=options, retry=False)
            )

    def submit_link(self, compile_ids: list[str], device: HubDevice, name: str, options: str) -> str:
        """Submit a link job of what the compile jobs made."""
        with self._calls(f"submitting {name}"), _once():
            models = [self._target(job_id) for job_id in compile_ids]
            return _id_of(
                self._client.submit_link_job(models, device=_named(device), name=name, options=options)
            )

    def submit_run(self, maker_id: str, device: HubDevice, dataset_id: str | None, name: str, options: str) -> str:
        """Submit a profile of what a compile or link job made; with a dataset, an inference instead."""
        with self._calls(f"submitting {name}"), _once():
            return self._submit_run(self._target(maker_id), device, dataset_id, name, options)

    def submit_run_of_file(self, model_id: str, device: HubDevice, name: str, options: str) -> str:
        """Submit a profile of an uploaded, already compiled ONNX model."""
        with self._calls(f"submitting {name}"), _once():
            model = self._model(model_id, qai_hub.SourceModelType.ONNX)
            return self._submit_run(model, device, None, name, options)

    def find_job(self, name: str) -> str | None:
        """The id of the latest job of that name, among the last thousand."""
        with self._calls("looking through the past jobs"):
            for page in range(PAGES):
                summaries = self._client.get_job_summaries(offset=page * SUMMARIES, limit=SUMMARIES)
                for summary in summaries:
                    if summary.name == name:
                        return summary.job_id
                if len(summaries) < SUMMARIES:
                    break
        return None

    def status(self, job_id: str) -> JobStatus:
        """How far a job is."""
        with self._calls(f"looking at job {job_id}"):
            job = self._jobs.get(job_id)
            if job is None:
                job = self._jobs[job_id] = self._client.get_job(job_id)
            status = job.get_status()
        return JobStatus(
            state=status.code.lower().replace("_", " "),
            finished=status.finished,
            succeeded=status.success,
            reason=self._redacted(status.message) if status.message else None,
        )

    def job_url(self, job_id: str) -> str:
        """The job's page."""
        return f"{self._config.web_url.rstrip('/')}/jobs/{job_id}/"

    # Results

    def download_model(self, maker_id: str, directory: Path) -> Path:
        """Download what a compile or link job made into an existing, empty directory."""
        return self._download(
            f"downloading the model of job {maker_id}",
            lambda: Path(self._target(maker_id).download(str(directory / "model"))),
        )

    def profile(self, job_id: str) -> dict[str, Any]:
        """The profile of a finished job: ``execution_summary`` and ``execution_detail``."""
        with self._calls(f"reading the profile of job {job_id}"):
            found = self._client.get_job(job_id).download_profile()
        return json.loads(json.dumps(found))

    def outputs(self, job_id: str) -> dict[str, list[np.ndarray]]:
        """The outputs of a finished inference job, by graph output."""
        with _own_temporaries():
            found = self._download(
                f"downloading the outputs of job {job_id}", lambda: self._client.get_job(job_id).download_output_data()
            )
        return {name: [np.asarray(array) for array in arrays] for name, arrays in (found or {}).items()}

    def logs(self, job_id: str, directory: Path) -> list[Path]:
        """Download the logs of a finished job; there may be none."""
        directory.mkdir(parents=True, exist_ok=True)

        def fetch() -> list[Path]:
            return [Path(path) for path in self._client.get_job(job_id).download_job_logs(str(directory))]

        found = self._download(f"downloading the logs of job {job_id}", fetch)
        for path in found:
            text = path.read_bytes().decode("utf-8", errors="replace")
            if self._config.api_token in text:
                path.write_text(self._redacted(text), encoding="utf-8")
        return found

    # The client

    def _project(self) -> tuple[str, ...]:
        project = self._config.default_project
        return ("projects", project) if project else ()

    def _post(self, answer: type, request: Any, *path: str) -> Any:
        url, headers = api_utils.api_url(self._config, *path), api_utils.auth_header(self._config)
        body = request.SerializeToString()
        sent = session.retry_call_with_backoff(lambda: session.create_session().post(url, data=body, headers=headers))
        return api_utils.response_as_protobuf(sent, answer)

    def _submit_run(
        self, model: qai_hub.Model, device: HubDevice, dataset_id: str | None, name: str, options: str
    ) -> str:
        inputs = None if dataset_id is None else self._client.get_dataset(dataset_id)
        return _id_of(
            self._client.submit_inference_job(
                model,
                device=_named(device),
                inputs=inputs,
                name=name,
                options=options,
                retry=False,
                profile=inputs is None,
            )
        )

    def _model(self, model_id: str, kind: qai_hub.SourceModelType) -> qai_hub.Model:
        """A handle of a model that we uploaded: all that a submission reads of it is id, kind and name."""
        return qai_hub.Model(
            owner=self._client,
            model_id=model_id,
            date=datetime.now(),
            model_type=kind,
            name=model_id,
            metadata={},
            model=None,
            verbose=False,
            producer=None,
            input_spec={},
            output_spec={},
        )

    def _target(self, maker_id: str) -> qai_hub.Model:
        model = self._client.get_job(maker_id).get_target_model()
        if model is None:
            fix = "look at the job's page, and run again with --resubmit"
            raise UserError("the job made no model", where=self.job_url(maker_id), fix=fix)
        return model

    def _download(self, doing: str, fetch: Callable[[], Any]) -> Any:
        """``fetch`` with a fresh link each time: links expire, connections break."""
        for attempt in range(DOWNLOADS):
            try:
                with self._calls(doing):
                    return fetch()
            except NotFound:
                raise
            except (UserError, ServiceTrouble):
                if attempt == DOWNLOADS - 1:
                    raise
                time.sleep(self.timing.retry_seconds * 2**attempt)

    @contextlib.contextmanager
    def _calls(self, doing: str) -> Iterator[None]:
        """Calls of the client: its prints are swallowed, its errors become ours, without the token."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        except CLIENT_ERRORS as error:
            raise self._translated(error, doing) from None
        except (OSError, RuntimeError) as error:  # its files (HDF5 has its own words for a full disk)
            full = os.strerror(errno.ENOSPC)
            raise UserError(
                f"{doing}: {full if full in str(error) else plain(str(error))}",
                where=getattr(error, "filename", None) or tempfile.gettempdir(),
                fix="free some space there, or name another folder with TMPDIR, and run the same command again",
            ) from None

    def _translated(self, error: BaseException, doing: str) -> Exception:
        status = _status(error)
        message = self._redacted(plain(str(error)))
        if status == UNAUTHORIZED:
            return UserError(
                "AI Hub refused the token",
                where=self._path,
                fix=f"run `meki-edge hub login` with {ACCOUNT}",
            )
        if status == MISSING:
            fix = "was it made with another account? If it was removed, run again with --resubmit"
            return NotFound(message, where=doing, fix=fix)
        unreachable = (RateLimitedError, qai_hub.InternalError, requests.RequestException)
        if isinstance(error, unreachable) or status is not None and (status in BUSY or status >= INTERNAL):
            fix = "run the same command later: it goes on where it stopped"
            return ServiceTrouble(f"{doing}: {message}", where=self.service, fix=fix)
        if status == UPGRADE:
            return UserError(message, where="qai-hub", fix="install a newer qai-hub")
        if isinstance(error, (DecodeError, AssertionError)):
            message = f"AI Hub's answer is not what its client expects ({type(error).__name__}: {message})"
        return UserError(message or type(error).__name__, where=f"AI Hub, {doing}", fix=advice(message))

    def _redacted(self, text: str) -> str:
        return redacted(text, self._config.api_token)


@contextlib.contextmanager
def _once() -> Iterator[None]:
    """Keep the client from repeating a submission whose answer got lost: the service may have taken it.

    What to do then is for the caller, who can look for the job (:mod:`export.hub_jobs`).
    """
    usual, session.MAX_RETRIES = session.MAX_RETRIES, 0
    try:
        yield
    finally:
        session.MAX_RETRIES = usual


@contextlib.contextmanager
def _own_temporaries() -> Iterator[None]:
    """A folder for the client's temporary files: it leaves datasets behind when it fails or is interrupted."""
    usual = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="meki-edge-") as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = usual


@contextlib.contextmanager
def _expiry(archive: Path) -> Iterator[None]:
    try:
        yield
    except public_rest_api.APIException as error:
        if error.status_code not in EXPIRED:
            raise
        fix = "run the same command again: new links are asked for"
        raise Expired("the storage's links for the upload are out of date", where=archive.name, fix=fix) from None


class _Watched(io.FileIO):
    """A file whose reading is progress."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        super().__init__(path, "rb")
        self._progress = progress

    def read(self, size: int = -1) -> bytes | None:
        data = super().read(size)
        self._progress(self.tell())
        return data


def _id_of(job: qai_hub.Job) -> str:
    if not job.job_id:
        raise ValueError("AI Hub took the job, but gave it no id")
    return job.job_id


def _named(device: HubDevice) -> qai_hub.Device:
    return qai_hub.Device(name=device.name, os=device.os)


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error of the client, which hides it in the chain of causes."""
    while error is not None:
        if isinstance(error, public_rest_api.APIException):
            return error.status_code
        error = error.__cause__ or error.__context__
    return None
