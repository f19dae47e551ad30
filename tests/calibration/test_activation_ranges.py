"""Ranges: extremes by the graph itself against NumPy's, histograms against the values, keys across graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from calibration.affine import Range
from calibration.graphs import FloatGraphs
from calibration.ranges import SHIFT, Observations, mse_range, observe, percentile_range
from calibration.samples import gate_windows, training_windows
from calibration.structure import Groups
from export.onnx_decoder import OnnxDecoder
from meki_edge import graph_spec, tokens
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec
from meki_edge.rom.reader import RomReader

Mixed = tuple[Path, Path, Path]


def spec_of(directory: Path) -> GraphSpec:
    path = directory / graph_spec.FILE_NAME
    return GraphSpec.from_json(read_json(path), path)


@pytest.fixture(scope="module")
def graphs(mixed: Mixed) -> FloatGraphs:
    return FloatGraphs(mixed[2], spec_of(mixed[2]))


@pytest.fixture(scope="module")
def feeds(mixed: Mixed, tokens_dir: Path) -> dict[str, np.ndarray]:
    """A chunk of real text, as prefill takes it."""
    _, folded, exported = mixed
    spec = spec_of(exported)
    decoder = OnnxDecoder(
        spec, RomReader(exported / spec.embedding.file), [RomReader(folded / rom.file) for rom in spec.roms]
    )
    return decoder.feeds(spec.prefill, tokens.open_shards(tokens_dir).validation_windows(1, 16)[0])


def every_activation(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All float values of a graph, by making outputs of them with the onnx package."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=True))
    known = {value.name for value in model.graph.output}
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    for node in model.graph.node:
        for name in node.output:
            if name not in known and types.get(name) == onnx.TensorProto.FLOAT:
                model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return feeds | dict(zip(names, session.run(names, feeds), strict=True))


def test_extremes_in_the_graph_are_those_of_the_values(
    graphs: FloatGraphs, feeds: dict[str, np.ndarray], mixed: Mixed
) -> None:
    from calibration.graphs import session

    (part,) = graphs.spec.prefill.parts
    model, structure = graphs.load(part)
    watched = observe(model, structure, frozenset({"attention_mask"}), sample=True)
    made = session(model, mixed[2])
    names = [output.name for output in made.get_outputs()]
    results = dict(zip(names, made.run(names, feeds), strict=True))
    observations = Observations(histogram=True)
    observations.add(watched, results)
    values = every_activation(mixed[2] / part.file, feeds)
    ranges = observations.ranges(Groups(), "minmax", 100)
    assert len(watched) > 100
    peaks = 0
    for tensor in watched:
        array = values[tensor.name].astype(np.float64)
        found = ranges.of(tensor.key, "uint16")
        assert found.high == array.max()
        if tensor.has_peak:
            peaks += 1
            lowest = array.max(axis=-1).min() - 16
            assert found.low == pytest.approx(max(array.min(), lowest)) and found.low > -100
        else:
            assert found.low == array.min()
        sample = results[f"{tensor.name}/sample"]
        assert np.isin(sample, values[tensor.name]).all() and sample.size >= min(array.size, 1 << 13)
    assert peaks == 4, "three layers' scores and L3's"
    assert {tensor.name for tensor in watched}.isdisjoint({"attention_mask"})


def test_an_activation_has_one_key_in_both_graphs(graphs: FloatGraphs) -> None:
    (prefill,), (decode,) = graphs.spec.prefill.parts, graphs.spec.decode.parts
    one, other = graphs.load(prefill)[1], graphs.load(decode)[1]
    assert set(one.keys.values()) == set(other.keys.values())
    for index in range(3):
        for kind in ("key", "value"):
            names = [f"{when}_{kind}_{index}" for when in ("past", "present")]
            groups = {graphs.groups.of(structure.keys[name]) for structure in (one, other) for name in names}
            assert len(groups) == 1
    assert graphs.groups.of(one.keys["past_key_0"]) != graphs.groups.of(one.keys["past_key_1"])
    assert graphs.groups.of(one.keys["memory_state_0"]) == graphs.groups.of(one.keys["present_memory_state_0"])


def test_units(graphs: FloatGraphs) -> None:
    (part,) = graphs.spec.prefill.parts
    model, structure = graphs.load(part)
    for node in model.graph:
        for value in node.inputs:
            if value is not None and value.is_initializer() and value.name.startswith("model.layers."):
                assert structure.unit(node) == int(value.name.split(".")[2])
    head = next(node for node in model.graph if node.outputs[0].name == "logits")
    assert structure.unit(head) == 3


def counts_of(values: np.ndarray) -> np.ndarray:
    observations = Observations(histogram=True)
    observations.add_sample("x", values)
    return observations._counts["x"]


def full(values: np.ndarray) -> Range:
    return Range(low=float(values.min()), high=float(values.max()))


def test_percentile_against_numpy() -> None:
    values = np.random.default_rng(0).standard_t(2, 200_000).astype(np.float32)
    found = percentile_range(counts_of(values), full(values), 99.9)
    for end, share in ((found.low, 0.1), (found.high, 99.9)):
        assert end == pytest.approx(np.percentile(values, share), rel=2.0 ** -(23 - SHIFT))
    assert percentile_range(counts_of(values), full(values), 100) == full(values)
    positive = np.abs(values)
    assert percentile_range(counts_of(positive), full(positive), 99.9).low == positive.min(), "zero stays inside"


def test_mse_clips_outliers_and_nothing_else() -> None:
    """Against the true error of quantizing every value, for each of the ranges that are tried."""
    values = np.random.default_rng(1).standard_normal(1_000_000).astype(np.float32)
    values[0] = 30

    def error(found: Range) -> float:
        step = (found.high - found.low) / 255
        rounded = np.rint(values.clip(found.low, found.high).astype(np.float64) / step) * step
        return float(((rounded - values) ** 2).mean())

    found = mse_range(counts_of(values), full(values), "uint8")
    shares = np.linspace(1, 0.025, 40)
    tried = [
        error(Range(low=full(values).low * left, high=30 * right)) for left in shares[:4] for right in shares[24:]
    ]
    assert found.high < 15 and error(found) <= min(tried) * 1.02
    assert mse_range(counts_of(values), full(values), "uint16") == full(values), "16 bits round too finely to clip"


def test_observations_are_saved_and_merged(tmp_path: Path) -> None:
    once, twice = Observations(histogram=True), Observations(histogram=True)
    generator = np.random.default_rng(2)
    arrays = [generator.standard_normal(100).astype(np.float32) * 2**number for number in range(4)]
    for number, array in enumerate(arrays):
        for observations in (once, twice):
            observations.add_extremes("a", float(array.min()), float(array.max()))
            observations.add_sample("a", array)
        if number == 1:
            twice.save(tmp_path / "ranges.npz", windows=2)
            twice, progress = Observations.load(tmp_path / "ranges.npz")
            assert progress == {"windows": 2}
    for method in ("minmax", "percentile", "mse"):
        pair = [observations.ranges(Groups(), method, 99.0).of("a", "uint8") for observations in (once, twice)]
        assert pair[0] == pair[1]
    whole = np.concatenate(arrays)
    assert once.ranges(Groups(), "minmax", 100).of("a", "uint8") == full(whole)


def test_members_of_a_group_share_the_union() -> None:
    observations, groups = Observations(histogram=False), Groups()
    observations.add_extremes("a", -1, 2)
    observations.add_extremes("b", 0, 5)
    observations.add_extremes("c", -9, 9)
    groups.join("a", "b")
    groups.join("b", "never seen")
    ranges = observations.ranges(groups, "minmax", 100)
    assert ranges.of("a", "uint8") == ranges.of("never seen", "uint8") == Range(low=-1, high=5)
    ranges.fix("a", Range(low=-3, high=0))
    assert ranges.of("b", "uint8") == Range(low=-3, high=5) and ranges.of("c", "uint8").high == 9


def test_broken_values_and_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="NaN or infinite"):
        Observations(histogram=False).add_extremes("a", float("nan"), 1, name="linear_3")
    (tmp_path / "ranges.npz").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(UserError, match="not a file of collected ranges"):
        Observations.load(tmp_path / "ranges.npz")


def test_windows_are_spread_over_the_training_text(tokens_dir: Path) -> None:
    shards = tokens.open_shards(tokens_dir)
    found = list(training_windows(shards, 5, 64))
    assert np.stack(found).shape == (5, 64) and found[0].dtype == np.int64
    assert np.array_equal(found[0], shards.train[:64]) and np.array_equal(found[-1], shards.train[-64:])
    with pytest.raises(UserError, match="a calibration window needs"):
        training_windows(shards, 1, len(shards.train) + 1)
    places = len(shards.train) - 63
    most = training_windows(shards, places, 64)  # nothing is cut before it is asked for
    assert len(most) == places and all(np.array_equal(most[n], shards.train[n:][:64]) for n in (0, 7, places - 1))
    with pytest.raises(UserError, match=f"windows of 64 tokens start at {places} places") as caught:
        training_windows(shards, 10**8, 64)
    assert f"give at most {places}" in caught.value.fix


def test_the_gates_windows_are_those_of_validation(tokens_dir: Path) -> None:
    shards = tokens.open_shards(tokens_dir)
    for count in (3, 10**9):
        found = gate_windows(shards, count, 640)
        assert np.array_equal(np.stack(list(found)), shards.validation_windows(count, 640))
    assert len(found) == len(shards.validation) // 640
