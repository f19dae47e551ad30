"""Graphs in parts whose inputs and outputs are float16 and integers: the harness against the NumPy host."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from harness import IO_MODES, generate, ids_file
from onnx import TensorProto, helper, numpy_helper

from export.graph import ExportConfig, export
from export.onnx_decoder import OnnxDecoder, cpu_sessions
from meki_edge import tokens
from meki_edge.device import runner
from meki_edge.errors import UserError
from meki_edge.graph_spec import GraphSpec, Part, Quantization, TensorSpec
from meki_edge.rom.reader import RomReader
from meki_edge.rom.transcode import transcode

ROWS = Quantization(scale=2.0**-12, zero_point=30_000)
SIXTEEN = Quantization(scale=2.0**-11, zero_point=32_768)
TYPES: dict[str, tuple[str, Quantization | None]] = {
    "input_embeds": ("uint16", SIXTEEN),
    "attention_mask": ("uint8", Quantization(scale=100 / 255, zero_point=255)),
    "position_cos": ("int16", Quantization(scale=2.0**-14, zero_point=0)),
    "position_sin": ("float16", None),
    "hidden": ("float16", None),
    "past_key": ("uint8", Quantization(scale=0.05, zero_point=120)),
    "past_value": ("int8", Quantization(scale=0.05, zero_point=-3)),
    "memory_state": ("int16", Quantization(scale=2.0**-11, zero_point=5)),
    "memory_mask": ("float16", None),
    "logits": ("uint16", SIXTEEN),
}
TYPES |= {role.replace("past_", "present_"): TYPES[role] for role in ("past_key", "past_value")}
TYPES["present_memory_state"] = TYPES["memory_state"]
ROW_TYPES = {  # by ROM file: as the file has them, float16, and integers of another file's making
    0: ("uint16", ROWS),
    1: ("float16", None),
    2: ("float16", None),
    3: ("uint8", Quantization(scale=2.0**-5, zero_point=100)),
}
ONNX_TYPES = {name: getattr(TensorProto, name.upper()) for name in ("float16", "uint8", "int8", "uint16", "int16")}


def retyped(tensor: TensorSpec) -> TensorSpec:
    dtype, quantization = ROW_TYPES[tensor.index] if tensor.role == "memory_rows" else TYPES[tensor.role]
    return replace(tensor, dtype=dtype, quantization=quantization)


def retype(path: Path, part: Part) -> Part:
    """Rewrite a float32 graph so that it takes and gives the types above; the new contract."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    part = replace(part, inputs=tuple(map(retyped, part.inputs)), outputs=tuple(map(retyped, part.outputs)))
    before, after = [], []
    for tensor in (*part.inputs, *part.outputs):
        inner = f"{tensor.name}_float"
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == tensor.name else name for name in names]
        is_input = tensor in part.inputs
        (value,) = [v for v in (graph.input if is_input else graph.output) if v.name == tensor.name]
        value.type.tensor_type.elem_type = ONNX_TYPES[tensor.dtype]
        outside, inside = (tensor.name, inner) if is_input else (inner, tensor.name)
        if tensor.quantization is None:
            to = TensorProto.FLOAT if is_input else ONNX_TYPES[tensor.dtype]
            node = helper.make_node("Cast", [outside], [inside], to=to)
        else:
            constants = [f"{tensor.name}_scale", f"{tensor.name}_zero"]
            graph.initializer.append(numpy_helper.from_array(np.float32(tensor.quantization.scale), constants[0]))
            zero = np.array(tensor.quantization.zero_point, tensor.dtype)
            graph.initializer.append(numpy_helper.from_array(zero, constants[1]))
            kind = "DequantizeLinear" if is_input else "QuantizeLinear"
            node = helper.make_node(kind, [outside, *constants], [inside])
        (before if is_input else after).append(node)
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, path)
    return part


@pytest.fixture(scope="module")
def text(tokens_dir: Path) -> list[int]:
    return tokens.open_shards(tokens_dir).validation[:200].tolist()


@pytest.fixture(scope="module")
def typed(mixed: tuple[Path, Path, Path], tokens_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the model with every addressing in three parts, nothing of which is float32 outside."""
    bundle = tmp_path_factory.mktemp("typed") / "bundle"
    shapes = ExportConfig(context_length=64, prefill_tokens=8, verify_tokens=20, split_layers=(1,), head_part=True)
    export(mixed[1], tokens_dir, bundle, shapes)
    path = bundle / "graph_spec.json"
    spec = GraphSpec.from_json(json.loads(path.read_text()), path)
    graphs = {
        name: replace(graph, parts=tuple(retype(bundle / part.file, part) for part in graph.parts))
        for name, graph in spec.graphs.items()
    }
    path.write_text(json.dumps(asdict(replace(spec, **graphs))))
    for rom in spec.roms[1:]:
        shutil.copyfile(mixed[1] / rom.file, bundle / rom.file)
    transcode(mixed[1] / "rom.safetensors", bundle / "rom.safetensors", "static16", ROWS)
    return bundle


def host_of(bundle: Path) -> OnnxDecoder:
    spec = GraphSpec.from_json(json.loads((bundle / "graph_spec.json").read_text()), bundle)
    roms = [RomReader(bundle / rom.file) for rom in spec.roms]
    return OnnxDecoder(spec, RomReader(bundle / spec.embedding.file), roms)


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize("io", IO_MODES)
def test_greedy_tokens_are_the_hosts(typed: Path, text: list[int], tmp_path: Path, io: str) -> None:
    prefill, decode = (cpu_sessions(typed, graph) for graph in host_of(typed).spec.graphs.values())
    seen: set[int] = set()
    for length in (2, 8, 19):
        prompt = text[5 * length : 6 * length]
        host = host_of(typed)
        expected = [int(host.prefill(prefill, np.array(prompt))[-1].argmax())]
        while len(expected) < 14:
            expected.append(int(host.decode(decode, expected[-1]).argmax()))
        assert generate(typed, tmp_path, prompt, 14, "--io", io)["generated_tokens"] == expected
        seen.update(expected)
    assert len(seen) > 5, "the model says the same whatever the prompt"


@pytest.mark.usefixtures("binary")
def test_rows_are_read_for_the_part_that_takes_them(typed: Path, text: list[int], tmp_path: Path) -> None:
    """Every step's rows are all read, and its parts' time lies inside the step beside the wait."""
    arguments = ["--bundle", str(typed), "--trace-file", ids_file(tmp_path, text), "--drop-page-cache"]
    report = runner.run_json(["bench", *arguments, "--prompt-tokens", "20", "--generate-tokens", "6"])
    host = host_of(typed)
    decode = cpu_sessions(typed, host.spec.decode)
    assert report["generated_tokens"] == [int(host.decode(decode, token).argmax()) for token in text[:6]]
    for test in report["tests"]:
        for step in test["steps"]:
            assert step["rows_read"] > 0 and step["io_us"] > 0
            assert step["stall_us"] + step["run_us"] <= step["end_us"] - step["start_us"]


def without_quantization(spec: dict[str, Any]) -> None:
    spec["decode"]["parts"][0]["inputs"][0]["quantization"] = None


def another_cache(spec: dict[str, Any]) -> None:
    for tensor in spec["prefill"]["parts"][0]["outputs"]:
        if tensor["role"] == "present_key":
            tensor["quantization"]["zero_point"] += 1


def no_chain(spec: dict[str, Any]) -> None:
    spec["decode"]["parts"].reverse()


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (without_quantization, "integers need a 'quantization'"),
        (another_cache, "past_key[0] and what goes into it are not of one type"),
        (no_chain, "must have no input hidden"),
    ],
)
def test_a_contract_that_cannot_be(typed: Path, tmp_path: Path, spoil: Any, what: str) -> None:
    bundle = shutil.copytree(typed, tmp_path / "bundle")
    spec = json.loads((bundle / "graph_spec.json").read_text())
    spoil(spec)
    (bundle / "graph_spec.json").write_text(json.dumps(spec))
    with pytest.raises(UserError) as caught:
        generate(bundle, tmp_path, [1, 2, 3], 2)
    assert what in caught.value.what


@pytest.mark.usefixtures("binary")
def test_a_graph_of_another_type_than_the_contract(typed: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(typed, tmp_path / "bundle")
    spec = json.loads((bundle / "graph_spec.json").read_text())
    for tensor in spec["decode"]["parts"][0]["inputs"]:
        if tensor["role"] == "position_sin":
            tensor["dtype"] = "float32"
    (bundle / "graph_spec.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match="is not the same in all parts"):
        generate(bundle, tmp_path, [1, 2, 3], 2)
    for tensor in spec["decode"]["parts"][1]["inputs"]:
        if tensor["role"] == "position_sin":
            tensor["dtype"] = "float32"
    (bundle / "graph_spec.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match=r"ONNX Runtime: .*expected: \(tensor\(float16\)\)"):
        generate(bundle, tmp_path, [1, 2, 3], 2)
