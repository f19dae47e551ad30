"""What goes wrong says what, where and what to do; what can be known is known before the upload."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import onnx
import pytest
from hub_lab import QUICK, S24, S25, Lab
from server import TOKEN

from export import aihub, hub_source
from export.hub_ledger import FAILED, Entry, Ledger, request_key
from export.hub_lint import explain
from export.hub_service import HubDevice, ServiceTrouble, choose_device
from export.hub_stage import HubConfig, hub
from meki_edge import manifest
from meki_edge.errors import UserError
from meki_edge.manifest import StageOutput

COMPILE = HubConfig(devices=(S25,), step="compile")


def refused(lab: Lab, sources: list[Path], config: HubConfig = COMPILE, **more: object) -> UserError:
    with pytest.raises(UserError) as caught:
        hub(sources, lab.directory / "out", config, lab.access(), **more)
    assert TOKEN not in str(caught.value)
    return caught.value


def nothing_was_sent(lab: Lab) -> bool:
    return not lab.hub.count("POST", ".*")


def test_no_token(lab: Lab, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAIHUB_CLIENT_INI", str(lab.directory / "none.ini"))
    error = refused(lab, [bundles["dense"]])
    assert "no AI Hub token" in error.what and error.where.endswith("none.ini") and "hub login" in error.fix


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[api]\napi_url = x\n",
        "[api]\napi_token =\napi_url = x\nweb_url = x\n",
        "\x00[",
        "[api]\napi_token = %(x)s\napi_url=x\nweb_url=x\n",
    ],
)
def test_a_broken_configuration(lab: Lab, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = lab.directory / "broken.ini"
    path.write_text(text)
    monkeypatch.setenv("QAIHUB_CLIENT_INI", str(path))
    with pytest.raises(UserError) as caught:
        aihub.connect(None, QUICK)
    assert str(caught.value.where) == str(path) and "hub login" in caught.value.fix


def test_a_wrong_token(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.write_config(lab.directory / "client.ini", token="wrong-7d21")
    error = refused(lab, [bundles["dense"]])
    assert error.what == "AI Hub refused the token" and "wrong-7d21" not in str(error) and nothing_was_sent(lab)


def test_a_token_in_an_answer_is_not_shown(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.quota = f"token {TOKEN} has no minutes left"
    assert "token [token] has no minutes left" in refused(lab, [bundles["dense"]]).what


def test_login(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lab.directory / "new" / "client.ini"
    monkeypatch.setenv("QAIHUB_CLIENT_INI", str(path))
    with pytest.raises(UserError, match="refused the token"):
        aihub.login("wrong", api_url=lab.hub.url, timing=QUICK)
    assert not path.exists()
    found, count = aihub.login(TOKEN, api_url=lab.hub.url, timing=QUICK)
    assert found == path and count == 3 and path.stat().st_mode & 0o077 == 0
    assert len(aihub.connect(None, QUICK).devices()) == 3


def test_an_unknown_device(lab: Lab, bundles: dict[str, Path]) -> None:
    error = refused(lab, [bundles["dense"]], HubConfig(devices=("Samsung Galaxy S25",), step="compile"))
    assert "nearest are 'Samsung Galaxy S25 (Family)', 'Samsung Galaxy S24 (Family)'" in error.what
    assert nothing_was_sent(lab) and error.where == "--device"


def test_of_several_systems_the_newest() -> None:
    devices = [HubDevice(name="Phone", os=system, attributes=()) for system in ("9", "14", "13.1")]
    assert choose_device(devices, "phone").os == "14"
    with pytest.raises(UserError, match=r"no device 'zzz' \[") :
        choose_device(devices, "zzz")


@pytest.mark.parametrize(
    ("attribute", "soc"),
    [
        ("chipset:qualcomm-snapdragon-8-elite", "sm8750"),
        ("chipset:qualcomm-snapdragon-8gen3", "sm8650"),
        ("chipset:qualcomm-snapdragon-8-elite-gen5", "sm8850"),
        ("chipset:SM8550", "sm8550"),
        ("chipset:qualcomm-snapdragon-x-elite", "sc8380xp"),
        ("chipset:qualcomm-qcs9075", None),
    ],
)
def test_chips_by_attribute(attribute: str, soc: str | None) -> None:
    device = HubDevice(name="x", os="1", attributes=("os:android", attribute))
    assert (device.chip.soc if device.chip else None) == soc
    assert device.binaries_for == (soc or "qualcomm-qcs9075")


def test_configurations(lab: Lab, bundles: dict[str, Path], tokens_dir: Path) -> None:
    source = [bundles["dense"]]
    error = refused(lab, source, HubConfig(devices=(S25,), target_runtime="qnn_dcl"))
    assert "unknown target runtime 'qnn_dcl'; did you mean 'qnn_dlc'" in error.what
    assert "no device" in refused(lab, source, HubConfig(devices=())).what
    wrapped = HubConfig(devices=(S25,), target_runtime="precompiled_qnn_onnx", step="link")
    assert "is not linked" in refused(lab, source, wrapped).what
    assert "real text" in refused(lab, source, HubConfig(devices=(S25,), step="infer")).what
    error = refused(lab, source, HubConfig(devices=(S25,), step="infer", infer_steps=145), tokens=tokens_dir)
    assert "145 decode steps" in error.what and "give 1 to 144" in error.fix
    assert "two sources are called 'dense'" in refused(lab, source * 2).what
    assert nothing_was_sent(lab)


def test_rows_that_are_elsewhere(lab: Lab, exported: dict[str, tuple[Path, Path]], tokens_dir: Path) -> None:
    error = refused(lab, [exported["meki"][1]], HubConfig(devices=(S25,), step="infer"), tokens=tokens_dir)
    assert "rom.safetensors" in error.what and "pack" in error.fix and nothing_was_sent(lab)


def test_an_edited_bundle(lab: Lab, bundles: dict[str, Path]) -> None:
    copy = shutil.copytree(bundles["dense"], lab.directory / "copy")
    with open(copy / "decode.onnx", "ab") as file:
        file.write(b"x")
    assert "manifest says" in refused(lab, [copy]).what and nothing_was_sent(lab)


def test_lint_comes_first(lab: Lab, bundles: dict[str, Path]) -> None:
    """An int64 input would fail at the service after minutes."""
    source = manifest.load(bundles["dense"])
    output = StageOutput(lab.directory / "edited", stage="pack", config={}, inputs={})
    for name in source.files:
        shutil.copyfile(bundles["dense"] / name, output.partial / name)
    path = output.partial / "decode.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    onnx.save(model, path)
    output.finish(roles={name: entry.role for name, entry in source.files.items()}, metrics=source.metrics)
    error = refused(lab, [lab.directory / "edited"])
    assert error.what.startswith("lint found") and nothing_was_sent(lab)


def compiled(lab: Lab, soc: str, graphs: tuple[str, ...] = ("prefill", "decode")) -> Path:
    """A directory as `meki-edge compile` leaves it, for a chip."""
    output = StageOutput(lab.directory / f"npu-{soc}", stage="compile", config={}, inputs={})
    roles = {}
    for graph in graphs:
        attributes = {"domain": "com.microsoft", "ep_cache_context": f"{graph}_qnn.bin"}
        node = onnx.helper.make_node("EPContext", ["x"], ["y"], **attributes)
        values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
        model = onnx.helper.make_model(onnx.helper.make_graph([node], graph, values[:1], values[1:]))
        onnx.save(model, output.partial / f"{graph}_ctx.onnx")
        (output.partial / f"{graph}_qnn.bin").write_bytes(graph.encode() * 1000)
        roles |= {f"{graph}_ctx.onnx": f"{graph}_context", f"{graph}_qnn.bin": f"{graph}_binary"}
    output.finish(roles=roles, metrics={"chipset": soc})
    return lab.directory / f"npu-{soc}"


def test_a_binary_of_another_chip(lab: Lab) -> None:
    error = refused(lab, [compiled(lab, "sm8650")], HubConfig(devices=(S25,), step="profile"))
    assert "compiled for sm8650, Samsung Galaxy S25 (Family) has Snapdragon 8 Elite (sm8750)" in error.what
    assert nothing_was_sent(lab) and "compile for sm8750" in error.fix


def test_graphs_of_binaries_by_name(lab: Lab) -> None:
    graphs = {"decode": ("decode", 0), "prefill_1": ("prefill", 1), "decode_c256": ("decode_c256", 0)}
    graphs["prefill_c1024_10"] = ("prefill_c1024", 10)
    (arm,) = hub_source.open_arms([compiled(lab, "sm8750", tuple(graphs))])
    assert {unit.name: (unit.graph, unit.part) for unit in arm.units} == graphs
    assert arm.shorter_contexts == [256, 1024] and arm.num_parts == 11


@pytest.mark.parametrize("name", ["model", "decode_c", "decode_x1", "decode_1_c256", "predecode", "decode_c256_"])
def test_a_binary_of_no_graph(lab: Lab, name: str) -> None:
    with pytest.raises(UserError, match=f"'{name}_ctx.onnx' is neither prefill nor decode"):
        hub_source.open_arms([compiled(lab, "sm8750", (name,))])


def test_a_binary_over_the_limit(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_source.LIMIT_BYTES == 2_000_000_000
    monkeypatch.setattr(hub_source, "LIMIT_BYTES", 5_000)
    error = refused(lab, [compiled(lab, "sm8750")], HubConfig(devices=(S25,), step="profile"))
    assert "a binary of" in error.what and "part-over-2gb" in error.what and nothing_was_sent(lab)
    assert "--parts" in error.fix


def test_quota(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.quota = "You have reached your quota of jobs for this month."
    error = refused(lab, [bundles["dense"]])
    assert "reached your quota" in error.what and "quota" in error.fix
    assert not lab.hub.count("PUT", ".*"), "before a byte of the model is sent"


def test_a_failed_job(lab: Lab, bundles: dict[str, Path]) -> None:
    reason = "Failed to convert: unsupported operator com.microsoft.GroupQueryAttention"
    lab.hub.faults.fail = {"compile dense decode": reason}
    error = refused(lab, [bundles["dense"]])
    assert error.what == (
        f"compile dense decode failed at AI Hub: {reason} (`meki-edge lint` has a rule for this: com-microsoft-op)"
    )
    log = Path(error.where)
    assert log.is_file() and reason in log.read_text() and log.is_relative_to(lab.directory / "out")
    summary = (log.parent / "job.txt").read_text()
    assert reason in summary and "--target_runtime qnn_dlc" in summary and TOKEN not in summary

    sent = len(lab.hub.jobs)
    assert refused(lab, [bundles["dense"]]).what == error.what and len(lab.hub.jobs) == sent, "not submitted again"
    lab.hub.faults.fail = {}
    hub([bundles["dense"]], lab.directory / "out", COMPILE, lab.access(resubmit=True))
    assert len(lab.hub.jobs) == sent + 1


def test_all_failures_are_told(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.fail = {"decode": "no luck", "prefill": "no room"}
    error = refused(lab, [bundles["dense"]])
    assert "no luck" in error.what and "no room" in error.what and error.where.count("hub.log") == 2


@pytest.mark.parametrize(
    ("reason", "rule"),
    [
        ("Input ids has type int64; use --truncate_64bit_io", "int64-io"),
        ("model.onnx_data: Model directory can only contain .onnx, .data", "external-data-name"),
        ("The model is larger than 2GB", "part-over-2gb"),
        ("op Foo is not supported by QNN", "unsupported-op"),
        ("The device caught fire", None),
    ],
)
def test_reasons_and_rules(reason: str, rule: str | None) -> None:
    assert explain(reason) == rule


def test_nonsense_from_the_service(lab: Lab) -> None:
    service = lab.connect()
    lab.hub.faults.garbage = "devices"
    with pytest.raises(UserError, match="not what its client expects"):
        service.devices()
    lab.hub.faults.garbage = None
    lab.hub.faults.statuses = [("GET", "devices", 426)]
    with pytest.raises(UserError) as caught:
        service.devices()
    assert "qai-hub" in caught.value.fix
    lab.hub.faults.statuses = [("GET", "devices", 503)] * 20
    with pytest.raises(ServiceTrouble, match="listing the devices"):
        service.devices()


def test_a_job_that_is_gone(lab: Lab, bundles: dict[str, Path]) -> None:
    lab.hub.faults.stuck = "decode"
    timing = aihub.Timing(poll_seconds=0.01, timeout_seconds=0.1)
    with pytest.raises(UserError, match="not finished"):
        hub([bundles["dense"]], lab.directory / "out", COMPILE, lab.access(timing=timing))
    lab.hub.jobs.clear()
    assert "no longer has this job" in refused(lab, [bundles["dense"]]).what


def test_a_result_that_is_gone(lab: Lab, bundles: dict[str, Path]) -> None:
    hub([bundles["dense"]], lab.directory / "first", COMPILE, lab.access())
    lab.hub.jobs.clear()
    error = refused(lab, [bundles["dense"]])
    assert "is gone" in error.what and "--resubmit" in error.fix
    hub([bundles["dense"]], lab.directory / "out", COMPILE, lab.access(resubmit=True))


def test_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    key = request_key("compile", "https://x", digest="d", options="o")
    assert key == request_key("compile", "https://x", options="o", digest="d")
    assert key != request_key("link", "https://x", options="o", digest="d")
    entry = Entry(kind="compile", key=key, label="a", service="https://x", state=FAILED, name="a", id="j1", created="2")
    assert ledger.get(key) is None and ledger.put(entry) == entry == Ledger(tmp_path / "ledger").get(key)
    older = Entry(kind="model", key="k", label="b", service="x", state="done", name="b", id="m", created="1")
    ledger.put(older)
    assert ledger.entries() == [older, entry] and ledger.job("j1") == entry
    with pytest.raises(UserError, match="no job 'j2' was submitted from here") as caught:
        ledger.job("j2")
    assert "j1" in caught.value.fix
    waited = []
    with ledger.lock(key):
        other = threading.Thread(target=lambda: ledger.lock(key, lambda: waited.append(1)).__enter__())
        other.start()
        while not waited:
            pass
    other.join()
    path = tmp_path / f"ledger/entries/{key}.json"
    strange = path.read_text().replace("failed", "fine")
    for text, what in (("{", "not valid JSON"), ("{}", "is missing"), (strange, "unknown state")):
        path.write_text(text)
        with pytest.raises(UserError, match=what):
            ledger.entries()


def test_devices_of_two_chips_and_names(lab: Lab) -> None:
    found = lab.connect().devices()
    assert [device.name for device in found] == [S24, S25, "Snapdragon 8 Elite Gen 5 QRD"]
    assert [device.chip.soc for device in found if device.chip] == ["sm8650", "sm8750", "sm8850"]
