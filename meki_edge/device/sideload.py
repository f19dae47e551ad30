"""`meki-edge sideload` and `unload`: bundles, and what runs them, onto a phone and off it again.

On the phone lie, below the target folder: ``runtime/`` (harness and libraries), ``bundles/NAME/``, and
``runs/`` while something runs. All that can go wrong is checked first; :mod:`phone_folder` says how
files get there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meki_edge import console, manifest
from meki_edge.device import phone_checks, phone_facts, phone_folder, phone_runtime
from meki_edge.device.adb import Device, command
from meki_edge.device.bundle import STAGE, Bundle, open_bundle
from meki_edge.device.phone_folder import Folder, LocalFile, Plan
from meki_edge.errors import UserError
from meki_edge.files import sha256_file, write_json

NPU_PREFIX = "npu/"
MARKER = ".meki-edge"  # only a folder that has it is ever removed
FORBIDDEN = ":;,\n"  # they separate paths where the loaders look for libraries


@dataclass(frozen=True, kw_only=True)
class SideloadConfig:
    """Options of `meki-edge sideload`."""

    target: str = phone_facts.TARGET
    """The folder on the phone; programs must be allowed to run there."""
    runner: Path | None = None
    """The harness for the phone; by default the one that the Android build left."""
    npu: bool = True
    """Take the bundles' NPU binaries along, and the libraries that they need."""
    dry_run: bool = False
    """Check and compare only, change nothing."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where things lie on the phone."""

    target: str

    @property
    def runtime(self) -> str:
        return f"{self.target}/runtime"

    @property
    def runs(self) -> str:
        return f"{self.target}/runs"

    @property
    def bundles(self) -> str:
        return f"{self.target}/bundles"

    def bundle(self, name: str) -> str:
        return f"{self.bundles}/{name}"

    @property
    def environment(self) -> str:
        """Shell commands that make programs find our libraries before the vendor's."""
        # FastRPC reads ADSP_LIBRARY_PATH instead of its built-in list, so that list follows ours.
        hexagon = f"{self.runtime};/vendor/dsp/cdsp;/vendor/lib/rfsa/adsp;/system/lib/rfsa/adsp;/vendor/dsp;/dsp"
        return f"export {command(f'LD_LIBRARY_PATH={self.runtime}', f'ADSP_LIBRARY_PATH={hexagon}')}"


def layout(target: str) -> Layout:
    """The places below ``target``.

    Raises:
        UserError: not an absolute path, or one that a loader's list of paths cannot hold.
    """
    clean = target.rstrip("/")
    if not clean.startswith("/") or any(character in clean for character in FORBIDDEN) or ".." in clean.split("/"):
        fix = f"give an absolute path without : ; , and .. such as {phone_facts.TARGET}"
        raise UserError(f"{target!r} cannot be a target folder", where="--target", fix=fix)
    return Layout(target=clean)


def sideload(bundles: list[Path], device: Device, config: SideloadConfig) -> dict[str, Any]:
    """Bring ``bundles`` and the runtime onto ``device``.

    Returns:
        ``pushed_bytes``, ``pushed_files``, ``unchanged_bytes``, and what was found of the phone.

    Raises:
        UserError: a bundle is not whole, the phone cannot take or run it, or the connection ends.
    """
    places = layout(config.target)
    opened = _open(bundles)
    facts = phone_facts.read(device, places.target)
    phone_checks.require(phone_checks.platform(facts, places.target), device.serial)
    needs = {arm.name: need for arm in opened if config.npu and (need := phone_runtime.npu_needs(arm.metrics))}
    phone_checks.require(
        phone_checks.chip(facts, {name: need.chipset for name, need in needs.items()}), device.serial
    )
    with (
        phone_runtime.collect(list(needs.values()), config.runner) as runtime,
        _runtime_folder(device, places, runtime) as own,
    ):
        checks = [phone_checks.pages(facts, runtime.alignments), *_loader(device, facts, runtime)]
        phone_checks.require(checks, device.serial)
        folders = [own, *(_bundle_folder(places, arm, config.npu) for arm in opened)]
        plans = _plans(device, folders)
        needed = sum(todo.push_bytes - todo.freed_bytes for todo in plans)
        phone_checks.require([phone_checks.space(facts, max(0, needed))], device.serial)
        summary = _summary(facts, places, plans)
        if not config.dry_run:
            _push(device, places, plans)
    return summary


def unload(device: Device, target: str, names: list[str]) -> dict[str, Any]:
    """Remove the bundles ``names`` from ``device``, or everything that sideload brought if none is named.

    Raises:
        UserError: a bundle is not there, or the folder is not one that sideload made.
    """
    places = layout(target)
    if device.run(command("ls", f"{places.target}/{MARKER}")).status != 0:
        fix = "check --target; `meki-edge sideload` makes it"
        raise UserError("nothing was sideloaded to this folder", where=f"{device.serial}:{places.target}", fix=fix)
    there = sideloaded(device, places)
    for name in names:
        if name not in there:
            fix = f"the phone has: {', '.join(there) or 'none'}"
            where = f"{device.serial}:{places.bundles}"
            raise UserError(f"there is no bundle {name!r} on the phone", where=where, fix=fix)
    removed = [places.bundle(name) for name in names] or [places.bundles, places.runtime, places.runs]
    freed = sum(sum(phone_folder.listing(device, folder).values()) for folder in removed)
    # Manifests first: a removal that is cut short leaves nothing that looks whole.
    manifests = [f"{places.bundle(name)}/{manifest.FILE_NAME}" for name in names or there]
    script = [command("rm", "-f", *manifests)] if manifests else []
    script.append(command("rm", "-rf", *removed))
    if not names:
        script.append(command("rm", "-f", f"{places.target}/{MARKER}"))
        script.append(f"rmdir {command(places.target)} 2>/dev/null || true")
    done = device.run(" && ".join(script), timeout=600)
    if done.status != 0:
        fix = "check the folder on the phone"
        raise UserError(f"removing failed: {done.stderr.strip()}", where=device.serial, fix=fix)
    return {"removed": names or there, "freed_bytes": freed}


def sideloaded(device: Device, places: Layout) -> list[str]:
    """The bundles on the phone, whole or not."""
    return device.run(f"ls {command(places.bundles)} 2>/dev/null").stdout.split()


def require_sideloaded(device: Device, places: Layout, bundle: Path, *, npu: bool = False) -> str:
    """The folder on the phone of the bundle in the directory ``bundle``: this very one, whole.

    Args:
        npu: its NPU binaries must be there too, and QNN's libraries.

    Raises:
        UserError: it is not there, half-pushed, another one of that name, or the runtime is missing.
    """
    packed = manifest.load(bundle, stages=(STAGE,))
    title = packed.metrics["name"]
    remote = places.bundle(title)
    own_target = [] if places.target == phone_facts.TARGET else ["--target", places.target]
    fix = f"run `{command('meki-edge', 'sideload', str(bundle), '-s', device.serial, *own_target)}`"
    own = bundle / manifest.FILE_NAME
    there = phone_folder.listing(device, remote)
    if manifest.FILE_NAME not in there:
        what = "was only half pushed" if there else "is not on the phone"
        raise UserError(f"the bundle {title!r} {what}", where=f"{device.serial}:{remote}", fix=fix)
    if phone_folder.digest(device, f"{remote}/{manifest.FILE_NAME}", own.stat().st_size) != sha256_file(own):
        what = f"another bundle is on the phone under the name {title!r}"
        raise UserError(what, where=f"{device.serial}:{remote}", fix=fix)
    if npu and not any(name.startswith(NPU_PREFIX) for name in packed.files):
        raise UserError(
            f"the bundle {title!r} holds no NPU binaries",
            where=bundle,
            fix="run `meki-edge compile`, pack with --compiled, and sideload; or measure with --compute cpu",
        )
    wanted = {
        name: (entry.bytes, entry.sha256)
        for name, entry in packed.files.items()
        if npu or not name.startswith(NPU_PREFIX)
    }
    if name := _changed(device, remote, wanted):
        what = f"{name!r} of the bundle {title!r} was changed on the phone, or left out"
        raise UserError(what, where=f"{device.serial}:{remote}", fix=fix)
    runtime = _runtime_there(device, places).get("files", {})
    if not runtime or (npu and phone_runtime.QNN_LIBRARY not in runtime):
        what = "the harness, or a library of it, is not on the phone or was only half pushed"
        raise UserError(what, where=f"{device.serial}:{places.runtime}", fix=fix)
    if name := _changed(device, places.runtime, {name: (e["bytes"], e["sha256"]) for name, e in runtime.items()}):
        raise UserError(f"{name!r} was changed on the phone", where=f"{device.serial}:{places.runtime}", fix=fix)
    return remote


def _changed(device: Device, remote: str, files: dict[str, tuple[int, str]]) -> str | None:
    """The first of ``files`` (name → bytes, SHA-256) that is not so in a folder of the phone."""
    there = phone_folder.listing(device, remote)
    if sizes := next((name for name, (size, _) in files.items() if there.get(name) != size), None):
        return sizes
    with console.byte_progress("checking on the phone", sum(size for size, _ in files.values())) as advance:
        for name, (size, sha256) in files.items():
            if phone_folder.digest(device, f"{remote}/{name}", size) != sha256:
                return name
            advance(size)
    return None


def _open(bundles: list[Path]) -> list[Bundle]:
    opened = [open_bundle(directory) for directory in bundles]
    names = [arm.name for arm in opened]
    for name in names:
        if names.count(name) > 1:
            fix = "pack them with different --name"
            raise UserError(f"{names.count(name)} bundles are called {name!r}", where="sideload", fix=fix)
    return opened


def _loader(device: Device, facts: phone_facts.PhoneFacts, runtime: phone_runtime.Runtime) -> list[phone_checks.Check]:
    """The harness must be built for Android, not for another arm64 system (an emulator brings its own loader)."""
    name = runtime.interpreter
    if not name or facts.emulated or device.run(command("ls", name)).status == 0:
        return []
    found = f"it needs {name}, which the phone does not have"
    fix = "build it with the preset android-arm64 (android_runner/README.md)"
    return [phone_checks.Check(name="harness", status=phone_checks.FIX, found=found, fix=fix)]


def _bundle_folder(places: Layout, arm: Bundle, npu: bool) -> Folder:
    files = {
        name: LocalFile(path=arm.directory / name, bytes=entry.bytes, sha256=entry.sha256)
        for name, entry in manifest.load(arm.directory).files.items()
        if npu or not name.startswith(NPU_PREFIX)
    }
    return Folder(remote=places.bundle(arm.name), files=files, manifest=_local(arm.directory / manifest.FILE_NAME))


@contextmanager
def _runtime_folder(device: Device, places: Layout, runtime: phone_runtime.Runtime) -> Iterator[Folder]:
    """The runtime, with what other bundles brought of QNN's libraries, if that is of the same version."""
    files = {name: _local(path, executable=True) for name, path in runtime.files.items()}
    there = _runtime_there(device, places)
    versions = {**there.get("versions", {}), **runtime.versions}
    same_version = versions == there.get("versions")
    kept = {name: entry for name, entry in there.get("files", {}).items() if name not in files and same_version}
    with tempfile.TemporaryDirectory(prefix="meki-edge-") as directory:
        path = Path(directory) / phone_folder.MANIFEST
        listed = {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in files.items()}
        write_json(path, {"schema": 1, "files": {**kept, **listed}, "versions": versions})
        yield Folder(remote=places.runtime, files=files, manifest=_local(path), keep=frozenset(kept))


def _runtime_there(device: Device, places: Layout) -> dict[str, Any]:
    """The manifest of the runtime on the phone; empty if there is none, or a broken one."""
    text = device.run(f"cat {command(f'{places.runtime}/{phone_folder.MANIFEST}')} 2>/dev/null").stdout
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}
    files, versions = (found.get(key) if isinstance(found, dict) else None for key in ("files", "versions"))
    if not isinstance(files, dict) or not isinstance(versions, dict):
        return {}
    whole = all(isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in files.values())
    return found if whole else {}


def _local(path: Path, executable: bool = False) -> LocalFile:
    return LocalFile(path=path, bytes=path.stat().st_size, sha256=sha256_file(path), executable=executable)


def _plans(device: Device, folders: list[Folder]) -> list[Plan]:
    total = sum(file.bytes for folder in folders for file in (*folder.files.values(), folder.manifest))
    with console.byte_progress("comparing with the phone", total) as advance:
        return [phone_folder.plan(device, folder, advance) for folder in folders]


def _push(device: Device, places: Layout, plans: list[Plan]) -> None:
    total = sum(todo.push_bytes for todo in plans)
    if not total:
        return
    marker = f"{places.target}/{MARKER}"
    device.run(f"mkdir -p {command(places.target)} && : >{command(marker)}")
    with console.byte_progress(f"pushing to {device.serial}", total) as advance:
        for todo in plans:
            phone_folder.apply(device, todo, advance)


def _summary(facts: phone_facts.PhoneFacts, places: Layout, plans: list[Plan]) -> dict[str, Any]:
    changes = {
        todo.folder.remote.removeprefix(f"{places.target}/"): list(todo.push) for todo in plans
    }
    return {
        "phone": facts.title,
        "target": places.target,
        "pushed_files": sum(len(todo.push) for todo in plans),
        "pushed_bytes": sum(todo.push_bytes for todo in plans),
        "unchanged_bytes": sum(todo.kept_bytes for todo in plans),
        "removed_files": sum(len(todo.remove) for todo in plans),
        "changes": changes,
    }
