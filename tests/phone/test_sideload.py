"""`meki-edge sideload` and `unload` through the real adb: what gets there, what is left after every interruption."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_files import X86_64, qnn_sdk, write_elf
from phone import Phone

from meki_edge import manifest
from meki_edge.device import adb, sideload
from meki_edge.device.adb import Device
from meki_edge.device.phone_runner import PhoneRunner
from meki_edge.device.sideload import SideloadConfig
from meki_edge.errors import UserError
from meki_edge.manifest import StageOutput


def make_bundle(source: Path, directory: Path, *, name: str | None = None, npu: dict[str, str] | None = None) -> Path:
    """A copy of a packed bundle with another name, or with an NPU binary."""
    packed = manifest.load(source)
    output = StageOutput(directory, stage="pack", config={"name": name}, inputs={})
    for file in packed.files:
        shutil.copyfile(source / file, output.partial / file)
    roles = {file: entry.role for file, entry in packed.files.items()}
    if npu:
        (output.partial / "npu").mkdir()
        (output.partial / "npu/decode_qnn.bin").write_bytes(b"a context binary")
        roles["npu/decode_qnn.bin"] = "decode_binary"
    output.finish(roles=roles, metrics={**packed.metrics, "name": name or packed.metrics["name"], "npu": npu})
    return directory


@pytest.fixture
def config(phone: Phone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SideloadConfig:
    """The harness and ONNX Runtime are files that only look like ones for the phone; nothing runs them here."""
    monkeypatch.setenv("ORT_HOME", str(write_elf(tmp_path / "ort home/jni/arm64-v8a/libonnxruntime.so").parents[2]))
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    return SideloadConfig(target=phone.target, runner=write_elf(tmp_path / "meki-runner"))


def on_phone(phone: Phone) -> dict[str, bytes]:
    root = Path(phone.target)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_everything_arrives_once(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path], tmp_path: Path
) -> None:
    first = sideload.sideload([bundles["meki"]], device, config)
    there = on_phone(phone)
    for name in [*manifest.load(bundles["meki"]).files, "manifest.json"]:
        assert there[f"bundles/meki/{name}"] == (bundles["meki"] / name).read_bytes()
    assert there["runtime/meki-runner"] == (tmp_path / "meki-runner").read_bytes()
    runtime = json.loads(there["runtime/manifest.json"])
    assert {name: entry["sha256"] for name, entry in runtime["files"].items()} == {
        name: hashlib.sha256(there[f"runtime/{name}"]).hexdigest() for name in ("meki-runner", "libonnxruntime.so")
    }
    assert (Path(phone.target) / "runtime/meki-runner").stat().st_mode & 0o777 == 0o755
    assert first["pushed_bytes"] == sum(len(data) for name, data in there.items() if name != ".meki-edge")
    sideload.require_sideloaded(device, sideload.layout(phone.target), bundles["meki"])

    again = sideload.sideload([bundles["meki"], bundles["dense"]], device, config)
    assert again["changes"]["bundles/meki"] == again["changes"]["runtime"] == []
    assert "weights.data" in again["changes"]["bundles/dense"] and again["unchanged_bytes"] == first["pushed_bytes"]
    assert sideload.sideload([bundles["meki"], bundles["dense"]], device, config)["pushed_files"] == 0


def test_a_dry_run_changes_nothing(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    dry = SideloadConfig(target=config.target, runner=config.runner, dry_run=True)
    planned = sideload.sideload([bundles["dense"]], device, dry)
    assert planned["pushed_bytes"] > 0 and not Path(phone.target).exists()
    assert sideload.sideload([bundles["dense"]], device, config)["changes"] == planned["changes"]


def test_an_interrupted_push_resumes_at_its_file(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    names = list(manifest.load(bundles["meki"]).files)
    sizes = [(bundles["meki"] / name).stat().st_size for name in names]
    largest = max(range(len(names)), key=sizes.__getitem__)
    runtime = 1000  # about what comes first: the files that look like harness and libraries, and their manifest
    phone.set(cut_after_bytes=runtime + sum(sizes[:largest]) + sizes[largest] // 2)
    with pytest.raises(UserError, match="connection to the phone was lost"):
        sideload.sideload([bundles["meki"]], device, config)
    phone.set(cut_after_bytes=None)
    phone.reconnect()
    places = sideload.layout(phone.target)
    with pytest.raises(UserError, match="was only half pushed") as caught:
        sideload.require_sideloaded(device, places, bundles["meki"])
    assert "meki-edge sideload" in caught.value.fix
    whole = {name for name in names if f"bundles/meki/{name}" in on_phone(phone)}
    assert whole == set(names[:largest])
    resumed = sideload.sideload([bundles["meki"]], device, config)
    assert resumed["changes"]["bundles/meki"] == [*names[largest:], "manifest.json"]
    assert resumed["changes"]["runtime"] == [] and not [name for name in on_phone(phone) if name.endswith(".part")]
    sideload.require_sideloaded(device, places, bundles["meki"])


def test_ctrl_c_while_a_file_is_sent(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    phone.set(delay_s=0.2)
    options = ["-s", phone.serial, "--target", phone.target, "--runner", str(config.runner)]
    command = [sys.executable, "-m", "meki_edge.cli", "sideload", str(bundles["meki"]), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(Path(phone.target).glob("bundles/meki/*.part")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "run the same command again" in errors and "Traceback" not in errors
    phone.set(delay_s=0)
    there = on_phone(phone)
    assert "bundles/meki/manifest.json" not in there and not [name for name in there if name.endswith(".part")]
    assert sideload.sideload([bundles["meki"]], device, config)["changes"]["runtime"] == []


def test_a_file_that_arrives_damaged_is_not_kept(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    phone.set(damage="weights.data.part")
    with pytest.raises(UserError, match="arrived damaged"):
        sideload.sideload([bundles["dense"]], device, config)
    there = on_phone(phone)
    unfinished = ("weights.data", "weights.data.part", "manifest.json")
    assert not {f"bundles/dense/{name}" for name in unfinished} & set(there)


def test_a_file_changed_on_the_phone_is_sent_again_and_strangers_go(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    sideload.sideload([bundles["dense"]], device, config)
    folder = Path(phone.target) / "bundles/dense"
    weights = folder / "weights.data"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    (folder / "a stranger").touch()
    with pytest.raises(UserError, match="'weights.data' of the bundle 'dense' was changed on the phone") as caught:
        sideload.require_sideloaded(device, sideload.layout(phone.target), bundles["dense"])
    assert shlex.split(caught.value.fix.split("`")[1])[-2:] == ["--target", phone.target]
    found = sideload.sideload([bundles["dense"]], device, config)
    assert found["changes"]["bundles/dense"] == ["weights.data", "manifest.json"] and found["removed_files"] == 2
    assert weights.read_bytes() == (bundles["dense"] / "weights.data").read_bytes()
    assert not (folder / "a stranger").exists()


def test_a_folder_in_a_files_place_and_a_changed_harness_are_mended(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    sideload.sideload([bundles["dense"]], device, config)
    weights, harness = (Path(phone.target) / name for name in ("bundles/dense/weights.data", "runtime/meki-runner"))
    weights.unlink()
    weights.mkdir()
    original = harness.read_bytes()
    harness.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    sideload.sideload([bundles["dense"]], device, config)
    assert weights.read_bytes() == (bundles["dense"] / "weights.data").read_bytes() and harness.read_bytes() == original
    places = sideload.layout(phone.target)
    sideload.require_sideloaded(device, places, bundles["dense"])
    harness.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    with pytest.raises(UserError, match="'meki-runner' was changed on the phone"):
        sideload.require_sideloaded(device, places, bundles["dense"])
    for broken in ("[]", '{"files": []}', '{"files": {"meki-runner": 1}, "versions": {}}'):
        (harness.parent / "manifest.json").write_text(broken)
        with pytest.raises(UserError, match="the harness, .* only half pushed"):
            sideload.require_sideloaded(device, places, bundles["dense"])


def test_another_bundle_of_that_name_replaces_it(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path], tmp_path: Path
) -> None:
    sideload.sideload([bundles["dense"]], device, config)
    other = make_bundle(bundles["meki"], tmp_path / "other", name="dense")
    places = sideload.layout(phone.target)
    with pytest.raises(UserError, match="another bundle is on the phone under the name 'dense'"):
        sideload.require_sideloaded(device, places, other)
    sideload.sideload([other], device, config)
    sideload.require_sideloaded(device, places, other)
    with pytest.raises(UserError, match="2 bundles are called 'dense'"):
        sideload.sideload([bundles["dense"], other], device, config)


def test_the_storage_fills_up(device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]) -> None:
    phone.set(disk_bytes=3000)
    with pytest.raises(UserError, match="the phone's storage is full"):
        sideload.sideload([bundles["dense"]], device, config)
    assert "bundles/dense/manifest.json" not in on_phone(phone)


def test_too_little_space_is_seen_before_anything_is_sent(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    phone.tool("df", "printf 'Filesystem 1024-blocks Used Available Use Mounted\\n/dev/x 9000 8000 1000 89%% /data\\n'")
    with pytest.raises(UserError, match="0.00 GB free, .* needed"):
        sideload.sideload([bundles["dense"]], device, config)
    assert not Path(phone.target).exists()


NPU = {"chipset": "sm8750", "hexagon_arch": "v79", "qnn_sdk_version": "2.51.0"}


def test_qnn_libraries_and_the_right_skeleton_come_along(
    device: Device,
    phone: Phone,
    config: SideloadConfig,
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = make_bundle(bundles["dense"], tmp_path / "npu", npu=NPU)
    with pytest.raises(UserError, match="libQnnHtp.so is missing, which NPU binaries for v79 need"):
        sideload.sideload([bundle], device, config)
    sdk = qnn_sdk(tmp_path / "sdk")
    qnn_sdk(sdk, "75")
    monkeypatch.setenv("QNN_SDK_ROOT", str(sdk))
    sideload.sideload([bundle], device, config)
    there = on_phone(phone)
    libraries = {"libQnnHtp.so", "libQnnSystem.so", "libQnnHtpV79Stub.so", "libQnnHtpV79Skel.so", "libonnxruntime.so"}
    assert {Path(name).name for name in there if name.startswith("runtime/lib")} == libraries
    assert "bundles/dense/npu/decode_qnn.bin" in there
    assert json.loads(there["runtime/manifest.json"])["versions"] == {"qnn": "2.51.0"}
    sideload.sideload([bundles["meki"]], device, config)
    assert libraries <= {Path(name).name for name in on_phone(phone)}, "another bundle still needs them"
    assert set(json.loads(on_phone(phone)["runtime/manifest.json"])["files"]) == {*libraries, "meki-runner"}
    qnn_sdk(sdk, "79", version="2.52.0")
    qnn_sdk(sdk, "75", version="2.52.0")
    newer = make_bundle(bundles["dense"], tmp_path / "v75", name="v75", npu={**NPU, "hexagon_arch": "v75"})
    sideload.sideload([newer], device, config)
    assert not [name for name in on_phone(phone) if "V79" in name], "libraries of two versions do not work together"
    export = sideload.layout(phone.target).environment
    environment = device.run(f"{export}; echo $LD_LIBRARY_PATH; echo $ADSP_LIBRARY_PATH")
    loader, hexagon = environment.stdout.splitlines()
    assert loader == f"{phone.target}/runtime" and hexagon.split(";")[0] == loader and "/vendor/dsp/cdsp" in hexagon


def test_what_the_npu_needs_is_checked_and_named_to_the_harness(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    places = sideload.layout(phone.target)
    sideload.sideload([bundles["dense"]], device, config)
    with pytest.raises(UserError, match="holds no NPU binaries"):
        sideload.require_sideloaded(device, places, bundles["dense"], npu=True)
    bundle = make_bundle(bundles["dense"], tmp_path / "npu", npu=NPU)
    sideload.sideload([bundle], device, SideloadConfig(target=config.target, runner=config.runner, npu=False))
    with pytest.raises(UserError, match="'npu/decode_qnn.bin' of the bundle 'dense' was .* left out"):
        sideload.require_sideloaded(device, places, bundle, npu=True)
    sdk = qnn_sdk(tmp_path / "sdk")
    monkeypatch.setenv("QNN_SDK_ROOT", str(sdk))
    sideload.sideload([bundle], device, config)
    sideload.require_sideloaded(device, places, bundle, npu=True)
    options = PhoneRunner(device, places, npu=True)._backend()
    assert options == [
        "--backend",
        "qnn",
        "--qnn-library",
        f"{places.runtime}/libQnnHtp.so",
        "--npu-memory",
        "auto",
    ]
    write_elf(sdk / "lib/libonnxruntime_providers_qnn.so")
    sideload.sideload([bundle], device, config)
    options = PhoneRunner(device, places, npu=True)._backend()
    assert options[-2:] == ["--qnn-provider", f"{places.runtime}/libonnxruntime_providers_qnn.so"]
    assert PhoneRunner(device, places)._backend() == []


@pytest.mark.parametrize(
    ("soc", "what"),
    [("SM8650", "the phone has SM8650, the NPU binary is for sm8750"), ("SM8750-AC", None), ("", None)],
)
def test_the_chip(
    soc: str, what: str | None, device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("QNN_SDK_ROOT", str(qnn_sdk(tmp_path / "sdk")))
    phone.set_properties(ro__soc__model=soc)
    bundle = make_bundle(bundles["dense"], tmp_path / "npu", npu=NPU)
    if what is None:
        sideload.sideload([bundle], device, config)
        return
    with pytest.raises(UserError, match=what) as caught:
        sideload.sideload([bundle], device, config)
    assert "--chipset sm8650" in caught.value.fix
    without = SideloadConfig(target=config.target, runner=config.runner, npu=False)
    sideload.sideload([bundle], device, without)
    assert not [name for name in on_phone(phone) if "npu" in name or "Qnn" in name]
    sideload.require_sideloaded(device, sideload.layout(phone.target), bundle)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"ro__product__cpu__abilist": "x86_64"}, "ABI: x86_64, the harness needs arm64-v8a"),
        ({"ro__build__version__sdk": "27"}, "Android: 15 .API 27., .* older than Android 10"),
    ],
)
def test_phones_that_cannot_run_it(
    changes: dict[str, str], what: str, device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    phone.set_properties(**changes)
    with pytest.raises(UserError, match=what):
        sideload.sideload([bundles["dense"]], device, config)


def test_pages_larger_than_the_libraries_allow(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path], tmp_path: Path
) -> None:
    phone.tool("getconf", "echo 16384")
    sideload.sideload([bundles["dense"]], device, config)
    write_elf(tmp_path / "ort home/jni/arm64-v8a/libonnxruntime.so", alignment=0x1000)
    with pytest.raises(UserError, match="16384 B, but libonnxruntime.so is built for smaller pages"):
        sideload.sideload([bundles["dense"]], device, config)


@pytest.mark.parametrize("target", ["relative", "/data/a:b", "/data/a;b", "/", "/data/../etc", "/a\nb"])
def test_targets_that_cannot_be(target: str) -> None:
    with pytest.raises(UserError, match="cannot be a target folder"):
        sideload.layout(target)


def test_a_target_that_cannot_be_written(
    device: Device, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match="target folder: /proc/meki: files cannot be written there"):
        sideload.sideload([bundles["dense"]], device, SideloadConfig(target="/proc/meki", runner=config.runner))


def test_unload(device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]) -> None:
    target = Path(phone.target)
    with pytest.raises(UserError, match="nothing was sideloaded to this folder"):
        sideload.unload(device, phone.target, [])
    (target.parent).mkdir(parents=True, exist_ok=True)
    (target.parent / "not ours").touch()
    sideload.sideload([bundles["dense"], bundles["meki"]], device, config)
    with pytest.raises(UserError, match="there is no bundle 'mekki' on the phone") as caught:
        sideload.unload(device, phone.target, ["dense", "mekki"])
    assert "dense, meki" in caught.value.fix
    found = sideload.unload(device, phone.target, ["dense"])
    assert found["removed"] == ["dense"] and found["freed_bytes"] > 0
    assert not (target / "bundles/dense").exists() and (target / "bundles/meki/manifest.json").is_file()
    sideload.unload(device, phone.target, [])
    assert not target.exists() and (target.parent / "not ours").exists()


def test_a_harness_for_this_machine_is_refused(
    device: Device, config: SideloadConfig, bundles: dict[str, Path], tmp_path: Path
) -> None:
    wrong = write_elf(tmp_path / "host-runner", X86_64)
    with pytest.raises(UserError, match="meki-runner is made for x86-64, the phone needs arm64"):
        sideload.sideload([bundles["dense"]], device, SideloadConfig(target=config.target, runner=wrong))


def test_sizes_beyond_four_gigabytes_are_not_cut(
    device: Device, phone: Phone, config: SideloadConfig, bundles: dict[str, Path]
) -> None:
    """A sparse file of 5 GB is listed with all its bytes, so it is seen that it is not the one of the bundle."""
    sideload.sideload([bundles["dense"]], device, config)
    weights = Path(phone.target) / "bundles/dense/weights.data"
    with open(weights, "r+b") as file:
        file.truncate(5 << 30)
    dry: dict[str, Any] = sideload.sideload(
        [bundles["dense"]], device, SideloadConfig(target=config.target, runner=config.runner, dry_run=True)
    )
    assert dry["changes"]["bundles/dense"] == ["weights.data", "manifest.json"]
