"""The whole way through the service, on a dense and a MeKi model."""

from __future__ import annotations

import itertools
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hub_lab import S24, S25, Lab

from export import hub_trace
from export.hub_compile import HubCompileConfig, compile_hub, unpack
from export.hub_source import open_arms
from export.hub_stage import HubConfig, hub
from export.qnn_local import qnn_available
from meki_edge import manifest
from meki_edge.device.pack import PackConfig, pack
from meki_edge.errors import UserError
from meki_edge.graph_spec import Quantization, TensorSpec

Bundles = dict[str, Path]


def both(bundles: Bundles) -> list[Path]:
    return [bundles["dense"], bundles["meki"]]


def test_everything_for_two_models_on_two_devices(
    lab: Lab,
    bundles: Bundles,
    tokens_dir: Path,
    no_token_in: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = HubConfig(devices=(S25, S24), infer_steps=2, prompt_lengths=(16, 100, 2048))
    out = lab.directory / "out"
    made = hub(both(bundles), out, config, lab.access(), tokens=tokens_dir)
    manifest.verify(out, made)
    result = json.loads((out / "hub.json").read_text())
    # 4 graphs are compiled once (a DLC is portable), 2 models are linked for 2 chips, 4 graphs run on 2 devices
    assert lab.hub.count("POST", "models") == 4
    kinds = [job.kind for job in lab.hub.jobs.values()]
    assert Counter(kinds) == {"compile_job": 4, "link_job": 4, "profile": 8, "inference": 8}
    for device in (S25, S24):
        for name in ("dense", "meki"):
            arm = result["measured"][device][name]
            prefill, decode = (raw_time(out, device, name, graph) for graph in ("prefill", "decode"))
            assert arm["tokens_per_s"] == pytest.approx(1e6 / decode)
            assert arm["first_token_us_16"] == prefill and arm["first_token_us_100"] == 7 * prefill
            assert "first_token_us_2048" not in arm, "the context holds 160 tokens"
            assert arm["min_cosine"] > 0.9999 and 0 < arm["max_abs_error"] < 0.05, "rounded to float16, and no worse"
            assert arm["argmax_agreement"] > 0.8
            assert arm["units"]["NPU"] > 20 and arm["units"]["CPU"] == 0
            assert (out / f"binaries/{name}/{'sm8750' if device == S25 else 'sm8650'}/part_0.bin").is_file()
    assert [peer["tokens_per_s"] for peer in result["published"]] == [125, 48.7, 56.7, 30.2, 26.1, 17.5]
    page = (out / "hub.html").read_text()
    assert "Published, not measured here" in page and "<script" not in page and page.count("<svg") >= 5
    assert not re.findall(rf"https?://(?!www\.w3\.org|{lab.hub.url[7:]})", page), "it needs no network"
    assert "no phone" in result["notes"][0]
    no_token_in(lab.directory / "out")
    no_token_in(lab.directory / "ledger")
    printed = capsys.readouterr()
    assert lab.hub.token not in printed.out + printed.err

    before = len(lab.hub.requests)
    assert hub(both(bundles), out, config, lab.access(), tokens=tokens_dir) == made
    assert len(lab.hub.requests) == before, "a finished run asks nothing"
    again = lab.directory / "again"
    hub(both(bundles), again, config, lab.access(), tokens=tokens_dir)
    assert lab.hub.count("POST", "models") == 4 and len(lab.hub.jobs) == len(kinds), "nothing is sent twice"


def test_each_step_goes_on_from_the_last(lab: Lab, bundles: Bundles, tokens_dir: Path) -> None:
    source, jobs = [bundles["dense"]], lab.hub.jobs
    made = hub(source, lab.directory / "compile", HubConfig(devices=(S25,), step="compile"), lab.access())
    assert len(jobs) == 2 and {name for name in made.files if name.startswith("binaries")} == {
        "binaries/dense/sm8750/decode.dlc",
        "binaries/dense/sm8750/prefill.dlc",
    }
    hub(source, lab.directory / "link", HubConfig(devices=(S25,), step="link"), lab.access())
    assert len(jobs) == 3
    made = hub(source, lab.directory / "profile", HubConfig(devices=(S25,), step="profile"), lab.access())
    assert len(jobs) == 5 and "headline" in made.metrics and not any("binaries" in name for name in made.files)
    config = HubConfig(devices=(S25,), step="infer")
    made = hub(source, lab.directory / "infer", config, lab.access(), tokens=tokens_dir)
    result = json.loads((lab.directory / "infer/hub.json").read_text())
    assert len(jobs) == 7 and result["measured"][S25]["dense"]["min_cosine"] > 0.9999
    assert "tokens_per_s" not in result["measured"][S25]["dense"]
    assert made.metrics["headline"] == "Nothing was profiled."
    hub(source, lab.directory / "run", HubConfig(devices=(S25,)), lab.access(), tokens=tokens_dir)
    assert len(jobs) == 7 and lab.hub.count("POST", "datasets") == 2, "all of it was there"


def test_options_name_graphs_and_outputs(lab: Lab, bundles: Bundles) -> None:
    config = HubConfig(devices=(S25,), step="profile", profiler_iterations=3, qairt_version="2.31")
    hub([bundles["dense"]], lab.directory / "out", config, lab.access())
    options = {job.kind: job.options for job in lab.hub.jobs.values()}
    spec = json.loads((bundles["dense"] / "graph_spec.json").read_text())
    names = [tensor["name"] for tensor in spec["decode"]["parts"][0]["outputs"]]
    assert options["compile_job"] == {
        "target_runtime": "qnn_dlc",
        "output_names": ",".join(names),
        "qnn_options": "context_enable_graphs=decode;default_graph_htp_precision=FLOAT16",
        "qairt_version": "2.31",
    }
    precision, effort = "default_graph_htp_precision=FLOAT16", "default_graph_htp_optimizations=O=3"
    assert options["link_job"]["qnn_options"] == f"{precision};{effort}"
    assert options["profile"] == {
        "max_profiler_iterations": "3",
        "qnn_options": "context_enable_graphs=decode",
        "qairt_version": "2.31",
    }


def test_wrapped_binaries_and_what_they_are_made_for(lab: Lab, bundles: Bundles, tokens_dir: Path) -> None:
    config = HubConfig(devices=(S25, S24), target_runtime="precompiled_qnn_onnx", infer_steps=1)
    made = hub([bundles["meki"]], lab.directory / "out", config, lab.access(), tokens=tokens_dir)
    kinds = [job.kind for job in lab.hub.jobs.values()]
    assert kinds.count("compile_job") == 4 and "link_job" not in kinds, "a binary is for one chip"
    assert sum(name.endswith("decode.zip") for name in made.files) == 2


def test_parts_add_up_in_every_context(lab: Lab, shorter: tuple[Path, Path], tokens_dir: Path) -> None:
    checkpoint, directory = shorter
    pack(directory, checkpoint, lab.directory / "short", PackConfig(name="short"))
    config = HubConfig(devices=(S25,), infer_steps=10, prompt_lengths=(16, 24, 25, 33))
    hub([lab.directory / "short"], lab.directory / "out", config, lab.access(), tokens=tokens_dir)
    assert lab.hub.count("POST", "models") == 8
    kinds = Counter(job.kind for job in lab.hub.jobs.values())
    assert kinds == {"compile_job": 8, "link_job": 2, "profile": 8, "inference": 8}
    linked = [set(model.graphs) for model in lab.hub.models.values() if model.name == "linked"]
    names = ("prefill", "decode", "prefill_c24", "decode_c24")
    wanted = [{f"{name}_{part}" for name in names} for part in (0, 1)]
    assert sorted(linked, key=min) == wanted, "all graphs of a part share one binary"

    result = json.loads((lab.directory / "out/hub.json").read_text())
    arm = result["measured"][S25]["short"]
    assert result["arms"]["short"]["shorter_contexts"] == [24] and arm["parts"] == 2
    for name, context in itertools.product(("prefill", "decode"), ("", "_c24")):
        times = [raw_time(lab.directory / "out", S25, "short", f"{name}{context}_{part}") for part in (0, 1)]
        assert arm[f"{name}_us{context}"] == sum(times)
    short, full = arm["prefill_us_c24"], arm["prefill_us"]
    waits = [short, 2 * short, short + full, short + full + arm["decode_us"]]
    assert [arm[f"first_token_us_{length}"] for length in (16, 24, 25, 33)] == waits
    agreements = {name: graph["agreement"] for name, graph in arm["graphs"].items()}
    tokens = {name: agreements[f"{name}_1"]["logits"]["tokens"] for name in names}
    assert tokens == {"prefill": 16, "decode": 10, "prefill_c24": 16, "decode_c24": 8}, "as many steps as fit"
    assert arm["min_cosine"] > 0.9999
    for name in names:
        assert agreements[f"{name}_0"]["others"]["min_cosine"] > 0.9999 and "logits" not in agreements[f"{name}_0"]
    page = (lab.directory / "out/hub.html").read_text()
    assert "Decode, context 24: tokens/s" in page and "time of a token decoded, by context" in page


def test_shorter_contexts_from_compile_to_pack(lab: Lab, shorter: tuple[Path, Path], tokens_dir: Path) -> None:
    checkpoint, directory = shorter
    npu = lab.directory / "npu"
    config = HubCompileConfig(device=S25, verify_steps=9)
    made = compile_hub(directory, checkpoint, tokens_dir, npu, config, lab.access())
    names = [f"{graph}{context}" for graph in ("prefill", "decode") for context in ("", "_c24")]
    roles = {f"{name}_{part}_ctx.onnx": f"{name}_context_{part}" for name in names for part in (0, 1)}
    roles |= {f"{name}_{part}_qnn.bin": f"{name}_binary_{part}" for name in names for part in (0, 1)}
    assert {name: entry.role for name, entry in made.files.items()} == roles
    assert made.metrics["device_decode_1_tokens"] == 9 and made.metrics["device_decode_c24_1_tokens"] == 8
    bundle = pack(directory, checkpoint, lab.directory / "bundle", PackConfig(), compiled=npu)
    assert {f"npu/{name}" for name in roles} <= set(bundle.files)
    (arm,) = open_arms([npu])
    assert {(unit.graph, unit.part) for unit in arm.units} == {(name, part) for name in names for part in (0, 1)}
    assert arm.shorter_contexts == [24] and arm.num_parts == 2


@pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")
def test_real_binaries_from_export_to_pack(
    lab: Lab, exported: dict[str, tuple[Path, Path]], tokens_dir: Path
) -> None:
    """`compile --via hub`: the service's (here the local compiler's) binaries take the local ones' place."""
    lab.hub.local_compiler = True
    checkpoint, directory = exported["meki"]
    npu = lab.directory / "npu"
    config = HubCompileConfig(device=S25, verify_steps=2)
    made = compile_hub(directory, checkpoint, tokens_dir, npu, config, lab.access())
    assert {name: entry.role for name, entry in made.files.items()} == {
        "decode_ctx.onnx": "decode_context",
        "decode_qnn.bin": "decode_binary",
        "prefill_ctx.onnx": "prefill_context",
        "prefill_qnn.bin": "prefill_binary",
    }
    (node,) = onnx.load(npu / "decode_ctx.onnx").graph.node
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert node.op_type == "EPContext" and attributes["ep_cache_context"] == b"decode_qnn.bin"
    assert made.metrics["decode_binary_bytes"] > 10_000 and made.metrics["chipset"] == "sm8750"
    assert made.metrics["device_decode_min_cosine"] > 0.9999
    bundle = pack(directory, checkpoint, lab.directory / "bundle", PackConfig(), compiled=npu)
    assert "npu/decode_qnn.bin" in bundle.files
    jobs = len(lab.hub.jobs)
    assert compile_hub(directory, checkpoint, tokens_dir, npu, config, lab.access()) == made
    assert len(lab.hub.jobs) == jobs
    with pytest.raises(UserError, match="exported from another checkpoint"):
        compile_hub(directory, exported["dense"][0], tokens_dir, lab.directory / "x", config, lab.access())
    with pytest.raises(UserError, match="this is the output of `meki-edge pack`"):
        compile_hub(lab.directory / "bundle", checkpoint, tokens_dir, lab.directory / "x", config, lab.access())

    hub([npu], lab.directory / "profile", HubConfig(devices=(S25,), step="profile"), lab.access())
    uploaded = [model for model in lab.hub.models.values() if not model.producer and model.name.startswith("npu")]
    assert len(uploaded) == 2, "binaries are run as they are"


def test_unpacking_what_is_no_wrapper(tmp_path: Path) -> None:
    archive = tmp_path / "model.zip"
    archive.write_bytes(b"no zip")
    with pytest.raises(UserError, match="not an ONNX file with one NPU binary"):
        unpack(archive, tmp_path / "a.onnx", tmp_path / "a.bin")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("m/model.onnx", b"\xff\xff")
        file.writestr("m/model.bin", b"x")
    with pytest.raises(UserError, match="not an ONNX file with one NPU binary"):
        unpack(archive, tmp_path / "a.onnx", tmp_path / "a.bin")
    assert not (tmp_path / "a.onnx").exists()


def test_agreement_by_hand() -> None:
    quantization = Quantization(scale=0.5, zero_point=10)
    spec = TensorSpec(name="y", role="logits", dtype="uint8", shape=(1, 1, 3), quantization=quantization)
    reference = [np.array([[[12, 10, 8]]], np.uint8)]  # 1, 0, -1
    assert hub_trace.compare({"y": reference}, [(spec, reference)], "x")["logits"]["min_cosine"] == 1
    found = hub_trace.compare({"y": [np.array([[[1.0, 0.0, 1.0]]], np.float32)]}, [(spec, reference)], "x")["logits"]
    assert found == {"tokens": 1, "min_cosine": pytest.approx(0), "max_abs_error": 2, "argmax_agreement": 1}
    with pytest.raises(UserError, match="y is missing or has another size"):
        hub_trace.compare({"z": reference}, [(spec, reference)], "x")


def raw_time(out: Path, device: str, arm: str, graph: str) -> int:
    """The service's own number, from the profile that was kept."""
    profile = json.loads((out / f"raw/{slug(device)}-{arm}-{graph}.json").read_text())
    return profile["execution_summary"]["estimated_inference_time"]


def slug(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")
