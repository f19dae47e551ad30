"""QNN work in a process of its own: ``python -m export.qnn_worker compile|simulate …``.

The compiler and the NPU simulator are native code that can abort and that keeps gigabytes, so
:mod:`export.qnn_local` runs one job a process and reads its result from a JSON file. Whatever the
native libraries print goes to the log of the parent.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_qnn

from export.onnx_decoder import OnnxDecoder, cpu_session
from meki_edge import graph_spec
from meki_edge.files import read_json, write_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.rom.reader import RomReader

PROVIDER = "QNNExecutionProvider"
ERRORS_ONLY = 3


def context_files(graph: str) -> tuple[str, str]:
    """The names of a compiled graph: its ONNX wrapper and the context binary beside it."""
    return f"{graph}_ctx.onnx", f"{graph}_qnn.bin"


def session(model: Path, soc_model: int, optimization_level: int, context: Path | None = None) -> ort.InferenceSession:
    """A session of ``model`` on the NPU alone: a node that would fall back to the CPU is an error.

    With ``context`` the graph is only prepared, and the binary is written beside that path;
    without, it runs (on this machine: in the simulator that the library carries).
    """
    options = ort.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = {
        "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
        "soc_model": str(soc_model),  # alone: it implies the Hexagon architecture
        "enable_htp_fp16_precision": "1",
        "offload_graph_io_quantization": "0",
        "htp_graph_finalization_optimization_mode": str(optimization_level),
    }
    if context is not None:
        provider["enable_htp_prepare_only"] = "1"
        options.add_session_config_entry("ep.context_enable", "1")
        options.add_session_config_entry("ep.context_embed_mode", "0")
        options.add_session_config_entry("ep.context_file_path", os.fspath(context))
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    options.add_provider_for_devices(devices, provider)
    return ort.InferenceSession(model, options)


def compile_graph(model: Path, out: Path, soc_model: int, optimization_level: int) -> dict[str, Any]:
    """Compile one ONNX graph into ``out``; return what it took."""
    started = time.monotonic()
    wrapper, binary = context_files(model.stem)
    work = out / f"{model.stem}.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    session(model, soc_model, optimization_level, work / model.name)
    nodes = onnx.load(work / model.name, load_external_data=False).graph.node
    if [node.op_type for node in nodes] != ["EPContext"]:
        outside = ", ".join(sorted({node.op_type for node in nodes} - {"EPContext"})) or "several contexts"
        raise RuntimeError(f"the graph is not one NPU context: {outside} would run elsewhere")
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in nodes[0].attribute}
    assert attributes["ep_cache_context"].decode() == binary, "the wrapper names another binary"
    os.replace(work / binary, out / binary)
    os.replace(work / model.name, out / wrapper)
    shutil.rmtree(work)
    return {
        "compile_seconds": round(time.monotonic() - started, 2),
        "compile_peak_rss_bytes": _peak_rss_bytes(),
        "binary_bytes": (out / binary).stat().st_size,
        "qnn_sdk_version": attributes["ep_sdk_version"].decode(),
    }


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

        def run(load: Callable[[str], ort.InferenceSession]) -> tuple[np.ndarray, np.ndarray]:
            decoder = OnnxDecoder(spec, embedding, readers)
            prefill = decoder.prefill(load(spec.prefill.file), prompt)  # one session in memory at a time
            loaded = load(spec.decode.file)
            return prefill, np.stack([decoder.decode(loaded, token) for token in rest])

        expected = run(lambda file: cpu_session(exported / file))
        found = run(lambda file: session(compiled / context_files(Path(file).stem)[0], soc_model, level))
    metrics: dict[str, Any] = {"simulator_seconds": round(time.monotonic() - started, 2)}
    for name, logits, reference in zip(("prefill", "decode"), found, expected, strict=True):
        metrics |= {f"simulator_{name}_{key}": value for key, value in agreement(logits, reference).items()}
    return metrics


def agreement(found: np.ndarray, expected: np.ndarray) -> dict[str, float | int]:
    """How well logits ``[N, V]`` follow the expected ones."""
    wide, reference = found.astype(np.float64), expected.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=-1) * np.linalg.norm(reference, axis=-1)
    cosine = (wide * reference).sum(axis=-1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    return {
        "tokens": len(found),
        "min_cosine": float(cosine.min()),
        "max_abs_error": float(np.abs(wide - reference).max()),
        "argmax_agreement": float((wide.argmax(axis=-1) == reference.argmax(axis=-1)).mean()),
    }


def _peak_rss_bytes() -> int:
    """Peak resident set of this process alone (``ru_maxrss`` would include the parent's before exec)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no VmHWM")


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
    jobs.choices["compile"].add_argument("--model", type=Path, required=True)
    jobs.choices["simulate"].add_argument("--exported", type=Path, required=True)
    jobs.choices["simulate"].add_argument("--roms", type=Path, nargs="*", required=True)
    jobs.choices["simulate"].add_argument("--steps", type=int, required=True)
    jobs.choices["simulate"].add_argument("--ids", type=int, nargs="+", required=True)
    given = parser.parse_args(arguments)
    ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
    try:
        if given.job == "compile":
            result = compile_graph(given.model, given.out, given.soc_model, given.optimization_level)
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
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_json(given.result, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
