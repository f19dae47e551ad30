"""What the loopback server's jobs compute: nothing is invented where the real thing runs on this machine.

A `qnn_dlc` cannot be made without Qualcomm's converter: it is the uploaded archive under another
name, which says what graph it holds. A binary is the local compiler's where that is installed and
asked for; without it, a file that says that it is none. Inference is ONNX Runtime's on the uploaded
graph, rounded to float16 as the NPU would; a profile's times are those of that run, on this CPU.
"""

from __future__ import annotations

import io
import json
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import onnx
import onnxruntime as ort
from qai_hub import public_api_pb2 as messages
from qai_hub.util.dataset_entries_converters import dataset_entries_to_h5, h5_to_dataset_entries

ITERATIONS = 5
Type = messages.ModelType
SOC_MODELS = {"sm8650": 57, "sm8750": 69, "sm8850": 87}
DEVICES = (
    ("Samsung Galaxy S24 (Family)", "14", "qualcomm-snapdragon-8gen3", "sm8650", "v75"),
    ("Samsung Galaxy S25 (Family)", "15", "qualcomm-snapdragon-8-elite", "sm8750", "v79"),
    ("Snapdragon 8 Elite Gen 5 QRD", "16", "qualcomm-snapdragon-8-elite-gen5", "sm8850", "v81"),
)


class JobFailed(Exception):
    """The reason that the service gives."""


@dataclass(kw_only=True)
class Stored:
    """A model at the service: its bytes, and the graphs (name → ONNX file) that it was made of."""

    name: str
    kind: int
    data: bytes = b""
    filename: str = ""
    producer: str = ""
    graphs: dict[str, Path] = field(default_factory=dict)
    soc_model: int | None = None


def soc_of(device: str) -> str:
    """The chip of a device."""
    return next(soc for name, _, _, soc, _ in DEVICES if name == device)


def options_of(text: str) -> dict[str, str]:
    """``--a b --c`` → ``{"a": "b", "c": ""}``."""
    found: dict[str, str] = {}
    for part in text.split("--")[1:]:
        name, _, value = part.strip().partition(" ")
        found[name] = value.strip()
    return found


def graph_name(options: Mapping[str, str], default: str) -> str:
    """The name in ``--qnn_options context_enable_graphs=NAME;…``."""
    for pair in options.get("qnn_options", "").split(";"):
        key, _, value = pair.partition("=")
        if key == "context_enable_graphs":
            return value
    return default


def unpack(data: bytes, directory: Path) -> Path:
    """The ONNX file of an uploaded archive; the service's own rules about what it may hold."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(directory)
        files = [Path(name) for name in archive.namelist() if not name.endswith("/")]
    found = [file for file in files if file.suffix == ".onnx"]
    if len(found) != 1:
        raise JobFailed("Model directory must contain exactly one .onnx file.")
    for file in files:
        if file.suffix not in (".onnx", ".data", ".encodings", ".bin"):
            raise JobFailed(f"Model directory can only contain .onnx, .data, .encodings, and .bin files: {file.name}")
    return directory / found[0]


def check(path: Path, options: Mapping[str, str]) -> None:
    """What the service's compiler refuses."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.domain == "com.microsoft" and node.op_type != "EPContext":
            raise JobFailed(f"Unsupported operator com.microsoft.{node.op_type} in the ONNX model")
    for value in model.graph.input:
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64 and "truncate_64bit_io" not in options:
            raise JobFailed(f"Input {value.name} has type int64; use --truncate_64bit_io")


def compile_model(source: Stored, options: Mapping[str, str], soc_model: int, work: Path, local: bool) -> Stored:
    """A compile job."""
    path = unpack(source.data, work / "source")
    check(path, options)
    name = graph_name(options, path.stem)
    runtime = options.get("target_runtime")
    if runtime == "qnn_dlc":
        made = Stored(name=f"{source.name}.dlc", kind=Type.MODEL_TYPE_QNN_DLC, data=source.data, filename=f"{name}.dlc")
    elif runtime == "precompiled_qnn_onnx":
        data = _wrapped(path, name, soc_model, work, local)
        made = Stored(name=source.name, kind=Type.MODEL_TYPE_ONNX, data=data, filename=f"{name}.onnx.zip")
    else:
        raise JobFailed(f"target runtime {runtime!r} is not offered here")
    made.graphs = {name: path}
    made.soc_model = soc_model
    return made


def link_models(sources: list[Stored], soc_model: int, work: Path, local: bool) -> Stored:
    """A link job: the graphs in one binary."""
    graphs: dict[str, Path] = {}
    for source in sources:
        if source.kind != Type.MODEL_TYPE_QNN_DLC:
            raise JobFailed("Input model must be a QNN DLC model.")
        if set(source.graphs) & set(graphs):
            raise JobFailed(f"Graph names must be unique: {', '.join(source.graphs)}")
        graphs |= source.graphs
    # The local compiler links no portable files: one graph's binary stands for the linked one.
    binary = max((_binary(path, soc_model, work / name, local) for name, path in graphs.items()), key=len)
    return Stored(
        name="linked", kind=Type.MODEL_TYPE_QNN_CONTEXT_BINARY, data=binary, filename="linked.bin", graphs=graphs,
        soc_model=soc_model,
    )  # fmt: skip


def infer(model: Stored, options: Mapping[str, str], data: bytes) -> bytes:
    """An inference job: outputs as HDF5."""
    with h5py.File(io.BytesIO(data), "r") as file:
        inputs = h5_to_dataset_entries(file)
    session = _session(model, options)
    names = [output.name for output in session.get_outputs()]
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in names}
    expected = {value.name: (tuple(value.shape), value.type) for value in session.get_inputs()}
    if set(inputs) != set(expected):
        raise JobFailed(f"The dataset has inputs {sorted(inputs)}, the model {sorted(expected)}")
    for sample in range(len(next(iter(inputs.values())))):
        feeds = {name: arrays[sample] for name, arrays in inputs.items()}
        for name, array in zip(names, session.run(names, feeds), strict=True):
            rounded = array.astype(np.float16).astype(array.dtype) if array.dtype.kind == "f" else array
            outputs[name].append(rounded)
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        dataset_entries_to_h5(outputs, file)
    return buffer.getvalue()


SIMULATOR = """
import json, sys, time
import numpy as np, onnxruntime as ort, onnxruntime_qnn
from export.qnn_worker import PROVIDER, session
ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
found = session(sys.argv[1], int(sys.argv[2]), 1)
feeds = {value.name: np.zeros(value.shape, np.float32) for value in found.get_inputs()}
times = []
for _ in range(2):
    started = time.monotonic()
    found.run(None, feeds)
    times.append(int(1e6 * (time.monotonic() - started)))
print(json.dumps(times))
"""


def profile_binary(model: Stored, soc_model: int, work: Path) -> messages.ProfileDetail:
    """A profile of an uploaded binary: the NPU simulator's run of it, one layer."""
    path = unpack(model.data, work)
    command = [sys.executable, "-c", SIMULATOR, str(path), str(soc_model)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise JobFailed(f"Failed to load the model: {(done.stderr.strip().splitlines() or ['crashed'])[-1]}")
    times = json.loads(done.stdout.splitlines()[-1])
    detail = messages.ProfileDetail(
        major_version=1,
        minor_version=2,
        execution_time=min(times),
        all_execution_times=times,
        cold_load_time=1,
        warm_load_time=1,
    )
    unit = messages.ComputeUnit.COMPUTE_UNIT_NPU
    detail.layer_details.add(name=path.stem, layer_type_name="EPContext", compute_unit=unit)
    return detail


def profile(model: Stored, options: Mapping[str, str]) -> messages.ProfileDetail:
    """A profile job: the graph's run on this CPU, its time spread over its nodes."""
    started = time.monotonic()
    session = _session(model, options)
    load = int(1e6 * (time.monotonic() - started))
    kinds = {value.name: value.type.removeprefix("tensor(").removesuffix(")") for value in session.get_inputs()}
    feeds = {
        value.name: np.zeros(value.shape, "float32" if kinds[value.name] == "float" else kinds[value.name])
        for value in session.get_inputs()
    }
    times = []
    for _ in range(min(ITERATIONS, int(options.get("max_profiler_iterations", ITERATIONS)))):
        started = time.monotonic()
        session.run(None, feeds)
        times.append(max(1, int(1e6 * (time.monotonic() - started))))
    peak = sum(array.nbytes for array in feeds.values()) + 50_000_000
    memory = messages.ProfileDetail.MemoryUsage(
        increase=messages.Range(lower=1_000_000, upper=2_000_000), peak=messages.Range(lower=peak, upper=peak + 4096)
    )
    detail = messages.ProfileDetail(
        major_version=1,
        minor_version=2,
        execution_time=int(statistics.median(times)),
        after_execution_peak_memory=peak,
        cold_load_time=load,
        warm_load_time=max(1, load // 2),
        after_cold_load_peak_memory=peak,
        after_warm_load_peak_memory=peak,
        execution_memory=memory,
        cold_load_memory=memory,
        warm_load_memory=memory,
        all_execution_times=times,
        all_cold_load_times=[load],
        all_warm_load_times=[max(1, load // 2)],
    )
    path = _path(model, options)
    nodes = onnx.load(path, load_external_data=False).graph.node
    for index, node in enumerate(nodes):
        layer = detail.layer_details.add(
            name=node.name or node.output[0],
            layer_type_name=node.op_type,
            compute_unit=messages.ComputeUnit.COMPUTE_UNIT_NPU,
        )
        if index % 3:  # a device does not time every layer
            layer.execution_time = 1 + (detail.execution_time * (index + 1)) // (len(nodes) * (len(nodes) + 1))
    return detail


def _path(model: Stored, options: Mapping[str, str]) -> Path:
    name = graph_name(options, next(iter(model.graphs), ""))
    if name not in model.graphs:
        raise JobFailed(f"The binary has no graph {name!r}; it has {', '.join(model.graphs) or 'none'}")
    return model.graphs[name]


def _session(model: Stored, options: Mapping[str, str]) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3
    return ort.InferenceSession(_path(model, options), settings, providers=["CPUExecutionProvider"])


def _compiled(path: Path, soc_model: int, work: Path) -> tuple[Path, Path]:
    """(wrapper, binary) of the local compiler."""
    work.mkdir(parents=True, exist_ok=True)
    result = work / "result.json"
    command = [sys.executable, "-m", "export.qnn_worker", "compile", f"--result={result}", f"--out={work}"]
    command += [f"--soc-model={soc_model}", "--optimization-level=1", f"--model={path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise JobFailed(f"Failed to compile: {done.stderr.strip().splitlines()[-1]}")
    return next(work.glob("*.onnx")), next(work.glob("*.bin"))


def _binary(path: Path, soc_model: int, work: Path, local: bool) -> bytes:
    if local:
        return _compiled(path, soc_model, work)[1].read_bytes()
    return json.dumps({"not": "an NPU binary", "graph": path.stem, "soc_model": soc_model}).encode()


def _wrapped(path: Path, name: str, soc_model: int, work: Path, local: bool) -> bytes:
    """A zip file with an ONNX file of one EPContext node and the binary that it names."""
    directory = work / f"{name}.onnx"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if local:
        wrapper, binary = _compiled(path, soc_model, work / "local")
        model = onnx.load(wrapper, load_external_data=False)
        (directory / "model.bin").write_bytes(binary.read_bytes())
    else:
        source = onnx.load(path, load_external_data=False)
        node = onnx.helper.make_node(
            "EPContext",
            [value.name for value in source.graph.input],
            [value.name for value in source.graph.output],
            domain="com.microsoft",
            embed_mode=0,
            ep_cache_context="",
            source="QNN",
        )
        graph = onnx.helper.make_graph([node], name, source.graph.input, source.graph.output)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("com.microsoft", 1)])
        (directory / "model.bin").write_bytes(_binary(path, soc_model, work, local=False))
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "ep_cache_context":
            attribute.s = b"model.bin"
    onnx.save(model, directory / "model.onnx")
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for file in sorted(directory.iterdir()):
            archive.write(file, f"{directory.name}/{file.name}")
    return data.getvalue()
