"""What a phone needs beside bundles: the harness, ONNX Runtime, and for NPU binaries Qualcomm's libraries.

The files come from where users have them: the harness as `cmake --preset android-arm64` leaves it;
ONNX Runtime from ``$ORT_HOME``; Qualcomm's from ``$QNN_SDK_ROOT``, else from ``$ORT_HOME`` too. Each of
these names directories or Maven packages (``.aar``), several separated by ``:``.
"""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from meki_edge.device import elf
from meki_edge.errors import UserError

RUNNER_VARIABLE = "MEKI_RUNNER_ANDROID"
BUILT_RUNNER = Path(__file__).parents[2] / "build/runner-android/meki-runner"
RUNNER, ORT_LIBRARY = "meki-runner", "libonnxruntime.so"
QNN_LIBRARY, QNN_PROVIDER = "libQnnHtp.so", "libonnxruntime_providers_qnn.so"
# Where packages keep a library: an unpacked AAR, QNN's SDK, ONNX Runtime's archive, its wheel.
FOLDERS = ("", "lib", "jni/arm64-v8a", "arm64-v8a", "lib/arm64-v8a", "lib/aarch64-android", "onnxruntime/capi")
QNN_VARIABLES = ("QNN_SDK_ROOT", "ORT_HOME")
HEXAGONS = ("v73", "v75", "v79", "v81")
_QNN_VERSION = re.compile(rb"v(\d+\.\d+\.\d+)\.\d{6,}")


@dataclass(frozen=True, kw_only=True)
class NpuNeeds:
    """What a bundle's NPU binary was made for and with."""

    chipset: str
    hexagon_arch: str
    qnn_version: str


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The files to push, by their name on the phone, with versions worth recording."""

    files: dict[str, Path]
    alignments: dict[str, int]
    interpreter: str
    """The loader that the harness names; empty for a static program."""
    versions: dict[str, str]


@contextmanager
def collect(needs: list[NpuNeeds], runner: Path | None = None) -> Iterator[Runtime]:
    """Find everything; what lies in packages is unpacked while the context lasts.

    Raises:
        UserError: a file is missing, made for another machine, or older than an NPU binary needs.
    """
    with sources() as places:
        files = {RUNNER: find_runner(runner), ORT_LIBRARY: find_ort(places)}
        versions: dict[str, str] = {}
        for need in needs:
            found = _qnn(places, need.hexagon_arch)
            versions["qnn"] = _require_version(found, need)
            files |= found
        facts = {name: elf.read(path) for name, path in files.items()}
        _require_machines(files, facts)
        yield Runtime(
            files=files,
            alignments={name: fact.alignment for name, fact in facts.items() if fact.machine == "arm64"},
            interpreter=facts[RUNNER].interpreter,
            versions=versions,
        )


def npu_needs(metrics: Mapping[str, object]) -> NpuNeeds | None:
    """What the metrics of a bundle say about its NPU binary; None if it has none."""
    npu = metrics.get("npu")
    if not isinstance(npu, dict):
        return None
    return NpuNeeds(
        chipset=str(npu.get("chipset") or ""),
        hexagon_arch=str(npu.get("hexagon_arch") or ""),
        qnn_version=str(npu.get("qnn_sdk_version") or ""),
    )


def qnn_version(library: Path) -> str:
    """The SDK version that a library of QNN carries, such as "2.51.0"; empty if it says none."""
    found = _QNN_VERSION.search(library.read_bytes())
    return found[1].decode() if found else ""


@contextmanager
def sources() -> Iterator[Sources]:
    """What the environment names, with a place to unpack to."""
    with tempfile.TemporaryDirectory(prefix="meki-edge-runtime-") as scratch:
        yield Sources(Path(scratch))


class Sources:
    """The directories and packages that environment variables name."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def find(self, variables: tuple[str, ...], pattern: str, folders: tuple[str, ...] = FOLDERS) -> Path | None:
        """The first file called ``pattern`` (a glob) in one of ``folders`` of what ``variables`` name."""
        for variable in variables:
            for text in filter(None, os.environ.get(variable, "").split(os.pathsep)):
                place = Path(text)
                if not place.exists():
                    raise UserError(f"{text} does not exist", where=f"${variable}", fix="correct or unset the variable")
                found = self._packed(place, pattern, folders) if place.is_file() else _in(place, pattern, folders)
                if found is not None:
                    return found
        return None

    def _packed(self, package: Path, pattern: str, folders: tuple[str, ...]) -> Path | None:
        try:
            with zipfile.ZipFile(package) as archive:
                for name in sorted(archive.namelist()):
                    inside = PurePosixPath(name)
                    if fnmatch(inside.name, pattern) and str(inside.parent).removeprefix(".") in folders:
                        target = self._scratch / package.stem
                        return Path(archive.extract(name, target))
        except (zipfile.BadZipFile, OSError) as error:
            fix = "download the package again, or name the directory that it was unpacked to"
            raise UserError(f"this is no package (.aar): {error}", where=package, fix=fix) from None
        return None


def _in(directory: Path, pattern: str, folders: tuple[str, ...]) -> Path | None:
    for folder in folders:
        found = sorted(path for path in (directory / folder).glob(pattern) if path.is_file())
        if found:
            return found[0]
    return None


def find_runner(given: Path | None) -> Path:
    """The harness for the phone: ``given``, ``$MEKI_RUNNER_ANDROID``, or what the Android build left.

    Raises:
        UserError: it is not there.
    """
    named = os.environ.get(RUNNER_VARIABLE)
    path = given or (Path(named) if named else BUILT_RUNNER)
    if not path.is_file():
        build = "build it (android_runner/README.md, preset android-arm64)"
        fix = f"{build}, or name it with ${RUNNER_VARIABLE} or --runner"
        raise UserError("there is no harness for the phone", where=path, fix=fix)
    return path


def find_ort(places: Sources) -> Path:
    """ONNX Runtime for the phone.

    Raises:
        UserError: it is not there.
    """
    found = places.find(("ORT_HOME",), f"{ORT_LIBRARY}*")
    if found is None:
        fix = "set ORT_HOME to the Maven package onnxruntime-android (or -qnn), packed (.aar) or unpacked"
        raise UserError(f"there is no {ORT_LIBRARY} for the phone", where="$ORT_HOME", fix=fix)
    return found


def qnn_at_hand(places: Sources) -> tuple[str, list[str]]:
    """The version of QNN's libraries, and the Hexagons ("v79") that there are skeletons for."""
    library = places.find(QNN_VARIABLES, QNN_LIBRARY)
    archs = [
        arch
        for arch in HEXAGONS
        if places.find(QNN_VARIABLES, f"libQnnHtpV{arch.removeprefix('v')}Skel.so", _hexagon_folders(arch))
    ]
    return ("" if library is None else qnn_version(library)), archs


def _hexagon_folders(arch: str) -> tuple[str, ...]:
    return f"lib/hexagon-{arch}/unsigned", f"hexagon-{arch}/unsigned", *FOLDERS


def _qnn(places: Sources, arch: str) -> dict[str, Path]:
    """QNN's libraries for the processor, and the skeleton that runs on a Hexagon of ``arch``."""
    version = arch.removeprefix("v")
    if not version.isalnum():
        fix = "run `meki-edge compile` and `meki-edge pack` again, or leave the NPU binaries out with --no-npu"
        raise UserError("the bundle does not say which Hexagon its NPU binaries are for", where="manifest.json", fix=fix)
    wanted = {
        QNN_LIBRARY: FOLDERS,
        "libQnnSystem.so": FOLDERS,
        f"libQnnHtpV{version}Stub.so": FOLDERS,
        f"libQnnHtpV{version}Skel.so": _hexagon_folders(arch),
    }
    files = {}
    for name, folders in wanted.items():
        found = places.find(QNN_VARIABLES, name, folders)
        if found is None:
            fix = (
                "set QNN_SDK_ROOT to Qualcomm's SDK or the Maven package qnn-runtime, "
                "or leave the NPU binaries out with --no-npu"
            )
            what = f"{name} is missing, which NPU binaries for {arch} need"
            raise UserError(what, where="$QNN_SDK_ROOT, $ORT_HOME", fix=fix)
        files[name] = found
    provider = places.find(QNN_VARIABLES, QNN_PROVIDER)  # where the provider is a plug-in
    return files | ({provider.name: provider} if provider else {})


def _require_version(files: dict[str, Path], need: NpuNeeds) -> str:
    """QNN loads binaries of its own version or an older one, and its libraries must be of one version."""
    versions = {name: qnn_version(path) for name, path in files.items() if name.startswith("libQnn")}
    told = {version for version in versions.values() if version}
    if len(told) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        fix = "take all of them from one package (QNN_SDK_ROOT)"
        raise UserError(f"QNN's libraries are of different versions: {listed}", where="$QNN_SDK_ROOT", fix=fix)
    runtime = next(iter(told), "")
    if runtime and need.qnn_version and _ordered(runtime) < _ordered(need.qnn_version):
        raise UserError(
            f"QNN {runtime} cannot load a binary that QNN {need.qnn_version} made",
            where=files[QNN_LIBRARY],
            fix=f"set QNN_SDK_ROOT to version {'.'.join(need.qnn_version.split('.')[:3])} or later",
        )
    return runtime


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _require_machines(files: dict[str, Path], facts: dict[str, elf.Elf]) -> None:
    for name, fact in facts.items():
        skeleton = re.fullmatch(r"libQnnHtpV(\d+)Skel\.so", name)
        wanted = f"hexagon v{skeleton[1]}" if skeleton else "arm64"
        found = f"{fact.machine} {fact.hexagon_arch}".strip()
        if found != wanted:
            fix = "name the build for 64-bit Android; this may be the one for a PC"
            raise UserError(f"{name} is made for {found}, the phone needs {wanted}", where=files[name], fix=fix)
