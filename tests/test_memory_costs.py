"""The costs against the sizes that the papers publish."""

from __future__ import annotations

import pytest
from tiny import tiny_config

from meki_edge.memory import KINDS
from meki_edge.errors import UserError
from meki_edge.memory_costs import MemoryCost, cost, survey
from meki_edge.published_costs import Comparison, compare_published


def at(
    kind: str, layers: int, *, vocab: int, hidden: int, ffn: int = 64, total: int | None = None, **options: object
) -> MemoryCost:
    total = total or layers
    shape = tiny_config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=total,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    return cost(shape, kind, options, tuple(range(layers)))


@pytest.mark.parametrize("found", compare_published(), ids=lambda found: f"{found.kind} {found.shape} {found.quantity}")
def test_published_numbers(found: Comparison) -> None:
    assert found.agrees, f"{found.paper}: {found.published:,.0f} published, {found.ours:,.0f} counted"
    assert found.ours == pytest.approx(found.published, rel=6e-3), "no tolerance is wider than the papers' rounding"


def test_every_kind_has_published_numbers() -> None:
    assert {found.kind for found in compare_published()} == set(KINDS)


@pytest.mark.parametrize(("layers", "hidden", "width"), [(28, 1024, 128), (28, 2048, 256), (36, 2560, 512)])
def test_meki_keeps_two_matrices_and_a_norm_a_layer(layers: int, hidden: int, width: int) -> None:
    found = at("meki", layers, vocab=151_680, hidden=hidden, memory_dim=width)
    assert found.ram_parameters == layers * (2 * hidden * width + hidden)
    assert found.flops_per_token == layers * 4 * hidden * width
    assert found.rom_parameters == 151_680 * layers * width and found.rom_bytes == 2 * found.rom_parameters


def test_stem_saves_its_up_projection() -> None:
    found = at("stem", 5, vocab=128_256, hidden=2048, ffn=8192)
    assert found.ram_parameters == -5 * 2048 * 8192
    assert found.flops_per_token == -5 * 2 * 2048 * 8192


def test_staple_adds_nothing_that_stays_in_memory() -> None:
    assert at("staple", 12, vocab=100_352, hidden=2048, ffn=8192).ram_parameters == 0


def test_l3_flops() -> None:
    found = at("l3", 1, vocab=180_000, hidden=1024, num_entries=710_000, max_entries=512, up_dim=4096)
    assert found.flops_per_token == 2 * 512 * 1536 + 2 * 4096 * 512 + 2 * 1024 * (1024 + 4096)


def test_ple_folds_its_projection() -> None:
    found = at("ple", 35, vocab=262_144, hidden=2048, ffn=16_384, memory_dim=256, layer_scalar=False)
    assert found.training_parameters - found.ram_parameters - found.rom_parameters == pytest.approx(18.4e6, rel=3e-3)


def test_engram_flops_and_rows() -> None:
    found = at("engram", 2, vocab=129_280, hidden=2560, table_size=646_400, memory_dim=1280)
    assert found.rom_parameters == pytest.approx(2 * 16 * 646_400 * 80, rel=1e-2)
    assert found.flops_per_token == 2 * (4 * 2560 * 1280 + 8 * 2560)


def test_the_survey_names_every_kind() -> None:
    found = survey(tiny_config())
    assert [entry.kind for entry in found] == "meki ple stem staple l3 engram mole staple".split()
    assert all(entry.rom_bytes > 0 and entry.bytes_per_token > 0 for entry in found)


@pytest.mark.parametrize(
    ("precision", "bytes_of_128"),
    [("fp32", 512), ("fp16", 256), ("bf16", 256), ("int8", 130), ("int4", 72), ("int4_64", 68)],
)
def test_rom_bytes_by_precision(precision: str, bytes_of_128: int) -> None:
    found = cost(tiny_config(), "meki", {"memory_dim": 128}, (0, 2), precision)
    assert (found.rom_bytes, found.bytes_per_token) == (2 * 384 * bytes_of_128, 2 * bytes_of_128)


def test_static_rows_are_no_table_precision() -> None:
    with pytest.raises(UserError, match="static16 needs a calibrated range"):
        survey(tiny_config(), "static16")
