"""Which layer loses what: one unit quantized at a time, all others in float, measured at the logits.

The float graph is cut at the residual stream into its units. What enters each unit in float is
recorded once; then a unit is run quantized from there, and the float units behind it go on to the
logits. So measuring all units costs about half as many forward passes as there are units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from calibration.build import Plan
from calibration.graphs import FloatGraphs, session
from calibration.half import to_half
from calibration.precision import Scheme
from calibration.qdq import Quantizer
from calibration.ranges import Ranges
from calibration.samples import Host
from calibration.structure import SHARED, Structure
from calibration.weights import WeightFile
from meki_edge import console
from meki_edge.config import from_dict
from meki_edge.files import read_json, write_json
from meki_edge.graph_spec import Graph, Part


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One unit's loss in ``scheme``.

    Mean divergence KL(float ‖ quantized) of the next-token distributions (nats), mean squared error
    of the logits relative to their variance, and how often the likeliest token is another.
    """

    unit: int
    scheme: str
    divergence: float
    relative_mse: float
    top1_changed: float


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """A unit cut out of a part: what it takes (its stream first) and what it gives (its stream first)."""

    number: int
    part: Part
    takes: tuple[str, ...]
    gives: tuple[str, ...]


class Chain:
    """The units of one graph as sessions of their own; ``parts`` are what an :class:`OnnxDecoder` runs.

    A tensor's name means something in its own part only: each part is traced alone, and a name such as
    ``add_5`` comes again in the next. So what is kept between calls is kept by unit.
    """

    def __init__(self, graphs: FloatGraphs, graph: Graph) -> None:
        self._graphs, self._graph = graphs, graph
        self.units = [unit for part in graph.parts for unit in _cut(graphs, part)]
        self._sessions = {unit.number: self._open(unit) for unit in self.units}
        self._taken: dict[int, dict[str, np.ndarray]] = {}  # by each unit, in the last call
        self.parts = [_ChainPart(self, part) for part in graph.parts]

    def run_part(self, part: Part, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One part of a call: what it was fed and what its units give, by name."""
        known = dict(feeds)
        for unit in self.units:
            if unit.part is part:
                self._taken[unit.number] = {name: known[name] for name in unit.takes}
                known |= self._run(unit, self._taken[unit.number])
        return known

    def logits_with(self, number: int, other: Mapping[str, np.ndarray]) -> np.ndarray:
        """The logits ``[T, V]`` of the last call, had unit ``number`` given ``other`` instead."""
        given = other  # by the unit before: its stream is all that reaches the next one
        for unit in self.units:
            if unit.number > number:
                taken = self._taken[unit.number]
                given = self._run(unit, {name: given.get(name, array) for name, array in taken.items()})
        return given[self._graph.by_role("logits")[0].name][0]

    def quantized(self, number: int, plan: Plan, ranges: Ranges | None, scratch: Path) -> dict[str, np.ndarray]:
        """What unit ``number`` gives in the plan's scheme, from what it took in the last call."""
        (unit,) = (unit for unit in self.units if unit.number == number)
        model, structure = self._extract(unit)
        with WeightFile(scratch / "unit.data", lambda num_bytes: None) as file:
            if ranges is None:
                to_half(model, structure, schemes=plan.schemes, typed=(), weights=file)
            else:
                Quantizer(
                    model,
                    structure,
                    ranges=ranges,
                    schemes=plan.schemes,
                    typed={},
                    cache=plan.cache(unit.part),
                    weights=file,
                ).run()
        made = session(model, scratch, prepack=False)
        results = made.run(list(unit.gives), self._taken[number])
        (scratch / "unit.data").unlink()
        return dict(zip(unit.gives, results, strict=True))

    def _open(self, unit: _Unit) -> object:
        return session(self._extract(unit)[0], self._graphs.directory, prepack=False)

    def _extract(self, unit: _Unit) -> tuple[ir.Model, Structure]:
        model, structure = self._graphs.load(unit.part)
        graph = ir.convenience.extract(model.graph, unit.takes, unit.gives)
        return ir.Model(graph, ir_version=model.ir_version), structure

    def _run(self, unit: _Unit, taken: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = self._sessions[unit.number].run(list(unit.gives), taken)
        return dict(zip(unit.gives, results, strict=True))


class _ChainPart:
    """The session of one part of a chain's graph."""

    def __init__(self, chain: Chain, part: Part) -> None:
        self._chain, self._part = chain, part

    def run(self, output_names: Sequence[str], input_feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """As ``InferenceSession.run``."""
        known = self._chain.run_part(self._part, input_feed)
        return [known[name] for name in output_names]


def measure(
    chain: Chain,
    host: Host,
    graph: Graph,
    ids: np.ndarray,
    plans: Mapping[str, Plan],
    ranges: Ranges | None,
    scratch: Path,
) -> list[Loss]:
    """The loss of every unit in the schemes of each of ``plans``; resumes from ``scratch``.

    Args:
        ids: text; its last chunk of ``graph`` is measured, after a cache of those before.
        plans: by what they are called in the file of finished measurements.
    """
    found = scratch / "sensitivity.json"
    done = {name: from_dict(Loss, loss, found) for name, loss in (read_json(found) if found.is_file() else {}).items()}
    wanted = [(f"{name} {unit.number}", plan, unit.number) for name, plan in plans.items() for unit in chain.units]
    if all(name in done for name, _, _ in wanted):
        return [done[name] for name, _, _ in wanted]
    decoder = host.decoder()
    last = max((len(ids) - 1) // graph.num_tokens * graph.num_tokens, 0)
    with console.progress() as bar:
        task = bar.add_task("sensitivity (units)", total=len(wanted), completed=len(done))
        if last:
            decoder.prefill(chain.parts, ids[:last])
        count = len(ids) - last
        reference = decoder.run(chain.parts, graph, ids[last:])
        for name, plan, number in wanted:
            if name not in done:
                logits = chain.logits_with(number, chain.quantized(number, plan, ranges, scratch))[:count]
                done[name] = _loss(number, plan.schemes[number], logits, reference)
                write_json(found, {key: asdict(loss) for key, loss in done.items()})
                bar.advance(task)
    return [done[name] for name, _, _ in wanted]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The units to raise; ``divergence`` is what the losses of all then sum to (nats).

    ``is_best``: no unit that a finer scheme helps is left without it.
    """

    raised: frozenset[int]
    divergence: float
    is_best: bool


def choose(
    losses: Mapping[int, float],
    finer: Mapping[int, float],
    extra_bytes: Mapping[int, int],
    *,
    budget_bytes: int | None,
    max_divergence: float | None,
) -> Choice:
    """Which units to raise to the finer scheme: those that save most divergence a byte come first.

    Stops when the units' divergences sum to ``max_divergence`` or less, and raises none that would
    take more than ``budget_bytes`` more in all. Units that lose nothing are never raised.
    """
    saved = {unit: losses[unit] - finer[unit] for unit in losses}
    order = sorted(saved, key=lambda unit: saved[unit] / max(extra_bytes[unit], 1), reverse=True)
    raised: set[int] = set()
    spent = 0

    def left() -> float:
        return sum(finer[unit] if unit in raised else losses[unit] for unit in losses)

    for unit in order:
        if saved[unit] <= 0 or max_divergence is not None and left() <= max_divergence:
            break
        if budget_bytes is not None and spent + extra_bytes[unit] > budget_bytes:
            continue
        raised.add(unit)
        spent += extra_bytes[unit]
    return Choice(
        raised=frozenset(raised),
        divergence=left(),
        is_best=all(unit in raised or saved[unit] <= 0 for unit in saved),
    )


def _cut(graphs: FloatGraphs, part: Part) -> list[_Unit]:
    """The units of a part, in order. Between two of them exactly one tensor passes: the residual stream."""
    model, structure = graphs.load(part)
    units = {value: structure.unit(node) for node in model.graph for value in node.outputs}
    numbers = sorted({unit for unit in units.values() if unit != SHARED})
    inputs = [value.name for value in model.graph.inputs]
    streams: dict[int, str] = {}
    needs: dict[int, set[str]] = {number: set() for number in numbers}
    shared = _shared_inputs(model, units)
    for node in model.graph:
        number = structure.unit(node)
        if number == SHARED:
            continue
        for value in node.inputs:
            if value is None or value.is_initializer():
                continue
            if value.is_graph_input():
                needs[number].add(value.name)
            elif units[value] == SHARED:
                needs[number] |= shared[value]
            elif units[value] != number:
                assert streams.setdefault(number, value.name) == value.name, f"two tensors enter unit {number}"
    made = []
    for index, number in enumerate(numbers):
        ends = [value.name for value in model.graph.outputs if units.get(value) == number]
        following = numbers[index + 1 : index + 2]
        made.append(
            _Unit(
                number=number,
                part=part,
                takes=(*([streams[number]] if number in streams else []), *(n for n in inputs if n in needs[number])),
                gives=(*(streams[unit] for unit in following), *ends),
            )
        )
    return made


def _shared_inputs(model: ir.Model, units: Mapping[ir.Value, int]) -> dict[ir.Value, set[str]]:
    """The graph inputs behind each value that all units share."""
    found: dict[ir.Value, set[str]] = {}
    for node in model.graph:
        behind: set[str] = set()
        for value in node.inputs:
            if value is not None and value.is_graph_input():
                behind.add(value.name)
            elif value in found:
                behind |= found[value]
        found |= {value: behind for value in node.outputs if units[value] == SHARED}
    return found


def _loss(unit: int, scheme: Scheme, logits: np.ndarray, reference: np.ndarray) -> Loss:
    expected, found = _log_softmax(reference), _log_softmax(logits)
    difference = logits.astype(np.float64) - reference
    return Loss(
        unit=unit,
        scheme=str(scheme),
        divergence=float((np.exp(expected) * (expected - found)).sum(axis=-1).mean()),
        relative_mse=float((difference**2).mean() / max(reference.astype(np.float64).var(), 1e-30)),
        top1_changed=float((logits.argmax(axis=-1) != reference.argmax(axis=-1)).mean()),
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
