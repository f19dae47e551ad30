"""The loopback service's two HTTP servers: requests of the wire protocol, and where files lie."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from google.protobuf.message import Message
from qai_hub import public_api_pb2 as messages
from server_jobs import DEVICES, Stored


class Handler(BaseHTTPRequestHandler):
    """What both servers share."""

    hub: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status: int, data: bytes, content_type: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def hang_up(self) -> None:
        """Close the connection with a reset, as a lost network looks."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        raise ConnectionResetError


class Refused(Exception):
    def __init__(self, status: int, detail: str) -> None:
        self.status, self.detail = status, detail


class Api(Handler):
    """The service proper."""

    def route(self) -> None:
        path, _, query = self.path.partition("?")
        path = path.removeprefix("/api/v1/").strip("/")
        parameters = urllib.parse.parse_qs(query)
        data = self.body()
        self.hub.heard(self.command, path)
        with self.hub.lock:
            lost = self._take(self.hub.faults.lost_answers, path)
            fault = None if lost else self._take(self.hub.faults.statuses, path)
        try:
            if fault is not None:
                raise Refused(fault[2], "the server was told to fail")
            if self.headers.get("Authorization") != f"token {self.hub.token}":
                raise Refused(401, "Invalid token.")
            reply = self._reply(path, parameters, data)
        except Refused as refused:
            detail = json.dumps({"detail": refused.detail}).encode()
            self.answer(refused.status, detail, "application/json")
            return
        if lost is not None:
            self.hang_up()
        if path == self.hub.faults.garbage:
            self.answer(200, b"\xff\xfe nonsense", "application/x-protobuf")
            return
        self.answer(200, reply.SerializeToString(), "application/x-protobuf")

    do_GET = do_POST = do_PATCH = route

    def _take(self, faults: list[Any], path: str) -> Any:
        for index, fault in enumerate(faults):
            if fault[0] == self.command and re.fullmatch(fault[1], path):
                return faults.pop(index)
        return None

    def _reply(self, path: str, parameters: dict[str, list[str]], data: bytes) -> Message:
        for method, pattern, handle in ROUTES:
            match = re.fullmatch(pattern, path)
            if method == self.command and match:
                return handle(self.hub, data, parameters, *match.groups())
        raise Refused(404, "Not found.")


class Storage(Handler):
    """Where files lie: links need no token."""

    def do_PUT(self) -> None:
        upload, index = re.fullmatch(r"/put/(\w+)/(\d+)\?.*", self.path).groups()
        length = int(self.headers["Content-Length"])
        cut = self.hub.faults.cut_upload_at
        if cut is not None:
            self.hub.faults.cut_upload_at = None
            self.rfile.read(min(cut, length))
            self.hang_up()
        data = self.rfile.read(length)
        if self.hub.faults.expired_parts or upload not in self.hub.uploads:
            self.hub.faults.expired_parts = max(0, self.hub.faults.expired_parts - 1)
            self._expired()
            return
        self.hub.uploads[upload][int(index)] = data
        self.hub.heard("PUT", f"{upload}/{index}")
        self.answer(200, b"", "text/plain", ETag=f'"{upload}-{index}"')

    def do_POST(self) -> None:
        name = self.path.removeprefix("/form/")
        data = self.body()
        boundary = self.headers["Content-Type"].split("boundary=")[1].encode()
        files = [part for part in data.split(b"--" + boundary) if b'name="file"' in part]
        self.hub.datasets[name] = files[0].split(b"\r\n\r\n", 1)[1][:-2]
        self.answer(204, b"", "text/plain")

    def do_GET(self) -> None:
        if self.hub.faults.expired_links:
            self.hub.faults.expired_links -= 1
            self._expired()
            return
        self.answer(200, self.hub.linked(re.fullmatch(r"/get/(\w+)\?.*", self.path)[1]), "application/octet-stream")

    def _expired(self) -> None:
        text = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
        self.answer(403, text, "application/xml")


def _created(identifier: str, *, expires: bool = False) -> messages.CreateUpdateResponse:
    answer = messages.CreateUpdateResponse(id=identifier)
    answer.creation_time.GetCurrentTime()
    if expires:
        answer.expiration_time.FromSeconds(int(time.time()) + 30 * 86400)
    return answer


def _devices(hub: Any, data: bytes, parameters: dict[str, list[str]]) -> Message:
    wanted = parameters.get("name", [""])[0]
    found = messages.DeviceList()
    for name, system, *chipsets, arch in DEVICES:
        if wanted in ("", name):
            attributes = ["vendor:qualcomm", "os:android", "format:phone", "framework:qnn", "framework:onnx"]
            attributes += [f"chipset:{chipset}" for chipset in chipsets] + [f"hexagon:{arch}", "htp-supports-fp16:true"]
            found.devices.add(name=name, os=system, attributes=attributes)
    return found


def _new_model(hub: Any, data: bytes, _: object) -> Message:
    if hub.faults.quota:
        raise Refused(403, hub.faults.quota)
    request = messages.Model.FromString(data)
    model_id = hub.new_id("m")
    hub.models[model_id] = Stored(name=request.name, kind=request.model_type)
    return _created(model_id)


def _model(hub: Any, data: bytes, _: object, model_id: str) -> Message:
    if model_id not in hub.models:
        raise Refused(404, "Not found.")
    return hub.describe(model_id)


def _open_upload(hub: Any, data: bytes, parameters: dict[str, list[str]], model_id: str) -> Message:
    _model(hub, data, parameters, model_id)
    size, upload = int(parameters["file_size"][0]), hub.new_id("u")
    hub.uploads[upload] = {}
    urls = [f"{hub.storage}/put/{upload}/{index}?signature=abc" for index in range(-(-size // hub.part_bytes))]
    del urls[len(urls) - hub.faults.missing_links :]
    parts = messages.FileMultipartUploadURL(urls=urls, upload_id=upload, max_part_size=hub.part_bytes)
    return messages.FileUploadResponse(multipart_url=parts)


def _close_upload(hub: Any, data: bytes, _: object, model_id: str) -> Message:
    request = messages.FileMultipartUploadComplete.FromString(data)
    parts = hub.uploads.pop(request.upload_id, None)
    if parts is None:
        raise Refused(400, "The specified upload does not exist.")
    if [f'"{request.upload_id}-{index}"' for index in sorted(parts)] != list(request.etags):
        raise Refused(400, "One or more of the specified parts could not be found.")
    hub.models[model_id].data = b"".join(parts[index] for index in sorted(parts))
    return _created(model_id)


def _download_model(hub: Any, data: bytes, _: object, model_id: str) -> Message:
    model = hub.models[model_id]
    return _link(hub, model.filename, model.data)


def _link(hub: Any, filename: str, data: bytes) -> Message:
    url = messages.FileDownloadURL(url=hub.link(filename, data), filename=filename)
    return messages.FileDownloadResponse(url=url)


def _new_dataset(hub: Any, data: bytes, _: object) -> Message:
    dataset_id = hub.new_id("d")
    hub.datasets[dataset_id] = b""
    return _created(dataset_id, expires=True)


def _dataset(hub: Any, data: bytes, _: object, dataset_id: str) -> Message:
    if dataset_id not in hub.datasets:
        raise Refused(404, "Not found.")
    found = messages.Dataset(dataset_id=dataset_id, name=dataset_id)
    found.creation_time.GetCurrentTime()
    found.expiration_time.FromSeconds(int(time.time()) + 30 * 86400)
    return found


def _dataset_url(hub: Any, data: bytes, _: object, dataset_id: str) -> Message:
    place = f"{hub.storage}/form/{dataset_id}"
    url = messages.FileUploadURL(url=place, file_field_name="file", fields={"key": dataset_id})
    return messages.FileUploadResponse(url=url)


def _new_job(hub: Any, data: bytes, _: object) -> Message:
    if hub.faults.quota:
        raise Refused(403, hub.faults.quota)
    request = messages.Job.FromString(data)
    inner = getattr(request, request.WhichOneof("job"))
    used = [model.model_id for model in (inner.models.models if request.HasField("link_job") else [inner.model])]
    for model_id in used:
        if model_id not in hub.models:
            raise Refused(404, f"Model {model_id} could not be found.")
    return _created(hub.start(request))


def _job(hub: Any, data: bytes, _: object, job_id: str) -> Message:
    if job_id not in hub.jobs:
        raise Refused(404, "Not found.")
    return hub.look(job_id)


def _result(hub: Any, data: bytes, _: object, job_id: str) -> Message:
    return hub.jobs[job_id].result


def _summaries(hub: Any, data: bytes, parameters: dict[str, list[str]]) -> Message:
    first, count = (int(parameters.get(name, [default])[0]) for name, default in (("offset", "0"), ("limit", "50")))
    found = messages.JobSummaryList()
    with hub.lock:
        newest = list(hub.jobs.items())[::-1][first : first + count]
    for job_id, job in newest:
        which = job.message.WhichOneof("job")
        inner = getattr(job.message, which)
        summary = getattr(found.job_summaries.add(), f"{which}_summary")
        summary.job_id, summary.name, summary.job_state = job_id, inner.name, inner.job_state
        summary.device_name = inner.device.name
        summary.creation_time.GetCurrentTime()
    return found


def _artifacts(hub: Any, data: bytes, _: object, job_id: str, kind: str) -> Message:
    found = messages.NamedArtifactDownloadURLList()
    if int(kind) == messages.JobArtifactType.JOB_ARTIFACT_TYPE_HUB_LOG:
        for name, text in hub.jobs[job_id].logs.items():
            found.artifacts.add(url=hub.link(name, text), filename=name)
    return found


Handle = Callable[..., Message]
ROUTES: tuple[tuple[str, str, Handle], ...] = (
    ("GET", "devices", _devices),
    ("POST", "models", _new_model),
    ("GET", r"models/(\w+)", _model),
    ("GET", r"models/(\w+)/multipart_upload", _open_upload),
    ("POST", r"models/(\w+)/multipart_upload", _close_upload),
    ("GET", r"models/(\w+)/download", _download_model),
    ("POST", "datasets", _new_dataset),
    ("GET", r"datasets/(\w+)", _dataset),
    ("PATCH", r"datasets/(\w+)", lambda hub, data, _, dataset_id: _created(dataset_id)),
    ("GET", r"datasets/(\w+)/upload_url", _dataset_url),
    ("GET", r"datasets/(\w+)/download_data", lambda hub, data, _, name: _link(hub, f"{name}.h5", hub.datasets[name])),
    ("POST", "jobs", _new_job),
    ("GET", r"jobs/(\w+)", _job),
    ("GET", r"jobs/(\w+)/result", _result),
    ("GET", "job_summaries", _summaries),
    ("GET", r"jobs/(\w+)/device_runs/latest/artifact_list/(\d+)", _artifacts),
)
