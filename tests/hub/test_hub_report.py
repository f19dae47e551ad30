"""The figures of the report, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from export import hub_plots, hub_report
from export.hub_service import HubDevice
from export.hub_source import Arm, Unit
from export.hub_stage import page
from meki_edge.graph_spec import Context, Graph, GraphSpec, Part, RowFile, TensorSpec
from meki_edge.manifest import Manifest

DEVICE = HubDevice(name="Phone", os="15", attributes=("chipset:qualcomm-snapdragon-8-elite",))
CONFIG = {
    "prompt_lengths": [100, 128, 129, 4096],
    "target_runtime": "qnn_dlc",
    "qairt_version": None,
    "profiler_iterations": 100,
}


def arm(name: str, parts: int = 2, context: int = 1024, shorter: tuple[int, ...] = (), **metrics: Any) -> Arm:
    """An arm with a prefill of 128 tokens."""
    made = Manifest(schema=1, stage="pack", config={}, inputs={}, files={}, metrics=metrics, versions={})
    graphs = {"prefill": Graph(num_tokens=128, parts=()), "decode": Graph(num_tokens=1, parts=())}
    rows = RowFile(file="embedding.safetensors", row_dim=8)
    spec = GraphSpec(
        schema=2, vocab_size=10, hidden_size=8, num_hidden_layers=2, num_key_value_heads=1, head_dim=8, rope_theta=1e4,
        context_length=context, mask_value=-100.0, eos_token_id=None, embedding=rows, roms=(), **graphs,
        shorter=tuple(Context(context_length=length, **graphs) for length in shorter),
    )  # fmt: skip
    units = tuple(
        Unit(graph=graph, part=part, name=f"{graph}_{part}", files=()) for graph in spec.graphs for part in range(parts)
    )
    return Arm(name=name, directory=Path(name), manifest=made, spec=spec, units=units)


def profile(us: int, **changes: Any) -> dict[str, Any]:
    """As the client gives it."""
    summary = {
        "estimated_inference_time": us,
        "estimated_inference_peak_memory": 1000 * us,
        "first_load_time": 10 * us,
        "warm_load_time": 5 * us,
        "all_inference_times": [us - 1, us, us + 2],
    }
    detail = [
        {"name": "a", "type": "MatMul", "compute_unit": "NPU", "execution_time": us // 2},
        {"name": "b", "type": "Softmax", "compute_unit": "CPU", "execution_time": us // 4},
        {"name": "c", "type": "Reshape", "compute_unit": "NPU"},
    ]
    return {"execution_summary": {**summary, **changes}, "execution_detail": detail}


def test_parts_are_summed_and_arms_compared() -> None:
    times = {"dense": (2000, 3000, 400, 600), "meki": (2000, 3000, 500, 750)}
    profiles = {
        (DEVICE.name, name, graph): profile(us)
        for name, values in times.items()
        for graph, us in zip(("prefill_0", "prefill_1", "decode_0", "decode_1"), values, strict=True)
    }
    arms = [arm("dense", validation_loss=3.5), arm("meki", validation_loss=3.25)]
    result = hub_report.build(arms, [DEVICE], profiles, {}, service="https://x", config=CONFIG, jobs=[])
    dense, meki = result["measured"]["Phone"]["dense"], result["measured"]["Phone"]["meki"]
    assert dense["decode_us"] == 1000 and dense["tokens_per_s"] == 1000 and meki["tokens_per_s"] == 800
    assert meki["decode_ratio"] == 0.8 and "decode_ratio" not in dense
    assert dense["prefill_us"] == 5000 and dense["prefill_tokens_per_s"] == 25_600
    assert [dense[f"first_token_us_{length}"] for length in (100, 128, 129)] == [5000, 5000, 6000], "one is decoded"
    assert "first_token_us_4096" not in dense
    assert dense["first_load_us"] == 10_000 and dense["warm_load_us"] == 5000
    assert dense["peak_memory_bytes"] == 5_000_000, "the larger graph of each part"
    assert dense["decode_spread"] == [998, 1004] and dense["units"] == {"NPU": 4, "GPU": 0, "CPU": 2}
    assert [layer["name"] for layer in dense["graphs"]["decode_0"]["slowest"]] == ["a", "b"]
    assert result["headline"] == "Phone, decoded tokens/s: dense 1,000.0, meki 800.0 (0.800 of dense)."
    assert not any("loopback" in note for note in result["notes"])
    rows = dict(hub_report.cells(result, "Phone"))
    assert rows["Validation loss, nats a token"] == ["3.5000", "3.2500"]
    assert rows["Decode operators on NPU / GPU / CPU"] == ["4 / 0 / 2"] * 2
    assert len(hub_plots.plots(result)) == 3
    text = page(result)
    assert text.count("<svg") == 3 and "Slowest operators: meki, decode_1, Phone" in text


def test_shorter_contexts_have_rows_of_their_own() -> None:
    times = {"prefill": 9000, "decode": 1000, "prefill_c256": 3000, "decode_c256": 400}
    times |= {"prefill_c512": 5000, "decode_c512": 500}
    profiles = {(DEVICE.name, "short", f"{graph}_0"): profile(us) for graph, us in times.items()}
    profiles |= {(DEVICE.name, "one", f"{graph}_0"): profile(times[graph]) for graph in ("prefill", "decode")}
    arms = [arm("short", 1, shorter=(256, 512)), arm("one", 1)]
    config = {**CONFIG, "prompt_lengths": [100, 257, 600, 1000]}
    result = hub_report.build(arms, [DEVICE], profiles, {}, service="https://x", config=config, jobs=[])
    short, one = result["measured"]["Phone"]["short"], result["measured"]["Phone"]["one"]
    assert short["tokens_per_s"] == one["tokens_per_s"] == 1000 and one["decode_ratio"] == 1, "of the longest"
    # chunks end at 128 and 256 (context 256), 384 and 512 (context 512), 600 and beyond (context 1024)
    assert [short[f"first_token_us_{length}"] for length in (100, 257, 600, 1000)] == [3000, 6500, 25_000, 52_000]
    assert one["first_token_us_600"] == 5 * 9000
    rows = dict(hub_report.cells(result, "Phone"))
    assert rows["Decode, context 256: tokens/s"] == ["2,500.00", "–"]
    assert rows["Decode, context 512: a token"] == ["500 µs", "–"]
    assert rows["Prefill, context 512: a chunk"] == ["5.00 ms", "–"]
    assert "Figures that name no context are of the longest one." in result["notes"][2]
    assert "shorter_contexts [256, 512] and []" in result["notes"][3]
    (plot,) = [plot for plot in hub_plots.plots(result) if "by context" in plot.title]
    assert "short: context 256 0.400 milliseconds, context 512 0.500" in plot.alt and "one: context longest" in plot.alt
    assert "time of a token decoded, by context" in page(result)

    del profiles[DEVICE.name, "short", "prefill_c256_0"]
    result = hub_report.build(arms, [DEVICE], profiles, {}, service="https://x", config=config, jobs=[])
    assert result["measured"]["Phone"]["short"]["first_token_us_257"] == 10_500, "what was measured counts"


def test_a_head_apart_runs_once_a_prompt() -> None:
    def with_head(graph: Graph) -> Graph:
        hidden = TensorSpec(name="h", role="hidden", dtype="float32", shape=(1, graph.num_tokens, 8))
        mask = replace(hidden, name="m", role="attention_mask")
        body = Part(file="a", inputs=(hidden, mask), outputs=())
        logits = replace(hidden, name="l", role="logits", shape=(1, graph.num_tokens, 10))
        return replace(graph, parts=(body, Part(file="b", inputs=(hidden,), outputs=(logits,))))

    apart = arm("apart")
    assert apart.spec is not None and not apart.spec.head_is_apart
    apart = replace(apart, spec=apart.spec.map_graphs(with_head))
    assert apart.spec is not None and apart.spec.head_is_apart
    times = {"prefill_0": 2000, "prefill_1": 3000, "decode_0": 400, "decode_1": 600}
    profiles = {(DEVICE.name, "apart", graph): profile(us) for graph, us in times.items()}
    result = hub_report.build([apart], [DEVICE], profiles, {}, service="https://x", config=CONFIG, jobs=[])
    found = result["measured"]["Phone"]["apart"]
    assert (found["prefill_us"], found["decode_us"]) == (2000, 1000)
    assert [found[f"first_token_us_{length}"] for length in (100, 128, 129)] == [2600, 2600, 3000]


def test_what_a_service_leaves_out_is_left_out() -> None:
    missing = dict.fromkeys(("estimated_inference_peak_memory", "first_load_time", "warm_load_time"))
    bare = profile(700, all_inference_times=[], **missing)
    profiles = {(DEVICE.name, "one", f"{graph}_0"): bare for graph in ("prefill", "decode")}
    result = hub_report.build([arm("one", 1)], [DEVICE], profiles, {}, service="https://x", config=CONFIG, jobs=[])
    figures = result["measured"]["Phone"]["one"]
    assert figures["decode_us"] == 700 and figures["peak_memory_bytes"] is None and figures["first_load_us"] is None
    assert "Load, first" not in dict(hub_report.cells(result, "Phone")) and page(result)


def test_a_part_without_a_profile_gives_no_speed() -> None:
    profiles = {(DEVICE.name, "two", "decode_0"): profile(100)}
    result = hub_report.build([arm("two")], [DEVICE], profiles, {}, service="https://x", config=CONFIG, jobs=[])
    assert "tokens_per_s" not in result["measured"]["Phone"]["two"] and result["headline"] == "Nothing was profiled."


@pytest.mark.parametrize(
    ("soc", "count"), [("qualcomm-snapdragon-8-elite", 6), ("qualcomm-snapdragon-8gen3", 0), ("exynos", 0)]
)
def test_published_speeds_are_of_the_same_chip(soc: str, count: int) -> None:
    device = HubDevice(name="Phone", os="15", attributes=(f"chipset:{soc}",))
    result = hub_report.build([arm("one", 1)], [device], {}, {}, service="https://x", config=CONFIG, jobs=[])
    assert len(result["published"]) == count and all("published" in peer["source"] for peer in result["published"])


def test_shapes_that_differ_are_told() -> None:
    arms = [arm("one", 1), arm("two", 1, context=512, precision="w8a16")]
    result = hub_report.build(arms, [DEVICE], {}, {}, service="https://x", config=CONFIG, jobs=[])
    assert result["notes"] == [
        "The shapes of one and two differ (precision fp32 and w8a16, context_length 1024 and 512): "
        "their times are not comparable."
    ]
