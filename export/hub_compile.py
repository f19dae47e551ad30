"""`meki-edge compile --via hub`: AI Hub's compiler in place of the local one, with the same output.

Each graph is compiled to a context binary in an ONNX wrapper (``precompiled_qnn_onnx``), downloaded,
and named as :mod:`export.qnn_local` names its own, so that pack and the harness see no difference.
Where the local compiler asks the simulator, this one asks the device itself.
"""

from __future__ import annotations

import dataclasses
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from export import hub_trace
from export.hub_flow import WRAPPED, Steps, Target
from export.hub_lint import require_clean
from export.hub_service import choose_device
from export.hub_source import open_arms
from export.hub_stage import LOGS, Access
from export.inputs import open_tokens
from meki_edge import manifest
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import BLOCK_BYTES, atomic_path
from meki_edge.graph_spec import part_suffix
from meki_edge.manifest import Manifest, StageOutput

STAGE = "compile"
MIN_COSINE = 0.9
"""Of logits that a device computes in float16 or quantized; a miscompiled graph's are near 0."""


@dataclass(frozen=True, kw_only=True)
class HubCompileConfig:
    """What to compile for."""

    device: str
    """A device of the service; the binaries are for its chip."""

    verify_steps: int = 4
    """Decode steps of real text on the device, after one prefill chunk; 0: no check."""

    qairt_version: str | None = None
    """Of the service's compiler; None: its default."""


def compile_hub(
    exported: Path,
    checkpoint: Path,
    tokens: Path,
    out: Path,
    config: HubCompileConfig,
    access: Access,
    *,
    force: bool = False,
) -> Manifest:
    """Compile the graphs of ``exported`` at AI Hub and check them on the device.

    Raises:
        UserError: inputs that do not belong together, an unknown device, a failed job, or logits that do
            not follow ONNX Runtime's.
    """
    (arm,) = open_arms([exported])
    if arm.spec is None or arm.manifest.stage == "pack":
        fix = "give the output of `meki-edge export` or `meki-edge calibrate`"
        raise UserError(f"this is the output of `meki-edge {arm.manifest.stage}`", where=exported, fix=fix)
    arm = dataclasses.replace(arm, row_directories=(exported, checkpoint))
    open_tokens(tokens, arm.manifest, exported)
    if manifest.digest(checkpoint) not in {entry.sha256 for entry in arm.manifest.inputs.values()}:
        raise UserError(
            "the graphs were exported from another checkpoint",
            where=checkpoint,
            fix=f"give the checkpoint that {exported} was exported from",
        )
    if config.verify_steps:
        hub_trace.check([arm], tokens, config.verify_steps)
    output = StageOutput(
        out,
        stage=STAGE,
        config={"via": "hub", **to_dict(config)},
        inputs={"export": exported, "checkpoint": checkpoint, "tokens": tokens},
        tools=("qai-hub",),
        force=force,
    )
    if output.complete is not None:
        return output.complete
    service, jobs = access.open(output.partial / LOGS)
    device = choose_device(jobs.patiently(service.devices), config.device)
    if device.chip is None:
        fix = "choose a device with a chip of `meki-edge compile --chipset`"
        raise UserError(f"the chip of {device.name} is not known", where="--device", fix=fix)
    require_clean(arm, [device])
    steps = Steps(service, access.ledger, jobs, runtime=WRAPPED, qairt_version=config.qairt_version)
    steps.upload([arm])
    targets = steps.make([arm], [device])
    metrics: dict[str, Any] = {
        "chipset": device.chip.soc,
        "chip": device.chip.name,
        "hexagon_arch": device.chip.arch,
        "precision": arm.manifest.metrics.get("precision", "fp16"),
        "device": device.name,
    }
    if config.verify_steps:
        samples, expected = hub_trace.trace([arm], tokens, config.verify_steps, output.partial / "trace")
        for key, entry in steps.run(targets, 0, samples)["inference"].items():
            found = hub_trace.compare(steps.result(entry, service.outputs), expected[key[1:]], entry.label)
            metrics |= _checked(key[2], found, entry.label)
    roles = {}
    for target in targets:
        suffix = part_suffix(target.unit.part, arm.num_parts)
        wrapper, binary = _fetch(steps, service, target, output.partial)
        roles |= {wrapper: f"{target.unit.graph}_context{suffix}", binary: f"{target.unit.graph}_binary{suffix}"}
        metrics[f"{target.unit.name}_binary_bytes"] = (output.partial / binary).stat().st_size
        metrics[f"{target.unit.name}_job"] = target.made_by.id if target.made_by else None
    return output.finish(roles=roles, metrics=metrics)


def _checked(graph: str, found: dict[str, Any], what: str) -> dict[str, Any]:
    measured = found.get("logits") or found["others"]
    if not measured["min_cosine"] >= MIN_COSINE:  # a NaN must not pass
        raise UserError(
            f"the device's outputs do not follow ONNX Runtime's: cosine {measured['min_cosine']:.4f}, at least "
            f"{MIN_COSINE} is expected",
            where=what,
            fix="report this with the model's config.json: the service miscompiled the graph",
        )
    return {f"device_{graph}_{name}": value for name, value in measured.items()}


def _fetch(steps: Steps, service: Any, target: Target, partial: Path) -> tuple[str, str]:
    """Download a wrapper and its binary, unless an interrupted run did."""
    wrapper, binary = f"{target.unit.name}_ctx.onnx", f"{target.unit.name}_qnn.bin"
    if not (partial / wrapper).is_file():  # written last
        assert target.made_by is not None
        work = partial / "download"
        work.mkdir(exist_ok=True)
        for stale in work.iterdir():
            stale.unlink()
        archive = steps.result(target.made_by, lambda job_id: service.download_model(job_id, work))
        unpack(archive, partial / wrapper, partial / binary)
    return wrapper, binary


def unpack(archive: Path, wrapper: Path, binary: Path) -> None:
    """Take the one ONNX file and the one binary out of a downloaded archive, under our own names.

    Raises:
        UserError: not such an archive.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            names = [name for name in file.namelist() if not name.endswith("/")]
            (model_name,) = [name for name in names if PurePosixPath(name).suffix == ".onnx"]
            (binary_name,) = [name for name in names if PurePosixPath(name).suffix == ".bin"]
            model = onnx.load_from_string(file.read(model_name))
            attributes = [a for node in model.graph.node for a in node.attribute if a.name == "ep_cache_context"]
            for attribute in attributes:
                attribute.s = binary.name.encode()
            if not attributes:
                raise ValueError("no EPContext")
            with atomic_path(binary) as temporary, file.open(binary_name) as source, open(temporary, "wb") as out:
                while block := source.read(BLOCK_BYTES):
                    out.write(block)
            with atomic_path(wrapper) as temporary:
                onnx.save(model, temporary)
    except (zipfile.BadZipFile, ValueError, DecodeError) as error:
        raise UserError(
            f"AI Hub's model is not an ONNX file with one NPU binary ({error})",
            where=archive.name,
            fix="run the same command again; report it if it stays so",
        ) from None
