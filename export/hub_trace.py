"""Real text through the graphs, part by part: what a device is fed, and what it should give.

For each context, ONNX Runtime runs one prefill chunk and a few decode steps (fewer where no more fit)
on the CPU as a device would. The inputs of every part at every call become a dataset for the service,
its outputs what the device's are compared with. Only integers and floats of the graphs' own types
travel: nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from export.agreement import agreement
from export.hub_source import Arm, slug
from export.inputs import open_tokens
from export.onnx_decoder import OnnxDecoder, Session, cpu_sessions
from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import atomic_path
from meki_edge.graph_spec import Graph, GraphSpec, Quantization, TensorSpec
from meki_edge.rom.reader import RomReader

Samples = dict[str, list[np.ndarray]]
Key = tuple[str, str]  # arm, graph


def check(arms: Sequence[Arm], tokens: Path, steps: int) -> None:
    """What a trace needs, looked at before anything is sent.

    Raises:
        UserError: another tokenizer, too little text or context, or ROM files that are elsewhere.
    """
    for arm in arms:
        assert arm.spec is not None
        shards = open_tokens(tokens, arm.manifest, arm.directory)
        most = min(arm.spec.context_length, len(shards.validation)) - arm.spec.prefill.num_tokens
        if not 1 <= steps <= most:
            raise UserError(
                f"{steps} decode steps after a prefill chunk of {arm.spec.prefill.num_tokens} tokens do not fit the "
                f"context of {arm.spec.context_length} or the {len(shards.validation)} tokens of validation text",
                where="--infer-steps",
                fix=f"give 1 to {most}" if most > 0 else "export with a longer context, or give more text",
            )
        for rom in arm.spec.roms:
            if arm.rom(rom.file) is None:
                fix = "give the bundle that `meki-edge pack` made of it: it holds the ROM files"
                raise UserError(f"the rows of {rom.file} are not here", where=arm.directory, fix=fix)


def trace(
    arms: Sequence[Arm], tokens: Path | None, steps: int, directory: Path
) -> tuple[dict[Key, Samples], dict[Key, list[tuple[TensorSpec, list[np.ndarray]]]]]:
    """Run the arms on the validation text; kept in ``directory``, where a resumed run finds the same bytes.

    Returns:
        by arm and graph: the inputs, and the outputs with what they are.
    """
    samples: dict[Key, Samples] = {}
    expected: dict[Key, list[tuple[TensorSpec, list[np.ndarray]]]] = {}
    for arm in arms:
        assert arm.spec is not None and tokens is not None
        calls = _calls(arm.spec, steps)
        file = directory / f"{slug(arm.name)}.npz"
        if not file.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            with console.progress() as bar:
                task = bar.add_task(f"{arm.name} in ONNX Runtime", total=sum(calls.values()))
                ids = open_tokens(tokens, arm.manifest, arm.directory).validation_windows(
                    1, arm.spec.prefill.num_tokens + steps
                )[0]
                arrays = _run(arm, ids, lambda: bar.advance(task))
            with atomic_path(file) as temporary, open(temporary, "wb") as out:
                np.savez(out, **arrays)
        with np.load(file) as arrays:
            for unit in arm.units:
                assert unit.spec is not None
                key, count = (arm.name, unit.name), calls[unit.graph]
                inputs, outputs = unit.spec.inputs, unit.spec.outputs
                samples[key] = {tensor.name: _read(arrays, unit.name, "in", tensor, count) for tensor in inputs}
                expected[key] = [(tensor, _read(arrays, unit.name, "out", tensor, count)) for tensor in outputs]
    return samples, expected


def compare(
    found: Mapping[str, list[np.ndarray]], expected: list[tuple[TensorSpec, list[np.ndarray]]], what: str
) -> dict[str, Any]:
    """How well a device's outputs follow: ``logits`` (where the part has them), and ``others`` together.

    Raises:
        UserError: the service's outputs have other names or shapes.
    """
    result: dict[str, Any] = {}
    others: list[dict[str, Any]] = []
    for tensor, reference in expected:
        given = found.get(tensor.name, [])
        if len(given) != len(reference) or any(a.size != b.size for a, b in zip(given, reference, strict=False)):
            shapes = {name: [array.shape for array in arrays] for name, arrays in found.items()}
            raise UserError(
                f"the device's outputs are not the graph's: {tensor.name} is missing or has another size",
                where=what,
                fix=f"it returned {shapes}; report this with the job's id",
            )
        shaped = [array.reshape(other.shape) for array, other in zip(given, reference, strict=True)]
        if not all(np.isfinite(array).all() for array in shaped):
            raise UserError(
                f"the device computed no numbers (NaN or infinity) in {tensor.name}",
                where=what,
                fix="float16 may have overflowed: calibrate to w8a16 (`meki-edge hub profile` measures all the same)",
            )
        measured = agreement(*(_rows(tensor, side) for side in (shaped, reference)))
        if tensor.role == "logits":
            result["logits"] = measured
        else:
            others.append(measured)
    if others:
        result["others"] = {
            "min_cosine": min(measured["min_cosine"] for measured in others),
            "max_abs_error": max(measured["max_abs_error"] for measured in others),
        }
    return result


class _Recorder:
    """Stands before a session and keeps what it is fed and what it gives."""

    def __init__(self, session: Session, name: str, kept: dict[str, np.ndarray]) -> None:
        self._session, self._name, self._kept, self._calls = session, name, kept, 0

    def run(self, output_names: Any, input_feed: Any) -> Any:
        outputs = self._session.run(output_names, input_feed)
        for side, arrays in (("in", input_feed), ("out", dict(zip(output_names, outputs, strict=True)))):
            for name, array in arrays.items():
                self._kept[_slot(self._name, side, name, self._calls)] = np.array(array)
        self._calls += 1
        return outputs


def _run(arm: Arm, ids: np.ndarray, advance: Any) -> dict[str, np.ndarray]:
    spec: GraphSpec = arm.spec
    kept: dict[str, np.ndarray] = {}

    def recorders(graph: Graph) -> list[_Recorder]:
        sessions = cpu_sessions(arm.directory, graph)  # of one graph at a time in memory
        return [
            _Recorder(session, Path(part.file).stem, kept) for session, part in zip(sessions, graph.parts, strict=True)
        ]

    with ExitStack() as stack:
        embedding = stack.enter_context(RomReader(arm.directory / spec.embedding.file))
        paths = [arm.rom(rom.file) for rom in spec.roms]
        roms = [stack.enter_context(RomReader(path)) for path in paths if path is not None]
        chunk = spec.prefill.num_tokens
        for one in spec.contexts.values():
            decoder = OnnxDecoder(one, embedding, roms)
            decoder.prefill(recorders(one.prefill), ids[:chunk])
            advance()
            sessions = recorders(one.decode)
            for token in ids[chunk : one.context_length]:
                decoder.decode(sessions, int(token))
                advance()
    return kept


def _calls(spec: GraphSpec, steps: int) -> dict[str, int]:
    """How often each graph runs: prefill once, decode ``steps`` times or until its context is full."""
    calls = {}
    for suffix, one in spec.contexts.items():
        calls |= {f"prefill{suffix}": 1, f"decode{suffix}": min(steps, one.context_length - one.prefill.num_tokens)}
    return calls


def _slot(graph: str, side: str, tensor: str, call: int) -> str:
    return f"{graph}|{side}|{tensor}|{call}"


def _read(arrays: Mapping[str, np.ndarray], graph: str, side: str, tensor: TensorSpec, calls: int) -> list[np.ndarray]:
    return [arrays[_slot(graph, side, tensor.name, call)] for call in range(calls)]


def _rows(tensor: TensorSpec, arrays: list[np.ndarray]) -> np.ndarray:
    """Real values of all calls, float64 ``[N, W]``; the service gives integers as they are, or already as reals."""
    rows = np.concatenate([array.reshape(-1, array.shape[-1]) for array in arrays])
    quantization: Quantization | None = tensor.quantization
    if quantization is None or rows.dtype.kind == "f":
        return rows.astype(np.float64)
    return (rows.astype(np.float64) - quantization.zero_point) * quantization.scale
