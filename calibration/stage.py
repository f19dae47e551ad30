"""Calibrate: the float graphs become graphs of one precision, with the accuracy known.

Real text runs through the float graphs on ONNX Runtime; the activations' ranges, the weights, and
the whole of each ROM file decide the quantization (:mod:`calibration.samples`,
:mod:`calibration.ranges`, :mod:`calibration.table`); each unit's own loss is measured, and the most
sensitive ones may be kept finer (:mod:`calibration.sensitivity`). The graphs are written
(:mod:`calibration.build`) and must pass the accuracy gate on held-out text (:mod:`calibration.gate`)
before the stage counts as done.

The output directory has the files of `meki-edge export`, under the same names and roles, and stands
in its place: graphs, weights, ``graph_spec.json``, embedding, tokenizer. To these come the ROM files
that hold the graphs' own integers, ``*.encodings`` (a graph each, in AIMET's form), the report, and
``ranges.npz`` and ``reference.npz``, from which another precision can be made without running the
float graphs again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from calibration import encodings, gate, report, sensitivity
from calibration.build import Plan, fix_ranges, unit_bytes, weight_sizes, write_graphs
from calibration.config import CalibrateConfig, check, fitted
from calibration.gate import Accuracy, Limit, Scores
from calibration.graphs import FloatGraphs
from calibration.inputs import RANGES_FILE, REFERENCE_FILE, STAGE, check_checkpoint, check_float, read_spec, reusable
from calibration.ranges import Observations, Ranges
from calibration.samples import ADVISED_GATE_TOKENS, ADVISED_SAMPLES, Host, collect, gate_windows, training_windows
from calibration.sensitivity import Chain, Choice, Loss
from calibration.table import observe_rows, write_static
from export.inputs import open_directory, open_tokens
from export.onnx_decoder import cpu_sessions
from meki_edge import console, graph_spec
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import write_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.manifest import Manifest, StageOutput
from meki_edge.rom.reader import RomReader
from meki_edge.tokens import TokenShards

LIMITS = ("max_perplexity_increase", "min_top1_agreement")
"""Options that judge what is made and do not change it: a stopped run may go on with others."""
CARRIED_METRICS = ("validation_loss", "validation_tokens", "ram_parameters")


def calibrate(
    exported: Path,
    checkpoint: Path,
    tokens: Path,
    out: Path,
    config: CalibrateConfig,
    *,
    ranges_from: Path | None = None,
    force: bool = False,
) -> Manifest:
    """Quantize the graphs of ``exported``; see the module's docstring.

    An interrupted run goes on where it stopped. A run that failed the gate leaves its report in the
    unfinished directory, and passes at once when it is run again with limits that it meets.

    Args:
        checkpoint: the directory that was exported; its ROM files are read.
        tokens: a tokens directory with the model's tokenizer: training text is observed, validation
            text decides the gate.
        ranges_from: another output of this stage (it need not be finished), of the same export and
            text, whose observations are used instead of running the float graphs again.

    Raises:
        UserError: options or inputs that do not fit, or a gate that is not passed.
    """
    check(config)
    source = open_directory(exported, ("export",))
    shards = open_tokens(tokens, source, exported)
    check_checkpoint(source, checkpoint, exported)
    spec = read_spec(exported)
    check_float(spec, exported)
    config = fitted(config, spec.context_length)
    _check_text(shards, config)
    inputs = {"export": exported, "checkpoint": checkpoint, "tokens": tokens}
    seen = reusable(ranges_from, inputs, config) if ranges_from is not None else {}
    output = StageOutput(
        out,
        stage=STAGE,
        config={name: value for name, value in to_dict(config).items() if name not in LIMITS},
        inputs=inputs | seen,
        tools=("onnx", "onnx-ir", "onnxruntime", "numpy"),
        force=force,
    )
    if output.complete is not None:
        gate.require(_limits(_accuracy(output.complete.metrics), config), out / report.PAGE_FILE)
        return output.complete
    started = time.monotonic()
    with _Run(source, exported, checkpoint, shards, output.partial, spec, config) as run:
        metrics = run(seen)
    roles = _roles(source, output.partial, run.spec)
    metrics["calibrate_seconds"] = round(time.monotonic() - started, 2)
    carried = {name: source.metrics[name] for name in CARRIED_METRICS if name in source.metrics}
    return output.finish(roles=roles, metrics={**carried, **metrics})


class _Run:
    """One run of the stage; ``directory`` is its unfinished output."""

    spec: GraphSpec

    def __init__(
        self,
        source: Manifest,
        exported: Path,
        checkpoint: Path,
        shards: TokenShards,
        directory: Path,
        spec: GraphSpec,
        config: CalibrateConfig,
    ) -> None:
        self._source = source
        self._exported, self._checkpoint, self._shards = exported, checkpoint, shards
        self._directory, self._spec, self._config = directory, spec, config
        assert config.window_length is not None, "a fitted configuration"
        self._length, self._decode_steps = config.window_length, config.decode_steps
        self._gate_text = gate_windows(shards, config.gate_windows, self._length)
        self._notes: list[str] = []
        self._graphs = FloatGraphs(exported, spec)
        self._stack = ExitStack()

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, seen: Mapping[str, Path]) -> dict[str, Any]:
        """All of it, with the files ``seen`` of another calibration; the metrics."""
        config, chosen = self._config, self._config.chosen
        self._check_gate_text()
        host = self._host(self._spec, self._exported, self._checkpoint)
        for path in seen.values():
            if not (self._directory / path.name).is_file():
                shutil.copyfile(path, self._directory / path.name)
        ranges = None if chosen.is_float else self._ranges(host)
        plan = Plan(schemes=chosen.schemes(self._spec.num_hidden_layers), kv_dtype=config.kv, rows_dtype=config.rows)
        losses, choice = self._sensitivity(host, plan, ranges)
        raised = frozenset() if choice is None else choice.raised
        plan = replace(plan, schemes=chosen.schemes(self._spec.num_hidden_layers, raised))
        self.spec = self._build(plan, ranges)
        accuracy = gate.compare(
            self._score(self.spec, self._directory, chosen.name),
            self._reference(host),
            self._decode_steps,
        )
        limits = _limits(accuracy, config)
        self._note_limits(limits)
        sizes = weight_sizes(self._graphs)
        units = [
            {
                "unit": f"layer {unit}" if unit < self._spec.num_hidden_layers else "head",
                "scheme": str(plan.schemes[unit]),
                "bytes": unit_bytes(sizes[unit], plan.schemes[unit]),
            }
            for unit in sorted(sizes)
        ]
        details = {"kv_dtype": plan.kv_dtype, "rows_dtype": plan.rows_dtype, "config": to_dict(config)}
        left = {} if choice is None else {"divergence_left": choice.divergence}
        made = report.build(chosen.name, accuracy, limits, units, losses, self._notes, details | left)
        report.write(self._directory, made)
        report.show(made)
        gate.require(limits, self._directory / report.PAGE_FILE)
        return {
            "precision": chosen.name,
            "kv_dtype": plan.kv_dtype,
            "rows_dtype": plan.rows_dtype if self._spec.roms else None,
            "units_raised": len(raised),
            **left,
            "gate_windows": len(self._gate_text),
            "weights_bytes": sum(path.stat().st_size for path in self._directory.glob("*.data")),
            **asdict(accuracy),
            "perplexity_increase": accuracy.perplexity_increase,
        }

    def _note(self, text: str) -> None:
        """Say it now, and in the report."""
        console.info(text)
        self._notes.append(text)

    def _check_gate_text(self) -> None:
        count, asked, length = len(self._gate_text), self._config.gate_windows, self._length
        if count < asked:
            self._note(f"the validation text has {count} windows of {length} tokens: the gate sees those, not {asked}")
        if count * length < ADVISED_GATE_TOKENS:
            self._note(
                f"the gate sees {count * length:,} tokens, and fewer than {ADVISED_GATE_TOKENS:,} say little: "
                "give more --gate-windows or more validation text"
            )

    def _note_limits(self, limits: list[Limit]) -> None:
        for limit in limits:
            if not limit.is_clear:
                self._note(
                    f"the perplexity fell by {-limit.found:.1%}, and quantizing makes no model that much better: the "
                    "gate's text is too little, or not of the kind that the model was trained on"
                )

    def _ranges(self, host: Host) -> Ranges:
        config, histogram = self._config, self._config.method != "minmax"
        if config.samples < ADVISED_SAMPLES:
            console.info(f"{config.samples} samples: fewer than {ADVISED_SAMPLES} were seen to clip logits")
        text = training_windows(self._shards, config.samples, self._length)
        found = self._directory / RANGES_FILE
        observations = collect(self._graphs, host, text, self._decode_steps, found, histogram=histogram)
        if histogram and not observations.histogram:
            raise UserError(
                f"the ranges were collected without the histograms that the method {config.method} needs",
                where=found,
                fix="leave --ranges-from out, or collect them with --method percentile or mse",
            )
        self._observe_files(host, observations)
        ranges = observations.ranges(self._graphs.groups, config.method, config.percentile)
        fix_ranges(ranges, self._graphs)
        return ranges

    def _observe_files(self, host: Host, observations: Observations) -> None:
        """The embedding's and the rows' range is that of every token, not of those in the text."""
        prefill = self._spec.prefill
        _, structure = self._graphs.load(prefill.parts[0])
        (embeds,) = prefill.by_role("input_embeds")
        observe_rows(host.embedding, structure.keys[embeds.name], observations)
        for tensor, reader in zip(prefill.by_role("memory_rows"), host.roms, strict=True):
            observe_rows(reader, f"input {tensor.name}", observations)

    def _sensitivity(self, host: Host, plan: Plan, ranges: Ranges | None) -> tuple[list[Loss], Choice | None]:
        """Each unit's loss in the plan's scheme, and which units to raise, if any may be."""
        config, chosen, num_layers = self._config, self._config.chosen, self._spec.num_hidden_layers
        if not config.sensitivity:
            return [], None
        graph = self._spec.prefill
        (ids,) = training_windows(self._shards, 1, min(2 * graph.num_tokens, self._spec.context_length))
        plans = {"own": plan}
        if config.is_mixed:
            plans["finer"] = replace(plan, schemes=chosen.schemes(num_layers, frozenset(range(num_layers + 1))))
        chain = Chain(self._graphs, graph)
        losses = sensitivity.measure(chain, host, graph, ids, plans, ranges, self._directory)
        count = num_layers + 1
        if not config.is_mixed:
            return losses, None
        sizes = weight_sizes(self._graphs)
        choice = sensitivity.choose(
            {loss.unit: loss.divergence for loss in losses[:count]},
            {loss.unit: loss.divergence for loss in losses[count:]},
            {
                unit: unit_bytes(shapes, plans["finer"].schemes[unit]) - unit_bytes(shapes, plan.schemes[unit])
                for unit, shapes in sizes.items()
            },
            budget_bytes=config.budget_bytes,
            max_divergence=config.max_divergence,
        )
        if config.max_divergence is not None and choice.divergence > config.max_divergence:
            why = "all that gains by it is raised already" if choice.is_best else "the budget is spent"
            found, wanted = f"{choice.divergence:.3g} nats", f"wanted {config.max_divergence:g}"
            self._note(f"mixed precision: the units' losses still sum to {found}, {wanted} ({why})")
        return losses[:count], choice

    def _build(self, plan: Plan, ranges: Ranges | None) -> GraphSpec:
        """Write all files but the report; the spec comes last, so its presence means that they are there."""
        directory, finished = self._directory, self._directory / graph_spec.FILE_NAME
        if finished.is_file():
            return read_spec(directory)
        spec = write_graphs(directory, self._graphs, plan, ranges)
        for role in ("embedding", "tokenizer"):
            path = self._source.file(self._exported, role)
            shutil.copyfile(path, directory / path.name)
        if plan.rows_dtype != "float32":
            for tensor, rom in zip(spec.prefill.by_role("memory_rows"), spec.roms, strict=True):
                assert tensor.quantization is not None
                write_static(self._checkpoint / rom.file, directory / rom.file, tensor.dtype, tensor.quantization)
        write_json(finished, to_dict(spec))
        return spec

    def _reference(self, host: Host) -> Scores:
        """The float graphs' scores of the gate's text."""
        found = self._directory / REFERENCE_FILE
        return self._scored(host, self._spec, self._exported, found, "score float")

    def _score(self, spec: GraphSpec, directory: Path, name: str) -> Scores:
        roms = directory if all((directory / rom.file).is_file() for rom in spec.roms) else self._checkpoint
        host = self._host(spec, directory, roms)
        return self._scored(host, spec, directory, directory / "quantized.npz", f"score {name}")

    def _scored(self, host: Host, spec: GraphSpec, directory: Path, found: Path, description: str) -> Scores:
        text = self._gate_text
        if (scores := gate.finished(found, len(text))) is not None:  # do not load gigabytes for nothing
            return scores
        prefill = cpu_sessions(directory, spec.prefill)
        decode = cpu_sessions(directory, spec.decode, prepack=False)
        return gate.score(host, prefill, decode, text, self._decode_steps, found, description)

    def _host(self, spec: GraphSpec, directory: Path, roms: Path) -> Host:
        open_reader = lambda path: self._stack.enter_context(RomReader(path))
        return Host(
            spec=spec,
            embedding=open_reader(directory / spec.embedding.file),
            roms=[open_reader(roms / rom.file) for rom in spec.roms],
        )


def _check_text(shards: TokenShards, config: CalibrateConfig) -> None:
    """Raise :class:`UserError` for text that is too short, before anything is written."""
    assert config.window_length is not None
    gate_windows(shards, config.gate_windows, config.window_length)
    if not config.chosen.is_float:
        training_windows(shards, config.samples, config.window_length)


def _roles(source: Manifest, directory: Path, spec: GraphSpec) -> dict[str, str]:
    """Every file's role: as in the export, and what came to it."""
    roles = {name: entry.role for name, entry in source.files.items()}
    for graph in spec.graphs.values():
        for part in graph.parts:
            roles[encodings.file_name(part.file)] = f"{Path(part.file).stem}_encodings"
    for index, rom in enumerate(spec.roms):
        if (directory / rom.file).is_file():
            roles[rom.file] = "rom" if index == 0 else f"rom_{index}"
    roles |= {report.JSON_FILE: "calibration_report", report.PAGE_FILE: "calibration_page"}
    roles[REFERENCE_FILE] = "reference"
    if (directory / RANGES_FILE).is_file():
        roles[RANGES_FILE] = "ranges"
    return roles


def _limits(accuracy: Accuracy, config: CalibrateConfig) -> list[Limit]:
    return gate.limits(
        accuracy,
        max_perplexity_increase=config.max_perplexity_increase,
        min_top1_agreement=config.min_top1_agreement,
    )


def _accuracy(metrics: Mapping[str, Any]) -> Accuracy:
    return Accuracy(**{field.name: metrics[field.name] for field in fields(Accuracy)})
