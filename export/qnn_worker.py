"""QNN work in a process of its own: ``python -m export.qnn_worker compile|simulate …``.

The compiler and the NPU simulator are native code that can abort and that keeps gigabytes, so
:mod:`export.qnn_local` runs one job a process and reads its result from a JSON file. Whatever the
native libraries print goes to the log of the parent.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_qnn

from export.agreement import agreement
from export.onnx_decoder import OnnxDecoder, Sessions, cpu_sessions
from meki_edge import graph_spec
from meki_edge.files import read_json, write_json
from meki_edge.graph_spec import Graph, GraphSpec
from meki_edge.rom.reader import RomReader

PROVIDER = "QNNExecutionProvider"
ERRORS_ONLY = 3


PR_SET_PDEATHSIG = 1  # of Linux's prctl


def register() -> None:
    """Make the provider known to ONNX Runtime; once a process."""
    ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())


def session(
    model: Path,
    soc_model: int,
    optimization_level: int,
    context: Path | None = None,
    entries: Mapping[str, str] | None = None,
) -> ort.InferenceSession:
    """A session of ``model`` on the NPU alone: a node that would fall back to the CPU is an error.

    With ``context`` the graph is only prepared, and the binary is written beside that path;
    without, it runs (on this machine: in the simulator that the library carries).

    Args:
        entries: more of the session's configuration.
    """
    options = ort.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = {
        "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
        "soc_model": str(soc_model),  # alone: it implies the Hexagon architecture
        "enable_htp_fp16_precision": "1" if computes_in_float(model) else "0",
        "offload_graph_io_quantization": "0",
        "htp_graph_finalization_optimization_mode": str(optimization_level),
    }
    if context is not None:
        provider["enable_htp_prepare_only"] = "1"
        options.add_session_config_entry("ep.context_enable", "1")
        options.add_session_config_entry("ep.context_embed_mode", "0")
        options.add_session_config_entry("ep.context_file_path", os.fspath(context))
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    options.add_provider_for_devices(devices, provider)
    return ort.InferenceSession(model, options)


def npu_sessions(compiled: Path, graph: Graph, soc_model: int, optimization_level: int) -> list[ort.InferenceSession]:
    """Sessions of the binaries of a graph's parts, which lie in ``compiled``."""
    wrappers = [compiled / f"{Path(part.file).stem}_ctx.onnx" for part in graph.parts]
    return [session(wrapper, soc_model, optimization_level) for wrapper in wrappers]


def computes_in_float(model: Path) -> bool:
    """Whether a matrix product takes activations that no DequantizeLinear gives."""
    graph = onnx.load(model, format="protobuf", load_external_data=False).graph
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    return any(made_by.get(node.input[0]) != "DequantizeLinear" for node in products)


def compile_graphs(
    models: Sequence[Path], out: Path, binary: str, soc_model: int, optimization_level: int
) -> dict[str, Any]:
    """Compile ONNX graphs into one binary ``{binary}_qnn.bin`` in ``out``; return what it took.

    Several graphs share its weights: what they have in common is in it once.
    """
    started = time.monotonic()
    work = out / f"{binary}.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    sessions, contexts = [], [work / f"{binary}.onnx", *(work / model.name for model in models[1:])]
    for model, context in zip(models, contexts, strict=True):
        sharing = {"ep.share_ep_contexts": "1"} if len(models) > 1 else {}
        if sharing and model == models[-1]:
            sharing["ep.stop_share_ep_contexts"] = "1"
        # The first one must live until the last one is there.
        sessions.append(session(model, soc_model, optimization_level, context, sharing))
    file = f"{binary}_qnn.bin"
    versions = {_sdk_version(context, file) for context in contexts}
    os.replace(work / file, out / file)
    for model, context in zip(models, contexts, strict=True):
        os.replace(context, out / f"{model.stem}_ctx.onnx")
    shutil.rmtree(work)
    return {
        "compile_seconds": round(time.monotonic() - started, 2),
        "compile_peak_rss_bytes": _peak_rss_bytes(),
        "binary_bytes": (out / file).stat().st_size,
        "qnn_sdk_version": ", ".join(sorted(versions)),
    }


def _sdk_version(wrapper: Path, binary: str) -> str:
    """QNN's version, of a wrapper that must hold nothing but a reference to ``binary``."""
    nodes = onnx.load(wrapper, format="protobuf", load_external_data=False).graph.node
    if [node.op_type for node in nodes] != ["EPContext"]:
        outside = ", ".join(sorted({node.op_type for node in nodes} - {"EPContext"})) or "several contexts"
        raise RuntimeError(f"the graph is not one NPU context: {outside} would run elsewhere")
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in nodes[0].attribute}
    assert attributes["ep_cache_context"].decode() == binary, "the wrapper names another binary"
    return attributes["ep_sdk_version"].decode()


def simulate(
    exported: Path, compiled: Path, roms: list[Path], ids: list[int], steps: int, soc_model: int, level: int
) -> dict[str, Any]:
    """Run ``ids`` through the compiled graphs in the simulator and through ONNX Runtime on the CPU.

    All but the last ``steps`` ids are one prefill chunk, the rest decode steps. Each side keeps its
    own cache, so the simulator's decode steps see what its own prefill wrote.
    """
    started = time.monotonic()
    spec_path = exported / graph_spec.FILE_NAME
    spec = GraphSpec.from_json(read_json(spec_path), spec_path)
    prompt, rest = np.array(ids[:-steps]), ids[-steps:]
    with ExitStack() as stack:
        embedding = stack.enter_context(RomReader(exported / spec.embedding.file))
        readers = [stack.enter_context(RomReader(rom)) for rom in roms]

        def on_npu(graph: Graph) -> Sessions:
            return npu_sessions(compiled, graph, soc_model, level)

        def run(one: GraphSpec, load: Callable[[Graph], Sessions]) -> dict[str, np.ndarray]:
            decoder = OnnxDecoder(one, embedding, readers)
            prefill = decoder.prefill(load(one.prefill), prompt)  # one graph in memory at a time
            loaded = load(one.decode)
            return {"prefill": prefill, "decode": np.stack([decoder.decode(loaded, token) for token in rest])}

        metrics: dict[str, Any] = {}
        for suffix, one in spec.contexts.items():
            expected = run(one, lambda graph: cpu_sessions(exported, graph))
            for name, logits in run(one, on_npu).items():
                found = agreement(logits, expected[name])
                metrics |= {f"simulator_{name}{suffix}_{key}": value for key, value in found.items()}
    return {"simulator_seconds": round(time.monotonic() - started, 2), **metrics}


def _peak_rss_bytes() -> int:
    """Peak resident set of this process alone (``ru_maxrss`` would include the parent's before exec)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no VmHWM")


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent does, even by a signal that cannot be caught (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was too late
            sys.exit("the process that wanted this is gone")


def main(arguments: list[str]) -> int:
    """Run one job; its result is a JSON file, its errors one line."""
    parser = argparse.ArgumentParser(prog="export.qnn_worker")
    jobs = parser.add_subparsers(dest="job", required=True)
    for name in ("compile", "simulate"):
        job = jobs.add_parser(name)
        job.add_argument("--result", type=Path, required=True)
        job.add_argument("--soc-model", type=int, required=True)
        job.add_argument("--optimization-level", type=int, required=True)
        job.add_argument("--out", type=Path, required=True)
        job.add_argument("--parent", type=int, help="the process to end with")
    jobs.choices["compile"].add_argument("--model", type=Path, nargs="+", required=True)
    jobs.choices["compile"].add_argument("--binary", help="what to call the binary; by default as the first model")
    jobs.choices["simulate"].add_argument("--exported", type=Path, required=True)
    jobs.choices["simulate"].add_argument("--roms", type=Path, nargs="*", required=True)
    jobs.choices["simulate"].add_argument("--steps", type=int, required=True)
    jobs.choices["simulate"].add_argument("--ids", type=int, nargs="+", required=True)
    given = parser.parse_args(arguments)
    if given.parent is not None:
        end_with(given.parent)
    register()
    try:
        if given.job == "compile":
            binary = given.binary or given.model[0].stem
            result = compile_graphs(given.model, given.out, binary, given.soc_model, given.optimization_level)
        else:
            result = simulate(
                given.exported,
                given.out,
                given.roms,
                given.ids,
                given.steps,
                given.soc_model,
                given.optimization_level,
            )
        write_json(given.result, result)
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
