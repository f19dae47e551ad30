"""Compile: the exported graphs become QNN context binaries for one chip's NPU, on this machine.

The `onnxruntime-qnn` wheel prepares real binaries offline and carries a simulator of the NPU. Each
graph is compiled (fp16, unshared weights) in a process of its own, then the simulator runs the
binaries on validation text and its logits are compared with ONNX Runtime's on the CPU. That says
that the binary computes the model; it says nothing of a phone's speed.

Output: ``prefill_ctx.onnx`` with ``prefill_qnn.bin``, the same for decode, and ``compile.log``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.inputs import open_directory, open_tokens
from export.targets import Chip, chip
from meki_edge import console, graph_spec, manifest
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.manifest import Manifest, StageOutput
from meki_edge.tokens import TokenShards

STAGE = "compile"
LOG = "compile.log"
LOG_LINES = 5  # of the log's end, quoted in an error
PRECISION = "fp16"
MIN_COSINE = 0.99
"""What a sound fp16 binary exceeds by far (0.9999 and more); a miscompiled one is near 0."""
DEVICE_LIMIT_BYTES = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """What to compile for."""

    chipset: str = "sm8750"
    """A chip of :mod:`export.targets`, by SoC or marketing name."""

    optimization_level: int = 3
    """QNN's graph finalization effort, 1 to 3: slower compilation, faster graph."""

    verify_steps: int = 4
    """Decode steps in the simulator, after one prefill chunk; 0 leaves the simulator out (it is slow)."""


def qnn_available() -> bool:
    """Whether the `onnxruntime-qnn` wheel is installed (it exists for x86-64 Linux and Windows only)."""
    return importlib.util.find_spec("onnxruntime_qnn") is not None


def compile_local(
    exported: Path, checkpoint: Path, tokens: Path, out: Path, config: CompileConfig, *, force: bool = False
) -> Manifest:
    """Compile both graphs of ``exported`` and check them in the simulator.

    A graph that an interrupted run finished is not compiled again.

    Args:
        checkpoint: the directory that was exported; its ROM files feed the check.
        tokens: a tokens directory with the model's tokenizer; its validation split feeds the check.

    Raises:
        UserError: no compiler on this platform, an unknown chip, inputs that do not belong
            together, or a compilation or check that failed (``compile.log`` stays).
    """
    if not qnn_available():
        raise UserError(
            "onnxruntime-qnn is not installed: there is no offline NPU compiler for this platform",
            where="onnxruntime-qnn (x86-64 Linux or Windows)",
            fix="compile on such a machine, or go on without NPU binaries",
        )
    target = chip(config.chipset)
    _check_config(config)
    found = open_directory(exported, ("export",))
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
    jobs = _Jobs(output.partial, target, config.optimization_level)
    metrics: dict[str, Any] = {
        "chipset": target.soc,
        "chip": target.name,
        "hexagon_arch": target.arch,
        "precision": PRECISION,
    }
    names = [Path(graph.file).stem for graph in (spec.decode, spec.prefill)]
    with console.progress() as bar:
        task = bar.add_task(f"compile for {target.soc}", total=len(names) + (config.verify_steps > 0))
        for name in names:
            result = jobs.compile(exported / f"{name}.onnx", name)
            metrics["qnn_sdk_version"] = result.pop("qnn_sdk_version")
            metrics |= {f"{name}_{key}": value for key, value in result.items()}
            bar.advance(task)
        if config.verify_steps:
            bar.update(task, description="NPU simulator")
            metrics |= jobs.simulate(exported, checkpoint, spec, shards, config.verify_steps)
            bar.advance(task)
    for name in names:
        _report(name, metrics)
    roles = {LOG: "compile_log"}
    for name in names:
        roles |= {f"{name}_ctx.onnx": f"{name}_context", f"{name}_qnn.bin": f"{name}_binary"}
    return output.finish(roles=roles, metrics=metrics)


class _Jobs:
    """The worker processes of one compilation; results and log lie in ``directory``."""

    def __init__(self, directory: Path, target: Chip, optimization_level: int) -> None:
        self._directory = directory
        self._target = target
        self._options = [f"--soc-model={target.soc_model}", f"--optimization-level={optimization_level}"]

    def compile(self, model: Path, name: str) -> dict[str, Any]:
        """Compile one graph, unless an earlier run already did."""
        return self._run("compile", f"compiling {model.name} for {self._target.soc}", name, [f"--model={model}"])

    def simulate(
        self, exported: Path, checkpoint: Path, spec: GraphSpec, shards: TokenShards, steps: int
    ) -> dict[str, Any]:
        """Compare the simulator with ONNX Runtime; a binary that computes something else is an error."""
        prompt = min(spec.prefill.num_tokens, spec.context_length - steps)
        ids = shards.validation_windows(1, prompt + steps)[0]
        arguments = [f"--exported={exported}", f"--steps={steps}", "--ids", *map(str, ids)]
        arguments += ["--roms", *(str(checkpoint / rom.file) for rom in spec.roms)]
        metrics = self._run("simulate", "the NPU simulator's check", "simulator", arguments)
        worst = min(metrics["simulator_prefill_min_cosine"], metrics["simulator_decode_min_cosine"])
        if not worst >= MIN_COSINE:  # a NaN must not pass
            raise UserError(
                f"the NPU simulator's logits do not follow ONNX Runtime's: cosine {worst:.4f}, at least "
                f"{MIN_COSINE} is expected of {PRECISION}",
                where=self._directory / LOG,
                fix="report this with the model's config.json: the compiler miscompiled the graph",
            )
        return metrics

    def _run(self, job: str, doing: str, name: str, arguments: list[str]) -> dict[str, Any]:
        result, log = self._directory / f"{name}.json", self._directory / LOG
        if not result.is_file():  # the worker writes it last
            command = [sys.executable, "-m", "export.qnn_worker", job, f"--result={result}", f"--out={self._directory}"]
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"== {doing}\n")
                file.flush()
                done = subprocess.run([*command, *self._options, *arguments], stdout=file, stderr=subprocess.STDOUT)
            if done.returncode:
                raise UserError(
                    f"{doing} {_how_it_ended(done.returncode)}; the log ends with:\n{_tail(log)}",
                    where=log,
                    fix="read the log; a smaller --context-length or --prefill-tokens needs less memory",
                )
        return read_json(result)


def _how_it_ended(return_code: int) -> str:
    if return_code < 0:
        return f"crashed (signal {signal.Signals(-return_code).name})"
    return f"failed (exit status {return_code})"


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-LOG_LINES:])


def _report(name: str, metrics: dict[str, Any]) -> None:
    size = metrics[f"{name}_binary_bytes"]
    note = "; devices are said to refuse binaries over 2 GB" if size > DEVICE_LIMIT_BYTES else ""
    console.info(f"{name}: {size / 1e6:.1f} MB in {metrics[f'{name}_compile_seconds']:.1f} s{note}")
    if f"simulator_{name}_tokens" in metrics:
        console.info(
            f"  NPU simulator (not a phone), {metrics[f'simulator_{name}_tokens']} tokens against ONNX Runtime: "
            f"cosine ≥ {metrics[f'simulator_{name}_min_cosine']:.5f}, "
            f"max error {metrics[f'simulator_{name}_max_abs_error']:.3f}, "
            f"argmax agrees {metrics[f'simulator_{name}_argmax_agreement']:.0%}"
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


def _check_steps(config: CompileConfig, spec: GraphSpec, shards: TokenShards) -> None:
    """The simulator's check must fit the context and the validation text; known before compiling."""
    most = min(spec.context_length, len(shards.validation)) - spec.prefill.num_tokens
    if config.verify_steps > max(most, 0):
        raise UserError(
            f"{config.verify_steps} decode steps after a prefill chunk of {spec.prefill.num_tokens} tokens do not fit "
            f"the context of {spec.context_length} or the {len(shards.validation)} tokens of validation text",
            where="--verify-steps",
            fix=f"give {most} or fewer" if most > 0 else "give 0 (no simulator), or export with a longer context",
        )
