"""`meki-edge pack`: what a bundle holds, read by independent readers, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from safetensors import safe_open

from meki_edge import manifest
from meki_edge.device.bundle import open_bundle
from meki_edge.device.pack import PackConfig, _read_a_token, pack
from meki_edge.errors import UserError
from meki_edge.graph_spec import GraphSpec, Quantization
from meki_edge.manifest import StageOutput
from meki_edge.rom.addressing import Ragged
from meki_edge.rom.reader import RomReader
from meki_edge.rom.transcode import transcode
from meki_edge.rom.writer import RomWriter
from meki_edge.safetensors_io import SafetensorsFile

Exported = dict[str, tuple[Path, Path]]


@pytest.fixture
def copies(tmp_path: Path, exported: Exported) -> tuple[Path, Path]:
    """Copies of the MeKi checkpoint and its export that a test may spoil."""
    checkpoint, graphs = exported["meki"]
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    shutil.copytree(graphs, tmp_path / "export")
    return tmp_path / "checkpoint", tmp_path / "export"


def refusal(graphs: Path, checkpoint: Path, out: Path, **options: object) -> UserError:
    with pytest.raises(UserError) as caught:
        pack(graphs, checkpoint, out, PackConfig(), **options)
    assert not (out / manifest.FILE_NAME).exists()
    return caught.value


def rewrite_manifest(directory: Path, **changes: object) -> None:
    path = directory / manifest.FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def adopt(graphs: Path, checkpoint: Path) -> None:
    """Make the export's manifest say that it was made from ``checkpoint`` as it is now."""
    entry = {"path": str(checkpoint), "sha256": manifest.digest(checkpoint)}
    rewrite_manifest(graphs, inputs={"checkpoint": entry})


def test_a_bundle_holds_all_that_a_device_needs(bundles: dict[str, Path], exported: Exported) -> None:
    for name, directory in bundles.items():
        found = manifest.load(directory, stages=("pack",))
        manifest.verify(directory, found)
        spec = GraphSpec.from_json(json.loads((directory / "graph_spec.json").read_text()), directory)
        for graph in (spec.prefill, spec.decode):
            session = onnxruntime.InferenceSession(str(directory / graph.parts[0].file))
            assert [(i.name, tuple(i.shape)) for i in session.get_inputs()] == [(i.name, i.shape) for i in graph.inputs]
        with safe_open(directory / spec.embedding.file, "np") as file:
            assert file.get_slice("rows").get_shape()[0] == spec.vocab_size
        assert [rom.file for rom in spec.roms] == (["rom.safetensors"] if name == "meki" else [])
        checkpoint = exported[name][0]
        if spec.roms:
            assert (directory / "rom.safetensors").read_bytes() == (checkpoint / "rom.safetensors").read_bytes()
            with safe_open(directory / "rom.safetensors", "np") as file:
                segments = json.loads(file.metadata()["segments"])
                rows, stride = file.get_slice("rows").get_shape()
            assert sum(segment["dim"] for segment in segments) == spec.roms[0].row_dim
            assert (rows, stride) == (spec.vocab_size, found.metrics["rom_bytes_per_token"])


def test_metrics_are_those_a_comparison_needs(bundles: dict[str, Path], exported: Exported) -> None:
    dense, meki = (manifest.load(bundles[name]).metrics for name in ("dense", "meki"))
    quality = manifest.load(exported["meki"][0]).metrics
    assert (dense["name"], meki["name"]) == ("dense", "meki")
    assert (meki["validation_loss"], meki["ram_parameters"]) == (quality["validation_loss"], quality["ram_parameters"])
    assert (dense["rom_bytes"], dense["rom_bytes_per_token"], dense["table_precision"]) == (0, 0, None)
    assert meki["rom_bytes"] == (bundles["meki"] / "rom.safetensors").stat().st_size
    assert meki["table_precision"] == "int8"
    assert dense["rom_bytes_per_token_expected"] == 0
    assert meki["rom_bytes_per_token_expected"] == quality["rom_bytes_per_token_expected"] > 0


def test_a_mixed_bundle_holds_every_rom_file(tmp_path: Path, mixed: tuple[Path, Path, Path]) -> None:
    _, checkpoint, graphs = mixed
    metrics = pack(graphs, checkpoint, tmp_path / "out", PackConfig()).metrics
    spec = GraphSpec.from_json(json.loads((tmp_path / "out" / "graph_spec.json").read_text()), tmp_path)
    names = ["rom.safetensors", "rom_1.safetensors", "rom_2.safetensors", "rom_3.safetensors"]
    assert [rom.file for rom in spec.roms] == names
    per_token = 0
    for rom in spec.roms:
        assert (tmp_path / "out" / rom.file).read_bytes() == (checkpoint / rom.file).read_bytes()
        with safe_open(tmp_path / "out" / rom.file, "np") as file:
            per_token += file.get_slice("rows").get_shape()[1] * rom.rows_per_token
            assert file.metadata()["addressing"] == rom.addressing
    assert metrics["name"] == "meki+l3+engram+ple"
    assert metrics["rom_bytes"] == sum((tmp_path / "out" / name).stat().st_size for name in names)
    assert metrics["rom_bytes_per_token"] == per_token
    with safe_open(checkpoint / "model.safetensors", "np") as file:
        in_ram = sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())
    assert metrics["ram_parameters"] == metrics["active_parameters"] == in_ram, "the tied head reads every row"


def test_what_a_token_reads_of_the_weights() -> None:
    tied = {"tie_word_embeddings": True, "vocab_size": 100, "hidden_size": 4, "num_hidden_layers": 2}
    untied = {**tied, "tie_word_embeddings": False}
    assert _read_a_token(tied, 2000, 8000) == {
        "active_parameters": 2000, "weight_bytes_per_token": 8000, "expert_bytes_per_token": None
    }  # fmt: skip
    found = _read_a_token(untied, 2000, 6400)
    assert (found["active_parameters"], found["weight_bytes_per_token"]) == (2000 - 99 * 4, 6400)
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    expert = 2 * 3 * 4 * 6  # of both layers
    found = _read_a_token({**untied, **moe}, 2000, 3200)  # 1600 parameters of two bytes
    assert found == {
        "active_parameters": 2000 - 99 * 4 - 6 * expert,
        "weight_bytes_per_token": 2 * (1600 - 6 * expert),
        "expert_bytes_per_token": 2 * 2 * expert,
    }
    assert set(_read_a_token(tied, None, 8000).values()) == {None}


def test_packing_twice_gives_the_same_bytes(tmp_path: Path, exported: Exported) -> None:
    checkpoint, graphs = exported["meki"]
    first = pack(graphs, checkpoint, tmp_path / "a", PackConfig(name="twin"))
    second = pack(graphs, checkpoint, tmp_path / "b", PackConfig(name="twin"))
    assert first.files == second.files
    assert first.metrics["name"] == "twin"
    assert pack(graphs, checkpoint, tmp_path / "a", PackConfig(name="twin")) == first


def test_npu_binaries_come_along(tmp_path: Path, exported: Exported) -> None:
    checkpoint, graphs = exported["dense"]
    output = StageOutput(tmp_path / "npu", stage="compile", config={}, inputs={"export": graphs})
    (output.partial / "decode_qnn.bin").write_bytes(b"context")
    (output.partial / "compile.log").write_text("not for a device")
    roles = {"decode_qnn.bin": "decode_binary", "compile.log": "compile_log"}
    output.finish(roles=roles, metrics={"chipset": "sm8750"})
    packed = pack(graphs, checkpoint, tmp_path / "bundle", PackConfig(), compiled=tmp_path / "npu")
    assert (tmp_path / "bundle/npu/decode_qnn.bin").read_bytes() == b"context"
    assert [name for name in packed.files if name.startswith("npu/")] == ["npu/decode_qnn.bin"]
    assert packed.metrics["npu"] == {"chipset": "sm8750", "hexagon_arch": None, "qnn_sdk_version": None}
    other_checkpoint, other_graphs = exported["meki"]
    error = refusal(other_graphs, other_checkpoint, tmp_path / "other", compiled=tmp_path / "npu")
    assert error.what.startswith("this compile was not made from")


def test_calibrated_rows_replace_the_checkpoints(tmp_path: Path, exported: Exported) -> None:
    """A calibrated directory stands in an export's place, and brings the ROM file in its graphs' integers."""
    checkpoint, graphs = exported["meki"]
    source = manifest.load(graphs)
    output = StageOutput(tmp_path / "calibrated", stage="calibrate", config={}, inputs={"checkpoint": checkpoint})
    for name in source.files:
        shutil.copyfile(graphs / name, output.partial / name)
    static = Quantization(scale=2.0**-10, zero_point=32_768)
    rom = transcode(checkpoint / "rom.safetensors", output.partial / "rom.safetensors", "static16", static)
    roles = {name: entry.role for name, entry in source.files.items()} | {"rom.safetensors": "rom"}
    output.finish(roles=roles, metrics={**source.metrics, "precision": "w8a16"})
    metrics = pack(tmp_path / "calibrated", checkpoint, tmp_path / "bundle", PackConfig()).metrics
    packed = (tmp_path / "bundle/rom.safetensors").read_bytes()
    assert packed == (tmp_path / "calibrated/rom.safetensors").read_bytes()
    assert (metrics["precision"], metrics["table_precision"]) == ("w8a16", "static16")
    plain = manifest.load(checkpoint).metrics
    assert metrics["rom_bytes_per_token"] == metrics["rom_bytes_per_token_expected"] == rom.row_stride
    assert plain["rom_bytes_per_token"] != rom.row_stride
    error = refusal(tmp_path / "calibrated", exported["dense"][0], tmp_path / "other")
    assert error.what.startswith("this calibrate was not made from")


def test_another_checkpoint_is_refused(tmp_path: Path, exported: Exported) -> None:
    error = refusal(exported["meki"][1], exported["dense"][0], tmp_path / "out")
    assert error.what.startswith("this export was not made from")
    assert "checkpoint" in error.fix


@pytest.mark.parametrize("name", ["decode.onnx", "weights.data", "tokenizer.json", "graph_spec.json"])
def test_an_edited_export_is_refused(tmp_path: Path, copies: tuple[Path, Path], name: str) -> None:
    checkpoint, graphs = copies
    data = bytearray((graphs / name).read_bytes())
    data[len(data) // 2] ^= 1
    (graphs / name).write_bytes(data)
    error = refusal(graphs, checkpoint, tmp_path / "out")
    assert "contents changed" in error.what
    assert error.where.endswith(name)


def test_a_missing_file_is_named(tmp_path: Path, copies: tuple[Path, Path]) -> None:
    checkpoint, graphs = copies
    (graphs / "weights.data").unlink()
    error = refusal(graphs, checkpoint, tmp_path / "out")
    assert error.what == "the file is missing"
    assert error.where.endswith("weights.data")


def test_a_truncated_rom_is_refused(tmp_path: Path, copies: tuple[Path, Path]) -> None:
    checkpoint, graphs = copies
    rom = checkpoint / "rom.safetensors"
    with open(rom, "r+b") as file:
        file.truncate(rom.stat().st_size - 100)
    assert "the file has" in refusal(graphs, checkpoint, tmp_path / "out").what


def test_an_edited_rom_is_refused(tmp_path: Path, copies: tuple[Path, Path]) -> None:
    checkpoint, graphs = copies
    rom = checkpoint / "rom.safetensors"
    data = bytearray(rom.read_bytes())
    data[-1000] ^= 1
    rom.write_bytes(data)
    assert "contents changed" in refusal(graphs, checkpoint, tmp_path / "out").what


def test_a_rom_of_another_tokenizer_is_refused(tmp_path: Path, copies: tuple[Path, Path]) -> None:
    checkpoint, graphs = copies
    rom = checkpoint / "rom.safetensors"
    with SafetensorsFile(rom) as file:
        digest = file.metadata["tokenizer_sha256"]
    rom.write_bytes(rom.read_bytes().replace(digest.encode(), b"0" * 64))
    rewrite_manifest(checkpoint, metrics={})
    adopt(graphs, checkpoint)
    error = refusal(graphs, checkpoint, tmp_path / "out")
    assert error.what == f"tokenizer_sha256 is {'0' * 64}, the exported model needs {digest}"


def test_a_rom_that_does_not_fit_the_graphs_is_refused(tmp_path: Path, mixed: tuple[Path, Path, Path]) -> None:
    checkpoint, graphs = (shutil.copytree(source, tmp_path / source.name) for source in mixed[1:])
    ragged, hashed = checkpoint / "rom_2.safetensors", checkpoint / "rom_1.safetensors"
    with RomReader(ragged) as reader:
        counts = np.diff(reader.spec.addressing.tensors()["offsets"])
        counts[counts.argmax()] += 1
        counts[np.flatnonzero(counts == 2)[0]] -= 1
        offsets = np.concatenate(([0], np.cumsum(counts)))
        spec = dataclasses.replace(reader.spec, addressing=Ragged(offsets))
    ragged.unlink()
    with RomWriter(ragged, spec) as writer:
        writer.write(np.ones((spec.num_rows, spec.row_dim), np.float32))
    assert refusal(graphs, checkpoint, tmp_path / "out").what == "rows_per_token is 9, the exported model needs 8"
    shutil.copyfile(hashed, ragged)
    what = refusal(graphs, checkpoint, tmp_path / "out").what
    assert what == "addressing is ngram_hash, the exported model needs ragged"


def test_an_embedding_of_another_checkpoint_is_refused(tmp_path: Path, copies: tuple[Path, Path]) -> None:
    checkpoint, graphs = copies
    rewrite_manifest(checkpoint, metrics={"validation_loss": 1.0})
    adopt(graphs, checkpoint)
    assert refusal(graphs, checkpoint, tmp_path / "out").what.startswith("source_sha256 is ")


def test_graphs_without_rows_and_a_rom_are_refused(
    tmp_path: Path, copies: tuple[Path, Path], exported: Exported
) -> None:
    shutil.copytree(exported["dense"][1], tmp_path / "dense")
    adopt(tmp_path / "dense", copies[0])
    error = refusal(tmp_path / "dense", copies[0], tmp_path / "out")
    assert error.what == "the graphs need these ROM files: none; the checkpoint has: rom.safetensors"


@pytest.mark.parametrize("name", ["a/b", "", "-x", "two words"])
def test_a_name_that_cannot_be_a_file_is_refused(tmp_path: Path, exported: Exported, name: str) -> None:
    with pytest.raises(UserError, match="cannot name a bundle"):
        pack(exported["dense"][1], exported["dense"][0], tmp_path / "out", PackConfig(name=name))


def test_too_little_space_is_found_before_copying(
    tmp_path: Path, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 1000))
    error = refusal(exported["dense"][1], exported["dense"][0], tmp_path / "out")
    assert "MB are free" in error.what
    assert not list((tmp_path / "out").rglob("*.onnx"))


def test_an_edited_bundle_is_not_opened(tmp_path: Path, bundles: dict[str, Path]) -> None:
    shutil.copytree(bundles["meki"], tmp_path / "bundle")
    assert open_bundle(tmp_path / "bundle").name == "meki"
    rows = np.memmap(tmp_path / "bundle" / "rom.safetensors", np.uint8, mode="r+")
    rows[-1] ^= 1
    rows.flush()
    with pytest.raises(UserError, match="contents changed"):
        open_bundle(tmp_path / "bundle")
    with pytest.raises(UserError, match="output of `meki-edge tokenize`|no manifest.json"):
        open_bundle(tmp_path)
