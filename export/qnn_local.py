"""Compile: the exported graphs become QNN context binaries for one chip's NPU, on this machine.

The `onnxruntime-qnn` wheel prepares real binaries offline and carries a simulator of the NPU. Each
graph is compiled in a process of its own, then the simulator runs the binaries on validation text and
its logits are compared with ONNX Runtime's on the CPU. That says that the binary computes the model; it
says nothing of a phone's speed. The simulator cannot load a binary that two graphs share, so what it
checks are binaries of one graph each; then all graphs of a part (prefill and decode of every context)
are compiled once more, by the same compiler, into the one binary that ships.

Output: ``prefill_ctx.onnx`` and ``decode_ctx.onnx``, the ``model_qnn.bin`` that both name (one
``…_qnn.bin`` each without sharing), and ``compile.log``. Where the graphs are cut, every part has such
files, numbered.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.graph_view import load
from export.inputs import open_directory, open_tokens
from export.lint_files import LIMIT_BYTES, compiled_bytes
from export.qnn_jobs import LOG, Jobs
from export.targets import chip
from meki_edge import console, graph_spec, manifest
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec, part_suffix
from meki_edge.manifest import Manifest, StageOutput
from meki_edge.tokens import TokenShards

STAGE = "compile"
FLOAT_PRECISION = "fp16"  # what the NPU computes float32 graphs in
UNSHARED = "unshared"  # the folder of the binaries that only the simulator sees
MIN_COSINE = 0.99
"""What a sound binary exceeds by far (0.9999 and more); a miscompiled one is near 0."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """What to compile for."""

    chipset: str = "sm8750"
    """A chip of :mod:`export.targets`, by SoC or marketing name."""

    optimization_level: int = 3
    """QNN's graph finalization effort, 1 to 3: slower compilation, faster graph."""

    verify_steps: int = 4
    """Decode steps in the simulator, after one prefill chunk; 0 leaves the simulator out (it is slow)."""

    share_weights: bool = True
    """Whether all graphs of a part lie in one binary, with one copy of their weights."""


def qnn_available() -> bool:
    """Whether the `onnxruntime-qnn` wheel is installed (it exists for x86-64 Linux and Windows only)."""
    return importlib.util.find_spec("onnxruntime_qnn") is not None


def compile_local(
    exported: Path, checkpoint: Path, tokens: Path, out: Path, config: CompileConfig, *, force: bool = False
) -> Manifest:
    """Compile all graphs of ``exported`` and check them in the simulator.

    What an interrupted run finished is not compiled again.

    Args:
        exported: the float graphs of `meki-edge export`, or the quantized ones of `meki-edge calibrate`.
        checkpoint: the directory that was exported; its ROM files feed the check.
        tokens: a tokens directory with the model's tokenizer; its validation split feeds the check.

    Raises:
        UserError: no compiler on this platform, an unknown chip, inputs that do not belong
            together, a part that devices refuse, or a compilation or check that failed
            (``compile.log`` stays).
    """
    if not qnn_available():
        raise UserError(
            "onnxruntime-qnn is not installed: there is no offline NPU compiler for this platform",
            where="onnxruntime-qnn (x86-64 Linux or Windows)",
            fix="compile on such a machine, or go on without NPU binaries",
        )
    target = chip(config.chipset)
    _check_config(config)
    found = open_directory(exported, ("export", "calibrate"))
    shards = open_tokens(tokens, found, exported)
    if found.inputs["checkpoint"].sha256 != manifest.digest(checkpoint):
        raise UserError(
            "the graphs were exported from another checkpoint",
            where=checkpoint,
            fix=f"give the checkpoint that {exported} was exported from",
        )
    output = StageOutput(
        out,
        stage=STAGE,
        config=to_dict(dataclasses.replace(config, chipset=target.soc)),
        inputs={"export": exported, "checkpoint": checkpoint, "tokens": tokens},
        tools=("onnxruntime", "onnxruntime-qnn"),
        force=force,
    )
    if output.complete is not None:
        return output.complete
    spec_path = exported / graph_spec.FILE_NAME
    spec = GraphSpec.from_json(read_json(spec_path), spec_path)
    _check_steps(config, spec, shards)
    _check_sizes(exported, spec)
    found_roms = [exported / rom.file if rom.file in found.files else checkpoint / rom.file for rom in spec.roms]
    work = _Compilation(
        exported=exported,
        spec=spec,
        directory=output.partial,
        jobs=Jobs(output.partial, target, config.optimization_level),
        share=config.share_weights,
    )
    metrics: dict[str, Any] = {
        "chipset": target.soc,
        "chip": target.name,
        "hexagon_arch": target.arch,
        "precision": found.metrics.get("precision", FLOAT_PRECISION),
        "parts": work.num_parts,
    }
    checked = config.verify_steps > 0
    with console.progress() as bar:
        alone = work.graphs if checked or not work.share else ()
        total = checked + work.num_parts * (len(alone) + work.share)
        task = bar.add_task(f"compile for {target.soc}", total=total)
        for graph in alone:
            for index in range(work.num_parts):
                metrics |= work.compile_alone(graph, index)
                bar.advance(task)
        if checked:
            bar.update(task, description="NPU simulator")
            metrics |= work.simulate(found_roms, shards, config.verify_steps)
            bar.update(task, advance=1, description=f"compile for {target.soc}")
        for index in range(work.num_parts) if work.share else ():
            metrics |= work.compile_shared(index)
            bar.advance(task)
    work.report(metrics)
    shutil.rmtree(output.partial / UNSHARED, ignore_errors=True)
    return output.finish(roles=work.roles(), metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class _Compilation:
    """What becomes what in one run of the stage, in ``directory``."""

    exported: Path
    spec: GraphSpec
    directory: Path
    jobs: Jobs
    share: bool

    @property
    def num_parts(self) -> int:
        """Of each graph."""
        return len(self.spec.decode.parts)

    @property
    def graphs(self) -> list[str]:
        """By name, in the order in which they are compiled: of each context decode, then prefill."""
        return [f"{graph}{suffix}" for suffix in self.spec.contexts for graph in ("decode", "prefill")]

    def compile_alone(self, graph: str, index: int) -> dict[str, Any]:
        """One part of one graph; where binaries are shared, only for the simulator."""
        model = self._model(graph, index)
        if self.share:
            return _named(model.stem, self.jobs.compile([model], self.directory / UNSHARED, model.stem))
        return self._compile_shipped([model], model.stem)

    def compile_shared(self, index: int) -> dict[str, Any]:
        """A part of all graphs."""
        models = [self._model(graph, index) for graph in self.graphs]
        return self._compile_shipped(models, f"model{self._suffix(index)}")

    def _compile_shipped(self, models: list[Path], name: str) -> dict[str, Any]:
        """Into a binary that a device loads: its real size is known now."""
        result = self.jobs.compile(models, self.directory, name)
        if result["binary_bytes"] > LIMIT_BYTES:
            what = f"the binary takes {result['binary_bytes'] / 1e9:.2f} GB; devices are said to take 2 GB a binary"
            parts = self.num_parts * math.ceil(result["binary_bytes"] / LIMIT_BYTES)
            fix = f"export again with --parts {parts} or more, or quantize further with `meki-edge calibrate`"
            raise UserError(what, where=self.directory / f"{name}_qnn.bin", fix=fix)
        return _named(name, result)

    def simulate(self, roms: list[Path], shards: TokenShards, steps: int) -> dict[str, Any]:
        """Compare the simulator with ONNX Runtime; a binary that computes something else is an error."""
        shortest = min(context.context_length for context in self.spec.contexts.values())
        prompt = min(self.spec.prefill.num_tokens, shortest - steps)
        ids = shards.validation_windows(1, prompt + steps)[0].tolist()
        compiled = self.directory / UNSHARED if self.share else self.directory
        metrics = self.jobs.simulate(self.exported, compiled, roms, ids, steps)
        worst = min(metrics[f"simulator_{graph}_min_cosine"] for graph in self.graphs)
        if not worst >= MIN_COSINE:  # a NaN must not pass
            raise UserError(
                f"the NPU simulator's logits do not follow ONNX Runtime's: cosine {worst:.4f}, at least "
                f"{MIN_COSINE} is expected",
                where=self.jobs.log,
                fix="report this with the model's config.json: the compiler miscompiled the graph",
            )
        return metrics

    def roles(self) -> dict[str, str]:
        """Every file of the output with its role."""
        roles = {LOG: "compile_log"}
        for index in range(self.num_parts):
            suffix = self._suffix(index)
            for graph in self.spec.graphs:
                roles[f"{graph}{suffix}_ctx.onnx"] = f"{graph}_context{suffix}"
            for name in ("model",) if self.share else self.spec.graphs:
                roles[f"{name}{suffix}_qnn.bin"] = f"{name}_binary{suffix}"
        return roles

    def report(self, metrics: dict[str, Any]) -> None:
        """Say what was made and how well it computes."""
        for index in range(self.num_parts):
            for name in ("model",) if self.share else self.graphs:
                _report_binary(f"{name}{self._suffix(index)}", metrics)
        for graph in self.spec.graphs if "simulator_seconds" in metrics else ():
            _report_check(graph, metrics)

    def _model(self, graph: str, index: int) -> Path:
        return self.exported / self.spec.graphs[graph].parts[index].file

    def _suffix(self, index: int) -> str:
        return part_suffix(index, self.num_parts)


def _named(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """A compile's result as metrics."""
    return {key if key == "qnn_sdk_version" else f"{name}_{key}": value for key, value in result.items()}


def _report_binary(name: str, metrics: dict[str, Any]) -> None:
    size, seconds = metrics[f"{name}_binary_bytes"], metrics[f"{name}_compile_seconds"]
    console.info(f"{name}: {size / 1e6:.1f} MB in {seconds:.1f} s")


def _report_check(graph: str, metrics: dict[str, Any]) -> None:
    measured = {key: metrics[f"simulator_{graph}_{key}"] for key in ("tokens", "min_cosine", "max_abs_error")}
    console.info(
        f"{graph} in the NPU simulator (not a phone), {measured['tokens']} tokens against ONNX Runtime: "
        f"cosine ≥ {measured['min_cosine']:.5f}, max error {measured['max_abs_error']:.3f}, "
        f"argmax agrees {metrics[f'simulator_{graph}_argmax_agreement']:.0%}"
    )


def _check_config(config: CompileConfig) -> None:
    if config.optimization_level not in (1, 2, 3):
        raise UserError(
            f"optimization_level is {config.optimization_level}", where="--optimization-level", fix="use 1, 2 or 3"
        )
    if config.verify_steps < 0:
        raise UserError(
            f"verify_steps is {config.verify_steps}", where="--verify-steps", fix="give 0 (no simulator) or more"
        )


def _check_sizes(exported: Path, spec: GraphSpec) -> None:
    """Devices are said to refuse binaries over 2 GB; known before compiling."""
    for part in spec.decode.parts:
        size = compiled_bytes(load(exported / part.file))
        if size > LIMIT_BYTES:
            raise UserError(
                f"the graph and its compiled weights take {size / 1e9:.2f} GB; devices are said to take 2 GB a binary",
                where=exported / part.file,
                fix=f"export again with --parts {len(spec.decode.parts) * math.ceil(size / LIMIT_BYTES)} or more",
            )


def _check_steps(config: CompileConfig, spec: GraphSpec, shards: TokenShards) -> None:
    """The simulator's check must fit the context and the validation text; known before compiling."""
    shortest = min(context.context_length for context in spec.contexts.values())
    most = min(shortest, len(shards.validation)) - spec.prefill.num_tokens
    if config.verify_steps > max(most, 0):
        raise UserError(
            f"{config.verify_steps} decode steps after a prefill chunk of {spec.prefill.num_tokens} tokens do not fit "
            f"the context of {shortest} or the {len(shards.validation)} tokens of validation text",
            where="--verify-steps",
            fix=f"give {most} or fewer" if most > 0 else "give 0 (no simulator), or export with a longer context",
        )
